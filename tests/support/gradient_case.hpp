// One problem of gradients for tests: a Case and what its backward and forward mode take and write.
// Read gradient_compare.hpp next.
#pragma once

#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"

#include "support/case.hpp"

namespace fovea::testing {

struct GradientCase {
  Case forward{};
  std::optional<Dtype> dout_dtype{};      // default: dtype of out
  std::optional<Dtype> gradient_dtype{};  // of dq, dk, dv and dcaptured; default: dtype of q, f32
  std::optional<Dtype> tangent_dtype{};   // of those of q, k and v; default: dtype of q
  bool moves_q = true, moves_k = true, moves_v = true;  // in forward mode
  bool has_dlse = true;
  bool wants_captured = true;
  /// A dense dout holds NaN in one element of some rows, and so does q of one that sees something.
  bool has_nan_rows = false;
  /// This key of a dense k holds NaN in one element. No row sees it.
  std::optional<std::int64_t> nan_key{};

  std::string describe() const;
};

inline void PrintTo(const GradientCase& problem, std::ostream* stream) {
  *stream << problem.describe();
}

struct NamedTensor {
  std::string name;
  GuardedTensor tensor;
};

/// The buffers of gradients beside those of the case, each in guards; outputs start as NaN. dout lies
/// as the case's inputs do, dq, dk and dv as its outputs.
///
/// What no gradient may depend on is poison: q, dout and dlse of rows that see nothing or lie behind
/// the last sequence (where no other row shares their memory), and tangents of keys and values that
/// nobody sees.
class GradientMemory {
 public:
  explicit GradientMemory(const GradientCase& problem);

  AttentionBackward args(CpuTarget target = CpuTarget::automatic);
  /// A direction in q, k, v, sinks and captured tensors; tangents are of the dtype of q, or f32.
  AttentionJvp jvp_args(CpuTarget target = CpuTarget::automatic);

  /// After forward: makes `out` NaN in the rows that see nothing, and seals out and lse as inputs.
  void seal_forward();
  void poison_outputs();
  /// As CaseMemory::damage, of every input and output of both.
  std::string damage() const;

  CaseMemory forward;
  GuardedTensor dout, dlse;
  GuardedTensor dq, dk, dv, dsinks;
  std::vector<NamedTensor> dcaptured;
  GuardedTensor q_tangent, k_tangent, v_tangent, sinks_tangent;
  std::vector<NamedTensor> captured_tangents;
  GuardedTensor out_tangent, lse_tangent;

 private:
  void make_captured();
  void fill_inputs();
  void set_nan_rows();
  void set_nan_key(std::int64_t key);
  void poison_blind_rows();
  void poison_hidden_tangents();

  GradientCase problem_;
  std::vector<RowOfHead> blind_rows_;  // of q and out: they see nothing
};

}  // namespace fovea::testing
