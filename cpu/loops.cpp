// The four verbs of an engine on the CPU, over the scalar rules in cuda/. Compiled once per instruction set:
//   g++ -std=c++17 -O3 -ffp-contract=off -fno-trapping-math -fno-math-errno -march=x86-64-v3 -DZC_BUILD=v3 -c loops.cpp
//
// The definition is zcomm/engines/reference.py: every operation is one fp32 operation (raw:float64: one fp64), rounded
// by itself, in the order of the chunks. Sums are kept in registers or in a tile of the first-level cache, and every
// chunk is read once. Nothing here may come from the C++ library: a function shared between builds could be taken from
// the widest one by the linker.
#include "native.h"

#include "../cuda/fp8_block.cuh"
#include "../cuda/hadamard.cuh"
#include "../cuda/int_asym.cuh"
#include "../cuda/int_block.cuh"
#include "../cuda/mx_block.cuh"
#include "../cuda/nvfp4.cuh"
#include "../cuda/philox.cuh"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef ZC_BUILD
#define ZC_BUILD portable
#endif
#define ZC_JOIN_(a, b) a##b
#define ZC_JOIN(a, b) ZC_JOIN_(a, b)

namespace ZC_JOIN(zc_, ZC_BUILD) {
namespace {

#include "elements.h"
#include "float_modes.h"
#include "hadamard.h"
#include "philox.h"
#include "rules.h"
#include "blocks.h"
#ifdef __AVX2__
#include "blocks_simd.h"
#endif
#include "encode.h"
#include "sums.h"

// ---- sums, stored or encoded again

#ifdef __AVX2__
// A target that no cache can hold is written past them: a line that is overwritten whole need not be read first.
constexpr zc_i64 STREAMED_NBYTES = 32 << 20;

// Stores the whole blocks of a usual codec; returns how many elements.
template <class E, bool PAST_CACHES>
static zc_i64 reduce_whole(const Sum &sum, zc_u8 *target) {
  if (!is_summed_here(sum.codec) || sum.codec.rotated) return 0;
  const Layout at = Layout::of(sum.codec, sum.n);
  const Sink<E, PAST_CACHES> sink = {target, (float)sum.factor, (float)sum.divisor};
  zc_i64 done = 0;
  with_sums(sum.codec, [&](auto whole) {
    done = sum_whole(whole, Chunks{at, sum.wires, sum.k}, 0, sum.n / at.block, sink) * at.block;
  });
  return done;
}

template <class E>
static void stream_reduce(const Sum &sum, zc_u8 *target) {
  const zc_i64 tile = tile_of(sum.codec);
  const Sink<E, true> sink = {target};
  for (zc_i64 start = reduce_whole<E, true>(sum, target); start < sum.n; start += tile) {
    const zc_i64 count = sum.n - start < tile ? sum.n - start : tile, whole = count / (2 * LANES) * (2 * LANES);
    alignas(64) float sums[TILE];
    sum_as_elements(sum, start, count, sums);
    sink.put(start, sums, whole);
    convert<Float32, E>((const zc_u8 *)(sums + whole), count - whole, target + (start + whole) * E::size);
  }
  _mm_sfence();
}
#endif

template <class E>
static void reduce(const Sum &sum, zc_u8 *target) {
#ifdef __AVX2__
  const bool aligned = (__UINTPTR_TYPE__)target % sizeof(Floats) == 0;
  if (sum.n * E::size >= STREAMED_NBYTES && aligned && !sums_in_float64(sum.codec))
    return stream_reduce<E>(sum, target);
  const zc_i64 done = reduce_whole<E, false>(sum, target);
#else
  const zc_i64 done = 0;
#endif
  const zc_i64 tile = tile_of(sum.codec);
  for (zc_i64 start = done; start < sum.n; start += tile) {
    const zc_i64 count = sum.n - start < tile ? sum.n - start : tile;
    zc_u8 *out = target + start * E::size;
    if (E::dtype == ZC_FLOAT64 && sums_in_float64(sum.codec)) {
      sum_float64(sum, start, count, (double_at *)out);
    } else if (E::dtype == ZC_FLOAT32 && !sum.codec.rotated) {
      sum_elements(sum, start, count, (float_at *)out);
    } else {
      alignas(64) float sums[TILE];
      sum_as_elements(sum, start, count, sums);
      convert<Float32, E>((const zc_u8 *)sums, count, out);
    }
  }
}

// Re-encodes into raw and cast chunks.
template <class W>
static void reduce_carried(const Sum &sum, zc_u8 *wire) {
  reduce<W>(sum, wire);
  zero(wire, sum.n * W::size, zc_padded(sum.n * W::size));
}

// Finished sums of elements start..start + count, wherever start is, in pieces that end where the chunks' own tiles
// end. `elements`: rotated back if they are rotated.
static void read_sums(const Sum &sum, bool elements, zc_i64 start, zc_i64 count, float *sums) {
  const zc_i64 tile = tile_of(sum.codec), end = start + count;
  while (start < end) {
    const zc_i64 to_end = tile - start % tile, piece = end - start < to_end ? end - start : to_end;
    if (elements && sum.codec.rotated) {
      const zc_i64 skipped = start % ZC_ROTATE_GROUP;
      float whole[TILE];
      sum_as_elements(sum, start - skipped, skipped + piece, whole);
      __builtin_memcpy(sums, whole + skipped, (size_t)piece * sizeof(float));
    } else {
      sum_elements(sum, start, piece, sums);
    }
    start += piece;
    sums += piece;
  }
}

// Re-encodes into blocks. Between two rotated codecs nothing is rotated.
static void reduce_blocks(const Sum &sum, const zc_codec &codec_out, const Chance &chance, zc_u8 *wire) {
  const Layout at = Layout::of(codec_out, sum.n);
  const bool stay = sum.codec.rotated && codec_out.rotated;
  encode_read(codec_out, at, 0, stay ? at.n : sum.n, codec_out.rotated && !stay, chance, wire,
              [&](zc_i64 start, zc_i64 count, float *x) { read_sums(sum, !stay, start, count, x); });
}

}  // namespace
}  // namespace

