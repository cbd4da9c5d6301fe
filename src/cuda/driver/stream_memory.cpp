#include "cuda/driver/stream_memory.hpp"

#include <fmt/format.h>

namespace fovea::cuda::driver {

StreamMemory::StreamMemory(Device device, std::size_t bytes, void* stream)
    : context_(process_context(device)), stream_(stream) {
  const ContextScope scope(context_, stream_.handle());
  const Result result = context_.api().memory_allocate_async(&pointer_, bytes, stream_.handle());
  if (result == kSuccess) return;
  context_.driver().check(
      result, "cuMemAllocAsync",
      describe_foreign(context_, stream_) +
          fmt::format("{} bytes of workspace on {}", bytes, context_.info().name));
}

StreamMemory::~StreamMemory() {
  give_back_in(context_,
               [&](const Api& api) { api.memory_free_async(pointer_, stream_.handle()); });
}

void StreamMemory::copy_from(std::span<const std::byte> host) {
  const ContextScope scope(context_, stream_.handle());
  context_.driver().check(
      context_.api().copy_to_device(pointer_, host.data(), host.size(), stream_.handle()),
      "cuMemcpyHtoDAsync");
}

void StreamMemory::copy_to(std::span<std::byte> host) const {
  const ContextScope scope(context_, stream_.handle());
  context_.driver().check(
      context_.api().copy_to_host(host.data(), pointer_, host.size(), stream_.handle()),
      "cuMemcpyDtoHAsync");
}

}  // namespace fovea::cuda::driver
