#include "mask/bands.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <unordered_map>
#include <utility>

#include "mask/mask_loads.hpp"

namespace fovea::mask {
namespace {

using expr::Interval;
using expr::Node;
using expr::Op;
using expr::Variable;

// Beyond these, the sums and products below could leave 64 bits; no real mask comes near.
constexpr std::int64_t kCoefficientLimit = std::int64_t{1} << 30;
constexpr std::int64_t kConstantLimit = std::int64_t{1} << 31;

constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  return a / b - static_cast<std::int64_t>(a % b != 0 && (a < 0) != (b < 0));
}

/// The rows that satisfy coefficient * q <= limit.
Span restrict(Span rows, std::int64_t coefficient, std::int64_t limit) {
  if (coefficient > 0) {
    rows.end = std::min(rows.end, floor_div(limit, coefficient) + 1);
  } else if (coefficient < 0) {
    rows.begin = std::max(rows.begin, -floor_div(limit, -coefficient));
  } else if (limit < 0) {
    rows.end = rows.begin;
  }
  return rows;
}

}  // namespace

// Formula to steps and bands. Negations travel down to the comparisons, && multiplies unions out.
class Bands::Compiler {
 public:
  explicit Compiler(const std::vector<const Node*>& nodes) : nodes_(nodes), varies_(nodes) {
    for (std::size_t i = 0; i < nodes.size(); ++i) idx_[nodes[i]->digest] = static_cast<int>(i);
  }

  std::optional<Bands> compile() {
    auto bands = disjunction(*nodes_.back(), false);
    if (!bands) return std::nullopt;
    result_.bands_ = std::move(*bands);
    return std::move(result_);
  }

 private:
  using Union = std::optional<std::vector<Band>>;

  Union disjunction(const Node& node, bool is_negated) {
    if (!varies_(node)) return uniform(node, is_negated);
    const auto operand = [&](std::size_t i) -> const Node& { return *node.operands[i]; };
    switch (node.op) {
      case Op::logical_not:
        return disjunction(operand(0), !is_negated);
      case Op::logical_and:
      case Op::logical_or: {
        Union a = disjunction(operand(0), is_negated);
        Union b = disjunction(operand(1), is_negated);
        return (node.op == Op::logical_and) != is_negated ? both(a, b) : either(a, b);
      }
      case Op::select:
        return select(node, is_negated);
      case Op::lt:
      case Op::le:
      case Op::gt:
      case Op::ge:
      case Op::eq:
      case Op::ne:
        return comparison(node, is_negated);
      default:
        return std::nullopt;
    }
  }

  Union uniform(const Node& node, bool is_negated) {
    const Literal literal{.kind = Literal::Kind::uniform,
                          .a = {.is_uniform = true, .idx = idx_.at(node.digest)},
                          .b = {},
                          .bound = is_negated ? 0 : 1};
    return std::vector<Band>{{literal}};
  }

  Union select(const Node& node, bool is_negated) {
    const Node& condition = *node.operands[0];
    if (varies_(condition)) return std::nullopt;
    return either(both(uniform(condition, false), disjunction(*node.operands[1], is_negated)),
                  both(uniform(condition, true), disjunction(*node.operands[2], is_negated)));
  }

  static Union either(Union a, const Union& b) {
    if (!a || !b || a->size() + b->size() > kMaxBands) return std::nullopt;
    a->insert(a->end(), b->begin(), b->end());
    return a;
  }

  static Union both(const Union& a, const Union& b) {
    if (!a || !b || a->size() * b->size() > kMaxBands) return std::nullopt;
    std::vector<Band> product;
    for (const Band& left : *a) {
      for (const Band& right : *b) {
        if (left.size() + right.size() > kMaxLiterals) return std::nullopt;
        Band& band = product.emplace_back(left);
        band.insert(band.end(), right.begin(), right.end());
      }
    }
    return product;
  }

