// What a conformance case is run on. Read main.cpp next.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "conformance/cases.hpp"
#include "cuda/jit/architecture.hpp"

namespace fovea::cuda::conformance {

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;
  virtual bool has_instructions_of(const Case&) const { return true; }
  /// Called once, with all the cases that run() will see.
  virtual void prepare(const std::vector<Case>& cases) = 0;
  /// The output buffer after the kernel. Throws std::exception with what went wrong.
  virtual Bytes run(const Case& one) = 0;
};

/// The first GPU, kernels compiled by NVRTC now. Throws Unsupported with the reason where there is none of sm_90,
/// sm_100 or sm_103.
std::unique_ptr<Backend> hardware();
std::unique_ptr<Backend> emulator();

/// Compiles the kernels of the cases that such a GPU has the instructions of, without one; how many those are. Throws
/// what jit::Compiler throws.
std::size_t compile_for(const std::vector<Case>& cases, jit::Architecture architecture);

}  // namespace fovea::cuda::conformance
