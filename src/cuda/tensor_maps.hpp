// Tensors as TMA takes them: which it can have, and the maps of those. Read driver/tensor_map.hpp for what a map is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "fovea/tensor.hpp"

#include "cuda/device/shared/forward_params_sm90.h"
#include "cuda/driver/tensor_map.hpp"

namespace fovea::cuda {

/// Elements of a box's row: the 128 bytes of the swizzle.
inline constexpr std::int64_t kPanelElements = 64;

/// Makes a tensor map: the driver, or the emulator.
using TensorMapEncoder =
    std::function<TensorMapParam(const driver::TensorMapSpec& spec, const void* address)>;

/// By the driver, in whose context the calling thread is.
TensorMapEncoder encoder_of(const driver::Driver& driver);

/// Why TMA cannot have a tensor of these strides, dense or packed; empty: it can.
std::string why_no_tensor_map(std::string_view label, const TensorSpec& spec);

/// A tensor as (head_dim, seqlen, heads, batch), in boxes of one panel of `rows` rows of each of `heads` heads; packed tensors are one
/// long sequence, pages are short ones.
TensorMapParam tensor_map(const TensorMapEncoder& encode, const TensorView& tensor,
                          std::int64_t rows, std::int64_t heads = 1);

}  // namespace fovea::cuda
