#include "kernels/emulation.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cuda/emulator/tensor_map.hpp"
#include "cuda/forward/sm80_coded.hpp"
#include "cuda/forward/sm80_decode_coded.hpp"
#include "cuda/forward/sm80_quantized.hpp"
#include "cuda/forward/sm80_short.hpp"
#include "cuda/forward/sm80_wide.hpp"
#include "cuda/forward/sm90.hpp"
#include "cuda/forward/sm90_coded.hpp"
#include "cuda/forward/sm90_converted.hpp"
#include "cuda/forward/sm90_decode.hpp"
#include "cuda/forward/sm90_decode_coded.hpp"
#include "cuda/forward/sm90_decode_latent.hpp"
#include "cuda/forward/sm90_quantized.hpp"
#include "cuda/forward/sm90_short.hpp"
#include "kernels/choice_cases.hpp"
#include "kernels/emulated_forward.hpp"
#include "kernels/emulation_steps.hpp"

namespace fovea::testing {

namespace emulator = cuda::emulator;

namespace {

cuda::TensorMapParam encode_for_emulator(const cuda::driver::TensorMapSpec& spec,
                                         const void* address) {
  return emulator::encode_tensor_map<cuda::TensorMapParam>(spec, address);
}

}  // namespace

void run_emulated(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = plan_of(run.label, run.problem, run.device);
  start(run, emulation);
  void* workspace = plan.workspace_bytes == 0
                        ? nullptr
                        : emulation.device.buffer<float>("workspace", plan.workspace_bytes / 4);
  if (plan.candidate == cuda::Sm80Coded::kName || plan.candidate == cuda::Sm80DecodeCoded::kName) {
    cuda::CodedLaunch call = cuda::Sm80Coded::prepare(run.problem, plan, run.args, run.cache,
                                                      workspace, encode_for_emulator);
    build_tables(plan, call.common, emulation);
    call.params.common.captures = call.common.params.captures;
    emulation.launch(call.common.grid, call.common.num_threads, plan.shared_bytes,
                     [&] { cuda::coded_named(run.label)(call.params); });
    clear_rows(call.common, emulation);
    if (plan.spec->is_split) join_splits(run, plan, call.common, emulation);
    return;
  }
  if (plan.candidate == cuda::Sm80ForwardWide::kName) {
    cuda::WideLaunch call = cuda::Sm80ForwardWide::prepare(run.problem, plan, run.args, run.cache,
                                                           workspace, encode_for_emulator);
    for (int i = 0; i < call.num_parts; ++i)
      launch_forward(run, plan, call.parts[static_cast<std::size_t>(i)], emulation);
    // Here each part has range tables of its own.
    if (plan.range_tables.is_empty()) emulation.expect_launched(call.launches(plan));
    return;
  }
  cuda::ForwardLaunch call =
      cuda::forward_launch(run.problem, plan, run.args, workspace, run.cache);
  launch_forward(run, plan, call, emulation);
  emulation.expect_launched(call.launches(plan));
}

void run_short(const Run& run, Emulation& emulation) {
  const ForwardProblem problem = planned_for_short(run.problem, kMostPacked);
  ASSERT_EQ(plan_of(run.label, problem, run.device).candidate, cuda::Sm80ForwardShort::kName);
  run_emulated({.label = run.label, .problem = problem, .args = run.args, .device = run.device},
               emulation);
}

void run_hopper_short(const Run& run, Emulation& emulation) {
  const ForwardProblem problem = planned_for_short(run.problem, kMostHopperPacked);
  const cuda::ForwardPlan plan = plan_of(run.label, problem, run.device);
  ASSERT_EQ(plan.candidate, cuda::Sm90ForwardShort::kName);
  start(run, emulation);
  cuda::Sm90ShortLaunch call = cuda::Sm90ForwardShort::prepare(problem, plan, run.args, run.cache,
                                                               nullptr, encode_for_emulator);
  const cuda::KernelLaunches launches = call.launches(plan);
  ASSERT_EQ(launches.size(), 1U);
  const cuda::KernelLaunch& launch = *launches.begin();
  emulation.launch({.x = launch.grid.x}, launch.num_threads, launch.shared_bytes,
                   [&] { cuda::hopper_short_named(run.label)(call.params); });
}

namespace {

/// Of a kernel whose CTAs stay on their SMs and take one split after the other.
template <typename Kernel, typename Function>
void run_splits(const Run& run, Function (*named)(std::string_view), Emulation& emulation) {
  const cuda::ForwardPlan plan = plan_of(run.label, run.problem, run.device);
  ASSERT_EQ(plan.candidate, Kernel::kName);
  start(run, emulation);
  void* workspace = emulation.device.buffer<float>("workspace", plan.workspace_bytes / 4);
  auto call =
      Kernel::prepare(run.problem, plan, run.args, run.cache, workspace, encode_for_emulator);
  build_tables(plan, call.common, emulation);
  call.params.common.captures = call.common.params.captures;
  if (const auto* decode = plan.spec.get_if<cuda::Sm90DecodeSpec>())
    emulation.ctas_of_cluster = decode->ctas_of_cluster;
  emulation.launch({.x = call.num_ctas}, call.common.num_threads, plan.shared_bytes,
                   [&] { named(run.label)(call.params); });
  emulation.ctas_of_cluster = 1;
  if (has_combine(plan)) join_splits(run, plan, call.common, emulation);
  clear_rows(call.common, emulation);
  emulation.expect_launched(call.launches(plan));
}

}  // namespace

void run_decode(const Run& run, Emulation& emulation) {
  run_splits<cuda::Sm90Decode>(run, cuda::decode_named, emulation);
}

void run_decode_coded(const Run& run, Emulation& emulation) {
  run_splits<cuda::Sm90DecodeCoded>(run, cuda::decode_coded_named, emulation);
}

void run_latent(const Run& run, Emulation& emulation) {
  run_splits<cuda::Sm90DecodeLatent>(run, cuda::latent_named, emulation);
}

cuda::DeviceTraits sectioned_hopper() {
  cuda::DeviceTraits device = cuda::typical_device(9, 0);
  device.num_sms = 2;
  device.l2_bytes = 1 << 18;
  return device;
}

namespace {

/// The kernels that round K and V of a call, by what launches them.
struct Quantizers {
  std::function<void()> mean, round;
};

void run_quantizers(const cuda::QuantizeKvLaunch& launch, const Quantizers& kernels,
                    Emulation& emulation) {
  const bool has_two = looks_at_sequences(launch.spec);
  if (has_two) {
    emulation.launch({.x = launch.num_looking_ctas()}, cuda::kQuantizeThreads,
                     cuda::kMeanSharedBytes, kernels.mean);
  }
  emulation.is_dependent = launch.overlaps && has_two;
  emulation.launch({.x = launch.num_ctas}, cuda::kQuantizeThreads,
                   static_cast<std::size_t>(cuda::quantize_shared_bytes(launch.spec)),
                   kernels.round);
  emulation.is_dependent = false;
}

/// Of a call over a cache.
void run_cache_quantizers(const std::string& label, const cuda::QuantizeKvLaunch& launch,
                          Emulation& emulation) {
  const cuda::EmulatedCacheRounding& kernels = cuda::cache_rounding_named(label);
  run_quantizers(launch,
                 {.mean = [&] { kernels.mean(launch.params); },
                  .round = [&] { kernels.round(launch.params); }},
                 emulation);
}

}  // namespace

void run_quantizers(const cuda::QuantizeKvLaunch& launch, Emulation& emulation) {
  run_quantizers(launch,
                 {.mean = [&] { cuda::run_mean_of_keys(launch.spec, launch.params); },
                  .round = [&] { cuda::run_quantize_kv(launch.spec, launch.params); }},
                 emulation);
}

namespace {

/// What lies in workspace before a call.
constexpr unsigned char kGarbage = 0x5A;

/// Rows that attention of a call has lost.
void run_lost_rows(const std::string& label, cuda::LostRowsLaunch& launch,
                   const cuda::ForwardLaunch& call, Emulation& emulation) {
  if (launch.num_ctas == 0) return;
  launch.params.call.captures = call.params.captures;
  emulation.is_dependent = launch.overlaps;
  emulation.launch({.x = launch.num_ctas}, cuda::kLostRowsThreads, 0,
                   [&] { cuda::lost_rows_named(label).run(launch.params); });
  emulation.is_dependent = false;
}

/// Hopper's forward, of whichever candidate, and what comes before it.
template <typename Kernel>
void run_hopper_plan(const Run& run, const cuda::ForwardPlan& plan,
                     const cuda::EmulatedHopper& kernel, Emulation& emulation) {
  start(run, emulation);
  const auto workspace = emulation.device.buffer(
      "workspace", std::vector<unsigned char>((plan.workspace_bytes + 255) / 256 * 256, kGarbage));
  cuda::Sm90Launch call =
      Kernel::prepare(run.problem, plan, run.args, run.cache, workspace, encode_for_emulator);
  build_tables(plan, call.common, emulation);
  call.params.common.captures = call.common.params.captures;
  if (call.has_counter)
    emulation.launch({.x = 1}, 1, 0,
                     [&] { cuda::run_clear_counter({.counter = call.params.next_tile}); });
  if (call.quantize.num_ctas > 0) {
    if (call.quantize.spec.is_cached)
      run_cache_quantizers(run.label, call.quantize, emulation);
    else
      run_quantizers(call.quantize, emulation);
  }
  if (call.numbers.num_ctas > 0) {
    emulation.launch({.x = call.numbers.num_ctas}, cuda::kNumbersThreads, 0,
                     [&] { cuda::numbers_of_codes_named(run.label)(call.numbers.params); });
  }
  emulation.is_dependent = call.has_counter || call.quantize.num_ctas > 0;
  emulation.ctas_at_once = static_cast<int>(call.num_ctas);
  emulation.ctas_per_sm = plan.spec->ctas_per_sm;
  emulation.launch({.x = call.num_ctas}, call.common.num_threads, plan.shared_bytes,
                   [&] { kernel.run(call.params); });
  emulation.ctas_at_once = emulation.ctas_per_sm = 1;
  emulation.is_dependent = false;
  const std::span words(call.params.next_redo, static_cast<std::size_t>(call.params.num_tiles));
  emulation.num_redone =
      std::ranges::count_if(words, [](std::int32_t next) { return next != kGarbage * 0x01010101; });
  if (plan.spec->is_split) join_splits(run, plan, call.common, emulation);
  clear_rows(call.common, emulation);
  run_lost_rows(run.label, call.lost, call.common, emulation);
  emulation.expect_launched(call.launches(plan));
}

}  // namespace

void run_hopper(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = plan_of(run.label, run.problem, run.device);
  const bool is_copied = run.label.find("copied") != std::string::npos;
  ASSERT_EQ(plan.candidate, is_copied ? cuda::Sm90ForwardCpAsync::kName : cuda::Sm90Forward::kName);
  run_hopper_plan<cuda::Sm90Forward>(run, plan, cuda::hopper_named(run.label), emulation);
}

void run_chunk_over_codes(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = plan_of(run.label, run.problem, run.device);
  const cuda::EmulatedHopper& kernel = cuda::chunk_over_codes_named(run.label);
  if (run.label.starts_with("hopper_converted_")) {
    ASSERT_EQ(plan.candidate, cuda::Sm90ForwardConverted::kName);
    return run_hopper_plan<cuda::Sm90ForwardConverted>(run, plan, kernel, emulation);
  }
  ASSERT_EQ(plan.candidate, cuda::Sm90ForwardCoded::kName);
  run_hopper_plan<cuda::Sm90ForwardCoded>(run, plan, kernel, emulation);
}

void run_sm80_quantized(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = plan_of(run.label, run.problem, run.device);
  ASSERT_EQ(plan.candidate, cuda::Sm80ForwardQuantized::kName);
  const cuda::DeviceTraits compiled_for = rounding_device(run.problem.problem.quant);
  ASSERT_EQ(plan.spec, plan_of(run.label, run.problem, compiled_for).spec);
  start(run, emulation);
  const auto workspace = emulation.device.buffer(
      "workspace", std::vector<unsigned char>((plan.workspace_bytes + 255) / 256 * 256, kGarbage));
  cuda::Sm80QuantizedLaunch call = cuda::Sm80ForwardQuantized::prepare(
      run.problem, plan, run.args, run.cache, workspace, encode_for_emulator);
  build_tables(plan, call.common, emulation);
  call.params.common.captures = call.common.params.captures;
  const bool has_codes = call.quantize.num_ctas > 0;
  if (has_codes) run_quantizers(call.quantize, emulation);
  emulation.is_dependent = has_codes && call.quantize.overlaps;
  emulation.launch(call.common.grid, call.common.num_threads, plan.shared_bytes,
                   [&] { cuda::sm80_quantized_named(run.label)(call.params); });
  emulation.is_dependent = false;
  if (plan.spec->is_split) join_splits(run, plan, call.common, emulation);
  run_lost_rows(run.label, call.lost, call.common, emulation);
  emulation.expect_launched(call.launches(plan));
}

void run_quantized(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = plan_of(run.label, run.problem, run.device);
  ASSERT_EQ(plan.candidate, cuda::Sm90ForwardQuantized::kName);
  run_hopper_plan<cuda::Sm90ForwardQuantized>(run, plan, cuda::quantized_named(run.label),
                                              emulation);
}

}  // namespace fovea::testing
