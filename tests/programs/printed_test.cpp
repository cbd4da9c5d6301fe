// What is printed means what the oracle means. Programs were printed when this was built, and the host compiler has
// compiled them like any other text, with approximations that err by all that the PTX ISA allows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "expr/passes.hpp"
#include "mask/element_range.hpp"
#include "programs/printed_program.hpp"
#include "programs/program_checks.hpp"

// After what its text needs.
#include "printed_programs.inc"

namespace fovea {
namespace {

using cuda::kPrintedPrograms;
using cuda::PrintedProgram;
using cuda::TileKind;
using testing::Box;
using testing::Case;
using testing::Draw;
using testing::Interval;
using testing::IntervalProgram;
using testing::Node;
using testing::Place;
using testing::ProgramData;
using testing::TestProgram;
using testing::Variable;

template <typename Visit>
void for_all_cases(Visit visit) {
  const ProgramData data;
  const std::vector<TestProgram> programs = testing::test_programs(data.captures());
  ASSERT_EQ(programs.size(), std::size(kPrintedPrograms));
  for (std::size_t number = 0; number < programs.size(); ++number) {
    SCOPED_TRACE(number);
    visit(Case(number, programs[number]), kPrintedPrograms[number]);
    if (::testing::Test::HasFailure()) return;
  }
}

cuda::Position position_of(const Place& at) {
  return {at.batch, at.q_head, at.kv_head, at.q_idx, at.kv_idx, at.seqlen_q, at.seqlen_kv};
}

constexpr int kNumPositions = 400;

TEST(PrintedProgram, ScoresAreTheOracles) {
  std::int64_t num_checked = 0;
  std::int64_t num_tight = 0;
  for_all_cases([&](const Case& each, const PrintedProgram& printed) {
    Draw draw(each.seed + 17);
    testing::ScoreCheck is_right(each);
    for (int i = 0; i < kNumPositions; ++i) {
      const Place at = draw.place();
      ASSERT_TRUE(is_right(at, printed.score(at.score, position_of(at), each.captures)));
    }
    num_checked += is_right.num_checked;
    num_tight += is_right.num_tight;
  });
  // Most ranges are as good as a value: the test has teeth.
  EXPECT_GT(num_tight, num_checked * 3 / 4);
}

TEST(PrintedProgram, MasksAreTheOracles) {
  std::int64_t num_checked = 0;
  std::int64_t num_decided = 0;
  for_all_cases([&](const Case& each, const PrintedProgram& printed) {
    Draw draw(each.seed + 18);
    testing::MaskCheck is_right(each);
    for (int i = 0; i < kNumPositions; ++i) {
      const Place at = draw.place();
      ASSERT_TRUE(is_right(at, printed.mask(position_of(at), each.captures)));
    }
    num_checked += is_right.num_checked;
    num_decided += is_right.num_decided;
  });
  EXPECT_GT(num_decided, num_checked * 85 / 100);
}

TEST(PrintedProgram, LimitsOfKeysAreTheMask) {
  int num_limited = 0;
  for_all_cases([&](const Case& each, const PrintedProgram& printed) {
    if (printed.kv_first == nullptr) return;
    ++num_limited;
    Draw draw(each.seed + 22);
    for (int i = 0; i < kNumPositions; ++i) {
      cuda::Position at = position_of(draw.place());
      // What positions can be.
      for (std::int32_t* position : {&at.q_idx, &at.kv_idx, &at.seqlen_q, &at.seqlen_kv})
        *position = draw.below(6) == 0 ? (1 << 28) - draw.below(3) : draw.below(40);
      const bool is_between = printed.kv_first(at, each.captures).value <= at.kv_idx &&
                              at.kv_idx <= printed.kv_last(at, each.captures).value;
      ASSERT_EQ(is_between, printed.mask(at, each.captures))
          << each.text.mods << "q_idx " << at.q_idx << " kv_idx " << at.kv_idx;
    }
  });
  EXPECT_GE(num_limited, 6);
}

TEST(PrintedProgram, PartsOfKeysAndRowsMakeTheWhole) {
  int num_scores = 0;
  int num_masks = 0;
  for_all_cases([&](const Case& each, const PrintedProgram& printed) {
    num_scores += printed.score_by_parts != nullptr ? 1 : 0;
    num_masks += printed.mask_by_parts != nullptr ? 1 : 0;
    Draw draw(each.seed + 23);
    for (int i = 0; i < kNumPositions; ++i) {
      const Place place = draw.place();
      const cuda::Position at = position_of(place);
      if (printed.mask_by_parts != nullptr) {
        ASSERT_EQ(printed.mask_by_parts(at, each.captures), printed.mask(at, each.captures))
            << each.shown(each.program.mask, place);
      }
      if (printed.score_by_parts == nullptr) continue;
      const float whole = printed.score(place.score, at, each.captures);
      const float by_parts = printed.score_by_parts(place.score, at, each.captures);
      ASSERT_TRUE(by_parts == whole || (std::isnan(by_parts) && std::isnan(whole)))
          << each.shown(each.program.score, place);
    }
  });
  EXPECT_GE(num_scores, 20);
  EXPECT_GE(num_masks, 20);
}

/// As a kernel has it: from the value at a first key, beside what the oracle says further on.
TEST(PrintedProgram, SlopesAreWhatTheScoreGrowsByFromKeyToKey) {
  int num_lines = 0;
  int num_bends = 0;
  for_all_cases([&](const Case& each, const PrintedProgram& printed) {
    if (printed.score_slope == nullptr) return;
    ++num_lines;
    Draw draw(each.seed + 24);
    reference::Evaluator oracle(each.program.score);
    for (int i = 0; i < kNumPositions; ++i) {
      Place at = draw.place();
      at.score = static_cast<float>(draw.below(100)) / 8 - 5;
      for (std::int32_t* position : {&at.q_idx, &at.kv_idx, &at.seqlen_q, &at.seqlen_kv})
        *position = draw.below(6) == 0 ? (1 << 20) - draw.below(3) : draw.below(40);
      const cuda::Position first = position_of(at);
      const double base = printed.score(0.0F, first, each.captures);
      const double slope = printed.score_slope(first, each.captures);
      at.kv_idx += draw.below(128);
      // From the first key to the bend by one slope, from there on by the other.
      std::int64_t bend = at.kv_idx;
      double slope_behind = slope;
      if (printed.score_bend != nullptr) {
        bend = std::clamp<std::int64_t>(printed.score_bend(first, each.captures).value,
                                        first.kv_idx, at.kv_idx);
        slope_behind = printed.score_slope_behind(first, each.captures);
        num_bends += first.kv_idx < bend && bend < at.kv_idx ? 1 : 0;
      }
      const double expected = oracle(testing::oracle_position(at)) - at.score;
      if (!std::isfinite(expected)) continue;
      const double got = base + slope * static_cast<double>(bend - first.kv_idx) +
                         slope_behind * static_cast<double>(at.kv_idx - bend);
      const double largest =
          std::max(std::fabs(slope), std::fabs(slope_behind)) * std::max(at.kv_idx, at.q_idx);
      ASSERT_NEAR(got, expected, 1e-6 * (largest + std::fabs(expected) + std::fabs(at.score)))
          << each.shown(each.program.score, at);
    }
  });
  EXPECT_GE(num_lines, 6);
  EXPECT_GE(num_bends, kNumPositions / 8);
}

// ---- tiles ---------------------------------------------------------------------------------------

Interval range_of(std::int64_t begin, std::int64_t end) {
  return {static_cast<double>(begin), static_cast<double>(end - 1), false};
}

/// The same where elements are few: without a table of ranges nothing is known of more.
Interval few_element_bounds(const Node& load, const Interval* indices) {
  double count = 1;
  for (int dim = 0; dim < load.tensor->view.rank(); ++dim)
    count *= indices[dim].hi - indices[dim].lo + 1;
  if (count <= cuda::program::kMaxElements) return testing::element_bounds(load, indices);
  return mask::range_of_dtype(load.dtype);
}

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

Box box_of_tile(const cuda::TileSpan& tile) {
  Box box = testing::box_of({0, tile.batch, 0, tile.kv_head, 0, 0, tile.seqlen_q, tile.seqlen_kv});
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
  for_all_cases([&](const Case& each, const PrintedProgram& printed) {
    Draw draw(each.seed + 19);
    reference::Evaluator oracle(each.program.mask);
    for (int i = 0; i < kNumTiles; ++i) {
      const cuda::TileSpan tile = random_tile(draw);
      const TileKind kind = printed.tile_kind(tile, each.captures);
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
  for_all_cases([&](const Case& each, const PrintedProgram& printed) {
    Draw draw(each.seed + 20);
    const IntervalProgram formula(expr::simplify(each.program.mask.expr().shared()));
    for (int i = 0; i < kNumTiles; ++i) {
      const cuda::TileSpan tile = random_tile(draw);
      const TileKind kind = printed.tile_kind(tile, each.captures);
      Box box = box_of_tile(tile);
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
