#include "fovea/communicator.hpp"

namespace fovea {

Communicator::~Communicator() = default;

}  // namespace fovea
