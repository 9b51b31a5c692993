// Where the parts of a chunk are, and how threads share it.
//
//   chunk:  [scale of unit 0, 1, ..., if units have any][zeros to 16][scale of block 0, 1, ...][zeros to 16]
//           [codes of block 0, 1, ...][zeros to 16]
//   unit:   the elements of a task: a block, or the blocks that share more than a scale
//   block of r elements:  element s * r/S + t is segment s, column t
//   tile:   a thread's part of a block: C neighbouring columns of every segment
//
// A team of 1, 2, 4 ... 32 threads, or a whole CTA, shares a unit, and a part of the team a block. A thread has whole
// columns, so packing needs no exchange; only what a scale depends on does, and a rotation. Element counts and offsets
// are 64-bit throughout.
#ifndef ZCOMM_CHUNK_CUH
#define ZCOMM_CHUNK_CUH

#include "hadamard.cuh"
#include "job.cuh"
#include "planes.cuh"

template <class Codec>
struct Chunk {
  Codec codec;
  zc_i64 n;  // elements that have codes
  zc_i64 scales_offset, codes_offset;

  ZC_DEVICE Chunk(const Codec &codec, zc_i64 n_elems)
      : codec(codec), n(Codec::ROTATED ? zc_n_rotated(n_elems) : n_elems) {
    scales_offset = zc_padded(n_units() * Codec::UNIT_SCALE_NBYTES);
    codes_offset = scales_offset + zc_padded(n_blocks() * Codec::SCALE_NBYTES);
  }
  ZC_DEVICE zc_i64 n_units() const { return (n + codec.unit() - 1) / codec.unit(); }
  ZC_DEVICE zc_i64 n_blocks() const { return (n + codec.block() - 1) / codec.block(); }
  ZC_DEVICE zc_i64 unit_of(zc_i64 b) const { return b / (codec.unit() / codec.block()); }
  ZC_DEVICE zc_i64 first_block(zc_i64 u) const { return u * (codec.unit() / codec.block()); }
  ZC_DEVICE zc_i64 start(zc_i64 b) const { return b * codec.block(); }  // first element of block b
  ZC_DEVICE zc_i64 present(zc_i64 b) const { return n - start(b) < codec.block() ? n - start(b) : codec.block(); }
  ZC_DEVICE zc_i64 stored(zc_i64 b) const { return (present(b) + 7) / 8 * 8; }  // elements, with those it lacks
  ZC_DEVICE zc_i64 unit_scale_at(zc_i64 u) const { return u * Codec::UNIT_SCALE_NBYTES; }
  ZC_DEVICE zc_i64 scale_at(zc_i64 b) const { return scales_offset + b * Codec::SCALE_NBYTES; }
  ZC_DEVICE zc_i64 codes_at(zc_i64 b) const { return codes_offset + start(b) / 8 * codec.bits(); }
  ZC_DEVICE zc_i64 codes_end() const { return codes_offset + (n + 7) / 8 * codec.bits(); }
  ZC_DEVICE zc_i64 nbytes() const { return codes_offset + zc_padded(codes_end() - codes_offset); }

  // What decoding needs of block b, besides its codes.
  template <bool ALIGNED>
  ZC_DEVICE auto shared(const zc_u8 *wire, zc_i64 b) const {
    const auto bits = load_bits<typename Codec::ScaleBits, ALIGNED>(wire + scale_at(b));
    if constexpr (Codec::UNIT_SCALE_NBYTES)
      return codec.shared(bits, load_bits<zc_u32, ALIGNED>(wire + unit_scale_at(unit_of(b))));
    else
      return codec.shared(bits);
  }
};

ZC_DEVICE zc_u32 larger(zc_u32 a, zc_u32 b) { return a > b ? a : b; }

// The threads that share a task, or a part of it.
struct Team {
  zc_u32 rank, size;

  // Its lanes in its warp.
  ZC_DEVICE zc_u32 mask() const {
    return size < 32 ? ((1u << size) - 1) << (threadIdx.x % 32 / size * size) : 0xffffffffu;
  }

  // The largest value of the team, on each of its threads.
  ZC_DEVICE zc_u32 max(zc_u32 value) const {
    const zc_u32 lane = threadIdx.x % 32, width = size < 32 ? size : 32;
    for (zc_u32 distance = width / 2; distance > 0; distance /= 2)
      value = larger(value, __shfl_xor_sync(mask(), value, distance));
    if (size > 32) {
      __shared__ zc_u32 of_warp[ZC_THREADS / 32];
      if (lane == 0) of_warp[threadIdx.x / 32] = value;
      __syncthreads();
      for (int warp = 0; warp < ZC_THREADS / 32; ++warp) value = larger(value, of_warp[warp]);
      __syncthreads();
    }
    return value;
  }

  // The largest of each number that the team's threads have seen.
  template <class Seen>
  ZC_DEVICE Seen most(Seen seen) const {
    for (zc_u32 &number : seen.numbers) number = max(number);
    return seen;
  }
};

// One thread's part of a block.
struct Tile {
  zc_i64 block, first, column, stride;  // first: of the chunk's elements; the others are first + s * stride + c
};

ZC_FN constexpr int zc_least(int a, int b) { return a < b ? a : b; }

// How a team shares a unit of Codec, where VECTOR elements make a good load or store. Same rule in `_shape` of
// zcomm/engines/cuda.py.
template <class Codec, int VECTOR>
struct Tiling {
  static constexpr bool FIXED = Codec::BLOCK != 0;  // otherwise the job says it
  static constexpr int S = Codec::SEGMENTS, BLOCK = Codec::BLOCK, STRIDE = BLOCK / S;
  static constexpr int COLUMNS = zc_least(Codec::COLUMNS ? Codec::COLUMNS : VECTOR, S == 8 ? 4 : 8);
  static constexpr int C = FIXED ? zc_least(COLUMNS, STRIDE) : 1;
  static constexpr int BLOCKS = FIXED ? Codec::UNIT / BLOCK : 0;  // of a unit
  static constexpr int BLOCK_TILES = BLOCK / (S * C), TILES = BLOCKS * BLOCK_TILES;
  static constexpr int TEAM = zc_least(TILES, 32), BLOCK_TEAM = zc_least(BLOCK_TILES, 32);
  static constexpr int ROUNDS = FIXED ? TILES / TEAM : 1;  // tiles of a thread

  // Where BLOCK is a constant: this thread's tile of unit u.
  static ZC_DEVICE Tile tile(const Chunk<Codec> &chunk, zc_i64 u, const Team &team, int round) {
    const int number = team.rank + round * TEAM;
    const zc_i64 block = u * BLOCKS + number / BLOCK_TILES, column = number % BLOCK_TILES * C;
    return Tile{block, chunk.start(block) + column, column, STRIDE};
  }
};

#endif
