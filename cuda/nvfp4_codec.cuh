// nvfp4 as the kernels' loops take it: the rules are those of nvfp4.cuh.
//
//   chunk:  [fp32 scales of region 0, 1, ...][zeros to 16][e4m3 scales of block 0, 1, ...][zeros to 16]
//           [planes of block 0, 1, ...][zeros to 16]
//
// A region is a unit of work: a warp has it in registers, two blocks to a thread.
#ifndef ZCOMM_NVFP4_CODEC_CUH
#define ZCOMM_NVFP4_CODEC_CUH

#include "block_codec.cuh"
#include "nvfp4.cuh"

template <int BLOCK_, bool CHANCE = false>  // ZC_NVFP4_BLOCK, or 0 for any address
struct NvFp4 : Blocks<4, BLOCK_, CHANCE>, FloatCodes<zc_e2m1, CHANCE> {
  typedef zc_u8 ScaleBits;
  static constexpr int UNIT = BLOCK_ ? ZC_NVFP4_REGION : 0, COLUMNS = 8, SCALE_NBYTES = 1, UNIT_SCALE_NBYTES = 4;
  using Blocks<4, BLOCK_, CHANCE>::Blocks;

  zc_scale region = {0, 0.0f};
  ZC_DEVICE zc_i32 block() const { return ZC_NVFP4_BLOCK; }
  ZC_DEVICE zc_i32 unit() const { return ZC_NVFP4_REGION; }
  ZC_DEVICE zc_u32 unit_scale(zc_u32 amax) {
    region = zc_nvfp4_region(amax);
    return region.bits << 16;
  }
  ZC_DEVICE zc_scale scale(const Amax &seen, zc_u32) const { return zc_nvfp4_scale(seen.amax(), region, CHANCE); }
  ZC_DEVICE ScaleBits stored(const zc_scale &scale) const { return (ScaleBits)scale.bits; }
  ZC_DEVICE float shared(ScaleBits bits, zc_u32 region_bits) const {
    return zc_nvfp4_value(bits, zc_float(region_bits));
  }
};

#endif
