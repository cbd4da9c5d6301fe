// Memory of a call on a GPU: taken and given back in the order of its stream, copies and sums by one kernel.
#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "core/check.hpp"
#include "core/shape.hpp"
#include "cuda/driver/resources.hpp"
#include "parallel/engine/memory.hpp"
#include "plan/call_workspace.hpp"
#include "plan/device_kernels.hpp"

namespace fovea::parallel {
namespace {

using cuda::driver::DeviceMemory;
using cuda::driver::Stream;

/// What owns the memory lives as long as the last copy of the tensor.
template <typename Owner>
OwnedTensor owned(TensorSpec spec, Device device, const std::shared_ptr<Owner>& owner, void* data) {
  spec.device = device;
  return {TensorView(data, spec), std::shared_ptr<std::byte>(owner, static_cast<std::byte*>(data))};
}

/// A pool gives no memory of no bytes.
std::size_t bytes_of(const TensorSpec& spec) {
  return std::max<std::size_t>(
      static_cast<std::size_t>(spec.num_elements()) * size_bytes(spec.dtype), 1);
}

}  // namespace

OwnedTensor make_on_device(Dtype dtype, std::span<const std::int64_t> shape, const Memory& memory) {
  const TensorSpec spec = make_spec(dtype, shape);
  const CallWorkspace::Place place{memory.device(), memory.stream()};
  auto taken = std::make_shared<CallWorkspace>(std::span<std::byte>(), bytes_of(spec), place,
                                               Runtime::process_default().impl());
  return owned(spec, memory.device(), taken, taken->bytes().data());
}

OwnedTensor values_on_device(std::span<const std::int32_t> values, Device device) {
  const TensorSpec spec =
      make_spec(Dtype::i32, std::array{static_cast<std::int64_t>(values.size())});
  const cuda::driver::DeviceContext& context = cuda::driver::process_context(device);
  auto memory = std::make_shared<DeviceMemory>(context, bytes_of(spec));
  const cuda::driver::OwnedStream stream(context);
  memory->copy_from(std::as_bytes(values), stream.get());
  stream.synchronize();
  return owned(spec, device, memory, memory->data());
}

void sum_on_device(const TensorView& to, std::span<const PlacedPart> parts, const Memory& memory) {
  const cuda::SumPlan plan = find_sum(memory.device(), Runtime::process_default());
  const auto add = [&](const TensorView& sum, std::span<const PlacedPart> some) {
    std::vector<cuda::SumPart> added;
    for (const PlacedPart& part : some) added.push_back({part.tensor, part.places});
    cuda::sum_parts(plan, sum, added, cuda::Fold::sum, Stream(memory.stream()));
  };
  const std::size_t most = cuda::kMostSummedParts;
  if (parts.size() <= most) return add(to, parts);
  // In f32 until the last one: what the total has so far is the first part of what follows.
  const OwnedTensor total = memory.make_like(to, Dtype::f32);
  add(total.view, parts.first(most));
  for (std::size_t at = most; at < parts.size(); at += most - 1) {
    std::vector<PlacedPart> some{{total.view}};
    const auto next = parts.subspan(at, std::min(parts.size() - at, most - 1));
    some.insert(some.end(), next.begin(), next.end());
    add(total.view, some);
  }
  add(to, std::array{PlacedPart{total.view}});
}

void largest_on_device(const TensorView& to, std::span<const TensorView> parts,
                       const Memory& memory) {
  FOVEA_ASSERT(parts.size() <= cuda::kMostSummedParts);
  std::vector<cuda::SumPart> all;
  for (const TensorView& part : parts) all.push_back({part});
  cuda::sum_parts(find_sum(memory.device(), Runtime::process_default()), to, all,
                  cuda::Fold::largest, Stream(memory.stream()));
}

}  // namespace fovea::parallel