  Union comparison(const Node& node, bool is_negated) {
    if (node.operands[0]->type != ExprType::integer) return std::nullopt;
    const auto a = affine(*node.operands[0]);
    const auto b = affine(*node.operands[1]);
    if (!a || !b) return std::nullopt;
    const auto at_most = [](Operand x, Operand y, std::int64_t bound) {
      return Literal{.kind = Literal::Kind::inequality, .a = x, .b = y, .bound = bound};
    };
    const Literal lt = at_most(*a, *b, -1);
    const Literal le = at_most(*a, *b, 0);
    const Literal gt = at_most(*b, *a, -1);
    const Literal ge = at_most(*b, *a, 0);
    switch (node.op) {
      case Op::lt:
        return std::vector<Band>{{is_negated ? ge : lt}};
      case Op::le:
        return std::vector<Band>{{is_negated ? gt : le}};
      case Op::gt:
        return std::vector<Band>{{is_negated ? le : gt}};
      case Op::ge:
        return std::vector<Band>{{is_negated ? lt : ge}};
      default:
        if ((node.op == Op::eq) != is_negated) return std::vector<Band>{{le, ge}};
        return std::vector<Band>{{lt}, {gt}};
    }
  }

  std::optional<Operand> affine(const Node& node) {
    if (!varies_(node)) return Operand{.is_uniform = true, .idx = idx_.at(node.digest)};
    if (const auto known = step_idx_.find(node.digest); known != step_idx_.end()) {
      return Operand{.is_uniform = false, .idx = known->second};
    }
    Step step{.op = node.op, .variable = node.variable, .a = {}, .b = {}};
    switch (node.op) {
      case Op::variable:
      case Op::add:
      case Op::sub:
      case Op::neg:
        break;
      case Op::mul:
        if (varies_(*node.operands[0]) && varies_(*node.operands[1])) return std::nullopt;
        break;
      default:
        return std::nullopt;
    }
    if (node.type != ExprType::integer) return std::nullopt;
    for (std::size_t i = 0; i < node.operands.size(); ++i) {
      const auto operand = affine(*node.operands[i]);
      if (!operand) return std::nullopt;
      (i == 0 ? step.a : step.b) = *operand;
    }
    if (result_.steps_.size() == kMaxSteps) return std::nullopt;
    const int idx = static_cast<int>(result_.steps_.size());
    result_.steps_.push_back(step);
    step_idx_[node.digest] = idx;
    return Operand{.is_uniform = false, .idx = idx};
  }

  const std::vector<const Node*>& nodes_;
  PositionReads varies_;
  std::unordered_map<expr::Digest, int, expr::DigestHash> idx_;
  std::unordered_map<expr::Digest, int, expr::DigestHash> step_idx_;
  Bands result_;
};

// One row of tiles: coefficients, then inequalities, then extents.
class Bands::Row {
 public:
  Row(const Bands& bands, const std::vector<Interval>& values, Span q, std::int64_t seqlen_kv)
      : bands_(bands), values_(values), q_(q), seqlen_kv_(seqlen_kv) {}

  std::optional<BandExtents> extents() {
    if (!run_steps()) return std::nullopt;
    BandExtents result;
    for (const Band& band : bands_.bands_) {
      const auto extent = extent_of(band);
      if (!extent) return std::nullopt;
      if (extent->touched.is_empty()) continue;
      result.bands[static_cast<std::size_t>(result.num_bands++)] = *extent;
      result.last = edges_;
    }
    return result;
  }

 private:
  bool run_steps() {
    for (std::size_t i = 0; i < bands_.steps_.size(); ++i) {
      const auto affine = run(bands_.steps_[i]);
      if (!affine || !stays_in_32_bits(*affine)) return false;
      steps_[i] = *affine;
    }
    return true;
  }

  std::optional<Affine> run(const Step& step) const {
    if (step.op == Op::variable) {
      return step.variable == Variable::q_idx ? Affine{.q = 1} : Affine{.kv = 1};
    }
    const auto a = value(step.a);
    if (!a) return std::nullopt;
    if (step.op == Op::neg) return scaled(*a, -1);
    const auto b = value(step.b);
    if (!b) return std::nullopt;
    if (step.op == Op::add) return difference(*a, scaled(*b, -1));
    if (step.op == Op::sub) return difference(*a, *b);
    return step.a.is_uniform ? scaled(*b, a->constant) : scaled(*a, b->constant);
  }

