// Tensors as TMA takes them: which it can have, and the maps of those. Read driver/tensor_map.hpp for what a map is.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "fovea/tensor.hpp"

#include "cuda/device/shared/forward_params_sm90.h"
#include "cuda/device/shared/forward_spec.h"
#include "cuda/driver/tensor_map.hpp"

namespace fovea::cuda {

/// Elements of a box's row: the 128 bytes of the swizzle.
inline constexpr std::int64_t kPanelElements = 64;
/// Of a box.
inline constexpr std::int64_t kMostPanels = 256;
/// head_dim in whole panels.
std::int64_t panels_of(std::int64_t head_dim);

/// Makes a tensor map: the driver, or the emulator.
using TensorMapEncoder =
    std::function<TensorMapParam(const driver::TensorMapSpec& spec, const void* address)>;

/// By the driver, in whose context the calling thread is.
TensorMapEncoder encoder_of(const driver::Driver& driver);

/// Why TMA cannot have one of these, dense or packed; empty: it can have all.
std::string why_no_tensor_maps(
    std::initializer_list<std::pair<std::string_view, const TensorSpec*>> tensors);

/// Whether TMA can have the tensors of a call, which may start elsewhere than those of the call before.
bool have_tensor_maps(std::initializer_list<const TensorView*> tensors);

/// Rows of a box of keys: as many of a kv tile as surely lie in one page.
std::int32_t rows_of_box(const ForwardSpec& spec, std::int32_t page_size);

/// A tensor as (head_dim, seqlen, heads, batch), in boxes of one panel of `rows` rows of a head; packed tensors are one
/// long sequence, pages are short ones. `panel`: its elements, 64, or 32 by a swizzle of 64 bytes. L2 fetches 128 bytes
/// where some are asked for, not a neighbour's beside them (measured, docs/kernels/attention_short_sm90.md), and 256
/// where rows are as long.
TensorMapParam tensor_map(const TensorMapEncoder& encode, const TensorView& tensor,
                          std::int64_t rows, std::int64_t panel = kPanelElements);

/// The first as (head_dim, heads, seqlen, batch), in boxes of one panel of `rows` rows of `heads` heads, which are
/// neighbours in it.
TensorMapParam tensor_map_of_heads(const TensorMapEncoder& encode, const TensorView& tensor,
                                   std::int64_t rows, std::int64_t heads);

/// Of whole rows of a head.
struct RowBoxes {
  std::int64_t rows = 0;
  bool by_panels = false;
  std::int64_t most_panels = kMostPanels;  // where not by panels
  driver::TensorMapL2Promotion l2_promotion = driver::TensorMapL2Promotion::bytes_256;
};

/// The first as (64, seqlen, head_dim / 64, heads, batch), in boxes of a panel behind the other; by panels as
/// (head_dim, seqlen, 1, heads, batch), in boxes of one. Of codes a panel is 128, or a row of 64 by a swizzle of 64
/// bytes.
TensorMapParam tensor_map_of_rows(const TensorMapEncoder& encode, const TensorView& tensor,
                                  const RowBoxes& boxes);

}  // namespace fovea::cuda
