// From a mask program to runs of tiles: bands where the formula is one, else interval analysis by bisection.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "expr/interval.hpp"
#include "expr/passes.hpp"
#include "mask/bands.hpp"
#include "mask/block_map.hpp"
#include "mask/mask_loads.hpp"

namespace fovea::mask {
namespace {

using expr::Interval;
using expr::Node;
using expr::Variable;

// Boxes that an undecided tile may be split into. 128 x 128 scores are 14 halvings deep, so this finds one visible and
// one hidden score of most tiles that have both, and settles tiles in which up to about five documents meet on each
// side.
constexpr int kSplitBudget = 64;

// More changes than this along one side of a tile are not worth finding: the budget could not use them.
constexpr std::size_t kMaxCuts = 16;

struct Box {
  Span q, kv, head;
};

enum class Verdict : std::uint8_t { hidden, mixed, visible };

Interval interval_of(Span span) {
  return {.lo = static_cast<double>(span.begin), .hi = static_cast<double>(span.end - 1)};
}

Interval point(std::int64_t value) { return Interval::point(static_cast<double>(value)); }

/// Positions along one side of a tile where what is loaded there changes: documents begin here.
class Cuts {
 public:
  bool is_full() const { return num_cuts_ == kMaxCuts; }
  void add(std::int64_t position) { cuts_[num_cuts_++] = position; }
  void clear() { num_cuts_ = 0; }

  /// The one inside the span that is nearest to its middle.
  std::optional<std::int64_t> inside(Span span) const {
    const std::int64_t middle = span.begin + span.size() / 2;
    std::optional<std::int64_t> best;
    for (std::size_t i = 0; i < num_cuts_; ++i) {
      const std::int64_t cut = cuts_[i];
      if (cut <= span.begin || cut >= span.end) continue;
      if (!best || std::abs(cut - middle) < std::abs(*best - middle)) best = cut;
    }
    return best;
  }

 private:
  std::array<std::int64_t, kMaxCuts> cuts_{};
  std::size_t num_cuts_ = 0;
};

std::pair<Box, Box> cut_at(const Box& box, Span Box::*side, std::int64_t position) {
  std::pair<Box, Box> parts{box, box};
  (parts.first.*side).end = position;
  (parts.second.*side).begin = position;
  return parts;
}

/// Two parts, cut where loads change if they do, else in the middle of the longest side; empty for a single score.
std::optional<std::pair<Box, Box>> parts_of(const Box& box, const Cuts& q_cuts,
                                            const Cuts& kv_cuts) {
  if (const auto cut = q_cuts.inside(box.q)) return cut_at(box, &Box::q, *cut);
  if (const auto cut = kv_cuts.inside(box.kv)) return cut_at(box, &Box::kv, *cut);
  const std::int64_t longest = std::max({box.q.size(), box.kv.size(), box.head.size()});
  if (longest == 1) return std::nullopt;
  Span Box::*const side = box.q.size() == longest    ? &Box::q
                          : box.kv.size() == longest ? &Box::kv
                                                     : &Box::head;
  return cut_at(box, side, (box.*side).begin + longest / 2);
}

/// The loads, as indices into nodes, that one position enters and the other does not.
std::vector<std::size_t> loads_along(const std::vector<const Node*>& nodes, Variable along,
                                     Variable other) {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = *nodes[i];
    if (node.op == expr::Op::load && expr::reads(node, along) && !expr::reads(node, other)) {
      result.push_back(i);
    }
  }
  return result;
}

/// One per thread: `row` is const, called by several workers at once, and must not allocate.
std::vector<Interval>& scratch() {
  thread_local std::vector<Interval> values;
  return values;
}

/// Is the formula an element of a tensor of bools, whose indices are positions as they are? Elements then say exactly
/// what a tile is.
bool is_element_of_bools(const Node& formula) {
  if (formula.op != expr::Op::load || formula.type != ExprType::boolean) return false;
  return std::ranges::all_of(formula.operands, [](const expr::NodePtr& index) {
    return index->op == expr::Op::variable || index->op == expr::Op::constant;
  });
}

/// A dense mask: nothing is known of several tiles before all their elements are read.
bool reads_both_positions(const Node& formula) {
  return expr::reads(formula, Variable::q_idx) && expr::reads(formula, Variable::kv_idx);
}

/// What follows from the formula.
struct MaskFormula {
  MaskFormula(const MaskMod& mask, std::int64_t tile)
      : tile_kv(tile),
        program(expr::simplify(mask.formula().shared())),
        is_element(is_element_of_bools(*program.nodes().back())),
        is_dense(is_element && reads_both_positions(*program.nodes().back())),
        bands(Bands::compile(program.nodes())),
        q_loads(loads_along(program.nodes(), Variable::q_idx, Variable::kv_idx)),
        kv_loads(loads_along(program.nodes(), Variable::kv_idx, Variable::q_idx)) {}

