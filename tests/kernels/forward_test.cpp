// The kernels of sm_80 under the emulator, on the feature matrix, against the oracle: what every access may do is checked beside.
#include "problem/forward.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <vector>

#include "cuda/attention_forward.hpp"
#include "cuda/decode_sm90.hpp"
#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/tensor_map.hpp"
#include "cuda/forward_launch.hpp"
#include "cuda/forward_sm90.hpp"
#include "kernels/choice_cases.hpp"
#include "kernels/emulated_forward.hpp"
#include "kernels/forward_cases.hpp"
#include "problem/decode.hpp"
#include "reference/attention_forward.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/kernel_compare.hpp"
#include "support/launch_memory.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

namespace emulator = cuda::emulator;

struct Emulation {
  emulator::Device device;
  emulator::Options options;
  std::string findings;
  int ctas_at_once = 1;
  std::int64_t num_suspects = 0;  // row tiles that Hopper's kernel computed again

  void launch(cuda::Grid grid, std::uint32_t threads, std::size_t shared_bytes,
              const std::function<void()>& kernel) {
    if (grid.x == 0) return;
    const emulator::LaunchConfig config{
        .grid = {static_cast<std::int32_t>(grid.x), static_cast<std::int32_t>(grid.y), 1},
        .block = {static_cast<std::int32_t>(threads), 1, 1},
        .cluster = {},
        .shared_bytes = static_cast<std::uint32_t>(shared_bytes),
        .clusters_at_once = ctas_at_once};
    const emulator::Report report = device.launch(config, options, kernel);
    for (const emulator::Finding& finding : report.findings) findings += finding.text + "\n";
  }
};

/// A problem, and whose kernel runs it.
struct Run {
  const std::string& label;
  const ForwardProblem& problem;
  const AttentionForward& args;
  const GrownCache* cache = nullptr;
  cuda::DeviceTraits device = cuda::typical_device(8, 0);
};

/// All that a kernel may touch, but its workspace.
void register_tensors(const Run& run, Emulation& emulation) {
  std::vector<TensorBytes> tensors = tensors_of_call(run.args);
  if (run.cache != nullptr) {
    for (const TensorBytes& tensor : tensors_of_cache(run.cache->cache)) tensors.push_back(tensor);
  }
  for (const TensorBytes& tensor : tensors)
    emulation.device.register_buffer(tensor.name, tensor.begin, tensor.size);
}

/// In either form: the bits are the same.
void join_splits(const Run& run, const cuda::ForwardPlan& plan, const cuda::ForwardLaunch& call,
                 Emulation& emulation) {
  std::vector<TensorBytes> outputs = tensors_of_call(run.args);
  std::erase_if(outputs, [](const TensorBytes& tensor) { return !tensor.is_output; });
  const auto outputs_now = [&outputs] {
    std::vector<std::vector<std::byte>> bytes;
    for (const TensorBytes& tensor : outputs)
      bytes.emplace_back(tensor.begin, tensor.begin + tensor.size);
    return bytes;
  };
  const auto join = [&](const cuda::CombineForm& form) {
    const std::int64_t ctas = (call.combine_params.num_rows + form.num_warps - 1) / form.num_warps;
    emulation.launch(
        {.x = static_cast<std::uint32_t>(ctas)}, static_cast<std::uint32_t>(form.num_warps) * 32, 0,
        [&] { cuda::combine_of(plan.spec, form.splits_at_once)(call.combine_params); });
    return outputs_now();
  };
  const auto before = outputs_now();
  const auto wide = join(cuda::kWideCombine);
  for (std::size_t i = 0; i < outputs.size(); ++i) std::ranges::copy(before[i], outputs[i].begin);
  EXPECT_EQ(join(cuda::kDeepCombine), wide);
}

void run_emulated(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = plan_of(run.label, run.problem, run.device);
  register_tensors(run, emulation);
  void* workspace = plan.workspace_bytes == 0
                        ? nullptr
                        : emulation.device.buffer<float>("workspace", plan.workspace_bytes / 4);
  const cuda::ForwardLaunch call =
      cuda::forward_launch(run.problem, plan, run.args, workspace, run.cache);
  emulation.launch(call.grid, call.num_threads, plan.shared_bytes,
                   [&] { cuda::forward_named(run.label)(call.params); });
  if (!plan.spec.is_split) return;
  join_splits(run, plan, call, emulation);
}

