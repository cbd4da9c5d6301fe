// What a warm Plan::run and DecodePlan::run cost the host on a GPU, as a whole and in parts; captured tensors move from
// call to call. Bar: 3 us above the launches, each of which costs what driver/launch says.
//
//   plan_run_bench --benchmark_filter='run/'
//
// Without a driver, the parts that need none. All but what a launch costs is to be had without a GPU, over the fake
// driver of the tests as the process' own: a folder with it as libcuda.so.1 in LD_LIBRARY_PATH (and NVRTC). Runs come
// in bursts with a wait between them, for a full queue would make the host wait.
#include <benchmark/benchmark.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fovea/kv_cache.hpp"

#include "cuda/availability.hpp"
#include "cuda/driver/resources.hpp"
#include "cuda/driver/tensor_map.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/forward/sm90.hpp"
#include "cuda/jit/loader.hpp"
#include "plan/plan.hpp"

namespace fovea {
namespace {

constexpr int kBurst = 32;
constexpr int kBursts = 300;
constexpr std::int64_t kBatch = 1, kRows = 128, kHeads = 2, kHeadDim = 64;
constexpr std::int64_t kDecodedKeys = 1024;  // of more than one split

/// A call whose tensors lie somewhere on a GPU; nothing but addresses is looked at before the launch.
struct Call {
  AttentionForward args;
  std::shared_ptr<cuda::driver::DeviceMemory> memory;
  std::shared_ptr<cuda::driver::OwnedStream> stream;

  explicit Call(bool has_gpu, const MaskMod& mask = {}, float dropout = 0) {
    constexpr std::size_t kBytes = std::size_t{16} << 20U;
    std::byte* at = nullptr;
    if (has_gpu) {
      const auto& context = cuda::driver::process_context(Device::cuda());
      memory = std::make_shared<cuda::driver::DeviceMemory>(context, kBytes);
      stream = std::make_shared<cuda::driver::OwnedStream>(context);
      memory->fill(0, stream->get());
      at = static_cast<std::byte*>(memory->data());
    } else {
      at = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 32U);
    }
    const auto tensor = [&] {
      TensorSpec spec = make_spec(Dtype::bf16, std::array{kBatch, kRows, kHeads, kHeadDim});
      spec.device = Device::cuda(0);
      const TensorView view(static_cast<void*>(at), spec);
      at += kBytes / 16;
      return view;
    };
    args.q = tensor();
    args.k = tensor();
    args.v = tensor();
    args.out = tensor();
    args.mask = mask;
    args.dropout.p = dropout;
    args.workspace = {at, kBytes / 2};
    args.stream = stream != nullptr ? stream->get().handle() : nullptr;
  }
};

/// Times `run` in bursts; `wait` ends one.
void time_bursts(benchmark::State& state, const std::function<void()>& run,
                 const std::function<void()>& wait) {
  for (int i = 0; i < kBurst; ++i) run();
  for (auto _ : state) {
    wait();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kBurst; ++i) run();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    state.SetIterationTime(time.count() / kBurst);
  }
}

/// Programs over tensors of a GPU that calls take in turn: the same formula, other addresses.
constexpr std::size_t kTensors = 16;

template <class Program, class Make>
std::vector<Program> programs_over(std::byte* at, const TensorSpec& shape, const Make& make) {
  TensorSpec spec = shape;
  spec.device = Device::cuda(0);
  std::vector<Program> all;
  for (std::size_t i = 0; i < kTensors; ++i) {
    all.push_back(make(TensorView(static_cast<void*>(at), spec)));
    at += std::size_t{1} << 16U;
  }
  return all;
}

std::vector<ScoreMod> biases(std::byte* at, std::int64_t rows, std::int64_t keys) {
  return programs_over<ScoreMod>(at, make_spec(Dtype::f32, std::array{rows, keys}),
                                 [](const TensorView& table) { return bias(table); });
}

std::vector<MaskMod> document_masks(std::byte* at) {
  return programs_over<MaskMod>(at, make_spec(Dtype::i32, std::array{kBatch, kRows}),
                                [](const TensorView& ids) { return documents(ids); });
}

struct Variant {
  const char* name;
  std::vector<ScoreMod> scores{1};
  std::vector<MaskMod> masks{1};
  float dropout = 0;
};

/// Where captured tensors lie: nothing reads them before the launch.
std::byte* captured_memory() { return reinterpret_cast<std::byte*>(std::uintptr_t{1} << 33U); }

std::vector<Variant> variants() {
  return {{.name = "full"},
          {.name = "causal", .masks = {causal()}},
          {.name = "dropout", .dropout = 0.1F},
          {.name = "bias", .scores = biases(captured_memory(), kRows, kRows)},
          {.name = "documents", .masks = document_masks(captured_memory())}};
}

