// The one comparison that every implementation of attention goes through: its outputs against the
// oracle's.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/attention.hpp"

#include "support/case.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {

struct CompareOptions {
  /// Default: every target that runs this dtype here (targets_for).
  std::vector<CpuTarget> targets{};
  Executor* executor = nullptr;
  std::optional<Lengths> longest{};  // by a plan of lengths up to these
  /// What is tested. Default: the public attention_forward, with a workspace full of NaN between
  /// guards.
  std::function<void(const AttentionForward&)> run{};
};

/// Every target of this machine that runs such inputs, worst first; the scalar one always does.
std::vector<CpuTarget> targets_for(Dtype dtype,
                                   ComputeDtype compute_dtype = ComputeDtype::automatic);

/// Every target that runs this very problem.
std::vector<CpuTarget> targets_for(const Case& problem);

/// f32 or bf16: what this target multiplies in when asked for `requested`.
ComputeDtype compute_dtype_on(CpuTarget target, Dtype dtype, ComputeDtype requested);

/// Empty when out, lse and row_max are right on every target, inputs are unchanged and guards
/// untouched. Otherwise one paragraph per fault: worst coordinate, got, expected, allowed, seed,
/// target, and a command that repeats it.
std::string difference_from_oracle(const Case& problem, const CompareOptions& options = {});

/// EXPECTs that there is no difference.
void expect_equals_oracle(const Case& problem, const CompareOptions& options = {});

/// One output of an implementation, and what it should be, row-major.
struct ComparedOutput {
  std::string_view name;
  TensorView view;
  const std::vector<double>& expected;
  const Tolerance& tolerance;
};

/// The element that is furthest beyond what it may be, or the norm; empty where all is right.
std::string difference(const ComparedOutput& output);

/// "  repeat with --gtest_filter=...", of the running test.
std::string repeating_command();

/// Memory for a workspace, full of NaN and between guards.
class PoisonedWorkspace {
 public:
  explicit PoisonedWorkspace(std::size_t num_bytes);
  std::span<std::byte> span() { return std::span(memory_).subspan(begin_, size_); }
  bool has_intact_guards() const;

 private:
  std::vector<std::byte> memory_;
  std::size_t begin_ = 0, size_ = 0;
};

/// Row-major values of a tensor of any strides.
std::vector<double> values_of(const TensorView& view);

/// The same, to be compared bit for bit: -0 is not 0, and a NaN equals itself.
std::vector<std::uint64_t> bits_of(const TensorView& view);

/// A tensor with these values, row-major.
GuardedTensor tensor_of(Dtype dtype, const std::vector<std::int64_t>& shape,
                        const std::vector<double>& values);

/// Runs attention_forward, or a plan of lengths up to `longest`, with a poisoned workspace in guards; returns "wrote
/// outside of workspace" or nothing.
std::string run_with_poisoned_workspace(AttentionForward args,
                                        const std::optional<Lengths>& longest = {});

}  // namespace fovea::testing
