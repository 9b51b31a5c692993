// Blocks that share a scale, of any codec, width and length: plain loops over the rules of cpu/rules.h, left to the
// compiler to vectorise. A block is worked through in tiles that stay in the first-level cache, however long it is.
//
// Included once per build of cpu/loops.cpp, inside its namespace. What cpu/blocks_simd.h covers does not come here.

constexpr zc_i64 TILE = 1024;  // elements; a multiple of 8

// Where a chunk of n elements keeps a block's scale and codes.
struct Layout {
  zc_i64 n, block, scale_nbytes, scales_offset, codes_offset;
  zc_i32 bits;

  ZC_FN Layout of(const zc_codec &codec, zc_i64 n_elems) {
    const zc_i64 n = codec.rotated ? zc_n_rotated(n_elems) : n_elems;
    const bool is_pair = codec.kind == ZC_INT_ASYM || (codec.kind == ZC_INT_BLOCK && codec.rounding == ZC_SHIFT);
    const zc_i64 scale_nbytes = codec.kind >= ZC_MX_BLOCK ? 1 : is_pair ? 4 : 2;
    const zc_i64 scales_offset = codec.kind == ZC_NVFP4 ? zc_nvfp4_blocks_offset(n) : 0;
    const zc_i64 codes_offset = scales_offset + zc_padded(scale_nbytes * ((n + codec.block - 1) / codec.block));
    return {n, codec.block, scale_nbytes, scales_offset, codes_offset, codec.bits};
  }
  zc_i64 scale_at(zc_i64 b) const { return scales_offset + scale_nbytes * b; }
  zc_i64 scales_end() const { return scale_at((n + block - 1) / block); }
  zc_i64 codes_at(zc_i64 b) const { return codes_offset + b * (block / 8) * bits; }
  zc_i64 present(zc_i64 b) const { return n - b * block < block ? n - b * block : block; }  // elements in block b
  zc_i64 stored(zc_i64 b) const { return (present(b) + 7) & ~(zc_i64)7; }                   // with the missing ones
};

// Calls f(plane byte, element in the tile, count, shift in the byte) for each run of elements lo..hi of a block of r
// that lies in neighbouring bytes of a plane of `field` bits.
template <class F>
ZC_FN void each_run(zc_i32 field, zc_i64 r, zc_i64 lo, zc_i64 hi, F f) {
  const zc_i32 length = (zc_i32)r * field / 8;
  zc_i32 segment = (zc_i32)lo / length;
  for (zc_i64 e = lo; e < hi; ++segment) {
    const zc_i64 begin = (zc_i64)segment * length, end = begin + length < hi ? begin + length : hi;
    f(e - begin, e - lo, end - e, segment * field);
    e = end;
  }
}

// Bits of count bytes moved to other places of the same bytes: to[i] = (from[i] >> right & mask) << left, or added to
// what to[i] has. Eight bytes at a time in a word; no bit leaves its byte, for mask is shorter than what is shifted.
template <bool ADD>
ZC_FN void move_bits(const zc_u8 *__restrict from, zc_i64 count, zc_i32 right, zc_u32 mask, zc_i32 left,
                     zc_u8 *__restrict to) {
  const zc_u64 masks = mask * 0x0101010101010101ull;
  zc_i64 i = 0;
  for (; i + 8 <= count; i += 8) {
    const zc_u64 moved = (*(const u64_at *)(from + i) >> right & masks) << left;
    *(u64_at *)(to + i) = ADD ? *(u64_at *)(to + i) | moved : moved;
  }
  for (; i < count; ++i) {
    const zc_u32 moved = (from[i] >> right & mask) << left;
    to[i] = (zc_u8)(ADD ? to[i] | moved : moved);
  }
}

// Codes of elements lo..hi out of the planes of a block of r.
static void unpack(const zc_u8 *__restrict planes, zc_i32 bits, zc_i64 r, zc_i64 lo, zc_i64 hi,
                   zc_u8 *__restrict codes) {
  zc_i32 low = 0;
  for (zc_i32 field = 8; field > 0; field /= 2) {
    if (!(bits & field)) continue;
    const zc_u32 mask = (1u << field) - 1;
    each_run(field, r, lo, hi, [&](zc_i64 at, zc_i64 e, zc_i64 count, zc_i32 shift) {
      if (low == 0)
        move_bits<false>(planes + at, count, shift, mask, low, codes + e);
      else
        move_bits<true>(planes + at, count, shift, mask, low, codes + e);
    });
    planes += r * field / 8;
    low += field;
  }
}