  std::int64_t tile_kv = 1;
  expr::IntervalProgram program;
  bool is_element = false, is_dense = false;
  std::optional<Bands> bands;
  std::vector<std::size_t> q_loads, kv_loads;
};

struct BoundMask {
  std::shared_ptr<const MaskFormula> formula;
  MaskLoads loads{};
  std::vector<CapturedScalar> scalars{};

  double scalar(const Node& node) const {
    const auto found = std::ranges::find(scalars, node.name, &CapturedScalar::name);
    FOVEA_ASSERT(found != scalars.end());
    return found->value;
  }
};

/// The work of one call of BlockMapper::row.
class RowMapper {
 public:
  RowMapper(const BoundMask& mask, const TileRow& row, std::vector<TileRun>& runs)
      : bound_(mask),
        mask_(*mask.formula),
        whole_{.q = {row.q_begin, row.q_end},
               .kv = {0, row.seqlen_kv},
               .head = {row.q_head_begin, row.q_head_end}},
        tiles_{row.tiles_begin, std::min(row.tiles_end, tiles_until(row.seqlen_kv))},
        runs_(runs) {
    variable(Variable::batch) = point(row.batch);
    variable(Variable::kv_head) = point(row.kv_head);
    variable(Variable::seqlen_q) = point(row.seqlen_q);
    variable(Variable::seqlen_kv) = point(row.seqlen_kv);
    box_.scalar_value = [this](const Node& node) { return bound_.scalar(node); };
    box_.tensor = [this](const Node& load) -> const TensorView& { return bound_.loads.view(load); };
    box_.load_bounds = [this](const Node& load, const Interval* indices) {
      return bound_.loads.range(load, indices, scan_);
    };
  }

  void map() {
    if (whole_.q.is_empty() || whole_.kv.is_empty() || whole_.head.is_empty()) return;
    if (mask_.is_dense) return map_tiles();
    const std::int64_t num_tiles = tiles_until(whole_.kv.end);
    if (!mask_.bands && tiles_.size() < num_tiles) {
      if (!tiles_.is_empty()) halve(tiles_.begin, tiles_.end);
      return;
    }
    const Verdict verdict = evaluate(whole_, Scan::forbidden);
    if (verdict == Verdict::hidden) return;
    if (verdict == Verdict::visible) return emit(0, num_tiles, TileKind::full);
    if (mask_.bands) {
      const auto extents = mask_.bands->extents(scratch(), whole_.q, whole_.kv.end);
      if (extents) {
        if (extents->num_bands == 1) edges_ = extents->last;
        return map_bands(*extents);
      }
    }
    halve(0, num_tiles);
  }

  Span hull() {
    if (whole_.q.is_empty() || tiles_.is_empty() || whole_.head.is_empty()) return {};
    if (mask_.bands) return tiles_;
    const auto first = outermost(tiles_.begin, tiles_.end, End::first);
    if (!first) return {};
    return {*first, *outermost(*first, tiles_.end, End::last) + 1};
  }

  const std::optional<BandEdges>& edges() const { return edges_; }

 private:
  Interval& variable(Variable v) { return box_.variables[static_cast<std::size_t>(v)]; }

