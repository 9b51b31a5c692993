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
#include "hadamard.h"
#include "philox.h"
#include "rules.h"
#include "blocks.h"
#ifdef __AVX2__
#include "blocks_simd.h"
#endif

// The thread's floating-point modes, set to IEEE defaults (round to nearest, subnormals kept) and put back at the end.
class FloatModes {
#if defined(__x86_64__)
  unsigned saved_ = _mm_getcsr();
  static constexpr unsigned FLAGS = 0x3f, DEFAULT = 0x1f80;

 public:
  FloatModes() {
    if ((saved_ & ~FLAGS) != DEFAULT) _mm_setcsr(DEFAULT);
  }
  ~FloatModes() {
    if ((saved_ & ~FLAGS) != DEFAULT) _mm_setcsr(saved_);
  }
#elif defined(__aarch64__)
  unsigned long saved_ = get();
  static unsigned long get() {
    unsigned long modes;
    __asm__ volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
  }
  static void set(unsigned long modes) { __asm__ volatile("msr fpcr, %0" : : "r"(modes)); }

 public:
  FloatModes() {
    if (saved_ != 0) set(0);
  }
  ~FloatModes() {
    if (saved_ != 0) set(saved_);
  }
#else
 public:
  FloatModes() {}
#endif
};

ZC_FN bool has_blocks(const zc_codec &codec) { return codec.kind >= ZC_INT_BLOCK; }

ZC_FN void zero(zc_u8 *wire, zc_i64 from, zc_i64 to) { __builtin_memset(wire + from, 0, (size_t)(to - from)); }

// ---- encode

// Encodes the blocks that begin with element `start` of a chunk, from count elements at x.
template <class E>
static void encode_blocks(const zc_codec &codec, const Layout &at, zc_i64 start, const zc_u8 *x, zc_i64 count,
                          const Chance &chance, zc_u8 *wire) {
  zc_i64 b = start / at.block;
  const zc_i64 end = b + (count + at.block - 1) / at.block;
#ifdef __AVX2__
  if (is_encoded_here(codec)) {
    const zc_i64 done = encode_usual<E>(codec, at, b, x, count / at.block, chance.from(start), wire);
    b += done;
    x += done * at.block * E::size;
    count -= done * at.block;
  }
#endif
  if (codec.kind == ZC_NVFP4) {
    if (codec.rounding == ZC_STOCHASTIC) return encode_regions<E, true>(at, b, x, count, chance, wire);
    return encode_regions<E, false>(at, b, x, count, chance, wire);
  }
  with_rules(codec, [&](auto rules) {
    typedef decltype(rules) Rules;
    if constexpr (Rules::SHORT != 0) {
      zc_u16 room[Rules::BY_CHANCE ? TILE + 2 * SPAN : 1];
      const zc_u16 *drawn = room;
      for (zc_i64 first = b; b < end && at.stored(b) == at.block; ++b, x += at.block * E::size) {
        const zc_i64 in_tile = (b - first) * at.block % TILE, left = (end - b) * at.block;
        if (Rules::BY_CHANCE && in_tile == 0)
          drawn = draw_elements(chance.from(b * at.block), left < TILE ? left : TILE, room);
        float of_block[Rules::SHORT] = {0};
        convert<E, Float32>(x, at.present(b), (zc_u8 *)of_block);
        encode_short(rules, of_block, at.present(b), amax_of<Rules::SHORT>(of_block),
                     Rules::BY_CHANCE ? drawn + in_tile : room, wire + at.scale_at(b), wire + at.codes_at(b));
      }
    }
    for (; b < end; ++b, x += at.block * E::size)
      encode_block<E>(rules, x, at.present(b), at.stored(b), chance.from(b * at.block), wire + at.scale_at(b),
                      wire + at.codes_at(b));
  });
}

// Zeroes the padding behind the scales and behind the codes.
static void pad_blocks(const Layout &at, zc_u8 *wire) {
  const zc_i64 codes_nbytes = zc_codes_nbytes(at.n, at.bits);
  if (at.scales_offset) zero(wire, 4 * ((at.n + ZC_NVFP4_REGION - 1) / ZC_NVFP4_REGION), at.scales_offset);
  zero(wire, at.scales_end(), at.codes_offset);
  zero(wire, at.codes_offset + codes_nbytes, at.codes_offset + zc_padded(codes_nbytes));
}

