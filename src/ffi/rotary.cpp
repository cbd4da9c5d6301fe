// fovea_rotary.
#include "fovea/rotary.hpp"

#include <cstddef>
#include <string>

#include "fovea/fovea.h"

#include "core/check.hpp"
#include "ffi/arguments.hpp"
#include "ffi/error.hpp"
#include "ffi/sized_struct.hpp"
#include "ffi/tensor.hpp"

namespace {

using fovea::ffi::Access;
using fovea::ffi::guarded;
using fovea::ffi::to_view;

/// x, out and angles: what every caller has.
constexpr std::size_t kLeastSize = offsetof(fovea_rotary_args, positions);

bool to_bool(std::int32_t value, const std::string& label) {
  if (value < 0 || value > 1)
    fovea::invalid(label, "is " + std::to_string(value) + "; expected 0 to 1");
  return value == 1;
}

}  // namespace

extern "C" {

int fovea_rotary(const fovea_rotary_args* args, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_rotary";
    const auto c = fovea::ffi::read_struct(args, kLeastSize, where);
    const fovea::ffi::Threads threads = fovea::ffi::to_threads(c.runtime, c.executor, where);
    const bool is_in_place = c.x == c.out;
    fovea::rotary({.x = to_view(c.x, is_in_place ? Access::write : Access::read, where + ": x"),
                   .out = to_view(c.out, Access::write, where + ": out"),
                   .cos = to_view(c.cos, Access::read, where + ": cos"),
                   .sin = to_view(c.sin, Access::read, where + ": sin"),
                   .is_interleaved = to_bool(c.is_interleaved, where + ": is_interleaved"),
                   .is_conjugate = to_bool(c.is_conjugate, where + ": is_conjugate"),
                   .positions = to_view(c.positions, Access::read, where + ": positions"),
                   .offsets = to_view(c.offsets, Access::read, where + ": offsets"),
                   .cu_seqlens = to_view(c.cu_seqlens, Access::read, where + ": cu_seqlens"),
                   .executor = threads.executor,
                   .stream = c.stream},
                  fovea::ffi::runtime_of(threads));
  });
}

}  // extern "C"
