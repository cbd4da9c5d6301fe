// The cheap operations of programs, several in a row with the value in registers.
//
// A tape's consecutive operations mostly feed each other: score - slope * |q - k| is a difference, a magnitude, a
// conversion and a product with nothing in between. So they are executed on a block of six vectors at a time, like an
// accumulator machine: a step finds the value in registers, takes at most two operands from memory and leaves its
// result in registers.
//
// Each step is a function of its own that ends by calling the next one's, with the six vectors as arguments: a tail
// call, so that a step is its six operations, an address and a jump, which repeats for every block and is predicted.
// (One function with a switch in a loop was tried first: GCC stores the six vectors to the stack at every step, which
// costs as much as a pass over memory per operation.)
//
// Registers of programs hold 32-bit values in float arrays; bools are int masks, 0 or -1. Read ../program.hpp for what
// a step is.

#if defined(FOVEA_CPU_PROGRAM_STEPS_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_PROGRAM_STEPS_INL_
#undef FOVEA_CPU_PROGRAM_STEPS_INL_
#else
#define FOVEA_CPU_PROGRAM_STEPS_INL_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

#include "cpu/program.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using ProgramTag = hn::CappedTag<float, 16>;
using ProgramVector = hn::Vec<ProgramTag>;

// ---- one vector ----

// Adaptors: registers hold floats, ops may want ints, unsigned bits, or yield masks.

template <class F>
struct OnInts {
  OnInts() = default;
  explicit OnInts(F function) : f(function) {}
  template <class D, class... V>
  HWY_INLINE hn::Vec<D> operator()(D d, V... v) const {
    const hn::RebindToSigned<D> di;
    return hn::BitCast(d, f(di, hn::BitCast(di, v)...));
  }
  F f;
};

/// Sums and products wrap, which only unsigned arithmetic does without undefined behaviour.
template <class F>
struct OnBits {
  OnBits() = default;
  explicit OnBits(F function) : f(function) {}
  template <class D, class... V>
  HWY_INLINE hn::Vec<D> operator()(D d, V... v) const {
    const hn::RebindToUnsigned<D> du;
    return hn::BitCast(d, f(du, hn::BitCast(du, v)...));
  }
  F f;
};

/// -1 or 0 from a comparison of floats.
template <class C>
struct FloatComparison {
  FloatComparison() = default;
  explicit FloatComparison(C comparison) : c(comparison) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return hn::VecFromMask(d, c(a, b));
  }
  C c;
};

/// -1 or 0 from a comparison of ints.
template <class C>
struct IntComparison {
  IntComparison() = default;
  explicit IntComparison(C comparison) : c(comparison) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    const hn::RebindToSigned<D> di;
    return hn::BitCast(d, hn::VecFromMask(di, c(hn::BitCast(di, a), hn::BitCast(di, b))));
  }
  C c;
};

/// Keeps the sign of zero, which hn::Floor loses on targets without the instruction.
template <class V>
HWY_INLINE V floor(V x) {
  return hn::CopySign(hn::Floor(x), x);
}

/// The lesser; NaN where either is NaN.
template <class V>
HWY_INLINE V min_or_nan(V a, V b) {
  const auto lesser = hn::IfThenElse(hn::Lt(a, b), a, b);  // b when unordered
  return hn::IfThenElse(hn::Eq(a, a), lesser, a);
}

template <class V>
HWY_INLINE V max_or_nan(V a, V b) {
  const auto greater = hn::IfThenElse(hn::Gt(a, b), a, b);
  return hn::IfThenElse(hn::Eq(a, a), greater, a);
}

/// Truncates; saturates at the ends of int32; NaN gives 0.
template <class D>
HWY_INLINE hn::Vec<D> float_to_int_bits(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto low = hn::Set(d, -0x1p31F);
  const auto is_high = hn::Ge(x, hn::Set(d, 0x1p31F));
  const auto raised = hn::IfThenElse(hn::Lt(x, low), low, x);
  const auto is_convertible = hn::And(hn::Eq(x, x), hn::Not(is_high));
  const auto converted = hn::ConvertTo(di, hn::IfThenElseZero(is_convertible, raised));
  const auto highest = hn::Set(di, std::numeric_limits<std::int32_t>::max());
  return hn::BitCast(d, hn::IfThenElse(hn::RebindMask(di, is_high), highest, converted));
}

