// The emulated twin of src/cuda/device/ptx/generated/wgmma_e5m2.cuh: one implementation serves every form.
#pragma once

#include "ptx/wgmma.cuh"
