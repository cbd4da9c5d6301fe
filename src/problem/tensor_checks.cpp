#include "problem/tensor_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "core/shape.hpp"
#include "problem/forward.hpp"
#include "problem/strided_overlap.hpp"

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

void TensorChecks::check_float_spec(std::string_view name, const TensorSpec& spec,
                                    const TensorSpec& like) const {
  if (!is_float(spec.dtype))
    refuse(fmt::format("{} is {}; expected f32, f16 or bf16", name, fovea::name(spec.dtype)));
  if (!std::ranges::equal(shape_of(spec), shape_of(like))) {
    refuse(fmt::format("{} is {}; expected {}", name, spec.rank == 0 ? "missing" : to_string(spec),
                       to_string(make_spec(spec.dtype, shape_of(like)))));
  }
  check_same_device(name, spec, like.device);
}

void TensorChecks::check_same_device(std::string_view name, const TensorSpec& spec,
                                     Device device) const {
  if (spec.device == device) return;
  refuse(fmt::format("{} lives on {} but q on {}; expected one device", name,
                     to_string(spec.device), to_string(device)));
}

void TensorChecks::check_memory(const NamedTensor& tensor) const {
  const TensorSpec& spec = tensor.view.spec();
  if (spec.device != device_) {
    refuse(fmt::format("{} lives on {}; expected memory of {}, the device of the plan", tensor.name,
                       to_string(spec.device), to_string(device_)));
  }
  check_reach(tensor);
  if (std::ranges::count(shape_of(spec), 0) > 0) return;
  if (tensor.view.data() == nullptr && needs_data_)
    refuse(fmt::format("{} has no data; expected a pointer", tensor.name));
  if (reinterpret_cast<std::uintptr_t>(tensor.view.data()) % size_bytes(spec.dtype) != 0) {
    refuse(fmt::format("{} is not aligned to its elements of {} bytes", tensor.name,
                       size_bytes(spec.dtype)));
  }
  if (!tensor.is_output) return;
  if (!tensor.view.is_mutable() && needs_data_)
    refuse(fmt::format("{} is read-only; expected a view of writable memory", tensor.name));
  check_distinct_elements(tensor);
}

/// What is computed with offsets and addresses after these checks cannot overflow.
void TensorChecks::check_reach(const NamedTensor& tensor) const {
  const TensorSpec& spec = tensor.view.spec();
  for (int dim = 0; dim < spec.rank; ++dim) {
    if (tensor.view.size(dim) < 0) {
      refuse(fmt::format("{} has extent {} in dimension {}; expected >= 0", tensor.name,
                         tensor.view.size(dim), dim));
    }
  }
  const std::optional<ByteReach> reach = byte_reach(spec);
  const auto data = reinterpret_cast<std::uintptr_t>(tensor.view.data());
  if (reach && data >= static_cast<std::uintptr_t>(-reach->low) &&
      data <=
          std::numeric_limits<std::uintptr_t>::max() - static_cast<std::uintptr_t>(reach->high)) {
    return;
  }
  refuse(
      fmt::format("{} is {}; expected strides that keep every element within 2^60 bytes of the "
                  "first, and inside the address space",
                  tensor.name, to_string(spec)));
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

void check_packed_offsets(const PackedOffsets& offsets, const TensorChecks& checks) {
  const auto& [name, cu, batch, total, longest, longest_name] = offsets;
  if (!is_index(cu.dtype()) || cu.rank() != 1 || cu.size(0) != batch + 1) {
    checks.refuse(fmt::format("{} is {}; expected i32 or i64 [{}]", name,
                              cu ? to_string(cu.spec()) : "missing", batch + 1));
  }
  checks.check_memory({name, cu});
  if (!checks.is_host()) return;
  std::int64_t before = cu_seqlen(cu, 0);
  if (before != 0) checks.refuse(fmt::format("{} starts at {}; expected 0", name, before));
  for (std::int64_t i = 1; i <= batch; ++i) {
    const std::int64_t end = cu_seqlen(cu, i);
    if (end < before) {
      checks.refuse(fmt::format("{}[{}] is {} after {}; expected offsets that never decrease", name,
                                i, end, before));
    }
    if (end - before > longest) {
      checks.refuse(fmt::format("{} gives sequence {} a length of {}; expected at most {}, {}",
                                name, i - 1, end - before, longest, longest_name));
    }
    before = end;
  }
  if (before > total) {
    checks.refuse(
        fmt::format("{} ends at {}; expected at most {}, the packed rows", name, before, total));
  }
}

void OverlapCheck::add_input(std::string_view name, const TensorView& view) {
  if (view) add(inputs_, name, view);
}

void OverlapCheck::add_output(std::string_view name, const TensorView& view) {
  if (view) add(outputs_, name, view);
}

void OverlapCheck::add_output(std::string_view name, std::span<const std::byte> bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  if (!bytes.empty())
    outputs_.push_back({name, begin, begin + bytes.size(), nullptr, bytes.data()});
}

void OverlapCheck::add(std::vector<Range>& ranges, std::string_view name, const TensorView& view) {
  const std::optional<ByteReach> reach = byte_reach(view.spec());
  FOVEA_ASSERT(reach.has_value());
  if (reach->low == reach->high) return;
  const auto data = reinterpret_cast<std::uintptr_t>(view.data());
  ranges.push_back({name, data + static_cast<std::uintptr_t>(reach->low),
                    data + static_cast<std::uintptr_t>(reach->high), &view, nullptr});
}

void OverlapCheck::add_inputs(const AttentionForward& call) {
  add_input("q", call.q);
  add_input("k", call.k);
  add_input("v", call.v);
  add_input("sinks", call.sinks);
  add_input("q_scale", call.q_scale);
  add_input("k_scale", call.k_scale);
  add_input("v_scale", call.v_scale);
  add_input("cu_seqlens_q", call.cu_seqlens_q);
  add_input("cu_seqlens_kv", call.cu_seqlens_kv);
  add_input("dropout_seed", call.dropout_seed);
  add_input("dropout_offset", call.dropout_offset);
  add_input("dropout_places", call.dropout_places);
  add_captured(call.score, call.mask);
}

void OverlapCheck::add_captured(const ScoreMod& score, const MaskMod& mask) {
  for (const Captures* captures : {&score.captures(), &mask.captures()}) {
    // Of rank 0, too, which is no sign of a missing tensor here.
    for (const CapturedTensor& tensor : captures->tensors) add(inputs_, tensor.name, tensor.view);
  }
}

bool OverlapCheck::overlap(const Range& a, const Range& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  const auto shown = [](const Range& range) {
    if (range.view != nullptr) return *range.view;
    const std::array shape{static_cast<std::int64_t>(range.end - range.begin)};
    return TensorView(range.bytes, make_spec(Dtype::u8, shape));
  };
  return may_share_bytes(shown(a), shown(b));
}

void OverlapCheck::refuse_overlap(const TensorChecks& checks) const {
  const auto refuse = [&](const Range& a, const Range& b) {
    if (overlap(a, b))
      checks.refuse(fmt::format("{} overlaps {}; expected memory of its own", a.name, b.name));
  };
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    for (const Range& input : inputs_) refuse(outputs_[i], input);
    for (std::size_t j = 0; j < i; ++j) refuse(outputs_[i], outputs_[j]);
  }
}

}  // namespace fovea
