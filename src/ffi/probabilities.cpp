// fovea_attention_probabilities.
#include "fovea/probabilities.hpp"

#include <cstddef>
#include <string>

#include "fovea/fovea.h"

#include "ffi/arguments.hpp"
#include "ffi/error.hpp"
#include "ffi/sized_struct.hpp"
#include "ffi/tensor.hpp"

namespace {

using fovea::ffi::read_struct;

constexpr std::size_t kLeastSize =
    offsetof(fovea_attention_probabilities_args, probabilities) + sizeof(const DLTensor*);

/// The forward call with what is not looked at filled in, so that it may be NULL: v by k, out by q.
fovea::ffi::Call to_scores(const fovea_attention_forward_args* source, const std::string& where) {
  auto c = read_struct(source, offsetof(fovea_attention_forward_args, v), where);
  c.struct_size = sizeof(c);
  c.v = c.k;
  c.out = c.q;
  c.lse = c.row_max = nullptr;
  return fovea::ffi::to_call(&c, where);
}

}  // namespace

extern "C" {

int fovea_attention_probabilities(const fovea_attention_probabilities_args* args,
                                  fovea_error** error) {
  return fovea::ffi::guarded(error, [&] {
    const std::string where = "fovea_attention_probabilities";
    const auto c = read_struct(args, kLeastSize, where);
    const fovea::ffi::Call call = to_scores(c.forward, where + ": forward");
    fovea::attention_probabilities(
        {.forward = call.args,
         .probabilities = fovea::ffi::to_view(c.probabilities, fovea::ffi::Access::write,
                                              where + ": probabilities")},
        fovea::ffi::runtime_of(call.threads));
  });
}

}  // extern "C"
