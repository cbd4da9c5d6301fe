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

Expr load_broadcast(std::string_view name, const TensorView& view, const PairIndex& pair) {
  const Arguments x = arguments();
  const Expr axes[] = {x.batch, x.q_head, pair.q, pair.kv};
  const int num_left_out = 4 - view.rank();
  std::vector<Expr> indices;
  indices.reserve(static_cast<std::size_t>(view.rank()));
  for (int dim = 0; dim < view.rank(); ++dim) {
    indices.push_back(view.size(dim) == 1 ? Expr(0) : axes[num_left_out + dim]);
  }
  return capture(std::string(name), view).load(std::move(indices));
}

}  // namespace fovea::mask
