// A tensor in memory of its own, where every byte that is not an element is poison: a NaN of any
// float dtype. Reading it spoils a result, writing it is noticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "fovea/tensor.hpp"

namespace fovea::testing {

class GuardedTensor {
 public:
  GuardedTensor() = default;  // a tensor that is not given
  /// `offset` elements are left free after the 64-byte aligned start of memory: 1 makes every
  /// vector load unaligned.
  explicit GuardedTensor(const TensorSpec& spec, std::int64_t offset = 0);
  GuardedTensor(GuardedTensor&&) = default;  // views stay valid: they point at the heap
  GuardedTensor& operator=(GuardedTensor&&) = default;
  GuardedTensor(const GuardedTensor&) = delete;
  GuardedTensor& operator=(const GuardedTensor&) = delete;
  ~GuardedTensor() = default;

  TensorView view() const { return inputs_view_; }
  TensorView mutable_view() { return outputs_view_; }

  /// Sets every element from its row-major index; elements that share memory keep the last value.
  void fill(const std::function<double(std::int64_t)>& value);
  void set(std::int64_t element_offset, double value);
  /// Makes every element NaN: what an output must never keep.
  void poison();

  /// Remembers all bytes as they are now, for the two questions below.
  void seal() { sealed_ = bytes_; }
  bool is_unchanged() const { return bytes_ == sealed_; }
  bool has_intact_guards() const;

 private:
  std::vector<std::byte> bytes_, sealed_;
  std::size_t origin_ = 0;  // of element 0, in bytes_
  TensorView inputs_view_, outputs_view_;
};

/// Calls f with the offset, in elements, of every element in row-major order.
void for_each_offset(const TensorSpec& spec, const std::function<void(std::int64_t)>& f);

}  // namespace fovea::testing
