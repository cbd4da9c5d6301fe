// How a call of attention_backward is cut: blocks of rows for the stages before and after the tiles, chunks of keys for
// the tiles themselves. Read row_panel.hpp next.
#pragma once

#include <cstdint>
#include <functional>

#include "cpu/backward/call.hpp"

namespace fovea::cpu {

/// Keys [key_begin, key_end) of one kv head, and all rows of its group.
struct BackwardItem {
  Sequence sequence;
  std::int64_t kv_head = 0;
  std::int64_t chunk = 0;
  std::int64_t key_begin = 0, key_end = 0;
};

/// Chunks of one sequence: a function of its own length, so that its bits are.
std::int64_t num_chunks(const BackwardCall& call, const Sequence& s);

/// The items of a task, in order.
void for_each_item(const BackwardCall& call, std::int64_t task,
                   const std::function<void(const BackwardItem&)>& visit);

/// All rows of a call, a few panels of one head at a time.
class RowBlocks {
 public:
  /// Writes memory.first_block.
  explicit RowBlocks(const BackwardCall& call);

  std::int64_t count() const { return first_block_[call_.f.num_sequences]; }
  RowRange operator[](std::int64_t index) const;

 private:
  std::int64_t block_rows() const;

  const BackwardCall& call_;
  std::int64_t* const first_block_;  // [num_sequences + 1]
};

}  // namespace fovea::cpu
