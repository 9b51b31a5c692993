// The random bits of neighbouring elements, by the rule of cuda/philox.cuh, 64 elements at a time.
//
// Included once per build of cpu/loops.cpp, inside its namespace.

constexpr zc_i64 SPAN = 64;  // elements that are drawn together: those of eight Philox calls

// Where the random bits of a chunk's elements come from; `start` counts from the chunk's first.
struct Chance {
  const zc_draw *draw;  // null: nothing is left to chance
  zc_i64 start;

  Chance from(zc_i64 elements) const { return {draw, start + elements}; }
};

// The keys of every round, as they are mixed in.
struct Keys {
  zc_u64 call, k0[ZC_PHILOX_ROUNDS], k1[ZC_PHILOX_ROUNDS];

  ZC_FN Keys of(const zc_draw &draw) {
    Keys keys;
    keys.call = draw.call;
    for (zc_u32 round = 0; round < ZC_PHILOX_ROUNDS; ++round) {
      keys.k0[round] = (zc_u32)draw.seed + round * ZC_PHILOX_W0;
      keys.k1[round] = (zc_u32)(draw.seed >> 32) + round * ZC_PHILOX_W1;
    }
    return keys;
  }
};

#ifdef __AVX512BW__
// Eight calls side by side, each word in the low half of a lane; high halves hold leftovers that no product sees.
ZC_FN void draw_span(const Keys &keys, zc_u64 number, zc_u16 *out) {
  const __m512i m0 = _mm512_set1_epi64(ZC_PHILOX_M0), m1 = _mm512_set1_epi64(ZC_PHILOX_M1);
  __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64((zc_i64)number), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  __m512i c1 = _mm512_srli_epi64(c0, 32);
  __m512i c2 = _mm512_set1_epi64((zc_i64)keys.call), c3 = _mm512_srli_epi64(c2, 32);
  for (int round = 0; round < ZC_PHILOX_ROUNDS; ++round) {
    const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
    // 0x96: the exclusive or of three
    c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, _mm512_set1_epi64((zc_i64)keys.k0[round]), 0x96);
    c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, _mm512_set1_epi64((zc_i64)keys.k1[round]), 0x96);
    c1 = p1, c3 = p0;
  }
  const __m512i low = _mm512_mask_shuffle_epi32(c0, 0xaaaa, c1, (_MM_PERM_ENUM)0xa0);   // words 0, 1 of each call
  const __m512i high = _mm512_mask_shuffle_epi32(c2, 0xaaaa, c3, (_MM_PERM_ENUM)0xa0);  // words 2, 3
  const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i last = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi64(low, first, high));
  _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi64(low, last, high));
}
#elif defined(__AVX2__)
// Four calls side by side in each of two vectors; the rest as for eight.
ZC_FN void draw_span(const Keys &keys, zc_u64 number, zc_u16 *out) {
  const __m256i m0 = _mm256_set1_epi64x(ZC_PHILOX_M0), m1 = _mm256_set1_epi64x(ZC_PHILOX_M1);
  __m256i c0[2], c1[2], c2[2], c3[2];
  for (int i = 0; i < 2; ++i) {
    c0[i] = _mm256_add_epi64(_mm256_set1_epi64x((zc_i64)number + 4 * i), _mm256_setr_epi64x(0, 1, 2, 3));
    c1[i] = _mm256_srli_epi64(c0[i], 32);
    c2[i] = _mm256_set1_epi64x((zc_i64)keys.call);
    c3[i] = _mm256_srli_epi64(c2[i], 32);
  }
  for (int round = 0; round < ZC_PHILOX_ROUNDS; ++round) {
    const __m256i key0 = _mm256_set1_epi64x((zc_i64)keys.k0[round]), key1 = _mm256_set1_epi64x((zc_i64)keys.k1[round]);
    for (int i = 0; i < 2; ++i) {
      const __m256i p0 = _mm256_mul_epu32(c0[i], m0), p1 = _mm256_mul_epu32(c2[i], m1);
      c0[i] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c1[i], key0));
      c2[i] = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c3[i], key1));
      c1[i] = p1, c3[i] = p0;
    }
  }
  for (int i = 0; i < 2; ++i) {
    const __m256i low = _mm256_blend_epi32(c0[i], _mm256_slli_epi64(c1[i], 32), 0xaa);   // words 0, 1 of each call
    const __m256i high = _mm256_blend_epi32(c2[i], _mm256_slli_epi64(c3[i], 32), 0xaa);  // words 2, 3
    const __m256i even = _mm256_unpacklo_epi64(low, high), odd = _mm256_unpackhi_epi64(low, high);
    _mm256_storeu_si256((__m256i *)(out + 32 * i), _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256((__m256i *)(out + 32 * i + 16), _mm256_permute2x128_si256(even, odd, 0x31));
  }
}
#else
ZC_FN void draw_span(const Keys &keys, zc_u64 number, zc_u16 *out) {
  for (zc_u32 i = 0; i < 8; ++i) {
    const zc_words words = zc_philox(number + i, keys.call, keys.k0[0] | keys.k1[0] << 32);
    for (zc_u32 j = 0; j < 8; ++j) out[8 * i + j] = (zc_u16)zc_half_word(words, j);
  }
}
#endif

// The random bits of `count` elements, which end up somewhere in a room for count + 2 SPAN.
ZC_FN const zc_u16 *draw_elements(const Chance &chance, zc_i64 count, zc_u16 *room) {
  const zc_u64 first = chance.draw->first + (zc_u64)chance.start;
  const zc_i64 skipped = (zc_i64)(first % SPAN);
  const Keys keys = Keys::of(*chance.draw);
  for (zc_i64 at = 0; at < skipped + count; at += SPAN)
    draw_span(keys, (first - (zc_u64)skipped + (zc_u64)at) / 8, room + at);
  return room + skipped;
}

// Those of the first element.
ZC_FN zc_u32 draw_one(const Chance &chance) {
  const zc_u64 element = chance.draw->first + (zc_u64)chance.start;
  return zc_half_word(zc_philox(element / 8, chance.draw->call, chance.draw->seed), (zc_u32)(element % 8));
}
