#include "cpu/backward/captured_sums.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>

#include "core/scalar_io.hpp"
#include "expr/differentiate.hpp"

namespace fovea::cpu {
namespace {

using expr::Rate;
using expr::Variable;

constexpr std::int64_t kMaxSmall = 16 * 1024;  // elements: a copy per task is 128 KB
constexpr std::int64_t kMaxTasks = 64;         // copies: 8 MB at most, and work for as many threads
constexpr std::size_t kMaxLanes = 64;          // of a panel on any target
constexpr std::int64_t kBlockElements = 65536;  // of an output, cleared and written by one task

Rate rate_of(const BoundTape& tape) { return tape.tape.code.back().rate; }

bool is_one(const expr::Node& node) {
  return node.op == expr::Op::constant && node.float_value == 1;
}

/// Does some dimension of the tensor, at every load of it, have exactly this variable as its index, in range?
bool is_indexed_by(const std::vector<const expr::Node*>& loads, const TensorSpec& spec,
                   Variable variable, std::int64_t extent) {
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(spec.rank); ++dim) {
    if (spec.shape[dim] < extent) continue;  // the last element stands for all beyond
    const bool everywhere = std::ranges::all_of(loads, [&](const expr::Node* load) {
      const expr::Node& index = *load->operands[dim];
      return index.op == expr::Op::variable && index.variable == variable;
    });
    if (everywhere) return true;
  }
  return false;
}

void add_program_bytes(const BoundTape& tape, std::int64_t tile_kv, std::int64_t lanes,
                       std::int64_t vector_lanes, std::size_t& bytes) {
  if (tape.empty()) return;
  for (const std::int64_t width : {lanes, vector_lanes})
    bytes = std::max(bytes, program_scratch_bytes(tape.tape, tile_kv, static_cast<int>(width)));
}

/// Rows [row, row + count) of a tensor seen as rows of its last dimension.
struct RowWalk {
  explicit RowWalk(const TensorSpec& spec)
      : width(spec.rank == 0 ? 1 : spec.shape[static_cast<std::size_t>(spec.rank - 1)]),
        num_rows(width == 0 ? 0 : spec.num_elements() / width) {}

  std::int64_t width;
  std::int64_t num_rows;

  /// Offset of a row's first element for these strides.
  static std::int64_t offset(const TensorSpec& spec,
                             const std::array<std::int64_t, kMaxRank>& strides, std::int64_t row) {
    std::int64_t result = 0;
    for (int dim = spec.rank - 2; dim >= 0; --dim) {
      const std::int64_t extent = spec.shape[static_cast<std::size_t>(dim)];
      result += row % extent * strides[static_cast<std::size_t>(dim)];
      row /= extent;
    }
    return result;
  }
};

}  // namespace

CapturedSumsPlan plan_captured_sums(const GradientProblem& problem, std::int64_t tile_kv,
                                    std::int64_t lanes, std::int64_t vector_lanes) {
  CapturedSumsPlan plan;
  if (problem.captured.empty()) return plan;
  const ForwardProblem& f = problem.forward;
  const ScoreMod& score = f.problem.score;
  const auto derivatives = expr::captured_derivatives(score.expr().shared());
  for (std::size_t i = 0; i < problem.captured.size(); ++i) {
    const CapturedGradient& captured = problem.captured[i];
    std::vector<const expr::Node*> loads;
    for (const expr::CapturedDerivative& each : derivatives) {
      if (each.slot != captured.name) continue;
      CapturedSite site{.gradient = i, .derivative = {}, .indices = {}};
      if (!is_one(*each.derivative)) site.derivative = {each.derivative, score.captures()};
      add_program_bytes(site.derivative, tile_kv, lanes, vector_lanes, plan.program_bytes);
      for (const expr::NodePtr& index : each.leaf->operands) {
        site.indices.emplace_back(index, score.captures());
        add_program_bytes(site.indices.back(), tile_kv, lanes, vector_lanes, plan.program_bytes);
      }
      plan.sites.push_back(std::move(site));
      loads.push_back(each.leaf.get());
    }
    const bool is_large = captured.spec.num_elements() > kMaxSmall;
    plan.is_large.push_back(is_large);
    if (!is_large) {
      plan.max_tasks = kMaxTasks;
      continue;
    }
    plan.by_sequence &= is_indexed_by(loads, captured.spec, Variable::batch, f.num_sequences);
    plan.by_head &= is_indexed_by(loads, captured.spec, Variable::q_head, f.num_heads_q) ||
                    is_indexed_by(loads, captured.spec, Variable::kv_head, f.num_heads_kv);
    plan.by_key &= is_indexed_by(loads, captured.spec, Variable::kv_idx, f.seqlen_kv);
  }
  return plan;
}