  Verdict evaluate(const Box& box, Scan scan) {
    variable(Variable::kv_idx) = interval_of(box.kv);
    scan_ = scan;
    if (is_same_rows(box)) {
      mask_.program.evaluate_again(box_, Variable::kv_idx, scratch());
    } else {
      variable(Variable::q_idx) = interval_of(box.q);
      variable(Variable::q_head) = interval_of(box.head);
      mask_.program.evaluate_all(box_, scratch());
      evaluated_rows_ = box;
    }
    const Interval& visible = scratch().back();
    if (visible.always_true()) return Verdict::visible;
    return visible.always_false() ? Verdict::hidden : Verdict::mixed;
  }

  bool is_same_rows(const Box& box) const {
    return evaluated_rows_ && evaluated_rows_->q == box.q && evaluated_rows_->head == box.head;
  }

  // --- tiles and keys

  std::int64_t tiles_until(std::int64_t key) const {
    return (key + mask_.tile_kv - 1) / mask_.tile_kv;
  }
  Span keys_of(std::int64_t begin_tile, std::int64_t end_tile) const {
    return {.begin = begin_tile * mask_.tile_kv,
            .end = std::min(end_tile * mask_.tile_kv, whole_.kv.end)};
  }
  Span tiles_touching(Span keys) const {
    return {.begin = keys.begin / mask_.tile_kv, .end = tiles_until(keys.end)};
  }
  Span tiles_inside(Span keys) const {
    const Span tiles{
        .begin = tiles_until(keys.begin),
        .end = keys.end == whole_.kv.end ? tiles_until(keys.end) : keys.end / mask_.tile_kv};
    return tiles.is_empty() || keys.is_empty() ? Span{} : tiles;
  }

  void emit(std::int64_t begin, std::int64_t end, TileKind kind) {
    if (begin >= end || kind == TileKind::empty) return;
    const auto first = static_cast<std::int32_t>(begin);
    const auto last = static_cast<std::int32_t>(end);
    if (!runs_.empty() && runs_.back().end == first && runs_.back().kind == kind) {
      runs_.back().end = last;
    } else {
      runs_.push_back({.begin = first, .end = last, .kind = kind});
    }
  }

  void map_tiles() {
    for (std::int64_t tile = tiles_.begin; tile < tiles_.end; ++tile) {
      emit(tile, tile + 1, kind_of(tile));
    }
  }

  // --- interval analysis

  void halve(std::int64_t begin, std::int64_t end) {
    if (end - begin == 1) return emit(begin, end, kind_of(begin));
    const Box box{.q = whole_.q, .kv = keys_of(begin, end), .head = whole_.head};
    switch (evaluate(box, Scan::forbidden)) {
      case Verdict::hidden:
        return;
      case Verdict::visible:
        return emit(begin, end, TileKind::full);
      case Verdict::mixed:
        const std::int64_t middle = begin + (end - begin) / 2;
        halve(begin, middle);
        halve(middle, end);
    }
  }

  enum class End : bool { first, last };

  /// Of the tiles that these rows may see.
  std::optional<std::int64_t> outermost(std::int64_t begin, std::int64_t end, End which) {
    const Box box{.q = whole_.q, .kv = keys_of(begin, end), .head = whole_.head};
    if (evaluate(box, Scan::forbidden) == Verdict::hidden) return std::nullopt;
    if (end - begin == 1) return begin;
    const std::int64_t middle = begin + (end - begin) / 2;
    std::array halves{Span{begin, middle}, Span{middle, end}};
    if (which == End::last) std::swap(halves[0], halves[1]);
    const auto nearer = outermost(halves[0].begin, halves[0].end, which);
    return nearer ? nearer : outermost(halves[1].begin, halves[1].end, which);
  }

