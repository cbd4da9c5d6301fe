#include "ffi/xla/scratch.hpp"

#include <cstdint>

namespace fovea::ffi::xla {
namespace {

constexpr std::size_t kXlaAlignment = 16;

void* aligned(void* base, std::size_t alignment) {
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  return static_cast<std::byte*>(base) + ((alignment - address % alignment) % alignment);
}

}  // namespace

bool Scratch::succeeded(Error* error) const noexcept {
  if (error == nullptr) return true;
  ErrorDestroy destroy{.error = error};
  frame_.api->error_destroy(&destroy);
  return false;
}

void* Scratch::allocate(std::size_t bytes, std::size_t alignment) {
  lent_.reserve(lent_.size() + 1);  // nothing throws between what XLA gives and its note
  MemoryAllocate args{
      .context = frame_.context, .size = bytes + alignment, .alignment = kXlaAlignment};
  if (!succeeded(frame_.api->memory_allocate(&args)) || args.data == nullptr) return nullptr;
  lent_.push_back({aligned(args.data, alignment), args.data, args.size});
  return lent_.back().data;
}

void Scratch::deallocate(void* data) noexcept {
  for (auto lent = lent_.begin(); lent != lent_.end(); ++lent) {
    if (lent->data != data) continue;
    MemoryFree args{.context = frame_.context, .size = lent->bytes, .data = lent->base};
    succeeded(frame_.api->memory_free(&args));  // the call is done: there is nobody to tell
    lent_.erase(lent);
    return;
  }
}

}  // namespace fovea::ffi::xla
