// hadamard as the kernels' loops take it: another codec whose elements are rotated (hadamard.cuh, rotation.cuh).
//
//   chunk:  Inner's, of as many elements as whole groups of 32 have
//
// A unit has whole groups, so a team can rotate it: where Inner's is shorter, it is some of Inner's together.
#ifndef ZCOMM_HADAMARD_CODEC_CUH
#define ZCOMM_HADAMARD_CODEC_CUH

#include "block_codec.cuh"

template <class Inner>
struct Hadamard : Inner {
  static constexpr bool ROTATED = true;
  static constexpr int UNIT = Inner::BLOCK && Inner::UNIT < ZC_ROTATE_GROUP ? ZC_ROTATE_GROUP : Inner::UNIT;
  using Inner::Inner;

  ZC_DEVICE zc_i32 unit() const { return Inner::unit() < ZC_ROTATE_GROUP ? ZC_ROTATE_GROUP : Inner::unit(); }
};

#endif
