// What every operation asks of the tensors that a call brings: shape, memory, overlap. Which tensors those are is the
// business of each operation's own file (arguments.cpp for a forward call).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/dtype.hpp"
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

/// For lists of arguments of several types, each a TensorView.
using NamedView = std::pair<std::string_view, const TensorView*>;

/// Refuses in the name of `where`, the function that the user called, what does not live on `device`.
class TensorChecks {
 public:
  explicit TensorChecks(std::string_view where, Device device = Device::cpu())
      : where_(where), device_(device) {}
  /// For planning: tensors may have no data yet.
  static TensorChecks of_plan(std::string_view where, Device device) {
    TensorChecks checks(where, device);
    checks.needs_data_ = false;
    return checks;
  }

  /// Whether the host can read what tensors hold.
  bool is_host() const { return device_.kind == Device::Kind::cpu; }

  [[noreturn]] void refuse(const std::string& message) const;

  /// Dtype, shape and memory.
  void check(const NamedTensor& tensor, Dtype dtype, std::span<const std::int64_t> shape) const;
  /// As check, for any of f32, f16 and bf16.
  void check_float(const NamedTensor& tensor, std::span<const std::int64_t> shape) const;

  /// A tensor without memory: dtype, shape and device.
  void check_float_spec(std::string_view name, const TensorSpec& spec,
                        const TensorSpec& like) const;

  /// device: of q.
  void check_same_device(std::string_view name, const TensorSpec& spec, Device device) const;

  /// On the device, aligned to its elements, all of which have an address; an output also writable, each element in its
  /// own place.
  void check_memory(const NamedTensor& tensor) const;

 private:
  void check_shape(const NamedTensor& tensor, Dtype dtype,
                   std::span<const std::int64_t> shape) const;
  void check_reach(const NamedTensor& tensor) const;
  void check_distinct_elements(const NamedTensor& tensor) const;

  std::string where_;
  Device device_;
  bool needs_data_ = true;
};

/// i32 or i64.
inline bool is_index(Dtype dtype) { return dtype == Dtype::i32 || dtype == Dtype::i64; }

/// Offsets of packed sequences: [batch + 1], from 0, never decreasing, the last at most total.
struct PackedOffsets {
  std::string_view name;
  const TensorView& cu_seqlens;
  std::int64_t batch = 0;
  std::int64_t total = 0;    // rows of the packed tensor
  std::int64_t longest = 0;  // of any sequence
  std::string_view longest_name;
};
/// What they hold is looked at on the host alone.
void check_packed_offsets(const PackedOffsets& offsets, const TensorChecks& checks);

/// Outputs may overlap neither inputs nor each other: no byte of one belongs to another. Views have passed check_memory
/// and outlive the check.
class OverlapCheck {
 public:
  /// What is not given, or has no elements, takes no part.
  void add_input(std::string_view name, const TensorView& view);
  void add_output(std::string_view name, const TensorView& view);
  void add_output(std::string_view name, std::span<const std::byte> bytes);

  /// All that a forward call reads: q, k, v, sinks, cu_seqlens, dropout's tensors and what its programs capture.
  void add_inputs(const AttentionForward& call);
  /// The tensors that these programs capture.
  void add_captured(const ScoreMod& score, const MaskMod& mask);

  void refuse_overlap(const TensorChecks& checks) const;

 private:
  struct Range {
    std::string_view name;
    std::uintptr_t begin = 0, end = 0;
    const TensorView* view = nullptr;  // null: all bytes from `bytes` on
    const std::byte* bytes = nullptr;
  };

  static void add(std::vector<Range>& ranges, std::string_view name, const TensorView& view);
  static bool overlap(const Range& a, const Range& b);

  std::vector<Range> inputs_, outputs_;
};

}  // namespace fovea
