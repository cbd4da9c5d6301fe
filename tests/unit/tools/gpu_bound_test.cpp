// Kernels that measure what a GPU can do at most: they compile, for each kind of tensor core, and keep their sums in
// registers.
#include "gpu_bound.hpp"

#include <gtest/gtest.h>

#include "cuda/jit/compiler.hpp"

namespace fovea::tools {
namespace {

TEST(RateKernels, CompileForEachKindOfTensorCoreAndSpillNothing) {
  cuda::jit::Compiler compiler(cuda::jit::default_search(cuda::jit::CompilerKind::nvrtc),
                               rate_text());
  if (!compiler.library().is_present()) GTEST_SKIP() << compiler.library().why_absent();
  for (const cuda::jit::Architecture architecture : {cuda::jit::Architecture{8, 0}, {9, 0}}) {
    const auto kernels = rate_kernels(architecture);
    ASSERT_EQ(kernels.size(), 2U);
    for (const cuda::jit::KernelText& kernel : kernels) {
      const cuda::jit::Cubin cubin = compiler.compile(kernel, architecture);
      EXPECT_EQ(cubin.report.spill_bytes, 0) << kernel.label;
      EXPECT_EQ(cubin.report.num_wgmma_notes, 0) << kernel.label;
    }
  }
}

}  // namespace
}  // namespace fovea::tools
