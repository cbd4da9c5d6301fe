// What a handle of a shard plan holds.
#pragma once

#include "fovea/fovea.h"
#include "fovea/parallel.hpp"

struct fovea_shard_plan {
  fovea::ShardPlan plan;
};
