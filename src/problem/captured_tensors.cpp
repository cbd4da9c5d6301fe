#include "problem/captured_tensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>

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

}  // namespace

void check_captured_tensor(const ForwardProblem& problem, const CapturedTensor& tensor,
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

void check_captured_tensors(const ForwardProblem& problem, const ScoreMod& score,
                            const MaskMod& mask, const TensorChecks& checks) {
  for (const Captures* captures : {&score.captures(), &mask.captures()}) {
    for (const CapturedTensor& tensor : captures->tensors)
      check_captured_tensor(problem, tensor, checks);
  }
}

}  // namespace fovea
