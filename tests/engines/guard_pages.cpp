// Runs every verb of one build with buffers that end where readable memory ends, and again with buffers that begin
// where it begins. Built by test_sanitizers.py with -fsanitize=address,undefined; any fault or report is a failure.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../cpu/native.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define VERB(name) JOIN(name, JOIN(_, ZC_BUILD))

// nbytes between pages that fault: pushed against the page behind, or against the page before.
class Walled {
  char *pages_;
  size_t length_;

 public:
  char *at;
  Walled(size_t nbytes, bool at_end) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (nbytes + page) / page * page;
    length_ = inner + 2 * page;
    pages_ = (char *)mmap(nullptr, length_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages_ == MAP_FAILED || mprotect(pages_ + page, inner, PROT_READ | PROT_WRITE)) abort();
    at = at_end ? pages_ + page + inner - nbytes : pages_ + page;
    for (size_t i = 0; i < nbytes; ++i) at[i] = (char)(i * 37 + 11);
  }
  ~Walled() { munmap(pages_, length_); }
};

static int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
static const int SIZES[4] = {4, 2, 2, 8};

static int64_t wire_nbytes(const zc_codec &c, int64_t n) {
  if (c.rotated) n = (n + 31) / 32 * 32;
  if (c.kind < ZC_INT_BLOCK) return padded(n * SIZES[c.element]);
  const int64_t upper = c.kind == ZC_NVFP4 ? padded(4 * ((n + 1023) / 1024)) : 0;
  const bool pair = c.kind == ZC_INT_ASYM || (c.kind == ZC_INT_BLOCK && c.rounding == ZC_SHIFT);
  const int64_t of_block = c.kind >= ZC_MX_BLOCK ? 1 : pair ? 4 : 2;
  return upper + padded(of_block * ((n + c.block - 1) / c.block)) + padded((n + 7) / 8 * c.bits);
}

static const zc_draw draw = {1, 2, 3};
static long runs = 0;

static void run(const zc_codec &codec, const zc_codec &again, int64_t n, bool at_end) {
  for (int32_t dtype = 0; dtype < 4; ++dtype) {
    Walled source((size_t)(n * SIZES[dtype]), at_end), target((size_t)(n * SIZES[dtype]), at_end);
    Walled a((size_t)wire_nbytes(codec, n), at_end), b((size_t)wire_nbytes(codec, n), at_end);
    Walled out((size_t)wire_nbytes(again, n), at_end);
    const void *wires[3] = {a.at, b.at, a.at};
    VERB(zc_decode)(&codec, a.at, n, target.at, dtype);  // of bytes that no encoder wrote
    VERB(zc_encode)(&codec, source.at, n, dtype, a.at, &draw);
    VERB(zc_encode)(&codec, source.at, n, dtype, b.at, &draw);
    VERB(zc_decode)(&codec, a.at, n, target.at, dtype);
    VERB(zc_reduce)(&codec, wires, 3, n, 0.5, 3.0, target.at, dtype);
    VERB(zc_reduce_encode)(&codec, wires, 3, n, 0.5, 3.0, &again, out.at, &draw);
    runs += 6;
  }
}

