// Elements of the four dtypes as fp32 and back, in tiles and, where AVX2 is there, eight at a time in registers.
//
// Same bits on every build: the vector forms are the formulas of cuda/wire.h, or instructions that round alike.
// Included once per build of cpu/loops.cpp, inside its namespace.

// Memory as it comes: any alignment, any type behind it.
typedef float float_at __attribute__((aligned(1), may_alias));
typedef double double_at __attribute__((aligned(1), may_alias));
typedef zc_u16 u16_at __attribute__((aligned(1), may_alias));
typedef zc_u32 u32_at __attribute__((aligned(1), may_alias));
typedef zc_u64 u64_at __attribute__((aligned(1), may_alias));

struct Float32 {
  static constexpr zc_i32 dtype = ZC_FLOAT32, size = 4;
  typedef float_at Stored;
  ZC_FN float widen(float x) { return x; }
  ZC_FN float narrow(float x) { return x; }
};
struct BFloat16 {
  static constexpr zc_i32 dtype = ZC_BFLOAT16, size = 2;
  typedef u16_at Stored;
  ZC_FN float widen(zc_u16 x) { return zc_from_bf16(x); }
  ZC_FN zc_u16 narrow(float x) { return zc_to_bf16(x); }
};
struct Float16 {
  static constexpr zc_i32 dtype = ZC_FLOAT16, size = 2;
  typedef u16_at Stored;
  ZC_FN float widen(zc_u16 x) { return zc_from_fp16(x); }
  ZC_FN zc_u16 narrow(float x) { return zc_to_fp16(x); }
};
struct Float64 {
  static constexpr zc_i32 dtype = ZC_FLOAT64, size = 8;
  typedef double_at Stored;
  ZC_FN float widen(double x) { return (float)x; }
  ZC_FN double narrow(float x) { return x; }
};

// Calls f with the element type of a dtype.
template <class F>
ZC_FN void with_element(zc_i32 dtype, F f) {
  switch (dtype) {
    case ZC_FLOAT32: return f(Float32());
    case ZC_BFLOAT16: return f(BFloat16());
    case ZC_FLOAT16: return f(Float16());
    default: return f(Float64());
  }
}

#ifdef __AVX2__
ZC_FN __m256i load_bytes(const zc_u8 *p) { return _mm256_loadu_si256((const __m256i *)p); }
ZC_FN __m128i load_half(const zc_u8 *p) { return _mm_loadu_si128((const __m128i *)p); }

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

// zc_to_bf16 of eight, in the low halves.
ZC_FN __m256i bf16_of(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), kept = _mm256_srli_epi32(u, 16);
  const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(kept, _mm256_set1_epi32(1)));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, half), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_and_si256(kept, _mm256_set1_epi32(0x8000)),
                                        _mm256_set1_epi32(ZC_BF16_QUIET_NAN));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

template <class E>
ZC_FN void store8(zc_u8 *p, __m256 x) {
  if constexpr (E::dtype == ZC_FLOAT32) {
    _mm256_storeu_ps((float *)p, x);
  } else if constexpr (E::dtype == ZC_BFLOAT16) {
    const __m256i h = bf16_of(x);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(h, h), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
  } else if constexpr (E::dtype == ZC_FLOAT16) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(_mm256_and_si256(u, _mm256_set1_epi32((int)0x80000000u)),
                                          _mm256_set1_epi32(0x7fc00000));
    const __m256 plain = _mm256_castsi256_ps(_mm256_blendv_epi8(u, quiet, is_nan));
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(plain, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else {
    _mm256_storeu_pd((double *)p, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    _mm256_storeu_pd((double *)p + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
}

// Sixteen at a time: for bfloat16 one packing instead of two.
template <class E>
ZC_FN void store16(zc_u8 *p, __m256 low, __m256 high) {
  if constexpr (E::dtype == ZC_BFLOAT16) {
    const __m256i packed = _mm256_packus_epi32(bf16_of(low), bf16_of(high));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
  } else {
    store8<E>(p, low);
    store8<E>(p + 8 * E::size, high);
  }
}

// As store8, past the caches. p is a multiple of 32 (16-bit elements: of 16).
template <class E>
ZC_FN void stream8(zc_u8 *p, __m256 x) {
  alignas(32) zc_u8 stored[8 * E::size];
  store8<E>(stored, x);
  if constexpr (E::size == 2) {
    _mm_stream_si128((__m128i *)p, load_half(stored));
  } else {
    for (int i = 0; i < 8 * E::size; i += 32) _mm256_stream_si256((__m256i *)(p + i), load_bytes(stored + i));
  }
}
#endif

#ifdef __AVX512F__
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
#endif

// n elements of From at source become elements of To at target, through fp32.
template <class From, class To>
ZC_FN void convert(const zc_u8 *__restrict source, zc_i64 n, zc_u8 *__restrict target) {
  zc_i64 i = 0;
#ifdef __AVX2__
  for (; i + 16 <= n; i += 16) {
    const zc_u8 *x = source + i * From::size;
    store16<To>(target + i * To::size, load8<From>(x), load8<From>(x + 8 * From::size));
  }
#endif
  const typename From::Stored *from = (const typename From::Stored *)source;
  typename To::Stored *to = (typename To::Stored *)target;
  for (; i < n; ++i) to[i] = To::narrow(From::widen(from[i]));
}
