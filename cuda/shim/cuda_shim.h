// Runs the .cu files on a CPU, for tests: enough of CUDA for the kernels here, under a scheduler that looks for bugs.
//   g++ -std=c++17 -O0 -fPIC -shared -ffp-contract=off -fno-strict-aliasing -I cuda -I cuda/shim generated.cpp
//
// Each thread of a CTA is a fiber with a stack of its own; CTAs run one after another. Fibers switch only at shuffles
// and barriers: in step, forward or in reverse, or one warp at a time as far as it gets, warps and lanes at random from
// a seed, so that a missing barrier shows. Shared memory is filled with a pattern before each CTA. A shuffle names its
// lanes: one that has exited, waits elsewhere or was not named is an error, as is a barrier that some never reach.
//
// Not seen here: speed, CTAs that run at once, the memory model, and contraction to fma (a scan of the PTX sees that).
// State is global: one launch at a time in a process.
#ifndef ZCOMM_CUDA_SHIM_H
#define ZCOMM_CUDA_SHIM_H

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("zc_shared")))
extern "C" char __start_zc_shared[] __attribute__((weak)), __stop_zc_shared[] __attribute__((weak));

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

constexpr size_t STACK_NBYTES = 64 * 1024;
constexpr unsigned MAX_THREADS = 1024;
enum Wait { RUNS, AT_SHUFFLE, AT_BARRIER, EXITED };

struct Fiber {
#if defined(__x86_64__)
  void *stack_pointer;
#else
  ucontext_t context;
#endif
  char *stack;
  unsigned thread;
  Wait wait;
  unsigned mask, source;  // of the shuffle it is at
  uint64_t given, taken;  // by it
  void *sanitizer;
};

enum Order { FORWARD, REVERSE, RANDOM };
struct Settings {
  int order;
  unsigned seed;
  unsigned char poison;
  unsigned n_last_ctas;  // only these run, so that a launch of any size takes no time; 0: all
};

static Settings settings = {FORWARD, 1, 0xcd, 0};
static std::vector<Fiber> fibers;
static Fiber scheduler, *current;
static std::function<void()> kernel;
static char error[256];

static void fail(const char *what, unsigned a = 0, unsigned b = 0) {
  if (!error[0]) snprintf(error, sizeof error, "%s (%u, %u) in CTA %u", what, a, b, blockIdx.x);
}

// ---- fibers

#if defined(__x86_64__)
extern "C" void zc_shim_switch(void **save, void *load);
__asm__(
    ".text\n.weak zc_shim_switch\n.type zc_shim_switch,@function\nzc_shim_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size zc_shim_switch,.-zc_shim_switch\n");
#endif
#if defined(__SANITIZE_ADDRESS__)
static const void *scheduler_stack;
static size_t scheduler_stack_nbytes;
#endif

static void switch_to(Fiber &to) {
  Fiber &from = *current;
  current = &to;
#if defined(__SANITIZE_ADDRESS__)
  const bool back = &to == &scheduler;
  __sanitizer_start_switch_fiber(from.wait == EXITED ? nullptr : &from.sanitizer, back ? scheduler_stack : to.stack,
                                 back ? scheduler_stack_nbytes : STACK_NBYTES);
#endif
#if defined(__x86_64__)
  zc_shim_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
#endif
}

static void run_thread() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_nbytes);
#endif
  kernel();
  current->wait = EXITED;
  switch_to(scheduler);
  abort();
}

static void prepare(Fiber &fiber, unsigned thread) {
  fiber.thread = thread;
  fiber.wait = RUNS;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber.stack, STACK_NBYTES);  // an exited fiber never unwinds
#endif
#if defined(__x86_64__)
  void **top = (void **)(fiber.stack + STACK_NBYTES - 64);
  *--top = nullptr;
  *--top = (void *)run_thread;
  top -= 6;
  memset(top, 0, 6 * sizeof *top);
  fiber.stack_pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = STACK_NBYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, (void (*)())run_thread, 0);
#endif
}

static void stop(Wait why) {
  current->wait = why;
  switch_to(scheduler);
}

// ---- the schedule of a CTA

// Lets lanes go on whose shuffle all of its lanes have reached. Lanes of a warp may be at shuffles of disjoint masks.
static bool release_shuffles(unsigned n_threads) {
  bool released = false;
  for (unsigned warp = 0; warp * 32 < n_threads; ++warp) {
    Fiber *const lanes = &fibers[warp * 32];
    unsigned there = 0, live = 0;
    for (unsigned lane = 0; lane < 32 && warp * 32 + lane < n_threads; ++lane) {
      if (lanes[lane].wait != EXITED) live |= 1u << lane;
      if (lanes[lane].wait == AT_SHUFFLE) there |= 1u << lane;
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (!(there >> lane & 1)) continue;
      const unsigned mask = lanes[lane].mask;
      if (mask & ~live) fail("a shuffle names a lane that has exited", warp, mask & ~live);
      if ((mask & there) != mask) continue;
      for (unsigned other = 0; other < 32; ++other)
        if (mask >> other & 1) {
          if (lanes[other].mask != mask) fail("lanes of a shuffle name different lanes", lane, other);
          lanes[other].taken = lanes[lanes[other].source].given;
          lanes[other].wait = RUNS;
        }
      there &= ~mask;
      released = true;
    }
  }
  return released;
}

