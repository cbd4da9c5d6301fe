#include "parallel/engine/places.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "expr/node.hpp"
#include "expr/passes.hpp"

namespace fovea::parallel {
namespace {

using expr::NodePtr;
using expr::Op;
using expr::Variable;

/// Names that no capture of the program has.
class Slots {
 public:
  explicit Slots(const Captures& captures) : captures_(captures) {}

  NodePtr number(std::string_view name, std::int64_t value) const {
    return expr::make_scalar(
        std::make_shared<const CapturedScalar>(CapturedScalar::of(fresh(name), value)));
  }
  NodePtr load(std::string_view name, const TensorView& table, NodePtr index) const {
    return expr::make_load(
        std::make_shared<const CapturedTensor>(CapturedTensor{fresh(name), table}),
        {std::move(index)});
  }

 private:
  std::string fresh(std::string_view name) const {
    std::string result(name);
    const auto is_taken = [&] {
      const auto has_name = [&](const auto& capture) { return capture.name == result; };
      return std::ranges::any_of(captures_.tensors, has_name) ||
             std::ranges::any_of(captures_.scalars, has_name);
    };
    while (is_taken()) result += '_';
    return result;
  }

  const Captures& captures_;
};

NodePtr behind(const Slots& slots, std::string_view name, std::int64_t first, Variable variable) {
  return expr::make(Op::add, {expr::make_variable(variable), slots.number(name, first)});
}

NodePtr at_place(const Slots& slots, const Places& places, Variable variable, bool is_q) {
  if (places.ranges.empty()) return nullptr;
  if (places.ranges.size() == 1)
    return behind(slots, is_q ? "first_q_idx" : "first_kv_idx", places.ranges[0].begin, variable);
  return slots.load(is_q ? "q_places" : "kv_places", places.table, expr::make_variable(variable));
}

/// What a variable of the whole is in the call; null: itself.
NodePtr in_call(const Slots& slots, const Part& part, Variable variable) {
  switch (variable) {
    case Variable::q_idx:
      return at_place(slots, part.q, variable, true);
    case Variable::kv_idx:
      return at_place(slots, part.kv, variable, false);
    case Variable::seqlen_q:
    case Variable::seqlen_kv:
      return slots.number("whole_seqlen", part.seqlen);
    case Variable::q_head:
      return part.first_q_head == 0 ? nullptr
                                    : behind(slots, "first_q_head", part.first_q_head, variable);
    case Variable::kv_head:
      return part.first_kv_head == 0 ? nullptr
                                     : behind(slots, "first_kv_head", part.first_kv_head, variable);
    default:
      return nullptr;
  }
}

/// page · world_size + rank instead of page: the place of a key of this rank's.
NodePtr in_call(const Slots& slots, const PagesOfRank& pages, Variable variable) {
  if (variable == Variable::seqlen_kv)
    return slots.load("whole_seqlens", pages.seqlens, expr::make_variable(Variable::batch));
  if (variable != Variable::kv_idx) return nullptr;
  const NodePtr kv_idx = expr::make_variable(variable);
  const NodePtr page_size = slots.number("page_size", pages.page_size);
  const NodePtr page =
      expr::make(Op::add, {expr::make(Op::mul, {expr::make(Op::floor_div, {kv_idx, page_size}),
                                                slots.number("num_ranks", pages.world_size)}),
                           slots.number("page_rank", pages.rank)});
  return expr::make(
      Op::add, {expr::make(Op::mul, {page, page_size}), expr::make(Op::mod, {kv_idx, page_size})});
}

template <typename Where>
Expr placed_formula(const Program& program, const Where& where) {
  const Slots slots(program.captures());
  return Expr(expr::rewrite(program.expr().shared(), [&](const NodePtr& node) -> NodePtr {
    if (node->op == Op::load) return expr::without_axes(node);
    return node->op == Op::variable ? in_call(slots, where, node->variable) : nullptr;
  }));
}

}  // namespace

OwnedPlaces places_of(std::span<const TokenRange> ranges, const Memory& memory) {
  OwnedPlaces result{.places = {.ranges = ranges}};
  if (ranges.size() <= 1) return result;
  std::vector<std::int32_t> values;
  append_tokens(values, ranges);
  result.table = memory.of_values(values);
  result.places.table = result.table.view;
  return result;
}

void append_tokens(std::vector<std::int32_t>& tokens, std::span<const TokenRange> ranges) {
  for (const TokenRange& range : ranges) {
    for (std::int64_t token = range.begin; token < range.end; ++token)
      tokens.push_back(static_cast<std::int32_t>(token));
  }
}

const TokenRange* range_out_of_step(std::span<const TokenRange> ranges) {
  std::int64_t at = 0;
  for (const TokenRange& range : ranges) {
    if (at % 4 != 0 || range.begin % 4 != 0) return &range;
    at += range.size();
  }
  return nullptr;
}

ScoreMod placed(const ScoreMod& score, const Part& part) {
  return score.is_identity() ? score : ScoreMod(placed_formula(score, part));
}

MaskMod placed(const MaskMod& mask, const Part& part) {
  return mask.is_all_visible() ? mask : MaskMod(placed_formula(mask, part));
}

std::int64_t PagesOfRank::own(std::int64_t seqlen) const {
  const std::int64_t full = seqlen / page_size;
  const std::int64_t rest = full % world_size == rank ? seqlen % page_size : 0;
  return (full + world_size - 1 - rank) / world_size * page_size + rest;
}

ScoreMod placed(const ScoreMod& score, const PagesOfRank& pages) {
  return score.is_identity() ? score : ScoreMod(placed_formula(score, pages));
}

MaskMod placed(const MaskMod& mask, const PagesOfRank& pages) {
  return mask.is_all_visible() ? mask : MaskMod(placed_formula(mask, pages));
}

}  // namespace fovea::parallel
