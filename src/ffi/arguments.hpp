// The C argument structs as the C++ ones. Nothing is decided here: fields are converted one by one, validation is the plan's.
#pragma once

#include <memory>
#include <string>

#include "fovea/attention.hpp"
#include "fovea/fovea.h"

struct fovea_runtime {
  fovea::Runtime runtime;
};

namespace fovea::ffi {

/// An Executor made of C function pointers.
class CallbackExecutor final : public Executor {
 public:
  explicit CallbackExecutor(const fovea_executor& callbacks) : callbacks_(callbacks) {}
  int concurrency() const override { return callbacks_.concurrency(callbacks_.context); }
  void run(std::int64_t count, const Task& task) override {
    callbacks_.run(callbacks_.context, count, task.body, task.context);
  }

 private:
  fovea_executor callbacks_;
};

/// A C++ call with what it borrows.
struct Call {
  AttentionForward args;
  std::unique_ptr<CallbackExecutor> executor;  // args.executor, where the caller brought its own
  Runtime* runtime = nullptr;                  // the caller's, or null
};

/// Throws InvalidArgument, each message starting with `where`.
Call to_call(const fovea_attention_forward_args* args, const std::string& where);

/// The problem that a call poses, with the bounds of `options` (null: none).
Problem to_problem(const Call& call, const fovea_plan_options* options, const std::string& where);

}  // namespace fovea::ffi