// Codes of elements lo..hi into the planes of a block of r. Tiles come in order: an element whose bits are the lowest
// of their byte stores the byte, the others add to it.
static void pack(const zc_u8 *__restrict codes, zc_i32 bits, zc_i64 r, zc_i64 lo, zc_i64 hi,
                 zc_u8 *__restrict planes) {
  zc_i32 low = 0;
  for (zc_i32 field = 8; field > 0; field /= 2) {
    if (!(bits & field)) continue;
    const zc_u32 mask = (1u << field) - 1;
    each_run(field, r, lo, hi, [&](zc_i64 at, zc_i64 e, zc_i64 count, zc_i32 shift) {
      if (shift == 0)
        move_bits<false>(codes + e, count, low, mask, shift, planes + at);
      else
        move_bits<true>(codes + e, count, low, mask, shift, planes + at);
    });
    planes += r * field / 8;
    low += field;
  }
}

// Encodes one block of `present` elements, `stored` with the missing ones.
template <class E, class Rules>
static void encode_block(const Rules &rules, const zc_u8 *source, zc_i64 present, zc_i64 stored, const Chance &chance,
                         zc_u8 *scale, zc_u8 *planes) {
  float x[TILE];
  zc_u8 codes[TILE];
  zc_u16 room[TILE + 2 * SPAN];
  typename Rules::Seen seen;
  for (zc_i64 lo = 0; lo < present; lo += TILE) {
    const zc_i64 count = present - lo < TILE ? present - lo : TILE;
    convert<E, Float32>(source + lo * E::size, count, (zc_u8 *)x);
    for (zc_i64 i = 0; i < count; ++i) seen.see(x[i]);
  }
  const auto s = rules.scale(seen, Rules::BY_SHIFT ? draw_one(chance) : 0);
  rules.store(s, scale);
  if (s.inv == 0.0f) {
    __builtin_memset(planes, 0, (size_t)zc_codes_nbytes(stored, rules.bits()));
    return;
  }
  for (zc_i64 lo = 0; lo < stored; lo += TILE) {
    const zc_i64 count = present - lo < TILE ? present - lo : TILE, hi = stored - lo < TILE ? stored : lo + TILE;
    if (present > TILE) convert<E, Float32>(source + lo * E::size, count, (zc_u8 *)x);
    const zc_u16 *drawn = Rules::BY_CHANCE ? draw_elements(chance.from(lo), count, room) : room;
    for (zc_i64 i = 0; i < count; ++i) codes[i] = (zc_u8)rules.code(x[i], s, Rules::BY_CHANCE ? drawn[i] : 0);
    for (zc_i64 i = count; i < hi - lo; ++i) codes[i] = 0;
    pack(codes, rules.bits(), stored, lo, hi, planes);
  }
}

// Sums of elements lo..hi of block b over k chunks, in the order of the chunks.
template <class Rules>
static void sum_block(const Rules &rules, const Layout &at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b, zc_i64 lo,
                      zc_i64 hi, float_at *__restrict sums) {
  zc_u8 codes[TILE];
  for (; lo < hi; lo += TILE, sums += TILE) {
    const zc_i64 count = hi - lo < TILE ? hi - lo : TILE;
    for (zc_i64 w = 0; w < k; ++w) {
      unpack(wires[w] + at.codes_at(b), at.bits, at.stored(b), lo, lo + count, codes);
      const auto shared = rules.shared(wires[w], at, b);
      if (w == 0)
        for (zc_i64 i = 0; i < count; ++i) sums[i] = rules.value(codes[i], shared);
      else
        for (zc_i64 i = 0; i < count; ++i) sums[i] = zc_add(sums[i], rules.value(codes[i], shared));
    }
  }
}

template <bool CHANCE>
inline float NvFp4Rules<CHANCE>::shared(const zc_u8 *wire, const Layout &at, zc_i64 b) {
  const float region = ((const float_at *)wire)[b * ZC_NVFP4_BLOCK / ZC_NVFP4_REGION];
  return zc_nvfp4_value(wire[at.scale_at(b)], region);
}