cuda::TensorMapParam encode_for_emulator(const cuda::driver::TensorMapSpec& spec,
                                         const void* address) {
  return emulator::encode_tensor_map<cuda::TensorMapParam>(spec, address);
}

void run_decode(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = plan_of(run.label, run.problem, run.device);
  ASSERT_EQ(plan.candidate, cuda::kSm90Decode);
  register_tensors(run, emulation);
  void* workspace = emulation.device.buffer<float>("workspace", plan.workspace_bytes / 4);
  cuda::DecodeLaunch call =
      cuda::decode_launch(run.problem, plan, run.args, run.cache, workspace, encode_for_emulator);
  for (cuda::CapturedTensorParam& tensor : call.params.common.captures.tensors)
    tensor.ranges = nullptr;
  emulation.launch({.x = call.num_ctas}, call.common.num_threads, plan.shared_bytes,
                   [&] { cuda::decode_named(run.label)(call.params); });
  join_splits(run, plan, call.common, emulation);
}

/// Two CTAs at once, so that row tiles are claimed from each other; an L2 cache so small that heads come in several sections.
cuda::DeviceTraits sectioned_hopper() {
  cuda::DeviceTraits device = cuda::typical_device(9, 0);
  device.num_sms = 2;
  device.l2_bytes = 1 << 18;
  return device;
}

void run_hopper(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = plan_of(run.label, run.problem, run.device);
  ASSERT_EQ(plan.candidate, cuda::kSm90Forward);
  register_tensors(run, emulation);
  // Range tables are left out: tiles count as partial, which changes no result.
  constexpr unsigned char kGarbage = 0x5A;
  const auto workspace = emulation.device.buffer(
      "workspace", std::vector<unsigned char>((plan.workspace_bytes + 255) / 256 * 256, kGarbage));
  cuda::Sm90Launch call =
      cuda::sm90_launch(run.problem, plan, run.args, run.cache, workspace, encode_for_emulator);
  for (cuda::CapturedTensorParam& tensor : call.params.common.captures.tensors)
    tensor.ranges = nullptr;
  if (call.has_counter)
    emulation.launch({.x = 1}, 1, 0,
                     [&] { cuda::run_clear_counter({.counter = call.params.next_tile}); });
  emulation.ctas_at_once = static_cast<int>(call.num_ctas);
  emulation.launch({.x = call.num_ctas}, call.common.num_threads, plan.shared_bytes,
                   [&] { cuda::hopper_named(run.label).run(call.params); });
  emulation.ctas_at_once = 1;
  const std::span words(call.params.next_suspect,
                        reinterpret_cast<std::int32_t*>(workspace + plan.tables_at));
  emulation.num_suspects =
      std::ranges::count_if(words, [](std::int32_t next) { return next != kGarbage * 0x01010101; });
  if (!plan.spec.is_split) return;
  join_splits(run, plan, call.common, emulation);
}

/// Under each way in which copies and products may land; the emulator must find nothing.
void for_each_landing(const std::function<void(Emulation&)>& run) {
  for (const emulator::Landing landing :
       {emulator::Landing::earliest, emulator::Landing::latest, emulator::Landing::seeded}) {
    Emulation emulation;
    emulation.options = {.seed = 1, .landing = landing};
    run(emulation);
    EXPECT_EQ(emulation.findings, "");
  }
}

void expect_equals_oracle(const Case& problem, void (*run)(const Run&, Emulation&),
                          const cuda::DeviceTraits& device) {
  for_each_landing([&](Emulation& emulation) {
    expect_kernel_equals_oracle(problem, [&](const AttentionForward& args) {
      run({.label = problem.label,
           .problem = validate(problem_of(args), "test"),
           .args = args,
           .device = device},
          emulation);
    });
  });
}

