// The rotation of hadamard codecs, the scalar rules (docs/wire-format.md, hadamard).
//
//   there:  y = H x / 32 in groups of 32: every element times ZC_ROTATE_SCALE, then the stages
//   back:   x = H y: the stages alone
//   stages: at distances 1, 2, 4, 8, 16 in this order, element i and element i + distance, where i & distance is 0,
//           become their sum and their difference, each rounded by itself
//
// With an element in each lane of a warp a stage is v = zc_butterfly(v, __shfl_xor_sync(all, v, distance), lane &
// distance). Same names in zcomm/wire/hadamard.py.
#ifndef ZCOMM_HADAMARD_CUH
#define ZCOMM_HADAMARD_CUH

#include "wire.h"

#define ZC_ROTATE_GROUP 32
#define ZC_ROTATE_SCALE 0.03125f

// What an element becomes in a stage: `other` is its partner; `upper` says that it is the second of the two.
ZC_FN float zc_butterfly(float own, float other, bool upper) { return zc_add(upper ? -own : own, other); }

// Elements of the inner codec's chunk.
ZC_FN zc_i64 zc_n_rotated(zc_i64 n) { return (n + ZC_ROTATE_GROUP - 1) / ZC_ROTATE_GROUP * ZC_ROTATE_GROUP; }

#endif
