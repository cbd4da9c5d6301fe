// The emulated twin of src/cuda/device/ptx/generated/wgmma_e4m3.cuh: one implementation serves every form.
#pragma once

#include "ptx/wgmma.cuh"
