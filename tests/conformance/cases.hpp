// What instructions must do, case by case: a kernel of kernels.cuh or copy_kernels.cuh, its inputs, and the bits that
// must come out. Inputs of products are small whole numbers, so that their sums are exact in any order and every bit
// counts. Expected bits follow from the instruction's definition and the layouts of device/tile, not from the emulator:
// hardware and emulator are both compared with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "conformance/params.h"
#include "cuda/driver/tensor_map.hpp"

namespace fovea::cuda::conformance {

using Bytes = std::vector<std::byte>;

/// Which buffer the tensor map names, if any.
enum class MapOf { none, in, out };

struct Case {
  std::string name, kernel;
  int num_ctas = 1, num_threads = 128, cluster = 1;
  int shared_bytes = 0;
  Params params{};  // but in, out and map
  MapOf map_of = MapOf::none;
  driver::TensorMapSpec map{};
  Bytes in{}, out_before{};
  Bytes expected{};
  /// Where bits are not fixed: what is wrong with the output, or nothing. `expected` is then empty.
  std::function<std::string(const Bytes& out)> check{};
  bool is_recorded = false;  // nothing is expected; --save keeps every bit
  /// Of the GPU that has these instructions: wgmma is on 9 alone, tcgen05 on 10, products of four bits by a
  /// warp on 12; 0: on all.
  int compute_capability_major = 0;
};

std::vector<Case> wgmma_cases();
std::vector<Case> matrix_cases();      // ldmatrix, stmatrix, mma.sync
std::vector<Case> arithmetic_cases();  // conversions, rounding, approximations
std::vector<Case> copy_cases();        // cp.async, TMA, bulk copies, clusters
std::vector<Case> tcgen05_cases();     // the tensor core of sm_100
std::vector<Case> recorded_cases();    // what no manual tells

/// A kernel that a case may name, with the text that calls it: for the unit that NVRTC compiles.
struct Kernel {
  std::string name, call;  // "tma_load<3>"
  std::string unit;        // kernels of one unit are compiled together
};

std::vector<Kernel> wgmma_kernels();
std::vector<Kernel> matrix_kernels();
std::vector<Kernel> copy_kernels();  // and arithmetic
std::vector<Kernel> tcgen05_kernels();

}  // namespace fovea::cuda::conformance
