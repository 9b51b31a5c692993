// Which builds of cpu/loops.cpp this machine can run. __builtin_cpu_supports asks the operating system too (XGETBV):
// a kernel that does not save the wide registers has none. It knows f16c and lzcnt since g++ 11 and clang++ 18 only.
#include "native.h"

#ifdef ZC_X86
#include <cpuid.h>

static bool has_f16c_and_lzcnt() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 29)) return false;
  return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & 1u << 5);
}
static bool runs_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && has_f16c_and_lzcnt();
}
static bool runs_v4() {
  return runs_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
int32_t zc_abi(void) { return ZC_ABI; }
const char *zc_isa(void) { return runs_v4() ? "v4" : runs_v3() ? "v3" : "portable"; }
const char *zc_builds(void) { return runs_v4() ? "v4,v3,portable" : runs_v3() ? "v3,portable" : "portable"; }
#else
int32_t zc_abi(void) { return ZC_ABI; }
const char *zc_isa(void) { return "portable"; }
const char *zc_builds(void) { return "portable"; }
#endif
