// The problems that kernels are run on under the emulator: the feature matrix, and what only a kernel's tiles tell
// apart. A generator compiles one kernel for each, so the list is one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/forward/attention_forward.hpp"
#include "support/cache_case.hpp"
#include "support/case.hpp"

namespace fovea::testing {

struct NamedCacheCase {
  std::string label;
  CacheCase problem;
};

/// Each with a label that is a name in C++.
std::vector<Case> kernel_cases();

/// The score becomes score + table[kind, kv_idx] with a kind for each row: the lowest float, which others add to hide
/// keys, at all but some keys, at the first ones, at the last ones, at all; two numbers of its size; the greatest float
/// at some keys.
Case with_extreme_scores(Case problem);

/// So many sequences, of all lengths from nothing to a tile and a row, the longest ones somewhere: warps count 32 at a
/// time.
std::vector<Lengths> many_sequences(std::int64_t count);

/// Of sm_90: two row tiles at least, three kv tiles, tails in both, and what the kernel does itself instead of leaving
/// it to others.
std::vector<Case> hopper_cases();

/// Of sm90/attention_forward, where TMA cannot read the tensors; and f32 outputs. Two row tiles, three kv tiles.
std::vector<Case> hopper_cp_async_cases();
std::vector<Case> hopper_f32_out_cases();

/// Of sm90/attention_forward, with masks that select pieces of the score matrix: tiles of those.
std::vector<Case> hopper_selection_cases();

/// Of sm90/attention_quantized; of sm80/attention_quantized.
std::vector<Case> hopper_quantized_cases();
std::vector<Case> sm80_quantized_cases();
/// Of sm90/attention_quantized over caches, of codes and of elements.
std::vector<NamedCacheCase> hopper_rounded_cache_cases();
/// What these start from: so many rows, three tiles of 128 keys, the last of them cut; two heads share keys.
Case rounded_case(const char* label, std::int64_t head_dim, std::int64_t seqlen_q);
/// The score becomes score + bias[q_idx % 2, kv_idx], NaN at a key in the middle for odd rows.
Case with_nan_scores(Case problem);
/// The GPU that a case of sm80/attention_quantized is compiled for: 8.0; 8.9 where codes of P are multiplied.
cuda::DeviceTraits rounding_device(const Quantization& quant);

/// Of sm90/attention_forward with few rows, whose heads share a tile and whose keys are split: dense, and over caches.
std::vector<Case> hopper_few_rows_cases();

/// Of sm90/decode, dense: few rows, more keys than one split has, and programs, masks and statistics beside.
std::vector<Case> decode_cases();

/// Of sm80/attention_forward_short, on Hopper; of sm90/attention_forward_short.
std::vector<Case> short_cases();
std::vector<Case> hopper_short_cases();
/// What these start from: one sequence in bf16, without row maxima.
Case short_case(const char* label, Lengths lengths, std::int64_t head_dim);
/// The longest of their packed sequences, rows and keys, and their problems as a caller poses them who says so.
inline constexpr std::int64_t kMostPacked = 128, kMostHopperPacked = 208;
ForwardProblem planned_for_short(ForwardProblem problem, std::int64_t most_packed);

/// As they are planned for.
ForwardProblem problem_of_case(const Case& each);
ForwardProblem problem_of_cache(const CacheCase& each);

std::vector<NamedCacheCase> kernel_cache_cases();
/// The kernels of sm_80 on Turing: f16 by its products and through registers, bf16 in f32.
std::vector<Case> turing_cases();
std::vector<NamedCacheCase> turing_cache_cases();
/// Of sm80/attention_coded, and of sm80/decode_coded.
std::vector<NamedCacheCase> coded_cache_cases();
std::vector<NamedCacheCase> coded_decode_cases();
/// Of sm90/decode_coded.
std::vector<NamedCacheCase> hopper_coded_cases();
/// Of sm90/attention_coded: chunks of queries. The same where a launch before makes numbers of codes.
std::vector<NamedCacheCase> hopper_chunk_cases();
std::vector<NamedCacheCase> hopper_converted_cases();

/// Of the kernels that run on AMD's GPUs: of the f32 kernel, which any of them runs; of cdna/attention_forward.
std::vector<Case> amd_cases();
std::vector<NamedCacheCase> amd_cache_cases();
std::vector<Case> cdna_cases();
std::vector<NamedCacheCase> cdna_cache_cases();
/// The GPU that such a case is compiled for: gfx950 where its label says so, else gfx942.
cuda::DeviceTraits amd_device_of(std::string_view label);

/// Of sm90/attention_forward: chunks of queries against slots, and pages of all sizes that TMA reads, and what
/// TMA cannot read of caches.
std::vector<NamedCacheCase> hopper_cache_cases();
std::vector<NamedCacheCase> hopper_copied_cache_cases();

std::vector<NamedCacheCase> hopper_few_rows_cache_cases();

/// Of sm90/decode: lengths around slices, tiles and splits, in pages of all kinds and in slots.
std::vector<NamedCacheCase> decode_cache_cases();

/// Of sm90/decode_latent: over caches whose values are the first columns of keys; dense, to be run with such values.
std::vector<NamedCacheCase> latent_cache_cases();
std::vector<Case> latent_cases();
AttentionForward with_latent_values(AttentionForward args);

/// Keys of the longest sequence, which a plan is made for.
std::int64_t longest(const CacheCase& problem);

}  // namespace fovea::testing
