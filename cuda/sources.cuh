// What the loops read: elements of the caller's array, or the sum of chunks. A source gives a tile's elements, or one.
#ifndef ZCOMM_SOURCES_CUH
#define ZCOMM_SOURCES_CUH

#include "rotation.cuh"

// Elements in the caller's array; 0 behind its end.
template <class E>
struct Elements {
  typedef float Sum;
  static constexpr bool ROTATED = false;
  static constexpr int VECTOR = E::VECTOR;
  const zc_u8 *from;
  zc_i64 n;

  ZC_DEVICE Elements(const zc_job &job, const zc_piece &piece, zc_i32)
      : from(job.sources[0] + piece.source), n(piece.n_elems) {}

  template <int S, int C>
  ZC_DEVICE void tile(const Tile &tile, float *x) const {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      typename E::Sum wide[C];
      load_elements<E, C>(from, tile.first + s * tile.stride, n, wide);
#pragma unroll
      for (int c = 0; c < C; ++c) x[s * C + c] = (float)wide[c];
    }
  }
  ZC_DEVICE float at(zc_i64 e) const {
    float x;
    tile<1, 1>(Tile{0, e, 0, 0}, &x);
    return x;
  }
};

// Element e of a chunk, wherever its block is; 0 behind the end.
template <class Codec>
ZC_RARE typename Codec::Sum element_at(const Chunk<Codec> &chunk, const zc_u8 *wire, zc_i64 e) {
  if (e >= chunk.n) return 0;
  const zc_i64 b = e / chunk.codec.block(), p = e - chunk.start(b);
  const zc_u32 code = code_in_planes(wire + chunk.codes_at(b), chunk.codec.bits(), p, chunk.stored(b));
  return chunk.codec.value(code, chunk.template shared<false>(wire, b));
}

// Elements of one chunk. `planar`: the tile is one of the chunk's own blocks.
template <int S, int C, class Codec>
ZC_DEVICE void load_tile(const Chunk<Codec> &chunk, const zc_u8 *wire, const Tile &tile, bool planar,
                         typename Codec::Sum *x) {
  const Codec &codec = chunk.codec;
  if constexpr (!Codec::HAS_BLOCKS) {
#pragma unroll
    for (int s = 0; s < S; ++s)
      load_elements<typename Codec::Element, C>(wire, tile.first + s * tile.stride, chunk.n, x + s * C);
  } else if (C > 1 || planar) {
    zc_u32 codes[S * C];
    load_planes<S, C>(wire + chunk.codes_at(tile.block), codec.bits(), tile.column, tile.stride, codes);
    const typename Codec::Shared shared = chunk.template shared<(C > 1)>(wire, tile.block);
#pragma unroll
    for (int i = 0; i < S * C; ++i) x[i] = codec.value(codes[i], shared);
  } else {
#pragma unroll
    for (int i = 0; i < S * C; ++i) x[i] = element_at(chunk, wire, tile.first + i / C * tile.stride + i % C);
  }
}

// The finished sum of the job's k chunks, added in their order: of their codes' elements, rotated if those are.
template <class Codec>
struct SumOf {
  typedef typename Codec::Sum Sum;
  static constexpr bool ROTATED = Codec::ROTATED;
  static constexpr int VECTOR = 8;
  const zc_job &job;
  zc_i64 offset;
  Chunk<Codec> chunk;
  bool planar;

  ZC_DEVICE SumOf(const zc_job &job, const zc_piece &piece, zc_i32 block)
      : job(job), offset(piece.source), chunk(Codec(job.codec_in), piece.n_elems),
        planar(chunk.codec.block() == block) {}

  ZC_DEVICE const zc_u8 *wire(zc_i64 w) const {
    return (job.k <= ZC_SOURCES ? job.sources[w] : job.more_sources[w]) + offset;
  }

  template <int S, int C>
  ZC_DEVICE void tile(const Tile &tile, Sum *x) const {
    // Chunks whose loads are under way.
    [[maybe_unused]] constexpr int AT_ONCE = C == 1 ? 1 : Codec::HAS_BLOCKS && S * C <= 8 ? 4 : 2;
#pragma unroll AT_ONCE
    for (zc_i64 w = 0; w < job.k; ++w) {
      Sum term[S * C];
      load_tile<S, C>(chunk, wire(w), tile, planar, term);
#pragma unroll
      for (int i = 0; i < S * C; ++i) x[i] = w == 0 ? term[i] : zc_add(x[i], term[i]);
    }
    const Sum factor = (Sum)job.factor, divisor = (Sum)job.divisor;
    if (factor != 1)
#pragma unroll
      for (int i = 0; i < S * C; ++i) x[i] = zc_mul(x[i], factor);
    if (divisor != 1)
#pragma unroll
      for (int i = 0; i < S * C; ++i) x[i] = zc_div(x[i], divisor);
  }

  // Element e, which lies anywhere, or 0 behind the end. `planar` must be false.
  ZC_DEVICE Sum at(zc_i64 e) const {
    if (e >= chunk.n) return 0;
    Sum x;
    tile<1, 1>(Tile{0, e, 0, 0}, &x);
    return x;
  }
};

#endif