  TileKind kind_of(std::int64_t tile) {
    const Box box{.q = whole_.q, .kv = keys_of(tile, tile + 1), .head = whole_.head};
    switch (evaluate(box, Scan::allowed)) {
      case Verdict::hidden:
        return TileKind::empty;
      case Verdict::visible:
        return TileKind::full;
      case Verdict::mixed:
        return mask_.is_element || corners_differ(box) ? TileKind::partial : split(box);
    }
    return TileKind::partial;
  }

  /// Settles most tiles that a mask's edge crosses.
  bool corners_differ(const Box& box) {
    bool has_visible = false;
    bool has_hidden = false;
    for (const std::int64_t q : {box.q.begin, box.q.end - 1}) {
      for (const std::int64_t kv : {box.kv.begin, box.kv.end - 1}) {
        const Verdict verdict = evaluate(
            {.q = {q, q + 1}, .kv = {kv, kv + 1}, .head = {box.head.begin, box.head.begin + 1}},
            Scan::allowed);
        has_visible = has_visible || verdict == Verdict::visible;
        has_hidden = has_hidden || verdict == Verdict::hidden;
      }
    }
    return has_visible && has_hidden;
  }

  /// Depth first, so that a tile with both kinds of scores is settled by the first two single ones.
  TileKind split(const Box& tile) {
    find_cuts(tile, &Box::q, mask_.q_loads, q_cuts_);
    find_cuts(tile, &Box::kv, mask_.kv_loads, kv_cuts_);
    std::array<Box, kSplitBudget + 2> open;
    std::size_t num_open = 0;
    bool has_visible = false;
    bool has_hidden = false;
    const auto open_parts = [&](const Box& box) {
      const auto parts = parts_of(box, q_cuts_, kv_cuts_);
      if (!parts) return false;
      open[num_open++] = parts->second;
      open[num_open++] = parts->first;
      return true;
    };
    if (!open_parts(tile)) return TileKind::partial;
    for (int budget = kSplitBudget; num_open > 0; --budget) {
      if (budget == 0) return TileKind::partial;
      const Box box = open[--num_open];
      const Verdict verdict = evaluate(box, Scan::allowed);
      has_visible = has_visible || verdict == Verdict::visible;
      has_hidden = has_hidden || verdict == Verdict::hidden;
      if (has_visible && has_hidden) return TileKind::partial;
      if (verdict == Verdict::mixed && !open_parts(box)) return TileKind::partial;
    }
    return has_visible ? TileKind::full : TileKind::empty;
  }

  /// In rising order, by bisection; none when there are too many to be of use.
  void find_cuts(const Box& tile, Span Box::*side, const std::vector<std::size_t>& loads,
                 Cuts& cuts) {
    cuts.clear();
    if (loads.empty()) return;
    std::array<Span, 80> open;  // two more for each halving of a 32-bit length
    std::size_t num_open = 0;
    open[num_open++] = tile.*side;
    while (num_open > 0) {
      const Span span = open[--num_open];
      if (span.size() == 1 || loads_are_uniform(tile, side, span, loads)) continue;
      if (span.size() == 2) {
        if (cuts.is_full()) return cuts.clear();
        cuts.add(span.end - 1);
        continue;
      }
      const std::int64_t middle = span.begin + span.size() / 2;
      open[num_open++] = {middle, span.end};
      open[num_open++] = {middle - 1, middle + 1};
      open[num_open++] = {span.begin, middle};
    }
  }

  bool loads_are_uniform(const Box& tile, Span Box::*side, Span span,
                         const std::vector<std::size_t>& loads) {
    Box box = tile;
    box.*side = span;
    evaluate(box, Scan::forbidden);
    return std::ranges::all_of(loads, [](std::size_t i) { return scratch()[i].is_point(); });
  }

  // --- bands

