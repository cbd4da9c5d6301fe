#include "cpu/rotary.hpp"

#include <cstdint>

#include "cpu/operands.hpp"
#include "cpu/tasks.hpp"
#include "cpu/turn_rows.hpp"
#include "problem/rotary.hpp"

namespace fovea::cpu {
namespace {

class RotaryRun {
 public:
  explicit RotaryRun(const ApplyRotary& args)
      : args_(args),
        angles_{.cos = args.cos, .sin = args.sin, .is_interleaved = args.is_interleaved},
        rows_(sequence_rows(args.x, args.cu_seqlens)),
        batch_(rotary_batch(args)),
        x_(args.x),
        out_(args.out),
        num_heads_(args.x.size(args.x.rank() - 2)),
        head_dim_(args.x.size(args.x.rank() - 1)) {}

  void run(Executor& executor) const {
    const std::int64_t of_sequences = rows_.total(batch_);
    const std::int64_t all = rows_.is_packed() ? args_.x.size(0) : of_sequences;
    run_tasks(executor, all, [&](int /*worker*/, std::int64_t index) {
      if (index < of_sequences) {
        turn(rows_.token(index, batch_));
      } else {
        copy_row(index);
      }
    });
  }

 private:
  void turn(const SequenceRows::Token& token) const {
    Turn by(angles_, rotary_position(args_, rows_, token));
    if (args_.is_conjugate) by.reverse();
    const std::int64_t batch = rows_.is_packed() ? 0 : token.sequence;
    const std::int64_t row = rows_.begin(token.sequence) + token.index;
    for (std::int64_t head = 0; head < num_heads_; ++head)
      turn_row(by, head_row(x_, batch, row, head), head_row(out_, batch, row, head), head_dim_);
  }

  /// Nobody's.
  void copy_row(std::int64_t row) const {
    for (std::int64_t head = 0; head < num_heads_; ++head)
      copy(head_row(x_, 0, row, head), head_row(out_, 0, row, head), 0, head_dim_);
  }

  const ApplyRotary& args_;
  const Rotary angles_;
  const SequenceRows rows_;
  const std::int64_t batch_;
  const Rows x_, out_;
  const std::int64_t num_heads_, head_dim_;
};

}  // namespace

void rotary(const ApplyRotary& args, Executor& executor) { RotaryRun(args).run(executor); }

}  // namespace fovea::cpu
