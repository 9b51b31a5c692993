// int_block, the scalar rules: signed codes of 2 to 8 bits, one bfloat16 scale per block (docs/wire-format.md,
// int_block).
//
//   chunk:  [bfloat16 scales of block 0, 1, ...][zeros to 16][codes of block 0, 1, ...][zeros to 16]
//   codes:  one plane per field of 8, 4, 2, 1 bits that adds up to the width, low bits first: field f is there if
//           bits & f
//   plane:  byte j holds elements j (low bits), j + r/k, j + 2r/k, ... of the block's r; k = 8 / field
//   shift:  a scale is 4 bytes, its bfloat16 and behind it the block's sixteen random bits
//
// No clamp is needed: with scale >= amax / qmax, |x * inv| <= qmax (1 + 2^-21) rounds to qmax at most, and at the cap
// |x * inv| < qmax + 1/2 does too (127.008 for 8 bits is the largest excess). Same names in zcomm/wire/int_block.py.
#ifndef ZCOMM_INT_BLOCK_CUH
#define ZCOMM_INT_BLOCK_CUH

#include "wire.h"

#define ZC_TINY 0x0f800000u   // 2^-96: blocks below travel as zeros, so no code or sum of codes is ever subnormal
#define ZC_LIMIT 0x7e800000u  // 2^126: where something is added to code times scale, a block that reaches it is bad
#define ZC_NAN_SCALE 0x7fc0u  // the scale of a block that holds a NaN or an Inf

struct zc_scale {
  zc_u32 bits;  // bfloat16, as it travels; shift: and the block's random bits above
  float inv;    // what elements are multiplied with; 0: every code of the block is 0
};

ZC_FN zc_i32 zc_qmax(zc_i32 bits) { return (1 << (bits - 1)) - 1; }

// Bits, as fp32, of the largest bfloat16 s whose product with qmax is finite.
// 2^p <= qmax < 2^(p+1) and s = m 2^(120-p) with 128 <= m < 256: s qmax < 2^128 asks for m qmax < 2^(8+p).
ZC_FN zc_u32 zc_scale_cap(zc_i32 bits) {
  zc_i32 p = bits - 2, m = ((1 << (8 + p)) - 1) / zc_qmax(bits);
  return (zc_u32)((254 - p) << 7 | (m - 128)) << 16;
}

// The scale of a block from the largest magnitude bits in it. No branches: loops over blocks vectorise.
// Rounding the quotient cannot leave the scale under amax / qmax: if amax is over s qmax for a bfloat16 s, it is so by
// a unit of fp32 at least, which is over half a unit of s after the division (qmax < 2^(bits-1)), so the quotient is
// over s.
ZC_FN zc_scale zc_block_scale(zc_u32 amax, float qmax, zc_u32 cap, zc_u32 tiny = ZC_TINY) {
  bool carries = amax >= tiny && amax < ZC_INF;
  float a = zc_float(carries ? amax : 0x3f800000u);
  zc_u32 up = (zc_bits(zc_div(a, qmax)) + 0xffffu) & 0xffff0000u;
  up = up > cap ? cap : up;
  zc_scale scale;
  scale.bits = carries ? up >> 16 : amax >= ZC_INF ? ZC_NAN_SCALE : 0u;
  scale.inv = carries ? zc_div(1.0f, zc_float(up)) : 0.0f;
  return scale;
}

ZC_FN zc_i32 zc_code(float x, float inv) { return zc_round(zc_mul(x, inv)); }

// The code by chance: down, or up if what is left over and `chance`, sixteen random bits, add up to one. 0x43000000 is
// 128.0f with its last bit worth 2^-16, so the sum is positive. A magnitude just above qmax is why a clamp is needed.
ZC_FN zc_i32 zc_code_by_chance(float x, float inv, zc_u32 chance, zc_i32 qmax) {
  zc_i32 q = (zc_i32)zc_add(zc_mul(x, inv), zc_float(0x43000000u | chance)) - 128;
  return q > qmax ? qmax : q < -qmax ? -qmax : q;
}

// "shift": every element of a block is rounded by the block's random bits, those of its first element, and decoded less
// what they added on the mean: zc_mul(code, scale) and zc_shift(bits), both exact, are added.
ZC_FN zc_scale zc_shift_scale(zc_u32 amax, zc_i32 width, zc_u32 chance) {
  zc_scale scale = zc_block_scale(amax >= ZC_LIMIT ? ZC_INF : amax, (float)zc_qmax(width), zc_scale_cap(width));
  scale.bits |= scale.inv == 0.0f ? 0u : chance << 16;
  return scale;
}
ZC_FN float zc_shift(zc_u32 bits) {
  return zc_mul(zc_add(0.5f, -zc_mul((float)(zc_i32)(bits >> 16), 1.52587890625e-05f)), zc_from_bf16((zc_u16)bits));
}

// Where the codes of a chunk of n elements begin, and how many bytes those of its first n elements take.
ZC_FN zc_i64 zc_codes_offset(zc_i64 n, zc_i64 block) { return zc_padded(2 * ((n + block - 1) / block)); }
ZC_FN zc_i64 zc_codes_nbytes(zc_i64 n, zc_i32 bits) { return (n + 7) / 8 * bits; }

#endif
