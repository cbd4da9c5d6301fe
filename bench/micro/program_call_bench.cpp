// What a program costs a call through the C ABI, beside the same call without one: as a text, and as a handle, with
// other tensors at each call. Bar: a handle adds 3 us to fovea_plan_run.
//
//   program_call_bench --benchmark_filter='handle'
//
// One row of one head and one key, in the caller's thread: what is left is the host's work.
#include <benchmark/benchmark.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fovea/fovea.h"

namespace {

constexpr std::size_t kTensors = 16;  // that calls take in turn
constexpr const char* kScore = "score + slopes[q_head] * (kv_idx - q_idx)";
constexpr const char* kMask = "q_idx - kv_idx <= reach";
constexpr DLDataType kF32{kDLFloat, 32, 1};

std::array<float, 8> values{};
std::array<std::array<float, 1>, kTensors> slopes{};
std::array<std::int64_t, 4> shape{1, 1, 1, 8};
std::array<std::int64_t, 2> ones{1, 1};
std::array<float, 8> out_values{};

DLTensor tensor(float* data, std::int32_t rank, std::int64_t* extents) {
  return {data, {kDLCPU, 0}, rank, kF32, extents, nullptr, 0};
}

struct Call {
  DLTensor in = tensor(values.data(), 4, shape.data());
  DLTensor out = tensor(out_values.data(), 4, shape.data());
  DLTensor captured{};
  const DLTensor* captured_list[1] = {&captured};
  double scalar = 0;
  fovea_named_tensor named{"slopes", &captured};
  fovea_named_scalar named_scalar{"reach", FOVEA_SCALAR_INT, 0};
  fovea_executor executor{};
  fovea_attention_forward_args args{};

  Call() {
    executor.struct_size = sizeof(executor);
    executor.version = FOVEA_ABI_VERSION;
    executor.concurrency = [](void*) -> std::int32_t { return 1; };
    executor.run = [](void*, std::int64_t count, fovea_task task, void* context) {
      for (std::int64_t i = 0; i < count; ++i) task(context, 0, i);
    };
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.q = args.k = args.v = &in;
    args.out = &out;
    args.executor = &executor;
    next(0);
  }
  void next(std::size_t i) {
    captured = tensor(slopes[i % kTensors].data(), 1, ones.data());
    scalar = named_scalar.value = static_cast<double>(i % kTensors);
  }
};

fovea_program* program_of(fovea_mod kind) {
  static const fovea_tensor_slot tensors[] = {{"slopes", kF32, 1}};
  static const fovea_scalar_slot scalars[] = {{"reach", FOVEA_SCALAR_INT}};
  fovea_program_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.kind = kind;
  args.text = kind == FOVEA_SCORE_MOD ? kScore : kMask;
  args.tensors = tensors;
  args.num_tensors = kind == FOVEA_SCORE_MOD ? 1 : 0;
  args.scalars = scalars;
  args.num_scalars = kind == FOVEA_MASK_MOD ? 1 : 0;
  fovea_program* program = nullptr;
  fovea_program_create(&args, &program, nullptr);
  return program;
}

struct Variant {
  const char* name;
  std::function<void(Call&)> set;
};

std::vector<Variant> variants() {
  static const fovea_program* const score = program_of(FOVEA_SCORE_MOD);
  static const fovea_program* const mask = program_of(FOVEA_MASK_MOD);
  const auto text_score = [](Call& call) {
    call.args.score_mod = kScore;
    call.args.tensors = &call.named;
    call.args.num_tensors = 1;
  };
  const auto handle_score = [](Call& call) {
    call.args.score_program = score;
    call.args.score_tensors = call.captured_list;
    call.args.num_score_tensors = 1;
  };
  const auto with_words = [](const auto& set) {
    return [set](Call& call) {
      set(call);
      call.args.softcap = 30;
      call.args.causal = 1;
    };
  };
  return {{"none", [](Call&) {}},
          {"text/score", text_score},
          {"text/score+words", with_words(text_score)},
          {"text/mask",
           [](Call& call) {
             call.args.mask_mod = kMask;
             call.args.scalars = &call.named_scalar;
             call.args.num_scalars = 1;
           }},
          {"handle/score", handle_score},
          {"handle/score+words", with_words(handle_score)},
          {"handle/mask", [](Call& call) {
             call.args.mask_program = mask;
             call.args.mask_scalars = &call.scalar;
             call.args.num_mask_scalars = 1;
           }}};
}

void time_plan_run(benchmark::State& state, const Variant& variant) {
  Call call;
  variant.set(call);
  fovea_plan* plan = nullptr;
  if (fovea_plan_create(&call.args, nullptr, &plan, nullptr) != FOVEA_OK)
    return state.SkipWithError("no plan");
  std::vector<std::byte> workspace(fovea_plan_workspace_bytes(plan));
  call.args.workspace = workspace.data();
  call.args.workspace_bytes = workspace.size();
  std::size_t i = 0;
  for (auto _ : state) {
    call.next(++i);
    if (fovea_plan_run(plan, &call.args, nullptr) != FOVEA_OK) state.SkipWithError("refused");
  }
  fovea_plan_destroy(plan);
}

void time_forward(benchmark::State& state, const Variant& variant) {
  Call call;
  variant.set(call);
  std::size_t i = 0;
  for (auto _ : state) {
    call.next(++i);
    if (fovea_attention_forward(&call.args, nullptr) != FOVEA_OK) state.SkipWithError("refused");
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  for (const Variant& variant : variants()) {
    benchmark::RegisterBenchmark(
        (std::string("plan_run/") + variant.name).c_str(),
        [variant](benchmark::State& state) { time_plan_run(state, variant); });
    benchmark::RegisterBenchmark(
        (std::string("attention_forward/") + variant.name).c_str(),
        [variant](benchmark::State& state) { time_forward(state, variant); });
  }
  benchmark::RunSpecifiedBenchmarks();
}
