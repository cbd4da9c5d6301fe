#include <algorithm>
#include <stdexcept>

#include "kernels/emulated_forward.hpp"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/generated/wgmma_f16.cuh"
#include "sm90/decode_latent.cuh"

// Written by print_forward_units from latent_cases.cpp.
#include "latent_units.inc"

namespace fovea::cuda {

LatentFunction latent_named(std::string_view name) {
  const auto* const found = std::ranges::find(kLatents, name, &EmulatedLatent::name);
  if (found == std::end(kLatents)) throw std::out_of_range(std::string(name));
  return found->run;
}

}  // namespace fovea::cuda
