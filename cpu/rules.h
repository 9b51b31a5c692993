// What differs between block codecs, as the loops of cpu/blocks.h take it: each a few lines over cuda/<codec>.cuh.
//
//   BY_CHANCE             whether code() looks at random bits
//   SHORT                 the block, where it is short and no other; 0: the codec says it
//   bits()                of a code
//   scale(amax)           from the largest magnitude bits of a block; store() writes it, scale_at() reads block b's, to decode with
//   code(x, inv, chance)  of an element; value(code) is what decoding multiplies with the scale
//
// Included once per build of cpu/loops.cpp, inside its namespace.

struct Layout;

// Scales of bfloat16, two bytes each.
struct WideScales {
  static void store(const zc_scale &scale, zc_u8 *at) { *(u16_at *)at = (zc_u16)scale.bits; }
  ZC_FN float scale_at(const zc_u8 *wire, const Layout &, zc_i64 b) { return zc_from_bf16(((const u16_at *)wire)[b]); }
};

template <bool CHANCE>
struct IntRules : WideScales {
  static constexpr bool BY_CHANCE = CHANCE;
  static constexpr int SHORT = 0;
  zc_i32 width;

  explicit IntRules(const zc_codec &codec) : width(codec.bits) {}
  zc_i32 bits() const { return width; }
  zc_scale scale(zc_u32 amax) const { return zc_block_scale(amax, (float)zc_qmax(width), zc_scale_cap(width)); }
  zc_i32 code(float x, float inv, zc_u32 chance) const {
    return CHANCE ? zc_code_by_chance(x, inv, chance, zc_qmax(width)) : zc_code(x, inv);
  }
  float value(zc_u8 code) const {
    const zc_u8 sign = (zc_u8)(1u << (width - 1));
    return (float)(zc_i8)(zc_u8)((code ^ sign) - sign);
  }
};

// Codes that are floats themselves.
template <class Form>
struct FloatCodes {
  static constexpr bool BY_CHANCE = false;
  static constexpr zc_i32 bits() { return Form::BITS; }
  ZC_FN zc_u32 code(float x, float inv, zc_u32) { return zc_to_mini<Form>(zc_mul(x, inv)); }
  ZC_FN float value(zc_u8 code) { return zc_from_mini<Form>(code); }
};

template <class Form>
struct Fp8Rules : WideScales, FloatCodes<Form> {
  static constexpr int SHORT = 0;

  ZC_FN zc_scale scale(zc_u32 amax) { return zc_fp8_scale<Form>(amax); }
};

template <class Form>
struct MxRules : FloatCodes<Form> {
  static constexpr int SHORT = ZC_MX_BLOCK_ELEMS;

  ZC_FN zc_scale scale(zc_u32 amax) { return zc_mx_scale<Form>(amax); }
  static void store(const zc_scale &scale, zc_u8 *at) { *at = (zc_u8)scale.bits; }
  ZC_FN float scale_at(const zc_u8 *wire, const Layout &, zc_i64 b) { return zc_from_e8m0(wire[b]); }
};

// A block's scale is relative to its region's, which scale() is told beforehand.
struct NvFp4Rules : FloatCodes<zc_e2m1> {
  static constexpr int SHORT = ZC_NVFP4_BLOCK;
  zc_scale region;

  zc_scale scale(zc_u32 amax) const { return zc_nvfp4_scale(amax, region); }
  static void store(const zc_scale &scale, zc_u8 *at) { *at = (zc_u8)scale.bits; }
  static float scale_at(const zc_u8 *wire, const Layout &at, zc_i64 b);
};

// Calls f with the rules of a block codec.
template <class F>
ZC_FN void with_rules(const zc_codec &codec, F f) {
  if (codec.kind == ZC_NVFP4) return f(NvFp4Rules());
  if (codec.kind == ZC_MX_BLOCK) return codec.element == ZC_E4M3 ? f(MxRules<zc_e4m3>()) : f(MxRules<zc_e2m1>());
  if (codec.kind == ZC_FP8_BLOCK) return codec.element == ZC_E4M3 ? f(Fp8Rules<zc_e4m3>()) : f(Fp8Rules<zc_e5m2>());
  if (codec.rounding == ZC_STOCHASTIC) return f(IntRules<true>(codec));
  return f(IntRules<false>(codec));
}
