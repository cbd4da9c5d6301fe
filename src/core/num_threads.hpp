// How many workers "automatic" means here.
#pragma once

namespace fovea {

/// FOVEA_NUM_THREADS, or the smallest of affinity mask, cgroup quota and OMP_NUM_THREADS.
int default_num_threads();

}  // namespace fovea
