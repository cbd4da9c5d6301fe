// How far a result may be from the oracle, by the names that tests use.
#pragma once

#include "reference/tolerance.hpp"

namespace fovea::testing {

using reference::rounding;
using reference::Tolerance;
using reference::tolerance;
using reference::Tolerances;
using reference::tolerances;

}  // namespace fovea::testing
