// The C struct of a backward call as the C++ one.
#pragma once

#include <string>

#include "fovea/backward.hpp"
#include "fovea/fovea.h"

#include "ffi/arguments.hpp"

namespace fovea::ffi {

/// A C++ call with what it borrows.
struct BackwardCall {
  Call forward;
  AttentionBackward args;
};

/// As to_call.
BackwardCall to_backward(const fovea_attention_backward_args* source, const std::string& where,
                         ProgramCache* cache = nullptr);

}  // namespace fovea::ffi
