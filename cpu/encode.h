// Elements into chunks of any codec: block by block, through a rotation, or carried as they are.
//
// Included once per build of cpu/loops.cpp, inside its namespace.

ZC_FN bool has_blocks(const zc_codec &codec) { return codec.kind >= ZC_INT_BLOCK; }

ZC_FN void zero(zc_u8 *wire, zc_i64 from, zc_i64 to) { __builtin_memset(wire + from, 0, (size_t)(to - from)); }

// Encodes the blocks that begin with element `start` of a chunk, from count elements at x.
template <class E>
static void encode_blocks(const zc_codec &codec, const Layout &at, zc_i64 start, const zc_u8 *x, zc_i64 count,
                          const Chance &chance, zc_u8 *wire) {
  zc_i64 b = start / at.block;
  const zc_i64 end = b + (count + at.block - 1) / at.block;
#ifdef __AVX2__
  if (is_encoded_here(codec)) {
    const zc_i64 done = encode_usual<E>(codec, at, b, x, count / at.block, chance.from(start), wire);
    b += done;
    x += done * at.block * E::size;
    count -= done * at.block;
  }
#endif
  if (codec.kind == ZC_NVFP4) {
    if (codec.rounding == ZC_STOCHASTIC) return encode_regions<E, true>(at, b, x, count, chance, wire);
    return encode_regions<E, false>(at, b, x, count, chance, wire);
  }
  with_rules(codec, [&](auto rules) {
    typedef decltype(rules) Rules;
    if constexpr (Rules::SHORT != 0) {
      zc_u16 room[Rules::BY_CHANCE ? TILE + 2 * SPAN : 1];
      const zc_u16 *drawn = room;
      for (zc_i64 first = b; b < end && at.stored(b) == at.block; ++b, x += at.block * E::size) {
        const zc_i64 in_tile = (b - first) * at.block % TILE, left = (end - b) * at.block;
        if (Rules::BY_CHANCE && in_tile == 0)
          drawn = draw_elements(chance.from(b * at.block), left < TILE ? left : TILE, room);
        float of_block[Rules::SHORT] = {0};
        convert<E, Float32>(x, at.present(b), (zc_u8 *)of_block);
        encode_short(rules, of_block, at.present(b), amax_of<Rules::SHORT>(of_block),
                     Rules::BY_CHANCE ? drawn + in_tile : room, wire + at.scale_at(b), wire + at.codes_at(b));
      }
    }
    for (; b < end; ++b, x += at.block * E::size)
      encode_block<E>(rules, x, at.present(b), at.stored(b), chance.from(b * at.block), wire + at.scale_at(b),
                      wire + at.codes_at(b));
  });
}

// Zeroes the padding behind the scales and behind the codes.
static void pad_blocks(const Layout &at, zc_u8 *wire) {
  const zc_i64 codes_nbytes = zc_codes_nbytes(at.n, at.bits);
  if (at.scales_offset) zero(wire, 4 * ((at.n + ZC_NVFP4_REGION - 1) / ZC_NVFP4_REGION), at.scales_offset);
  zero(wire, at.scales_end(), at.codes_offset);
  zero(wire, at.codes_offset + codes_nbytes, at.codes_offset + zc_padded(codes_nbytes));
}

// Encodes the blocks from element `begin` on of what read(start, count, floats) gives, as many at a time as SUMS floats
// hold. `rotates`: of its rotation, whose last group zeros fill up.
template <zc_i64 SUMS, class Read>
static __attribute__((noinline)) void encode_read_in(const zc_codec &codec, const Layout &at, zc_i64 begin,
                                                     zc_i64 n_read, bool rotates, const Chance &chance, zc_u8 *wire,
                                                     const Read &read) {
  alignas(64) float x[SUMS];
  const zc_i64 step = SUMS / at.block * at.block;
  for (zc_i64 start = begin; start < at.n; start += step) {
    const zc_i64 count = at.n - start < step ? at.n - start : step;
    const zc_i64 present = n_read - start < count ? n_read - start : count;
    read(start, present, x);
    for (zc_i64 i = present; i < count; ++i) x[i] = 0.0f;
    if (rotates) rotate(x, count);
    encode_blocks<Float32>(codec, at, start, (const zc_u8 *)x, count, chance, wire);
  }
  pad_blocks(at, wire);
}

template <class Read>
ZC_FN void encode_read(const zc_codec &codec, const Layout &at, zc_i64 begin, zc_i64 n_read, bool rotates,
                       const Chance &chance, zc_u8 *wire, const Read &read) {
  if (at.block <= 4 * TILE)
    encode_read_in<4 * TILE>(codec, at, begin, n_read, rotates, chance, wire, read);
  else
    encode_read_in<64 * TILE>(codec, at, begin, n_read, rotates, chance, wire, read);
}

template <class E>
static void encode(const zc_codec &codec, const zc_u8 *source, zc_i64 n, const Chance &chance, zc_u8 *wire) {
  if (has_blocks(codec)) {
    const Layout at = Layout::of(codec, n);
    if (codec.rotated) {
      zc_i64 done = 0;
#ifdef __AVX2__
      if (is_encoded_here(codec) && codec.kind <= ZC_FP8_BLOCK && codec.block <= ROTATED_BLOCK) {
        done = n / codec.block * codec.block;
        with_codes(codec, [&](auto codes) {
          encode_whole<true, E>(codes, source, n / at.block, at.block, chance, (u16_at *)wire, wire + at.codes_offset);
        });
      }
#endif
      return encode_read(codec, at, done, n, true, chance, wire, [&](zc_i64 start, zc_i64 count, float *x) {
        convert<E, Float32>(source + start * E::size, count, (zc_u8 *)x);
      });
    }
    encode_blocks<E>(codec, at, 0, source, n, chance, wire);
    pad_blocks(at, wire);
    return;
  }
  with_element(codec.element, [&](auto element) {
    typedef decltype(element) W;
    if (codec.kind == ZC_RAW && W::dtype == E::dtype)
      __builtin_memcpy(wire, source, (size_t)(n * W::size));
    else
      convert<E, W>(source, n, wire);
    zero(wire, n * W::size, zc_padded(n * W::size));
  });
}
