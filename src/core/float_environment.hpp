// The floating-point environment that everything is computed in, whatever the threads of the caller are set to.
#pragma once

#include <cfenv>
#include <optional>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace fovea {

/// While it lives, this thread rounds to nearest, computes with denormals (no FTZ, no DAZ) and no exception traps; then
/// it is as before. Where nothing has to change it costs a read of the control register.
class FloatEnvironment {
 public:
  FloatEnvironment() {
    if (!is_default()) set_default();
  }
  ~FloatEnvironment() {
    if (previous_) std::fesetenv(&*previous_);
  }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr unsigned kDefault = 0x1f80;  // MXCSR
  static constexpr unsigned kFlags = 0x3f;      // of it: exceptions that have happened

  static bool is_default() { return (_mm_getcsr() & ~kFlags) == kDefault; }
#elif defined(__aarch64__) && defined(__GLIBC__)
  static bool is_default() {
    std::fenv_t now;
    std::fegetenv(&now);
    return now.__fpcr == 0;
  }
#else
  static bool is_default() { return std::fegetround() == FE_TONEAREST; }
#endif

  void set_default() {
    std::fegetenv(&previous_.emplace());
    std::fesetenv(FE_DFL_ENV);
#if defined(__SSE2__)
    _mm_setcsr(kDefault);  // some libraries leave FTZ and DAZ
#endif
  }

  std::optional<std::fenv_t> previous_;
};

}  // namespace fovea
