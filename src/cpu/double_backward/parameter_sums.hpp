// Sums over the whole batch: gradients of sinks and of what the score program captures. Items are shared out to a
// number of tasks that the problem alone decides, each with sums of its own, merged in order: threads cannot change a
// bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/backward.hpp"

namespace fovea::cpu {

class ParameterSums {
 public:
  ParameterSums(const AttentionDoubleBackward& args, std::int64_t num_items);

  /// Task t computes the items t, t + num_tasks, ...
  std::int64_t num_tasks() const { return num_tasks_; }

  /// Of one task: [num_heads_q]; empty where grad_sinks is not wanted.
  std::span<double> sinks(std::int64_t task);
  /// Of one task, row-major: of args.grad_captured[index].
  std::span<double> captured(std::int64_t task, std::size_t index);

  /// When all tasks are done.
  void write() const;

 private:
  void write(const TensorView& view, std::size_t begin) const;

  const AttentionDoubleBackward& args_;
  std::vector<std::size_t> begin_;  // of the sinks, of each captured float; and the end
  std::int64_t num_tasks_ = 1;
  std::vector<double> sums_;  // [num_tasks][begin_.back()]
};

}  // namespace fovea::cpu
