#include "gpu.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "cuda/availability.hpp"
#include "failure.hpp"

namespace fovea::tools {
namespace {

using cuda::driver::DeviceContext;
using cuda::driver::DeviceMemory;

const DeviceContext& context_of(Device device) {
  const std::string reason = cuda::why_unavailable(device);
  if (!reason.empty())
    throw Failure(kUnsupported, fmt::format("--device {}: {}", to_string(device), reason));
  return cuda::driver::process_context(device);
}

}  // namespace

Gpu::Gpu(Device device) : device_(device), context_(context_of(device)), stream_(context_) {}

std::string Gpu::describe() const {
  return fmt::format("{} ({})", to_string(device_), context_.info().name);
}

Array Gpu::copy(const Array& host) const {
  if (!host) return {};
  const std::span<const std::byte> bytes = bytes_of(host);
  const auto memory = std::make_shared<DeviceMemory>(context_, bytes.size());
  if (host.data != nullptr) {
    memory->copy_from(bytes, stream());
    stream_.synchronize();
  }
  Array array{
      .storage = memory, .data = static_cast<const std::byte*>(memory->data()), .spec = host.spec};
  array.spec.device = device_;
  return array;
}

Inputs Gpu::copy(const Inputs& host) const {
  Inputs inputs{.q = copy(host.q),
                .k = copy(host.k),
                .v = copy(host.v),
                .cu_seqlens_q = copy(host.cu_seqlens_q),
                .cu_seqlens_kv = copy(host.cu_seqlens_kv),
                .q_scale = copy(host.q_scale),
                .k_scale = copy(host.k_scale),
                .v_scale = copy(host.v_scale),
                .bias = copy(host.bias),
                .alibi = copy(host.alibi),
                .segments_q = copy(host.segments_q),
                .segments_kv = copy(host.segments_kv),
                .mask = copy(host.mask),
                .sinks = copy(host.sinks),
                .tensors = {}};
  for (const auto& [name, array] : host.tensors) inputs.tensors.emplace_back(name, copy(array));
  return inputs;
}

void Gpu::copy_back(const Array& device, const Array& host) const {
  const auto& memory = *static_cast<const DeviceMemory*>(device.storage.get());
  const std::span<const std::byte> bytes = bytes_of(host);
  memory.copy_to({const_cast<std::byte*>(bytes.data()), bytes.size()}, stream());
  stream_.synchronize();
}

void Gpu::fill(const Array& device, unsigned char value) const {
  const auto memory = std::static_pointer_cast<const DeviceMemory>(device.storage);
  std::const_pointer_cast<DeviceMemory>(memory)->fill(value, stream());
}

double Gpu::milliseconds(const std::function<void()>& enqueue) const {
  cuda::driver::Event begin(context_), end(context_);
  begin.record(stream());
  enqueue();
  end.record(stream());
  end.synchronize();
  return end.milliseconds_since(begin);
}

namespace {

std::size_t flushing_bytes(const Gpu& gpu) {
  constexpr std::size_t kLeastBytes = std::size_t{512} << 20U;
  return std::max(kLeastBytes, 2 * static_cast<std::size_t>(gpu.context().info().l2_bytes));
}

}  // namespace

FlushedClock::FlushedClock(const Gpu& gpu)
    : gpu_(gpu),
      flushed_(gpu.context(), flushing_bytes(gpu)),
      begin_(gpu.context()),
      end_(gpu.context()) {}

double FlushedClock::seconds(const std::function<void()>& enqueue) {
  flushed_.fill(0, gpu_.stream());
  begin_.record(gpu_.stream());
  enqueue();
  end_.record(gpu_.stream());
  end_.synchronize();
  return end_.milliseconds_since(begin_) * 1e-3;
}

}  // namespace fovea::tools
