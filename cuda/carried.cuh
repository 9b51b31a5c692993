// raw and cast as the kernels' loops take them: elements of one type, with no scales and nothing to pack.
//
//   chunk:  [n elements][zeros to 16]
//
// A "block" is 8 elements, which one thread moves as vectors, or 8 threads one by one. Encoding such a chunk is a sum
// of one, narrowed to the chunk's type.
#ifndef ZCOMM_CARRIED_CUH
#define ZCOMM_CARRIED_CUH

#include "codec_kernels.cuh"

template <class E, int BLOCK_>  // 8, or 0 for any address and the elements that are left
struct Carried {
  typedef E Element;
  typedef typename E::Sum Sum;
  static constexpr bool HAS_BLOCKS = false, ROTATED = false;
  static constexpr int BLOCK = BLOCK_, UNIT = BLOCK_, SEGMENTS = 1, COLUMNS = 8;
  static constexpr int SCALE_NBYTES = 0, UNIT_SCALE_NBYTES = 0;

  ZC_DEVICE explicit Carried(const zc_settings &) {}
  ZC_DEVICE zc_i32 bits() const { return 8 * E::NBYTES; }
  ZC_DEVICE zc_i32 block() const { return 8; }
  ZC_DEVICE zc_i32 unit() const { return 8; }
};

#endif
