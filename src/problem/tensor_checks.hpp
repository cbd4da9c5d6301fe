// What every operation asks of the tensors that a call brings: shape, memory, overlap. Which tensors those are is the
// business of each operation's own door (arguments.cpp for a forward call).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/tensor.hpp"

namespace fovea {

/// The shape of lse for queries or outputs: [batch, heads, rows], packed [heads, rows].
std::vector<std::int64_t> lse_shape(const TensorView& rows);

/// One argument by its name in the call.
struct NamedTensor {
  std::string_view name;
  const TensorView& view;
  bool is_output = false;
};

/// Refuses in the name of `where`, the function that the user called, what does not live on `device`.
class TensorChecks {
 public:
  explicit TensorChecks(std::string_view where, Device device = Device::cpu())
      : where_(where), device_(device) {}

  /// Whether the host can read what tensors hold.
  bool is_host() const { return device_.kind == Device::Kind::cpu; }

  [[noreturn]] void refuse(const std::string& message) const;

  /// Dtype, shape and memory.
  void check(const NamedTensor& tensor, Dtype dtype, std::span<const std::int64_t> shape) const;
  /// As check, for any of f32, f16 and bf16.
  void check_float(const NamedTensor& tensor, std::span<const std::int64_t> shape) const;

  /// On the device, aligned to its elements; an output also writable, each element in its own place.
  void check_memory(const NamedTensor& tensor) const;

 private:
  void check_shape(const NamedTensor& tensor, Dtype dtype,
                   std::span<const std::int64_t> shape) const;
  void check_distinct_elements(const NamedTensor& tensor) const;

  std::string where_;
  Device device_;
};

/// Outputs may overlap neither inputs nor each other.
class OverlapCheck {
 public:
  /// What is not given, or has no elements, takes no part.
  void add_input(std::string_view name, const TensorView& view);
  void add_output(std::string_view name, const TensorView& view);
  void add_output(std::string_view name, std::span<const std::byte> bytes);

  void refuse_overlap(const TensorChecks& door) const;

 private:
  struct Range {
    std::string_view name;
    const std::byte* begin;
    const std::byte* end;
  };

  static void add(std::vector<Range>& ranges, std::string_view name, const TensorView& view);

  std::vector<Range> inputs_, outputs_;
};

}  // namespace fovea
