// The loops of every codec, written once: encode a block, sum a block. What differs between codecs is a struct:
//
//   BLOCK         elements that share a scale; 0: known at run time. block() says it always
//   Sum           what sums of decoded elements run in
//   SEGMENTS      how planes cut a block (planes.cuh): zc_segments(bits), 8 where bits are known at run time
//   COLUMNS       columns a thread takes at a time, 0: as many elements as 16 bytes hold
//   HAS_BLOCKS    codes with scales, as follows; otherwise the chunk is elements of type Element
//   ScaleBits     a block's scale as it is stored; SCALE_NBYTES of them come before all codes
//   bits()        of a code
//   Scale scale(amax), ScaleBits stored(Scale), u32 code(x, Scale, element), float value(code, ScaleBits): the rules
//
//   block of r elements:  element s * r/S + t is segment s, column t
//   thread `rank` of a team of `size`:  columns [rank C, rank C + C), [(rank + size) C, ...), ... of every segment
//
// A team of 1, 2, 4 ... 32 threads, or a whole CTA, shares a block: a thread has whole columns, so packing needs no
// exchange; only the largest magnitude does. Element counts and offsets are 64-bit throughout.
//
// Where BLOCK is a constant, a kernel takes whole blocks of memory at multiples of 16 bytes only, moves vectors and
// keeps elements in registers between the two passes of encoding. The instance with BLOCK = 0 takes any block at any
// address, element by element, and reads, or sums, twice. The host gives each its blocks: a partial last block is a
// launch of its own, so that the code for it costs the fast kernel no registers.
#ifndef ZCOMM_CODEC_KERNELS_CUH
#define ZCOMM_CODEC_KERNELS_CUH

#include "job.cuh"
#include "planes.cuh"

// Where a chunk of n elements keeps a block's scale and codes.
template <class Codec>
struct Chunk {
  Codec codec;
  zc_i64 n, codes_offset;

  ZC_DEVICE Chunk(const Codec &codec, zc_i64 n) : codec(codec), n(n), codes_offset(zc_padded(scale_at(n_blocks()))) {}
  ZC_DEVICE zc_i64 n_blocks() const { return (n + codec.block() - 1) / codec.block(); }
  ZC_DEVICE zc_i64 start(zc_i64 b) const { return b * codec.block(); }  // first element of block b
  ZC_DEVICE zc_i64 present(zc_i64 b) const { return n - start(b) < codec.block() ? n - start(b) : codec.block(); }
  ZC_DEVICE zc_i64 stored(zc_i64 b) const { return (present(b) + 7) / 8 * 8; }  // elements, with those it lacks
  ZC_DEVICE zc_i64 scale_at(zc_i64 b) const { return b * Codec::SCALE_NBYTES; }
  ZC_DEVICE zc_i64 codes_at(zc_i64 b) const { return codes_offset + start(b) / 8 * codec.bits(); }
  ZC_DEVICE zc_i64 codes_end() const { return codes_offset + (n + 7) / 8 * codec.bits(); }
  ZC_DEVICE zc_i64 nbytes() const { return codes_offset + zc_padded(codes_end() - codes_offset); }
};

// The threads that share a task.
struct Team {
  zc_u32 rank, size;

  // The largest value of the team, on each of its threads.
  ZC_DEVICE zc_u32 max(zc_u32 value) const {
    const zc_u32 lane = threadIdx.x % 32, width = size < 32 ? size : 32;
    const zc_u32 mask = width == 32 ? 0xffffffffu : ((1u << width) - 1) << (lane / width * width);
    for (zc_u32 distance = width / 2; distance > 0; distance /= 2) {
      const zc_u32 other = __shfl_xor_sync(mask, value, distance);
      value = other > value ? other : value;
    }
    if (size > 32) {
      __shared__ zc_u32 of_warp[ZC_THREADS / 32];
      if (lane == 0) of_warp[threadIdx.x / 32] = value;
      __syncthreads();
      for (int warp = 0; warp < ZC_THREADS / 32; ++warp) value = of_warp[warp] > value ? of_warp[warp] : value;
      __syncthreads();
    }
    return value;
  }
};

// How a team shares a block of Codec, where VECTOR elements make a good load or store.
template <class Codec, int VECTOR>
struct Tiling {
  static constexpr bool FIXED = Codec::BLOCK != 0;
  static constexpr int C = !FIXED ? 1 : Codec::COLUMNS ? Codec::COLUMNS : VECTOR;
  static constexpr int S = Codec::SEGMENTS;
  static constexpr int TILES = Codec::BLOCK / (S * C);         // of a block; 0 if known at run time
  static constexpr int TEAM = TILES < 32 ? TILES : 32;         // 0: the job says it
  static constexpr int ROUNDS = FIXED ? TILES / TEAM : 1;      // tiles of a thread
};