/// Rows of one output.
struct CapturedSums::RowBlock {
  std::size_t gradient = 0;
  std::int64_t begin = 0, end = 0;  // rows of the last dimension
};

CapturedSums::CapturedSums(const GradientProblem& problem, const CapturedSumsPlan& plan,
                           std::int64_t num_tasks, const AttentionBackward* args, Carver& carver)
    : problem_(problem), plan_(plan), num_tasks_(num_tasks), args_(args), first_block_{0} {
  for (std::size_t i = 0; i < problem.captured.size(); ++i) {
    const TensorSpec& spec = problem.captured[i].spec;
    const std::span shape(spec.shape.data(), static_cast<std::size_t>(spec.rank));
    Sums sums{.num_elements = spec.num_elements(), .strides = make_spec(Dtype::f32, shape).strides};
    const auto size = static_cast<std::size_t>(sums.num_elements);
    if (!plan.is_large[i]) {
      sums.copies = carver.take<double>(static_cast<std::size_t>(num_tasks) * size);
    } else if (spec.dtype != Dtype::f32) {
      sums.single = carver.take<float>(size);
    } else if (args != nullptr) {  // the output holds the sums
      const TensorView& view = args->dcaptured[i].view;
      sums.single = static_cast<float*>(view.mutable_data());
      sums.strides = view.spec().strides;
    }
    sums_.push_back(sums);
    const RowWalk walk(spec);
    const std::int64_t rows_per_block =
        std::max<std::int64_t>(1, kBlockElements / std::max<std::int64_t>(1, walk.width));
    first_block_.push_back(first_block_.back() + ceil_div(walk.num_rows, rows_per_block));
  }
  if (args == nullptr) return;
  const ScoreMod& score = args->forward.score;
  for (const CapturedSite& site : plan.sites) {
    SiteBindings bindings{site.derivative.bindings(score), {}};
    for (const BoundTape& index : site.indices) bindings.indices.push_back(index.bindings(score));
    bindings_.push_back(std::move(bindings));
  }
}

CapturedSums::RowBlock CapturedSums::row_block(std::int64_t block) const {
  const auto found = std::ranges::upper_bound(first_block_, block) - 1;
  const auto gradient = static_cast<std::size_t>(found - first_block_.begin());
  const RowWalk walk(problem_.captured[gradient].spec);
  const std::int64_t rows_per_block = std::max<std::int64_t>(1, kBlockElements / walk.width);
  const std::int64_t begin = (block - *found) * rows_per_block;
  return {gradient, begin, std::min(walk.num_rows, begin + rows_per_block)};
}

void CapturedSums::clear_block(std::int64_t block) {
  const RowBlock rows = row_block(block);
  const Sums& sums = sums_[rows.gradient];
  if (sums.single == nullptr) return;
  const TensorSpec& spec = problem_.captured[rows.gradient].spec;
  const std::int64_t width = RowWalk(spec).width;
  const std::int64_t stride = sums.strides[static_cast<std::size_t>(spec.rank - 1)];
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    float* to = sums.single + RowWalk::offset(spec, sums.strides, row);
    for (std::int64_t i = 0; i < width; ++i) to[i * stride] = 0;
  }
}

