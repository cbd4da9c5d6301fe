// Explanations as texts that a C caller frees.
#pragma once

#include <cstdint>
#include <string>

#include "fovea/attention.hpp"

namespace fovea::ffi {

/// Writes NULL first, so that a caller whose call was refused frees nothing. Throws InvalidArgument for no address.
void require_text(char** text, const std::string& where);

/// The page or the JSON object, freed by fovea_string_free. Throws InvalidArgument, naming `where`, for an unknown
/// format.
char* render(const Explanation& explanation, std::int32_t format, const char* where);

/// A text that the caller frees with fovea_string_free.
char* copy_text(const std::string& text);

}  // namespace fovea::ffi
