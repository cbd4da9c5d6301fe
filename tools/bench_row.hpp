// A row of fovea bench: what was timed, how long it took, what bounds it. bench.cpp asks and prints, bench_gpu.cpp runs
// on a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bound.hpp"
#include "gpu.hpp"
#include "gpu_bound.hpp"
#include "jobs.hpp"
#include "visible_work.hpp"

namespace fovea::tools {

struct Times {
  double median = 0, min = 0, spread = 0;  // seconds; spread relative to the median
  std::int64_t runs = 0;
};

/// `run` returns seconds and is called once more to warm up. Fewer than `runs` where they take more than ten seconds.
Times time_runs(const std::function<double()>& run, std::int64_t runs);

struct Row {
  std::string name, why;
  std::string device;                // "cpu", "cuda:0"
  int threads = 0, num_threads = 0;  // 0 on a GPU
  Explanation explanation;
  VisibleWork work;
  Times times;
  Bounds bounds;

  // Of what bounds it; where that is known (Bounds::are_known).
  double compute_seconds() const { return work.flops / (bounds.compute_gflops * 1e9); }
  double memory_seconds() const { return work.bytes / (bounds.memory_gigabytes * 1e9); }
  bool is_compute_bound() const { return compute_seconds() >= memory_seconds(); }
  double fraction() const { return std::max(compute_seconds(), memory_seconds()) / times.median; }
  double gflops_per_second() const { return work.flops / times.median * 1e-9; }
};

/// What of a job is timed: the call, its gradients, or both as a step of training takes them.
enum class Timed : std::uint8_t { forward, backward, training };
Timed timed_of(const Job& job, bool wants_training);
/// "gpt2_prefill+backward" of a step of training, "gpt2_prefill int8" of a recipe.
std::string row_name(const Job& job, Timed timed);
/// The work of what is timed, of its visible_work.
VisibleWork work_of(Timed timed, VisibleWork work);

/// Times a job on a GPU: kernels alone, by events, the L2 cache flushed before each run.
Row run_on_gpu(const Job& job, Timed timed, const Gpu& gpu, const GpuBounds& bounds,
               std::int64_t runs);

}  // namespace fovea::tools