void CapturedSums::clear_task(std::int64_t task) {
  for (const Sums& sums : sums_) {
    if (sums.copies != nullptr)
      std::fill_n(sums.copies + task * sums.num_elements, sums.num_elements, 0.0);
  }
}

void CapturedSums::finish_block(std::int64_t block) const {
  const RowBlock rows = row_block(block);
  const Sums& sums = sums_[rows.gradient];
  const TensorView& view = args_->dcaptured[rows.gradient].view;
  if (sums.single == view.data()) return;
  const TensorSpec& spec = view.spec();
  const std::int64_t width = RowWalk(spec).width;
  const std::int64_t stride = spec.strides[static_cast<std::size_t>(spec.rank - 1)];
  auto* out = static_cast<std::byte*>(view.mutable_data());
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    const std::int64_t at = RowWalk::offset(spec, spec.strides, row);
    for (std::int64_t i = 0; i < width; ++i) {
      double value = 0;
      if (sums.single != nullptr) {
        value = sums.single[row * width + i];
      } else {
        for (std::int64_t task = 0; task < num_tasks_; ++task)
          value += sums.copies[task * sums.num_elements + row * width + i];
      }
      store_scalar(out, spec.dtype, at + i * stride, static_cast<float>(value));
    }
  }
}

/// Where the elements lie that a tile's loads read: by_key[key] + by_row[row] + by_score[key][lane].
struct CapturedSums::Offsets {
  std::int64_t* by_key;
  std::int64_t* by_row;
  std::int64_t* by_score;  // null where no index differs for every score
  bool has_key = false, has_row = false;
};

CapturedSums::Offsets CapturedSums::offsets_of(std::size_t site, const CapturedTile& tile,
                                               const PanelKernels& kernels) const {
  const std::int64_t keys = tile.program.num_keys;
  const std::int64_t lanes = tile.program.lanes;
  Offsets offsets{tile.offsets, tile.offsets + keys, nullptr};
  std::fill_n(tile.offsets, keys + lanes, 0);
  const std::vector<BoundTape>& indices = plan_.sites[site].indices;
  const std::size_t gradient = plan_.sites[site].gradient;
  const TensorSpec& spec = problem_.captured[gradient].spec;
  for (std::size_t dim = 0; dim < indices.size(); ++dim) {
    const Rate rate = rate_of(indices[dim]);
    ProgramTile program = tile.program;
    program.scores = tile.values;
    program.tensors = bindings_[site].indices[dim].tensors.data();
    program.scalars = bindings_[site].indices[dim].scalars.data();
    if (rate == Rate::uniform || rate == Rate::per_query) program.num_keys = 1;
    if (rate == Rate::per_key) program.lanes = kernels.vector_lanes;
    if (rate == Rate::per_score && tile.program.scores != nullptr)
      std::memcpy(tile.values, tile.program.scores,
                  static_cast<std::size_t>(keys * lanes) * sizeof(float));
    kernels.run_score(indices[dim].tape, program);
    const std::int64_t last = spec.shape[dim] - 1;
    const std::int64_t stride = sums_[gradient].strides[dim];
    const auto offset = [&](std::int64_t i) {
      const std::int64_t index = std::bit_cast<std::int32_t>(tile.values[i]);
      return std::clamp<std::int64_t>(index, 0, last) * stride;
    };
    if (rate == Rate::per_key) {
      offsets.has_key = true;
      for (std::int64_t key = 0; key < keys; ++key)
        offsets.by_key[key] += offset(key * program.lanes);
    } else if (rate == Rate::per_score) {
      if (offsets.by_score == nullptr) {
        offsets.by_score = tile.offsets + keys + lanes;
        std::fill_n(offsets.by_score, keys * lanes, 0);
      }
      for (std::int64_t i = 0; i < keys * lanes; ++i) offsets.by_score[i] += offset(i);
    } else {
      offsets.has_row |= rate == Rate::per_query;
      for (std::int64_t row = 0; row < tile.num_rows; ++row) offsets.by_row[row] += offset(row);
    }
  }
  return offsets;
}

