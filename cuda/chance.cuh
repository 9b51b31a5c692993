// The random bits of a tile's elements (philox.cuh): one call of the generator for up to eight neighbours.
#ifndef ZCOMM_CHANCE_CUH
#define ZCOMM_CHANCE_CUH

#include "chunk.cuh"
#include "philox.cuh"

// Those of one chunk.
struct Chance {
  zc_u64 seed, call, number;  // number: eights of elements before the chunk
  zc_i64 skipped;             // elements before the chunk, but for those

  ZC_DEVICE Chance(const zc_job &job, const zc_piece &piece)
      : seed(job.seed), call(job.call), number(job.first / 8), skipped(job.first % 8 + piece.drawn) {}

  // Sixteen bits each for elements e ... e + C - 1 of the chunk.
  template <int C>
  ZC_DEVICE void half_words(zc_i64 e, zc_u32 *out) const {
    e += skipped;
    const zc_u32 skip = e % 8;
    const zc_words words = zc_philox(number + e / 8, call, seed);
    if (C == 8 && skip == 0) {
#pragma unroll
      for (int c = 0; c < C; ++c) out[c] = zc_half_word(words, c);
      return;
    }
    const zc_words next = C > 1 && skip + C > 8 ? zc_philox(number + e / 8 + 1, call, seed) : words;
#pragma unroll
    for (int c = 0; c < C; ++c) out[c] = zc_half_word(skip + c < 8 ? words : next, (skip + c) % 8);
  }
};

#endif