// ---- the C ABI. Work is done in functions of its own, so that no operation moves ahead of the modes it needs.

#define ZC_NAME(verb) ZC_JOIN(verb, ZC_JOIN(_, ZC_BUILD))
#define ZC_SEPARATE [[gnu::noinline]]

namespace ZC_JOIN(zc_, ZC_BUILD) {
namespace {

ZC_SEPARATE void encode_any(const zc_codec &codec, const zc_u8 *source, zc_i64 n, zc_i32 dtype, const Chance &chance,
                             zc_u8 *wire) {
  with_element(dtype, [&](auto element) { encode<decltype(element)>(codec, source, n, chance, wire); });
}

ZC_SEPARATE void reduce_any(const Sum &sum, zc_u8 *target, zc_i32 dtype) {
  with_element(dtype, [&](auto element) { reduce<decltype(element)>(sum, target); });
}

ZC_SEPARATE void reduce_encode_any(const Sum &sum, const zc_codec &codec_out, const Chance &chance, zc_u8 *wire) {
  if (!has_blocks(codec_out))
    with_element(codec_out.element, [&](auto element) { reduce_carried<decltype(element)>(sum, wire); });
  else
    reduce_blocks(sum, codec_out, chance, wire);
}

}  // namespace

ZC_EXPORT void ZC_NAME(zc_encode)(const zc_codec *codec, const void *source, int64_t n, int32_t dtype, void *wire,
                                  const zc_draw *draw) {
  const FloatModes modes;
  encode_any(*codec, (const zc_u8 *)source, n, dtype, {draw, 0}, (zc_u8 *)wire);
}

ZC_EXPORT void ZC_NAME(zc_decode)(const zc_codec *codec, const void *wire, int64_t n, void *target, int32_t dtype) {
  const FloatModes modes;
  const zc_u8 *chunk = (const zc_u8 *)wire;
  if (codec->kind == ZC_RAW && codec->element == dtype)
    with_element(dtype, [&](auto element) { __builtin_memcpy(target, wire, (size_t)(n * decltype(element)::size)); });
  else
    reduce_any({*codec, &chunk, 1, n, 1.0, 1.0}, (zc_u8 *)target, dtype);
}

ZC_EXPORT void ZC_NAME(zc_reduce)(const zc_codec *codec, const void *const *wires, int64_t k, int64_t n, double factor,
                                  double divisor, void *target, int32_t dtype) {
  const FloatModes modes;
  reduce_any({*codec, (const zc_u8 *const *)wires, k, n, factor, divisor}, (zc_u8 *)target, dtype);
}

ZC_EXPORT void ZC_NAME(zc_reduce_encode)(const zc_codec *codec, const void *const *wires, int64_t k, int64_t n,
                                         double factor, double divisor, const zc_codec *codec_out, void *wire_out,
                                         const zc_draw *draw) {
  const FloatModes modes;
  const Sum sum = {*codec, (const zc_u8 *const *)wires, k, n, factor, divisor};
  reduce_encode_any(sum, *codec_out, {draw, 0}, (zc_u8 *)wire_out);
}

}  // namespace
