// Validation of rotary, and where its rows stand.
#pragma once

#include <string_view>

#include "fovea/kv_cache.hpp"
#include "fovea/rotary.hpp"

#include "problem/cache.hpp"

namespace fovea {

/// Throws InvalidArgument before anything is written.
void validate_rotary(const ApplyRotary& args, std::string_view where);

/// Of validated arguments.
std::int64_t rotary_batch(const ApplyRotary& args);
/// On the host: the position of a row of a sequence.
std::int64_t rotary_position(const ApplyRotary& args, const SequenceRows& rows,
                             const SequenceRows::Token& token);

}  // namespace fovea
