// Encodes whole short blocks of mxfp8, mxfp4 and nvfp4, many at a time, so that a register's lanes hold their scales.
//
// Included once per build of cpu/loops.cpp that has AVX2, inside its namespace.

// Lane b: the largest lane of m[b], as integers.
ZC_FN Words largest_of_each(const Words (&m)[LANES]) {
#ifdef __AVX512BW__
  __m512i pairs[8], fours[4], halves[2];
  for (int i = 0; i < 8; ++i) {
    const __m512i a = (__m512i)m[2 * i], b = (__m512i)m[2 * i + 1];
    pairs[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  }
  for (int i = 0; i < 4; ++i)
    fours[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    halves[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                 _mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  return (Words)_mm512_max_epi32(_mm512_shuffle_i32x4(halves[0], halves[1], 0x88),
                                 _mm512_shuffle_i32x4(halves[0], halves[1], 0xdd));
#else
  __m256i pairs[4], fours[2];
  for (int i = 0; i < 4; ++i) {
    const __m256i a = (__m256i)m[2 * i], b = (__m256i)m[2 * i + 1];
    pairs[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  }
  for (int i = 0; i < 2; ++i)
    fours[i] = _mm256_max_epi32(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  return (Words)_mm256_max_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                                 _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
#endif
}

// The largest magnitude bits of LANES blocks of N elements each.
template <int N, class E>
ZC_FN void short_amax(const zc_u8 *x, zc_u32 *amax) {
  Words m[LANES];
  for (int b = 0; b < LANES; ++b) {
    m[b] = magnitudes(load<E>(x + b * N * E::size));
    for (int i = LANES; i < N; i += LANES) m[b] = larger(m[b], magnitudes(load<E>(x + (b * N + i) * E::size)));
  }
  const Words largest = largest_of_each(m);
  __builtin_memcpy(amax, &largest, sizeof largest);
}

// The codes of LANES N-element blocks of numbers times their inv: bytes, or the two halves of a block in nibbles.
template <class Form, int N, class E>
ZC_FN void short_codes(const zc_u8 *x, const float *inv, zc_u8 *codes) {
  constexpr int R = N / LANES, NBYTES = N * Form::BITS / 8;  // registers and bytes of a block
  const auto of = [&](int b, int r) {
    const Words q = mini_codes<Form, true>(load<E>(x + (b * N + r * LANES) * E::size) * all(inv[b]));
    return inv[b] == 0.0f ? all(0u) : q;
  };
  constexpr int AT_ONCE = 4 * LANES / NBYTES;  // blocks that fill four registers of bytes
  for (int first = 0; first < LANES; first += AT_ONCE) {
    Words q[4];
    if constexpr (Form::BITS == 8) {
      for (int i = 0; i < 4; ++i) q[i] = of(first + i / R, i % R);
#ifdef __AVX512BW__
    } else if constexpr (R == 1) {
      for (int i = 0; i < 4; ++i) {
        const __m512i a = (__m512i)of(first + 2 * i, 0), b = (__m512i)of(first + 2 * i + 1, 0);
        const Words low = (Words)_mm512_shuffle_i32x4(a, b, 0x44), high = (Words)_mm512_shuffle_i32x4(a, b, 0xee);
        q[i] = low | high << 4;
      }
#endif
    } else {
      for (int i = 0; i < 4; ++i) {
        const int b = first + i / (R / 2), r = i % (R / 2);
        q[i] = of(b, r) | of(b, r + R / 2) << 4;
      }
    }
    store_bytes(codes + first * NBYTES, q);
  }
}

// Encodes at most count blocks of mxfp8 or mxfp4; returns how many.
template <class Form, class E>
static zc_i64 encode_mx(const zc_u8 *x, zc_i64 count, zc_u8 *scales, zc_u8 *codes) {
  constexpr int N = ZC_MX_BLOCK_ELEMS;
  zc_i64 done = 0;
  for (; done + LANES <= count; done += LANES, x += LANES * N * E::size) {
    zc_u32 amax[LANES];
    float inv[LANES];
    short_amax<N, E>(x, amax);
    for (int b = 0; b < LANES; ++b) {
      const zc_scale s = zc_mx_scale<Form>(amax[b]);
      scales[done + b] = (zc_u8)s.bits;
      inv[b] = s.inv;
    }
    short_codes<Form, N, E>(x, inv, codes + done * (N * Form::BITS / 8));
  }
  return done;
}

// Encodes the whole regions of at most count blocks of nvfp4; returns how many blocks.
template <class E>
static zc_i64 encode_nvfp4(const zc_u8 *x, zc_i64 count, float_at *regions, zc_u8 *scales, zc_u8 *codes) {
  constexpr int N = ZC_NVFP4_BLOCK, BLOCKS = ZC_NVFP4_REGION / N;
  zc_i64 done = 0;
  for (; done + BLOCKS <= count; done += BLOCKS, x += ZC_NVFP4_REGION * E::size) {
    zc_u32 amax[BLOCKS];
    float inv[BLOCKS];
    zc_i32 of_region = 0;
    for (int b = 0; b < BLOCKS; b += LANES) short_amax<N, E>(x + b * N * E::size, amax + b);
    for (int b = 0; b < BLOCKS; ++b) {
      const zc_i32 finite = (zc_i32)(amax[b] < ZC_INF ? amax[b] : 0u);
      of_region = finite > of_region ? finite : of_region;
    }
    const zc_scale region = zc_nvfp4_region((zc_u32)of_region);
    *regions++ = zc_float(region.bits << 16);
    for (int b = 0; b < BLOCKS; ++b) {
      const zc_scale s = zc_nvfp4_scale(amax[b], region);
      scales[done + b] = (zc_u8)s.bits;
      inv[b] = s.inv;
    }
    for (int b = 0; b < BLOCKS; b += LANES)
      short_codes<zc_e2m1, N, E>(x + b * N * E::size, inv + b, codes + (done + b) * (N / 2));
  }
  return done;
}
