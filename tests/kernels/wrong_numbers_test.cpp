// Kernels whose lengths, offsets and tables hold anything: every access lies inside a tensor or the workspace, and the
// launch ends. (Appends are in append_test.cpp.)
#include "kernels/wrong_numbers.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/choice_cases.hpp"
#include "kernels/emulation.hpp"
#include "kernels/forward_cases.hpp"
#include "support/long_run.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

/// So many draws of wrong numbers for each kernel; the seed is printed where one fails.
void for_each_draw(int draws, const std::function<void(std::uint64_t draw, Emulation&)>& run) {
  for (int i = 0; i < draws * times_longer(); ++i) {
    const std::uint64_t draw = first_seed() + static_cast<std::uint64_t>(i);
    SCOPED_TRACE("FOVEA_TEST_SEED=" + std::to_string(draw));
    Emulation emulation;
    emulation.options = {.seed = draw, .max_findings = 1000, .max_switches = kMostSwitches};
    emulation.passes_over = is_order_alone;
    run(draw, emulation);
    ASSERT_EQ(emulation.findings, "");
  }
}

// ---- packed sequences ----------------------------------------------------------------------------

struct PackedKernel {
  Case problem;
  Runner run;
  cuda::DeviceTraits device;
};

/// Of hundreds of sequences as many as show all: lanes count 32 at a time. Wrong offsets may tell each of them to see
/// all keys.
std::vector<PackedKernel> packed_kernels() {
  std::vector<PackedKernel> kernels;
  const auto add = [&](Case each, Runner run, const cuda::DeviceTraits& device) {
    constexpr std::size_t kEnough = 33;
    if (each.sequences.size() > kEnough) each.sequences = many_sequences(kEnough);
    if (each.is_packed()) kernels.push_back({std::move(each), run, device});
  };
  for (Case& each : kernel_cases()) add(std::move(each), run_emulated, cuda::typical_device(8, 0));
  for (Case& each : hopper_cases()) add(std::move(each), run_hopper, sectioned_hopper());
  for (Case& each : short_cases()) add(std::move(each), run_short, small_hopper());
  for (Case& each : hopper_short_cases()) add(std::move(each), run_hopper_short, small_hopper());
  return kernels;
}

class WrongOffsets : public ::testing::TestWithParam<PackedKernel> {};

TEST_P(WrongOffsets, LeadNowhereElse) {
  const PackedKernel& kernel = GetParam();
  for_each_draw(1, [&](std::uint64_t draw, Emulation& emulation) {
    CaseMemory memory(kernel.problem);
    memory.poison_outputs();
    const AttentionForward args = memory.args();
    const ForwardProblem problem = validate(problem_of(args), "test");
    spoil_numbers(args.cu_seqlens_q, args.q.size(0), 2 * draw);
    spoil_numbers(args.cu_seqlens_kv, args.k.size(0), 2 * draw + 1);
    memory.cu_seqlens_q.seal();
    memory.cu_seqlens_kv.seal();
    kernel.run(
        {.label = kernel.problem.label, .problem = problem, .args = args, .device = kernel.device},
        emulation);
    EXPECT_EQ(memory.damage(), "");
  });
}

INSTANTIATE_TEST_SUITE_P(All, WrongOffsets, ::testing::ValuesIn(packed_kernels()),
                         [](const auto& each) { return each.param.problem.label; });

// ---- caches --------------------------------------------------------------------------------------

struct CacheKernel {
  NamedCacheCase named;
  Runner run;
  cuda::DeviceTraits device;
  std::string candidate;
  cuda::AnyForwardSpec spec;

  /// What runs the case.
  CacheKernel(const NamedCacheCase& each, Runner runner, const cuda::DeviceTraits& on)
      : named(each), run(runner), device(on) {
    CacheMemory memory(each.problem);
    const CacheCall call(each.problem, memory.args());
    const cuda::ForwardPlan plan = plan_of(each.label, call.problem, device);
    candidate = plan.candidate;
    spec = plan.spec;
  }
};

std::vector<CacheKernel> cache_kernels() {
  std::vector<CacheKernel> kernels;
  const auto add = [&](const std::vector<NamedCacheCase>& cases, Runner run,
                       const cuda::DeviceTraits& device) {
    for (const NamedCacheCase& each : cases) kernels.emplace_back(each, run, device);
  };
  // Room for far more splits than the workspace that fewer keys were planned for.
  const auto add_long = [&](const std::vector<NamedCacheCase>& cases, Runner run,
                            const cuda::DeviceTraits& device) {
    for (const NamedCacheCase& each : cases) {
      CacheCase& problem = kernels.emplace_back(each, run, device).named.problem;
      problem.seqlens = {17, 300, 2600};
      for (std::vector<std::int64_t>* lengths : {&problem.packed_q, &problem.packed_new}) {
        if (!lengths->empty()) lengths->resize(3);
      }
    }
  };
  add(kernel_cache_cases(), run_emulated, cuda::typical_device(8, 0));
  add(hopper_cache_cases(), run_hopper, sectioned_hopper());
  add_long(hopper_few_rows_cache_cases(), run_hopper, sectioned_hopper());
  add_long(decode_cache_cases(), run_decode, small_hopper());
  // Pages of nobody are NaN to all rows, which then go key by key: no more keys than there are turns for.
  for (const NamedCacheCase& each : latent_cache_cases())
    kernels.emplace_back(each, run_latent, small_hopper()).named.problem.seqlens = {17, 90, 1100};
  return kernels;
}

