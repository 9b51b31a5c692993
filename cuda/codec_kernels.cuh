// The loops of every codec, written once: encode a unit, sum a unit. What differs between codecs is a struct:
//
//   Sum            what sums of decoded elements run in
//   HAS_BLOCKS     codes with scales, as follows; otherwise the chunk is elements of type Element
//   BLOCK          elements that share a scale; 0: known at run time. block() says it always
//   UNIT           elements of a task: BLOCK, or as many as share anything else. unit() says it always
//   SEGMENTS       how planes cut a block (planes.cuh): zc_segments(bits), 8 where BLOCK is 0
//   COLUMNS        columns a thread takes at a time, 0: as many elements as 16 bytes hold
//   BY_CHANCE      whether code() looks at random bits; BY_SHIFT: whether scale() does, at the block's first element's
//   ROTATED        whether elements are rotated before they get codes (hadamard_codec.cuh)
//   bits()         of a code
//   Seen           what a block's scale depends on, told element by element: numbers, of which the largest counts
//   Scale scale(Seen, chance)             of a block: a record with `inv`, 0 if every code is 0
//   ScaleBits stored(Scale)               as it travels, in SCALE_NBYTES
//   u32 code(x, Scale, chance)            of an element
//   Shared shared(ScaleBits), float value(code, Shared)  what decoding needs of a block, and an element with it
//   u32 unit_scale(amax)                  where units have a scale, UNIT_SCALE_NBYTES: sets it. shared() is told it
//
// Where BLOCK is a constant, a kernel takes whole units of memory at multiples of 16 bytes only, moves vectors and
// keeps elements in registers between the two passes of encoding. The instance with BLOCK = 0 takes any unit at any
// address, element by element, and reads, or sums, twice. The host gives each its units: a partial last unit is a
// launch of its own, so that the code for it costs the fast kernel no registers.
#ifndef ZCOMM_CODEC_KERNELS_CUH
#define ZCOMM_CODEC_KERNELS_CUH

#include "chance.cuh"
#include "sources.cuh"

// Codes of a tile's elements into their planes: 0 for those that the block lacks.
template <int S, int C, class Codec>
ZC_DEVICE void store_codes(const Chunk<Codec> &chunk, const Codec &codec, const Tile &tile, const float *x,
                           const typename Codec::Scale &scale, const Chance &chance, zc_u8 *wire) {
  zc_u32 codes[S * C];
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const zc_i64 e = tile.first + s * tile.stride;
    zc_u32 drawn[C] = {};
    if constexpr (Codec::BY_CHANCE) chance.half_words<C>(e, drawn);
#pragma unroll
    for (int c = 0; c < C; ++c)
      codes[s * C + c] = scale.inv == 0.0f || (C == 1 && e >= chunk.n) ? 0 : codec.code(x[s * C + c], scale, drawn[c]);
  }
  store_planes<S, C>(wire + chunk.codes_at(tile.block), codec.bits(), tile.column, tile.stride, codes);
}

template <class Codec>
ZC_DEVICE typename Codec::Scale scale_of(const Chunk<Codec> &chunk, const Codec &codec, zc_i64 b,
                                         const typename Codec::Seen &seen, const Chance &chance) {
  zc_u32 drawn = 0;
  if constexpr (Codec::BY_SHIFT) chance.half_words<1>(chunk.start(b), &drawn);
  return codec.scale(seen, drawn);
}

// ---- whole units of memory at multiples of 16 bytes

