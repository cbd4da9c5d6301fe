#include "cuda/driver/resources.hpp"

#include <fmt/format.h>

namespace fovea::cuda::driver {
namespace {

constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING: not in step with the null stream
constexpr int kThreadLocalCapture = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr unsigned kEventWithTiming = 0;     // CU_EVENT_DEFAULT
constexpr unsigned kEventWithoutTiming = 2;  // CU_EVENT_DISABLE_TIMING

}  // namespace

OwnedStream::OwnedStream(const DeviceContext& context) : context_(context) {
  const ContextScope scope(context);
  context.driver().check(context.api().stream_create(&handle_, kNonBlocking), "cuStreamCreate");
}

OwnedStream::~OwnedStream() {
  if (context_.driver().is_usable()) context_.api().stream_destroy(handle_);
}

void OwnedStream::synchronize() const {
  context_.driver().check(context_.api().stream_synchronize(handle_), "cuStreamSynchronize");
}

DeviceMemory::DeviceMemory(const DeviceContext& context, std::size_t bytes)
    : context_(&context), bytes_(bytes) {
  if (bytes == 0) return;
  const ContextScope scope(context);
  context.driver().check(context.api().memory_allocate(&pointer_, bytes), "cuMemAlloc",
                         fmt::format("{} bytes on {}", bytes, context.info().name));
}

DeviceMemory::~DeviceMemory() {
  if (pointer_ == 0) return;
  give_back_in(*context_, [&](const Api& api) { api.memory_free(pointer_); });
}

void DeviceMemory::fill(unsigned char value, Stream stream) {
  if (bytes_ == 0) return;
  const ContextScope scope(*context_);
  context_->driver().check(context_->api().set_bytes(pointer_, value, bytes_, stream.handle()),
                           "cuMemsetD8Async");
}

void DeviceMemory::copy_from(std::span<const std::byte> host, Stream stream) {
  if (host.empty()) return;
  const ContextScope scope(*context_);
  context_->driver().check(
      context_->api().copy_to_device(pointer_, host.data(), host.size(), stream.handle()),
      "cuMemcpyHtoDAsync", fmt::format("{} of {} bytes", host.size(), bytes_));
}

void DeviceMemory::copy_to(std::span<std::byte> host, Stream stream) const {
  if (host.empty()) return;
  const ContextScope scope(*context_);
  context_->driver().check(
      context_->api().copy_to_host(host.data(), pointer_, host.size(), stream.handle()),
      "cuMemcpyDtoHAsync", fmt::format("{} of {} bytes", host.size(), bytes_));
}

Event::Event(const DeviceContext& context, Timing timing) : context_(context) {
  const ContextScope scope(context);
  const unsigned flags = timing == Timing::on ? kEventWithTiming : kEventWithoutTiming;
  context.driver().check(context.api().event_create(&handle_, flags), "cuEventCreate");
}

Event::~Event() {
  if (context_.driver().is_usable()) context_.api().event_destroy(handle_);
}

void Event::record(Stream stream) {
  const ContextScope scope(context_);
  context_.driver().check(context_.api().event_record(handle_, stream.handle()), "cuEventRecord");
}

void Event::hold_back(Stream stream) const {
  const ContextScope scope(context_);
  context_.driver().check(context_.api().stream_wait_event(stream.handle(), handle_, 0),
                          "cuStreamWaitEvent");
}

bool Event::is_reached() const {
  const Result result = context_.api().event_query(handle_);
  if (result == kNotReady) return false;
  context_.driver().check(result, "cuEventQuery");
  return true;
}

void Event::synchronize() const {
  context_.driver().check(context_.api().event_synchronize(handle_), "cuEventSynchronize");
}

float Event::milliseconds_since(const Event& start) const {
  float milliseconds = 0;
  context_.driver().check(context_.api().event_elapsed(&milliseconds, start.handle_, handle_),
                          "cuEventElapsedTime");
  return milliseconds;
}

Graph::Graph(const DeviceContext& context, const std::function<void(Stream)>& enqueue)
    : context_(context) {
  const Driver& driver = context.driver();
  const Api& api = context.api();
  const ContextScope scope(context);
  const OwnedStream stream(context);
  GraphHandle graph = nullptr;
  driver.check(api.stream_begin_capture(stream.get().handle(), kThreadLocalCapture),
               "cuStreamBeginCapture");
  try {
    enqueue(stream.get());
  } catch (...) {
    api.stream_end_capture(stream.get().handle(), &graph);
    if (graph != nullptr) api.graph_destroy(graph);
    throw;
  }
  driver.check(api.stream_end_capture(stream.get().handle(), &graph), "cuStreamEndCapture");
  const Result result = api.graph_instantiate(&handle_, graph, 0);
  api.graph_destroy(graph);
  driver.check(result, "cuGraphInstantiateWithFlags");
}

Graph::~Graph() {
  if (context_.driver().is_usable()) context_.api().graph_exec_destroy(handle_);
}

void Graph::launch(Stream stream) const {
  const ContextScope scope(context_);
  context_.driver().check(context_.api().graph_launch(handle_, stream.handle()), "cuGraphLaunch");
}

}  // namespace fovea::cuda::driver
