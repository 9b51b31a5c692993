// What differs between block codecs, as the loops of cpu/blocks.h take it: each a few lines over cuda/<codec>.cuh.
//
//   BY_CHANCE             whether code() looks at random bits
//   BY_SHIFT              whether scale() does, at those of the block's first element
//   SHORT                 the block, where it is short and no other; 0: the codec says it
//   bits()                of a code
//   Seen                  what the scale depends on, told element by element
//   scale(seen, chance)   of a block: a record with `inv`, 0 if every code is 0. store() writes it
//   code(x, scale, chance)     of an element
//   Shared, shared(wire, layout, b), value(code, shared)  what decoding needs of block b, and an element with it
//
// Included once per build of cpu/loops.cpp, inside its namespace.

struct Layout;

// The largest magnitude bits.
struct Amax {
  zc_i32 bits = 0;

  void see(float x) {
    const zc_i32 magnitude = (zc_i32)(zc_bits(x) & ZC_MAGNITUDE);
    bits = magnitude > bits ? magnitude : bits;
  }
};

// And the lowest and the highest element.
struct Extent : Amax {
  zc_i32 lowest = 0x7fffffff, highest = -0x7fffffff - 1;

  void see(float x) {
    Amax::see(x);
    const zc_i32 place = zc_in_order((zc_i32)zc_bits(x));
    lowest = place < lowest ? place : lowest;
    highest = place > highest ? place : highest;
  }
};

// A scale of bfloat16, two bytes, and nothing else in a block.
struct WideScales {
  typedef Amax Seen;
  typedef float Shared;
  static void store(const zc_scale &scale, zc_u8 *at) { *(u16_at *)at = (zc_u16)scale.bits; }
  ZC_FN float shared(const zc_u8 *wire, const Layout &, zc_i64 b) { return zc_from_bf16(((const u16_at *)wire)[b]); }
};

// A number from -2^(width - 1) on.
ZC_FN float signed_code(zc_u8 code, zc_i32 width) {
  const zc_u8 sign = (zc_u8)(1u << (width - 1));
  return (float)(zc_i8)(zc_u8)((code ^ sign) - sign);
}

template <bool CHANCE>
struct IntRules : WideScales {
  static constexpr bool BY_CHANCE = CHANCE, BY_SHIFT = false;
  static constexpr int SHORT = 0;
  zc_i32 width;

  explicit IntRules(const zc_codec &codec) : width(codec.bits) {}
  zc_i32 bits() const { return width; }
  zc_scale scale(Amax seen, zc_u32) const {
    return zc_block_scale((zc_u32)seen.bits, (float)zc_qmax(width), zc_scale_cap(width));
  }
  zc_i32 code(float x, const zc_scale &scale, zc_u32 chance) const {
    return CHANCE ? zc_code_by_chance(x, scale.inv, chance, zc_qmax(width)) : zc_code(x, scale.inv);
  }
  float value(zc_u8 code, float scale) const { return zc_mul(signed_code(code, width), scale); }
};

struct ShiftRules {
  typedef Amax Seen;
  struct Shared {
    float scale, shift;
  };
  static constexpr bool BY_CHANCE = false, BY_SHIFT = true;
  static constexpr int SHORT = 0;
  zc_i32 width;

  explicit ShiftRules(const zc_codec &codec) : width(codec.bits) {}
  zc_i32 bits() const { return width; }
  zc_scale scale(Amax seen, zc_u32 chance) const {
    return zc_shift_scale((zc_u32)seen.bits, width, chance);
  }
  static void store(const zc_scale &scale, zc_u8 *at) { *(u32_at *)at = scale.bits; }
  zc_i32 code(float x, const zc_scale &scale, zc_u32) const {
    return zc_code_by_chance(x, scale.inv, scale.bits >> 16, zc_qmax(width));
  }
  ZC_FN Shared shared(const zc_u8 *wire, const Layout &, zc_i64 b) {
    const zc_u32 bits = ((const u32_at *)wire)[b];
    return {zc_from_bf16((zc_u16)bits), zc_shift(bits)};
  }
  float value(zc_u8 code, const Shared &of) const {
    return zc_add(zc_mul(signed_code(code, width), of.scale), of.shift);
  }
};

template <bool CHANCE>
struct AsymRules {
  typedef Extent Seen;
  typedef zc_u32 Shared;
  static constexpr bool BY_CHANCE = CHANCE, BY_SHIFT = false;
  static constexpr int SHORT = 0;
  zc_i32 width;

