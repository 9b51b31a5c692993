// Elements of the four dtypes as fp32 and back.
//
// Included once per build of cpu/loops.cpp, inside its namespace.

// Memory as it comes: any alignment, any type behind it.
typedef float float_at __attribute__((aligned(1), may_alias));
typedef double double_at __attribute__((aligned(1), may_alias));
typedef zc_u16 u16_at __attribute__((aligned(1), may_alias));
typedef zc_u32 u32_at __attribute__((aligned(1), may_alias));
typedef zc_u64 u64_at __attribute__((aligned(1), may_alias));

struct Float32 {
  static constexpr zc_i32 dtype = ZC_FLOAT32, size = 4;
  typedef float_at Stored;
  ZC_FN float widen(float x) { return x; }
  ZC_FN float narrow(float x) { return x; }
};
struct BFloat16 {
  static constexpr zc_i32 dtype = ZC_BFLOAT16, size = 2;
  typedef u16_at Stored;
  ZC_FN float widen(zc_u16 x) { return zc_from_bf16(x); }
  ZC_FN zc_u16 narrow(float x) { return zc_to_bf16(x); }
};
struct Float16 {
  static constexpr zc_i32 dtype = ZC_FLOAT16, size = 2;
  typedef u16_at Stored;
  ZC_FN float widen(zc_u16 x) { return zc_from_fp16(x); }
  ZC_FN zc_u16 narrow(float x) { return zc_to_fp16(x); }
};
struct Float64 {
  static constexpr zc_i32 dtype = ZC_FLOAT64, size = 8;
  typedef double_at Stored;
  ZC_FN float widen(double x) { return (float)x; }
  ZC_FN double narrow(float x) { return x; }
};

// Calls f with the element type of a dtype.
template <class F>
ZC_FN void with_element(zc_i32 dtype, F f) {
  switch (dtype) {
    case ZC_FLOAT32: return f(Float32());
    case ZC_BFLOAT16: return f(BFloat16());
    case ZC_FLOAT16: return f(Float16());
    default: return f(Float64());
  }
}

#ifdef __AVX2__
#include "lanes.h"
#endif

// n elements of From at source become elements of To at target, through fp32.
template <class From, class To>
ZC_FN void convert(const zc_u8 *__restrict source, zc_i64 n, zc_u8 *__restrict target) {
  zc_i64 i = 0;
#ifdef __AVX2__
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    const zc_u8 *x = source + i * From::size;
    store_pair<To, false>(target + i * To::size, load<From>(x), load<From>(x + LANES * From::size));
  }
#endif
  const typename From::Stored *from = (const typename From::Stored *)source;
  typename To::Stored *to = (typename To::Stored *)target;
  for (; i < n; ++i) to[i] = To::narrow(From::widen(from[i]));
}
