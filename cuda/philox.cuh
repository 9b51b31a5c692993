// Random bits for rounding: Philox4x32-7, sixteen bits per element, from (seed, call, element) and nothing else
// (docs/wire-format.md, Chance).
//
//   key      seed, 64 bits: low word, high word
//   counter  e / 8, 64 bits; call, 64 bits: low words before high words
//   element  e takes half-word e % 8 of the 128 bits, counted from the low end: one call serves eight neighbours
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Same names in zcomm/wire/draw.py.
#ifndef ZCOMM_PHILOX_CUH
#define ZCOMM_PHILOX_CUH

#include "wire.h"

#define ZC_PHILOX_ROUNDS 7
#define ZC_PHILOX_M0 0xd2511f53u
#define ZC_PHILOX_M1 0xcd9e8d57u
#define ZC_PHILOX_W0 0x9e3779b9u  // added to the key after every round
#define ZC_PHILOX_W1 0xbb67ae85u

struct zc_words {
  zc_u32 w0, w1, w2, w3;
};

// The 128 bits of elements 8 number ... 8 number + 7.
ZC_FN zc_words zc_philox(zc_u64 number, zc_u64 call, zc_u64 seed) {
  zc_words c = {(zc_u32)number, (zc_u32)(number >> 32), (zc_u32)call, (zc_u32)(call >> 32)};
  zc_u32 k0 = (zc_u32)seed, k1 = (zc_u32)(seed >> 32);
  for (int round = 0; round < ZC_PHILOX_ROUNDS; ++round) {
    zc_u64 p0 = (zc_u64)c.w0 * ZC_PHILOX_M0, p1 = (zc_u64)c.w2 * ZC_PHILOX_M1;
    c.w0 = (zc_u32)(p1 >> 32) ^ c.w1 ^ k0;
    c.w2 = (zc_u32)(p0 >> 32) ^ c.w3 ^ k1;
    c.w1 = (zc_u32)p1;
    c.w3 = (zc_u32)p0;
    k0 += ZC_PHILOX_W0;
    k1 += ZC_PHILOX_W1;
  }
  return c;
}

// Half-word i of the eight.
ZC_FN zc_u32 zc_half_word(zc_words c, zc_u32 i) {
  zc_u32 word = i < 4 ? (i < 2 ? c.w0 : c.w1) : (i < 6 ? c.w2 : c.w3);
  return word >> (i % 2 * 16) & 0xffffu;
}

#endif