template <class D>
HWY_INLINE hn::Vec<D> int_magnitude(D d, hn::Vec<D> x) {  // of unsigned bits: -2^31 wraps
  const hn::RebindToSigned<D> di;
  const auto flip = hn::BitCast(d, hn::ShiftRight<31>(hn::BitCast(di, x)));
  return hn::Sub(hn::Xor(x, flip), flip);
}

// ---- one block ----

inline constexpr std::size_t kMaxGroupSteps = 32;
inline constexpr std::int64_t kMaxBlocks = 16;

/// Which blocks are run: at least one.
struct BlockRange {
  const ProgramStep* first = nullptr;  // of the steps
  std::int64_t begin = 0;
  std::int64_t end = 1;
};

/// Executes a step and all behind it, for this block and all that follow. The value is in v0 to v5, or the first of
/// them; all arguments are in machine registers.
using StepFunction = void(const ProgramStep* step, const BlockRange* range, std::int64_t block,
                          ProgramVector v0, ProgramVector v1, ProgramVector v2, ProgramVector v3,
                          ProgramVector v4, ProgramVector v5);

/// The steps' functions for blocks of kRows x kWidth vectors.
template <int kRows, int kWidth>
class StepFunctions {
 public:
  static constexpr int kVectors = kRows * kWidth;
  static_assert(kVectors == 6 || kVectors == 1, "a block is six vectors or one");
  static constexpr int kIndex = kVectors == 1 ? 1 : 0;  // into ProgramStep::functions

