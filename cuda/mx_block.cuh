// mx_block, the scalar rules: mxfp8 (e4m3) and mxfp4 (e2m1), 32 elements to a power of two (docs/wire-format.md,
// mx_block).
//
//   chunk:  [e8m0 scales of block 0, 1, ..., a byte each][zeros to 16][planes of block 0, 1, ...][zeros to 16]
//
// Source: OCP Microscaling Formats specification 1.0, section 6.3. Same names in zcomm/wire/mx_block.py.
#ifndef ZCOMM_MX_BLOCK_CUH
#define ZCOMM_MX_BLOCK_CUH

#include "int_block.cuh"
#include "minifloat.cuh"

#define ZC_MX_BLOCK_ELEMS 32
#define ZC_MX_NAN_SCALE 0xffu

// The scale of a block from its largest magnitude bits: 2^(bits - 127), or NaN; inv 0 means that every code is 0. Codes
// by chance must not be cut off: where the largest would be, the scale is twice as large, unless decoding could
// overflow.
template <class Form>
ZC_FN zc_scale zc_mx_scale(zc_u32 amax, bool by_chance = false) {
  const zc_u32 largest_exponent = Form::BITS == 8 ? 8 : 2, fraction = 0x7fffffu;
  const bool carries = amax >= ZC_TINY && amax < ZC_INF;
  const bool doubled = by_chance && amax < 0x7f000000u && (amax & fraction) > (zc_bits(Form::LARGEST) & fraction);
  const zc_u32 exponent = (amax >> 23) - largest_exponent + (doubled ? 1 : 0);
  zc_scale scale;
  scale.bits = carries ? exponent : amax >= ZC_INF ? ZC_MX_NAN_SCALE : 0u;
  scale.inv = carries ? zc_float((254 - exponent) << 23) : 0.0f;
  return scale;
}

ZC_FN float zc_from_e8m0(zc_u32 scale) {
  return zc_float(scale == ZC_MX_NAN_SCALE ? 0x7fc00000u : scale == 0 ? 0x00400000u : scale << 23);
}

#endif
