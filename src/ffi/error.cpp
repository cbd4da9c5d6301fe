#include "ffi/error.hpp"

#include <exception>

namespace fovea::ffi {
namespace {

static_assert(static_cast<int>(ErrorKind::invalid_argument) == FOVEA_INVALID_ARGUMENT);
static_assert(static_cast<int>(ErrorKind::unsupported) == FOVEA_UNSUPPORTED);
static_assert(static_cast<int>(ErrorKind::compile_error) == FOVEA_COMPILE_ERROR);
static_assert(static_cast<int>(ErrorKind::device_error) == FOVEA_DEVICE_ERROR);
static_assert(static_cast<int>(ErrorKind::internal) == FOVEA_INTERNAL);

// Handed out when there is no memory for an error of its own. Fits the small string, so making it allocates nothing.
fovea_error out_of_memory{FOVEA_INTERNAL, "out of memory"};

}  // namespace

int report(int kind, const char* message, fovea_error** error, std::size_t column) noexcept {
  if (error == nullptr) return kind;
  try {
    *error = new fovea_error{kind, message, column};
  } catch (...) {
    *error = &out_of_memory;
  }
  return kind;
}

void release(fovea_error* error) noexcept {
  if (error != &out_of_memory) delete error;
}

}  // namespace fovea::ffi
