// The scalar arithmetic of the wire, shared by the CPU loops and the CUDA kernels: rounding and element formats.
//
// Included by g++ and clang++ (host: -ffp-contract=off, no -ffast-math), nvcc and NVRTC (which has no system headers,
// so there are none here). The rules are those of docs/wire-format.md and zcomm/wire/elements.py, bit for bit:
//   * every float operation is one IEEE-754 binary32 operation, rounded to nearest even and never contracted
//     (device: the __f*_rn intrinsics);
//   * magnitudes are compared as integers, so NaN and Inf order themselves and loops vectorise.
#ifndef ZCOMM_WIRE_H
#define ZCOMM_WIRE_H

typedef unsigned char zc_u8;
typedef signed char zc_i8;
typedef unsigned short zc_u16;
typedef unsigned int zc_u32;
typedef int zc_i32;
typedef long long zc_i64;
typedef unsigned long long zc_u64;

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define ZC_FN static __host__ __device__ __forceinline__
#else
#define ZC_FN static inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
ZC_FN zc_u32 zc_bits(float x) { return __float_as_uint(x); }
ZC_FN float zc_float(zc_u32 bits) { return __uint_as_float(bits); }
ZC_FN float zc_mul(float a, float b) { return __fmul_rn(a, b); }
ZC_FN float zc_add(float a, float b) { return __fadd_rn(a, b); }
ZC_FN float zc_div(float a, float b) { return __fdiv_rn(a, b); }
#else
ZC_FN zc_u32 zc_bits(float x) {
  zc_u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
ZC_FN float zc_float(zc_u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
ZC_FN float zc_mul(float a, float b) { return a * b; }
ZC_FN float zc_add(float a, float b) { return a + b; }
ZC_FN float zc_div(float a, float b) { return a / b; }
#endif

#define ZC_WIRE_ALIGNMENT 16        // chunks and their parts are padded to this with zero bytes
#define ZC_MAGNITUDE 0x7fffffffu    // all bits of a float but its sign
#define ZC_INF 0x7f800000u          // +Inf; magnitudes above are NaN
#define ZC_BF16_QUIET_NAN 0x7fc0u
#define ZC_FP16_QUIET_NAN 0x7e00u

ZC_FN zc_i64 zc_padded(zc_i64 nbytes) { return (nbytes + ZC_WIRE_ALIGNMENT - 1) & ~(zc_i64)(ZC_WIRE_ALIGNMENT - 1); }

// Round to the nearest integer, ties to even, for |x| <= 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
ZC_FN zc_i32 zc_round(float x) { return (zc_i32)(zc_bits(zc_add(x, 12582912.0f)) - 0x4b400000u); }

ZC_FN float zc_from_bf16(zc_u16 h) { return zc_float((zc_u32)h << 16); }

ZC_FN zc_u16 zc_to_bf16(float x) {
  zc_u32 u = zc_bits(x);
  zc_u32 kept = u >> 16;
  zc_u32 rounded = (u + 0x7fffu + (kept & 1u)) >> 16;
  zc_u32 quiet = (kept & 0x8000u) | ZC_BF16_QUIET_NAN;
  return (zc_u16)((u & ZC_MAGNITUDE) > ZC_INF ? quiet : rounded);
}

ZC_FN float zc_from_fp16(zc_u16 h) {
  zc_u32 m = (zc_u32)(h & 0x7fffu) << 13;
  zc_u32 normal = m + (112u << 23);                                       // rebias the exponent from 15 to 127
  zc_u32 special = (m + (224u << 23)) | (m > 0x0f800000u ? 0x00400000u : 0u);  // Inf, and NaN made quiet
  zc_u32 subnormal = zc_bits(zc_add(zc_float(m + (113u << 23)), -6.103515625e-05f));  // exact: 2^-14 (1 + f) - 2^-14
  zc_u32 magnitude = m >= 0x0f800000u ? special : m >= 0x00800000u ? normal : subnormal;
  return zc_float(magnitude | (zc_u32)(h & 0x8000u) << 16);
}

ZC_FN zc_u16 zc_to_fp16(float x) {
  zc_u32 u = zc_bits(x), m = u & ZC_MAGNITUDE;
  zc_u32 normal = ((m + 0xfffu + ((m >> 13) & 1u)) >> 13) - (112u << 10);
  zc_u32 subnormal = zc_bits(zc_add(zc_float(m), 0.5f)) - 0x3f000000u;  // one unit of 0.5f is half fp16's smallest
  zc_u32 finite = m < 0x38800000u ? subnormal : normal;
  zc_u32 magnitude = m > ZC_INF ? ZC_FP16_QUIET_NAN : m >= 0x477ff000u ? 0x7c00u : finite;
  return (zc_u16)(magnitude | ((u >> 16) & 0x8000u));
}

#endif
