#include "cuda/params/captures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "core/check.hpp"

namespace fovea::cuda {
namespace {

using expr::ProgramRole;

const fovea::Captures& captures_of(ProgramRole role, const CaptureSlots::Captured& captured) {
  return role == ProgramRole::score ? captured.score : captured.mask;
}

template <typename Captured>
std::size_t index_of(const std::vector<Captured>& captured, const std::string& name) {
  const auto found = std::ranges::find(captured, name, &Captured::name);
  FOVEA_ASSERT(found != captured.end());
  return static_cast<std::size_t>(found - captured.begin());
}

CapturedTensorParam parameter(const TensorView& view) {
  CapturedTensorParam param{};
  param.data = view.data();
  for (int dim = 0; dim < view.rank(); ++dim) {
    // Indices have 32 bits: elements behind them are out of reach.
    constexpr std::int64_t kMaxExtent = std::numeric_limits<std::int32_t>::max();
    param.shape[dim] = static_cast<std::int32_t>(std::min(view.size(dim), kMaxExtent));
    param.strides[dim] = view.stride(dim);
  }
  return param;
}

std::int32_t parameter(const CapturedScalar& scalar) {
  if (scalar.type == ExprType::floating) {
    return std::bit_cast<std::int32_t>(static_cast<float>(scalar.value));
  }
  return static_cast<std::int32_t>(scalar.value);
}

}  // namespace

std::optional<std::string> captures_refusal(const expr::CudaProgram& program) {
  if (program.tensors.size() > kMaxCapturedTensors) {
    return fmt::format("the programs capture {} tensors; kernels take at most {}",
                       program.tensors.size(), kMaxCapturedTensors);
  }
  if (program.scalars.size() > kMaxCapturedScalars) {
    return fmt::format("the programs capture {} scalars; kernels take at most {}",
                       program.scalars.size(), kMaxCapturedScalars);
  }
  for (const expr::CudaTensorSlot& tensor : program.tensors) {
    if (tensor.rank <= kMaxCapturedRank) continue;
    return fmt::format("captured '{}' has rank {}; kernels take at most {}", tensor.name,
                       tensor.rank, kMaxCapturedRank);
  }
  return std::nullopt;
}

CaptureSlots::CaptureSlots(const expr::CudaProgram& program, const Captured& captured) {
  FOVEA_ASSERT(!captures_refusal(program));
  for (const expr::CudaTensorSlot& slot : program.tensors) {
    const auto& tensors = captures_of(slot.role, captured).tensors;
    tensors_.push_back({slot.role, index_of(tensors, slot.name)});
  }
  for (const expr::CudaScalarSlot& slot : program.scalars) {
    const auto& scalars = captures_of(slot.role, captured).scalars;
    scalars_.push_back({slot.role, index_of(scalars, slot.name)});
  }
}

Captures CaptureSlots::bind(const Captured& captured) const {
  Captures captures{};
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const auto& tensors = captures_of(tensors_[i].role, captured).tensors;
    captures.tensors[i] = parameter(tensors[tensors_[i].idx].view);
  }
  for (std::size_t i = 0; i < scalars_.size(); ++i) {
    const auto& scalars = captures_of(scalars_[i].role, captured).scalars;
    captures.scalars[i] = parameter(scalars[scalars_[i].idx]);
  }
  return captures;
}

}  // namespace fovea::cuda
