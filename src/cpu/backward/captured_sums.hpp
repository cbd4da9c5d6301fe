// Gradients of what a score program captures: for every score, P (dP - delta) · d score / d load is added to the
// element that the load read. No atomics, and the order of additions depends on the problem alone:
//   - a small tensor has one copy of its sums per task (a fixed list of work items, run one after the other), merged in
//     order;
//   - a large one has a single copy, and items that may touch the same elements are put into one task.
// Read chunk_walk.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fovea/backward.hpp"

#include "cpu/bound_tape.hpp"
#include "cpu/carver.hpp"
#include "cpu/kernels/gradient.hpp"
#include "problem/backward.hpp"

namespace fovea::cpu {

/// One place where the score program reads a captured tensor or scalar.
struct CapturedSite {
  std::size_t gradient = 0;        // index into GradientProblem::captured
  BoundTape derivative;            // of the score by what was read; empty: 1
  std::vector<BoundTape> indices;  // of the load, one per dimension; none for a scalar
};

struct CapturedSumsPlan {
  std::vector<CapturedSite> sites;
  std::vector<bool> is_large;  // by gradient
  /// Items that differ in this touch different elements of every large tensor.
  bool by_sequence = true, by_head = true, by_key = true;
  std::int64_t max_tasks = 0;  // 0: any number, as nothing has a copy per task
  std::size_t program_bytes = 0;

  bool empty() const { return sites.empty(); }
};

CapturedSumsPlan plan_captured_sums(const GradientProblem& problem, std::int64_t tile_kv,
                                    std::int64_t lanes, std::int64_t vector_lanes);

/// Gradients of one panel's tile.
struct CapturedTile {
  ProgramTile program;               // scores: before the program; tensors and scalars are set here
  const float* gradients = nullptr;  // [keys][lanes], by the final score
  std::int64_t num_rows = 0;         // lanes in use
  float* values = nullptr;           // [keys][lanes], scratch
  std::int64_t* offsets = nullptr;   // [keys + lanes + keys · lanes], scratch
};

class CapturedSums {
 public:
  /// Takes its sums from `carver`. Where args is null it only counts.
  CapturedSums(const GradientProblem& problem, const CapturedSumsPlan& plan, std::int64_t num_tasks,
               const AttentionBackward* args, Carver& carver);

  /// Work on all outputs is cut into blocks of rows.
  std::int64_t num_blocks() const { return first_block_.back(); }
  void clear_block(std::int64_t block);
  void clear_task(std::int64_t task);
  void add(std::int64_t task, const CapturedTile& tile, const PanelKernels& kernels,
           const GradientKernels& gradient_kernels);
  void finish_block(std::int64_t block) const;

 private:
  struct Sums {
    double* copies = nullptr;  // small: [tasks][elements], row-major
    float* single = nullptr;   // large: of `strides`
    std::int64_t num_elements = 0;
    std::array<std::int64_t, kMaxRank> strides{};
  };
  struct SiteBindings {
    Bindings derivative;
    std::vector<Bindings> indices;
  };
  struct Offsets;
  struct RowBlock;

  RowBlock row_block(std::int64_t block) const;
  Offsets offsets_of(std::size_t site, const CapturedTile& tile, const PanelKernels& kernels) const;

  const GradientProblem& problem_;
  const CapturedSumsPlan& plan_;
  std::int64_t num_tasks_ = 0;
  const AttentionBackward* args_ = nullptr;
  std::vector<Sums> sums_;              // by gradient
  std::vector<SiteBindings> bindings_;  // by site
  std::vector<std::int64_t> first_block_;
};

}  // namespace fovea::cpu
