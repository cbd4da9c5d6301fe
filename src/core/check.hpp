// How errors are said: one helper, so that every message has argument, got, expected, hint.
#pragma once

#include <string>

#include "fovea/error.hpp"

namespace fovea {

/// "q has rank 2; expected 3 or 4" -> InvalidArgument. `where` is the function the user called.
[[noreturn]] inline void invalid(const std::string& where, const std::string& message) {
  throw InvalidArgument(where.empty() ? message : where + ": " + message);
}

}  // namespace fovea

/// For our own mistakes, never for the caller's: throws InternalError with the place.
#define FOVEA_ASSERT(condition)                                                                 \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      throw ::fovea::InternalError(std::string("internal: ") + #condition + " at " + __FILE__ + \
                                   ":" + std::to_string(__LINE__));                             \
    }                                                                                           \
  } while (false)
