// What sm80/decode_coded is compiled for and takes, beside what sm80/attention_coded does.
#pragma once

#include "shared/forward_params_coded.h"
#include "shared/forward_spec.h"

namespace fovea::cuda {

/// A warp has all rows of the CTA, and slices of tile_kv keys.
struct CodedDecodeSpec : ForwardSpec {
  Codes k_codes = Codes::int8;
  Codes v_codes = Codes::int8;

  bool operator==(const CodedDecodeSpec&) const = default;
};

/// What one warp of it has.
constexpr TeamSpec spec_of_coded_warp(const CodedDecodeSpec& decode) {
  TeamSpec spec{decode};
  spec.num_warps = 1;
  spec.keeps_queries = true;
  return spec;
}

/// Shared memory: what warps leave of their rows, as team/join.cuh has it.
constexpr std::int32_t decode_coded_bytes(const CodedDecodeSpec& spec) {
  return spec.num_warps * spec.tile_q * (4 * spec.head_dim_v + 32);
}

}  // namespace fovea::cuda
