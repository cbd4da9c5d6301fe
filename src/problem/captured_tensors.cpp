#include "problem/captured_tensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/shape.hpp"

namespace fovea {
namespace {

bool fits_32_bits(std::int64_t value) { return value == static_cast<std::int32_t>(value); }

/// Without a branch for each element, so that the compiler makes vector code of the contiguous case.
bool all_fit_32_bits(const std::int64_t* first, std::int64_t count, std::int64_t stride) {
  std::uint64_t beyond = 0;
  const auto add = [&beyond](std::int64_t value) {
    beyond |= (static_cast<std::uint64_t>(value) + 0x80000000U) >> 32U;
  };
  if (stride == 1) {
    for (std::int64_t i = 0; i < count; ++i) add(first[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) add(first[i * stride]);
  }
  return beyond == 0;
}

struct Element {
  std::array<std::int64_t, kMaxRank> index{};
  std::int64_t value = 0;
};

/// The first element that does not fit, in the order of indices. Each place in memory is looked at once.
class Scan {
 public:
  explicit Scan(const TensorView& view)
      : view_(view), data_(static_cast<const std::int64_t*>(view.data())) {}

  std::optional<Element> run() {
    if (view_.rank() == 0) return look_at_one();
    if (!look(0, 0)) return std::nullopt;
    return found_;
  }

 private:
  std::optional<Element> look_at_one() const {
    if (fits_32_bits(*data_)) return std::nullopt;
    return Element{.value = *data_};
  }

  std::int64_t count(int dim) const {
    return view_.stride(dim) == 0 ? std::min<std::int64_t>(1, view_.size(dim)) : view_.size(dim);
  }

  bool look(int dim, std::int64_t offset) {
    if (dim == view_.rank() - 1 && all_fit_32_bits(data_ + offset, count(dim), view_.stride(dim)))
      return false;
    for (std::int64_t i = 0; i < count(dim); ++i) {
      const std::int64_t at = offset + i * view_.stride(dim);
      found_.index[static_cast<std::size_t>(dim)] = i;
      if (dim < view_.rank() - 1) {
        if (look(dim + 1, at)) return true;
      } else if (!fits_32_bits(data_[at])) {
        found_.value = data_[at];
        return true;
      }
    }
    return false;
  }

  const TensorView& view_;
  const std::int64_t* data_;
  Element found_;
};

void check_ints(const CapturedTensor& tensor, const TensorChecks& checks) {
  const auto found = Scan(tensor.view).run();
  if (!found) return;
  const std::span index(found->index.data(), static_cast<std::size_t>(tensor.view.rank()));
  checks.refuse(fmt::format(
      "captured '{}' holds {} at [{}]; expected integers of 32 bits, or as_words32 of the tensor "
      "where its bits are meant",
      tensor.name, found->value, fmt::join(index, ", ")));
}

/// What tensor_slot has in place of extents.
constexpr std::int64_t kNoExtent = std::numeric_limits<std::int32_t>::max();

struct Room {
  std::optional<std::int64_t> extent;  // none: any
  bool is_exact = false;
  bool may_be_shared = true;

  bool holds(std::int64_t given) const {
    if (!extent || given == *extent || given == kNoExtent) return true;
    return (given == 1 && may_be_shared) || (given > *extent && !is_exact);
  }
};

std::optional<std::int64_t> longer(std::optional<std::int64_t> a, std::optional<std::int64_t> b) {
  return a && b ? std::max(a, b) : std::nullopt;
}

Room room(Axis axis, const IndexCounts& counts) {
  const auto words = [](std::optional<std::int64_t> bits) {
    return bits ? std::optional((*bits + 31) / 32) : std::nullopt;
  };
  switch (axis) {
    case Axis::any:
      return {};
    case Axis::one:
      return {.extent = 1, .is_exact = true};
    case Axis::batch:
      return {counts.batch};
    case Axis::q_head:
      return {.extent = counts.num_heads_q, .is_exact = true};
    case Axis::q_idx:
      return {counts.seqlen_q};
    case Axis::kv_idx:
      return {counts.seqlen_kv};
    case Axis::q_or_kv_idx:
      return {longer(counts.seqlen_q, counts.seqlen_kv)};
    case Axis::bits_of_keys:
      return {.extent = words(counts.seqlen_q), .may_be_shared = false};
    case Axis::seqlen_offset:
      return {.extent = counts.batch + 1, .may_be_shared = false};
    case Axis::packed_q:
      return {.extent = counts.total_q, .may_be_shared = false};
    case Axis::packed_kv:
      return {.extent = counts.total_kv, .may_be_shared = false};
    case Axis::packed_q_or_kv:
      return {.extent = longer(counts.total_q, counts.total_kv), .may_be_shared = false};
  }
  return {};
}

void check_memory_of(const ForwardProblem& problem, const CapturedTensor& tensor,
                     const TensorChecks& checks) {
  checks.check_memory({tensor.name, tensor.view});
  const bool is_empty = std::ranges::count(shape_of(tensor.view), 0) > 0;
  if (is_empty && problem.has_positions()) {
    checks.refuse(fmt::format("captured '{}' is {}; expected elements to read", tensor.name,
                              to_string(tensor.view.spec())));
  }
  if (checks.is_host() && tensor.view.dtype() == Dtype::i64 && !is_empty)
    check_ints(tensor, checks);
}

}  // namespace

IndexCounts index_counts(const ForwardProblem& f) {
  IndexCounts counts{.batch = f.num_sequences, .num_heads_q = f.num_heads_q};
  if (f.is_varlen) {
    counts.total_q = f.total_q;
    if (!f.is_cached) counts.total_kv = f.problem.k.shape[0];
  } else {
    if (!f.problem.seqlen_q) counts.seqlen_q = f.seqlen_q;
    if (!f.problem.seqlen_kv) counts.seqlen_kv = f.seqlen_kv;
  }
  return counts;
}

void check_extents(const CapturedTensor& tensor, const IndexCounts& counts,
                   const TensorChecks& checks) {
  if (tensor.word.empty()) return;
  const std::span axes(tensor.axes.data(), static_cast<std::size_t>(tensor.view.rank()));
  bool fits = true;
  for (std::size_t dim = 0; dim < axes.size(); ++dim)
    fits = fits && room(axes[dim], counts).holds(tensor.view.size(static_cast<int>(dim)));
  if (fits) return;
  std::vector<std::string> expected;
  bool has_shared = false;
  for (const Axis axis : axes) {
    const Room of_axis = room(axis, counts);
    expected.push_back(of_axis.extent ? std::to_string(*of_axis.extent) : "any");
    has_shared = has_shared || of_axis.may_be_shared;
  }
  checks.refuse(fmt::format("{}{} is {}; expected [{}], of which all but heads may be more{}",
                            tensor.word == tensor.name ? "" : fmt::format("{}: ", tensor.word),
                            tensor.name, to_string(tensor.view.spec()), fmt::join(expected, ", "),
                            has_shared ? ", or 1 where all share an element" : ""));
}

void check_extents(const ScoreMod& score, const MaskMod& mask, const IndexCounts& counts,
                   const TensorChecks& checks) {
  for (const Captures* captures : {&score.captures(), &mask.captures()}) {
    for (const CapturedTensor& tensor : captures->tensors) check_extents(tensor, counts, checks);
  }
}

void check_captured_tensor(const ForwardProblem& problem, const CapturedTensor& tensor,
                           const TensorChecks& checks) {
  if (problem.has_positions()) check_extents(tensor, index_counts(problem), checks);
  check_memory_of(problem, tensor, checks);
}

void check_captured_tensors(const ForwardProblem& problem, const ScoreMod& score,
                            const MaskMod& mask, const IndexCounts& counts,
                            const TensorChecks& checks) {
  if (problem.has_positions()) check_extents(score, mask, counts, checks);
  for (const Captures* captures : {&score.captures(), &mask.captures()}) {
    for (const CapturedTensor& tensor : captures->tensors) check_memory_of(problem, tensor, checks);
  }
}

}  // namespace fovea
