#include "support/compare.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <tuple>

#include "reference/attention_forward.hpp"
#include "reference/element.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {

namespace {

constexpr CpuTarget kTargets[] = {
    CpuTarget::scalar,      CpuTarget::avx2,        CpuTarget::avx_vnni, CpuTarget::avx512,
    CpuTarget::avx512_vnni, CpuTarget::avx512_bf16, CpuTarget::amx_bf16, CpuTarget::neon};

/// A problem that says what a target does with a dtype; its size does not matter.
Problem probe(CpuTarget target, Dtype dtype, ComputeDtype compute_dtype) {
  constexpr std::array<std::int64_t, 4> kShape{1, 64, 1, 64};
  const TensorSpec spec = make_spec(dtype, kShape);
  Problem problem{.q = spec, .k = spec, .v = spec, .out = {}};
  problem.compute_dtype = compute_dtype;
  problem.cpu_target = target;
  return problem;
}

/// What the target multiplies in, or nothing where it cannot run at all.
std::optional<ComputeDtype> answer(CpuTarget target, Dtype dtype, ComputeDtype requested) {
  static std::map<std::tuple<CpuTarget, Dtype, ComputeDtype>, std::optional<ComputeDtype>> known;
  const auto [entry, is_new] = known.try_emplace({target, dtype, requested});
  if (!is_new) return entry->second;
  try {
    const Plan probed = plan(probe(target, dtype, requested));
    entry->second =
        probed.explain().compute_dtype == "bf16" ? ComputeDtype::bf16 : ComputeDtype::f32;
  } catch (const Unsupported&) {
  }
  return entry->second;
}

/// The same of a recipe: its codes are exact in every product, so that only inputs that it leaves alone are bf16.
ComputeDtype product_of_recipe(const AttentionForward& args) {
  const bool rounds_all = args.quant.qk != QuantFormat::none && args.quant.pv != QuantFormat::none;
  const bool is_bf16 = explain(problem_of(args)).compute_dtype.find("bf16") != std::string::npos;
  return is_bf16 && !rounds_all ? ComputeDtype::bf16 : ComputeDtype::f32;
}

constexpr std::size_t kGuardBytes = 256;
constexpr std::size_t kAlignment = 64;
constexpr std::byte kPoison{0xFF};

std::string coordinate(const TensorView& view, std::int64_t index) {
  std::string text;
  for (int dim = view.rank() - 1; dim >= 0; --dim) {
    text = fmt::format("{}{}{}", index % view.size(dim), text.empty() ? "" : ", ", text);
    index /= view.size(dim);
  }
  return "[" + text + "]";
}

/// Tolerances per compute dtype, computed when a target first needs them.
class Judge {
 public:
  explicit Judge(const AttentionForward& args) : expected_(reference::attention_forward(args)) {}

  std::string difference_of(const AttentionForward& args, ComputeDtype compute_dtype) {
    auto& allowed = allowed_[compute_dtype == ComputeDtype::bf16 ? 1 : 0];
    if (!allowed) allowed = tolerances(args, expected_, compute_dtype);
    return difference({"out", args.out, expected_.out, allowed->out}) +
           difference({"lse", args.lse, expected_.lse, allowed->lse}) +
           difference({"row_max", args.row_max, expected_.row_max, allowed->row_max});
  }

 private:
  reference::ForwardResult expected_;
  std::optional<Tolerances> allowed_[2];
};

}  // namespace

std::string difference(const ComparedOutput& output) {
  if (!output.view) return "";
  const std::vector<double> got = values_of(output.view);
  const reference::Comparison compared = reference::compare(got, output.expected, output.tolerance);
  const std::size_t worst = compared.worst;
  if (compared.num_wrong > 0) {
    return fmt::format(
        "{}{}: got {:.9g}, expected {:.9g}, allowed error {:.3g} ({} of {} elements are wrong)\n",
        output.name, coordinate(output.view, static_cast<std::int64_t>(worst)), got[worst],
        output.expected[worst], output.tolerance.allowed(output.expected[worst]),
        compared.num_wrong, got.size());
  }
  if (!compared.passes(output.tolerance)) {
    return fmt::format("{}: error norm {:.3g}, allowed {:.3g}, worst at {}\n", output.name,
                       compared.norm, output.tolerance.norm,
                       coordinate(output.view, static_cast<std::int64_t>(worst)));
  }
  return "";
}

std::string repeating_command() {
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  if (test == nullptr) return "";
  return fmt::format("  repeat with --gtest_filter={}.{}\n", test->test_suite_name(), test->name());
}

