// A thread's floating-point modes: IEEE defaults (round to nearest, subnormals kept) while a verb runs.
//
// Included once per build of cpu/loops.cpp, inside its namespace.

// Sets them, and puts back at the end what was there.
class FloatModes {
#if defined(__x86_64__)
  unsigned saved_ = _mm_getcsr();
  static constexpr unsigned FLAGS = 0x3f, DEFAULT = 0x1f80;

 public:
  FloatModes() {
    if ((saved_ & ~FLAGS) != DEFAULT) _mm_setcsr(DEFAULT);
  }
  ~FloatModes() {
    if ((saved_ & ~FLAGS) != DEFAULT) _mm_setcsr(saved_);
  }
#elif defined(__aarch64__)
  unsigned long saved_ = get();
  static unsigned long get() {
    unsigned long modes;
    __asm__ volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
  }
  static void set(unsigned long modes) { __asm__ volatile("msr fpcr, %0" : : "r"(modes)); }

 public:
  FloatModes() {
    if (saved_ != 0) set(0);
  }
  ~FloatModes() {
    if (saved_ != 0) set(saved_);
  }
#else
 public:
  FloatModes() {}
#endif
};
