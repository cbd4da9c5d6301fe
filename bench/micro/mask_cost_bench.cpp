// What masks cost against the share of keys that they leave visible. Bar: at most 15 % more.
//
//   mask_cost_bench --benchmark_filter='bf16/threads:1/'
//
// One case takes turns with the call that sees everything. Counters: the surcharge in wall time, and in the time that
// workers spend in tasks; what lies between the two is tasks of unequal length and the pool's own time.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "fovea/attention.hpp"

namespace fovea {
namespace {

constexpr std::int64_t kHeads = 8, kSeqlen = 4096, kHeadDim = 128, kWindow = 1024;
constexpr std::array<std::int64_t, 4> kShape{1, kHeads, kSeqlen, kHeadDim};  // in memory

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// A thread pool that adds up the time spent in its tasks.
class TimedPool final : public Executor {
 public:
  explicit TimedPool(int num_threads) : pool_(make_thread_pool(num_threads)) {
    busy_.resize(static_cast<std::size_t>(pool_->concurrency()));
  }
  int concurrency() const override { return pool_->concurrency(); }
  void run(std::int64_t count, const Task& task) override {
    struct Timed {
      const Task& task;
      std::vector<Busy>& busy;
    } timed{task, busy_};
    const auto body = [](void* self, int worker, std::int64_t index) {
      auto& t = *static_cast<Timed*>(self);
      const double begin = seconds_now();
      t.task.body(t.task.context, worker, index);
      t.busy[static_cast<std::size_t>(worker)].seconds += seconds_now() - begin;
    };
    pool_->run(count, {body, &timed});
  }
  /// Since the last call.
  double take_busy_seconds() {
    double sum = 0;
    for (Busy& busy : busy_) {
      sum += busy.seconds;
      busy.seconds = 0;
    }
    return sum;
  }

 private:
  struct alignas(64) Busy {
    double seconds = 0;
  };
  std::unique_ptr<Executor> pool_;
  std::vector<Busy> busy_;
};

std::size_t num_bytes(Dtype dtype) {
  return static_cast<std::size_t>(kHeads * kSeqlen * kHeadDim) * size_bytes(dtype);
}

std::vector<std::byte> random_tensor(Dtype dtype, unsigned seed) {
  std::vector<std::byte> bytes(num_bytes(dtype));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < bytes.size() / size_bytes(dtype); ++i) {
    const float value = normal(random);
    if (dtype == Dtype::f32) {
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    } else {
      const bfloat16 narrow(value);
      std::memcpy(bytes.data() + 2 * i, &narrow, 2);
    }
  }
  return bytes;
}

/// [batch, seqlen, heads, head_dim] of memory that keeps heads apart.
TensorView rows_of_heads(auto* data, Dtype dtype) {
  return TensorView(data, make_spec(dtype, kShape)).permuted({0, 2, 1, 3});
}

struct Tensors {
  Dtype dtype;
  std::vector<std::byte> q = random_tensor(dtype, 1), k = random_tensor(dtype, 2),
                         v = random_tensor(dtype, 3);
};

/// A planned call and its times.
class Contender {
 public:
  Contender(const Tensors& t, const MaskMod& mask, TimedPool& pool)
      : pool_(pool), out_(num_bytes(t.dtype)) {
    args_ = {.q = rows_of_heads(t.q.data(), t.dtype),
             .k = rows_of_heads(t.k.data(), t.dtype),
             .v = rows_of_heads(t.v.data(), t.dtype),
             .out = rows_of_heads(out_.data(), t.dtype),
             .mask = mask,
             .executor = &pool};
    Problem problem = problem_of(args_);
    problem.num_threads = pool.concurrency();
    plan_.emplace(plan(problem));
    workspace_.resize(plan_->workspace_bytes());
    args_.workspace = workspace_;
    plan_->run(args_);
  }

  void run() {
    pool_.take_busy_seconds();
    const double begin = seconds_now();
    plan_->run(args_);
    wall_.push_back(seconds_now() - begin);
    busy_.push_back(pool_.take_busy_seconds());
  }
  double wall() { return median(wall_); }
  double busy() { return median(busy_); }

 private:
  static double median(std::vector<double>& values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
  }

  TimedPool& pool_;
  std::vector<std::byte> out_;
  AttentionForward args_;
  std::optional<Plan> plan_;
  std::vector<std::byte> workspace_;
  std::vector<double> wall_, busy_;
};

double visible_share(std::int64_t window) {
  double pairs = 0;
  for (std::int64_t i = 0; i < kSeqlen; ++i) pairs += static_cast<double>(std::min(i, window) + 1);
  return pairs / static_cast<double>(kSeqlen * kSeqlen);
}

/// range(1): keys to the left that a query sees; kSeqlen for plain causal.
void mask_cost(benchmark::State& state, Dtype dtype) {
  TimedPool pool(static_cast<int>(state.range(0)));
  const std::int64_t left = state.range(1);
  const Tensors tensors{dtype};
  Contender full(tensors, MaskMod(), pool);
  Contender masked(tensors, left < kSeqlen ? window(left, 0) : causal(), pool);
  for (auto _ : state) {
    full.run();
    masked.run();
  }
  const double share = visible_share(left);
  state.counters["full_ms"] = 1e3 * full.wall();
  state.counters["masked_ms"] = 1e3 * masked.wall();
  state.counters["surcharge"] = masked.wall() / full.wall() / share - 1;
  state.counters["busy_surcharge"] = masked.busy() / full.busy() / share - 1;
  state.counters["full_idle"] = 1 - full.busy() / (full.wall() * pool.concurrency());
  state.counters["masked_idle"] = 1 - masked.busy() / (masked.wall() * pool.concurrency());
}

#define FOVEA_MASK_COST(dtype)                                 \
  BENCHMARK_CAPTURE(mask_cost, dtype, Dtype::dtype)            \
      ->ArgNames({"threads", "left"})                          \
      ->ArgsProduct({{1, 0}, {kSeqlen, kWindow, kWindow / 4}}) \
      ->Iterations(11)                                         \
      ->Unit(benchmark::kMillisecond)
FOVEA_MASK_COST(f32);
FOVEA_MASK_COST(bf16);
#undef FOVEA_MASK_COST

}  // namespace
}  // namespace fovea

BENCHMARK_MAIN();