std::vector<CpuTarget> targets_for(Dtype dtype, ComputeDtype compute_dtype) {
  std::vector<CpuTarget> supported;
  for (const CpuTarget target : kTargets) {
    if (answer(target, dtype, compute_dtype)) supported.push_back(target);
  }
  return supported;
}

std::vector<CpuTarget> targets_for(const Case& problem) {
  if (problem.quant.is_none()) return targets_for(problem.dtype, problem.compute_dtype);
  CaseMemory memory(problem);
  std::vector<CpuTarget> supported;
  for (const CpuTarget target : kTargets) {
    if (!explain(problem_of(memory.args(target))).kernel.empty()) supported.push_back(target);
  }
  return supported;
}

ComputeDtype compute_dtype_on(CpuTarget target, Dtype dtype, ComputeDtype requested) {
  return answer(target, dtype, requested).value_or(ComputeDtype::f32);
}

std::vector<double> values_of(const TensorView& view) {
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(view.spec().num_elements()));
  for_each_offset(view.spec(),
                  [&](std::int64_t offset) { values.push_back(reference::element(view, offset)); });
  return values;
}

std::vector<std::uint64_t> bits_of(const TensorView& view) {
  std::vector<std::uint64_t> bits;
  if (!view) return bits;
  for (const double value : values_of(view)) bits.push_back(std::bit_cast<std::uint64_t>(value));
  return bits;
}

GuardedTensor tensor_of(Dtype dtype, const std::vector<std::int64_t>& shape,
                        const std::vector<double>& values) {
  GuardedTensor tensor(make_spec(dtype, shape));
  tensor.fill([&](std::int64_t i) { return values[static_cast<std::size_t>(i)]; });
  return tensor;
}

PoisonedWorkspace::PoisonedWorkspace(std::size_t num_bytes) : size_(num_bytes) {
  memory_.assign(num_bytes + 2 * kGuardBytes + kAlignment, kPoison);
  const std::size_t address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuardBytes;
  begin_ = kGuardBytes + (kAlignment - address % kAlignment) % kAlignment;
}

bool PoisonedWorkspace::has_intact_guards() const {
  const auto is_poison = [](std::byte each) { return each == kPoison; };
  const auto begin = memory_.begin() + static_cast<std::ptrdiff_t>(begin_);
  const auto end = begin + static_cast<std::ptrdiff_t>(size_);
  return std::all_of(memory_.begin(), begin, is_poison) &&
         std::all_of(end, memory_.end(), is_poison);
}

std::string run_with_poisoned_workspace(AttentionForward args,
                                        const std::optional<Lengths>& longest) {
  Problem problem = problem_of(args);
  if (args.executor != nullptr) problem.num_threads = args.executor->concurrency();
  if (longest) {
    problem.seqlen_q = up_to(longest->q);
    problem.seqlen_kv = up_to(longest->kv);
  }
  const Plan planned = plan(problem);
  PoisonedWorkspace workspace(planned.workspace_bytes());
  args.workspace = workspace.span();
  if (longest) {
    planned.run(args);
  } else {
    attention_forward(args);
  }
  return workspace.has_intact_guards() ? "" : "wrote outside of workspace\n";
}

std::string difference_from_oracle(const Case& problem, const CompareOptions& options) {
  CaseMemory memory(problem);
  Judge judge(memory.args());
  const bool is_public = !options.run;
  std::vector<CpuTarget> targets = options.targets;
  if (targets.empty() && is_public) targets = targets_for(problem);
  if (targets.empty()) targets = {CpuTarget::scalar};
  std::string differences;
  for (const CpuTarget target : targets) {
    memory.poison_outputs();
    AttentionForward args = memory.args(target);
    args.executor = options.executor;
    std::string found;
    try {
      if (is_public) {
        found = run_with_poisoned_workspace(args, options.longest);
      } else {
        options.run(args);
      }
      const ComputeDtype compute_dtype =
          !is_public                ? ComputeDtype::f32
          : problem.quant.is_none() ? compute_dtype_on(target, problem.dtype, problem.compute_dtype)
                                    : product_of_recipe(args);
      found += judge.difference_of(args, compute_dtype) + memory.damage();
    } catch (const Error& error) {
      found += fmt::format("threw: {}\n", error.what());
    }
    if (found.empty()) continue;
    differences += fmt::format("{}  in {}\n  target {}\n{}", found, problem.describe(),
                               is_public ? name(target) : "of the test", repeating_command());
  }
  return differences;
}

void expect_equals_oracle(const Case& problem, const CompareOptions& options) {
  const std::string difference = difference_from_oracle(problem, options);
  if (!difference.empty()) ADD_FAILURE() << difference;
}

}  // namespace fovea::testing