  static StepFunction* function_of(const ProgramStep& step) {
    switch (step.op) {
      case StepOp::call:
      case StepOp::end:
        break;
      case StepOp::load:
        return two(step, [](auto, auto, auto operand) HWY_ATTR { return operand; });
      case StepOp::store:
        return step.is_last ? &store<true> : &store<false>;
      // floats
      case StepOp::add:
        return two(step, [](auto, auto v, auto x) HWY_ATTR { return hn::Add(v, x); });
      case StepOp::sub:
        return two(step, [](auto, auto v, auto x) HWY_ATTR { return hn::Sub(v, x); });
      case StepOp::reverse_sub:
        return two(step, [](auto, auto v, auto x) HWY_ATTR { return hn::Sub(x, v); });
      case StepOp::mul:
        return two(step, [](auto, auto v, auto x) HWY_ATTR { return hn::Mul(v, x); });
      case StepOp::multiply_add:
        return three(step,
                     [](auto, auto v, auto x, auto y) HWY_ATTR { return hn::MulAdd(v, x, y); });
      case StepOp::negative_multiply_add:
        return three(step,
                     [](auto, auto v, auto x, auto y) HWY_ATTR { return hn::NegMulAdd(v, x, y); });
      case StepOp::add_product:
        return three(step,
                     [](auto, auto v, auto x, auto y) HWY_ATTR { return hn::MulAdd(x, y, v); });
      case StepOp::sub_product:
        return three(step,
                     [](auto, auto v, auto x, auto y) HWY_ATTR { return hn::NegMulAdd(x, y, v); });
      case StepOp::div:
        return two(step, [](auto, auto v, auto x) HWY_ATTR { return hn::Div(v, x); });
      case StepOp::reverse_div:
        return two(step, [](auto, auto v, auto x) HWY_ATTR { return hn::Div(x, v); });
      case StepOp::floor_div:
        return two(step, [](auto, auto v, auto x) HWY_ATTR { return floor(hn::Div(v, x)); });
      case StepOp::min:
        return two(step, [](auto, auto v, auto x) HWY_ATTR { return min_or_nan(v, x); });
      case StepOp::max:
        return two(step, [](auto, auto v, auto x) HWY_ATTR { return max_or_nan(v, x); });
      case StepOp::neg:
        return one(step, [](auto, auto v) HWY_ATTR { return hn::Neg(v); });
      case StepOp::abs:
        return one(step, [](auto, auto v) HWY_ATTR { return hn::Abs(v); });
      case StepOp::floor:
        return one(step, [](auto, auto v) HWY_ATTR { return floor(v); });
      case StepOp::sqrt:
        return one(step, [](auto, auto v) HWY_ATTR { return hn::Sqrt(v); });
      // ints
      case StepOp::int_add:
        return two(step, OnBits([](auto, auto v, auto x) HWY_ATTR { return hn::Add(v, x); }));
      case StepOp::int_sub:
        return two(step, OnBits([](auto, auto v, auto x) HWY_ATTR { return hn::Sub(v, x); }));
      case StepOp::int_reverse_sub:
        return two(step, OnBits([](auto, auto v, auto x) HWY_ATTR { return hn::Sub(x, v); }));
      case StepOp::int_mul:
        return two(step, OnBits([](auto, auto v, auto x) HWY_ATTR { return hn::Mul(v, x); }));
      case StepOp::int_min:
        return two(step, OnInts([](auto, auto v, auto x) HWY_ATTR { return hn::Min(v, x); }));
      case StepOp::int_max:
        return two(step, OnInts([](auto, auto v, auto x) HWY_ATTR { return hn::Max(v, x); }));
      case StepOp::int_neg:
        return one(step, OnBits([](auto d, auto v) HWY_ATTR { return hn::Sub(hn::Zero(d), v); }));
      case StepOp::int_abs:
        return one(step, OnBits([](auto d, auto v) HWY_ATTR { return int_magnitude(d, v); }));
      case StepOp::shl:
        return two(step, OnBits([](auto d, auto v, auto x)
                                    HWY_ATTR { return hn::Shl(v, hn::And(x, hn::Set(d, 31U))); }));
      case StepOp::shr:
        return two(step, OnInts([](auto d, auto v, auto x)
                                    HWY_ATTR { return hn::Shr(v, hn::And(x, hn::Set(d, 31))); }));
      // bits of ints and bools
      case StepOp::bit_and:
        return two(step, OnBits([](auto, auto v, auto x) HWY_ATTR { return hn::And(v, x); }));
      case StepOp::bit_or:
        return two(step, OnBits([](auto, auto v, auto x) HWY_ATTR { return hn::Or(v, x); }));
      case StepOp::bit_xor:
        return two(step, OnBits([](auto, auto v, auto x) HWY_ATTR { return hn::Xor(v, x); }));
      case StepOp::bit_not:
        return one(step, OnBits([](auto, auto v) HWY_ATTR { return hn::Not(v); }));
      // comparisons
      case StepOp::lt:
        return two(step, FloatComparison([](auto v, auto x) HWY_ATTR { return hn::Lt(v, x); }));
      case StepOp::le:
        return two(step, FloatComparison([](auto v, auto x) HWY_ATTR { return hn::Le(v, x); }));
      case StepOp::gt:
        return two(step, FloatComparison([](auto v, auto x) HWY_ATTR { return hn::Gt(v, x); }));
      case StepOp::ge:
        return two(step, FloatComparison([](auto v, auto x) HWY_ATTR { return hn::Ge(v, x); }));
      case StepOp::eq:
        return two(step, FloatComparison([](auto v, auto x) HWY_ATTR { return hn::Eq(v, x); }));
      case StepOp::ne:  // not hn::Ne, which is false for NaN on some targets
        return two(step,
                   FloatComparison([](auto v, auto x) HWY_ATTR { return hn::Not(hn::Eq(v, x)); }));
      case StepOp::int_lt:
        return two(step, IntComparison([](auto v, auto x) HWY_ATTR { return hn::Lt(v, x); }));
      case StepOp::int_le:
        return two(step,
                   IntComparison([](auto v, auto x) HWY_ATTR { return hn::Not(hn::Gt(v, x)); }));
      case StepOp::int_gt:
        return two(step, IntComparison([](auto v, auto x) HWY_ATTR { return hn::Gt(v, x); }));
      case StepOp::int_ge:
        return two(step,
                   IntComparison([](auto v, auto x) HWY_ATTR { return hn::Not(hn::Lt(v, x)); }));
      case StepOp::int_eq:
        return two(step, IntComparison([](auto v, auto x) HWY_ATTR { return hn::Eq(v, x); }));
      case StepOp::int_ne:
        return two(step, IntComparison([](auto v, auto x) HWY_ATTR { return hn::Ne(v, x); }));
      // choices
      case StepOp::select:
        return three(step, [](auto, auto v, auto x, auto y)
                               HWY_ATTR { return hn::IfThenElse(hn::MaskFromVec(v), x, y); });
      case StepOp::hide:  // whatever the score is, NaN included
        return two(step, [](auto d, auto v, auto x) HWY_ATTR {
          return hn::IfThenElse(hn::MaskFromVec(v), x, hn::Neg(hn::Inf(d)));
        });
      // conversions
      case StepOp::int_to_float:
        return one(step, [](auto d, auto v) HWY_ATTR {
          const hn::RebindToSigned<decltype(d)> di;
          return hn::ConvertTo(d, hn::BitCast(di, v));
        });
      case StepOp::bool_to_float:
        return one(step, [](auto d, auto v) HWY_ATTR { return hn::And(v, hn::Set(d, 1.0F)); });
      case StepOp::float_to_int:
        return one(step, [](auto d, auto v) HWY_ATTR { return float_to_int_bits(d, v); });
      case StepOp::bool_to_int:
        return one(step, OnInts([](auto d, auto v) HWY_ATTR { return hn::And(v, hn::Set(d, 1)); }));
    }
    return nullptr;
  }