  explicit AsymRules(const zc_codec &codec) : width(codec.bits) {}
  zc_i32 bits() const { return width; }
  zc_range scale(const Extent &seen, zc_u32) const {
    return zc_asym_range({(zc_u32)seen.bits, seen.lowest, seen.highest}, width);
  }
  static void store(const zc_range &range, zc_u8 *at) { *(u32_at *)at = range.bits; }
  zc_u32 code(float x, const zc_range &range, zc_u32 chance) const {
    return CHANCE ? zc_asym_code_by_chance(x, range, chance, zc_largest(width)) : zc_asym_code(x, range);
  }
  ZC_FN zc_u32 shared(const zc_u8 *wire, const Layout &, zc_i64 b) { return ((const u32_at *)wire)[b]; }
  float value(zc_u8 code, zc_u32 bits) const { return zc_asym_value(code, bits); }
};

// Codes that are floats themselves.
template <class Form, bool CHANCE>
struct FloatCodes {
  static constexpr bool BY_CHANCE = CHANCE, BY_SHIFT = false;
  static constexpr zc_i32 bits() { return Form::BITS; }
  ZC_FN zc_u32 code(float x, const zc_scale &scale, zc_u32 chance) {
    const float scaled = zc_mul(x, scale.inv);
    return CHANCE ? zc_to_mini_by_chance<Form>(scaled, chance) : zc_to_mini<Form>(scaled);
  }
  ZC_FN float value(zc_u8 code, float scale) { return zc_mul(zc_from_mini<Form>(code), scale); }
};

template <class Form, bool CHANCE>
struct Fp8Rules : WideScales, FloatCodes<Form, CHANCE> {
  static constexpr int SHORT = 0;

  ZC_FN zc_scale scale(Amax seen, zc_u32) { return zc_fp8_scale<Form>((zc_u32)seen.bits); }
};

template <class Form, bool CHANCE>
struct MxRules : FloatCodes<Form, CHANCE> {
  typedef Amax Seen;
  typedef float Shared;
  static constexpr int SHORT = ZC_MX_BLOCK_ELEMS;

  ZC_FN zc_scale scale(Amax seen, zc_u32) { return zc_mx_scale<Form>((zc_u32)seen.bits, CHANCE); }
  static void store(const zc_scale &scale, zc_u8 *at) { *at = (zc_u8)scale.bits; }
  ZC_FN float shared(const zc_u8 *wire, const Layout &, zc_i64 b) { return zc_from_e8m0(wire[b]); }
};

// A block's scale is relative to its region's, which scale() is told beforehand.
template <bool CHANCE>
struct NvFp4Rules : FloatCodes<zc_e2m1, CHANCE> {
  typedef Amax Seen;
  typedef float Shared;
  static constexpr int SHORT = ZC_NVFP4_BLOCK;
  zc_scale region;

  zc_scale scale(Amax seen, zc_u32) const { return zc_nvfp4_scale((zc_u32)seen.bits, region, CHANCE); }
  static void store(const zc_scale &scale, zc_u8 *at) { *at = (zc_u8)scale.bits; }
  static float shared(const zc_u8 *wire, const Layout &at, zc_i64 b);
};

template <template <class, bool> class Rules, class Form, class F>
ZC_FN void with_rounding(const zc_codec &codec, F f) {
  return codec.rounding == ZC_STOCHASTIC ? f(Rules<Form, true>()) : f(Rules<Form, false>());
}

// Calls f with the rules of a block codec.
template <class F>
ZC_FN void with_rules(const zc_codec &codec, F f) {
  const bool e4m3 = codec.element == ZC_E4M3, by_chance = codec.rounding == ZC_STOCHASTIC;
  switch (codec.kind) {
    case ZC_NVFP4: return by_chance ? f(NvFp4Rules<true>()) : f(NvFp4Rules<false>());
    case ZC_MX_BLOCK:
      return e4m3 ? with_rounding<MxRules, zc_e4m3>(codec, f) : with_rounding<MxRules, zc_e2m1>(codec, f);
    case ZC_FP8_BLOCK:
      return e4m3 ? with_rounding<Fp8Rules, zc_e4m3>(codec, f) : with_rounding<Fp8Rules, zc_e5m2>(codec, f);
    case ZC_INT_ASYM: return by_chance ? f(AsymRules<true>(codec)) : f(AsymRules<false>(codec));
  }
  if (codec.rounding == ZC_SHIFT) return f(ShiftRules(codec));
  return by_chance ? f(IntRules<true>(codec)) : f(IntRules<false>(codec));
}
