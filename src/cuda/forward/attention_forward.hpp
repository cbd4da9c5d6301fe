// Attention forward on an NVIDIA GPU: what is chosen once, and a call. Read candidates.hpp for the choice and
// device/sm80/attention_forward.cuh for the kernel.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/attention.hpp"

#include "cuda/device/shared/combine.h"
#include "cuda/device/shared/numbers_of_codes.h"
#include "cuda/forward/candidates.hpp"
#include "cuda/params/captures.hpp"
#include "cuda/params/range_tables.hpp"
#include "cuda/plan_ladder.hpp"
#include "expr/print_cuda.hpp"
#include "problem/cache.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {

struct Choice;      // choices.hpp
struct TuningFile;  // tuning.hpp

/// What a call needs beyond its arguments, found once.
struct ForwardPlan : KernelPlan {
  AnyForwardSpec spec;
  std::size_t tables_at = 0;  // of the workspace: partial states lie before, range tables behind
  std::shared_ptr<const expr::CudaProgram> program;
  CaptureSlots capture_slots;
  RangeTables range_tables;
  bool clears_rows = false;  // packed rows behind the last sequence, by a kernel of its own
  Quantization quant{};      // of the problem: what kernels that round are compiled for
  std::optional<NumbersOfCodesSpec>
      numbers;  // of the kernel that makes them before the candidate's

  /// Packed queries over a cache, chunks of prompts beside single tokens: sequences of few queries have a plan of their
  /// own, which splits their keys. Null: there is one plan for all.
  struct FewQueries;
  std::shared_ptr<const FewQueries> few;

  class Unaligned;  // for calls whose tensors the candidate does not read; null where it reads all
  std::shared_ptr<Unaligned> unaligned;

  /// The table's choice, where it is compiled while this plan runs calls by a kernel that compiles sooner: staged.hpp.
  struct Later;
  std::shared_ptr<const Later> later;
};

struct ForwardPlan::FewQueries {
  ForwardProblem problem;  // of sequences of few queries
  ForwardProblem rest;     // of the others, and of rows of nobody
  ForwardPlan plan{};
  std::size_t workspace_at = 0;  // of plan, in that of the whole
};

/// All that is compiled for a plan: its kernel first, then those around it.
PlannedKernels planned_kernels(const ForwardPlan& plan);
/// Where it is split, but for kernels that fold their splits themselves.
bool has_combine(const ForwardPlan& plan);
/// Of what joins splits, where the plan has any.
CombineSpec combine_spec(const ForwardPlan& plan);

/// What calls of this plan load besides, where their tensors start elsewhere than at multiples of 16 bytes; empty for
/// kernels that read all.
PlannedKernels planned_unaligned_kernels(const ForwardPlan& plan);

/// Asks each candidate in order and loads what it chose into device.index. Throws Unsupported with every reason.
ForwardPlan plan_forward(const ForwardProblem& problem, Device device);

/// What plan_forward would choose, without compiling or loading it. Where nothing can run (no driver, no such device,
/// no compiler that knows it, refusals) candidate is empty and refused holds every reason.
ForwardPlan try_plan_forward(const ForwardProblem& problem, Device device);

/// The choice alone, for a device that need not be here: nothing is compiled or loaded. The table's, or what was
/// measured as faster.
ForwardPlan choose_forward(const ForwardProblem& problem, const DeviceTraits& device);
ForwardPlan choose_forward(const ForwardProblem& problem, const DeviceTraits& device,
                           const TuningFile& tuning);

/// As choose_forward, with a plan of its own for sequences of few queries where plan_forward makes one.
ForwardPlan choose_in_parts(const ForwardProblem& problem, const DeviceTraits& device);

/// A choice of choices_of for this problem and device, as it is.
ForwardPlan plan_choice(const ForwardProblem& problem, const DeviceTraits& device,
                        const Choice& choice);

/// Enqueues on `stream` (CUstream; null: the legacy default stream) and returns: no allocation, no synchronisation, no
/// compilation, but for the first call of a plan for Hopper with a tensor that does not start at a multiple of 16
/// bytes, which loads the kernel for such. Arguments have been validated and lie in the memory of the plan's device,
/// workspace too (plan.workspace_bytes, aligned to 256). With a cache, its k and v are read in the place of the
/// arguments' and its seqlens, page_table, batch_idx and left_padding are read by the kernel; problem.seqlen_kv bounds
/// them, cache->num_new keys stand behind them. Returns the candidate that took the call, of sequences of many queries
/// where the plan has parts: who asks afterwards may meet a later stage.
std::string_view attention_forward(const ForwardProblem& problem, const ForwardPlan& plan,
                                   const AttentionForward& args, void* workspace, void* stream,
                                   const GrownCache* cache = nullptr);

}  // namespace fovea::cuda