  static HWY_INLINE void run(const BlockRange& range) {
    const auto zero = hn::Zero(ProgramTag());
    next(range.first, &range, range.begin, zero, zero, zero, zero, zero, zero);
  }

 private:
  using V = ProgramVector;

  static HWY_INLINE void next(const ProgramStep* step, const BlockRange* range, std::int64_t block,
                              V v0, V v1, V v2, V v3, V v4, V v5) {
    auto* function = reinterpret_cast<StepFunction*>(step->functions[kIndex]);
    return function(step, range, block, v0, v1, v2, v3, v4, v5);
  }

  /// The last one goes on with the next block.
  template <bool kIsLast>
  static void store(const ProgramStep* step, const BlockRange* range, std::int64_t block, V v0,
                    V v1, V v2, V v3, V v4, V v5) {
    const ProgramTag d;
    const std::size_t n = hn::Lanes(d);
    float* out = address(step->x, block);
    hn::StoreU(v0, d, out);
    if constexpr (kVectors == 6) {
      hn::StoreU(v1, d, out + n);
      hn::StoreU(v2, d, out + 2 * n);
      hn::StoreU(v3, d, out + 3 * n);
      hn::StoreU(v4, d, out + 4 * n);
      hn::StoreU(v5, d, out + 5 * n);
    }
    if constexpr (!kIsLast) return next(step + 1, range, block, v0, v1, v2, v3, v4, v5);
    if (++block == range->end) return;
    return next(range->first, range, block, v0, v1, v2, v3, v4, v5);
  }

  static HWY_INLINE float* address(const StepOperand& operand, std::int64_t block) {
    return operand.data + block * operand.block_stride;
  }

  /// Vector j of an operand.
  template <int j, StepLayout kLayout>
  static HWY_INLINE V read(const float* p) {
    const ProgramTag d;
    const std::size_t n = hn::Lanes(d);
    if constexpr (kLayout == StepLayout::uniform) return hn::Set(d, *p);
    if constexpr (kLayout == StepLayout::keys) return hn::Set(d, p[j / kWidth]);
    if constexpr (kLayout == StepLayout::lanes) return hn::LoadU(d, p + j % kWidth * n);
    return hn::LoadU(d, p + j * n);
  }

