#include "cpu/double_backward/parameter_sums.hpp"

#include <algorithm>

#include "core/scalar_io.hpp"

namespace fovea::cpu {
namespace {

constexpr std::int64_t kMostTasks = 64;      // work for as many threads
constexpr std::int64_t kMostSums = 4 << 20;  // of all tasks together: 32 MB

std::size_t num_elements(const TensorView& view) {
  return view ? static_cast<std::size_t>(view.spec().num_elements()) : 0;
}

/// Offset of an element, counted row-major, by the strides of the view.
std::int64_t offset_of(const TensorView& view, std::int64_t element) {
  std::int64_t offset = 0;
  for (int dim = view.rank() - 1; dim >= 0; --dim) {
    offset += element % view.size(dim) * view.stride(dim);
    element /= view.size(dim);
  }
  return offset;
}

}  // namespace

ParameterSums::ParameterSums(const AttentionDoubleBackward& args, std::int64_t num_items)
    : args_(args), begin_{0, num_elements(args.grad_sinks)}, num_tasks_(num_items) {
  for (const CapturedTensor& each : args.grad_captured)
    begin_.push_back(begin_.back() + num_elements(each.view));
  const auto count = static_cast<std::int64_t>(begin_.back());
  if (count == 0) return;
  const std::int64_t most = std::clamp<std::int64_t>(kMostSums / count, 1, kMostTasks);
  num_tasks_ = std::min(num_items, most);
  sums_.resize(static_cast<std::size_t>(num_tasks_ * count));
}

std::span<double> ParameterSums::sinks(std::int64_t task) {
  return std::span(sums_).subspan(static_cast<std::size_t>(task) * begin_.back(), begin_[1]);
}

std::span<double> ParameterSums::captured(std::int64_t task, std::size_t index) {
  const std::size_t begin = begin_[index + 1];
  return std::span(sums_).subspan(static_cast<std::size_t>(task) * begin_.back() + begin,
                                  begin_[index + 2] - begin);
}

void ParameterSums::write() const {
  write(args_.grad_sinks, 0);
  for (std::size_t i = 0; i < args_.grad_captured.size(); ++i)
    write(args_.grad_captured[i].view, begin_[i + 1]);
}

void ParameterSums::write(const TensorView& view, std::size_t begin) const {
  auto* const data = view ? static_cast<std::byte*>(view.mutable_data()) : nullptr;
  for (std::size_t i = 0; i < num_elements(view); ++i) {
    double sum = 0;
    for (std::size_t at = begin + i; at < sums_.size(); at += begin_.back()) sum += sums_[at];
    store_scalar(data, view.dtype(), offset_of(view, static_cast<std::int64_t>(i)),
                 static_cast<float>(sum));
  }
}

}  // namespace fovea::cpu
