// What files hold beside what a call needs of them: each message names the option and the file. All of it is looked at
// on the host, whatever device computes.
#pragma once

#include "attention_options.hpp"

namespace fovea::tools {

/// Dtype and rank of q, k or v, named `tensor`.
void check_input(const AttentionOptions& options, std::string_view tensor, const Array& array);

/// q, k and v beside each other: dtypes, heads, lengths, head dims.
void check_related(const AttentionOptions& options, const Inputs& inputs);

/// Shapes, dtypes and offsets of everything else. Programs would read what is too small limited to it: here it is a
/// mistake.
void check_side_tensors(const AttentionOptions& options, const Inputs& inputs);

}  // namespace fovea::tools
