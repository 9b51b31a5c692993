// The usual codecs in whole blocks, LANES elements at a time: integers of 8 and 4 bits and floats of 8 in blocks that
// are a multiple of 64, and the short blocks of mxfp8, mxfp4 and nvfp4. Same bits as the loops of cpu/blocks.h.
//
// Included once per build of cpu/loops.cpp that has AVX2, inside its namespace.

ZC_FN float wide_scale(const zc_u8 *wire, zc_i64 b) { return zc_from_bf16(((const u16_at *)wire)[b]); }

#include "minifloats.h"
#ifdef __AVX512BW__
#include "int_block_avx512.h"
#else
#include "int_block_avx2.h"
#endif

constexpr zc_i64 ROTATED_BLOCK = 256;  // longer ones are rotated before they are encoded
constexpr zc_i64 GROUP = 8;  // blocks whose scales are computed together: divisions are slow one after the other

// Whether codes are added by the loops of cpu/sums_simd.h; whether elements are encoded by those here.
ZC_FN bool is_summed_here(const zc_codec &codec) {
  if (codec.kind >= ZC_MX_BLOCK) return true;
  if (codec.block % 64 != 0) return false;
  return codec.kind == ZC_FP8_BLOCK ||
         (codec.kind == ZC_INT_BLOCK && codec.rounding != ZC_SHIFT && (codec.bits == 8 || codec.bits == 4));
}
ZC_FN bool is_encoded_here(const zc_codec &codec) {
  const bool by_chance = codec.kind == ZC_INT_BLOCK && codec.block <= TILE;
  return is_summed_here(codec) && (codec.rounding == ZC_NEAREST || by_chance);
}

// ---- codes over scales of bfloat16

// IS_SLOW: so much is computed that memory must be asked for ahead.
template <int BITS_, bool BY_CHANCE_>
struct IntCodes {
  static constexpr int BITS = BITS_;
  static constexpr bool BY_CHANCE = BY_CHANCE_, IS_SLOW = BY_CHANCE;

  ZC_FN zc_scale scale(zc_u32 amax) { return zc_block_scale(amax, (float)zc_qmax(BITS), zc_scale_cap(BITS)); }
  template <class E>
  ZC_FN void quantize(const zc_u8 *x, zc_i64 block, float inv, const zc_u16 *chance, zc_u8 *codes) {
    quantize_block<BITS, BY_CHANCE, E>(x, block, inv, chance, codes);
  }
};

template <class Form>
struct Fp8Codes {
  static constexpr int BITS = 8;
  static constexpr bool BY_CHANCE = false, IS_SLOW = true;

  ZC_FN zc_scale scale(zc_u32 amax) { return zc_fp8_scale<Form>(amax); }
  template <class E>
  ZC_FN void quantize(const zc_u8 *x, zc_i64 block, float inv, const zc_u16 *, zc_u8 *codes) {
    for (zc_i64 j = 0; j < block; j += 4 * LANES) {
      Words q[4];
      for (int i = 0; i < 4; ++i) q[i] = mini_codes<Form, false>(load<E>(x + (j + i * LANES) * E::size) * all(inv));
      store_bytes(codes + j, q);
    }
  }
};

// Encodes count whole blocks; BY_CHANCE: of at most TILE elements; ROTATED: of at most ROTATED_BLOCK.
template <bool ROTATED, class E, class Codes>
static void encode_whole(Codes, const zc_u8 *x, zc_i64 count, zc_i64 block, const Chance &chance, u16_at *scales,
                         zc_u8 *codes) {
  constexpr int BITS = Codes::BITS;
  constexpr bool BY_CHANCE = Codes::BY_CHANCE;
  zc_u16 room[BY_CHANCE ? TILE + 2 * SPAN : 1];
  float rotated[ROTATED ? GROUP * ROTATED_BLOCK : 1];
  for (zc_i64 first = 0; first < count; first += GROUP) {
    const zc_i64 group = count - first < GROUP ? count - first : GROUP;
    zc_u32 amax[GROUP] = {0}, bits[GROUP];
    float inv[GROUP];
    const zc_u8 *from = x + first * block * E::size;
    for (zc_i64 g = 0; g < group; ++g) {
      const zc_u8 *of_block = from + g * block * E::size;
      amax[g] = ROTATED ? rotate_block<E>(of_block, block, rotated + g * block) : block_amax<E>(of_block, block);
    }
    for (zc_i64 g = 0; g < GROUP; ++g) {
      const zc_scale s = Codes::scale(amax[g]);
      bits[g] = s.bits;
      inv[g] = s.inv;
    }
    for (zc_i64 g = 0; g < group; ++g) {
      const zc_u8 *ahead = from + (g + GROUP) * block * E::size;  // what is read next, while this is computed
      for (zc_i64 i = 0; (Codes::IS_SLOW || ROTATED) && i < block * E::size; i += 64)
        _mm_prefetch((const char *)ahead + i, _MM_HINT_T0);
      zc_u8 *out = codes + (first + g) * (block / 8 * BITS);
      scales[first + g] = (zc_u16)bits[g];
      if (inv[g] == 0.0f) {
        __builtin_memset(out, 0, (size_t)(block / 8 * BITS));
        continue;
      }
      const zc_u16 *drawn = BY_CHANCE ? draw_elements(chance.from((first + g) * block), block, room) : room;
      if constexpr (ROTATED)
        Codes::template quantize<Float32>((const zc_u8 *)(rotated + g * block), block, inv[g], drawn, out);
      else
        Codes::template quantize<E>(from + g * block * E::size, block, inv[g], drawn, out);
    }
  }
}

// Calls f with the codes of a usual codec that has scales of bfloat16.
template <class F>
ZC_FN void with_codes(const zc_codec &codec, F f) {
  if (codec.kind == ZC_FP8_BLOCK) return codec.element == ZC_E4M3 ? f(Fp8Codes<zc_e4m3>()) : f(Fp8Codes<zc_e5m2>());
  if (codec.rounding == ZC_STOCHASTIC) return codec.bits == 8 ? f(IntCodes<8, true>()) : f(IntCodes<4, true>());
  return codec.bits == 8 ? f(IntCodes<8, false>()) : f(IntCodes<4, false>());
}

#include "short_blocks.h"
#include "sums_simd.h"

// Encodes blocks of a usual codec from b on, at most count whole ones; returns how many.
template <class E>
ZC_FN zc_i64 encode_usual(const zc_codec &codec, const Layout &at, zc_i64 b, const zc_u8 *x, zc_i64 count,
                          const Chance &chance, zc_u8 *wire) {
  zc_u8 *scales = wire + at.scale_at(b), *codes = wire + at.codes_at(b);
  if (codec.kind == ZC_NVFP4) {
    float_at *regions = (float_at *)wire + b * ZC_NVFP4_BLOCK / ZC_NVFP4_REGION;
    return encode_nvfp4<E>(x, count, regions, scales, codes);
  }
  if (codec.kind == ZC_MX_BLOCK)
    return codec.element == ZC_E4M3 ? encode_mx<zc_e4m3, E>(x, count, scales, codes)
                                    : encode_mx<zc_e2m1, E>(x, count, scales, codes);
  with_codes(codec, [&](auto of) { encode_whole<false, E>(of, x, count, at.block, chance, (u16_at *)scales, codes); });
  return count;
}
