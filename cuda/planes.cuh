// Codes of 2 to 8 bits as planes, the one packing rule for every width (docs/wire-format.md, Planes).
//
//   block of r elements:  S segments of `stride` = r/S columns; element s * stride + t is segment s, column t
//   plane of `field` bits, k = 8 / field:
//     byte m * stride + t holds, from its low bits up, segments m, m + S/k, m + 2S/k, ... of column t     m < S/k
//
// S is a multiple of k for every field of the width, so the bytes of a column hold the elements of that column and no
// others: a thread that has C neighbouring columns packs and unpacks them alone.
#ifndef ZCOMM_PLANES_CUH
#define ZCOMM_PLANES_CUH

#include "elements.cuh"

// Segments that a width needs: 8 over its smallest field.
ZC_FN constexpr int zc_segments(int bits) { return bits & 1 ? 8 : bits & 2 ? 4 : bits & 4 ? 2 : 1; }

// Calls f(first byte of C neighbouring ones, the segment of their lowest bits, segments from one field to the next,
// field, bits of the code below it) for all bytes that hold columns t ... t + C - 1.
template <int S, class F>
ZC_DEVICE void each_run(zc_i32 bits, zc_i64 t, zc_i64 stride, F f) {
  zc_i32 low = 0;
#pragma unroll
  for (int log = 3; log >= 0; --log) {
    const int field = 1 << log, runs = S * field / 8;
    if (bits & field) {
#pragma unroll
      for (int m = 0; m < runs; ++m) f(t + m * stride, m, runs, field, low);
      t += runs * stride;
      low += field;
    }
  }
}

// codes[s * C + c], low `bits` bits used, is segment s, column t + c. C > 1: planes + t is a multiple of C.
template <int S, int C>
ZC_DEVICE void store_planes(zc_u8 *planes, zc_i32 bits, zc_i64 t, zc_i64 stride, const zc_u32 *codes) {
  each_run<S>(bits, t, stride, [&](zc_i64 at, int m, int runs, int field, zc_i32 low) {
    zc_u32 words[(C + 3) / 4] = {};
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
      for (int i = 0; i < 8 / field; ++i) {
        const zc_u32 part = codes[(m + i * runs) * C + c] >> low & ((1u << field) - 1);
        words[c / 4] |= part << (8 * (c % 4) + i * field);
      }
    if constexpr (C == 1)
      planes[at] = (zc_u8)words[0];
    else
      store_words<C>(planes + at, words);
  });
}

template <int S, int C>
ZC_DEVICE void load_planes(const zc_u8 *planes, zc_i32 bits, zc_i64 t, zc_i64 stride, zc_u32 *codes) {
#pragma unroll
  for (int i = 0; i < S * C; ++i) codes[i] = 0;
  each_run<S>(bits, t, stride, [&](zc_i64 at, int m, int runs, int field, zc_i32 low) {
    zc_u32 words[(C + 3) / 4];
    if constexpr (C == 1)
      words[0] = planes[at];
    else
      load_words<C>(planes + at, words);
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
      for (int i = 0; i < 8 / field; ++i) {
        const zc_u32 part = words[c / 4] >> (8 * (c % 4) + i * field) & ((1u << field) - 1);
        codes[(m + i * runs) * C + c] |= part << low;
      }
  });
}

// The code of element p of a block of r.
ZC_DEVICE zc_u32 code_in_planes(const zc_u8 *planes, zc_i32 bits, zc_i64 p, zc_i64 r) {
  zc_u32 code = 0;
  zc_i32 low = 0;
  for (zc_i32 field = 8; field > 0; field /= 2) {
    if (!(bits & field)) continue;
    const zc_i64 length = r / 8 * field, part = p / length;
    code |= ((zc_u32)planes[p - part * length] >> (part * field) & ((1u << field) - 1)) << low;
    planes += length;
    low += field;
  }
  return code;
}

#endif
