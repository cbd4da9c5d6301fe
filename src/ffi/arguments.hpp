// The C argument structs as the C++ ones. Nothing is decided here: fields are converted one by one, validation is the
// plan's.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/fovea.h"

#include "ffi/programs.hpp"
#include "ffi/tensor.hpp"

namespace fovea::ffi {

/// The allocators that a runtime was ever given: calls under way give back to theirs.
class KeptAllocators {
 public:
  fovea_allocator& keep(const fovea_allocator& allocator) {
    const std::lock_guard lock(mutex_);
    return allocators_.emplace_back(allocator);
  }

 private:
  std::mutex mutex_;
  std::deque<fovea_allocator> allocators_;
};

}  // namespace fovea::ffi

struct fovea_runtime {
  fovea::Runtime runtime;
  fovea::ffi::KeptAllocators allocators{};
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

/// Who runs a call.
struct Threads {
  Executor* executor = nullptr;                 // null: the process's own
  Runtime* runtime = nullptr;                   // the caller's, or null
  std::unique_ptr<CallbackExecutor> callbacks;  // behind executor, where the caller brought its own
};
/// Throws InvalidArgument, as all conversions here; `runtime` and `executor` may be null.
Threads to_threads(fovea_runtime* runtime, const fovea_executor* executor,
                   const std::string& where);

inline Runtime& runtime_of(const Threads& threads) {
  return threads.runtime != nullptr ? *threads.runtime : Runtime::process_default();
}

/// A C++ call with what it borrows.
struct Call {
  AttentionForward args;
  std::shared_ptr<const Programs::Slots> slots;  // of args.score
  Threads threads;
};

/// Throws InvalidArgument, each message starting with `where`. The formulas of a call of the same structure before come
/// from `cache`, else from that of its program handles, if it has any.
Call to_call(const fovea_attention_forward_args* args, const std::string& where,
             ProgramCache* cache = nullptr);

/// What a forward call says of visibility: of q and k shapes alone are read.
struct MaskCall {
  TensorView q, k;
  TensorView cu_seqlens_q, cu_seqlens_kv;
  MaskMod mask;
};
/// Refuses what to_call does among these fields, and q and k whose ranks are not those of a call.
MaskCall to_mask_call(const fovea_attention_forward_args* args, const std::string& where);

/// Tensors by the names of a C caller ("bias", "alibi", what score_mod reads) as tensors by the slots of
/// call.args.score. Views are writable where `access` says so.
std::vector<CapturedTensor> to_captured(const Call& call, const fovea_named_tensor* named,
                                        std::size_t count, Access access, const std::string& where);

/// The problem that a call poses, with the bounds of `options` (null: none).
Problem to_problem(const Call& call, const fovea_plan_options* options, const std::string& where);

}  // namespace fovea::ffi
