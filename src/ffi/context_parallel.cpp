// The functions of fovea.h that run a shard plan over a caller's communicator.
#include "fovea/context_parallel.hpp"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "fovea/fovea.h"

#include "core/check.hpp"
#include "ffi/arguments.hpp"
#include "ffi/error.hpp"
#include "ffi/gradients.hpp"
#include "ffi/shard_plan.hpp"
#include "ffi/sized_struct.hpp"

struct fovea_context_parallel {
  fovea::ContextParallel attention;
};

namespace {

using fovea::ffi::guarded;

/// A Communicator made of C function pointers.
class CallbackCommunicator final : public fovea::Communicator {
 public:
  explicit CallbackCommunicator(const fovea_communicator& callbacks) : callbacks_(callbacks) {}

  int rank() const override { return callbacks_.rank; }
  int world_size() const override { return callbacks_.world_size; }

  fovea::Exchange begin_all_gather(const void* sent, void* received, std::size_t bytes,
                                   void* stream) override {
    fovea::Exchange exchange;
    check("begin_all_gather", callbacks_.begin_all_gather(callbacks_.context, sent, received, bytes,
                                                          stream, &exchange.number));
    return exchange;
  }

  fovea::Exchange begin_reduce_scatter(const float* sent, float* received, std::size_t count,
                                       void* stream) override {
    fovea::Exchange exchange;
    check("begin_reduce_scatter",
          callbacks_.begin_reduce_scatter(callbacks_.context, sent, received, count, stream,
                                          &exchange.number));
    return exchange;
  }

  fovea::Exchange begin_messages(std::span<const fovea::OutgoingMessage> sent,
                                 std::span<const fovea::IncomingMessage> received,
                                 void* stream) override {
    std::vector<fovea_outgoing_message> outgoing;
    for (const fovea::OutgoingMessage& message : sent)
      outgoing.push_back({message.data, message.bytes, message.to});
    std::vector<fovea_incoming_message> incoming;
    for (const fovea::IncomingMessage& message : received)
      incoming.push_back({message.data, message.bytes, message.from});
    fovea::Exchange exchange;
    check("begin_messages",
          callbacks_.begin_messages(callbacks_.context, outgoing.data(), outgoing.size(),
                                    incoming.data(), incoming.size(), stream, &exchange.number));
    return exchange;
  }

  void wait(fovea::Exchange exchange, void* stream) override {
    check("wait", callbacks_.wait(callbacks_.context, exchange.number, stream));
  }

 private:
  void check(const std::string& function, int result) const {
    if (result == 0) return;
    throw fovea::DeviceError("communicator: " + function + " returned " + std::to_string(result) +
                             " on rank " + std::to_string(callbacks_.rank) +
                             "; has another rank ended or raised an error?");
  }

  fovea_communicator callbacks_;
};

std::shared_ptr<fovea::Communicator> to_communicator(const fovea_communicator* source,
                                                     const std::string& where) {
  const auto c = fovea::ffi::read_struct(source, sizeof(fovea_communicator), where);
  const bool is_whole = c.begin_all_gather != nullptr && c.begin_reduce_scatter != nullptr &&
                        c.begin_messages != nullptr && c.wait != nullptr;
  if (!is_whole) fovea::invalid(where, "a function is NULL; expected all four");
  if (c.rank < 0 || c.rank >= c.world_size) {
    fovea::invalid(where, "rank is " + std::to_string(c.rank) + " and world_size " +
                              std::to_string(c.world_size) +
                              "; expected a rank from 0 up, below world_size");
  }
  return std::make_shared<CallbackCommunicator>(c);
}

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
    auto ranks = to_communicator(communicator, where + ": communicator");
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

}  // extern "C"
