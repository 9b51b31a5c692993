// The four element types in memory: whole vectors at multiples of 16 bytes, or one by one at any address.
//
// Arithmetic is fp32, for raw:float64 fp64 (docs/wire-format.md, Elements). Each operation is rounded by itself.
#ifndef ZCOMM_ELEMENTS_CUH
#define ZCOMM_ELEMENTS_CUH

#include "wire.h"

#define ZC_DEVICE __device__ __forceinline__
#define ZC_RARE __device__ __noinline__  // what few threads need: one copy of it in a kernel

#if defined(__CUDA_ARCH__)
ZC_DEVICE double zc_double(zc_u64 bits) { return __longlong_as_double((zc_i64)bits); }
ZC_DEVICE zc_u64 zc_bits(double x) { return (zc_u64)__double_as_longlong(x); }
ZC_DEVICE double zc_mul(double a, double b) { return __dmul_rn(a, b); }
ZC_DEVICE double zc_add(double a, double b) { return __dadd_rn(a, b); }
ZC_DEVICE double zc_div(double a, double b) { return __ddiv_rn(a, b); }
#else
ZC_DEVICE double zc_double(zc_u64 bits) {
  double x;
  __builtin_memcpy(&x, &bits, 8);
  return x;
}
ZC_DEVICE zc_u64 zc_bits(double x) {
  zc_u64 bits;
  __builtin_memcpy(&bits, &x, 8);
  return bits;
}
ZC_DEVICE double zc_mul(double a, double b) { return a * b; }
ZC_DEVICE double zc_add(double a, double b) { return a + b; }
ZC_DEVICE double zc_div(double a, double b) { return a / b; }
#endif

// VECTOR is how many elements a thread moves at a time: 16 bytes of them. fp64 is moved one by one.
struct Float32 {
  typedef zc_u32 Bits;
  typedef float Sum;  // what sums of such elements run in
  static constexpr int NBYTES = 4, VECTOR = 4;
  static ZC_DEVICE float widen(Bits bits) { return zc_float(bits); }
  static ZC_DEVICE Bits narrow(float x) { return zc_bits(x); }
};
struct BFloat16 {
  typedef zc_u16 Bits;
  typedef float Sum;
  static constexpr int NBYTES = 2, VECTOR = 8;
  static ZC_DEVICE float widen(Bits bits) { return zc_from_bf16(bits); }
  static ZC_DEVICE Bits narrow(float x) { return zc_to_bf16(x); }
};
struct Float16 {
  typedef zc_u16 Bits;
  typedef float Sum;
  static constexpr int NBYTES = 2, VECTOR = 8;
  static ZC_DEVICE float widen(Bits bits) { return zc_from_fp16(bits); }
  static ZC_DEVICE Bits narrow(float x) { return zc_to_fp16(x); }
};
struct Float64 {
  typedef zc_u64 Bits;
  typedef double Sum;
  static constexpr int NBYTES = 8, VECTOR = 1;
  static ZC_DEVICE double widen(Bits bits) { return zc_double(bits); }
  static ZC_DEVICE Bits narrow(double x) { return zc_bits(x); }
};

template <class Bits>
ZC_RARE Bits load_bytes(const zc_u8 *p) {
  Bits bits = 0;
  for (int i = 0; i < (int)sizeof(Bits); ++i) bits = (Bits)(bits | (Bits)p[i] << (8 * i));
  return bits;
}

template <class Bits>
ZC_RARE void store_bytes(zc_u8 *p, Bits bits) {
  for (int i = 0; i < (int)sizeof(Bits); ++i) p[i] = (zc_u8)(bits >> (8 * i));
}

// An integer at any address, its bytes one by one if it has to be.
template <class Bits, bool ALIGNED = false>
ZC_DEVICE Bits load_bits(const zc_u8 *p) {
  return ALIGNED || (zc_u64)p % sizeof(Bits) == 0 ? *(const Bits *)p : load_bytes<Bits>(p);
}

template <class Bits, bool ALIGNED = false>
ZC_DEVICE void store_bits(zc_u8 *p, Bits bits) {
  if (ALIGNED || (zc_u64)p % sizeof(Bits) == 0)
    *(Bits *)p = bits;
  else
    store_bytes(p, bits);
}

// NBYTES = 4, 8 or a multiple of 16 bytes at a multiple of NBYTES, or of 16.
template <int NBYTES>
ZC_DEVICE void load_words(const zc_u8 *p, zc_u32 *words) {
  if constexpr (NBYTES == 4) {
    words[0] = *(const zc_u32 *)p;
  } else if constexpr (NBYTES == 8) {
    const uint2 pair = *(const uint2 *)p;
    words[0] = pair.x, words[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < NBYTES / 16; ++i) {
      const uint4 four = ((const uint4 *)p)[i];
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
  }
}

template <int NBYTES>
ZC_DEVICE void store_words(zc_u8 *p, const zc_u32 *words) {
  if constexpr (NBYTES == 4) {
    *(zc_u32 *)p = words[0];
  } else if constexpr (NBYTES == 8) {
    uint2 pair;
    pair.x = words[0], pair.y = words[1];
    *(uint2 *)p = pair;
  } else {
#pragma unroll
    for (int i = 0; i < NBYTES / 16; ++i) {
      uint4 four;
      four.x = words[4 * i], four.y = words[4 * i + 1], four.z = words[4 * i + 2], four.w = words[4 * i + 3];
      ((uint4 *)p)[i] = four;
    }
  }
}

// Elements e ... e + C - 1 of the n at p, as the numbers that sums run in. One alone (C = 1) may lie anywhere, and is 0
// behind the end; C > 1 are there, at a multiple of 16 bytes.
template <class E, int C>
ZC_DEVICE void load_elements(const zc_u8 *p, zc_i64 e, zc_i64 n, typename E::Sum *x) {
  p += e * E::NBYTES;
  if constexpr (C == 1) {
    x[0] = e < n ? E::widen(load_bits<typename E::Bits>(p)) : (typename E::Sum)0;
  } else {
    zc_u32 words[C * E::NBYTES / 4];
    load_words<C * E::NBYTES>(p, words);
#pragma unroll
    for (int i = 0; i < C; ++i) {
      if constexpr (E::NBYTES == 4)
        x[i] = E::widen(words[i]);
      else
        x[i] = E::widen((zc_u16)(words[i / 2] >> (16 * (i % 2))));
    }
  }
}

// The reverse. Sums in fp64 become anything but fp64 through fp32; the conversion rounds to nearest even.
template <class E, int C, class Sum>
ZC_DEVICE void store_elements(zc_u8 *p, zc_i64 e, zc_i64 n, const Sum *x) {
  p += e * E::NBYTES;
  if constexpr (C == 1) {
    if (e < n) store_bits<typename E::Bits>(p, E::narrow((typename E::Sum)x[0]));
  } else {
    zc_u32 words[C * E::NBYTES / 4];
#pragma unroll
    for (int i = 0; i < C; ++i) {
      const typename E::Bits bits = E::narrow((typename E::Sum)x[i]);
      if constexpr (E::NBYTES == 4)
        words[i] = bits;
      else
        words[i / 2] = i % 2 ? words[i / 2] | (zc_u32)bits << 16 : bits;
    }
    store_words<C * E::NBYTES>(p, words);
  }
}

#endif