static void run_cta(unsigned n_threads) {
  if (__start_zc_shared) memset(__start_zc_shared, settings.poison, (size_t)(__stop_zc_shared - __start_zc_shared));
  std::vector<unsigned> order(n_threads);
  for (unsigned i = 0; i < n_threads; ++i) {
    order[i] = settings.order == REVERSE ? n_threads - 1 - i : i;
    prepare(fibers[i], i);
  }
  unsigned favoured = 0;  // the warp that runs, at random order
  for (unsigned exited = 0; exited < n_threads && !error[0];) {
    bool moved = false;
    if (settings.order == RANDOM) {
      for (unsigned i = n_threads - 1; i > 0; --i) {
        settings.seed = settings.seed * 1664525u + 1013904223u;
        std::swap(order[i], order[(settings.seed >> 8) % (i + 1)]);
      }
      const auto runs = [](unsigned i) { return fibers[i].wait == RUNS; };
      const auto goes_on = [&](unsigned i) { return i / 32 == favoured && runs(i); };
      const auto next = std::find_if(order.begin(), order.end(), runs);
      if (next != order.end() && std::none_of(order.begin(), order.end(), goes_on)) favoured = *next / 32;
    }
    for (unsigned i : order) {
      if (fibers[i].wait != RUNS || (settings.order == RANDOM && i / 32 != favoured)) continue;
      threadIdx.x = i;
      current = &scheduler;
      switch_to(fibers[i]);
      moved = true;
      exited += fibers[i].wait == EXITED;
    }
    moved |= release_shuffles(n_threads);
    unsigned at_barrier = 0;
    for (unsigned i = 0; i < n_threads; ++i) at_barrier += fibers[i].wait == AT_BARRIER;
    if (at_barrier && at_barrier + exited == n_threads) {
      if (exited) fail("threads exited before a barrier of the others", exited, at_barrier);
      for (unsigned i = 0; i < n_threads; ++i) fibers[i].wait = RUNS;
      moved = true;
    }
    if (!moved && exited < n_threads) fail("no thread can go on", at_barrier, exited);
  }
}

template <class Job>
static const char *launch(void (*function)(Job), unsigned n_ctas, unsigned n_threads, const void *job) {
  error[0] = 0;
  if (n_threads < 1 || n_threads > MAX_THREADS) return "a CTA has 1 to 1024 threads";
  if (fibers.empty()) {
    fibers.resize(MAX_THREADS);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *stacks = (char *)mmap(nullptr, MAX_THREADS * STACK_NBYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    for (unsigned i = 0; i < MAX_THREADS; ++i) fibers[i].stack = stacks + i * STACK_NBYTES;
  }
  const Job &arguments = *(const Job *)job;
  kernel = [&] { function(arguments); };
  gridDim = dim3{n_ctas}, blockDim = dim3{n_threads};
  const unsigned n_skipped = settings.n_last_ctas && settings.n_last_ctas < n_ctas ? n_ctas - settings.n_last_ctas : 0;
  for (unsigned cta = n_skipped; cta < n_ctas && !error[0]; ++cta) {
    blockIdx = dim3{cta, 0, 0};
    run_cta(n_threads);
  }
  return error[0] ? error : nullptr;
}

// What `value` is on the lane `source`, when all lanes of the mask have come here.
template <class T>
static T exchange(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof current->given);
  const unsigned lane = current->thread % 32;
  if (!(mask >> lane & 1)) fail("a lane is not in the mask of its own shuffle", lane, mask);
  if (!(mask >> source & 1)) fail("a shuffle reads a lane outside its mask", source, mask);
  memcpy(&current->given, &value, sizeof value);
  current->mask = mask, current->source = source;
  stop(AT_SHUFFLE);
  memcpy(&value, &current->taken, sizeof value);
  return value;
}

}  // namespace shim

static inline void __syncthreads() { shim::stop(shim::AT_BARRIER); }
static inline void __syncwarp(unsigned mask = ~0u) { shim::exchange(mask, 0, shim::current->thread % 32); }

template <class T>
static T __shfl_sync(unsigned mask, T value, int source) {
  return shim::exchange(mask, value, (unsigned)source % 32);
}
template <class T>
static T __shfl_xor_sync(unsigned mask, T value, unsigned distance) {
  return shim::exchange(mask, value, (shim::current->thread % 32 ^ distance) % 32);
}

extern "C" void zc_shim_set(int order, unsigned seed, int poison, unsigned n_last_ctas) {
  shim::settings = {order, seed, (unsigned char)poison, n_last_ctas};
}

// A kernel as zc_shim_<number>(CTAs, threads, job): null, or what went wrong.
#define ZC_SHIM_EXPORT(number, ...)                                                                   \
  extern "C" const char *zc_shim_##number(unsigned n_ctas, unsigned n_threads, const void *job) {     \
    return shim::launch(__VA_ARGS__, n_ctas, n_threads, job);                                         \
  }

#endif