// One thread's part of a block: C columns, from `column` on, of each segment.
struct Tile {
  zc_i64 block, first, column, stride;  // first: of the chunk's elements; the others are first + s * stride + c
};

// Calls f(tile, round) for each of a thread's tiles of a block.
template <class T, class Codec, class F>
ZC_DEVICE void each_tile(const Chunk<Codec> &chunk, zc_i64 b, const Team &team, F f) {
  if constexpr (T::FIXED) {
#pragma unroll
    for (int round = 0; round < T::ROUNDS; ++round) {
      const zc_i64 column = (zc_i64)(team.rank + round * team.size) * T::C;
      f(Tile{b, chunk.start(b) + column, column, Codec::BLOCK / T::S}, round);
    }
  } else {
    const zc_i64 stride = chunk.stored(b) / T::S;
    for (zc_i64 column = team.rank; column < stride; column += team.size)
      f(Tile{b, chunk.start(b) + column, column, stride}, 0);
  }
}

// ---- what is read: each source gives a tile's elements

// Elements in the caller's array.
template <class E>
struct Elements {
  typedef float Sum;
  static constexpr int VECTOR = E::VECTOR;
  const zc_u8 *at;
  zc_i64 n;

  ZC_DEVICE Elements(const zc_job &job, const zc_piece &piece, zc_i32)
      : at(job.sources[0] + piece.source), n(piece.n_elems) {}

  template <int S, int C>
  ZC_DEVICE void tile(const Tile &tile, float *x) const {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      typename E::Sum wide[C];
      load_elements<E, C>(at, tile.first + s * tile.stride, n, wide);
#pragma unroll
      for (int c = 0; c < C; ++c) x[s * C + c] = (float)wide[c];
    }
  }
};

// Element e of a chunk, wherever its block is; 0 behind the end.
template <class Codec>
ZC_RARE typename Codec::Sum element_at(const Chunk<Codec> &chunk, const zc_u8 *wire, zc_i64 e) {
  if (e >= chunk.n) return 0;
  const zc_i64 b = e / chunk.codec.block(), p = e - chunk.start(b);
  const zc_u32 code = code_in_planes(wire + chunk.codes_at(b), chunk.codec.bits(), p, chunk.stored(b));
  return chunk.codec.value(code, load_bits<typename Codec::ScaleBits>(wire + chunk.scale_at(b)));
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
    const zc_u8 *at = wire + chunk.scale_at(tile.block);
    const typename Codec::ScaleBits scale = load_bits<typename Codec::ScaleBits, (C > 1)>(at);
#pragma unroll
    for (int i = 0; i < S * C; ++i) x[i] = codec.value(codes[i], scale);
  } else {
#pragma unroll
    for (int i = 0; i < S * C; ++i) x[i] = element_at(chunk, wire, tile.first + i / C * tile.stride + i % C);
  }
}

// The finished sum of the job's k chunks, added in their order.
template <class Codec>
struct SumOf {
  typedef typename Codec::Sum Sum;
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
    constexpr int AT_ONCE = C == 1 ? 1 : Codec::HAS_BLOCKS && S * C <= 8 ? 4 : 2;  // chunks whose loads are under way
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
};

// ---- what is done with a block

// Encodes block b of a chunk.
template <class Codec, class Source>
ZC_DEVICE void encode_block(const Chunk<Codec> &chunk, const Source &source, zc_i64 b, const Team &team, zc_u8 *wire) {
  typedef Tiling<Codec, Source::VECTOR> T;
  constexpr int S = T::S, C = T::C;
  const Codec &codec = chunk.codec;
  float kept[T::ROUNDS][S * C];
  typename Codec::Scale scale;
  zc_u32 amax = 0;
#pragma unroll(T::FIXED ? 2 : 1)
  for (int pass = 0; pass < 2; ++pass) {
    each_tile<T>(chunk, b, team, [&](const Tile &tile, int round) {
      float *x = kept[round];
      if (pass == 0 || !T::FIXED) {
        typename Source::Sum read[S * C];
        source.template tile<S, C>(tile, read);
#pragma unroll
        for (int i = 0; i < S * C; ++i) x[i] = (float)read[i];
      }
      if (pass == 0) {
#pragma unroll
        for (int i = 0; i < S * C; ++i) {
          const zc_u32 magnitude = zc_bits(x[i]) & ZC_MAGNITUDE;
          amax = magnitude > amax ? magnitude : amax;
        }
      } else {
        zc_u32 codes[S * C];
#pragma unroll
        for (int i = 0; i < S * C; ++i)
          codes[i] = codec.code(x[i], scale, tile.first + i / C * tile.stride + i % C);
        store_planes<S, C>(wire + chunk.codes_at(b), codec.bits(), tile.column, tile.stride, codes);
      }
    });
    if (pass == 0) scale = codec.scale(team.max(amax));
  }
  if (team.rank == 0) store_bits(wire + chunk.scale_at(b), codec.stored(scale));
}

