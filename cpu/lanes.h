// As many fp32 numbers as a register holds, 16 by AVX-512 and 8 by AVX2: loads, arithmetic, stores.
//
// Same bits on every build: the vector forms are the formulas of cuda/wire.h, or instructions that round alike.
// Included once per build of cpu/loops.cpp that has AVX2, inside its namespace.

#ifdef __AVX512BW__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef zc_u32 Words __attribute__((vector_size(4 * LANES)));  // the bits of Floats

ZC_FN __m256i load_bytes(const zc_u8 *p) { return _mm256_loadu_si256((const __m256i *)p); }
ZC_FN __m128i load_half(const zc_u8 *p) { return _mm_loadu_si128((const __m128i *)p); }

// Eight elements.
template <class E>
ZC_FN __m256 load8(const zc_u8 *p) {
  if constexpr (E::dtype == ZC_FLOAT32) {
    return _mm256_loadu_ps((const float *)p);
  } else if constexpr (E::dtype == ZC_BFLOAT16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p)), 16));
  } else if constexpr (E::dtype == ZC_FLOAT16) {
    return _mm256_cvtph_ps(load_half(p));
  } else {
    __m128 low = _mm256_cvtpd_ps(_mm256_loadu_pd((const double *)p));
    __m128 high = _mm256_cvtpd_ps(_mm256_loadu_pd((const double *)p + 4));
    return _mm256_set_m128(high, low);
  }
}

#ifdef __AVX512BW__
template <class E>
ZC_FN __m512 load16(const zc_u8 *p) {
  if constexpr (E::dtype == ZC_FLOAT32) {
    return _mm512_loadu_ps(p);
  } else if constexpr (E::dtype == ZC_BFLOAT16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_bytes(p)), 16));
  } else if constexpr (E::dtype == ZC_FLOAT16) {
    return _mm512_cvtph_ps(load_bytes(p));
  } else {
    const __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps(_mm512_loadu_pd(p)));
    return _mm512_insertf32x8(low, _mm512_cvtpd_ps(_mm512_loadu_pd(p + 64)), 1);
  }
}

template <class E>
ZC_FN Floats load(const zc_u8 *p) {
  return load16<E>(p);
}
ZC_FN Floats all(float x) { return _mm512_set1_ps(x); }
ZC_FN Words all(zc_u32 x) { return (Words)_mm512_set1_epi32((zc_i32)x); }
ZC_FN Words larger(Words a, Words b) { return (Words)_mm512_max_epi32((__m512i)a, (__m512i)b); }    // of magnitudes
ZC_FN Words smaller(Words a, Words b) { return (Words)_mm512_min_epi32((__m512i)a, (__m512i)b); }
ZC_FN Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
ZC_FN Words bytes_of(const zc_u8 *p) { return (Words)_mm512_cvtepu8_epi32(load_half(p)); }
// A byte in each lane, shifted down by a multiplication: where shuffles are many, they and shifts wait for each other.
ZC_FN Words upper_nibbles(Words bytes) { return (Words)_mm512_mulhi_epu16((__m512i)bytes, _mm512_set1_epi16(0x1000)); }
ZC_FN bool any_nan(Floats a, Floats b) {
  return (_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q)) != 0;
}
ZC_FN Floats quiet_nans(Floats x, zc_u32 quiet) {
  const __m512i signs = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((zc_i32)~ZC_MAGNITUDE));
  const __m512i nans = _mm512_or_si512(signs, _mm512_set1_epi32((zc_i32)quiet));
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_ps(nans));
}
// The upper halves of all lanes of a, then of b.
ZC_FN __m512i upper_halves(Words a, Words b) {
  alignas(64) static constexpr zc_u16 ODD[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(ODD), (__m512i)b);
}
ZC_FN __m512i fp16_of(Floats a, Floats b) {
  constexpr int ROUNDING = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(a, ROUNDING));
  return _mm512_inserti64x4(low, _mm512_cvtps_ph(b, ROUNDING), 1);
}
// The low bytes of 4 LANES words, which hold nothing else, in order.
ZC_FN void store_bytes(zc_u8 *to, const Words (&q)[4]) {
  const __m512i low = _mm512_packus_epi32((__m512i)q[0], (__m512i)q[1]);
  const __m512i high = _mm512_packus_epi32((__m512i)q[2], (__m512i)q[3]);
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(in_order, _mm512_packus_epi16(low, high)));
}
// One register to memory. PAST_CACHES: `to` is a multiple of its size.
template <bool PAST_CACHES>
ZC_FN void store(zc_u8 *to, __m512i x) {
  if constexpr (PAST_CACHES)
    _mm512_stream_si512((__m512i *)to, x);
  else
    _mm512_storeu_si512(to, x);
}
template <bool PAST_CACHES>
ZC_FN void store(zc_u8 *to, __m512 x) {
  store<PAST_CACHES>(to, _mm512_castps_si512(x));
}
template <bool PAST_CACHES>
ZC_FN void store_doubles(zc_u8 *to, __m512 x) {
  store<PAST_CACHES>(to, _mm512_castpd_si512(_mm512_cvtps_pd(_mm512_castps512_ps256(x))));
  store<PAST_CACHES>(to + 64, _mm512_castpd_si512(_mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))));
}
#else
template <class E>
ZC_FN Floats load(const zc_u8 *p) {
  return load8<E>(p);
}
ZC_FN Floats all(float x) { return _mm256_set1_ps(x); }
ZC_FN Words all(zc_u32 x) { return (Words)_mm256_set1_epi32((zc_i32)x); }
ZC_FN Words larger(Words a, Words b) { return (Words)_mm256_max_epi32((__m256i)a, (__m256i)b); }    // of magnitudes
ZC_FN Words smaller(Words a, Words b) { return (Words)_mm256_min_epi32((__m256i)a, (__m256i)b); }
ZC_FN Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
ZC_FN Words bytes_of(const zc_u8 *p) { return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
ZC_FN Words upper_nibbles(Words bytes) { return bytes >> 4; }
ZC_FN bool any_nan(Floats a, Floats b) {
  const __m256 nans = _mm256_or_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q), _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
  return _mm256_movemask_ps(nans) != 0;
}
ZC_FN Floats quiet_nans(Floats x, zc_u32 quiet) {
  const __m256 signs = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32((zc_i32)~ZC_MAGNITUDE)));
  const __m256 nans = _mm256_or_ps(signs, _mm256_castsi256_ps(_mm256_set1_epi32((zc_i32)quiet)));
  return _mm256_blendv_ps(x, nans, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
ZC_FN __m256i upper_halves(Words a, Words b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16)), 0xd8);
}
ZC_FN __m256i fp16_of(Floats a, Floats b) {
  constexpr int ROUNDING = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm256_set_m128i(_mm256_cvtps_ph(b, ROUNDING), _mm256_cvtps_ph(a, ROUNDING));
}
// The low bytes of 4 LANES words, which hold nothing else, in order.
ZC_FN void store_bytes(zc_u8 *to, const Words (&q)[4]) {
  const __m256i low = _mm256_packus_epi32((__m256i)q[0], (__m256i)q[1]);
  const __m256i high = _mm256_packus_epi32((__m256i)q[2], (__m256i)q[3]);
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_order));
}
// One register to memory. PAST_CACHES: `to` is a multiple of its size.
template <bool PAST_CACHES>
ZC_FN void store(zc_u8 *to, __m256i x) {
  if constexpr (PAST_CACHES)
    _mm256_stream_si256((__m256i *)to, x);
  else
    _mm256_storeu_si256((__m256i *)to, x);
}
template <bool PAST_CACHES>
ZC_FN void store(zc_u8 *to, __m256 x) {
  store<PAST_CACHES>(to, _mm256_castps_si256(x));
}
template <bool PAST_CACHES>
ZC_FN void store_doubles(zc_u8 *to, __m256 x) {
  store<PAST_CACHES>(to, _mm256_castpd_si256(_mm256_cvtps_pd(_mm256_castps256_ps128(x))));
  store<PAST_CACHES>(to + 32, _mm256_castpd_si256(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))));
}
#endif

