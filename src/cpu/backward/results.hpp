// What is written once the tiles are done, besides dq: gradients of sinks, and zeros for rows that belong to nobody.
#pragma once

#include <cstdint>

#include "cpu/backward/call.hpp"

namespace fovea::cpu {

/// -Σ exp(sink - lse) delta over all rows of a head, in order.
void write_dsink(const BackwardCall& call, std::int64_t q_head);

/// Packed rows behind the last sequence: gradient 0.
void clear_padding_rows(const BackwardCall& call);

}  // namespace fovea::cpu
