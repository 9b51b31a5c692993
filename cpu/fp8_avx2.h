// Whole blocks of e4m3 and e5m2 codes by AVX2, through fp16: its numbers hold theirs, its codes begin with the same bits.
// Blocks are a multiple of 64. Same bits as cuda/minifloat.cuh. Included once per build of cpu/loops.cpp that has AVX2,
// inside its namespace and `namespace avx2`.

// Eight numbers rounded to steps of a float with this fraction and bias. Beside 1.5 * 2^k a unit is 2^(k - 23): k is
// chosen so that this is the step.
template <int MANTISSA, int BIAS>
ZC_FN __m256 to_steps(__m256 x) {
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32((int)ZC_INF));
  const __m256i normal = _mm256_max_epi32(exponent, _mm256_set1_epi32((128 - BIAS) << 23));
  const __m256i large = _mm256_add_epi32(normal, _mm256_set1_epi32((23 - MANTISSA) << 23 | 0x400000));
  const __m256 anchor = _mm256_castsi256_ps(large);
  return _mm256_sub_ps(_mm256_add_ps(x, anchor), anchor);
}

// 32 elements as 32 codes. e4m3 has bias 7, fp16 15: numbers 2^-8 as large have the same bits. SCALED: inv is that much
// smaller already. Signs are those of the elements, for steps lose that of a zero.
template <class Form, bool SCALED, class E>
ZC_FN __m256i fp8_codes32(const zc_u8 *x, __m256 inv) {
  __m256i number[4], magnitude[2];
  for (int i = 0; i < 2; ++i) {
    __m128i halves[2];
    for (int j = 0; j < 2; ++j) {
      const __m256 of_8 = _mm256_mul_ps(load8<E>(x + (16 * i + 8 * j) * E::size), inv);
      __m256 steps = to_steps<Form::MANTISSA, SCALED ? 15 : Form::BIAS>(of_8);
      if (Form::BIAS == 7 && !SCALED) steps = _mm256_mul_ps(steps, _mm256_set1_ps(0x1p-8f));
      halves[j] = _mm256_cvtps_ph(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      number[2 * i + j] = _mm256_castps_si256(of_8);
    }
    const __m256i h = _mm256_set_m128i(halves[1], halves[0]);
    magnitude[i] = _mm256_srli_epi16(Form::BIAS == 7 ? _mm256_slli_epi16(h, 1) : h, 8);
  }
  // Saturated, a negative number's bits are 0x80.
  const __m256i signs = _mm256_packs_epi16(_mm256_packs_epi32(number[0], number[1]),
                                           _mm256_packs_epi32(number[2], number[3]));
  const __m256i in_order = _mm256_permutevar8x32_epi32(signs, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const __m256i codes = _mm256_permute4x64_epi64(_mm256_packus_epi16(magnitude[0], magnitude[1]), 0xd8);
  return _mm256_or_si256(codes, _mm256_and_si256(in_order, _mm256_set1_epi8((char)0x80)));
}

template <class Form, bool SCALED, class E>
ZC_FN void quantize_fp8_by(const zc_u8 *x, zc_i64 block, float inv_scale, zc_u8 *codes) {
  const __m256 inv = _mm256_set1_ps(inv_scale);
  for (zc_i64 j = 0; j < block; j += 32)
    _mm256_storeu_si256((__m256i *)(codes + j), fp8_codes32<Form, SCALED, E>(x + j * E::size, inv));
}

template <class Form, class E>
ZC_FN void quantize_fp8(const zc_u8 *x, zc_i64 block, float inv, zc_u8 *codes) {
  if (Form::BIAS == 7 && inv >= 0x1p-118f)  // 2^-8 of it is exact
    quantize_fp8_by<Form, true, E>(x, block, inv * 0x1p-8f, codes);
  else
    quantize_fp8_by<Form, false, E>(x, block, inv, codes);
}

// Sixteen codes as fp16 numbers; e4m3's are 2^-8 of what they stand for.
template <class Form>
ZC_FN __m256i fp8_halves16(const zc_u8 *codes) {
  const __m256i code = _mm256_cvtepu8_epi16(load_half(codes));
  if (Form::BIAS == 15) return _mm256_slli_epi16(code, 8);
  const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(code, magnitude), 8);
  const __m256i special = _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7c00));
  return _mm256_or_si256(_mm256_or_si256(sign, special), _mm256_slli_epi16(magnitude, 7));
}

// Sums of whole block b, whose codes begin at codes_at, over k chunks: 32 elements at a time in registers.
template <class Form>
ZC_FN void sum_fp8(zc_i64 block, zc_i64 codes_at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b, float_at *sums) {
  for (zc_i64 j = 0; j < block; j += 32) {
    const auto each = [&](zc_i64 w, auto f) {  // f(i, elements 8i .. 8i + 7 of these 32 in chunk w)
      const __m256 scale = scale8(wires[w], b);
      for (int i = 0; i < 2; ++i) {
        const __m256i h = fp8_halves16<Form>(wires[w] + codes_at + j + 16 * i);
        __m256 x[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
        for (int half = 0; half < 2; ++half) {
          if (Form::BIAS == 7) x[half] = _mm256_mul_ps(x[half], _mm256_set1_ps(256.0f));
          f(2 * i + half, _mm256_mul_ps(x[half], scale));
        }
      }
    };
    __m256 sum[4];
    each(0, [&](int i, __m256 x) { sum[i] = x; });
    for (zc_i64 w = 1; w < k; ++w) each(w, [&](int i, __m256 x) { sum[i] = _mm256_add_ps(sum[i], x); });
    for (int i = 0; i < 4; ++i) _mm256_storeu_ps((float *)(sums + j + 8 * i), sum[i]);
  }
}
