// The functions of fovea.h that run a shard plan, or decoding steps, over a caller's communicator.
#include "fovea/context_parallel.hpp"

#include <memory>
#include <string>

#include "fovea/fovea.h"

#include "core/check.hpp"
#include "ffi/arguments.hpp"
#include "ffi/communicator.hpp"
#include "ffi/decode.hpp"
#include "ffi/error.hpp"
#include "ffi/gradients.hpp"
#include "ffi/shard_plan.hpp"

struct fovea_context_parallel {
  fovea::ContextParallel attention;
};
struct fovea_context_parallel_decode {
  fovea::ContextParallelDecode decoding;
};

namespace {

using fovea::ffi::guarded;

fovea::ContextParallel& attention_of(fovea_context_parallel* context_parallel,
                                     const std::string& where) {
  if (context_parallel == nullptr)
    fovea::invalid(where, "context_parallel is NULL; expected an address");
  return context_parallel->attention;
}

}  // namespace

extern "C" {

int fovea_context_parallel_create(const fovea_shard_plan* plan,
                                  const fovea_communicator* communicator,
                                  fovea_context_parallel** context_parallel, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_context_parallel_create";
    if (context_parallel == nullptr)
      fovea::invalid(where, "context_parallel is NULL; expected an address");
    *context_parallel = nullptr;
    if (plan == nullptr) fovea::invalid(where, "plan is NULL; expected an address");
    auto ranks = fovea::ffi::to_communicator(communicator, where + ": communicator");
    *context_parallel = new fovea_context_parallel{{plan->plan, std::move(ranks)}};
  });
}

void fovea_context_parallel_destroy(fovea_context_parallel* context_parallel) {
  delete context_parallel;
}

int fovea_context_parallel_forward(fovea_context_parallel* context_parallel,
                                   const fovea_attention_forward_args* args, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_context_parallel_forward";
    fovea::ContextParallel& attention = attention_of(context_parallel, where);
    fovea::ffi::Call call = fovea::ffi::to_call(args, where);
    call.args.executor = call.threads.executor;
    attention.forward(call.args);
  });
}

int fovea_context_parallel_backward(fovea_context_parallel* context_parallel,
                                    const fovea_attention_backward_args* args,
                                    fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_context_parallel_backward";
    fovea::ContextParallel& attention = attention_of(context_parallel, where);
    fovea::ffi::BackwardCall call = fovea::ffi::to_backward(args, where);
    call.args.forward.executor = call.forward.threads.executor;
    attention.backward(call.args);
  });
}

int fovea_context_parallel_decode_create(const fovea_communicator* communicator,
                                         fovea_context_parallel_decode** context_parallel,
                                         fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_context_parallel_decode_create";
    if (context_parallel == nullptr)
      fovea::invalid(where, "context_parallel is NULL; expected an address");
    *context_parallel = nullptr;
    auto ranks = fovea::ffi::to_communicator(communicator, where + ": communicator");
    *context_parallel =
        new fovea_context_parallel_decode{fovea::ContextParallelDecode(std::move(ranks))};
  });
}

void fovea_context_parallel_decode_destroy(fovea_context_parallel_decode* context_parallel) {
  delete context_parallel;
}

int fovea_context_parallel_decode_run(fovea_context_parallel_decode* context_parallel,
                                      const fovea_attention_decode_args* args,
                                      fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_context_parallel_decode_run";
    if (context_parallel == nullptr)
      fovea::invalid(where, "context_parallel is NULL; expected an address");
    fovea::ffi::DecodeCall call = fovea::ffi::to_decode(args, where);
    call.args.executor = call.forward.threads.executor;
    context_parallel->decoding.run(call.args);
  });
}

}  // extern "C"