namespace {

/// Values of a tile into sums.
template <typename Sum, typename Offsets>
void scatter(const float* values, std::int64_t num_keys, std::int64_t num_rows, std::int64_t lanes,
             const Offsets& at, Sum* sums) {
  if (at.by_score != nullptr) {
    for (std::int64_t key = 0; key < num_keys; ++key) {
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const std::int64_t i = key * lanes + row;
        sums[at.by_key[key] + at.by_row[row] + at.by_score[i]] += values[i];
      }
    }
    return;
  }
  if (at.has_key && at.has_row) {
    for (std::int64_t row = 0; row < num_rows; ++row) {  // biases are contiguous along the keys
      Sum* to = sums + at.by_row[row];
      for (std::int64_t key = 0; key < num_keys; ++key)
        to[at.by_key[key]] += values[key * lanes + row];
    }
    return;
  }
  if (at.has_key) {
    for (std::int64_t key = 0; key < num_keys; ++key) {
      float sum = 0;
      for (std::int64_t row = 0; row < num_rows; ++row) sum += values[key * lanes + row];
      sums[at.by_key[key] + at.by_row[0]] += sum;
    }
    return;
  }
  std::array<float, kMaxLanes> by_row{};
  for (std::int64_t key = 0; key < num_keys; ++key) {
    for (std::int64_t row = 0; row < num_rows; ++row)
      by_row[static_cast<std::size_t>(row)] += values[key * lanes + row];
  }
  for (std::int64_t row = 0; row < num_rows; ++row)
    sums[at.by_row[row]] += by_row[static_cast<std::size_t>(row)];
}

/// Elements along the keys are neighbours, and every row has its own: a dense bias.
template <typename Offsets>
bool is_contiguous(const Offsets& at, std::int64_t num_keys) {
  if (!at.has_key || !at.has_row || at.by_score != nullptr) return false;
  for (std::int64_t key = 1; key < num_keys; ++key) {
    if (at.by_key[key] != at.by_key[0] + key) return false;
  }
  return true;
}

}  // namespace

void CapturedSums::add(std::int64_t task, const CapturedTile& tile, const PanelKernels& kernels,
                       const GradientKernels& gradient_kernels) {
  const std::int64_t num_keys = tile.program.num_keys;
  const std::int64_t lanes = tile.program.lanes;
  const std::int64_t count = num_keys * lanes;
  for (std::size_t i = 0; i < plan_.sites.size(); ++i) {
    const CapturedSite& site = plan_.sites[i];
    const Sums& sums = sums_[site.gradient];
    if (sums.num_elements == 0) continue;
    const Offsets offsets = offsets_of(i, tile, kernels);
    const float* values = tile.gradients;
    if (!site.derivative.empty()) {
      ProgramTile program = tile.program;
      program.tensors = bindings_[i].derivative.tensors.data();
      program.scalars = bindings_[i].derivative.scalars.data();
      program.scores = tile.values;
      if (tile.program.scores != nullptr)
        std::memcpy(tile.values, tile.program.scores,
                    static_cast<std::size_t>(count) * sizeof(float));
      kernels.run_score(site.derivative.tape, program);
      gradient_kernels.chain(tile.gradients, tile.values, count, 1.0F, tile.values);
      values = tile.values;
    }
    if (sums.copies != nullptr) {
      scatter(values, num_keys, tile.num_rows, lanes, offsets,
              sums.copies + task * sums.num_elements);
    } else if (is_contiguous(offsets, num_keys)) {
      std::array<float*, kMaxLanes> rows{};
      for (std::int64_t row = 0; row < tile.num_rows; ++row)
        rows[static_cast<std::size_t>(row)] = sums.single + offsets.by_row[row] + offsets.by_key[0];
      gradient_kernels.add_columns(values, tile.num_rows, num_keys, rows.data(), 1);
    } else {
      scatter(values, num_keys, tile.num_rows, lanes, offsets, sums.single);
    }
  }
}

}  // namespace fovea::cpu
