// Attention by recipes beside attention without one, end to end on one thread: 8 heads of 4096 rows, head_dim 128,
// bf16, rounding of q, k and v included.
//
//   quantized_bench [target [recipe...]]
//
// Contenders take turns. Two figures each: the least call, and the sum of each task's least time, which shows where
// time goes on a busy machine.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/mask.hpp"
#include "fovea/quant.hpp"

namespace fovea {
namespace {

constexpr std::int64_t kHeads = 8, kSeqlen = 4096, kHeadDim = 128;
constexpr int kRounds = 12;

/// Runs tasks on the calling thread and keeps the least time of each: of the n-th task of the k-th run of a call.
class LeastTimes final : public Executor {
 public:
  int concurrency() const override { return 1; }
  void start_call() {
    pass_ = 0;
    of_call_ = 0;
  }
  void end_call() { least_call_ = std::min(least_call_, of_call_); }
  double least_call() const { return least_call_ * 1e3; }  // ms
  void run(std::int64_t count, const Task& task) override {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      task.body(task.context, 0, i);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      of_call_ += taken.count();
      const auto [least, is_new] = tasks_.try_emplace({pass_, i}, taken.count());
      if (!is_new) least->second = std::min(least->second, taken.count());
    }
    ++pass_;
  }
  /// Of each run of a call, ms.
  std::vector<double> passes() const {
    std::vector<double> sums(static_cast<std::size_t>(pass_));
    for (const auto& [at, seconds] : tasks_)
      sums[static_cast<std::size_t>(at.first)] += seconds * 1e3;
    return sums;
  }

 private:
  int pass_ = 0;
  double of_call_ = 0, least_call_ = std::numeric_limits<double>::infinity();
  std::map<std::pair<int, std::int64_t>, double> tasks_;
};

/// On a boundary of 4096 bytes: tile instructions read keys where they lie.
class Rows {
 public:
  Rows() : memory_(kCount * sizeof(bfloat16) + kAlignment) {
    void* at = memory_.data();
    std::size_t space = memory_.size();
    data_ = static_cast<bfloat16*>(std::align(kAlignment, kAlignment, at, space));
  }
  explicit Rows(unsigned seed) : Rows() {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < kCount; ++i) data_[i] = bfloat16(normal(random));
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  bfloat16* data() { return data_; }

 private:
  static constexpr std::size_t kCount = kSeqlen * kHeads * kHeadDim, kAlignment = 4096;
  std::vector<std::byte> memory_;
  bfloat16* data_ = nullptr;
};

struct Contender {
  std::string recipe;
  LeastTimes times{};
  std::vector<std::byte> workspace{};
};

void bench(CpuTarget target, std::vector<Contender>& contenders, const MaskMod& mask) {
  Rows q(1), k(2), v(3), out;
  const TensorSpec spec =
      make_spec(Dtype::bf16, std::vector<std::int64_t>{1, kSeqlen, kHeads, kHeadDim});
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& contender : contenders) {
      AttentionForward args{.q = TensorView(q.data(), spec),
                            .k = TensorView(k.data(), spec),
                            .v = TensorView(v.data(), spec),
                            .out = TensorView(out.data(), spec),
                            .mask = mask,
                            .executor = &contender.times};
      args.cpu_target = target;
      args.quant = parse_quantization(contender.recipe);
      Problem problem = problem_of(args);
      problem.num_threads = 1;
      const Plan planned = plan(problem);
      contender.workspace.resize(planned.workspace_bytes());
      args.workspace = contender.workspace;
      contender.times.start_call();
      planned.run(args);
      contender.times.end_call();
    }
  }
  for (const Contender& contender : contenders) {
    const double call = contender.times.least_call();
    std::printf("%-10s %8.2f ms  %.2fx  least of each task, by passes:", contender.recipe.c_str(),
                call, contenders.front().times.least_call() / call);
    for (const double ms : contender.times.passes()) std::printf(" %.2f", ms);
    std::printf("\n");
  }
}

}  // namespace
}  // namespace fovea

int main(int argc, char** argv) {
  using namespace fovea;
  const std::string target = argc > 1 ? argv[1] : "amx_bf16";
  std::vector<std::string> recipes(argv + std::min(argc, 2), argv + argc);
  if (recipes.empty()) recipes = {"int8", "accurate", "fast"};
  for (const bool is_causal : {false, true}) {
    std::printf("%s\n", is_causal ? "causal" : "full");
    std::vector<Contender> contenders{{"none"}};
    for (const std::string& recipe : recipes) contenders.push_back({recipe});
    bench(parse_cpu_target(target).value(), contenders, is_causal ? causal() : MaskMod());
  }
  return 0;
}
