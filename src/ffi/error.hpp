// What stands between exceptions and C: `guarded` runs a body and turns whatever it throws into a kind and a message.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>

#include "fovea/error.hpp"
#include "fovea/fovea.h"

struct fovea_error {
  int kind = FOVEA_OK;
  std::string message;
  std::size_t column = 0;  // of a formula's text, 1-based; 0: none
};

namespace fovea::ffi {

/// Stores the error in *error where the caller wants one; returns its kind. Does not throw: without memory for an error
/// the caller gets a shared one that says so.
int report(int kind, const char* message, fovea_error** error, std::size_t column = 0) noexcept;

/// Frees an error that `report` made; the shared one stays.
void release(fovea_error* error) noexcept;

template <typename Body>
int guarded(fovea_error** error, Body&& body) noexcept {
  if (error != nullptr) *error = nullptr;
  try {
    std::forward<Body>(body)();
    return FOVEA_OK;
  } catch (const ParseError& e) {
    return report(static_cast<int>(e.kind()), e.what(), error, e.column());
  } catch (const Error& e) {
    return report(static_cast<int>(e.kind()), e.what(), error);
  } catch (const std::bad_alloc&) {
    return report(FOVEA_INTERNAL, "out of memory", error);
  } catch (const std::exception& e) {
    return report(FOVEA_INTERNAL, e.what(), error);
  } catch (...) {
    return report(FOVEA_INTERNAL, "an exception of unknown type", error);
  }
}

}  // namespace fovea::ffi
