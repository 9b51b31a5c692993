// int_asym, the scalar rules: unsigned codes of 2 to 8 bits from the block's least element up (docs/wire-format.md,
// int_asym).
//
//   chunk:  [scale and minimum of block 0, 1, ...: bfloat16 each][zeros to 16][planes of block 0, 1, ...][zeros to 16]
//
// Decoding adds the minimum to code times scale: the product is exact, the sum is the only rounding. No clamp is needed
// to nearest: no element is below the minimum, and |d inv| <= largest (1 + 2^-21). Same names in
// zcomm/wire/int_asym.py.
#ifndef ZCOMM_INT_ASYM_CUH
#define ZCOMM_INT_ASYM_CUH

#include "int_block.cuh"

// What a block's elements span.
struct zc_extent {
  zc_u32 amax;             // largest magnitude bits
  zc_i32 lowest, highest;  // as zc_in_order has them
};

// Where its codes lie. inv 0: every code is 0.
struct zc_range {
  zc_u32 bits;  // as it travels: bfloat16 scale, above it the bfloat16 minimum
  float inv, least;
};

ZC_FN zc_i32 zc_largest(zc_i32 bits) { return (1 << bits) - 1; }

// Bits of a float as an integer that orders itself like the float, -0 before 0; and back.
ZC_FN zc_i32 zc_in_order(zc_i32 bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The largest bfloat16 that is not above, as fp32 bits; none is tiny or a negative zero.
ZC_FN zc_u32 zc_bf16_below(zc_u32 bits) {
  const zc_u32 m = bits & ZC_MAGNITUDE, negative = bits >> 31;
  const zc_u32 down = (negative ? m + 0xffffu : m) & 0xffff0000u;
  const zc_u32 kept = m >= ZC_TINY ? down : negative && m > 0 ? ZC_TINY : 0u;
  return kept | (kept ? negative << 31 : 0u);
}

ZC_FN zc_range zc_asym_range(zc_extent extent, zc_i32 width) {
  const bool carries = extent.amax >= ZC_TINY && extent.amax < ZC_LIMIT;
  const zc_u32 least = carries ? zc_bf16_below((zc_u32)zc_in_order(extent.lowest)) : 0u;
  const float reach = zc_add(zc_float(carries ? (zc_u32)zc_in_order(extent.highest) : 0u), -zc_float(least));
  const bool spreads = reach >= zc_float(ZC_TINY);
  const zc_u32 up = (zc_bits(zc_div(spreads ? reach : 1.0f, (float)zc_largest(width))) + 0xffffu) & 0xffff0000u;
  zc_range range;
  range.bits = (spreads ? up >> 16 : extent.amax >= ZC_LIMIT ? ZC_NAN_SCALE : 0u) | least;
  range.inv = spreads ? zc_div(1.0f, zc_float(up)) : 0.0f;
  range.least = zc_float(least);
  return range;
}

ZC_FN zc_u32 zc_asym_code(float x, zc_range range) {
  return (zc_u32)zc_round(zc_mul(zc_add(x, -range.least), range.inv));
}

// Down, or up if what is left over and `chance`, sixteen random bits, add up to one.
ZC_FN zc_u32 zc_asym_code_by_chance(float x, zc_range range, zc_u32 chance, zc_i32 largest) {
  const float up = zc_mul((float)(zc_i32)chance, 1.52587890625e-05f);
  const zc_i32 q = (zc_i32)zc_add(zc_mul(zc_add(x, -range.least), range.inv), up);
  return (zc_u32)(q > largest ? largest : q);
}

ZC_FN float zc_asym_value(zc_u32 code, zc_u32 bits) {
  return zc_add(zc_mul((float)(zc_i32)code, zc_from_bf16((zc_u16)bits)), zc_from_bf16((zc_u16)(bits >> 16)));
}

#endif
