// What tests on a GPU share: they are skipped where there is none; tensors of the host there, guards and all, and back.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/kv_cache.hpp"

#include "cuda/driver/resources.hpp"
#include "support/launch_memory.hpp"

namespace fovea::testing {

using cuda::driver::DeviceMemory;
using cuda::driver::Stream;

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto& driver = cuda::driver::process_driver();
    if (!driver.is_present()) GTEST_SKIP() << driver.why_absent();
    if (driver.devices().empty()) GTEST_SKIP() << "no device";
  }
};

/// A tensor's bytes on the device, as far from an aligned address as on the host.
struct DeviceCopy {
  static constexpr std::size_t kAlignment = 256;

  TensorBytes host;
  DeviceMemory memory;

  explicit DeviceCopy(const TensorBytes& bytes)
      : host(bytes),
        memory(cuda::driver::process_context(Device::cuda()), bytes.size + 2 * kAlignment) {
    copy_to_device();
  }

  void copy_to_device() {
    std::vector<std::byte> staged(memory.bytes(), std::byte{0xFF});
    std::memcpy(staged.data() + offset(), host.begin, host.size);
    memory.copy_from(staged, Stream(nullptr));
  }

  std::size_t offset() const { return reinterpret_cast<std::uintptr_t>(host.begin) % kAlignment; }
  std::byte* begin() const { return static_cast<std::byte*>(memory.data()) + offset(); }

  void copy_back() const {
    std::vector<std::byte> staged(memory.bytes());
    memory.copy_to(staged, Stream(nullptr));
    std::memcpy(host.begin, staged.data() + offset(), host.size);
    for (std::size_t i = 0; i < staged.size(); ++i) {
      const bool is_guard = i < offset() || i >= offset() + host.size;
      if (is_guard && staged[i] != std::byte{0xFF}) {
        ADD_FAILURE() << "wrote outside of " << host.name;
        return;
      }
    }
  }
};

/// Copies of many tensors, found by the host's addresses.
class DeviceCopies {
 public:
  void add(const std::vector<TensorBytes>& tensors) {
    for (const TensorBytes& tensor : tensors)
      copies_.push_back(std::make_unique<DeviceCopy>(tensor));
  }

  /// Where a byte of the host is on the device; the host's own where it was not copied.
  const void* address(const void* host) const {
    const DeviceCopy* copy = copy_of(host);
    if (copy == nullptr) return host;
    return copy->begin() + (static_cast<const std::byte*>(host) - copy->host.begin);
  }

  TensorView view(const TensorView& host) const {
    if (host.data() == nullptr) return host;
    TensorSpec spec = host.spec();
    spec.device = Device::cuda(0);
    if (host.is_mutable()) return {const_cast<void*>(address(host.data())), spec};
    return {address(host.data()), spec};
  }

  /// The same call over the copies.
  AttentionForward call(const AttentionForward& host) const {
    AttentionForward call = host;
    move({&call.q, &call.k, &call.v, &call.out, &call.lse, &call.row_max, &call.sinks,
          &call.cu_seqlens_q, &call.cu_seqlens_kv, &call.dropout_seed, &call.dropout_offset,
          &call.dropout_places, &call.q_scale, &call.k_scale, &call.v_scale},
         call);
    return call;
  }

  AttentionBackward call(const AttentionBackward& host) const {
    AttentionBackward call = host;
    call.forward = this->call(host.forward);
    for (TensorView* tensor :
         {static_cast<TensorView*>(&call.dout), static_cast<TensorView*>(&call.dlse),
          static_cast<TensorView*>(&call.dq), static_cast<TensorView*>(&call.dk),
          static_cast<TensorView*>(&call.dv), static_cast<TensorView*>(&call.dsinks)})
      *tensor = view(*tensor);
    for (CapturedTensor& each : call.dcaptured) each.view = view(each.view);
    return call;
  }

  AttentionJvp call(const AttentionJvp& host) const {
    AttentionJvp call = host;
    call.forward = this->call(host.forward);
    for (TensorView* tensor :
         {static_cast<TensorView*>(&call.q_tangent), static_cast<TensorView*>(&call.k_tangent),
          static_cast<TensorView*>(&call.v_tangent), static_cast<TensorView*>(&call.sinks_tangent),
          static_cast<TensorView*>(&call.out_tangent), static_cast<TensorView*>(&call.lse_tangent)})
      *tensor = view(*tensor);
    for (CapturedTensor& each : call.captured_tangents) each.view = view(each.view);
    return call;
  }

  AttentionDecode call(const AttentionDecode& host) const {
    AttentionDecode call = host;
    move({&call.q, &call.out, &call.lse, &call.sinks, &call.append.k, &call.append.v, &call.cache.k,
          &call.cache.v, &call.cache.k_scale, &call.cache.v_scale, &call.cache.page_table,
          &call.cache.seqlens, &call.cache.batch_idx, &call.cache.left_padding,
          &call.cache.page_indptr, &call.cache.page_indices, &call.cu_seqlens_q,
          &call.append.cu_seqlens, &call.shared_prefix.cu_sequences},
         call);
    return call;
  }

  /// The contents that the host's tensor has now.
  void copy_to_device(const TensorView& host) const { copy_of(host.data())->copy_to_device(); }

  void copy_back() const {
    for (const auto& copy : copies_) {
      if (copy->host.is_output) copy->copy_back();
    }
  }

 private:
  template <class Call>
  void move(std::initializer_list<TensorView*> tensors, Call& call) const {
    for (TensorView* tensor : tensors) *tensor = view(*tensor);
    call.score = parse_score_mod(call.score.to_string(), moved_captures(call.score));
    call.mask = parse_mask_mod(call.mask.to_string(), moved_captures(call.mask));
  }

  Captures moved_captures(const Program& host) const {
    Captures captures = host.captures();
    for (CapturedTensor& tensor : captures.tensors) tensor.view = view(tensor.view);
    return captures;
  }

  /// The copy that holds a byte of the host; null where there is none.
  DeviceCopy* copy_of(const void* host) const {
    const auto* at = static_cast<const std::byte*>(host);
    for (const auto& copy : copies_) {
      if (at >= copy->host.begin && at < copy->host.begin + copy->host.size) return copy.get();
    }
    return nullptr;
  }

  std::vector<std::unique_ptr<DeviceCopy>> copies_;
};

}  // namespace fovea::testing
