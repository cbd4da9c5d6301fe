// What common/clear_counter takes at the launch.
#pragma once

#include "shared/types.h"

namespace fovea::cuda {

struct ClearCounterParams {
  std::int32_t* counter;
};

}  // namespace fovea::cuda
