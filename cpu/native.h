// The C ABI of _native.so, called through ctypes by zcomm/engines/native.py: four verbs, once per build of
// cpu/loops.cpp.
//
// Names end in the build's name: zc_encode_portable, zc_encode_v3, ... Pointers may have any alignment and counts any
// size; nothing outside the named bytes is read or written. Chunks that are written overlap nothing that is read.
// A call computes on its thread, needs no state and holds no lock. Floating-point modes are set and restored inside.
#ifndef ZCOMM_NATIVE_H
#define ZCOMM_NATIVE_H

#include <cstddef>
#include <cstdint>

#define ZC_ABI 5  // counted up when anything below changes; zcomm/engines/native.py refuses another number
#define ZC_EXPORT extern "C" __attribute__((visibility("default")))

enum zc_dtype : int32_t { ZC_FLOAT32, ZC_BFLOAT16, ZC_FLOAT16, ZC_FLOAT64 };  // zcomm/buffers.py, DType
enum zc_kind : int32_t { ZC_RAW, ZC_CAST, ZC_INT_BLOCK, ZC_INT_ASYM, ZC_FP8_BLOCK, ZC_MX_BLOCK, ZC_NVFP4 };
enum zc_form : int32_t { ZC_E4M3, ZC_E5M2, ZC_E2M1 };
enum zc_rounding : int32_t { ZC_NEAREST, ZC_STOCHASTIC, ZC_SHIFT };

struct zc_codec {
  int32_t kind;      // zc_kind
  int32_t element;   // raw, cast: the zc_dtype on the wire; block codecs of floats: the zc_form of a code
  int32_t bits;      // block codecs: of a code
  int32_t block;     // block codecs: elements that share a scale
  int32_t rounding;  // block codecs: zc_rounding
  int32_t rotated;   // block codecs: 1 inside hadamard
};

struct zc_draw {  // zcomm/wire/draw.py; null for codecs that leave nothing to chance
  uint64_t seed, call, first;
};

#define ZC_DECLARE(build)                                                                                              \
  ZC_EXPORT void zc_encode_##build(const zc_codec *codec, const void *source, int64_t n, int32_t dtype, void *wire,    \
                                   const zc_draw *draw);                                                               \
  ZC_EXPORT void zc_decode_##build(const zc_codec *codec, const void *wire, int64_t n, void *target, int32_t dtype);   \
  ZC_EXPORT void zc_reduce_##build(const zc_codec *codec, const void *const *wires, int64_t k, int64_t n,              \
                                   double factor, double divisor, void *target, int32_t dtype);                        \
  ZC_EXPORT void zc_reduce_encode_##build(const zc_codec *codec, const void *const *wires, int64_t k, int64_t n,       \
                                          double factor, double divisor, const zc_codec *codec_out, void *wire_out,    \
                                          const zc_draw *draw);

ZC_DECLARE(portable)
#ifdef ZC_X86
ZC_DECLARE(v3)
ZC_DECLARE(v4)
#endif

ZC_EXPORT int32_t zc_abi(void);
ZC_EXPORT const char *zc_isa(void);     // the build this machine runs best: "portable", "v3" or "v4"
ZC_EXPORT const char *zc_builds(void);  // every build this machine can run, best first, separated by commas

#endif
