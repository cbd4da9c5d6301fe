// Memory of a GPU that XLA lends for the length of a call.
#pragma once

#include <cstddef>
#include <vector>

#include "ffi/xla/frame.hpp"

namespace fovea::ffi::xla {

/// Of one call, used by the thread that runs it. XLA takes back what is given back here, and aligns to no more than 16
/// bytes, so that more is asked for than is lent on.
class Scratch {
 public:
  explicit Scratch(const Frame& frame) : frame_(frame) {}

  /// Null where XLA has none. `alignment` is a power of two.
  void* allocate(std::size_t bytes, std::size_t alignment);

  /// What allocate returned.
  void deallocate(void* data) noexcept;

 private:
  struct Lent {
    void* data;  // what the call sees
    void* base;  // what XLA gave
    std::size_t bytes;
  };

  bool succeeded(Error* error) const noexcept;

  const Frame& frame_;
  std::vector<Lent> lent_;
};

}  // namespace fovea::ffi::xla
