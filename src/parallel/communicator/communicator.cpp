#include "fovea/communicator.hpp"

namespace fovea {

Communicator::~Communicator() = default;
Device Communicator::device() const { return Device::cpu(); }
void Communicator::check() {}

}  // namespace fovea
