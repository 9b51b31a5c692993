// Whole blocks of 8-bit and 4-bit codes by AVX2. Blocks are a multiple of 64.
//
// Included once per build of cpu/loops.cpp that has AVX2 and no AVX-512, inside its namespace.

ZC_FN zc_u32 largest(__m256i m8) {
  __m128i m4 = _mm_max_epi32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
  m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, 0x4e));
  m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, 0xb1));
  return (zc_u32)_mm_cvtsi128_si32(m4);
}

// The largest magnitude bits of a block.
template <class E>
ZC_FN zc_u32 block_amax(const zc_u8 *x, zc_i64 block) {
  Words m[4] = {};
  for (zc_i64 j = 0; j < block; j += 32)
    for (int i = 0; i < 4; ++i) m[i] = larger(m[i], magnitudes(load<E>(x + (j + 8 * i) * E::size)));
  return largest((__m256i)larger(larger(m[0], m[1]), larger(m[2], m[3])));
}

// The block rotated into `rotated`, and its largest magnitude bits.
template <class E>
ZC_FN zc_u32 rotate_block(const zc_u8 *x, zc_i64 block, float_at *rotated) {
  __m256i m = _mm256_setzero_si256();
  for (zc_i64 j = 0; j < block; j += ZC_ROTATE_GROUP)
    m = _mm256_max_epi32(m, rotate_group<E>(x + j * E::size, ZC_ROTATE_SCALE, rotated + j));
  return largest(m);
}

// 32 elements as 32 codes. BY_CHANCE: `chance` holds their random bits; the sums and the clamp are zc_code_by_chance's.
template <int BITS, bool BY_CHANCE, class E>
ZC_FN __m256i codes32(const zc_u8 *x, __m256 inv, const zc_u16 *chance) {
  __m256i q[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 steps = _mm256_mul_ps(load<E>(x + 8 * i * E::size), inv);
    if constexpr (BY_CHANCE) {
      const __m256i drawn = _mm256_cvtepu16_epi32(load_half((const zc_u8 *)(chance + 8 * i)));
      const __m256i from128 = _mm256_or_si256(drawn, _mm256_set1_epi32(0x43000000));
      q[i] = _mm256_cvttps_epi32(_mm256_add_ps(steps, _mm256_castsi256_ps(from128)));
    } else {
      q[i] = _mm256_cvtps_epi32(steps);
    }
  }
  __m256i q16[2] = {_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])};
  if constexpr (BY_CHANCE)
    for (int i = 0; i < 2; ++i) q16[i] = _mm256_sub_epi16(q16[i], _mm256_set1_epi16(128));
  __m256i packed = _mm256_packs_epi16(q16[0], q16[1]);
  if constexpr (BY_CHANCE) {
    const zc_i32 qmax = zc_qmax(BITS);
    packed = _mm256_max_epi8(_mm256_min_epi8(packed, _mm256_set1_epi8((char)qmax)), _mm256_set1_epi8((char)-qmax));
  }
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <int BITS, bool BY_CHANCE, class E>
ZC_FN void quantize_block(const zc_u8 *x, zc_i64 block, float inv_scale, const zc_u16 *chance, zc_u8 *codes) {
  const __m256 inv = _mm256_set1_ps(inv_scale);
  const auto codes_of = [&](zc_i64 j) { return codes32<BITS, BY_CHANCE, E>(x + j * E::size, inv, chance + j); };
  if constexpr (BITS == 8) {
    for (zc_i64 j = 0; j < block; j += 32) _mm256_storeu_si256((__m256i *)(codes + j), codes_of(j));
  } else {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (zc_i64 j = 0; j < block / 2; j += 32) {
      const __m256i low = _mm256_and_si256(codes_of(j), nibble);
      const __m256i high = _mm256_and_si256(codes_of(j + block / 2), nibble);
      _mm256_storeu_si256((__m256i *)(codes + j), _mm256_or_si256(low, _mm256_slli_epi16(high, 4)));
    }
  }
}

ZC_FN __m256i signed_bytes(const zc_u8 *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }

// Sums of whole block b, whose codes begin at codes_at, over k chunks: 64 elements at a time in registers, chunk after
// chunk, from element i of the sink on.
template <class Sink>
ZC_FN void sum_int8(zc_i64 block, zc_i64 codes_at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b, const Sink &sink,
                    zc_i64 i) {
  for (zc_i64 j = 0; j < block; j += 64) {
    Floats sum[8];
    clear(sum);
    for (zc_i64 w = 0; w < k; ++w) {
      const Floats scale = all(wide_scale(wires[w], b));
      for (int r = 0; r < 8; ++r) {
        const Floats x = _mm256_cvtepi32_ps(signed_bytes(wires[w] + codes_at + j + 8 * r));
        sum[r] = multiply_add(x, scale, sum[r]);
      }
    }
    sink.put(i + j, sum);
  }
}
template <class Sink>
ZC_FN void sum_int4(zc_i64 block, zc_i64 codes_at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b, const Sink &sink,
                    zc_i64 i) {
  for (zc_i64 j = 0; j < block / 2; j += 32) {
    Floats low[4], high[4];
    clear(low);
    clear(high);
    for (zc_i64 w = 0; w < k; ++w) {
      const Floats scale = all(wide_scale(wires[w], b));
      for (int r = 0; r < 4; ++r) {
        const __m256i pairs = signed_bytes(wires[w] + codes_at + j + 8 * r);
        const Floats of_low = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 28), 28));
        const Floats of_high = _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 4));
        low[r] = multiply_add(of_low, scale, low[r]);
        high[r] = multiply_add(of_high, scale, high[r]);
      }
    }
    sink.put(i + j, low);
    sink.put(i + j + block / 2, high);
  }
}