  /// kLoads: the value is in memory too, as vectors.
  template <class F, bool kLoads>
  static void run_one(const ProgramStep* step, const BlockRange* range, std::int64_t block, V v0,
                      V v1, V v2, V v3, V v4, V v5) {
    const F f;
    const ProgramTag d;
    const float* value = address(step->value, block);
    v0 = f(d, value_of<0, kLoads>(v0, value));
    if constexpr (kVectors == 6) {
      v1 = f(d, value_of<1, kLoads>(v1, value));
      v2 = f(d, value_of<2, kLoads>(v2, value));
      v3 = f(d, value_of<3, kLoads>(v3, value));
      v4 = f(d, value_of<4, kLoads>(v4, value));
      v5 = f(d, value_of<5, kLoads>(v5, value));
    }
    return next(step + 1, range, block, v0, v1, v2, v3, v4, v5);
  }

  template <class F, bool kLoads, StepLayout x>
  static void run_two(const ProgramStep* step, const BlockRange* range, std::int64_t block, V v0,
                      V v1, V v2, V v3, V v4, V v5) {
    const F f;
    const ProgramTag d;
    const float* value = address(step->value, block);
    const float* p = address(step->x, block);
    v0 = f(d, value_of<0, kLoads>(v0, value), read<0, x>(p));
    if constexpr (kVectors == 6) {
      v1 = f(d, value_of<1, kLoads>(v1, value), read<1, x>(p));
      v2 = f(d, value_of<2, kLoads>(v2, value), read<2, x>(p));
      v3 = f(d, value_of<3, kLoads>(v3, value), read<3, x>(p));
      v4 = f(d, value_of<4, kLoads>(v4, value), read<4, x>(p));
      v5 = f(d, value_of<5, kLoads>(v5, value), read<5, x>(p));
    }
    return next(step + 1, range, block, v0, v1, v2, v3, v4, v5);
  }

  template <int j, bool kLoads>
  static HWY_INLINE V value_of(V v, const float* p) {
    if constexpr (kLoads) return read<j, StepLayout::scores>(p);
    return v;
  }

  template <class F, StepLayout x, StepLayout y>
  static void run_three(const ProgramStep* step, const BlockRange* range, std::int64_t block, V v0,
                        V v1, V v2, V v3, V v4, V v5) {
    const F f;
    const ProgramTag d;
    const float* p = address(step->x, block);
    const float* q = address(step->y, block);
    v0 = f(d, v0, read<0, x>(p), read<0, y>(q));
    if constexpr (kVectors == 6) {
      v1 = f(d, v1, read<1, x>(p), read<1, y>(q));
      v2 = f(d, v2, read<2, x>(p), read<2, y>(q));
      v3 = f(d, v3, read<3, x>(p), read<3, y>(q));
      v4 = f(d, v4, read<4, x>(p), read<4, y>(q));
      v5 = f(d, v5, read<5, x>(p), read<5, y>(q));
    }
    return next(step + 1, range, block, v0, v1, v2, v3, v4, v5);
  }

  // Without captures, so that their types are enough.

  template <class F>
  static StepFunction* one(const ProgramStep& step, F) {
    return step.loads_value ? &run_one<F, true> : &run_one<F, false>;
  }

  template <class F>
  static StepFunction* two(const ProgramStep& step, F) {
    return step.loads_value ? two_of<F, true>(step.x.layout) : two_of<F, false>(step.x.layout);
  }
  template <class F, bool kLoads>
  static StepFunction* two_of(StepLayout x) {
    switch (x) {
      case StepLayout::scores:
        return &run_two<F, kLoads, StepLayout::scores>;
      case StepLayout::lanes:
        return &run_two<F, kLoads, StepLayout::lanes>;
      case StepLayout::keys:
        return &run_two<F, kLoads, StepLayout::keys>;
      case StepLayout::uniform:
        return &run_two<F, kLoads, StepLayout::uniform>;
    }
    return nullptr;
  }

