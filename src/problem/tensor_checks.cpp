#include "problem/tensor_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "core/check.hpp"

namespace fovea {

std::vector<std::int64_t> lse_shape(const TensorView& rows) {
  if (rows.rank() == 3) return {rows.size(1), rows.size(0)};
  return {rows.size(0), rows.size(2), rows.size(1)};
}

void TensorChecks::refuse(const std::string& message) const { invalid(where_, message); }

void TensorChecks::check(const NamedTensor& tensor, Dtype dtype,
                         std::span<const std::int64_t> shape) const {
  check_shape(tensor, dtype, shape);
  check_memory(tensor);
}

void TensorChecks::check_float(const NamedTensor& tensor,
                               std::span<const std::int64_t> shape) const {
  const Dtype dtype = tensor.view.dtype();
  if (!is_float(dtype))
    refuse(fmt::format("{} is {}; expected f32, f16 or bf16", tensor.name, name(dtype)));
  check(tensor, dtype, shape);
}

void TensorChecks::check_shape(const NamedTensor& tensor, Dtype dtype,
                               std::span<const std::int64_t> shape) const {
  const TensorSpec& spec = tensor.view.spec();
  const std::span got(spec.shape.data(), static_cast<std::size_t>(spec.rank));
  if (spec.dtype == dtype && std::ranges::equal(got, shape)) return;
  refuse(fmt::format("{} is {}; expected {}", tensor.name,
                     spec.rank == 0 ? "missing" : to_string(spec),
                     to_string(make_spec(dtype, shape))));
}

void TensorChecks::check_memory(const NamedTensor& tensor) const {
  const TensorSpec& spec = tensor.view.spec();
  if (spec.device != device_) {
    refuse(fmt::format("{} lives on {}; expected memory of {}, the device of the plan", tensor.name,
                       to_string(spec.device), to_string(device_)));
  }
  if (spec.num_elements() == 0) return;
  if (tensor.view.data() == nullptr)
    refuse(fmt::format("{} has no data; expected a pointer", tensor.name));
  if (reinterpret_cast<std::uintptr_t>(tensor.view.data()) % size_bytes(spec.dtype) != 0) {
    refuse(fmt::format("{} is not aligned to its elements of {} bytes", tensor.name,
                       size_bytes(spec.dtype)));
  }
  if (!tensor.is_output) return;
  if (!tensor.view.is_mutable())
    refuse(fmt::format("{} is read-only; expected a view of writable memory", tensor.name));
  check_distinct_elements(tensor);
}

/// An output whose strides let two indices meet would be written twice.
void TensorChecks::check_distinct_elements(const NamedTensor& tensor) const {
  const TensorView& view = tensor.view;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // |stride|, extent
  for (int i = 0; i < view.rank(); ++i) {
    if (view.size(i) > 1) dims.emplace_back(std::abs(view.stride(i)), view.size(i));
  }
  std::ranges::sort(dims);
  std::int64_t reach = 0;
  for (const auto& [stride, extent] : dims) {
    if (stride <= reach) {
      refuse(fmt::format("{} is {}; expected strides that give every element its own place",
                         tensor.name, to_string(view.spec())));
    }
    reach += stride * (extent - 1);
  }
}

void OverlapCheck::add_input(std::string_view name, const TensorView& view) {
  add(inputs_, name, view);
}

void OverlapCheck::add_output(std::string_view name, const TensorView& view) {
  add(outputs_, name, view);
}

void OverlapCheck::add_output(std::string_view name, std::span<const std::byte> bytes) {
  if (!bytes.empty()) outputs_.push_back({name, bytes.data(), bytes.data() + bytes.size()});
}

void OverlapCheck::add(std::vector<Range>& ranges, std::string_view name, const TensorView& view) {
  if (!view || view.spec().num_elements() == 0) return;
  const auto element = static_cast<std::int64_t>(size_bytes(view.dtype()));
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (int i = 0; i < view.rank(); ++i) {
    const std::int64_t reach = view.stride(i) * (view.size(i) - 1) * element;
    (reach < 0 ? low : high) += reach;
  }
  const auto* data = static_cast<const std::byte*>(view.data());
  ranges.push_back({name, data + low, data + high + element});
}

void OverlapCheck::refuse_overlap(const TensorChecks& door) const {
  const auto refuse = [&](const Range& a, const Range& b) {
    if (a.begin < b.end && b.begin < a.end) {
      door.refuse(fmt::format("{} overlaps {}; expected memory of its own", a.name, b.name));
    }
  };
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    for (const Range& input : inputs_) refuse(outputs_[i], input);
    for (std::size_t j = 0; j < i; ++j) refuse(outputs_[i], outputs_[j]);
  }
}

}  // namespace fovea
