// fp8_block as the kernels' loops take it: the rules are those of fp8_block.cuh.
//
//   chunk:  [bfloat16 scales of block 0, 1, ...][zeros to 16][codes of element 0, 1, ...][zeros to 16]
#ifndef ZCOMM_FP8_BLOCK_CODEC_CUH
#define ZCOMM_FP8_BLOCK_CODEC_CUH

#include "block_codec.cuh"
#include "fp8_block.cuh"

template <class Form, int BLOCK_, bool CHANCE = false>  // Form: zc_e4m3 or zc_e5m2
struct Fp8Block : Blocks<8, BLOCK_, CHANCE>, WideScales, FloatCodes<Form, CHANCE> {
  using Blocks<8, BLOCK_, CHANCE>::Blocks;

  ZC_DEVICE zc_scale scale(const Amax &seen, zc_u32) const { return zc_fp8_scale<Form>(seen.amax()); }
};

#endif
