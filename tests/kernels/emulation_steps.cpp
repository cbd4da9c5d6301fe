#include "kernels/emulation_steps.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/emulated_forward.hpp"
#include "support/launch_memory.hpp"

namespace fovea::testing {

void start(const Run& run, Emulation& emulation) {
  emulation.compute_capability = run.device.is_amd() ? 0 : run.device.compute_capability();
  std::vector<TensorBytes> tensors = tensors_of_call(run.args);
  if (run.cache != nullptr) {
    for (const TensorBytes& tensor : tensors_of_cache(run.cache->cache)) tensors.push_back(tensor);
    const TensorView& offsets = run.cache->new_tokens.cu_seqlens;
    if (offsets && offsets.data() != run.args.cu_seqlens_q.data())
      tensors.push_back(tensor_bytes("append.cu_seqlens", offsets));
  }
  // Values that are a view of keys are no memory of their own.
  const std::vector<TensorBytes> all = tensors;
  std::erase_if(tensors, [&](const TensorBytes& part) {
    return std::ranges::any_of(all, [&](const TensorBytes& whole) {
      return part.begin == whole.begin && part.size < whole.size;
    });
  });
  for (const TensorBytes& tensor : tensors)
    emulation.device.register_buffer(tensor.name, tensor.begin, tensor.size);
}

void build_tables(const cuda::ForwardPlan& plan, cuda::ForwardLaunch& call, Emulation& emulation) {
  for (cuda::CapturedTensorParam& tensor : call.params.captures.tensors) tensor.ranges = nullptr;
  if (plan.range_tables.is_empty()) return;
  const std::size_t bytes = plan.workspace_bytes - plan.tables_at;
  const auto tables = emulation.device.buffer<std::byte>("range tables", bytes);
  call.range_tables = plan.range_tables.place(call.params.captures, {tables, bytes});
  const cuda::RangeTableLaunch& launch = call.range_tables;
  emulation.launch({.x = launch.num_groups, .y = launch.num_tables}, 32 * cuda::kRunsPerGroup,
                   cuda::kRunsPerGroup * sizeof(cuda::RangeEntry),
                   [&] { cuda::run_range_tables(launch.params); });
}

void clear_rows(const cuda::ForwardLaunch& call, Emulation& emulation) {
  if (!call.clears_rows) return;
  emulation.launch({.x = static_cast<std::uint32_t>(call.clear_params.total_q)},
                   cuda::kClearingThreads, 0, [&] { cuda::run_clear_rows(call.clear_params); });
}

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
  emulation.is_dependent = cuda::candidate_named(plan.candidate).is_chained;
  const auto join = [&](const cuda::CombineForm& form) {
    const cuda::KernelLaunch launch =
        cuda::combine_launch(call.combine_params, form, emulation.is_dependent, run.device);
    emulation.launch({.x = launch.grid.x}, launch.num_threads, 0, [&] {
      cuda::combine_of(combine_spec(plan), form.splits_at_once)(call.combine_params);
    });
    return outputs_now();
  };
  const auto before = outputs_now();
  const bool takes_groups = call.combine_params.tiles_of_cta > 0;
  const auto wide = join(cuda::wide_form(takes_groups));
  for (std::size_t i = 0; i < outputs.size(); ++i) std::ranges::copy(before[i], outputs[i].begin);
  EXPECT_EQ(join(cuda::kDeepCombine), wide);
  emulation.is_dependent = false;
  if (call.combine_params.num_rows == 0) return;
  const cuda::CombineForm& hosts = cuda::combine_form(call.combine_params.num_rows,
                                                      call.combine_params.max_splits, takes_groups);
  const bool is_first = hosts.role == cuda::kWideCombine.role;
  emulation.launched.erase(emulation.launched.end() - (is_first ? 1 : 2));
}

}  // namespace fovea::testing
