// Sums of dq: in dq itself where it is f32 and chunks run in turn, else in the workspace, one for all chunks or one for
// each of them; then merged in order of chunks. Read results.hpp next.
#pragma once

#include <cstdint>

#include "cpu/backward/call.hpp"
#include "cpu/backward/schedule.hpp"

namespace fovea::cpu {

class DqSums {
 public:
  explicit DqSums(const BackwardCall& call) : call_(call) {}

  /// Where a row's sums stand, `stride` apart.
  float* row(const Sequence& s, const RowOfHead& row, std::int64_t chunk) const;
  std::int64_t stride() const;

  /// Before the tiles, where chunks run in turn; where they run side by side, an item clears its own.
  void clear_row(const Sequence& s, const RowOfHead& row) const;
  void clear_item(const BackwardItem& item) const;

  /// Is there something to write after the tiles?
  bool is_apart() const { return call_.memory.dq_sums != nullptr; }
  void write(const RowRange& rows) const;

 private:
  const BackwardCall& call_;
};

}  // namespace fovea::cpu
