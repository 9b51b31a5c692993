// The rotation of hadamard codecs among threads: the stages of hadamard.cuh over the tiles of a team, or over a warp.
#ifndef ZCOMM_ROTATION_CUH
#define ZCOMM_ROTATION_CUH

#include "chunk.cuh"

// x of the threads of a team are tiles by T of a whole unit, or of as many blocks as the team has: every group of 32
// elements in it goes through the stages. An element's index in its group has these bits, from its low end: column in
// the tile, tile in the segment, segment, block. A stage pairs elements of a thread, or equal places of two threads.
template <class T>
ZC_DEVICE void rotate_tile(float *x, const Team &team) {
#pragma unroll
  for (int distance = 1; distance < ZC_ROTATE_GROUP; distance *= 2) {
    const bool in_segment = distance < T::STRIDE;
    if (distance < T::C || (!in_segment && distance < T::BLOCK)) {
      const int apart = in_segment ? distance : distance / T::STRIDE * T::C;
#pragma unroll
      for (int i = 0; i < T::S * T::C; ++i)
        if (!(i & apart)) {
          const float first = x[i], second = x[i + apart];
          x[i] = zc_butterfly(first, second, false);
          x[i + apart] = zc_butterfly(second, first, true);
        }
    } else {
      const zc_u32 apart = in_segment ? distance / T::C : distance / T::BLOCK * T::BLOCK_TEAM;
#pragma unroll
      for (int i = 0; i < T::S * T::C; ++i)
        x[i] = zc_butterfly(x[i], __shfl_xor_sync(team.mask(), x[i], apart), team.rank & apart);
    }
  }
}

// A group with an element in each lane of a warp, all of which come here together.
ZC_RARE float rotate_lanes(float x) {
  const zc_u32 lane = threadIdx.x % 32;
  for (zc_u32 distance = 1; distance < ZC_ROTATE_GROUP; distance *= 2)
    x = zc_butterfly(x, __shfl_xor_sync(0xffffffffu, x, distance), lane & distance);
  return x;
}

// Rotated elements for a warp whose lanes need neighbouring ones, wherever those lie in their groups.
class Groups {
  zc_i64 kept_ = -1;  // the group that was rotated last
  float element_ = 0;  // this lane's of it

  template <bool BACK, class At>
  ZC_DEVICE float of(zc_i64 group, const At &at) {
    if (group != kept_) {
      const float x = at(group * ZC_ROTATE_GROUP + threadIdx.x % 32);
      element_ = rotate_lanes(BACK ? x : zc_mul(x, ZC_ROTATE_SCALE));
      kept_ = group;
    }
    return element_;
  }

 public:
  // Element first + lane, for the first `count` lanes; at(e) is element e as it was.
  template <bool BACK, class At>
  ZC_DEVICE float element(zc_i64 first, zc_i64 count, const At &at) {
    const zc_u32 skipped = first % ZC_ROTATE_GROUP, wanted = threadIdx.x % 32 + skipped, from = wanted % 32;
    float x = __shfl_sync(0xffffffffu, of<BACK>(first / ZC_ROTATE_GROUP, at), from);
    if (skipped + count > ZC_ROTATE_GROUP) {
      const float next = __shfl_sync(0xffffffffu, of<BACK>(first / ZC_ROTATE_GROUP + 1, at), from);
      x = wanted < ZC_ROTATE_GROUP ? x : next;
    }
    return x;
  }
};

#endif