class EmulatedHoppers : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedHoppers, EqualTheOracle) {
  expect_equals_oracle(GetParam(), run_hopper, sectioned_hopper());
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedHoppers, ::testing::ValuesIn(hopper_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(FewRows, EmulatedHoppers, ::testing::ValuesIn(hopper_few_rows_cases()),
                         [](const auto& each) { return each.param.label; });

/// Beside scores of 2^127 the usual tolerances allow anything: each row is a plain average of its greatest scores or of ordinary ones.
void expect_exact_rows(const AttentionForward& args) {
  const reference::ForwardResult expected = reference::attention_forward(args);
  // Weights' rounding of values up to 8; a rounding of lse is added to its own.
  const double of_weights = args.q.dtype() == Dtype::f32 ? 0x1p-20 : 0x1p-8;
  const Tolerance out{.dtype = args.out.dtype(), .absolute = 8 * of_weights, .norm = HUGE_VAL};
  const Tolerance lse{.dtype = Dtype::f32, .absolute = 0x1p-14, .norm = HUGE_VAL};
  EXPECT_EQ(difference({"out", args.out, expected.out, out}), "");
  EXPECT_EQ(difference({"lse", args.lse, expected.lse, lse}), "");
}

void expect_exact_rows_of(const std::vector<Case>& cases, void (*run)(const Run&, Emulation&),
                          const cuda::DeviceTraits& device) {
  for (const Case& problem : cases) {
    if (problem.label.find("extreme") == std::string::npos) continue;
    SCOPED_TRACE(problem.label);
    CaseMemory memory(problem);
    memory.poison_outputs();
    const AttentionForward args = memory.args();
    Emulation emulation;
    run({.label = problem.label,
         .problem = validate(problem_of(args), "test"),
         .args = args,
         .device = device},
        emulation);
    EXPECT_EQ(emulation.findings, "");
    expect_exact_rows(args);
  }
}

TEST(ExtremeScores, AreOrdinaryNumbers) {
  expect_exact_rows_of(kernel_cases(), run_emulated, cuda::typical_device(8, 0));
}

TEST(ExtremeScores, AreOrdinaryNumbersInDecode) {
  expect_exact_rows_of(decode_cases(), run_decode, cuda::typical_device(9, 0));
}

TEST(ExtremeScores, AreOrdinaryNumbersOnHopper) {
  expect_exact_rows_of(hopper_cases(), run_hopper, sectioned_hopper());
  expect_exact_rows_of(hopper_few_rows_cases(), run_hopper, sectioned_hopper());
}

TensorView columns_from(const TensorView& t, std::int64_t first) {
  TensorSpec spec = t.spec();
  const auto last = static_cast<std::size_t>(t.rank() - 1);
  spec.shape[last] -= first;
  return {static_cast<const std::uint16_t*>(t.data()) + first * spec.strides[last], spec};
}

class SuspectsOfHopper : public ::testing::TestWithParam<const char*> {};

/// Infinity and NaN are in the first four columns of V; rows see them or not.
TEST_P(SuspectsOfHopper, ChangeNoBitOfOtherColumns) {
  const std::vector<Case> cases = hopper_cases();
  const Case& problem = *std::ranges::find(cases, std::string(GetParam()), &Case::label);
  const auto run = [](const Case& each, auto&& visit) {
    CaseMemory memory(each);
    memory.poison_outputs();
    const AttentionForward args = memory.args();
    Emulation emulation;
    run_hopper({.label = each.label,
                .problem = validate(problem_of(args), "test"),
                .args = args,
                .device = sectioned_hopper()},
               emulation);
    EXPECT_EQ(emulation.findings, "");
    EXPECT_EQ(emulation.num_suspects > 0, each.has_infinite_values);
    visit(args);
  };
  Case plain = problem;
  plain.has_infinite_values = false;
  std::vector<std::uint64_t> out, lse;
  run(plain, [&](const AttentionForward& args) {
    out = bits_of(columns_from(args.out, 4));
    lse = bits_of(args.lse);
  });
  run(problem, [&](const AttentionForward& args) {
    EXPECT_EQ(bits_of(columns_from(args.out, 4)), out);
    EXPECT_EQ(bits_of(args.lse), lse);
  });
}

INSTANTIATE_TEST_SUITE_P(All, SuspectsOfHopper,
                         ::testing::Values("hopper_infinite_d64", "hopper_infinite_d128",
                                           "hopper_infinite_d256", "hopper_infinite_line",
                                           "hopper_infinite_dropout_d128"),
                         [](const auto& each) { return std::string(each.param); });

class EmulatedForwards : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedForwards, EqualTheOracle) {
  expect_equals_oracle(GetParam(), run_emulated, cuda::typical_device(8, 0));
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedForwards, ::testing::ValuesIn(kernel_cases()),
                         [](const auto& each) { return each.param.label; });

/// Attention over the cache of a case, as the kernels take it.
struct CacheCall {
  AttentionForward args;
  ForwardProblem problem;
  GrownCache cache;

