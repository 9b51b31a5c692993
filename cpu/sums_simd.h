// Sums of whole blocks of the usual codecs over k chunks, in registers, straight to where they go.
//
// Where a product of code and scale is exact, one rounding of it and the sum, multiply_add, is the rounding of the sum.
// It is, unless it is too large: code and scale have at most 4 + 8 bits, or 8 + 8, and their smallest product is a
// multiple of 2^-149. Scales that no encoder makes may be too large; sums with one are left to the rules.
//
// Included once per build of cpu/loops.cpp that has AVX2, inside its namespace.

// What a summand is made of: where the chunks are, how many, and how they are laid out.
struct Chunks {
  const Layout &at;
  const zc_u8 *const *wires;
  zc_i64 k;
};

// Elements lo to hi of block b by the rules alone; element i of the sink is the first of them.
template <class Rules, class Sink>
static __attribute__((noinline)) void sum_by_rules(const Rules &rules, const Chunks &in, zc_i64 b, zc_i64 lo, zc_i64 hi,
                                                   const Sink &sink, zc_i64 i) {
  for (; lo < hi; lo += TILE, i += TILE) {
    const zc_i64 count = hi - lo < TILE ? hi - lo : TILE;
    float sums[TILE];
    sum_block(rules, in.at, in.wires, in.k, b, lo, lo + count, (float_at *)sums);
    sink.put(i, sums, count);
  }
}

// Whether no chunk's scale of block b, a bfloat16, is larger than an encoder's.
ZC_FN bool wide_scales_fit(const Chunks &in, zc_i64 b, zc_u32 cap) {
  bool fit = true;
  for (zc_i64 w = 0; w < in.k; ++w) fit &= (((const u16_at *)in.wires[w])[b] & 0x7fffu) <= cap >> 16;
  return fit;
}

template <int BITS>
struct IntSums {
  static constexpr int AT_ONCE = 1;  // blocks
  IntRules<false> rules;

  template <class Sink>
  __attribute__((always_inline)) void sum(const Chunks &in, zc_i64 b, const Sink &sink, zc_i64 i) const {
    if (__builtin_expect(!wide_scales_fit(in, b, zc_scale_cap(BITS + 1)), 0))  // that of codes down to -2^(BITS - 1)
      return sum_by_rules(rules, in, b, 0, in.at.block, sink, i);
    if constexpr (BITS == 8)
      sum_int8(in.at.block, in.at.codes_at(b), in.wires, in.k, b, sink, i);
    else
      sum_int4(in.at.block, in.at.codes_at(b), in.wires, in.k, b, sink, i);
  }
};

// Floats of 8 bits; Rules says what scales they have.
template <class Form, class Rules>
struct Fp8Sums {
  static constexpr int AT_ONCE = 1;
  static constexpr int N = Rules::SHORT == 2 * LANES ? 2 : 4;  // registers that are filled together
  Rules rules;

  ZC_FN bool scales_fit(const Chunks &in, zc_i64 b) {
    if constexpr (Rules::SHORT == 0) return wide_scales_fit(in, b, zc_fp8_cap<Form>());
    bool fit = true;
    for (zc_i64 w = 0; w < in.k; ++w) fit &= (zc_u8)(in.wires[w][b] - 247) >= 8;
    return fit;
  }