  void map_bands(const BandExtents& extents) {
    if (extents.num_bands == 1 && extents.bands[0].is_exact) return map_band(extents.bands[0]);
    // Between neighbouring cuts all tiles relate alike to every band.
    std::array<std::int64_t, std::size_t{4} * kMaxBands> cuts;
    std::size_t num_cuts = 0;
    for (int i = 0; i < extents.num_bands; ++i) {
      const BandExtent& band = extents.bands[static_cast<std::size_t>(i)];
      for (const Span tiles : {tiles_touching(band.touched), tiles_inside(band.full)}) {
        cuts[num_cuts++] = tiles.begin;
        cuts[num_cuts++] = tiles.end;
      }
    }
    std::sort(cuts.begin(), cuts.begin() + static_cast<std::ptrdiff_t>(num_cuts));
    for (std::size_t i = 0; i + 1 < num_cuts; ++i) {
      if (cuts[i] < cuts[i + 1]) map_between_cuts(extents, {cuts[i], cuts[i + 1]});
    }
  }

  void map_band(const BandExtent& band) {
    const Span touched = tiles_touching(band.touched);
    const Span full = tiles_inside(band.full);
    if (full.is_empty()) return emit(touched.begin, touched.end, TileKind::partial);
    emit(touched.begin, full.begin, TileKind::partial);
    emit(full.begin, full.end, TileKind::full);
    emit(full.end, touched.end, TileKind::partial);
  }

  void map_between_cuts(const BandExtents& extents, Span tiles) {
    int num_touching = 0;
    bool is_exact = true;
    for (int i = 0; i < extents.num_bands; ++i) {
      const BandExtent& band = extents.bands[static_cast<std::size_t>(i)];
      const Span touched = tiles_touching(band.touched);
      const Span full = tiles_inside(band.full);
      if (full.begin <= tiles.begin && tiles.end <= full.end) {
        return emit(tiles.begin, tiles.end, TileKind::full);
      }
      if (tiles.begin < touched.end && touched.begin < tiles.end) {
        ++num_touching;
        is_exact = is_exact && band.is_exact;
      }
    }
    if (num_touching == 0) return;
    if (num_touching == 1 && is_exact) {
      return emit(tiles.begin, tiles.end, TileKind::partial);
    }
    halve(tiles.begin, tiles.end);  // two bands together may fill a tile
  }

  const BoundMask& bound_;
  const MaskFormula& mask_;
  const Box whole_;
  const Span tiles_;
  std::vector<TileRun>& runs_;
  expr::Box box_;
  Scan scan_ = Scan::forbidden;
  std::optional<Box> evaluated_rows_;  // whose values are in scratch(), but for the keys
  Cuts q_cuts_, kv_cuts_;
  std::optional<BandEdges> edges_;
};

}  // namespace

struct BlockMapper::Impl : BoundMask {};

BlockMapper::BlockMapper(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

BlockMapper::BlockMapper(const MaskMod& mask, std::int64_t tile_kv)
    : BlockMapper(of_formula(mask, tile_kv).over(mask)) {}

BlockMapper BlockMapper::of_formula(const MaskMod& mask, std::int64_t tile_kv) {
  FOVEA_ASSERT(tile_kv >= 1);
  return BlockMapper(std::make_unique<Impl>(
      Impl{{.formula = std::make_shared<const MaskFormula>(mask, tile_kv)}}));
}

BlockMapper BlockMapper::over(const MaskMod& mask) const {
  const auto& formula = impl_->formula;
  const Captures& captures = mask.captures();
  return BlockMapper(std::make_unique<Impl>(
      Impl{{formula, MaskLoads(formula->program.nodes(), captures), captures.scalars}}));
}

BlockMapper::~BlockMapper() = default;
BlockMapper::BlockMapper(BlockMapper&&) noexcept = default;
BlockMapper& BlockMapper::operator=(BlockMapper&&) noexcept = default;

bool BlockMapper::is_closed_form() const { return !impl_->loads.depend_on_positions(); }

std::optional<BandEdges> BlockMapper::row(const TileRow& row, std::vector<TileRun>& runs) const {
  runs.clear();
  RowMapper mapper(*impl_, row, runs);
  mapper.map();
  return mapper.edges();
}

Span BlockMapper::hull(const TileRow& row) const {
  std::vector<TileRun> none;
  return RowMapper(*impl_, row, none).hull();
}

}  // namespace fovea::mask
