// mx_block as the kernels' loops take it: the rules are those of mx_block.cuh.
//
//   chunk:  [e8m0 scales of block 0, 1, ..., a byte each][zeros to 16][planes of block 0, 1, ...][zeros to 16]
#ifndef ZCOMM_MX_BLOCK_CODEC_CUH
#define ZCOMM_MX_BLOCK_CODEC_CUH

#include "block_codec.cuh"
#include "mx_block.cuh"

// Form: zc_e4m3 or zc_e2m1. BLOCK_: ZC_MX_BLOCK_ELEMS, or 0 for any address.
template <class Form, int BLOCK_, bool CHANCE = false>
struct MxBlock : Blocks<Form::BITS, BLOCK_, CHANCE>, FloatCodes<Form, CHANCE> {
  typedef zc_u8 ScaleBits;
  static constexpr int SCALE_NBYTES = 1;
  using Blocks<Form::BITS, BLOCK_, CHANCE>::Blocks;

  ZC_DEVICE zc_i32 block() const { return ZC_MX_BLOCK_ELEMS; }
  ZC_DEVICE zc_i32 unit() const { return ZC_MX_BLOCK_ELEMS; }
  ZC_DEVICE zc_scale scale(const Amax &seen, zc_u32) const { return zc_mx_scale<Form>(seen.amax(), CHANCE); }
  ZC_DEVICE ScaleBits stored(const zc_scale &scale) const { return (ScaleBits)scale.bits; }
  ZC_DEVICE float shared(ScaleBits bits) const { return zc_from_e8m0(bits); }
};

#endif