int main() {
  static const int64_t counts[] = {0, 1, 7, 8, 9, 63, 64, 65, 127, 129, 255, 257, 1001, 5003};
  static const int32_t blocks[] = {8, 24, 64, 128, 256, 1032, 8192};
  const zc_codec int8 = {ZC_INT_BLOCK, 0, 8, 256, ZC_STOCHASTIC, 0}, bf16 = {ZC_CAST, ZC_BFLOAT16, 0, 0, 0, 0};
  const zc_codec rotated = {ZC_INT_BLOCK, 0, 4, 128, ZC_NEAREST, 1};
  for (int64_t n : counts)
    for (int at_end = 0; at_end < 2; ++at_end) {
      for (int32_t bits = 2; bits <= 8; ++bits)
        for (int32_t block : blocks)
          run({ZC_INT_BLOCK, 0, bits, block, (block / 8 + bits) % 3, 0}, block % 16 ? bf16 : int8, n, at_end);
      for (int32_t element = 0; element < 4; ++element) run({ZC_RAW, element, 0, 0, 0, 0}, int8, n, at_end);
      run(bf16, {ZC_INT_BLOCK, 0, 4, 8192, ZC_NEAREST, 0}, n, at_end);
      run({ZC_CAST, ZC_FLOAT16, 0, 0, 0, 0}, {ZC_RAW, ZC_FLOAT64, 0, 0, 0, 0}, n, at_end);
      run(rotated, rotated, n, at_end);
      run({ZC_FP8_BLOCK, ZC_E4M3, 8, 128, 0, 0}, {ZC_FP8_BLOCK, ZC_E5M2, 8, 24, 0, 0}, n, at_end);
      run({ZC_FP8_BLOCK, ZC_E5M2, 8, 64, 0, 1}, {ZC_FP8_BLOCK, ZC_E4M3, 8, 256, 0, 1}, n, at_end);
      run({ZC_MX_BLOCK, ZC_E4M3, 8, 32, 0, 0}, {ZC_MX_BLOCK, ZC_E2M1, 4, 32, 0, 0}, n, at_end);
      run({ZC_MX_BLOCK, ZC_E2M1, 4, 32, 0, 1}, {ZC_NVFP4, ZC_E2M1, 4, 16, 0, 0}, n, at_end);
      run({ZC_NVFP4, ZC_E2M1, 4, 16, 0, 0}, {ZC_NVFP4, ZC_E2M1, 4, 16, 0, 1}, n, at_end);
      run(rotated, {ZC_INT_BLOCK, 0, 5, 24, ZC_NEAREST, 0}, n, at_end);
      for (int32_t by = 0; by < 2; ++by) {
        run({ZC_INT_ASYM, 0, 4, 128, by, 0}, {ZC_INT_ASYM, 0, 3, 24, by, 0}, n, at_end);
        run({ZC_INT_ASYM, 0, 8, 8192, by, 1}, {ZC_INT_BLOCK, 0, 8, 64, ZC_SHIFT, 0}, n, at_end);
      }
      run({ZC_INT_BLOCK, 0, 4, 128, ZC_SHIFT, 1}, {ZC_FP8_BLOCK, ZC_E4M3, 8, 128, ZC_STOCHASTIC, 0}, n, at_end);
      run({ZC_FP8_BLOCK, ZC_E5M2, 8, 24, ZC_STOCHASTIC, 0}, {ZC_MX_BLOCK, ZC_E4M3, 8, 32, ZC_STOCHASTIC, 1}, n, at_end);
      run({ZC_MX_BLOCK, ZC_E4M3, 8, 32, ZC_STOCHASTIC, 0}, {ZC_MX_BLOCK, ZC_E2M1, 4, 32, ZC_STOCHASTIC, 0}, n, at_end);
      run({ZC_MX_BLOCK, ZC_E2M1, 4, 32, ZC_STOCHASTIC, 0}, {ZC_NVFP4, ZC_E2M1, 4, 16, ZC_STOCHASTIC, 0}, n, at_end);
      run({ZC_NVFP4, ZC_E2M1, 4, 16, ZC_STOCHASTIC, 0}, {ZC_NVFP4, ZC_E2M1, 4, 16, ZC_STOCHASTIC, 1}, n, at_end);
      run({ZC_INT_BLOCK, 0, 8, 32, ZC_STOCHASTIC, 1}, bf16, n, at_end);
      run({ZC_INT_BLOCK, 0, 3, 8192, ZC_STOCHASTIC, 1}, rotated, n, at_end);
      run(int8, {ZC_INT_BLOCK, 0, 8, 8, ZC_STOCHASTIC, 1}, n, at_end);
    }
  printf("%ld runs\n", runs);
}
