// Floats of 4 and 8 bits, LANES at a time. Same bits as cuda/minifloat.cuh.
//
// Included once per build of cpu/loops.cpp that has AVX2, inside its namespace.

// The codes of numbers that are no NaN, in the low bits. CLAMPS: some may be larger than the largest.
//
// Beside a power of two that is 2^23 steps of the format, a number's steps are counted in the lowest bits of the sum.
// The step doubles with each exponent e above the smallest, and codes go on counting where those before it ended, from
// 2^MANTISSA e on: that many are in the power of two beforehand. They are even, so ties go to even codes.
template <class Form, bool CLAMPS>
ZC_FN Words mini_codes(Floats x) {
  constexpr zc_u32 M = Form::MANTISSA, SMALLEST = 128 - Form::BIAS, MAGNITUDE = (1u << (Form::BITS - 1)) - 1;
  const Words bits = (Words)x;
  Words m = magnitudes(x);
  if (CLAMPS) m = smaller(m, all(zc_bits(Form::LARGEST)));
  const Words exponents = larger(m & all(ZC_INF), all(SMALLEST << 23));
  const Words anchor = exponents + (exponents >> (23 - M)) + all(((23 - M) << 23) - (SMALLEST << M));
  const Words sum = (Words)((Floats)m + (Floats)anchor);
  return (sum & all(MAGNITUDE)) | (bits >> (32 - Form::BITS) & all(MAGNITUDE + 1));
}

// ---- e4m3 and e5m2 back to numbers, through fp16, whose codes begin with the same bits

// 2 LANES numbers, of e4m3 (bias 7, fp16's is 15) 2^-8 of what they stand for. e4m3's NaN comes out as a number.
template <class Form>
struct Fp8Numbers {
  static constexpr float UNIT = Form::BIAS == 7 ? 256.0f : 1.0f;
  Floats x[2];

  ZC_FN Fp8Numbers of(const zc_u8 *codes) {
#ifdef __AVX512BW__
    __m512i halves = _mm512_cvtepi8_epi16(load_bytes(codes));
    halves = Form::BIAS == 7 ? _mm512_and_si512(_mm512_slli_epi16(halves, 7), _mm512_set1_epi16((short)0xbfff))
                             : _mm512_slli_epi16(halves, 8);
    return {{_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))}};
#else
    __m256i halves = _mm256_cvtepi8_epi16(load_half(codes));
    halves = Form::BIAS == 7 ? _mm256_and_si256(_mm256_slli_epi16(halves, 7), _mm256_set1_epi16((short)0xbfff))
                             : _mm256_slli_epi16(halves, 8);
    return {{_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))}};
#endif
  }
};

// Whether one of 2 LANES codes is e4m3's NaN.
ZC_FN bool has_e4m3_nan(const zc_u8 *codes) {
#ifdef __AVX512BW__
  const __m256i magnitude = _mm256_and_si256(load_bytes(codes), _mm256_set1_epi8(0x7f));
  return _mm256_cmpeq_epi8_mask(magnitude, _mm256_set1_epi8(0x7f)) != 0;
#else
  const __m128i magnitude = _mm_and_si128(load_half(codes), _mm_set1_epi8(0x7f));
  return _mm_movemask_epi8(_mm_cmpeq_epi8(magnitude, _mm_set1_epi8(0x7f))) != 0;
#endif
}

// ---- e2m1 back to numbers: all there are, times a scale, to pick from by code

struct E2m1Numbers {
#ifdef __AVX512BW__
  Floats products;

  ZC_FN E2m1Numbers times(float scale) {
    const Floats numbers = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                            -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return {numbers * all(scale)};
  }
  // Of the codes in the low four bits of each lane.
  __attribute__((always_inline)) Floats operator[](Words codes) const {
    return _mm512_permutexvar_ps((__m512i)codes, products);
  }
#else
  Floats products;  // of the numbers that are not negative

  ZC_FN E2m1Numbers times(float scale) {
    const Floats numbers = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return {numbers * all(scale)};
  }
  __attribute__((always_inline)) Floats operator[](Words codes) const {
    const Floats magnitude = _mm256_permutevar8x32_ps(products, (__m256i)codes);
    return (Floats)((Words)magnitude ^ (codes << 28 & all(~ZC_MAGNITUDE)));
  }
#endif
};