  std::optional<Affine> value(Operand operand) const {
    const auto i = static_cast<std::size_t>(operand.idx);
    if (!operand.is_uniform) return steps_[i];
    if (!values_[i].is_point()) return std::nullopt;
    return Affine{.constant = static_cast<std::int64_t>(values_[i].lo)};
  }

  static Affine scaled(const Affine& a, std::int64_t factor) {
    return {.q = a.q * factor, .kv = a.kv * factor, .constant = a.constant * factor};
  }
  static Affine difference(const Affine& a, const Affine& b) {
    return {.q = a.q - b.q, .kv = a.kv - b.kv, .constant = a.constant - b.constant};
  }

  /// Every value of the row: a program's ints wrap, lines do not.
  bool stays_in_32_bits(const Affine& a) const {
    if (std::abs(a.q) > kCoefficientLimit || std::abs(a.kv) > kCoefficientLimit) return false;
    if (std::abs(a.constant) > kConstantLimit) return false;
    const auto [q_lo, q_hi] = std::minmax({a.q * q_.begin, a.q * (q_.end - 1)});
    const auto [kv_lo, kv_hi] = std::minmax({std::int64_t{0}, a.kv * (seqlen_kv_ - 1)});
    constexpr std::int64_t kLeast = std::numeric_limits<std::int32_t>::min();
    constexpr std::int64_t kGreatest = std::numeric_limits<std::int32_t>::max();
    return q_lo + kv_lo + a.constant >= kLeast && q_hi + kv_hi + a.constant <= kGreatest;
  }

  /// Leaves the band's edges in edges_.
  std::optional<BandExtent> extent_of(const Band& band) {
    edges_ = {.rows = q_,
              .lower = Envelope(Line{.slope = 0, .offset = 0}),
              .minus_upper = Envelope(Line{.slope = 0, .offset = -seqlen_kv_})};
    for (const Literal& literal : band) {
      const auto a = value(literal.a);
      if (!a) return std::nullopt;
      if (literal.kind == Literal::Kind::uniform) {
        if (a->constant != literal.bound) return BandExtent{};
        continue;
      }
      const auto b = value(literal.b);
      if (!b) return std::nullopt;
      const Affine d = difference(*a, *b);  // d <= bound
      if (d.kv == 0) {
        edges_.rows = restrict(edges_.rows, d.q, literal.bound - d.constant);
      } else if (d.kv == 1) {
        edges_.minus_upper.add({.slope = d.q, .offset = d.constant - literal.bound - 1});
      } else if (d.kv == -1) {
        edges_.lower.add({.slope = d.q, .offset = d.constant - literal.bound});
      } else {
        return std::nullopt;
      }
    }
    return extent_between_edges();
  }

  BandExtent extent_between_edges() {
    BandExtent extent;
    auto& [rows, lower, minus_upper] = edges_;
    for (const Line& low : lower) {
      for (const Line& minus_up : minus_upper) {
        rows = restrict(rows, low.slope + minus_up.slope, -low.offset - minus_up.offset - 1);
        // Neighbouring rows' ranges touch while both ends move by at most one key per row.
        extent.is_exact =
            extent.is_exact && std::abs(low.slope) <= 1 && std::abs(minus_up.slope) <= 1;
      }
    }
    if (rows.is_empty()) return {};
    extent.touched = {.begin = lower.least(rows), .end = -minus_upper.least(rows)};
    if (rows == q_)
      extent.full = {.begin = lower.greatest(rows), .end = -minus_upper.greatest(rows)};
    return extent;
  }

  const Bands& bands_;
  const std::vector<Interval>& values_;
  Span q_;
  std::int64_t seqlen_kv_;
  Steps steps_;
  BandEdges edges_;
};

std::optional<Bands> Bands::compile(const std::vector<const Node*>& nodes) {
  return Compiler(nodes).compile();
}

std::optional<BandExtents> Bands::extents(const std::vector<Interval>& values, Span q,
                                          std::int64_t seqlen_kv) const {
  return Row(*this, values, q, seqlen_kv).extents();
}

}  // namespace fovea::mask