void time_run(benchmark::State& state, const Variant& variant) {
  Call call(true, variant.masks[0], variant.dropout);
  call.args.score = variant.scores[0];
  const Plan plan = fovea::plan(problem_of(call.args));
  state.SetLabel(plan.explain().kernel);
  std::size_t i = 0;
  time_bursts(
      state,
      [&] {
        call.args.score = variant.scores[++i % variant.scores.size()];
        call.args.mask = variant.masks[i % variant.masks.size()];
        plan.run(call.args);
      },
      [&] { call.stream->synchronize(); });
}

/// The convenience call: the plan is found again, the workspace is the caller's.
void time_call(benchmark::State& state) {
  const Call call(true, causal());
  time_bursts(
      state, [&] { attention_forward(call.args); }, [&] { call.stream->synchronize(); });
}

/// One token for each of eight sequences over pages.
AttentionDecode decode_call(const Call& memory) {
  constexpr std::int64_t kSequences = 8, kPages = 64, kPageSize = 16;
  auto* at = static_cast<std::byte*>(memory.memory->data());
  const auto tensor = [&](Dtype dtype, auto... extents) {
    TensorSpec spec = make_spec(dtype, std::array{std::int64_t{extents}...});
    spec.device = Device::cuda(0);
    const TensorView view(static_cast<void*>(at), spec);
    at += std::size_t{1} << 20U;
    return view;
  };
  AttentionDecode args{.q = tensor(Dtype::bf16, kSequences, 1, kHeads, kHeadDim),
                       .out = tensor(Dtype::bf16, kSequences, 1, kHeads, kHeadDim)};
  args.cache.k = tensor(Dtype::bf16, kPages, kPageSize, kHeads, kHeadDim);
  args.cache.v = tensor(Dtype::bf16, kPages, kPageSize, kHeads, kHeadDim);
  args.cache.page_table = tensor(Dtype::i32, kSequences, kDecodedKeys / kPageSize);
  args.cache.seqlens = tensor(Dtype::i32, kSequences);
  args.append = {.k = tensor(Dtype::bf16, kSequences, 1, kHeads, kHeadDim),
                 .v = tensor(Dtype::bf16, kSequences, 1, kHeads, kHeadDim)};
  args.workspace = {at, std::size_t{4} << 20U};
  args.stream = memory.args.stream;
  return args;
}

/// The token appended, the plan found again.
void time_decode(benchmark::State& state) {
  const Call memory(true);
  const AttentionDecode args = decode_call(memory);
  time_bursts(
      state, [&] { attention_decode(args); }, [&] { memory.stream->synchronize(); });
}

/// Through a plan. appends: a launch more.
void time_decode_plan(benchmark::State& state, bool appends, const std::vector<ScoreMod>& scores) {
  const Call memory(true);
  AttentionDecode args = decode_call(memory);
  if (!appends) args.append = {};
  args.score = scores[0];
  const DecodePlan plan = plan_decode(args, kDecodedKeys);
  state.SetLabel(plan.explain().kernel);
  std::size_t i = 0;
  time_bursts(
      state,
      [&] {
        args.score = scores[++i % scores.size()];
        plan.run(args);
      },
      [&] { memory.stream->synchronize(); });
}

// ---- parts, which need no GPU ----

ForwardProblem problem_of_call(const Call& call) {
  return validate(problem_of(call.args), "bench");
}

void time_validation(benchmark::State& state) {
  const Call call(false, causal());
  const ForwardProblem problem = problem_of_call(call);
  for (auto _ : state) validate_arguments(problem, call.args, "bench");
}

void time_params(benchmark::State& state) {
  const Call call(false, causal());
  const ForwardProblem problem = problem_of_call(call);
  const cuda::ForwardPlan plan = cuda::choose_forward(problem, cuda::typical_device(8, 0));
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        cuda::forward_launch(problem, plan, call.args, call.args.workspace.data(), nullptr));
  }
}

void time_problem(benchmark::State& state) {
  const Call call(false, causal());
  for (auto _ : state) benchmark::DoNotOptimize(problem_key(problem_of(call.args)));
}

// ---- the driver's ----

void time_tensor_maps(benchmark::State& state) {
  const Call call(true);
  const auto& context = cuda::driver::process_context(Device::cuda());
  const cuda::driver::ContextScope scope(context);
  cuda::driver::TensorMapSpec spec{.element = cuda::driver::TensorMapElement::bf16, .rank = 4};
  spec.shape = {kHeadDim, kRows, kHeads, kBatch};
  spec.stride_bytes = {2, 2 * kHeads * kHeadDim, 2 * kHeadDim, 2 * kRows * kHeads * kHeadDim};
  spec.box = {64, 64, 1, 1};
  for (auto _ : state) {
    for (int i = 0; i < 4; ++i)
      benchmark::DoNotOptimize(
          cuda::driver::encode_tiled(context.driver(), spec, call.args.q.data()));
  }
}

