// Pieces of a workspace. Sizes are computed by the same code that hands out the pieces.
#pragma once

#include <cstddef>

namespace fovea::cpu {

/// Walks a buffer in pieces aligned to 64 bytes; with a null base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <typename T>
  T* take(std::size_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace fovea::cpu
