// What goes into the compiler and what comes out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/jit/architecture.hpp"

namespace fovea::cuda::jit {

/// The name of the function in every unit.
inline constexpr const char* kEntryName = "fovea_kernel";

/// A unit that is to be compiled: includes of device text, programs, one literal of the spec, and
/// fovea_kernel.
struct KernelText {
  std::string unit;
  std::string label;  // for people: "sm80/attention_forward bf16 d128". Shapes no code and no key
};

/// What ptxas says of fovea_kernel.
struct CompileReport {
  int registers = 0;        // per thread
  int spill_bytes = 0;      // stores and loads
  int local_bytes = 0;      // stack frame, spills included
  int shared_bytes = 0;     // static
  int num_wgmma_notes = 0;  // C75xx: ptxas inserted waits or serialised wgmma
  int compile_ms = 0;       // of a core that the compiler took
  std::string log;          // all of the compiler's words
};

/// Where a cubin comes from, nearest first.
enum class KernelSource : std::uint8_t { pack, disk, compiler };

struct Cubin {
  std::vector<std::byte> image;
  CompileReport report;
  KernelSource source = KernelSource::compiler;
};

}  // namespace fovea::cuda::jit
