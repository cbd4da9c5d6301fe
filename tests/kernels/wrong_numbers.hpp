// Lengths, offsets, tables and positions that hold anything, and what the emulator must find then: nothing outside of a
// tensor, and an end.
#pragma once

#include <cstdint>

#include "fovea/tensor.hpp"

#include "cuda/emulator/report.hpp"

namespace fovea::testing {

/// Overwrites some elements of an i32 or i64 tensor with right and wrong numbers; right ones are at most `most`. Equal
/// for equal draws.
void spoil_numbers(const TensorView& numbers, std::int64_t most, std::uint64_t draw);

/// The same of a tensor of any type, floats with NaN, infinities and any bits.
void spoil_elements(const TensorView& tensor, std::uint64_t draw);

/// Two sequences may be told to share rows, and then write them in any order: that is no access outside.
bool is_order_alone(const cuda::emulator::Finding& finding);

/// Turns of threads in a launch that ends: the longest of the right ones takes a tenth.
inline constexpr std::uint64_t kMostSwitches = 100'000'000;

}  // namespace fovea::testing