  template <class F>
  static StepFunction* three(const ProgramStep& step, F) {
    switch (step.x.layout) {
      case StepLayout::scores:
        return three_of<F, StepLayout::scores>(step.y.layout);
      case StepLayout::lanes:
        return three_of<F, StepLayout::lanes>(step.y.layout);
      case StepLayout::keys:
        return three_of<F, StepLayout::keys>(step.y.layout);
      case StepLayout::uniform:
        return three_of<F, StepLayout::uniform>(step.y.layout);
    }
    return nullptr;
  }
  template <class F, StepLayout x>
  static StepFunction* three_of(StepLayout y) {
    switch (y) {
      case StepLayout::scores:
        return &run_three<F, x, StepLayout::scores>;
      case StepLayout::lanes:
        return &run_three<F, x, StepLayout::lanes>;
      case StepLayout::keys:
        return &run_three<F, x, StepLayout::keys>;
      case StepLayout::uniform:
        return &run_three<F, x, StepLayout::uniform>;
    }
    return nullptr;
  }
};

/// Vectors in a row of the kernels' panels.
inline constexpr int kStepRowVectors = HWY_TARGET == HWY_AVX2 ? 2 : 3;
inline constexpr int kStepRows = 6 / kStepRowVectors;
using WideSteps = StepFunctions<kStepRows, kStepRowVectors>;
using NarrowSteps = StepFunctions<1, 1>;

HWY_INLINE std::int64_t vector_lanes() {
  return static_cast<std::int64_t>(hn::Lanes(ProgramTag()));
}

/// The step in executable form.
inline ProgramStep prepared(ProgramStep step) {
  step.functions[WideSteps::kIndex] = reinterpret_cast<void (*)()>(WideSteps::function_of(step));
  step.functions[NarrowSteps::kIndex] =
      reinterpret_cast<void (*)()>(NarrowSteps::function_of(step));
  return step;
}

inline void move_by(StepOperand& operand, std::int64_t scores, std::int64_t keys,
                    std::int64_t lanes) {
  switch (operand.layout) {
    case StepLayout::scores:
      operand.data += scores;
      return;
    case StepLayout::keys:
      operand.data += keys;
      return;
    case StepLayout::lanes:
      operand.data += lanes;
      return;
    case StepLayout::uniform:
      return;
  }
}

/// Moves the operands of a group of steps.
inline void move_by(ProgramStep* steps, std::int64_t scores, std::int64_t keys,
                    std::int64_t lanes) {
  for (ProgramStep* step = steps;; ++step) {
    for (StepOperand* operand : {&step->value, &step->x, &step->y}) {
      move_by(*operand, scores, keys, lanes);
    }
    if (step->is_last) return;
  }
}

/// Keys [begin, end) of a chunk, a vector at a time: rows that do not fill a block. Leaves the steps as they were.
HWY_NOINLINE inline void run_vectors(ProgramStep* steps, std::int64_t begin, std::int64_t end,
                                     std::int64_t lanes) {
  const std::int64_t n = vector_lanes();
  move_by(steps, begin * lanes, begin, 0);
  for (std::int64_t key = begin; key < end; ++key) {
    for (std::int64_t lane = 0; lane < lanes; lane += n) {
      NarrowSteps::run({.first = steps});
      move_by(steps, n, 0, n);
    }
    move_by(steps, 0, 1, -lanes);
  }
  move_by(steps, -end * lanes, -end, 0);
}

/// A group of steps. Blocks of six vectors where rows are those of the panels.
HWY_NOINLINE inline void run_steps(ProgramStep* steps, std::int64_t keys, std::int64_t lanes) {
  if (lanes != kStepRowVectors * vector_lanes()) return run_vectors(steps, 0, keys, lanes);
  const std::int64_t num_blocks = keys / kStepRows;
  for (std::int64_t block = 0; block < num_blocks; block += kMaxBlocks) {
    WideSteps::run(
        {.first = steps, .begin = block, .end = std::min(block + kMaxBlocks, num_blocks)});
  }
  if (keys % kStepRows != 0) run_vectors(steps, num_blocks * kStepRows, keys, lanes);
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_PROGRAM_STEPS_INL_
