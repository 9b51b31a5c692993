// Whole blocks of 8-bit and 4-bit codes by AVX-512. Blocks are a multiple of 64, of 4-bit codes a multiple of 128.
// Included once per build of cpu/loops.cpp, inside its namespace and `namespace avx512`.

// The largest magnitude bits of a block.
template <class E>
ZC_FN zc_u32 block_amax(const zc_u8 *x, zc_i64 block) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i m[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (zc_i64 j = 0; j < block; j += 64)
    for (int i = 0; i < 4; ++i) {
      const __m512i bits = _mm512_castps_si512(load16<E>(x + (j + 16 * i) * E::size));
      m[i] = _mm512_max_epi32(m[i], _mm512_and_si512(bits, magnitude));
    }
  return (zc_u32)_mm512_reduce_max_epi32(
      _mm512_max_epi32(_mm512_max_epi32(m[0], m[1]), _mm512_max_epi32(m[2], m[3])));
}

// The block rotated into `rotated`, and its largest magnitude bits.
template <class E>
ZC_FN zc_u32 rotate_block(const zc_u8 *x, zc_i64 block, float_at *rotated) {
  __m512i m = _mm512_setzero_si512();
  for (zc_i64 j = 0; j < block; j += ZC_ROTATE_GROUP)
    m = _mm512_max_epi32(m, rotate_group<E>(x + j * E::size, ZC_ROTATE_SCALE, rotated + j));
  return (zc_u32)_mm512_reduce_max_epi32(m);
}

// 64 elements as 64 codes, in the order that packing leaves them; `in_order` puts them right. BY_CHANCE: as by AVX2.
template <int BITS, bool BY_CHANCE, class E>
ZC_FN __m512i codes64(const zc_u8 *x, __m512 inv, const zc_u16 *chance) {
  __m512i q[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 steps = _mm512_mul_ps(load16<E>(x + 16 * i * E::size), inv);
    if constexpr (BY_CHANCE) {
      const __m512i drawn = _mm512_cvtepu16_epi32(load_bytes((const zc_u8 *)(chance + 16 * i)));
      const __m512i from128 = _mm512_or_si512(drawn, _mm512_set1_epi32(0x43000000));
      q[i] = _mm512_cvttps_epi32(_mm512_add_ps(steps, _mm512_castsi512_ps(from128)));
    } else {
      q[i] = _mm512_cvtps_epi32(steps);
    }
  }
  __m512i q16[2] = {_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3])};
  if constexpr (BY_CHANCE)
    for (int i = 0; i < 2; ++i) q16[i] = _mm512_sub_epi16(q16[i], _mm512_set1_epi16(128));
  const __m512i packed = _mm512_packs_epi16(q16[0], q16[1]);
  if constexpr (!BY_CHANCE) return packed;
  const zc_i32 qmax = zc_qmax(BITS);
  return _mm512_max_epi8(_mm512_min_epi8(packed, _mm512_set1_epi8((char)qmax)), _mm512_set1_epi8((char)-qmax));
}
ZC_FN __m512i in_order(__m512i codes) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), codes);
}

template <int BITS, bool BY_CHANCE, class E>
ZC_FN void quantize_block(const zc_u8 *x, zc_i64 block, float inv_scale, const zc_u16 *chance, zc_u8 *codes) {
  const __m512 inv = _mm512_set1_ps(inv_scale);
  const auto codes_of = [&](zc_i64 j) { return codes64<BITS, BY_CHANCE, E>(x + j * E::size, inv, chance + j); };
  if constexpr (BITS == 8) {
    for (zc_i64 j = 0; j < block; j += 64) _mm512_storeu_si512(codes + j, in_order(codes_of(j)));
  } else {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (zc_i64 j = 0; j < block / 2; j += 64) {
      const __m512i low = codes_of(j), high = _mm512_slli_epi16(codes_of(j + block / 2), 4);
      // 0xca: bits of low where nibble is set, of high elsewhere
      _mm512_storeu_si512(codes + j, in_order(_mm512_ternarylogic_epi32(nibble, low, high, 0xca)));
    }
  }
}

// The scale of block b in every lane: its 16 bits twice per lane, the lower ones cleared.
ZC_FN __m512 scale16(const zc_u8 *wire, zc_i64 b) {
  const __m512i twice = _mm512_set1_epi16((short)((const u16_at *)wire)[b]);
  return _mm512_castsi512_ps(_mm512_and_si512(twice, _mm512_set1_epi32((int)0xffff0000u)));
}

// Sums of whole block b, whose codes begin at codes_at, over k chunks: 64 (4 bits: 128) elements at a time in
// registers, chunk after chunk.
template <int BITS>
ZC_FN void sum_block(zc_i64 block, zc_i64 codes_at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b,
                     float_at *sums) {
  if constexpr (BITS == 8) {
    for (zc_i64 j = 0; j < block; j += 64) {
      const auto each = [&](zc_i64 w, auto f) {  // f(i, elements 16i .. 16i + 15 of these 64 in chunk w)
        const zc_u8 *codes = wires[w] + codes_at + j;
        const __m512 scale = scale16(wires[w], b);
        for (int i = 0; i < 4; ++i) {
          const __m512i q = _mm512_cvtepi8_epi32(load_half(codes + 16 * i));
          f(i, _mm512_mul_ps(_mm512_cvtepi32_ps(q), scale));
        }
      };
      __m512 sum[4];
      each(0, [&](int i, __m512 x) { sum[i] = x; });
      for (zc_i64 w = 1; w < k; ++w) each(w, [&](int i, __m512 x) { sum[i] = _mm512_add_ps(sum[i], x); });
      for (int i = 0; i < 4; ++i) _mm512_storeu_ps(sums + j + 16 * i, sum[i]);
    }
  } else {
    // All sixteen products of a code and the scale are made once; decoding is then one permutation, which looks at the
    // low four bits of a lane only.
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    for (zc_i64 j = 0; j < block / 2; j += 64) {
      const auto each = [&](zc_i64 w, auto f) {
        const zc_u8 *codes = wires[w] + codes_at + j;
        const __m512 products = _mm512_mul_ps(all, scale16(wires[w], b));
        for (int i = 0; i < 4; ++i) {
          const __m512i pairs = _mm512_cvtepu8_epi32(load_half(codes + 16 * i));
          f(i, _mm512_permutexvar_ps(pairs, products));
          f(i + 4, _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), products));
        }
      };
      __m512 sum[8];
      each(0, [&](int i, __m512 x) { sum[i] = x; });
      for (zc_i64 w = 1; w < k; ++w) each(w, [&](int i, __m512 x) { sum[i] = _mm512_add_ps(sum[i], x); });
      for (int i = 0; i < 8; ++i) _mm512_storeu_ps(sums + j + i / 4 * (block / 2) + i % 4 * 16, sum[i]);
    }
  }
}
