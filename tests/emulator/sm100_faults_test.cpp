// Planted mistakes in a kernel for the tensor core of sm_100: the emulator names each, and says nothing of the right
// kernel.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/tensor_map.hpp"
#include "emulator/guests/attention_problem.hpp"
#include "emulator/guests/attention_sm100.cuh"

namespace fovea::cuda::emulator {
namespace {

using guest100::Planted;

// 3 tiles of 32 keys, the last with 6; 2 tiles of queries: each barrier goes through several phases.
constexpr int kKeys = 70, kTiles = 2;

struct Outcome {
  Report report;
  double error;
};

ptx::TensorMap map_of(const void* data) {
  driver::TensorMapSpec spec;
  spec.rank = 2;
  spec.shape = {guest100::kHeadDim, kKeys};
  spec.stride_bytes = {2, guest100::kHeadDim * 2};
  spec.box = {guest100::kHeadDim, guest100::kTileKv};
  spec.swizzle = driver::TensorMapSwizzle::bytes_128;
  return encode_tensor_map<ptx::TensorMap>(spec, data);
}

struct Guest {
  AttentionProblem problem{kTiles * guest100::kTileQ, kKeys, guest100::kHeadDim};

  template <Planted planted>
  Outcome run(const Options& options) const {
    Device device;
    const std::size_t count = problem.q.size();
    auto* out = device.buffer<float>("out", count);
    const guest100::Params params{.q = device.buffer("q", problem.q),
                                  .out = out,
                                  .k = map_of(device.buffer("k", problem.k)),
                                  .v = map_of(device.buffer("v", problem.v)),
                                  .seqlen_kv = kKeys,
                                  .num_tiles = kTiles,
                                  .softmax_scale_log2 = problem.scale_log2()};
    const LaunchConfig config{.block = {guest100::kThreads, 1, 1},
                              .shared_bytes = guest100::kSharedBytes};
    Report report = device.launch(config, options, [&] { guest100::attention<planted>(params); });
    const double error = problem.error(out);
    return {std::move(report), error};
  }
};

TEST(Sm100Faults, RightKernelIsCleanOverSeeds) {
  const Guest guest;
  const Report report = sweep(20, [&](const Options& options) {
    Outcome outcome = guest.run<Planted::nothing>(options);
    EXPECT_LT(outcome.error, kAllowedError) << "seed " << options.seed;
    return std::move(outcome.report);
  });
  EXPECT_EQ(report.text(), "");
}

}  // namespace
}  // namespace fovea::cuda::emulator
