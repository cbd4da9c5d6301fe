// Device memory, streams, events and graphs that free themselves: for tests and tools, and for ranks that exchange
// data. Calls on one device allocate nothing of this.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <utility>

#include "cuda/driver/context.hpp"
#include "cuda/driver/launch.hpp"

namespace fovea::cuda::driver {

class OwnedStream {
 public:
  explicit OwnedStream(const DeviceContext& context);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  Stream get() const { return Stream(handle_); }
  void synchronize() const;

 private:
  const DeviceContext& context_;
  StreamHandle handle_ = nullptr;
};

/// Bytes on a device, 256-byte aligned.
class DeviceMemory {
 public:
  DeviceMemory(const DeviceContext& context, std::size_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept
      : context_(other.context_),
        pointer_(std::exchange(other.pointer_, 0)),
        bytes_(other.bytes_) {}
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  ~DeviceMemory();

  void* data() const { return reinterpret_cast<void*>(pointer_); }
  std::size_t bytes() const { return bytes_; }

  /// Each is in the order of the stream; the host's bytes must live until then. Without a stream: done
  /// on return.
  void fill(unsigned char value, Stream stream);
  void copy_from(std::span<const std::byte> host, Stream stream);
  void copy_to(std::span<std::byte> host, Stream stream) const;

 private:
  const DeviceContext* context_;
  DevicePointer pointer_ = 0;
  std::size_t bytes_ = 0;
};

class Event {
 public:
  enum class Timing : bool { off, on };  // one that only orders streams is cheaper

  explicit Event(const DeviceContext& context, Timing timing = Timing::on);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Stream stream);
  /// What is enqueued on the stream from now on waits for the last record; the host does not.
  void hold_back(Stream stream) const;
  bool is_reached() const;
  void synchronize() const;
  EventHandle handle() const { return handle_; }
  /// Time from `start` to this; both have been recorded and reached.
  float milliseconds_since(const Event& start) const;

 private:
  const DeviceContext& context_;
  EventHandle handle_ = nullptr;
};

/// What `enqueue` puts on a stream while it is being captured, to be launched again and again.
class Graph {
 public:
  Graph(const DeviceContext& context, const std::function<void(Stream)>& enqueue);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(Stream stream) const;

 private:
  const DeviceContext& context_;
  GraphExecHandle handle_ = nullptr;
};

}  // namespace fovea::cuda::driver