/// Planned for any number of keys for which the kernel is the one that was compiled: fewer than lengths tell, and more.
CacheCall drawn_call(const CacheKernel& kernel, const AttentionDecode& decode, std::uint64_t draw) {
  const std::int64_t capacity = cache_capacity(decode.cache);
  const Random random(draw, 19);
  const std::string& label = kernel.named.label;
  for (std::int64_t i = 0; i < 100; ++i) {
    const std::int64_t keys = i == 0 && draw % 3 == 1 ? capacity : 1 + random.below(capacity, i);
    CacheCall call(decode, keys);
    const cuda::ForwardPlan plan = plan_of(label, call.problem, kernel.device);
    if (plan.candidate == kernel.candidate && plan.spec == kernel.spec) return call;
  }
  throw std::logic_error(label + ": no number of keys has this kernel");
}

class WrongLengths : public ::testing::TestWithParam<CacheKernel> {};

TEST_P(WrongLengths, LeadNowhereElse) {
  const CacheKernel& kernel = GetParam();
  for_each_draw(1, [&](std::uint64_t draw, Emulation& emulation) {
    CacheMemory memory(kernel.named.problem);
    const AttentionDecode decode = memory.args();
    CacheCall call = drawn_call(kernel, decode, draw);
    if (!call.cache.new_tokens.is_packed()) call.cache.new_tokens.each = draw % 3 == 0 ? 0 : 3;
    const KvCache& cache = decode.cache;
    spoil_numbers(cache.seqlens, cache_capacity(cache), 4 * draw);
    spoil_numbers(cache.left_padding, cache_capacity(cache), 4 * draw + 1);
    spoil_numbers(cache.batch_idx, cache.k.size(0), 4 * draw + 2);
    spoil_numbers(cache.page_table, cache.k.size(0), 4 * draw + 3);
    spoil_numbers(cache.page_indices, cache.k.size(0), 4 * draw + 3);
    if (cache.page_indptr)
      spoil_numbers(cache.page_indptr, cache.page_indices.size(0), 4 * draw + 4);
    spoil_numbers(decode.cu_seqlens_q, decode.q.size(0), 4 * draw + 5);
    spoil_numbers(decode.append.cu_seqlens, decode.q.size(0), 4 * draw + 6);
    for (GuardedTensor* numbers :
         {&memory.seqlens, &memory.left_padding, &memory.batch_idx, &memory.page_table,
          &memory.page_indptr, &memory.page_indices, &memory.cu_seqlens_q, &memory.cu_seqlens_new})
      numbers->seal();
    kernel.run(call.on(kernel.named.label, kernel.device), emulation);
    EXPECT_EQ(memory.damage(), "");
  });
}

INSTANTIATE_TEST_SUITE_P(All, WrongLengths, ::testing::ValuesIn(cache_kernels()),
                         [](const auto& each) { return each.param.named.label; });

/// All queries are the last sequence's, more than the plan was made for.
TEST(WrongLengths, ASequenceOfMoreQueriesThanPlannedLeadsNowhereElse) {
  for (const CacheKernel& kernel : cache_kernels()) {
    if (!kernel.spec->has_packed_q || kernel.spec->is_varlen) continue;
    SCOPED_TRACE(kernel.named.label);
    CacheMemory memory(kernel.named.problem);
    const AttentionDecode decode = memory.args();
    const CacheCall call = drawn_call(kernel, decode, 0);
    const std::int64_t last = decode.cu_seqlens_q.size(0) - 1;
    memory.cu_seqlens_q.fill(
        [&](std::int64_t i) { return i < last ? 0.0 : static_cast<double>(decode.q.size(0)); });
    memory.cu_seqlens_q.seal();
    Emulation emulation;
    emulation.passes_over = is_order_alone;
    kernel.run(call.on(kernel.named.label, kernel.device), emulation);
    EXPECT_EQ(emulation.findings, "");
    EXPECT_EQ(memory.damage(), "");
  }
}

// ---- captured tensors ----------------------------------------------------------------------------

struct CapturingKernel {
  std::string label;
  std::vector<Case> (*cases)();
  Runner run;
  cuda::DeviceTraits device;

  Case problem() const {
    const std::vector<Case> all = cases();
    return *std::ranges::find(all, label, &Case::label);
  }
};

std::vector<CapturingKernel> capturing_kernels() {
  std::vector<CapturingKernel> kernels;
  const auto add = [&](std::vector<Case> (*cases)(), Runner run, const cuda::DeviceTraits& device) {
    for (const Case& each : cases())
      if (!each.captured.empty()) kernels.push_back({each.label, cases, run, device});
  };
  add(kernel_cases, run_emulated, cuda::typical_device(8, 0));
  add(decode_cases, run_decode, small_hopper());
  add(hopper_cases, run_hopper, sectioned_hopper());
  add(hopper_few_rows_cases, run_hopper, sectioned_hopper());
  add(short_cases, run_short, small_hopper());
  return kernels;
}

class WrongCaptures : public ::testing::TestWithParam<CapturingKernel> {};

/// What programs read as documents, indices and biases, and what ranges of it say about tiles.
TEST_P(WrongCaptures, LeadNowhereElse) {
  const CapturingKernel& kernel = GetParam();
  for_each_draw(1, [&](std::uint64_t draw, Emulation& emulation) {
    const Case problem = kernel.problem();  // tensors of its own
    CaseMemory memory(problem);
    memory.poison_outputs();
    for (const auto& tensor : problem.captured) {
      spoil_elements(tensor->view(), draw);
      tensor->seal();
    }
    const AttentionForward args = memory.args();
    run_args(kernel.run, kernel.label, args, kernel.device, emulation);
    EXPECT_EQ(memory.damage(), "");
  });
}

INSTANTIATE_TEST_SUITE_P(All, WrongCaptures, ::testing::ValuesIn(capturing_kernels()),
                         [](const auto& each) { return each.param.label; });

}  // namespace
}  // namespace fovea::testing
