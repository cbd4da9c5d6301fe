#include "mask/word_arguments.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.hpp"

namespace fovea::mask {

void check_tensor(const TensorView& view, const TensorRule& rule) {
  const std::string word(rule.word);
  if (!view) {
    invalid(word, fmt::format("{} is missing; expected a tensor, {}", rule.argument, rule.shape));
  }
  if (std::ranges::find(rule.ranks, view.rank()) == rule.ranks.end()) {
    invalid(word, fmt::format("{} is {}; expected rank {}, {}", rule.argument,
                              to_string(view.spec()), fmt::join(rule.ranks, " or "), rule.shape));
  }
  if (std::ranges::find(rule.dtypes, view.dtype()) == rule.dtypes.end()) {
    std::vector<std::string_view> names;
    for (const Dtype dtype : rule.dtypes) names.push_back(name(dtype));
    invalid(word, fmt::format("{} has dtype {}; expected {}", rule.argument, name(view.dtype()),
                              fmt::join(names, " or ")));
  }
}

void check_at_least(std::string_view word, std::string_view argument, std::int64_t value,
                    std::int64_t least, std::string_view hint) {
  if (value >= least) return;
  invalid(std::string(word),
          fmt::format("{} is {}; expected >= {}{}", argument, value, least, hint));
}

Captured capture_for(std::string_view word, std::string name, const TensorView& view,
                     std::initializer_list<Axis> axes) {
  CapturedTensor captured{.name = std::move(name), .view = view, .word = word};
  std::ranges::copy(axes, captured.axes.begin());
  return Captured(std::move(captured));
}

Expr load_broadcast(std::string_view word, std::string name, const TensorView& view,
                    const PairIndex& pair) {
  const Arguments x = arguments();
  const Expr index_of[] = {x.batch, x.q_head, pair.q, pair.kv};
  const Axis axis_of[] = {Axis::batch, Axis::q_head, pair.axis_q, pair.axis_kv};
  const int num_left_out = 4 - view.rank();
  CapturedTensor captured{.name = std::move(name), .view = view, .word = word};
  std::vector<Expr> indices;
  indices.reserve(static_cast<std::size_t>(view.rank()));
  for (int dim = 0; dim < view.rank(); ++dim) {
    const bool is_one = view.size(dim) == 1;
    indices.push_back(is_one ? Expr(0) : index_of[num_left_out + dim]);
    captured.axes[static_cast<std::size_t>(dim)] = is_one ? Axis::one : axis_of[num_left_out + dim];
  }
  return Captured(std::move(captured)).load(std::move(indices));
}

}  // namespace fovea::mask
