// A C caller's communicator, functions of its own or ranks over NCCL, as the C++ one.
#pragma once

#include <memory>
#include <string>

#include "fovea/communicator.hpp"
#include "fovea/fovea.h"

namespace fovea::ffi {

/// Throws InvalidArgument, each message starting with `where`.
std::shared_ptr<Communicator> to_communicator(const fovea_communicator* source,
                                              const std::string& where);

}  // namespace fovea::ffi
