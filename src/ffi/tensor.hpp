// DLTensor to TensorView. Read arguments.hpp next.
#pragma once

#include <string>

#include "fovea/fovea.h"
#include "fovea/tensor.hpp"

namespace fovea::ffi {

enum class Access { read, write };

/// Captured tensors may have rank 0: one element. A view of rank 0 counts as missing everywhere else.
enum class Rank { from_one, from_zero };

/// Throws InvalidArgument, naming `name`, for several lanes and a dtype that Fovea lacks.
Dtype to_dtype(const DLDataType& dtype, const std::string& name);

/// The view that a caller's tensor describes; an empty view for NULL. Throws InvalidArgument, naming `name`, for what a
/// TensorView cannot say: a dtype Fovea lacks, several lanes, a rank below `least`, a byte offset between two elements.
TensorView to_view(const DLTensor* tensor, Access access, const std::string& name,
                   Rank least = Rank::from_one);

/// Of one element where the tensor has rank 0: a gradient or tangent of one number.
TensorView to_elements_view(const DLTensor* tensor, Access access, const std::string& name);

}  // namespace fovea::ffi