// Encodes the blocks from element `begin` on of what read(start, count, floats) gives, as many at a time as SUMS floats
// hold. `rotates`: of its rotation, whose last group zeros fill up.
template <zc_i64 SUMS, class Read>
static __attribute__((noinline)) void encode_read_in(const zc_codec &codec, const Layout &at, zc_i64 begin, zc_i64 n_read,
                                                     bool rotates, const Chance &chance, zc_u8 *wire,
                                                     const Read &read) {
  alignas(64) float x[SUMS];
  const zc_i64 step = SUMS / at.block * at.block;
  for (zc_i64 start = begin; start < at.n; start += step) {
    const zc_i64 count = at.n - start < step ? at.n - start : step;
    const zc_i64 present = n_read - start < count ? n_read - start : count;
    read(start, present, x);
    for (zc_i64 i = present; i < count; ++i) x[i] = 0.0f;
    if (rotates) rotate(x, count);
    encode_blocks<Float32>(codec, at, start, (const zc_u8 *)x, count, chance, wire);
  }
  pad_blocks(at, wire);
}

template <class Read>
ZC_FN void encode_read(const zc_codec &codec, const Layout &at, zc_i64 begin, zc_i64 n_read, bool rotates,
                       const Chance &chance, zc_u8 *wire, const Read &read) {
  if (at.block <= 4 * TILE)
    encode_read_in<4 * TILE>(codec, at, begin, n_read, rotates, chance, wire, read);
  else
    encode_read_in<64 * TILE>(codec, at, begin, n_read, rotates, chance, wire, read);
}

template <class E>
static void encode(const zc_codec &codec, const zc_u8 *source, zc_i64 n, const Chance &chance, zc_u8 *wire) {
  if (has_blocks(codec)) {
    const Layout at = Layout::of(codec, n);
    if (codec.rotated) {
      zc_i64 done = 0;
#ifdef __AVX2__
      if (is_encoded_here(codec) && codec.kind <= ZC_FP8_BLOCK && codec.block <= ROTATED_BLOCK) {
        done = n / codec.block * codec.block;
        with_codes(codec, [&](auto codes) {
          encode_whole<true, E>(codes, source, n / at.block, at.block, chance, (u16_at *)wire, wire + at.codes_offset);
        });
      }
#endif
      return encode_read(codec, at, done, n, true, chance, wire, [&](zc_i64 start, zc_i64 count, float *x) {
        convert<E, Float32>(source + start * E::size, count, (zc_u8 *)x);
      });
    }
    encode_blocks<E>(codec, at, 0, source, n, chance, wire);
    pad_blocks(at, wire);
    return;
  }
  with_element(codec.element, [&](auto element) {
    typedef decltype(element) W;
    if (codec.kind == ZC_RAW && W::dtype == E::dtype)
      __builtin_memcpy(wire, source, (size_t)(n * W::size));
    else
      convert<E, W>(source, n, wire);
    zero(wire, n * W::size, zc_padded(n * W::size));
  });
}

// ---- sums

struct Sum {
  const zc_codec &codec;
  const zc_u8 *const *wires;
  zc_i64 k, n;
  double factor, divisor;
};

// Sums of elements start..start + count of raw and cast chunks.
template <class W>
static void sum_carried(const Sum &sum, zc_i64 start, zc_i64 count, float_at *__restrict sums) {
  typedef typename W::Stored Stored;
  zc_i64 i = 0;
#ifdef __AVX2__
  for (; i + 32 <= count; i += 32) {
    const auto term = [&](zc_i64 w, int j) { return load8<W>(sum.wires[w] + (start + i + 8 * j) * W::size); };
    __m256 x[4];
    for (int j = 0; j < 4; ++j) x[j] = term(0, j);
    for (zc_i64 w = 1; w < sum.k; ++w)
      for (int j = 0; j < 4; ++j) x[j] = _mm256_add_ps(x[j], term(w, j));
    for (int j = 0; j < 4; ++j) _mm256_storeu_ps((float *)(sums + i + 8 * j), x[j]);
  }
#endif
  for (zc_i64 w = 0; w < sum.k; ++w) {
    const Stored *x = (const Stored *)sum.wires[w] + start;
    if (w == 0)
      for (zc_i64 j = i; j < count; ++j) sums[j] = W::widen(x[j]);
    else
      for (zc_i64 j = i; j < count; ++j) sums[j] = zc_add(sums[j], W::widen(x[j]));
  }
}

