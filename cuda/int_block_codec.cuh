// int_block as the kernels' loops take it: the rules are those of int_block.cuh.
//
//   chunk:  [scales of block 0, 1, ...][zeros to 16][planes of block 0, 1, ...][zeros to 16]
//   scale:  bfloat16; IntShift: and behind it the block's random bits, 2 bytes
//
// IntBlock<8, 256>, IntBlock<4, 128> and the like have constants to unroll; IntBlock<0, 0> is any width and block.
#ifndef ZCOMM_INT_BLOCK_CODEC_CUH
#define ZCOMM_INT_BLOCK_CODEC_CUH

#include "block_codec.cuh"

// A number from -2^(bits - 1) on.
ZC_DEVICE float signed_code(zc_u32 code, zc_i32 bits) { return (float)((zc_i32)(code << (32 - bits)) >> (32 - bits)); }

template <int BITS, int BLOCK_, bool CHANCE = false>
struct IntBlock : Blocks<BITS, BLOCK_, CHANCE>, WideScales {
  using Blocks<BITS, BLOCK_, CHANCE>::Blocks;
  using Blocks<BITS, BLOCK_, CHANCE>::bits;

  ZC_DEVICE zc_scale scale(const Amax &seen, zc_u32) const {
    return zc_block_scale(seen.amax(), (float)zc_qmax(bits()), zc_scale_cap(bits()));
  }
  ZC_DEVICE zc_u32 code(float x, const zc_scale &scale, zc_u32 chance) const {
    return (zc_u32)(CHANCE ? zc_code_by_chance(x, scale.inv, chance, zc_qmax(bits())) : zc_code(x, scale.inv));
  }
  ZC_DEVICE float value(zc_u32 code, float scale) const { return zc_mul(signed_code(code, bits()), scale); }
};

// Rounded by one random number for each block, which is taken off again.
template <int BITS, int BLOCK_>
struct IntShift : Blocks<BITS, BLOCK_, false> {
  typedef zc_u32 ScaleBits;
  struct Shared {
    float scale, shift;
  };
  static constexpr bool BY_SHIFT = true;
  static constexpr int SCALE_NBYTES = 4;
  using Blocks<BITS, BLOCK_, false>::Blocks;
  using Blocks<BITS, BLOCK_, false>::bits;

  ZC_DEVICE zc_scale scale(const Amax &seen, zc_u32 chance) const {
    return zc_shift_scale(seen.amax(), bits(), chance);
  }
  ZC_DEVICE ScaleBits stored(const zc_scale &scale) const { return scale.bits; }
  ZC_DEVICE zc_u32 code(float x, const zc_scale &scale, zc_u32) const {
    return (zc_u32)zc_code_by_chance(x, scale.inv, scale.bits >> 16, zc_qmax(bits()));
  }
  ZC_DEVICE Shared shared(ScaleBits bits) const { return Shared{zc_from_bf16((zc_u16)bits), zc_shift(bits)}; }
  ZC_DEVICE float value(zc_u32 code, const Shared &of) const {
    return zc_add(zc_mul(signed_code(code, bits()), of.scale), of.shift);
  }
};

#endif
