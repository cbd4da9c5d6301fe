// Code objects, the cubins of AMD: what their note of metadata says of kernels. hipRTC's log tells nothing of registers
// and spills, as ptxas' does for NVRTC; the note has both. Its members: LLVM, User Guide for AMDGPU Backend, "Code
// Object V5 Metadata".
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "cuda/jit/cubin.hpp"

namespace fovea::cuda::jit {

struct CodeObjectKernel {
  std::string name;
  int vector_registers = 0;        // of a lane, accumulation registers among them
  int accumulation_registers = 0;  // of these
  int scalar_registers = 0;        // of a wave
  int vector_spills = 0;           // registers
  int scalar_spills =
      0;  // registers, in lanes of vector registers where there is no private memory
  int private_bytes = 0;  // of a lane, in memory: spills and arrays
  int shared_bytes = 0;   // static
  int most_threads = 0;   // of a workgroup
  int wave_lanes = 0;
};

struct CodeObject {
  std::string target;  // "amdgcn-amd-amdhsa--gfx942"
  std::vector<CodeObjectKernel> kernels;
};

/// Throws CompileError for bytes that are no code object: another file, cut off, without the note.
CodeObject read_code_object(std::span<const std::byte> image);

/// Of `entry`, in the words of every compiler. Throws CompileError where it is not there.
CompileReport report_of(const CodeObject& code_object, const std::string& entry = kEntryName);

}  // namespace fovea::cuda::jit
