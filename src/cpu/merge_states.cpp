// Bound: memory. Each state is read once and the result written once; a row's weights are made first, from its lse
// alone.
#include "cpu/merge_states.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/carver.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/operands.hpp"
#include "cpu/row_state.hpp"
#include "cpu/tasks.hpp"

namespace fovea::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kTaskElements = 1 << 14;  // long against handing out a task

/// An lse tensor, dense [batch, head, row] or packed [head, row].
struct RowValues {
  float* data = nullptr;
  std::int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

  explicit RowValues(const TensorView& view)
      : data(const_cast<float*>(static_cast<const float*>(view.data()))),
        batch_stride(view.rank() == 3 ? view.stride(0) : 0),
        head_stride(view.stride(view.rank() - 2)),
        row_stride(view.stride(view.rank() - 1)) {}

  float& at(std::int64_t batch, std::int64_t row, std::int64_t head) const {
    return data[batch * batch_stride + head * head_stride + row * row_stride];
  }
};

struct RowPlace {
  std::int64_t batch = 0, row = 0, head = 0;
};

/// What one worker writes.
struct MergeScratch {
  float* weights = nullptr;  // [states]
  float* sum = nullptr;      // [width]
  float* row = nullptr;      // [width], converted

  static MergeScratch carve(Carver& carver, const MergeStates& args) {
    const auto width = static_cast<std::size_t>(args.out.size(args.out.rank() - 1));
    return {.weights = carver.take<float>(args.outs.size()),
            .sum = carver.take<float>(width),
            .row = carver.take<float>(width)};
  }
};

class MergeRun {
 public:
  MergeRun(const MergeStates& args, std::byte* workspace, Executor& executor)
      : args_(args),
        kernels_(best_f32_kernels()),
        executor_(executor),
        out_(args.out),
        num_rows_(args.out.size(args.out.rank() - 3)),
        num_heads_(args.out.size(args.out.rank() - 2)),
        width_(args.out.size(args.out.rank() - 1)),
        outs_(args.outs.begin(), args.outs.end()),
        lses_(args.lses.begin(), args.lses.end()) {
    Carver carver(workspace);
    for (int worker = 0; worker < executor.concurrency(); ++worker)
      scratch_.push_back(MergeScratch::carve(carver, args));
  }

  void run() {
    const std::int64_t batch = args_.out.rank() == 4 ? args_.out.size(0) : 1;
    count_ = batch * num_rows_ * num_heads_;
    rows_per_task_ = std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(1, width_));
    run_tasks(executor_, ceil_div(count_, rows_per_task_), [this](int worker, std::int64_t task) {
      merge_rows(static_cast<std::size_t>(worker), task);
    });
  }

 private:
  void merge_rows(std::size_t worker, std::int64_t task) {
    const std::int64_t end = std::min(count_, (task + 1) * rows_per_task_);
    for (std::int64_t i = task * rows_per_task_; i < end; ++i) {
      const std::int64_t row = i / num_heads_;
      merge_row({row / num_rows_, row % num_rows_, i % num_heads_}, worker);
    }
  }

  void merge_row(const RowPlace& at, std::size_t worker) {
    const MergeScratch& scratch = scratch_[worker];
    float* const sum = scratch.sum;
    const double lse = weigh(at, scratch.weights);
    std::fill_n(sum, width_, 0.0F);
    bool is_first = true;
    for (std::size_t i = 0; i < outs_.size(); ++i) {
      if (is_empty(i, at)) continue;
      add(outs_[i], at, scratch.weights[i], is_first, scratch);
      is_first = false;
    }
    // Only now: out and lse may be the first state.
    kernels_.store_row(sum, 1, width_, out_.dtype, out_.col_stride,
                       out_.at(at.batch, at.row, at.head));
    if (args_.lse) RowValues(args_.lse).at(at.batch, at.row, at.head) = static_cast<float>(lse);
  }

  bool is_empty(std::size_t state, const RowPlace& at) const {
    return lses_[state].at(at.batch, at.row, at.head) == -kInfinity;
  }

  /// Weights of the states, relative to the whole; returns the lse of the whole.
  double weigh(const RowPlace& at, float* weights) const {
    double top = -kInfinity;
    for (const RowValues& lses : lses_) {
      const double lse = lses.at(at.batch, at.row, at.head);
      if (lse > top || std::isnan(lse)) top = lse;  // NaN stays: nothing is greater
    }
    if (top == -kInfinity) return top;
    double total = 0;
    for (const RowValues& lses : lses_) total += relative(lses, at, top);
    for (std::size_t i = 0; i < lses_.size(); ++i)
      weights[i] = static_cast<float>(relative(lses_[i], at, top) / total);
    return top + std::log(total);
  }

  static double relative(const RowValues& lses, const RowPlace& at, double top) {
    const double lse = lses.at(at.batch, at.row, at.head);
    return lse == top ? 1 : std::exp(lse - top);  // infinity less itself would be NaN
  }

  /// The first state is not added to 0: alone, it is copied bit for bit.
  void add(const Rows& state, const RowPlace& at, float weight, bool is_first,
           const MergeScratch& scratch) const {
    float* const sum = scratch.sum;
    const TileSource source{.data = state.at(at.batch, at.row, at.head),
                            .dtype = state.dtype,
                            .row_stride = 0,
                            .col_stride = state.col_stride,
                            .num_rows = 1,
                            .num_cols = width_};
    const auto* row = static_cast<const float*>(kernels_.load_keys(source, scratch.row).data);
    if (weight == 0) {
      for (std::int64_t d = 0; d < width_; ++d) sum[d] += weighed(weight, row[d]);
    } else if (is_first) {
      for (std::int64_t d = 0; d < width_; ++d) sum[d] = weight * row[d];
    } else {
      for (std::int64_t d = 0; d < width_; ++d) sum[d] += weight * row[d];
    }
  }

  const MergeStates& args_;
  const PanelKernels& kernels_;
  Executor& executor_;
  const Rows out_;
  const std::int64_t num_rows_, num_heads_, width_;
  const std::vector<Rows> outs_;
  const std::vector<RowValues> lses_;
  std::int64_t count_ = 0, rows_per_task_ = 1;
  std::vector<MergeScratch> scratch_;  // of each worker
};

}  // namespace

std::size_t merge_workspace_bytes(const MergeStates& args, int num_workers) {
  Carver carver(nullptr);
  for (int worker = 0; worker < num_workers; ++worker) MergeScratch::carve(carver, args);
  return carver.used();
}

void merge_states(const MergeStates& args, std::byte* workspace, Executor& executor) {
  MergeRun(args, workspace, executor).run();
}

}  // namespace fovea::cpu
