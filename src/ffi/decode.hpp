// A C call over a KV cache as the C++ one.
#pragma once

#include <string>

#include "fovea/fovea.h"
#include "fovea/kv_cache.hpp"

#include "ffi/arguments.hpp"

namespace fovea::ffi {

struct DecodeCall {
  Call forward;
  AttentionDecode args;
};

/// Throws InvalidArgument, each message starting with `where`; `cache` as to_call's.
DecodeCall to_decode(const fovea_attention_decode_args* source, const std::string& where,
                     ProgramCache* cache = nullptr);

}  // namespace fovea::ffi
