// Fill params, launch.
#include "cuda/sum/sum_parts.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <limits>
#include <vector>

#include "fovea/error.hpp"

#include "cuda/params/rows_param.hpp"

namespace fovea::cuda {
namespace {

constexpr unsigned kWarps = 4;                                    // of a CTA
constexpr std::size_t kDimensions = 4;                            // of the kernel
constexpr std::int64_t kMostOfDimension = std::int64_t{1} << 30;  // it counts in 32 bits

/// A dimension of every tensor: the sum's stride, then those of the parts.
struct Dimension {
  std::int64_t size = 1;
  std::vector<std::int64_t> strides{};

  /// Does it go on where `inner` ends, in every tensor?
  bool continues(const Dimension& inner) const {
    for (std::size_t i = 0; i < strides.size(); ++i) {
      if (strides[i] != inner.size * inner.strides[i]) return false;
    }
    return true;
  }
};

/// Outermost first; neighbours that lie alike are one, and the last one stays even if it has one column.
std::vector<Dimension> dimensions_of(std::span<const TensorView> tensors) {
  std::vector<Dimension> result;
  for (int dim = 0; dim < tensors[0].rank(); ++dim) {
    Dimension next{.size = tensors[0].size(dim)};
    for (const TensorView& tensor : tensors) next.strides.push_back(tensor.stride(dim));
    if (next.size == 1 && dim + 1 < tensors[0].rank()) continue;
    if (!result.empty() && result.back().size * next.size <= kMostOfDimension &&
        result.back().continues(next)) {
      next.size *= result.back().size;
      result.pop_back();
    }
    result.push_back(std::move(next));
  }
  return result;
}

/// [batch, rows, heads, columns], of which what is missing has size 1.
TensorView as_bshd(const TensorView& tensor, std::size_t index,
                   std::span<const Dimension> dimensions) {
  TensorSpec spec{.dtype = tensor.dtype(), .rank = kDimensions, .device = tensor.spec().device};
  const std::size_t missing = kDimensions - dimensions.size();
  for (std::size_t dim = 0; dim < kDimensions; ++dim) {
    spec.shape[dim] = dim < missing ? 1 : dimensions[dim - missing].size;
    spec.strides[dim] = dim < missing ? 0 : dimensions[dim - missing].strides[index];
  }
  return {tensor.data(), spec};
}

void refuse_grid(std::int64_t num_warps) {
  if (num_warps / kWarps >= std::numeric_limits<std::int32_t>::max())
    throw Unsupported("sum of tensors: 2^31 groups of rows, or more");
}

}  // namespace

jit::KernelText sum_text() {
  return {.unit = fmt::format("#include \"common/sum_parts.cuh\"\n"
                              "extern \"C\" __global__ void __launch_bounds__({})\n"
                              "{}(const __grid_constant__ fovea::cuda::SumParams p) {{\n"
                              "  fovea::cuda::sum_parts(p);\n"
                              "}}\n",
                              kWarps * 32, jit::kEntryName),
          .label = "common/sum_parts"};
}

SumPlan plan_sum(Device device) { return {load_alone(sum_text(), device, "sum of tensors")}; }

SumLaunch sum_launch(const TensorView& sum, std::span<const TensorView> parts) {
  std::vector<TensorView> all{sum};
  all.insert(all.end(), parts.begin(), parts.end());
  const std::vector<Dimension> dimensions = dimensions_of(all);
  if (dimensions.size() > kDimensions) {
    throw Unsupported(fmt::format(
        "sum of tensors: {} has more than four dimensions that do not follow each other in memory",
        to_string(sum.spec())));
  }
  SumLaunch launch{};
  SumParams& p = launch.params;
  const TensorView shaped = as_bshd(sum, 0, dimensions);
  p.sum = rows_param(shaped);
  for (std::size_t i = 0; i < parts.size(); ++i)
    p.parts[i] = rows_param(as_bshd(parts[i], i + 1, dimensions));
  p.num_parts = static_cast<std::int32_t>(parts.size());
  p.seqlen = count_param(shaped.size(1));
  p.num_heads = count_param(shaped.size(2));
  p.num_columns = count_param(shaped.size(3));
  p.num_pieces = (p.num_columns + kSummedColumns - 1) / kSummedColumns;
  p.num_rows = shaped.size(0) * shaped.size(1) * shaped.size(2);
  const std::int64_t num_warps = p.num_rows * p.num_pieces;
  refuse_grid(num_warps);
  launch.grid.x = static_cast<unsigned>((num_warps + kWarps - 1) / kWarps);
  launch.num_threads = kWarps * 32;
  return launch;
}

KernelLaunches SumLaunch::launches() const { return launch_alone(params, grid, num_threads); }

void sum_parts(const SumPlan& plan, const TensorView& sum, std::span<const TensorView> parts,
               driver::Stream stream) {
  if (sum.spec().num_elements() == 0) return;
  enqueue(*plan.kernels, sum_launch(sum, parts).launches(), stream);
}

}  // namespace fovea::cuda