  CacheCall(const CacheCase& each, const AttentionDecode& decode)
      : args(forward_of(decode)),
        problem(validate_decode_problem(decode_problem(decode, longest(each), 1, "test"),
                                        cache_layout(decode), "test")),
        cache{decode.cache, 0} {}

  Run on(const std::string& label, const cuda::DeviceTraits& device) const {
    return {.label = label, .problem = problem, .args = args, .cache = &cache, .device = device};
  }
};

void expect_cache_equals_oracle(const NamedCacheCase& each, void (*run)(const Run&, Emulation&),
                                const cuda::DeviceTraits& device, Emulation& emulation) {
  const CacheCase& problem = each.problem;
  CacheMemory memory(problem);
  const AttentionDecode decode = memory.args();
  const CacheCall call(problem, decode);
  run(call.on(each.label, device), emulation);
  EXPECT_EQ(emulation.findings, "");
  expect_sequences_equal_oracle(problem, memory, decode);
}

class EmulatedCaches : public ::testing::TestWithParam<NamedCacheCase> {};

/// Each sequence against the oracle on its keys laid out densely.
TEST_P(EmulatedCaches, EqualTheOracle) {
  Emulation emulation;
  expect_cache_equals_oracle(GetParam(), run_emulated, cuda::typical_device(8, 0), emulation);
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedCaches, ::testing::ValuesIn(kernel_cache_cases()),
                         [](const auto& each) { return each.param.label; });

class EmulatedHopperCaches : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(EmulatedHopperCaches, EqualTheOracle) {
  for_each_landing([](Emulation& emulation) {
    expect_cache_equals_oracle(GetParam(), run_hopper, sectioned_hopper(), emulation);
    EXPECT_EQ(emulation.num_suspects > 0, GetParam().problem.nan_key >= 0)
        << "what lies behind the last key is no reason to compute again";
  });
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedHopperCaches, ::testing::ValuesIn(hopper_cache_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(FewRows, EmulatedHopperCaches,
                         ::testing::ValuesIn(hopper_few_rows_cache_cases()),
                         [](const auto& each) { return each.param.label; });

/// So few SMs that CTAs take several splits each.
cuda::DeviceTraits small_hopper() {
  cuda::DeviceTraits device = cuda::typical_device(9, 0);
  device.num_sms = 2;
  return device;
}

class EmulatedDecodes : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedDecodes, EqualTheOracle) {
  expect_equals_oracle(GetParam(), run_decode, small_hopper());
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedDecodes, ::testing::ValuesIn(decode_cases()),
                         [](const auto& each) { return each.param.label; });

class EmulatedDecodeCaches : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(EmulatedDecodeCaches, EqualTheOracle) {
  for_each_landing([](Emulation& emulation) {
    expect_cache_equals_oracle(GetParam(), run_decode, small_hopper(), emulation);
  });
}

/// The same bits in a batch, on a device of another size, as alone.
TEST_P(EmulatedDecodeCaches, BitsDoNotDependOnTheBatch) {
  const NamedCacheCase& each = GetParam();
  CacheMemory together(each.problem), alone(each.problem);
  const auto run = [&each](const AttentionDecode& decode, const cuda::DeviceTraits& device) {
    const CacheCall call(each.problem, decode);
    Emulation emulation;
    run_decode(call.on(each.label, device), emulation);
  };
  run(together.args(), small_hopper());
  for (std::int64_t i = 0; i < each.problem.batch(); ++i) {
    AttentionDecode decode = alone.args();
    for (TensorView* view : {&decode.q, &decode.out, &decode.lse, &decode.cache.page_table,
                             &decode.cache.seqlens, &decode.cache.left_padding})
      *view = entry_of(*view, i);
    if (decode.cache.batch_idx) {
      decode.cache.batch_idx = entry_of(decode.cache.batch_idx, i);
    } else if (!decode.cache.page_table) {
      decode.cache.k = entry_of(decode.cache.k, i);
      decode.cache.v = entry_of(decode.cache.v, i);
    }
    run(decode, cuda::typical_device(9, 0));
    EXPECT_EQ(together.out_bits(i), alone.out_bits(i)) << i;
    EXPECT_EQ(together.lse_bits(i), alone.lse_bits(i)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedDecodeCaches, ::testing::ValuesIn(decode_cache_cases()),
                         [](const auto& each) { return each.param.label; });

}  // namespace
}  // namespace fovea::testing