ZC_FN Words magnitudes(Floats x) { return (Words)x & all(ZC_MAGNITUDE); }

// zc_to_bf16 of numbers that are no NaN, in the upper halves.
ZC_FN Words bf16_rounded(Floats x) {
  const Words bits = (Words)x;
  return bits + all(0x7fffu) + (bits >> 16 & all(1u));
}

// 2 LANES numbers as elements of type E.
template <class E, bool PAST_CACHES>
ZC_FN void store_pair(zc_u8 *to, Floats a, Floats b) {
  if constexpr (E::size == 2) {
    if (__builtin_expect(any_nan(a, b), 0)) {
      // Without a fraction below, a bfloat16 NaN is not rounded up; in fp16 it is the quiet one.
      a = quiet_nans(a, (zc_u32)ZC_BF16_QUIET_NAN << 16);
      b = quiet_nans(b, (zc_u32)ZC_BF16_QUIET_NAN << 16);
    }
    if constexpr (E::dtype == ZC_BFLOAT16)
      store<PAST_CACHES>(to, upper_halves(bf16_rounded(a), bf16_rounded(b)));
    else
      store<PAST_CACHES>(to, fp16_of(a, b));
  } else if constexpr (E::size == 4) {
    store<PAST_CACHES>(to, a);
    store<PAST_CACHES>(to + 4 * LANES, b);
  } else {
    store_doubles<PAST_CACHES>(to, a);
    store_doubles<PAST_CACHES>(to + 8 * LANES, b);
  }
}

// Registers to sum in. From -0 on, the first number added is what remains of it, its sign if it is 0 included.
template <int N>
ZC_FN void clear(Floats (&sums)[N]) {
  for (int j = 0; j < N; ++j) sums[j] = all(-0.0f);
}

// Where finished sums go: an array of type E, whose registers' worth of elements are whole registers in memory too if
// PAST_CACHES.
template <class E, bool PAST_CACHES>
struct Sink {
  typedef E Element;
  zc_u8 *target;
  float factor = 1.0f, divisor = 1.0f;

  // Elements i, i + 1, ... i + N LANES - 1.
  template <int N>
  __attribute__((always_inline)) void put(zc_i64 i, const Floats (&sums)[N]) const {
    Floats x[N];
    for (int j = 0; j < N; ++j) x[j] = sums[j];
    if (factor != 1.0f)
      for (int j = 0; j < N; ++j) x[j] = x[j] * all(factor);
    if (divisor != 1.0f)
      for (int j = 0; j < N; ++j) x[j] = x[j] / all(divisor);
    for (int j = 0; j < N; j += 2) store_pair<E, PAST_CACHES>(target + (i + j * LANES) * E::size, x[j], x[j + 1]);
  }

  // Elements i, i + 1, ... i + count - 1, a multiple of 2 LANES.
  void put(zc_i64 i, const float *sums, zc_i64 count) const {
    for (zc_i64 j = 0; j < count; j += 2 * LANES) {
      const Floats x[2] = {load<Float32>((const zc_u8 *)(sums + j)), load<Float32>((const zc_u8 *)(sums + j + LANES))};
      put(i + j, x);
    }
  }
};
