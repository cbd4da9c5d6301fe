// Kernels that set up the processor's matrix unit do so for as long as one of these lives.
#pragma once

#include "cpu/kernels/panel.hpp"

namespace fovea::cpu {

class KernelScope {
 public:
  explicit KernelScope(const PanelKernels& kernels) : stop_(kernels.stop) {
    if (kernels.start != nullptr) kernels.start();
  }
  ~KernelScope() {
    if (stop_ != nullptr) stop_();
  }
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  void (*stop_)();
};

}  // namespace fovea::cpu
