// What becomes of a row's state in the end: out, lse and row_max. Read row_state.hpp for what a state is.
#pragma once

#include <cstdint>

#include "cpu/forward/call.hpp"
#include "cpu/forward/schedule.hpp"

namespace fovea::cpu {

class ForwardResults {
 public:
  explicit ForwardResults(const ForwardCall& call) : call_(call) {}

  /// Divides by the denominator and writes out, lse and row_max. `state` is overwritten.
  void finish_row(const ForwardItem& rows, std::int64_t lane, float* state) const;

  /// Packed rows behind the last sequence belong to nobody: out 0, lse -inf.
  void clear_padding_rows() const;

 private:
  struct Denominator;
  Denominator denominator(double row_max, double row_sum, std::int64_t q_head) const;
  void write_out(const Sequence& s, std::int64_t q_idx, std::int64_t q_head, const float* row,
                 float factor) const;
  void write_row_value(const TensorView& view, const Sequence& s, std::int64_t q_idx,
                       std::int64_t q_head, double value) const;

  const ForwardCall& call_;
};

}  // namespace fovea::cpu
