// The usual codes, integers of 8 and 4 bits and floats of 8, in whole blocks that are a multiple of 64, by the widest
// instructions of the build. Same bits as the loops of cpu/blocks.h. Included once per build of cpu/loops.cpp that has
// AVX2, inside its namespace.

template <bool FIRST, class A, class B>
struct Choice {
  typedef A type;
};
template <class A, class B>
struct Choice<false, A, B> {
  typedef B type;
};

namespace avx2 {
#include "int_block_avx2.h"
#include "fp8_avx2.h"
}
#ifdef __AVX512BW__
namespace avx512 {
#include "int_block_avx512.h"
}
#endif

constexpr zc_i64 ROTATED_BLOCK = 256;  // longer ones are rotated before they are encoded
constexpr zc_i64 GROUP = 8;  // blocks whose scales are computed together: divisions are slow one after the other

ZC_FN bool is_usual(const zc_codec &codec) {
  if (codec.block % 64 != 0) return false;
  if (codec.kind == ZC_FP8_BLOCK) return codec.rounding == ZC_NEAREST;
  return codec.kind == ZC_INT_BLOCK && (codec.bits == 8 || codec.bits == 4) &&
         (codec.rounding == ZC_NEAREST || (codec.rounding == ZC_STOCHASTIC && codec.block <= TILE));
}

// The usual codes, as the loops below take them. IS_SLOW: so much is computed that memory must be asked for ahead.
template <int BITS_, bool BY_CHANCE_>
struct IntCodes {
  static constexpr int BITS = BITS_;
  static constexpr bool BY_CHANCE = BY_CHANCE_, IS_SLOW = BY_CHANCE;
  ZC_FN zc_scale scale(zc_u32 amax) { return zc_block_scale(amax, (float)zc_qmax(BITS), zc_scale_cap(BITS)); }
};
template <class Form_>
struct Fp8Codes {
  typedef Form_ Form;
  static constexpr int BITS = 8;
  static constexpr bool BY_CHANCE = false, IS_SLOW = Form::BIAS == 7;
  ZC_FN zc_scale scale(zc_u32 amax) { return zc_fp8_scale<Form>(amax); }
};

#ifdef __AVX512BW__
template <int BITS>
ZC_FN bool is_wide(zc_i64 block) {
  return BITS == 8 || block % 128 == 0;
}
#endif

template <class E>
ZC_FN zc_u32 block_amax(const zc_u8 *x, zc_i64 block) {
#ifdef __AVX512BW__
  return avx512::block_amax<E>(x, block);
#else
  return avx2::block_amax<E>(x, block);
#endif
}

template <class E>
ZC_FN zc_u32 rotate_block(const zc_u8 *x, zc_i64 block, float_at *rotated) {
#ifdef __AVX512BW__
  return avx512::rotate_block<E>(x, block, rotated);
#else
  return avx2::rotate_block<E>(x, block, rotated);
#endif
}

template <class E, int BITS, bool BY_CHANCE>
ZC_FN void quantize_as(IntCodes<BITS, BY_CHANCE>, const zc_u8 *x, zc_i64 block, float inv, const zc_u16 *chance,
                       zc_u8 *codes) {
#ifdef __AVX512BW__
  if (is_wide<BITS>(block)) return avx512::quantize_block<BITS, BY_CHANCE, E>(x, block, inv, chance, codes);
#endif
  avx2::quantize_block<BITS, BY_CHANCE, E>(x, block, inv, chance, codes);
}
template <class E, class Form>
ZC_FN void quantize_as(Fp8Codes<Form>, const zc_u8 *x, zc_i64 block, float inv, const zc_u16 *, zc_u8 *codes) {
  avx2::quantize_fp8<Form, E>(x, block, inv, codes);
}

template <int BITS, bool BY_CHANCE, class E>
ZC_FN void quantize_block(const zc_u8 *x, zc_i64 block, float inv, const zc_u16 *chance, zc_u8 *codes) {
#ifdef __AVX512BW__
  if (is_wide<BITS>(block)) return avx512::quantize_block<BITS, BY_CHANCE, E>(x, block, inv, chance, codes);
#endif
  avx2::quantize_block<BITS, BY_CHANCE, E>(x, block, inv, chance, codes);
}

// Sums of `count` whole blocks from block b on over k chunks, in the order of the chunks.
template <int BITS, bool BY_CHANCE>
ZC_FN void sum_whole(IntCodes<BITS, BY_CHANCE>, const Layout &at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b,
                     zc_i64 count, float_at *sums) {
  const zc_i64 block = at.block, end = b + count;
#ifdef __AVX512BW__
  if (is_wide<BITS>(block)) {
    for (; b < end; ++b, sums += block) avx512::sum_block<BITS>(block, at.codes_at(b), wires, k, b, sums);
    return;
  }
#endif
  for (; b < end; ++b, sums += block) avx2::sum_block<BITS>(block, at.codes_at(b), wires, k, b, sums);
}
template <class Form>
ZC_FN void sum_whole(Fp8Codes<Form>, const Layout &at, const zc_u8 *const *wires, zc_i64 k, zc_i64 b, zc_i64 count,
                     float_at *sums) {
  for (const zc_i64 end = b + count; b < end; ++b, sums += at.block)
    avx2::sum_fp8<Form>(at.block, at.codes_at(b), wires, k, b, sums);
}

// Encodes count whole blocks; BY_CHANCE: of at most TILE elements; ROTATED: of at most ROTATED_BLOCK.
template <bool ROTATED, class E, class Codes>
static void encode_whole(Codes, const zc_u8 *x, zc_i64 count, zc_i64 block, const Chance &chance, u16_at *scales,
                         zc_u8 *codes) {
  constexpr int BITS = Codes::BITS;
  constexpr bool BY_CHANCE = Codes::BY_CHANCE;
  typedef typename Choice<ROTATED, Float32, E>::type Coded;
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
    const zc_u8 *coded = ROTATED ? (const zc_u8 *)rotated : from;
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
      quantize_as<Coded>(Codes(), coded + g * block * Coded::size, block, inv[g], drawn, out);
    }
  }
}

// Calls f with the codes of a usual codec.
template <class F>
ZC_FN void with_codes(const zc_codec &codec, F f) {
  if (codec.kind == ZC_FP8_BLOCK) return codec.element == ZC_E4M3 ? f(Fp8Codes<zc_e4m3>()) : f(Fp8Codes<zc_e5m2>());
  if (codec.rounding == ZC_STOCHASTIC) return codec.bits == 8 ? f(IntCodes<8, true>()) : f(IntCodes<4, true>());
  return codec.bits == 8 ? f(IntCodes<8, false>()) : f(IntCodes<4, false>());
}
