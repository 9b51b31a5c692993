// What codecs with blocks have in common, for the kernels' loops (codec_kernels.cuh says what a codec must have).
//
//   Blocks<BITS, BLOCK, CHANCE>  codes of BITS bits, BLOCK elements to a scale, which are the unit of work
//   Amax                         what most scales depend on
//   WideScales                   a bfloat16 for each block
//   FloatCodes<Form, CHANCE>     codes that are small floats
//
// BLOCK is a constant to unroll, or 0 for the instance that takes any block, at any address. Where BITS is 0 the width
// is known at run time too. CHANCE: rounded by chance, which only encoding knows.
#ifndef ZCOMM_BLOCK_CODEC_CUH
#define ZCOMM_BLOCK_CODEC_CUH

#include "codec_kernels.cuh"
#include "int_block.cuh"
#include "minifloat.cuh"

// The largest magnitude bits.
struct Amax {
  zc_u32 numbers[1] = {0};

  ZC_DEVICE void see(float x) { numbers[0] = larger(numbers[0], zc_bits(x) & ZC_MAGNITUDE); }
  ZC_DEVICE zc_u32 amax() const { return numbers[0]; }
  ZC_DEVICE zc_u32 finite() const { return amax() < ZC_INF ? amax() : 0; }
};

template <int BITS, int BLOCK_, bool CHANCE>
struct Blocks {
  typedef float Sum;
  typedef float Shared;
  typedef Amax Seen;
  typedef zc_scale Scale;
  static constexpr bool HAS_BLOCKS = true, ROTATED = false, BY_CHANCE = CHANCE, BY_SHIFT = false;
  static constexpr int BLOCK = BLOCK_, UNIT = BLOCK_, SEGMENTS = BLOCK_ ? zc_segments(BITS) : 8;
  static constexpr int COLUMNS = CHANCE ? 8 : 0;  // the elements of one call of the generator
  static constexpr int UNIT_SCALE_NBYTES = 0;

  zc_i32 bits_, block_;
  ZC_DEVICE explicit Blocks(const zc_settings &settings) : bits_(settings.bits), block_(settings.block) {}
  ZC_DEVICE zc_i32 bits() const { return BITS ? BITS : bits_; }
  ZC_DEVICE zc_i32 block() const { return BLOCK ? BLOCK : block_; }
  ZC_DEVICE zc_i32 unit() const { return block(); }
};

struct WideScales {
  typedef zc_u16 ScaleBits;
  static constexpr int SCALE_NBYTES = 2;
  static ZC_DEVICE ScaleBits stored(const zc_scale &scale) { return (ScaleBits)scale.bits; }
  static ZC_DEVICE float shared(ScaleBits bits) { return zc_from_bf16(bits); }
};

template <class Form, bool CHANCE>
struct FloatCodes {
  static ZC_DEVICE zc_u32 code(float x, const zc_scale &scale, zc_u32 chance) {
    const float scaled = zc_mul(x, scale.inv);
    return CHANCE ? zc_to_mini_by_chance<Form>(scaled, chance) : zc_to_mini<Form>(scaled);
  }
  static ZC_DEVICE float value(zc_u32 code, float scale) { return zc_mul(zc_from_mini<Form>(code), scale); }
};

#endif
