// What one evaluation of a printed program is checked by, wherever it ran: random positions, the oracle, and the range
// of what any faithful evaluation gives. For printed_test.cpp and gpu/printed_gpu_test.cpp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/params/captures.hpp"
#include "expr/interval.hpp"
#include "expr/print_cuda.hpp"
#include "programs/test_programs.hpp"
#include "reference/element.hpp"
#include "reference/evaluate.hpp"

namespace fovea::testing {

using expr::Box;
using expr::Interval;
using expr::IntervalProgram;
using expr::Node;
using expr::Variable;

// ---- positions -----------------------------------------------------------------------------------

/// A score and where it stands.
struct Place {
  float score;
  std::int32_t batch, q_head, kv_head, q_idx, kv_idx, seqlen_q, seqlen_kv;
};

class Draw {
 public:
  explicit Draw(std::uint32_t seed) : random_(seed) {}
  int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_); }

  /// Positions mostly; and what no position should be: beyond tensors, below 0, at the ends of 32 bits.
  std::int32_t index() {
    constexpr std::array<std::int32_t, 6> kEdges = {0, -1, 15, 16, INT32_MAX, INT32_MIN};
    return below(4) == 0 ? kEdges[static_cast<std::size_t>(below(6))] : below(40);
  }

  float score() {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    constexpr std::array<float, 8> kEdges = {
        0.0F, -0.0F, kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), 1e-40F, 3e38F, -1.0F};
    if (below(3) == 0) return kEdges[static_cast<std::size_t>(below(8))];
    return std::normal_distribution<float>(0, 10)(random_);
  }

  Place place() { return {score(), index(), index(), index(), index(), index(), index(), index()}; }

 private:
  std::mt19937 random_;
};

inline reference::Position oracle_position(const Place& at) {
  return {.score = at.score,
          .batch = at.batch,
          .q_head = at.q_head,
          .kv_head = at.kv_head,
          .q_idx = at.q_idx,
          .kv_idx = at.kv_idx,
          .seqlen_q = at.seqlen_q,
          .seqlen_kv = at.seqlen_kv};
}

/// The least and greatest element that the indices reach, one element at a time; anything where one is NaN.
inline Interval element_bounds(const Node& load, const Interval* indices) {
  const TensorView& view = load.tensor->view;
  std::vector<double> elements;
  const auto visit = [&](auto&& self, int dim, std::int64_t offset) -> void {
    if (dim == view.rank()) return elements.push_back(reference::element(view, offset));
    for (auto i = static_cast<std::int64_t>(indices[dim].lo);
         i <= static_cast<std::int64_t>(indices[dim].hi); ++i) {
      self(self, dim + 1, offset + i * view.stride(dim));
    }
  };
  visit(visit, 0, 0);
  if (std::ranges::any_of(elements, [](double x) { return std::isnan(x); }))
    return Interval::whole();
  const auto [lo, hi] = std::ranges::minmax(elements);
  return {lo, hi, false};
}

inline Box box_of(const Place& at) {
  Box box;
  const auto set = [&](Variable v, double value) {
    box.variables[static_cast<std::size_t>(v)] = Interval::point(value);
  };
  set(Variable::batch, at.batch);
  set(Variable::q_head, at.q_head);
  set(Variable::kv_head, at.kv_head);
  set(Variable::q_idx, at.q_idx);
  set(Variable::kv_idx, at.kv_idx);
  set(Variable::seqlen_q, at.seqlen_q);
  set(Variable::seqlen_kv, at.seqlen_kv);
  set(Variable::score, at.score);
  if (std::isnan(at.score))
    box.variables[static_cast<std::size_t>(Variable::score)] = Interval::whole();
  box.load_bounds = element_bounds;
  return box;
}

inline bool is_inside(const Interval& range, double value) {
  return std::isnan(value) ? range.may_be_nan : range.contains(value);
}

