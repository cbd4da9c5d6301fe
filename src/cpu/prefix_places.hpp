// Where the keys and rows of a call with a shared prefix lie: the index tensors of its two calls.
#pragma once

#include "problem/shared_prefix.hpp"

namespace fovea::cpu {

/// Arguments have been validated, new tokens need not be in the cache yet. Writes all of `places`: a few numbers for
/// each sequence and group, and for each row where programs read them.
void write_prefix_places(const PrefixSource& source, const PrefixPlaces& places);

}  // namespace fovea::cpu
