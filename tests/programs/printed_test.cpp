// What is printed means what the oracle means. Programs were printed when this was built, and the host compiler has compiled them
// like any other text, with approximations that err by all that the PTX ISA allows.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cuda/captures.hpp"
#include "expr/interval.hpp"
#include "expr/print.hpp"
#include "expr/print_cuda.hpp"
#include "mask/element_range.hpp"
#include "programs/printed_program.hpp"
#include "programs/test_programs.hpp"
#include "reference/element.hpp"
#include "reference/evaluate.hpp"

// After what its text needs.
#include "printed_programs.inc"

namespace fovea {
namespace {

using cuda::kPrintedPrograms;
using cuda::PrintedProgram;
using cuda::TileKind;
using expr::Box;
using expr::Interval;
using expr::IntervalProgram;
using expr::Node;
using expr::Variable;
using testing::ProgramData;
using testing::TestProgram;

// ---- positions -----------------------------------------------------------------------------------

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

  cuda::Position position() {
    return {index(), index(), index(), index(), index(), index(), index()};
  }

 private:
  std::mt19937 random_;
};

reference::Position oracle_position(float score, const cuda::Position& at) {
  return {.score = score,
          .batch = at.batch,
          .q_head = at.q_head,
          .kv_head = at.kv_head,
          .q_idx = at.q_idx,
          .kv_idx = at.kv_idx,
          .seqlen_q = at.seqlen_q,
          .seqlen_kv = at.seqlen_kv};
}

/// The least and greatest element that the indices reach, one element at a time; anything where one is NaN.
Interval element_bounds(const Node& load, const Interval* indices) {
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

/// The same where elements are few: without a table of ranges nothing is known of more.
Interval few_element_bounds(const Node& load, const Interval* indices) {
  double count = 1;
  for (int dim = 0; dim < load.tensor->view.rank(); ++dim)
    count *= indices[dim].hi - indices[dim].lo + 1;
  if (count <= cuda::program::kMaxElements) return element_bounds(load, indices);
  return mask::range_of_dtype(load.dtype);
}

Interval range_of(std::int64_t begin, std::int64_t end) {
  return {static_cast<double>(begin), static_cast<double>(end - 1), false};
}

Box box_of(float score, const cuda::Position& at) {
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
  set(Variable::score, score);
  if (std::isnan(score))
    box.variables[static_cast<std::size_t>(Variable::score)] = Interval::whole();
  box.load_bounds = element_bounds;
  return box;
}

// ---- programs ------------------------------------------------------------------------------------

/// A program with everything that runs it.
struct Case {
  Case(std::size_t number, TestProgram drawn, const PrintedProgram& functions)
      : seed(static_cast<std::uint32_t>(100 * number)),
        program(std::move(drawn)),
        printed(functions),
        text(expr::print_cuda(program.score, program.mask)),
        captures(cuda::CaptureSlots(text, program.score, program.mask)
                     .bind(program.score, program.mask)) {}

  std::uint32_t seed;
  TestProgram program;
  PrintedProgram printed;
  expr::CudaProgram text;
  cuda::Captures captures;
};

template <typename Visit>
void for_all_cases(Visit visit) {
  const ProgramData data;
  const std::vector<TestProgram> programs = testing::test_programs(data.captures());
  ASSERT_EQ(programs.size(), std::size(kPrintedPrograms));
  for (std::size_t number = 0; number < programs.size(); ++number) {
    SCOPED_TRACE(number);
    Case each(number, programs[number], kPrintedPrograms[number]);
    visit(each);
    if (::testing::Test::HasFailure()) return;
  }
}

bool is_inside(const Interval& range, double value) {
  return std::isnan(value) ? range.may_be_nan : range.contains(value);
}

/// What every faithful evaluation at one position can give; a printed quotient may be an ulp and a half beside the rounded one.
Interval allowed(const IntervalProgram& formula, const Box& box, bool has_approx_div) {
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

constexpr int kNumPositions = 400;

TEST(PrintedProgram, ScoresAreTheOracles) {
  std::int64_t num_checked = 0;
  std::int64_t num_tight = 0;
  for_all_cases([&](Case& each) {
    Draw draw(each.seed + 17);
    const IntervalProgram formula(each.program.score.expr().shared());
    reference::Evaluator oracle(each.program.score);
    reference::Evaluator rounded_oracle(each.program.score, reference::Precision::f32);
    const bool has_approx_div = each.text.mods.find("approx_div") != std::string::npos;
    for (int i = 0; i < kNumPositions; ++i) {
      const float score = draw.score();
      const cuda::Position at = draw.position();
      const double got = each.printed.score(score, at, each.captures);
      const double expected = oracle(oracle_position(score, at));
      const double rounded = rounded_oracle(oracle_position(score, at));
      const Interval range = allowed(formula, box_of(score, at), has_approx_div);
      ASSERT_TRUE(is_inside(range, got))
          << each.program.score.to_string() << "\n"
          << each.text.mods << "score " << score << " q_idx " << at.q_idx << " kv_idx " << at.kv_idx
          << ": " << got << ", expected " << expected << " in [" << range.lo << ", " << range.hi
          << "]";
      // A range of NaN is all there is: here the oracles say more.
      if (std::isnan(expected) == std::isnan(rounded)) {
        ASSERT_EQ(std::isnan(got), std::isnan(expected))
            << each.program.score.to_string() << "\n"
            << each.text.mods << "score " << score << " q_idx " << at.q_idx << " kv_idx "
            << at.kv_idx << ": " << got << ", expected " << expected;
      }
      ++num_checked;
      num_tight +=
          std::isnan(expected) || range.hi - range.lo <= 1e-3 * std::fabs(expected) + 1e-30 ? 1 : 0;
    }
  });
  // Most ranges are as good as a value: the test has teeth.
  EXPECT_GT(num_tight, num_checked * 3 / 4);
}

TEST(PrintedProgram, MasksAreTheOracles) {
  std::int64_t num_checked = 0;
  std::int64_t num_decided = 0;
  for_all_cases([&](Case& each) {
    Draw draw(each.seed + 18);
    const IntervalProgram formula(each.program.mask.expr().shared());
    reference::Evaluator oracle(each.program.mask);
    for (int i = 0; i < kNumPositions; ++i) {
      const cuda::Position at = draw.position();
      const bool got = each.printed.mask(at, each.captures);
      const Interval range = formula.evaluate(box_of(0, at));
      ++num_checked;
      if (!range.is_point()) continue;
      ++num_decided;
      ASSERT_EQ(got, oracle(oracle_position(0, at)) != 0)
          << each.program.mask.to_string() << "\n"
          << each.text.mods << "q_idx " << at.q_idx << " kv_idx " << at.kv_idx;
    }
  });
  EXPECT_GT(num_decided, num_checked * 85 / 100);
}

// ---- tiles ---------------------------------------------------------------------------------------

cuda::TileSpan random_tile(Draw& draw) {
  const auto begin = [&] { return draw.below(12) == 0 ? INT32_MAX - 40 : draw.below(40); };
  const auto size = [&] { return draw.below(3) == 0 ? 1 : 1 + draw.below(13); };
  cuda::TileSpan tile{};
  tile.batch = draw.below(4);
  tile.kv_head = draw.below(3);
  tile.q_head_begin = 2 * tile.kv_head;
  tile.q_head_end = tile.q_head_begin + 1 + draw.below(2);
  tile.q_begin = begin();
  tile.q_end = tile.q_begin + size();
  tile.kv_begin = begin();
  tile.kv_end = tile.kv_begin + size();
  tile.seqlen_q = draw.index();
  tile.seqlen_kv = draw.below(3) == 0 ? draw.index() : 12 + draw.below(20);
  return tile;
}

Box box_of(const cuda::TileSpan& tile) {
  Box box = box_of(0, {tile.batch, 0, tile.kv_head, 0, 0, tile.seqlen_q, tile.seqlen_kv});
  box.variables[static_cast<std::size_t>(Variable::q_head)] =
      range_of(tile.q_head_begin, tile.q_head_end);
  box.variables[static_cast<std::size_t>(Variable::q_idx)] = range_of(tile.q_begin, tile.q_end);
  box.variables[static_cast<std::size_t>(Variable::kv_idx)] = range_of(tile.kv_begin, tile.kv_end);
  return box;
}

TileKind kind_of(const Interval& visible) {
  if (visible.always_true()) return TileKind::full;
  return visible.always_false() ? TileKind::empty : TileKind::partial;
}

/// All positions of a tile, by the oracle.
TileKind kind_of_all(const cuda::TileSpan& tile, reference::Evaluator& oracle) {
  bool has_visible = false;
  bool has_hidden = false;
  for (std::int32_t head = tile.q_head_begin; head < tile.q_head_end; ++head) {
    for (std::int64_t q = tile.q_begin; q < tile.q_end; ++q) {
      for (std::int64_t kv = tile.kv_begin; kv < tile.kv_end; ++kv) {
        const bool is_visible = oracle({.score = 0,
                                        .batch = tile.batch,
                                        .q_head = head,
                                        .kv_head = tile.kv_head,
                                        .q_idx = q,
                                        .kv_idx = kv,
                                        .seqlen_q = tile.seqlen_q,
                                        .seqlen_kv = tile.seqlen_kv}) != 0;
        has_visible = has_visible || is_visible;
        has_hidden = has_hidden || !is_visible;
      }
    }
  }
  if (has_visible && has_hidden) return TileKind::partial;
  return has_visible ? TileKind::full : TileKind::empty;
}

constexpr int kNumTiles = 300;

TEST(PrintedTileKind, ClaimsWhatEveryPositionHolds) {
  std::map<TileKind, int> counts;
  for_all_cases([&](Case& each) {
    Draw draw(each.seed + 19);
    reference::Evaluator oracle(each.program.mask);
    for (int i = 0; i < kNumTiles; ++i) {
      const cuda::TileSpan tile = random_tile(draw);
      const TileKind kind = each.printed.tile_kind(tile, each.captures);
      ++counts[kind];
      if (kind == TileKind::partial) continue;
      ASSERT_EQ(kind, kind_of_all(tile, oracle))
          << each.program.mask.to_string() << "\n"
          << each.text.mods << "q [" << tile.q_begin << ", " << tile.q_end << ") kv ["
          << tile.kv_begin << ", " << tile.kv_end << ")";
    }
  });
  const auto num_tiles = kNumTiles * static_cast<int>(std::size(kPrintedPrograms));
  EXPECT_GT(counts[TileKind::empty], num_tiles / 10);
  EXPECT_GT(counts[TileKind::full], num_tiles / 10);
}

TEST(PrintedTileKind, KnowsWhatTheIntervalsOfTheHostKnow) {
  int num_proven = 0;
  int num_proven_here_alone = 0;
  for_all_cases([&](Case& each) {
    Draw draw(each.seed + 20);
    const IntervalProgram formula(expr::simplify(each.program.mask.expr().shared()));
    for (int i = 0; i < kNumTiles; ++i) {
      const cuda::TileSpan tile = random_tile(draw);
      const TileKind kind = each.printed.tile_kind(tile, each.captures);
      Box box = box_of(tile);
      box.load_bounds = few_element_bounds;
      const TileKind host = kind_of(formula.evaluate(box));
      num_proven += kind != TileKind::partial ? 1 : 0;
      num_proven_here_alone += kind != host ? 1 : 0;
      // Uniform ints are values here and may wrap to something known.
      if (host == TileKind::partial) continue;
      ASSERT_EQ(kind, host) << each.program.mask.to_string() << "\n"
                            << each.text.mods << "q [" << tile.q_begin << ", " << tile.q_end
                            << ") kv [" << tile.kv_begin << ", " << tile.kv_end << ")";
    }
  });
  EXPECT_LT(num_proven_here_alone, num_proven / 20);
}

}  // namespace
}  // namespace fovea
