// What can run on this processor: one table, best first. It feeds selection, workspace, explain and the text of a
// refusal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "fovea/problem.hpp"

#include "cpu/kernels/panel.hpp"
#include "problem/forward.hpp"

namespace fovea::cpu {

inline constexpr std::int64_t kMaxPanels = 16;  // that share a load of K and V

/// The chosen kernel and its tiling. Rows are (q_head, q_idx) pairs of one kv head, head-major: rows of several heads
/// of a GQA group may share a panel, so that decode reads every key once.
struct ForwardSpec {
  CpuTarget target = CpuTarget::scalar;
  bool is_split = false;    // f16 inputs as sums of bf16 numbers
  std::int64_t lanes = 0;   // rows in a panel
  std::int64_t panels = 1;  // most panels in a work item: they share one load of K and V tiles
  // keys in a tile; bits depend on it, so it never depends on threads or batch
  std::int64_t tile_kv = 128;
  std::int64_t map_keys = kSubTileKeys;  // granularity of the block map
  // where one panel holds all rows: kv tiles that are summed before states are merged
  std::int64_t tiles_per_split = 0;
  bool operator==(const ForwardSpec&) const = default;
};

/// Of `remaining` ones: items get smaller towards the end, so that all workers are done at about the same time.
constexpr std::int64_t panels_of_an_item(std::int64_t remaining, int num_workers) {
  const std::int64_t parts = num_workers == 1 ? 1 : 2 * num_workers;
  return std::max<std::int64_t>(1, (remaining + parts - 1) / parts);
}

/// What the caller asked for: the problem's field, else FOVEA_CPU_TARGET.
CpuTarget wanted_target(const ForwardProblem& problem);

const PanelKernels& forward_kernels(const ForwardSpec& spec);

/// The kernels of the same panels that take and give fp32 numbers step by step.
const PanelKernels& plain_kernels(const ForwardSpec& spec);

/// Panels of an item: as many as share a tile well, but enough items for every worker. Never changes a bit.
std::int64_t panels_that_share(const ForwardProblem& problem, const ForwardSpec& spec,
                               int num_threads);

struct Refusal {
  std::string reason;
};

struct Candidate {
  std::string_view name;  // "cpu/attention_forward avx512"
  CpuTarget target;
  bool is_split;
  std::optional<Refusal> (*refuses)(const ForwardProblem& problem, const Candidate& candidate);
  ForwardSpec (*choose)(const ForwardProblem& problem, const Candidate& candidate, int num_threads);
  std::size_t (*workspace_bytes)(const ForwardSpec& spec, const ForwardProblem& problem,
                                 std::size_t program_bytes, int num_threads);
};

std::span<const Candidate> forward_candidates();

/// Most splits that one sequence of this problem can have, and most rows that a split sequence can have.
std::int64_t max_splits(const ForwardSpec& spec, const ForwardProblem& problem);
std::int64_t max_split_rows(const ForwardSpec& spec, const ForwardProblem& problem);

/// Room for the states of splits that run side by side; 0 where sequences and heads alone keep the workers busy.
std::size_t num_partial_floats(const ForwardSpec& spec, const ForwardProblem& problem,
                               int num_threads);

}  // namespace fovea::cpu
