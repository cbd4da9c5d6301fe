// DLTensor to TensorView. Read arguments.hpp next.
#pragma once

#include <string>

#include "fovea/fovea.h"
#include "fovea/tensor.hpp"

namespace fovea::ffi {

enum class Access { read, write };

/// The view that a caller's tensor describes; an empty view for NULL. Throws InvalidArgument, naming `name`, for what a
/// TensorView cannot say: a dtype Fovea lacks, several lanes, rank 0, a byte offset between two elements.
TensorView to_view(const DLTensor* tensor, Access access, const std::string& name);

}  // namespace fovea::ffi