// Stores block b of a sum as elements of type E.
template <class E, class Codec>
ZC_DEVICE void sum_block(const SumOf<Codec> &source, zc_i64 b, const Team &team, zc_u8 *target) {
  typedef Tiling<Codec, E::VECTOR> T;
  constexpr int S = T::S, C = T::C;
  each_tile<T>(source.chunk, b, team, [&](const Tile &tile, int) {
    typename Codec::Sum x[S * C];
    source.template tile<S, C>(tile, x);
#pragma unroll
    for (int s = 0; s < S; ++s)
      store_elements<E, C>(target, tile.first + s * tile.stride, source.chunk.n, x + s * C);
  });
}

// ---- the loops over blocks

ZC_DEVICE void zero(zc_u8 *wire, zc_i64 from, zc_i64 to, const Team &team) {
  for (zc_i64 i = from + team.rank; i < to; i += team.size) wire[i] = 0;
}

// Calls f(piece, block in the piece, team) for each task of this thread's team.
template <class F>
ZC_DEVICE void each_task(const zc_job &job, zc_u32 team_size, F f) {
  const Team team{threadIdx.x % team_size, team_size};
  const zc_i64 teams_of_cta = ZC_THREADS / team_size;
  for (zc_i64 task = blockIdx.x * teams_of_cta + threadIdx.x / team_size; task < job.n_tasks;
       task += gridDim.x * teams_of_cta) {
    zc_i32 p = 0;
    while (p + 1 < job.n_pieces && job.pieces[p + 1].first_task <= task) ++p;
    f(job.pieces[p], task - job.pieces[p].first_task + job.pieces[p].first_block, team);
  }
}

template <class Codec, class Source>
ZC_DEVICE void encode_chunks(const zc_job &job) {
  typedef Tiling<Codec, Source::VECTOR> T;
  const Codec codec(job.codec_out);
  each_task(job, T::FIXED ? T::TEAM : job.team, [&](const zc_piece &piece, zc_i64 b, const Team &team) {
    const Chunk<Codec> chunk(codec, piece.n_elems);
    zc_u8 *wire = job.target + piece.target;
    encode_block(chunk, Source(job, piece, codec.block()), b, team, wire);
    if (b + 1 == chunk.n_blocks()) {
      zero(wire, chunk.scale_at(b + 1), chunk.codes_offset, team);
      zero(wire, chunk.codes_end(), chunk.nbytes(), team);
    }
  });
}

template <class Codec, class E>
ZC_DEVICE void sum_chunks(const zc_job &job) {
  typedef Tiling<Codec, E::VECTOR> T;
  each_task(job, T::FIXED ? T::TEAM : job.team, [&](const zc_piece &piece, zc_i64 b, const Team &team) {
    const SumOf<Codec> source(job, piece, Codec(job.codec_in).block());
    zc_u8 *target = job.target + piece.target;
    sum_block<E>(source, b, team, target);
    const zc_i64 nbytes = piece.n_elems * E::NBYTES;
    if (job.pads && b + 1 == source.chunk.n_blocks()) zero(target, nbytes, zc_padded(nbytes), team);
  });
}

// Bytes as they are: 16 for each task, whose pieces count bytes.
ZC_DEVICE void copy_chunks(const zc_job &job) {
  each_task(job, 1, [&](const zc_piece &piece, zc_i64 b, const Team &team) {
    const zc_u8 *source = job.sources[0] + piece.source;
    zc_u8 *target = job.target + piece.target;
    const zc_i64 first = 16 * b, last = first + 16 < piece.n_elems ? first + 16 : piece.n_elems;
    if (last - first == 16 && ((zc_u64)source | (zc_u64)target) % 16 == 0) {
      *(uint4 *)(target + first) = *(const uint4 *)(source + first);
    } else {
      for (zc_i64 i = first; i < last; ++i) target[i] = source[i];
      if (job.pads) zero(target, last, zc_padded(last), team);
    }
  });
}

#endif
