// q, k and v as codes and scales, by the fields of a recipe: what attention with the recipe rounds them to. For those
// who keep codes, look at them, or feed kernels of their own. Read quant.hpp first.
//
// Other libraries' quantisers are recipes here: SageAttention's per_block_int8(q, k) is quantize_q and quantize_k with
// "qk=int8,q_scales=block,k_scales=block,block_kv=64", per_warp_int8 the same with q_scales=warp, and
// per_channel_fp8(v) is quantize_v with "pv=e4m3,v_scales=channel" and ValueLayout::columns.
#pragma once

#include <cstdint>

#include "fovea/export.hpp"
#include "fovea/quant.hpp"
#include "fovea/runtime.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// Scales of a head of so many rows: the last extent of `scales`. Throws InvalidArgument where the recipe cannot be.
[[nodiscard]] FOVEA_EXPORT std::int64_t num_q_scales(const Quantization& quant,
                                                     std::int64_t seqlen_q);
[[nodiscard]] FOVEA_EXPORT std::int64_t num_k_scales(const Quantization& quant,
                                                     std::int64_t seqlen_kv);

/// A number of x is code · scale of its group, plus the mean that smoothing took, before rotation.
struct QuantizeQ {
  FloatView q{};  // [batch, seqlen_q, num_heads_q, head_dim] f32, f16, bf16; any strides
  TensorView
      codes{};  // shape of q, written: i8 where quant.qk is int8, u8 (the bits of e4m3) where it is e4m3
  Float32View scales{};  // [batch, num_heads_q, num_q_scales], written
  Float32View
      means{};  // [batch, num_heads_q, blocks of block_q, head_dim], written; where smooth_q is block
  Quantization quant{};
  Executor* executor = nullptr;  // default: the process's pool
};

struct QuantizeK {
  FloatView k{};         // [batch, seqlen_kv, num_heads_kv, head_dim] f32, f16, bf16; any strides
  TensorView codes{};    // shape of k, written: as of q
  Float32View scales{};  // [batch, num_heads_kv, num_k_scales], written
  Float32View mean{};    // [batch, num_heads_kv, head_dim], written; where smooth_k is not none
  Quantization quant{};
  Executor* executor = nullptr;
};

/// columns: codes are [batch, num_heads_kv, head_dim, padded], padded a multiple of 16 that holds all rows, and of
/// every 16 rows the order is 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: as fragments of probabilities lie in MMA. Zeros
/// follow.
enum class ValueLayout : std::uint8_t { rows, columns };

struct QuantizeV {
  FloatView v{};  // [batch, seqlen_kv, num_heads_kv, head_dim] f32, f16, bf16; any strides
  TensorView
      codes{};  // shape of v, or of columns; written: i8 where quant.pv is int8, u8 where it is e4m3
  // [batch, num_heads_kv, tiles of block_kv, head_dim], written; one tile where quant.v_scales are of tensors or
  // channels
  Float32View scales{};
  Float32View mean{};  // [batch, num_heads_kv, head_dim], written; where smooth_v is not none
  ValueLayout layout = ValueLayout::rows;
  Quantization quant{};
  Executor* executor = nullptr;
};

/// On the cpu. Outputs must not overlap. What is not finite has the code 0 and counts for no scale or mean; so does all
/// of a row of q or k that holds such a number.
/// Throws InvalidArgument before anything is written.
FOVEA_EXPORT void quantize_q(const QuantizeQ& args);
FOVEA_EXPORT void quantize_k(const QuantizeK& args);
FOVEA_EXPORT void quantize_v(const QuantizeV& args);

}  // namespace fovea