// Sums of elements start..start + count of chunks with blocks.
static void sum_blocks(const Sum &sum, zc_i64 start, zc_i64 count, float_at *sums) {
  const Layout at = Layout::of(sum.codec, sum.n);
  zc_i64 b = start / at.block, lo = start - b * at.block;
#ifdef __AVX2__
  if (is_summed_here(sum.codec) && lo == 0)
    with_sums(sum.codec, [&](auto whole) {
      const Sink<Float32, false> sink = {(zc_u8 *)sums};
      const zc_i64 done = sum_whole(whole, Chunks{at, sum.wires, sum.k}, b, count / at.block, sink);
      b += done;
      sums += done * at.block;
      count -= done * at.block;
    });
#endif
  with_rules(sum.codec, [&](auto rules) {
    if constexpr (decltype(rules)::SHORT != 0)
      for (; lo == 0 && count >= at.block; ++b, sums += at.block, count -= at.block)
        sum_short(rules, at, sum.wires, sum.k, b, sums);
    for (; count > 0; ++b, lo = 0) {
      const zc_i64 hi = lo + count < at.block ? lo + count : at.block;
      sum_block(rules, at, sum.wires, sum.k, b, lo, hi, sums);
      sums += hi - lo;
      count -= hi - lo;
    }
  });
}

// Finished fp64 sums of raw:float64 chunks.
static void sum_float64(const Sum &sum, zc_i64 start, zc_i64 count, double_at *__restrict sums) {
  for (zc_i64 w = 0; w < sum.k; ++w) {
    const double_at *x = (const double_at *)sum.wires[w] + start;
    if (w == 0)
      for (zc_i64 i = 0; i < count; ++i) sums[i] = x[i];
    else
      for (zc_i64 i = 0; i < count; ++i) sums[i] += x[i];
  }
  if (sum.factor != 1.0)
    for (zc_i64 i = 0; i < count; ++i) sums[i] *= sum.factor;
  if (sum.divisor != 1.0)
    for (zc_i64 i = 0; i < count; ++i) sums[i] /= sum.divisor;
}

// Finished fp32 sums of elements start..start + count, count <= TILE for raw:float64.
static void sum_elements(const Sum &sum, zc_i64 start, zc_i64 count, float_at *sums) {
  if (has_blocks(sum.codec)) {
    sum_blocks(sum, start, count, sums);
  } else if (sum.codec.element == ZC_FLOAT64) {
    double tile[TILE];
    sum_float64(sum, start, count, tile);
    convert<Float64, Float32>((const zc_u8 *)tile, count, (zc_u8 *)sums);
    return;
  } else {
    with_element(sum.codec.element, [&](auto element) { sum_carried<decltype(element)>(sum, start, count, sums); });
  }
  const float factor = (float)sum.factor, divisor = (float)sum.divisor;
  if (sum.factor != 1.0)
    for (zc_i64 i = 0; i < count; ++i) sums[i] = zc_mul(sums[i], factor);
  if (sum.divisor != 1.0)
    for (zc_i64 i = 0; i < count; ++i) sums[i] = zc_div(sums[i], divisor);
}

// Finished sums of elements start..start + count, rotated back: start is a multiple of 32 if they are, and sums has
// room for a multiple of 32.
ZC_FN void sum_as_elements(const Sum &sum, zc_i64 start, zc_i64 count, float_at *sums) {
  if (!sum.codec.rotated) return sum_elements(sum, start, count, sums);
  sum_elements(sum, start, zc_n_rotated(count), sums);
  rotate_back(sums, zc_n_rotated(count));
}

ZC_FN bool sums_in_float64(const zc_codec &codec) { return codec.kind == ZC_RAW && codec.element == ZC_FLOAT64; }

// Elements to sum at a time: whole blocks, if a tile can hold one.
ZC_FN zc_i64 tile_of(const zc_codec &codec) {
  return has_blocks(codec) && codec.block < TILE ? TILE / codec.block * codec.block : TILE;
}

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
  if (sum.n * E::size >= STREAMED_NBYTES && (__UINTPTR_TYPE__)target % sizeof(Floats) == 0 && !sums_in_float64(sum.codec))
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

// Finished sums of elements start..start + count, wherever start is, in pieces that end where the chunks' own tiles end.
// `elements`: rotated back if they are rotated.
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