  template <class Sink>
  __attribute__((always_inline)) void sum(const Chunks &in, zc_i64 b, const Sink &sink, zc_i64 i) const {
    if (__builtin_expect(!scales_fit(in, b), 0)) return sum_by_rules(rules, in, b, 0, in.at.block, sink, i);
    const zc_i64 codes_at = in.at.codes_at(b);
    for (zc_i64 j = 0; j < in.at.block; j += N * LANES) {
      Floats total[N];
      clear(total);
      bool is_nan = false;
      for (zc_i64 w = 0; w < in.k; ++w) {
        const Floats scale = all(rules.shared(in.wires[w], in.at, b) * Fp8Numbers<Form>::UNIT);
        for (int r = 0; r < N; r += 2) {
          const zc_u8 *codes = in.wires[w] + codes_at + j + r * LANES;
          const Fp8Numbers<Form> numbers = Fp8Numbers<Form>::of(codes);
          if (Form::BIAS == 7) is_nan |= has_e4m3_nan(codes);
          for (int h = 0; h < 2; ++h) total[r + h] = multiply_add(numbers.x[h], scale, total[r + h]);
        }
      }
      if (__builtin_expect(is_nan, 0))
        sum_by_rules(rules, in, b, j, j + N * LANES, sink, i + j);
      else
        sink.put(i + j, total);
    }
  }
};

// A short block of e2m1 codes; what is picked from is rounded, so any scale will do.
template <class Rules>
struct E2m1Sums {
  static constexpr int SHORT = Rules::SHORT, AT_ONCE = SHORT < 2 * LANES ? 2 * LANES / SHORT : 1;
  static constexpr int R = SHORT / LANES;  // registers of a block
  Rules rules;

  template <class Sink>
  __attribute__((always_inline)) void sum(const Chunks &in, zc_i64 b, const Sink &sink, zc_i64 i) const {
    Floats total[AT_ONCE * R];
    clear(total);
    for (zc_i64 w = 0; w < in.k; ++w)
      for (int a = 0; a < AT_ONCE; ++a) {
        const E2m1Numbers numbers = E2m1Numbers::times(rules.shared(in.wires[w], in.at, b + a));
        const zc_u8 *codes = in.wires[w] + in.at.codes_at(b + a);
#ifdef __AVX512BW__
        if constexpr (R == 1) {  // a block's eight bytes twice; the upper half of the lanes looks at the upper nibbles
          const __m512i twice = _mm512_cvtepu8_epi32(_mm_set1_epi64x((zc_i64)*(const u64_at *)codes));
          const Words shifts = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
          total[a] = total[a] + numbers[(Words)twice >> shifts];
          continue;
        }
#endif
        for (int r = 0; r < R / 2; ++r) {
          const Words pairs = bytes_of(codes + r * LANES);
          total[a * R + r] = total[a * R + r] + numbers[pairs];
          total[a * R + r + R / 2] = total[a * R + r + R / 2] + numbers[upper_nibbles(pairs)];
        }
      }
    sink.put(i, total);
  }
};

// Sums whole blocks from b on, at most count of them, into the sink from its element 0 on; returns how many.
template <class Sums, class Sink>
static zc_i64 sum_whole(const Sums &sums, const Chunks &in, zc_i64 b, zc_i64 count, const Sink &sink) {
  zc_i64 done = 0;
  for (; done + Sums::AT_ONCE <= count; done += Sums::AT_ONCE) sums.sum(in, b + done, sink, done * in.at.block);
  return done;
}

// Calls f with the sums of a usual codec.
template <class F>
ZC_FN void with_sums(const zc_codec &codec, F f) {
  const bool is_e4m3 = codec.element == ZC_E4M3;
  if (codec.kind == ZC_NVFP4) return f(E2m1Sums<NvFp4Rules<false>>());
  if (codec.kind == ZC_MX_BLOCK && is_e4m3) return f(Fp8Sums<zc_e4m3, MxRules<zc_e4m3, false>>());
  if (codec.kind == ZC_MX_BLOCK) return f(E2m1Sums<MxRules<zc_e2m1, false>>());
  if (codec.kind == ZC_FP8_BLOCK && is_e4m3) return f(Fp8Sums<zc_e4m3, Fp8Rules<zc_e4m3, false>>());
  if (codec.kind == ZC_FP8_BLOCK) return f(Fp8Sums<zc_e5m2, Fp8Rules<zc_e5m2, false>>());
  return codec.bits == 8 ? f(IntSums<8>{IntRules<false>(codec)}) : f(IntSums<4>{IntRules<false>(codec)});
}