template <int N>
ZC_FN Amax amax_of(const float *x) {
  Amax seen;
  for (int i = 0; i < N; ++i) seen.see(x[i]);
  return seen;
}

// A block of few elements, the same number of them always, so that loops unroll and vectorise; those from `present` on
// are missing.
template <class Rules>
ZC_FN void encode_short(const Rules &rules, const float *x, zc_i64 present, Amax seen, const zc_u16 *drawn,
                        zc_u8 *scale, zc_u8 *planes) {
  constexpr int N = Rules::SHORT;
  const zc_scale s = rules.scale(seen, 0);
  zc_u8 codes[N];
  for (int i = 0; i < N; ++i)
    codes[i] = (zc_u8)(s.inv == 0.0f ? 0u : rules.code(x[i], s, Rules::BY_CHANCE ? drawn[i] : 0));
  if constexpr (Rules::BY_CHANCE)
    for (int i = (int)present; i < N; ++i) codes[i] = 0;
  rules.store(s, scale);
  if (rules.bits() == 8)
    __builtin_memcpy(planes, codes, N);
  else
    for (int i = 0; i < N / 2; ++i) planes[i] = (zc_u8)(codes[i] | codes[i + N / 2] << 4);
}

// Sums of a whole short block over k chunks.
template <class Rules>
static void sum_short(const Rules &rules, const Layout &at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b,
                      float_at *__restrict sums) {
  constexpr int N = Rules::SHORT;
  float total[N];
  for (zc_i64 w = 0; w < k; ++w) {
    const zc_u8 *planes = wires[w] + at.codes_at(b);
    const float scale = rules.shared(wires[w], at, b);
    float x[N];
    if (rules.bits() == 8)
      for (int i = 0; i < N; ++i) x[i] = rules.value(planes[i], scale);
    else
      for (int i = 0; i < N / 2; ++i) {
        x[i] = rules.value(planes[i] & 15, scale);
        x[i + N / 2] = rules.value(planes[i] >> 4, scale);
      }
    for (int i = 0; i < N; ++i) total[i] = w == 0 ? x[i] : zc_add(total[i], x[i]);
  }
  for (int i = 0; i < N; ++i) sums[i] = total[i];
}

// Encodes the regions of nvfp4 that begin with block b, from count elements at source.
template <class E, bool CHANCE>
static void encode_regions(const Layout &at, zc_i64 b, const zc_u8 *source, zc_i64 count, const Chance &chance,
                           zc_u8 *wire) {
  constexpr zc_i64 N = ZC_NVFP4_BLOCK, REGION = ZC_NVFP4_REGION;
  NvFp4Rules<CHANCE> rules;
  zc_u16 room[CHANCE ? REGION + 2 * SPAN : 1];
  for (zc_i64 lo = 0; lo < count; lo += REGION, b += REGION / N) {
    const zc_i64 present = count - lo < REGION ? count - lo : REGION, n_blocks = (present + N - 1) / N;
    float x[REGION];
    convert<E, Float32>(source + lo * E::size, present, (zc_u8 *)x);
    for (zc_i64 i = present; i < n_blocks * N; ++i) x[i] = 0.0f;
    const zc_u16 *drawn = CHANCE ? draw_elements(chance.from(b * N), present, room) : room;
    Amax seen[REGION / N];
    zc_i32 of_region = 0;
    for (zc_i64 i = 0; i < n_blocks; ++i) {
      seen[i] = amax_of<N>(x + i * N);
      of_region = seen[i].bits < (zc_i32)ZC_INF && seen[i].bits > of_region ? seen[i].bits : of_region;
    }
    rules.region = zc_nvfp4_region((zc_u32)of_region);
    ((float_at *)wire)[b * N / REGION] = zc_float(rules.region.bits << 16);
    for (zc_i64 i = 0; i < n_blocks; ++i) {
      zc_u8 *scale = wire + at.scale_at(b + i), *planes = wire + at.codes_at(b + i);
      if (at.stored(b + i) == N)
        encode_short(rules, x + i * N, at.present(b + i), seen[i], CHANCE ? drawn + i * N : room, scale, planes);
      else
        encode_block<Float32>(rules, (const zc_u8 *)(x + i * N), at.present(b + i), at.stored(b + i),
                              chance.from((b + i) * N), scale, planes);
    }
  }
}
