// Sums of chunks of any codec, in their order, finished: times factor, over divisor.
//
// Included once per build of cpu/loops.cpp, inside its namespace.

struct Sum {
  const zc_codec &codec;
  const zc_u8 *const *wires;
  zc_i64 k, n;
  double factor, divisor;
};

// Sums of elements start..start + count of raw and cast chunks.
template <class W>
static void sum_carried(const Sum &sum, zc_i64 start, zc_i64 count, float_at *__restrict sums) {
  typedef typename W::Stored Stored;
  zc_i64 i = 0;
#ifdef __AVX2__
  for (; i + 32 <= count; i += 32) {
    const auto term = [&](zc_i64 w, int j) { return load8<W>(sum.wires[w] + (start + i + 8 * j) * W::size); };
    __m256 x[4];
    for (int j = 0; j < 4; ++j) x[j] = term(0, j);
    for (zc_i64 w = 1; w < sum.k; ++w)
      for (int j = 0; j < 4; ++j) x[j] = _mm256_add_ps(x[j], term(w, j));
    for (int j = 0; j < 4; ++j) _mm256_storeu_ps((float *)(sums + i + 8 * j), x[j]);
  }
#endif
  for (zc_i64 w = 0; w < sum.k; ++w) {
    const Stored *x = (const Stored *)sum.wires[w] + start;
    if (w == 0)
      for (zc_i64 j = i; j < count; ++j) sums[j] = W::widen(x[j]);
    else
      for (zc_i64 j = i; j < count; ++j) sums[j] = zc_add(sums[j], W::widen(x[j]));
  }
}

// Sums of elements start..start + count of chunks with blocks.
static void sum_blocks(const Sum &sum, zc_i64 start, zc_i64 count, float_at *sums) {
  const Layout at = Layout::of(sum.codec, sum.n);
  zc_i64 b = start / at.block, lo = start - b * at.block;
#ifdef __AVX2__
  if (is_summed_here(sum.codec) && lo == 0)
    with_sums(sum.codec, [&](auto whole) {
      const Sink<Float32, false> sink = {(zc_u8 *)sums};
      const zc_i64 done = sum_whole(whole, Chunks{at, sum.wires, sum.k}, b, count / at.block, sink);
      b += done;
      sums += done * at.block;
      count -= done * at.block;
    });
#endif
  with_rules(sum.codec, [&](auto rules) {
    if constexpr (decltype(rules)::SHORT != 0)
      for (; lo == 0 && count >= at.block; ++b, sums += at.block, count -= at.block)
        sum_short(rules, at, sum.wires, sum.k, b, sums);
    for (; count > 0; ++b, lo = 0) {
      const zc_i64 hi = lo + count < at.block ? lo + count : at.block;
      sum_block(rules, at, sum.wires, sum.k, b, lo, hi, sums);
      sums += hi - lo;
      count -= hi - lo;
    }
  });
}

// Finished fp64 sums of raw:float64 chunks.
static void sum_float64(const Sum &sum, zc_i64 start, zc_i64 count, double_at *__restrict sums) {
  for (zc_i64 w = 0; w < sum.k; ++w) {
    const double_at *x = (const double_at *)sum.wires[w] + start;
    if (w == 0)
      for (zc_i64 i = 0; i < count; ++i) sums[i] = x[i];
    else
      for (zc_i64 i = 0; i < count; ++i) sums[i] += x[i];
  }
  if (sum.factor != 1.0)
    for (zc_i64 i = 0; i < count; ++i) sums[i] *= sum.factor;
  if (sum.divisor != 1.0)
    for (zc_i64 i = 0; i < count; ++i) sums[i] /= sum.divisor;
}

// Finished fp32 sums of elements start..start + count, count <= TILE for raw:float64.
static void sum_elements(const Sum &sum, zc_i64 start, zc_i64 count, float_at *sums) {
  if (has_blocks(sum.codec)) {
    sum_blocks(sum, start, count, sums);
  } else if (sum.codec.element == ZC_FLOAT64) {
    double tile[TILE];
    sum_float64(sum, start, count, tile);
    convert<Float64, Float32>((const zc_u8 *)tile, count, (zc_u8 *)sums);
    return;
  } else {
    with_element(sum.codec.element, [&](auto element) { sum_carried<decltype(element)>(sum, start, count, sums); });
  }
  const float factor = (float)sum.factor, divisor = (float)sum.divisor;
  if (sum.factor != 1.0)
    for (zc_i64 i = 0; i < count; ++i) sums[i] = zc_mul(sums[i], factor);
  if (sum.divisor != 1.0)
    for (zc_i64 i = 0; i < count; ++i) sums[i] = zc_div(sums[i], divisor);
}

// Finished sums of elements start..start + count, rotated back: start is a multiple of 32 if they are, and sums has
// room for a multiple of 32.
ZC_FN void sum_as_elements(const Sum &sum, zc_i64 start, zc_i64 count, float_at *sums) {
  if (!sum.codec.rotated) return sum_elements(sum, start, count, sums);
  sum_elements(sum, start, zc_n_rotated(count), sums);
  rotate_back(sums, zc_n_rotated(count));
}

ZC_FN bool sums_in_float64(const zc_codec &codec) { return codec.kind == ZC_RAW && codec.element == ZC_FLOAT64; }

// Elements to sum at a time: whole blocks, if a tile can hold one.
ZC_FN zc_i64 tile_of(const zc_codec &codec) {
  return has_blocks(codec) && codec.block < TILE ? TILE / codec.block * codec.block : TILE;
}
