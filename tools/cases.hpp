// Named problems (cases/*.json): each says why it is here. docs/guides/command_line.md describes the format.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention_options.hpp"

namespace fovea::tools {

struct Case {
  std::string name;
  std::string why;
  AttentionOptions options;  // shapes and what options can say
  bool has_alibi = false;    // slopes 2^(-8 (h + 1) / num_heads_q)
  bool has_sinks = false;
  std::int64_t num_documents = 0;  // of equal length; 0: no document mask
  bool is_backward = false;        // the gradients are what counts, not the call that they are of
  std::int64_t page_size = 0;      // keys lie in pages of a cache; 0: in a tensor
  // Of fovea pack alone:
  bool is_cached = false;                           // keys lie in a contiguous cache
  std::optional<Dtype> codes;                       // of a cache: keys and values are such codes
  std::int64_t shared_prefix = 0;                   // keys of a cache that all sequences begin with
  std::vector<std::int64_t> seqlens_q, seqlens_kv;  // packed sequences; empty: dense
};

/// A file of cases, as it stands in the repository.
struct CaseText {
  std::string_view name;
  std::string_view json;
};
std::span<const CaseText> case_texts();

/// Throws Failure(kBadInput): "<where>: case 'x': unknown key 'y'".
std::vector<Case> parse_cases(std::string_view json, std::string_view where);
/// All that the binary carries.
std::vector<Case> built_in_cases();

/// As make_inputs, with q, k and v as shapes alone.
Inputs make_shapes(const Case& problem);
/// The tensors of a case: normal random numbers, the same in every run.
Inputs make_inputs(const Case& problem);
/// Fills q, k and v of shapes alone.
void fill_random(Inputs& inputs);

}  // namespace fovea::tools
