// What a GPU can do at most, measured in the same run as what it is compared with. bound.hpp does the same for
// processors.
#pragma once

#include <vector>

#include "fovea/dtype.hpp"

#include "bound.hpp"
#include "cuda/jit/loader.hpp"
#include "gpu.hpp"

namespace fovea::cuda::jit {

/// tools/rates/, embedded in the command by its CMakeLists.txt.
const DeviceText& embedded_rate_text();

}  // namespace fovea::cuda::jit

namespace fovea::tools {

/// All that the kernels below include: the library's text, and that of rates/.
cuda::jit::DeviceText rate_text();
/// Those that measure a GPU of this architecture: products, multiply-adds.
std::vector<cuda::jit::KernelText> rate_kernels(cuda::jit::Architecture architecture);

struct GpuBounds {
  // bf16 products of tensor cores, operands in registers or shared memory
  double product_gflops = 0;
  double fma_gflops = 0;      // fp32 multiply-adds in registers
  double copy_gigabytes = 0;  // read and written a second, by a copy on the device

  Bounds of(Dtype inputs) const;
};

/// Takes about half a second. Of GPUs of AMD nothing is known: rates/ is PTX.
GpuBounds measure_bounds(const Gpu& gpu);

}  // namespace fovea::tools
