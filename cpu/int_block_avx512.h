// Whole blocks of 8-bit and 4-bit codes by AVX-512. Blocks are a multiple of 64.
//
// Included once per build of cpu/loops.cpp that has AVX-512, inside its namespace.

// The largest magnitude bits of a block.
template <class E>
ZC_FN zc_u32 block_amax(const zc_u8 *x, zc_i64 block) {
  Words m[4] = {};
  for (zc_i64 j = 0; j < block; j += 64)
    for (int i = 0; i < 4; ++i) m[i] = larger(m[i], magnitudes(load<E>(x + (j + 16 * i) * E::size)));
  return (zc_u32)_mm512_reduce_max_epi32((__m512i)larger(larger(m[0], m[1]), larger(m[2], m[3])));
}

// The block rotated into `rotated`, and its largest magnitude bits.
template <class E>
ZC_FN zc_u32 rotate_block(const zc_u8 *x, zc_i64 block, float_at *rotated) {
  __m512i m = _mm512_setzero_si512();
  for (zc_i64 j = 0; j < block; j += ZC_ROTATE_GROUP)
    m = _mm512_max_epi32(m, rotate_group<E>(x + j * E::size, ZC_ROTATE_SCALE, rotated + j));
  return (zc_u32)_mm512_reduce_max_epi32(m);
}

// 32 elements from `first` on and 32 from `second` on as 64 codes, in the order that packing leaves them; `in_order`
// puts them right. BY_CHANCE: `chance` holds their random bits; the sums and the clamp are zc_code_by_chance's.
template <int BITS, bool BY_CHANCE, class E>
ZC_FN __m512i codes64(const zc_u8 *x, zc_i64 first, zc_i64 second, __m512 inv, const zc_u16 *chance) {
  __m512i q[4];
  for (int i = 0; i < 4; ++i) {
    const zc_i64 j = (i < 2 ? first : second) + i % 2 * 16;
    const __m512 steps = _mm512_mul_ps(load<E>(x + j * E::size), inv);
    if constexpr (BY_CHANCE) {
      const __m512i drawn = _mm512_cvtepu16_epi32(load_bytes((const zc_u8 *)(chance + j)));
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
  const auto codes_of = [&](zc_i64 first, zc_i64 second) {
    return codes64<BITS, BY_CHANCE, E>(x, first, second, inv, chance);
  };
  if constexpr (BITS == 8) {
    for (zc_i64 j = 0; j < block; j += 64) _mm512_storeu_si512(codes + j, in_order(codes_of(j, j + 32)));
    return;
  }
  const zc_i64 half = block / 2;
  zc_i64 j = 0;
  for (; j + 64 <= half; j += 64) {
    const __m512i low = codes_of(j, j + 32), high = _mm512_slli_epi16(codes_of(j + half, j + half + 32), 4);
    // 0xca: bits of low where the first is set, of high elsewhere
    const __m512i pairs = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, 0xca);
    _mm512_storeu_si512(codes + j, in_order(pairs));
  }
  if (j < half) {
    const __m512i both = in_order(codes_of(j, j + half));
    const __m256i low = _mm512_castsi512_si256(both), high = _mm256_slli_epi16(_mm512_extracti64x4_epi64(both, 1), 4);
    _mm256_storeu_si256((__m256i *)(codes + j), _mm256_ternarylogic_epi32(_mm256_set1_epi8(15), low, high, 0xca));
  }
}

// Sums of whole block b, whose codes begin at codes_at, over k chunks: some of its elements at a time in registers,
// chunk after chunk, from element i of the sink on.
template <class Sink>
ZC_FN void sum_int8(zc_i64 block, zc_i64 codes_at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b, const Sink &sink,
                    zc_i64 i) {
  for (zc_i64 j = 0; j < block; j += 64) {
    Floats sum[4];
    clear(sum);
    for (zc_i64 w = 0; w < k; ++w) {
      const Floats scale = all(wide_scale(wires[w], b));
      for (int r = 0; r < 4; ++r) {
        const Floats x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_half(wires[w] + codes_at + j + 16 * r)));
        sum[r] = multiply_add(x, scale, sum[r]);
      }
    }
    sink.put(i + j, sum);
  }
}

// COLUMNS: bytes at a time, and twice as many elements. All sixteen products of a code and the scale are made once;
// decoding is then one permutation, which looks at the low four bits of a lane only.
template <int COLUMNS, class Sink>
ZC_FN void sum_int4_columns(zc_i64 half, zc_i64 j, zc_i64 codes_at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b,
                            const Sink &sink, zc_i64 i) {
  constexpr int N = COLUMNS / 16;
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  Floats low[N], high[N];
  clear(low);
  clear(high);
  for (zc_i64 w = 0; w < k; ++w) {
    const Floats products = numbers * all(wide_scale(wires[w], b));
    for (int r = 0; r < N; ++r) {
      const Words pairs = bytes_of(wires[w] + codes_at + j + 16 * r);
      const Floats of_low = _mm512_permutexvar_ps((__m512i)pairs, products);
      const Floats of_high = _mm512_permutexvar_ps((__m512i)upper_nibbles(pairs), products);
      low[r] = low[r] + of_low;
      high[r] = high[r] + of_high;
    }
  }
  sink.put(i + j, low);
  sink.put(i + j + half, high);
}
template <class Sink>
ZC_FN void sum_int4(zc_i64 block, zc_i64 codes_at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b, const Sink &sink,
                    zc_i64 i) {
  const zc_i64 half = block / 2;
  zc_i64 j = 0;
  for (; j + 64 <= half; j += 64) sum_int4_columns<64>(half, j, codes_at, wires, k, b, sink, i);
  if (j < half) sum_int4_columns<32>(half, j, codes_at, wires, k, b, sink, i);
}
