// int_asym as the kernels' loops take it: the rules are those of int_asym.cuh.
//
//   chunk:  [scale and minimum of block 0, 1, ...: bfloat16 each][zeros to 16][planes of block 0, 1, ...][zeros to 16]
#ifndef ZCOMM_INT_ASYM_CODEC_CUH
#define ZCOMM_INT_ASYM_CODEC_CUH

#include "block_codec.cuh"
#include "int_asym.cuh"

// The largest magnitude bits; the place of the highest element from below, and of the lowest from above.
struct Extent {
  zc_u32 numbers[3] = {0, 0, 0};

  ZC_DEVICE void see(float x) {
    const zc_u32 place = (zc_u32)zc_in_order((zc_i32)zc_bits(x)) ^ 0x80000000u;
    numbers[0] = larger(numbers[0], zc_bits(x) & ZC_MAGNITUDE);
    numbers[1] = larger(numbers[1], place);
    numbers[2] = larger(numbers[2], ~place);
  }
  ZC_DEVICE zc_extent extent() const {
    return {numbers[0], (zc_i32)(~numbers[2] ^ 0x80000000u), (zc_i32)(numbers[1] ^ 0x80000000u)};
  }
  ZC_DEVICE zc_u32 finite() const { return 0; }  // of units that have a scale; these have none
};

template <int BITS, int BLOCK_, bool CHANCE = false>
struct IntAsym : Blocks<BITS, BLOCK_, CHANCE> {
  typedef Extent Seen;
  typedef zc_range Scale;
  typedef zc_u32 ScaleBits;
  typedef zc_u32 Shared;
  static constexpr int SCALE_NBYTES = 4;
  using Blocks<BITS, BLOCK_, CHANCE>::Blocks;
  using Blocks<BITS, BLOCK_, CHANCE>::bits;

  ZC_DEVICE zc_range scale(const Extent &seen, zc_u32) const { return zc_asym_range(seen.extent(), bits()); }
  ZC_DEVICE ScaleBits stored(const zc_range &range) const { return range.bits; }
  ZC_DEVICE zc_u32 code(float x, const zc_range &range, zc_u32 chance) const {
    return CHANCE ? zc_asym_code_by_chance(x, range, chance, zc_largest(bits())) : zc_asym_code(x, range);
  }
  ZC_DEVICE Shared shared(ScaleBits bits) const { return bits; }
  ZC_DEVICE float value(zc_u32 code, Shared bits) const { return zc_asym_value(code, bits); }
};

#endif
