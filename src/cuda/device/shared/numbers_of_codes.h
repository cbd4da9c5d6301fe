// What common/numbers_of_codes is compiled for and takes.
#pragma once

#include "shared/element.h"
#include "shared/forward_params.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

struct NumbersOfCodesSpec {
  Element element = Element::bf16;  // of the numbers
  Codes k_codes = Codes::int8;
  Codes v_codes = Codes::int8;
  bool is_paged = false;
  bool has_packed_q = false;  // and new tokens are packed, where there are any

  bool operator==(const NumbersOfCodesSpec&) const = default;
};

/// A CTA has so many rows of a sequence, of all heads.
inline constexpr std::int32_t kRowsOfNumbers = 32, kNumbersThreads = 256;

struct NumbersOfCodesParams {
  ForwardParams common;  // k and v: codes, strides in bytes
  ScaleParam k_scale, v_scale;
  // [num_sequences, rows, num_heads_kv, head_dim], key 0 of a sequence first: written as far as there are keys
  std::uint16_t* k;
  std::uint16_t* v;
  std::int64_t rows;
  std::int32_t num_tiles;  // CTAs of a sequence
};

}  // namespace fovea::cuda
