// Fill params, launch.
#include "cuda/sum/sum_parts.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <limits>
#include <vector>

#include "fovea/error.hpp"

#include "cuda/kernel_unit.hpp"
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

/// Outermost first; neighbours that lie alike are one, the last one stays even if it has one column, and so does the
/// first one of parts that have places in it.
std::vector<Dimension> dimensions_of(std::span<const TensorView> tensors, bool has_places) {
  std::vector<Dimension> result;
  for (int dim = 0; dim < tensors[0].rank(); ++dim) {
    Dimension next{.size = tensors[0].size(dim)};
    for (const TensorView& tensor : tensors) next.strides.push_back(tensor.stride(dim));
    const bool is_first = has_places && dim == 0;
    if (next.size == 1 && dim + 1 < tensors[0].rank() && !is_first) continue;
    if (result.size() > (has_places ? 1U : 0U) &&
        result.back().size * next.size <= kMostOfDimension && result.back().continues(next)) {
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
  for (std::size_t dim = 0; dim < kDimensions; ++dim) {
    spec.shape[dim] = dimensions[dim].size;
    spec.strides[dim] = dimensions[dim].strides[index];
  }
  return {tensor.data(), spec};
}

/// Behind the first dimension, which may have places.
void insert_missing(std::vector<Dimension>& dimensions) {
  const Dimension none{.size = 1,
                       .strides = std::vector<std::int64_t>(dimensions[0].strides.size())};
  const auto first = dimensions.begin() + (dimensions.size() > 1 ? 1 : 0);
  dimensions.insert(first, kDimensions - dimensions.size(), none);
}

const std::int32_t* data_of(const TensorView& places) {
  return places ? static_cast<const std::int32_t*>(places.data()) : nullptr;
}

void refuse_grid(std::int64_t num_warps) {
  if (num_warps / kWarps >= std::numeric_limits<std::int32_t>::max())
    throw Unsupported("sum of tensors: 2^31 groups of rows, or more");
}

}  // namespace

jit::KernelText sum_text() { return common_kernel("sum_parts", "SumParams", kWarps * 32); }

SumPlan plan_sum(Device device) { return {load_alone(sum_text(), device, "sum of tensors")}; }

SumLaunch sum_launch(const TensorView& sum, std::span<const SumPart> parts, Fold fold) {
  std::vector<TensorView> all{sum};
  bool has_places = false;
  for (const SumPart& part : parts) {
    all.push_back(part.tensor);
    has_places = has_places || part.places;
  }
  std::vector<Dimension> dimensions = dimensions_of(all, has_places);
  if (dimensions.size() > kDimensions) {
    throw Unsupported(fmt::format(
        "sum of tensors: {} has more than four dimensions that do not follow each other in memory",
        to_string(sum.spec())));
  }
  insert_missing(dimensions);
  SumLaunch launch{};
  SumParams& p = launch.params;
  const TensorView shaped = as_bshd(sum, 0, dimensions);
  p.sum = rows_param(shaped);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    p.parts[i] = rows_param(as_bshd(parts[i].tensor, i + 1, dimensions));
    p.places[i] = data_of(parts[i].places);
  }
  p.num_parts = static_cast<std::int32_t>(parts.size());
  p.fold = fold;
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

void sum_parts(const SumPlan& plan, const TensorView& sum, std::span<const SumPart> parts,
               Fold fold, driver::Stream stream) {
  if (sum.spec().num_elements() == 0) return;
  enqueue(*plan.kernels, sum_launch(sum, parts, fold).launches(), stream);
}

}  // namespace fovea::cuda