template <class Codec, class Source>
ZC_DEVICE void encode_whole(const Chunk<Codec> &chunk, const Source &source, const Chance &chance, zc_i64 u,
                            const Team &team, zc_u8 *wire) {
  typedef Tiling<Codec, Source::VECTOR> T;
  constexpr int S = T::S, C = T::C;
  static_assert(C >= 4 && T::ROUNDS * T::TEAM == T::TILES, "no tiling");
  static_assert(T::BLOCKS == 1 || T::BLOCK_TILES <= T::TEAM, "a unit of several blocks has each in one round");
  static_assert(!Source::ROTATED, "sums of rotated elements stay rotated, or are read one by one");
  float x[T::ROUNDS][S * C];
  typename Codec::Seen seen[T::BLOCKS > 1 ? T::ROUNDS : 1];  // of each block
  zc_u32 largest = 0;                                         // of finite blocks
#pragma unroll
  for (int round = 0; round < T::ROUNDS; ++round) {
    source.template tile<S, C>(T::tile(chunk, u, team, round), x[round]);
    if constexpr (Codec::ROTATED) {
#pragma unroll
      for (int i = 0; i < S * C; ++i) x[round][i] = zc_mul(x[round][i], ZC_ROTATE_SCALE);
      rotate_tile<T>(x[round], team);
    }
#pragma unroll
    for (int i = 0; i < S * C; ++i) seen[T::BLOCKS > 1 ? round : 0].see(x[round][i]);
  }
  const Team of_block{team.rank % T::BLOCK_TEAM, T::BLOCK_TEAM};
#pragma unroll
  for (auto &of : seen) {
    of = of_block.most(of);
    largest = larger(largest, of.finite());
  }
  Codec codec = chunk.codec;
  if constexpr (Codec::UNIT_SCALE_NBYTES) {
    const zc_u32 bits = codec.unit_scale(team.max(largest));
    if (team.rank == 0) store_bits<zc_u32, true>(wire + chunk.unit_scale_at(u), bits);
  }
  typename Codec::Scale scale;
#pragma unroll
  for (int round = 0; round < T::ROUNDS; ++round) {
    const Tile tile = T::tile(chunk, u, team, round);
    if (T::BLOCKS > 1 || round == 0)
      scale = scale_of(chunk, codec, tile.block, seen[T::BLOCKS > 1 ? round : 0], chance);
    store_codes<S, C>(chunk, codec, tile, x[round], scale, chance, wire);
    if (tile.column == 0)
      store_bits<typename Codec::ScaleBits, true>(wire + chunk.scale_at(tile.block), codec.stored(scale));
  }
}

// Stores unit u of a sum as elements of type E.
template <class E, class Codec>
ZC_DEVICE void sum_whole(const SumOf<Codec> &source, zc_i64 u, const Team &team, zc_u8 *target) {
  typedef Tiling<Codec, E::VECTOR> T;
  constexpr int S = T::S, C = T::C;
#pragma unroll
  for (int round = 0; round < T::ROUNDS; ++round) {
    const Tile tile = T::tile(source.chunk, u, team, round);
    typename Codec::Sum x[S * C];
    source.template tile<S, C>(tile, x);
    if constexpr (Codec::ROTATED) rotate_tile<T>(x, team);
#pragma unroll
    for (int s = 0; s < S; ++s)
      store_elements<E, C>(target, tile.first + s * tile.stride, source.chunk.n, x + s * C);
  }
}

// ---- any unit at any address

// Calls f(block, team of it) for the blocks of unit u.
template <class Codec, class F>
ZC_DEVICE void each_block(const Chunk<Codec> &chunk, zc_i64 u, const Team &team, zc_u32 block_team, F f) {
  const zc_i64 next = chunk.first_block(u + 1), end = next < chunk.n_blocks() ? next : chunk.n_blocks();
  for (zc_i64 b = chunk.first_block(u) + team.rank / block_team; b < end; b += team.size / block_team)
    f(b, Team{team.rank % block_team, block_team});
}