/// All that Hopper's kernel takes before it is launched.
void time_sm90_launch(benchmark::State& state) {
  const Call call(true, causal());
  const auto& context = cuda::driver::process_context(Device::cuda());
  const cuda::driver::ContextScope scope(context);
  const ForwardProblem problem = problem_of_call(call);
  const cuda::ForwardPlan plan = cuda::choose_forward(problem, cuda::typical_device(9, 0));
  const cuda::TensorMapEncoder encode = cuda::encoder_of(context.driver());
  for (auto _ : state) {
    benchmark::DoNotOptimize(cuda::Sm90Forward::prepare(problem, plan, call.args, nullptr,
                                                        call.args.workspace.data(), encode));
  }
}

void time_memset(benchmark::State& state) {
  const Call call(true);
  const auto& context = cuda::driver::process_context(Device::cuda());
  const cuda::driver::ContextScope scope(context);
  const auto address = reinterpret_cast<cuda::driver::DevicePointer>(call.args.workspace.data());
  time_bursts(
      state, [&] { context.api().set_bytes(address, 0, 256, call.stream->get().handle()); },
      [&] { call.stream->synchronize(); });
}

/// An empty kernel with parameters of so many bytes.
void time_launch(benchmark::State& state, int bytes) {
  const Call call(true);
  const cuda::jit::KernelText text{.unit = "struct Params { char bytes[" + std::to_string(bytes) +
                                           "]; };\nextern \"C\" __global__ void " +
                                           std::string(cuda::jit::kEntryName) +
                                           "(const __grid_constant__ Params p) {}\n",
                                   .label = "empty"};
  const auto kernel =
      cuda::jit::process_loader().load(text, cuda::driver::process_context(Device::cuda()));
  const std::array<std::byte, 4096> params{};
  void* pointers[] = {const_cast<std::byte*>(params.data())};
  time_bursts(
      state,
      [&] {
        cuda::driver::launch({.grid = {}, .block = {}, .stream = call.stream->get()},
                             kernel->function, pointers);
      },
      [&] { call.stream->synchronize(); });
}

void add_benchmarks() {
  benchmark::RegisterBenchmark("part/validate_arguments", time_validation);
  benchmark::RegisterBenchmark("part/forward_launch", time_params);
  benchmark::RegisterBenchmark("part/problem_key", time_problem);
  if (!cuda::why_unavailable(0).empty()) return;
  for (const Variant& variant : variants()) {
    benchmark::RegisterBenchmark((std::string("run/") + variant.name).c_str(),
                                 [variant](benchmark::State& state) { time_run(state, variant); })
        ->UseManualTime()
        ->Iterations(kBursts);
  }
  benchmark::RegisterBenchmark("attention_forward/causal", time_call)
      ->UseManualTime()
      ->Iterations(kBursts);
  benchmark::RegisterBenchmark("attention_decode/append", time_decode)
      ->UseManualTime()
      ->Iterations(kBursts);
  const auto add_decode = [](const char* name, bool appends, const std::vector<ScoreMod>& scores) {
    benchmark::RegisterBenchmark(
        name, [=](benchmark::State& state) { time_decode_plan(state, appends, scores); })
        ->UseManualTime()
        ->Iterations(kBursts);
  };
  const std::vector<ScoreMod> none(1);
  add_decode("decode_plan/plain", false, none);
  add_decode("decode_plan/append", true, none);
  add_decode("decode_plan/bias", false, biases(captured_memory(), 1, kDecodedKeys));
  benchmark::RegisterBenchmark("driver/four_tensor_maps", time_tensor_maps);
  benchmark::RegisterBenchmark("part/sm90_launch", time_sm90_launch);
  for (const int bytes : {8, 512, 1024, 2048, 4000}) {
    benchmark::RegisterBenchmark(("driver/launch/" + std::to_string(bytes)).c_str(),
                                 [bytes](benchmark::State& state) { time_launch(state, bytes); })
        ->UseManualTime()
        ->Iterations(kBursts);
  }
  benchmark::RegisterBenchmark("driver/memset", time_memset)->UseManualTime()->Iterations(kBursts);
}

}  // namespace
}  // namespace fovea

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  fovea::add_benchmarks();
  benchmark::RunSpecifiedBenchmarks();
}
