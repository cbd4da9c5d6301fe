// The states of rows whose keys are cut into splits: kept until all splits are there, and merged in their order. Side
// by side or in turn, the order and so the bits are the same. Read results.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/forward/call.hpp"
#include "cpu/forward/results.hpp"
#include "cpu/forward/schedule.hpp"
#include "cpu/forward/workspace.hpp"

namespace fovea::cpu {

class SplitStates {
 public:
  /// partials: see ForwardMemory; null where splits run in turn.
  SplitStates(const ForwardCall& call, const ForwardSchedule& schedule, float* partials)
      : call_(call), schedule_(schedule), partials_(partials) {}

  /// Side by side: the state of a row of one split, which rows.tile_begin tells.
  void keep(const ForwardItem& rows, std::int64_t lane, const float* state) const;
  /// Side by side, when all splits are kept: merges and finishes the rows of one head of one sequence.
  void merge(std::int64_t sequence, std::int64_t kv_head, const ForwardResults& results) const;

  /// In turn: adds to the item's states in the worker's scratch.
  void add(const ForwardItem& item, std::int64_t split, const ForwardItem& rows, std::int64_t lane,
           const float* state, const ForwardScratch& scratch) const;
  /// In turn, when all splits are added: finishes the rows of the item.
  void finish(const ForwardItem& item, const ForwardScratch& scratch,
              const ForwardResults& results) const;

 private:
  std::size_t state_floats() const;
  float* partial(const ForwardItem& rows, std::int64_t lane) const;
  float* merged(const ForwardItem& item, std::int64_t kv_head, std::int64_t lane,
                const ForwardScratch& scratch) const;

  const ForwardCall& call_;
  const ForwardSchedule& schedule_;
  float* const partials_;
};

}  // namespace fovea::cpu
