// The unit of a kernel that is compiled for a spec and for programs: what kernels of gradients and of tangents are made
// of; and of a kernel that is one text for all calls.
#pragma once

#include <string>
#include <string_view>

#include "cuda/device_traits.hpp"
#include "cuda/jit/cubin.hpp"
#include "expr/print_cuda.hpp"

namespace fovea::cuda {

struct KernelUnit {
  std::string_view header;
  std::string spec;         // as printed
  std::string bounds;       // of __launch_bounds__
  std::string_view params;  // what the kernel takes
  std::string call;         // the entry, with its template arguments
};

std::string kernel_unit(const expr::CudaProgram& program, const KernelUnit& unit);

/// That of common/NAME.cuh, whose entry is NAME: nothing but its parameters says what it does.
jit::KernelText common_kernel(std::string_view name, std::string_view params, int num_threads);

/// The arguments of __launch_bounds__: threads of a CTA, and CTAs of an SM. HIP takes the second one for waves of a
/// SIMD, of which a CU of AMD's has four; one is what any kernel has.
std::string launch_bounds(int num_warps, int ctas_per_sm, const DeviceTraits& device);

}  // namespace fovea::cuda
