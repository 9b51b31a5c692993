// int_block as the kernels' loops take it: the rules are those of int_block.cuh.
//
//   chunk:  [bfloat16 scales of block 0, 1, ...][zeros to 16][planes of block 0, 1, ...][zeros to 16]
//
// IntBlock<8, 256> and IntBlock<4, 128> have constants to unroll; IntBlock<0, 0> is any width and block.
#ifndef ZCOMM_INT_BLOCK_CODEC_CUH
#define ZCOMM_INT_BLOCK_CODEC_CUH

#include "codec_kernels.cuh"
#include "int_block.cuh"

template <int BITS, int BLOCK_>
struct IntBlock {
  typedef zc_scale Scale;
  typedef zc_u16 ScaleBits;
  typedef float Sum;
  static constexpr bool HAS_BLOCKS = true;
  static constexpr int BLOCK = BLOCK_, SEGMENTS = BLOCK_ ? zc_segments(BITS) : 8, COLUMNS = 0, SCALE_NBYTES = 2;

  zc_i32 bits_, block_;
  ZC_DEVICE explicit IntBlock(const zc_settings &settings) : bits_(settings.bits), block_(settings.block) {}
  ZC_DEVICE zc_i32 bits() const { return BITS ? BITS : bits_; }
  ZC_DEVICE zc_i32 block() const { return BLOCK ? BLOCK : block_; }

  ZC_DEVICE Scale scale(zc_u32 amax) const {
    return zc_block_scale(amax, (float)zc_qmax(bits()), zc_scale_cap(bits()));
  }
  ZC_DEVICE ScaleBits stored(const Scale &scale) const { return (ScaleBits)scale.bits; }
  ZC_DEVICE zc_u32 code(float x, const Scale &scale, zc_i64) const {
    return scale.inv == 0.0f ? 0u : (zc_u32)zc_code(x, scale.inv);
  }
  ZC_DEVICE float value(zc_u32 code, ScaleBits scale) const {
    const zc_i32 unused = 32 - bits();
    return zc_mul((float)((zc_i32)(code << unused) >> unused), zc_from_bf16(scale));
  }
};

#endif
