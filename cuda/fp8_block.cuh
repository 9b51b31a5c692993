// fp8_block, the scalar rules: 8-bit floats, one bfloat16 scale per block (docs/wire-format.md, fp8_block).
//
//   chunk:  [bfloat16 scales of block 0, 1, ...][zeros to 16][codes of element 0, 1, ...][zeros to 16]
//
// Scales are int_block's with another largest number, cap and threshold; a code is zc_to_mini of the element times inv,
// and 0 where inv is 0; decoding multiplies zc_from_mini of the code with the scale. Same names in
// zcomm/wire/fp8_block.py.
#ifndef ZCOMM_FP8_BLOCK_CUH
#define ZCOMM_FP8_BLOCK_CUH

#include "int_block.cuh"
#include "minifloat.cuh"

// The largest bfloat16 whose product with Form::LARGEST, 7 2^6 or 7 2^13, is finite: 146 2^112 or 146 2^105.
template <class Form>
ZC_FN zc_u32 zc_fp8_cap() {
  return (Form::BIAS == 7 ? 0x7b12u : 0x7792u) << 16;
}

// 2^-96 and 2^-80: above, numbers times scales, and sums of them, are never subnormal.
template <class Form>
ZC_FN zc_scale zc_fp8_scale(zc_u32 amax) {
  return zc_block_scale(amax, Form::LARGEST, zc_fp8_cap<Form>(), Form::BIAS == 7 ? ZC_TINY : 0x17800000u);
}

#endif
