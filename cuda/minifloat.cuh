// Floats of 4 and 8 bits, the scalar rules: e4m3 and e5m2 of the OCP 8-bit float specification, e2m1 of OCP MX.
//
//   e4m3   s eeee mmm   bias 7    largest 448 = 0x7e     0x7f is NaN, no Inf
//   e5m2   s eeeee mm   bias 15   largest 57344 = 0x7b   0x7c is Inf, 0x7d to 0x7f are NaN
//   e2m1   s ee m       bias 1    largest 6 = 0x7        neither
//
// Rounding is to nearest, ties to even, or by chance; what is too large becomes the largest. Same names in
// zcomm/wire/minifloat.py.
#ifndef ZCOMM_MINIFLOAT_CUH
#define ZCOMM_MINIFLOAT_CUH

#include "wire.h"

struct zc_e4m3 {
  static constexpr zc_i32 BITS = 8, MANTISSA = 3, BIAS = 7;
  static constexpr zc_u32 LARGEST_CODE = 0x7e, INFINITE = 0x80, NAN_FROM = 0x7f;
  static constexpr float LARGEST = 448.0f;
};
struct zc_e5m2 {
  static constexpr zc_i32 BITS = 8, MANTISSA = 2, BIAS = 15;
  static constexpr zc_u32 LARGEST_CODE = 0x7b, INFINITE = 0x7c, NAN_FROM = 0x7d;
  static constexpr float LARGEST = 57344.0f;
};
struct zc_e2m1 {
  static constexpr zc_i32 BITS = 4, MANTISSA = 1, BIAS = 1;
  static constexpr zc_u32 LARGEST_CODE = 0x7, INFINITE = 0x8, NAN_FROM = 0x8;  // it has neither
  static constexpr float LARGEST = 6.0f;
};

// The nearest code of a number that is no NaN, its sign in the highest of Form::BITS bits.
template <class Form>
ZC_FN zc_u32 zc_to_mini(float x) {
  const zc_i32 shift = 23 - Form::MANTISSA;
  const zc_u32 u = zc_bits(x), m = u & ZC_MAGNITUDE;
  const zc_u32 normal = ((m + ((1u << (shift - 1)) - 1) + ((m >> shift) & 1u)) >> shift) -
                        ((zc_u32)(127 - Form::BIAS) << Form::MANTISSA);
  // A unit of this number is the format's smallest step.
  const zc_u32 anchor = (zc_u32)(127 + 24 - Form::BIAS - Form::MANTISSA) << 23;
  const zc_u32 subnormal = zc_bits(zc_add(zc_float(m), zc_float(anchor))) - anchor;
  const zc_u32 code = m < (zc_u32)(128 - Form::BIAS) << 23 ? subnormal : normal;
  return (code > Form::LARGEST_CODE ? Form::LARGEST_CODE : code) | u >> 31 << (Form::BITS - 1);
}

// One of the two codes around a number that is no NaN, by sixteen random bits, so that their mean is the number: its
// steps from the last power of two, or from 0, are rounded as integers are by zc_code_by_chance. All steps of a power
// of two lead to the next one.
template <class Form>
ZC_FN zc_u32 zc_to_mini_by_chance(float x, zc_u32 chance) {
  const zc_u32 u = zc_bits(x), m = u & ZC_MAGNITUDE, smallest = (zc_u32)(128 - Form::BIAS) << 23;  // normal one
  const float subnormal = zc_mul(zc_float(m), zc_float((zc_u32)(126 + Form::BIAS + Form::MANTISSA) << 23));
  const float normal = zc_float((m & 0x7fffffu) | (zc_u32)(127 + Form::MANTISSA) << 23);
  const float steps = m < smallest ? subnormal : normal;
  const zc_u32 powers = m < smallest ? 0u : (m - smallest) >> 23;
  const zc_u32 count = (zc_u32)(zc_i32)zc_add(steps, zc_float(0x43000000u | chance)) - 128;
  const zc_u32 code = (powers << Form::MANTISSA) + count;
  return (code > Form::LARGEST_CODE ? Form::LARGEST_CODE : code) | u >> 31 << (Form::BITS - 1);
}

// The number of a code; any bits above Form::BITS must be 0.
template <class Form>
ZC_FN float zc_from_mini(zc_u32 code) {
  const zc_u32 sign = code >> (Form::BITS - 1), magnitude = code & ((1u << (Form::BITS - 1)) - 1);
  const zc_u32 m = magnitude << (23 - Form::MANTISSA), smallest = (zc_u32)(128 - Form::BIAS) << 23;  // normal one
  const zc_u32 normal = m + ((zc_u32)(127 - Form::BIAS) << 23);
  const zc_u32 subnormal = zc_bits(zc_add(zc_float(m + smallest), -zc_float(smallest)));  // exact
  zc_u32 bits = magnitude < (1u << Form::MANTISSA) ? subnormal : normal;
  bits = magnitude >= Form::INFINITE ? ZC_INF : bits;
  bits = magnitude >= Form::NAN_FROM ? 0x7fc00000u : bits;
  return zc_float(bits | sign << 31);
}

#endif
