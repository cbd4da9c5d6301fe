// Whether kernels can run on a GPU here at all, in words: what explain and doctor say.
#pragma once

#include <string>
#include <vector>

#include "cuda/driver/driver.hpp"
#include "cuda/jit/loader.hpp"

namespace fovea::cuda {

/// Why no kernel of ours can run on this device; empty: some can. A compiler is opened only
/// where its file is known to nobody but the dynamic loader.
std::string why_unavailable(const driver::Driver& driver, jit::Loader& loader, int device_index);

/// The same for the process's driver and loader.
std::string why_unavailable(Device device);

}  // namespace fovea::cuda
