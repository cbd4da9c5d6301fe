#include "cuda/kernel_set.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "fovea/error.hpp"

#include "core/check.hpp"
#include "cuda/availability.hpp"

namespace fovea::cuda {
namespace {

std::size_t index_of(KernelRole role) { return static_cast<std::size_t>(role); }

}  // namespace

KernelSet::KernelSet(jit::Loader& loader, const driver::DeviceContext& context,
                     const PlannedKernels& kernels)
    : loader_(&loader), context_(&context) {
  std::vector<const jit::KernelText*> texts;
  for (const PlannedKernel& kernel : kernels) texts.push_back(&kernel.text);
  const auto loaded = loader.load_all(texts, context);
  for (std::size_t i = 0; i < kernels.size(); ++i) kernels_[index_of(kernels[i].role)] = loaded[i];
}

std::shared_ptr<const KernelSet> load_alone(const jit::KernelText& text, Device device,
                                            std::string_view where) {
  if (const std::string reason = why_unavailable(device); !reason.empty())
    throw Unsupported(fmt::format("{}: {}: {}", where, to_string(device), reason));
  if (device.kind == Device::Kind::rocm) {
    throw Unsupported(
        fmt::format("{}: {} is a GPU of AMD; expected one of NVIDIA, or tensors on the cpu", where,
                    to_string(device)));
  }
  return std::make_shared<const KernelSet>(jit::process_loader(), driver::process_context(device),
                                           PlannedKernels{{KernelRole::main, text}});
}

const driver::Function& KernelSet::operator[](KernelRole role) const {
  const auto& kernel = kernels_[index_of(role)];
  FOVEA_ASSERT(kernel != nullptr);
  return kernel->function;
}

jit::KernelSource KernelSet::source() const {
  auto farthest = jit::KernelSource::pack;
  for (const auto& kernel : kernels_) {
    if (kernel != nullptr) farthest = std::max(farthest, kernel->source);
  }
  return farthest;
}

jit::Availability look_for(jit::Loader& loader, jit::Architecture architecture,
                           const PlannedKernels& kernels) {
  jit::Availability all;
  for (const PlannedKernel& kernel : kernels) {
    jit::Availability one = loader.look_for(kernel.text, architecture);
    if (!one.why_missing.empty()) return one;
    all.source = std::max(all.source, one.source);
  }
  return all;
}

void KernelLaunches::add(const KernelLaunch& launch) {
  FOVEA_ASSERT(size_ < launches_.size());
  launches_[size_++] = launch;
}

void enqueue(const KernelSet& kernels, const KernelLaunches& launches, driver::Stream stream) {
  for (const KernelLaunch& launch : launches) {
    void* params[] = {const_cast<void*>(launch.params)};
    driver::launch({.grid = launch.grid,
                    .block = {.x = launch.num_threads},
                    .shared_bytes = launch.shared_bytes,
                    .stream = stream,
                    .is_pdl = launch.is_pdl},
                   kernels[launch.role], params);
  }
}

}  // namespace fovea::cuda
