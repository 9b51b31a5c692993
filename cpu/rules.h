// What differs between block codecs, as the loops of cpu/blocks.h take it: each a few lines over cuda/<codec>.cuh.
//
//   BY_CHANCE             whether code() looks at random bits
//   bits()                of a code
//   scale(amax)           from the largest magnitude bits of a block; store() writes it, scale_at() reads block b's
//   code(x, inv, chance)  of an element; value(code) is what decoding multiplies with the scale
//
// Included once per build of cpu/loops.cpp, inside its namespace.

template <bool CHANCE>
struct IntRules {
  static constexpr bool BY_CHANCE = CHANCE;
  zc_i32 width;

  explicit IntRules(const zc_codec &codec) : width(codec.bits) {}
  zc_i32 bits() const { return width; }
  zc_scale scale(zc_u32 amax) const { return zc_block_scale(amax, (float)zc_qmax(width), zc_scale_cap(width)); }
  void store(const zc_scale &scale, zc_u8 *at) const { *(u16_at *)at = (zc_u16)scale.bits; }
  float scale_at(const zc_u8 *wire, zc_i64 b) const { return zc_from_bf16(((const u16_at *)wire)[b]); }
  zc_i32 code(float x, float inv, zc_u32 chance) const {
    return CHANCE ? zc_code_by_chance(x, inv, chance, zc_qmax(width)) : zc_code(x, inv);
  }
  float value(zc_u8 code) const {
    const zc_u8 sign = (zc_u8)(1u << (width - 1));
    return (float)(zc_i8)(zc_u8)((code ^ sign) - sign);
  }
};

// Calls f with the rules of a block codec.
template <class F>
ZC_FN void with_rules(const zc_codec &codec, F f) {
  if (codec.rounding == ZC_STOCHASTIC) return f(IntRules<true>(codec));
  return f(IntRules<false>(codec));
}