// Calls f(tile, elements) for each of a thread's columns of block b. Where something is rotated, the lanes of a warp
// have neighbouring columns and go on together.
template <class Codec, class Source, class F>
ZC_DEVICE void each_column(const Chunk<Codec> &chunk, const Source &source, zc_i64 b, const Team &team, F f) {
  constexpr int S = Codec::SEGMENTS;
  constexpr bool TOGETHER = Codec::ROTATED || Source::ROTATED;
  static_assert(!Codec::ROTATED || !Source::ROTATED, "between rotated codecs nothing is rotated");
  const zc_i64 stride = chunk.stored(b) / S, lane = TOGETHER ? threadIdx.x % 32 : 0;
  Groups groups;
  for (zc_i64 column = team.rank; column - lane < stride; column += team.size) {
    const Tile tile{b, chunk.start(b) + column, column, stride};
    typename Source::Sum read[S];
    float x[S];
    if constexpr (TOGETHER) {
#pragma unroll 1
      for (int s = 0; s < S; ++s)
        read[s] = groups.template element<Source::ROTATED>(tile.first + s * stride - lane, stride - column + lane,
                                                           [&](zc_i64 e) { return (float)source.at(e); });
    } else {
      source.template tile<S, 1>(tile, read);
    }
#pragma unroll
    for (int s = 0; s < S; ++s) x[s] = (float)read[s];
    if (column < stride) f(tile, x);
  }
}

// Passes over each block: one for its scale, one for its codes. Before them, where units have a scale, one for that.
template <class Codec, class Source>
ZC_DEVICE void encode_any(const Chunk<Codec> &chunk, const Source &source, const Chance &chance, zc_i64 u,
                          const Team &team, zc_u32 block_team, zc_u8 *wire) {
  Codec codec = chunk.codec;
  zc_u32 largest = 0;  // of finite blocks
#pragma unroll 1  // the code of one pass serves all: it is large
  for (int last_pass = Codec::UNIT_SCALE_NBYTES ? 0 : 1; last_pass < 2; ++last_pass) {
    each_block(chunk, u, team, block_team, [&](zc_i64 b, const Team &of_block) {
      typename Codec::Seen seen;
      typename Codec::Scale scale{};
#pragma unroll 1
      for (int pass = 0; pass <= last_pass; ++pass) {
        each_column(chunk, source, b, of_block, [&](const Tile &tile, const float *x) {
          if (pass == 0) {
#pragma unroll
            for (int s = 0; s < Codec::SEGMENTS; ++s)
              if (tile.first + s * tile.stride < chunk.n) seen.see(x[s]);
          } else {
            store_codes<Codec::SEGMENTS, 1>(chunk, codec, tile, x, scale, chance, wire);
          }
        });
        if (pass == 0) {
          seen = of_block.most(seen);
          scale = scale_of(chunk, codec, b, seen, chance);
        }
      }
      largest = larger(largest, seen.finite());
      if (last_pass == 1 && of_block.rank == 0) store_bits(wire + chunk.scale_at(b), codec.stored(scale));
    });
    if constexpr (Codec::UNIT_SCALE_NBYTES) {
      if (last_pass == 1) break;
      const zc_u32 bits = codec.unit_scale(team.max(largest));
      if (team.rank == 0) store_bits(wire + chunk.unit_scale_at(u), bits);
    }
  }
}

template <class E, class Codec>
ZC_DEVICE void sum_any(const SumOf<Codec> &source, zc_i64 n_elems, zc_i64 u, const Team &team, zc_u32 block_team,
                       zc_u8 *target) {
  const Chunk<Codec> &chunk = source.chunk;
  if constexpr (Codec::ROTATED) {
    const zc_i64 first = u * chunk.codec.unit(), next = first + chunk.codec.unit();
    const zc_i64 end = next < chunk.n ? next : chunk.n;  // whole groups from `first` on
    for (zc_i64 e = first + team.rank; e < end; e += team.size) {
      const float x = rotate_lanes(source.at(e));
      store_elements<E, 1>(target, e, n_elems, &x);
    }
  } else {
    constexpr int S = Codec::SEGMENTS;
    each_block(chunk, u, team, block_team, [&](zc_i64 b, const Team &of_block) {
      const zc_i64 stride = chunk.stored(b) / S;
      for (zc_i64 column = of_block.rank; column < stride; column += of_block.size) {
        const Tile tile{b, chunk.start(b) + column, column, stride};
        typename Codec::Sum x[S];
        source.template tile<S, 1>(tile, x);
#pragma unroll
        for (int s = 0; s < S; ++s) store_elements<E, 1>(target, tile.first + s * stride, n_elems, x + s);
      }
    });
  }
}

