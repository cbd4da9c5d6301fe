// Nothing here: one thread of the host has no others. Templates of common/ that name these functions are not called.
#pragma once

#include "ptx/base.cuh"