/// What every faithful evaluation at one position can give; a printed quotient may be an ulp and a half beside the
/// rounded one.
inline Interval allowed(const IntervalProgram& formula, const Box& box, bool has_approx_div) {
  std::vector<Interval> values;
  formula.evaluate_all(box, values);
  Interval range = values.back();
  if (!has_approx_div) return range;
  double largest = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (formula.nodes()[i]->type != ExprType::floating) continue;
    for (const double end : {values[i].lo, values[i].hi}) {
      if (std::isfinite(end)) largest = std::max(largest, std::fabs(end));
    }
  }
  range.lo -= 1e-6 * largest + 1e-37;
  range.hi += 1e-6 * largest + 1e-37;
  return range;
}

/// A power of a negative base by an exponent that approximations may move off a whole number.
inline bool has_open_power(const IntervalProgram& formula, const Box& box) {
  std::vector<Interval> values;
  formula.evaluate_all(box, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (formula.nodes()[i]->op != expr::Op::pow) continue;
    const auto operand = [&](std::size_t k) {
      return values[static_cast<std::size_t>(formula.operands(i)[k])];
    };
    if (operand(0).lo < 0 && !operand(1).is_point()) return true;
  }
  return false;
}

// ---- programs ------------------------------------------------------------------------------------

/// A program and what it captures, as a kernel takes it.
struct Case {
  Case(std::size_t number, TestProgram drawn)
      : seed(static_cast<std::uint32_t>(100 * number)),
        program(std::move(drawn)),
        text(expr::print_cuda(program.score, program.mask)),
        captures(cuda::CaptureSlots(text, program.score, program.mask)
                     .bind(program.score, program.mask)) {}

  std::string shown(const Program& formula, const Place& at) const {
    return formula.to_string() + "\n" + text.mods + "score " + std::to_string(at.score) +
           " batch " + std::to_string(at.batch) + " q_head " + std::to_string(at.q_head) +
           " q_idx " + std::to_string(at.q_idx) + " kv_idx " + std::to_string(at.kv_idx) +
           " seqlen_kv " + std::to_string(at.seqlen_kv);
  }

  std::uint32_t seed;
  TestProgram program;
  expr::CudaProgram text;
  cuda::Captures captures;
};

/// Counts how many of its checks could have failed.
class ScoreCheck {
 public:
  explicit ScoreCheck(const Case& each)
      : case_(each),
        formula_(each.program.score.expr().shared()),
        oracle_(each.program.score),
        rounded_oracle_(each.program.score, reference::Precision::f32),
        has_approx_div_(each.text.mods.find("approx_div") != std::string::npos) {}

  ::testing::AssertionResult operator()(const Place& at, float got) {
    const double expected = oracle_(oracle_position(at));
    const double rounded = rounded_oracle_(oracle_position(at));
    const Interval range = allowed(formula_, box_of(at), has_approx_div_);
    ++num_checked;
    num_tight +=
        std::isnan(expected) || range.hi - range.lo <= 1e-3 * std::fabs(expected) + 1e-30 ? 1 : 0;
    // A range of NaN is all there is: where the oracles agree, they say more, unless an exponent that is whole to them
    // need not be.
    const bool is_nan_known =
        std::isnan(expected) == std::isnan(rounded) && !has_open_power(formula_, box_of(at));
    const bool is_right =
        is_inside(range, got) && (!is_nan_known || std::isnan(got) == std::isnan(expected));
    if (is_right) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure()
           << case_.shown(case_.program.score, at) << ": " << got << ", expected " << expected
           << " in [" << range.lo << ", " << range.hi << "]";
  }

  int num_checked = 0;
  int num_tight = 0;

 private:
  const Case& case_;
  IntervalProgram formula_;
  reference::Evaluator oracle_, rounded_oracle_;
  bool has_approx_div_;
};

class MaskCheck {
 public:
  explicit MaskCheck(const Case& each)
      : case_(each), formula_(each.program.mask.expr().shared()), oracle_(each.program.mask) {}

  ::testing::AssertionResult operator()(const Place& at, bool got) {
    ++num_checked;
    if (!formula_.evaluate(box_of(at)).is_point()) return ::testing::AssertionSuccess();
    ++num_decided;
    const bool expected = oracle_(oracle_position(at)) != 0;
    if (got == expected) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << case_.shown(case_.program.mask, at) << ": " << got;
  }

  int num_checked = 0;
  int num_decided = 0;

 private:
  const Case& case_;
  IntervalProgram formula_;
  reference::Evaluator oracle_;
};

}  // namespace fovea::testing
