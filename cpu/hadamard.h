// The rotation of cuda/hadamard.cuh over groups of 32 floats in place. Same bits on every build.
//
// Included once per build of cpu/loops.cpp, inside its namespace.

// The vector forms make all first elements of a stage's pairs one vector and all second ones another, so a stage is one
// addition and one subtraction. An element's place then has the bits of its index in another order, which is put right
// at the end; bits of the index are written as they lie: those of the place in a vector from its low end, then the
// vector's number.

#if defined(__AVX512F__)
// H of 32 elements in two vectors: 0123 4.
ZC_FN void hadamard32(__m512 (&x)[2]) {
  const auto pairs_in_lanes = [&] {  // abcd e -> becd a, and the stage of a
    const __m512 first = _mm512_shuffle_ps(x[0], x[1], 0x88), second = _mm512_shuffle_ps(x[0], x[1], 0xdd);
    x[0] = _mm512_add_ps(first, second), x[1] = _mm512_sub_ps(first, second);
  };
  const auto pairs_of_lanes = [&] {  // abcd e -> abde c, and the stage of c
    const __m512 first = _mm512_shuffle_f32x4(x[0], x[1], 0x88), second = _mm512_shuffle_f32x4(x[0], x[1], 0xdd);
    x[0] = _mm512_add_ps(first, second), x[1] = _mm512_sub_ps(first, second);
  };
  pairs_in_lanes();  // 1423 0
  pairs_in_lanes();  // 4023 1
  pairs_of_lanes();  // 4031 2
  pairs_of_lanes();  // 4012 3
  pairs_in_lanes();  // 0312 4
  const __m512i in_order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  for (int i = 0; i < 2; ++i) x[i] = _mm512_permutexvar_ps(in_order, x[i]);
}

// Rotates the 32 elements at `from` into `to`; the largest magnitude bits of either half.
template <class E>
ZC_FN __m512i rotate_group(const zc_u8 *from, float scale, float_at *to) {
  __m512 x[2];
  for (int i = 0; i < 2; ++i) x[i] = _mm512_mul_ps(load16<E>(from + 16 * i * E::size), _mm512_set1_ps(scale));
  hadamard32(x);
  for (int i = 0; i < 2; ++i) _mm512_storeu_ps(to + 16 * i, x[i]);
  const __m512i magnitude = _mm512_set1_epi32(ZC_MAGNITUDE);
  return _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x[0]), magnitude),
                          _mm512_and_si512(_mm512_castps_si512(x[1]), magnitude));
}
#elif defined(__AVX2__)
// H of 32 elements in four vectors: 012 34.
ZC_FN void hadamard32(__m256 (&x)[4]) {
  const auto sum_and_difference = [&](int i, int j, __m256 first, __m256 second) {
    x[i] = _mm256_add_ps(first, second), x[j] = _mm256_sub_ps(first, second);
  };
  const auto pairs_in_lanes = [&] {  // abc de -> bdc ae, and the stage of a
    for (int i = 0; i < 4; i += 2)
      sum_and_difference(i, i + 1, _mm256_shuffle_ps(x[i], x[i + 1], 0x88), _mm256_shuffle_ps(x[i], x[i + 1], 0xdd));
  };
  pairs_in_lanes();              // 132 04
  pairs_in_lanes();              // 302 14
  for (int i = 0; i < 4; i += 2)  // 301 24
    sum_and_difference(i, i + 1, _mm256_permute2f128_ps(x[i], x[i + 1], 0x20),
                       _mm256_permute2f128_ps(x[i], x[i + 1], 0x31));
  pairs_in_lanes();  // 021 34
  for (int i = 0; i < 2; ++i) sum_and_difference(i, i + 2, x[i], x[i + 2]);
  for (int i = 0; i < 4; ++i)
    x[i] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x[i]), 0xd8));
}

// Rotates the 32 elements at `from` into `to`; the largest magnitude bits of each quarter.
template <class E>
ZC_FN __m256i rotate_group(const zc_u8 *from, float scale, float_at *to) {
  __m256 x[4];
  for (int i = 0; i < 4; ++i) x[i] = _mm256_mul_ps(load8<E>(from + 8 * i * E::size), _mm256_set1_ps(scale));
  hadamard32(x);
  __m256i amax = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps((float *)(to + 8 * i), x[i]);
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(x[i]), _mm256_set1_epi32(ZC_MAGNITUDE));
    amax = _mm256_max_epi32(amax, bits);
  }
  return amax;
}
#else
template <class E>
ZC_FN void rotate_group(const zc_u8 *from, float scale, float_at *to) {
  float x[ZC_ROTATE_GROUP], y[ZC_ROTATE_GROUP];
  for (int i = 0; i < ZC_ROTATE_GROUP; ++i) x[i] = zc_mul(((const float_at *)from)[i], scale);
  for (int distance = 1; distance < ZC_ROTATE_GROUP; distance *= 2) {
    for (int i = 0; i < ZC_ROTATE_GROUP; ++i) y[i] = zc_butterfly(x[i], x[i ^ distance], (i & distance) != 0);
    __builtin_memcpy(x, y, sizeof x);
  }
  for (int i = 0; i < ZC_ROTATE_GROUP; ++i) to[i] = x[i];
}
#endif

// n is a multiple of 32.
ZC_FN void rotate(float_at *x, zc_i64 n) {
  for (zc_i64 i = 0; i < n; i += ZC_ROTATE_GROUP) rotate_group<Float32>((const zc_u8 *)(x + i), ZC_ROTATE_SCALE, x + i);
}
ZC_FN void rotate_back(float_at *y, zc_i64 n) {
  for (zc_i64 i = 0; i < n; i += ZC_ROTATE_GROUP) rotate_group<Float32>((const zc_u8 *)(y + i), 1.0f, y + i);
}
