#include "cpu/kernels/panel.hpp"
namespace fovea::cpu {
const PanelKernels* panel_kernels_avx512_bf16() { return nullptr; }
const PanelKernels* panel_kernels_amx_bf16() { return nullptr; }
}  // namespace fovea::cpu