// ---- the loops over units

ZC_DEVICE void zero(zc_u8 *wire, zc_i64 from, zc_i64 to, const Team &team) {
  for (zc_i64 i = from + team.rank; i < to; i += team.size) wire[i] = 0;
}

// Calls f(piece, unit in the piece, team) for each task of this thread's team.
template <class F>
ZC_DEVICE void each_task(const zc_job &job, zc_u32 team_size, F f) {
  const Team team{threadIdx.x % team_size, team_size};
  const zc_i64 teams_of_cta = ZC_THREADS / team_size;
  for (zc_i64 task = blockIdx.x * teams_of_cta + threadIdx.x / team_size; task < job.n_tasks;
       task += gridDim.x * teams_of_cta) {
    zc_i32 p = 0;
    while (p + 1 < job.n_pieces && job.pieces[p + 1].first_task <= task) ++p;
    f(job.pieces[p], task - job.pieces[p].first_task + job.pieces[p].first_unit, team);
  }
}

template <class Codec, class Source>
ZC_DEVICE void encode_chunks(const zc_job &job) {
  typedef Tiling<Codec, Source::VECTOR> T;
  const Codec codec(job.codec_out);
  each_task(job, T::FIXED ? T::TEAM : job.team, [&](const zc_piece &piece, zc_i64 u, const Team &team) {
    const Chunk<Codec> chunk(codec, piece.n_elems);
    const Source source(job, piece, Codec::ROTATED || Source::ROTATED ? 0 : codec.block());
    const Chance chance(job, piece);
    zc_u8 *wire = job.target + piece.target;
    if constexpr (T::FIXED)
      encode_whole(chunk, source, chance, u, team, wire);
    else
      encode_any(chunk, source, chance, u, team, job.block_team, wire);
    if (u + 1 == chunk.n_units()) {
      zero(wire, chunk.unit_scale_at(u + 1), chunk.scales_offset, team);
      zero(wire, chunk.scale_at(chunk.n_blocks()), chunk.codes_offset, team);
      zero(wire, chunk.codes_end(), chunk.nbytes(), team);
    }
  });
}

template <class Codec, class E>
ZC_DEVICE void sum_chunks(const zc_job &job) {
  typedef Tiling<Codec, E::VECTOR> T;
  each_task(job, T::FIXED ? T::TEAM : job.team, [&](const zc_piece &piece, zc_i64 u, const Team &team) {
    const SumOf<Codec> source(job, piece, Codec::ROTATED && !T::FIXED ? 0 : Codec(job.codec_in).block());
    zc_u8 *target = job.target + piece.target;
    if constexpr (T::FIXED)
      sum_whole<E>(source, u, team, target);
    else
      sum_any<E>(source, piece.n_elems, u, team, job.block_team, target);
    const zc_i64 nbytes = piece.n_elems * E::NBYTES;
    if (job.pads && u + 1 == source.chunk.n_units()) zero(target, nbytes, zc_padded(nbytes), team);
  });
}

// Bytes as they are: 16 for each task, whose pieces count bytes.
ZC_DEVICE void copy_chunks(const zc_job &job) {
  each_task(job, 1, [&](const zc_piece &piece, zc_i64 u, const Team &team) {
    const zc_u8 *source = job.sources[0] + piece.source;
    zc_u8 *target = job.target + piece.target;
    const zc_i64 first = 16 * u, last = first + 16 < piece.n_elems ? first + 16 : piece.n_elems;
    if (last - first == 16 && ((zc_u64)source | (zc_u64)target) % 16 == 0) {
      *(uint4 *)(target + first) = *(const uint4 *)(source + first);
    } else {
      for (zc_i64 i = first; i < last; ++i) target[i] = source[i];
      if (job.pads) zero(target, last, zc_padded(last), team);
    }
  });
}

#endif
