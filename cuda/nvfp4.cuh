// nvfp4, the scalar rules: e2m1 codes, 16 elements to an e4m3 scale, 1024 to an fp32 one (docs/wire-format.md, nvfp4).
//
//   chunk:  [fp32 scales of region 0, 1, ...][zeros to 16][e4m3 scales of block 0, 1, ...][zeros to 16]
//           [planes of block 0, 1, ...][zeros to 16]
//
// An element's code is zc_to_mini<zc_e2m1> of it times its block's inv, 0 where that is 0. Decoding multiplies the
// code's number with zc_nvfp4_value. Same names in zcomm/wire/nvfp4.py.
#ifndef ZCOMM_NVFP4_CUH
#define ZCOMM_NVFP4_CUH

#include "int_block.cuh"
#include "minifloat.cuh"

#define ZC_NVFP4_BLOCK 16
#define ZC_NVFP4_REGION 1024
#define ZC_NVFP4_NAN_SCALE 0x7fu
#define ZC_NVFP4_LARGEST 2688.0f       // 448 x 6
#define ZC_NVFP4_CAP (0x79c3u << 16)   // 195 2^109, the largest bfloat16 whose product with 2688 is finite

// The scale of a region, from the largest magnitude bits among those of its blocks that are finite. It travels as fp32:
// bits << 16.
ZC_FN zc_scale zc_nvfp4_region(zc_u32 amax) { return zc_block_scale(amax, ZC_NVFP4_LARGEST, ZC_NVFP4_CAP); }

ZC_FN float zc_nvfp4_value(zc_u32 code, float region) { return zc_mul(zc_from_mini<zc_e4m3>(code), region); }

// The scale of a block, from its largest magnitude bits. Codes by chance must not be cut off: then it is rounded up.
ZC_FN zc_scale zc_nvfp4_scale(zc_u32 amax, zc_scale region, bool by_chance = false) {
  const bool bad = amax >= ZC_INF;
  const float exact = zc_mul(zc_div(zc_float(bad ? 0u : amax), zc_e2m1::LARGEST), region.inv);
  zc_u32 code = zc_to_mini<zc_e4m3>(exact);
  if (by_chance && code < zc_e4m3::LARGEST_CODE && zc_from_mini<zc_e4m3>(code) < exact) ++code;
  zc_scale scale;
  scale.bits = bad ? ZC_NVFP4_NAN_SCALE : code;
  const float value = zc_nvfp4_value(code == 0 ? 0x38u : code, code == 0 ? 1.0f : zc_float(region.bits << 16));
  scale.inv = bad || code == 0 ? 0.0f : zc_div(1.0f, value);
  return scale;
}

ZC_FN zc_i64 zc_nvfp4_blocks_offset(zc_i64 n) {
  return zc_padded(4 * ((n + ZC_NVFP4_REGION - 1) / ZC_NVFP4_REGION));
}

#endif
