#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

struct Shuffle {
  std::uint32_t value, from_lane, result;
};

}  // namespace

std::uint32_t shuffle(std::uint32_t value, std::uint32_t from_lane, Instruction what) {
  Shuffle own{value, from_lane % machine().warp_lanes(), value};
  machine().meet(
      what.name, &own, what.site,
      [](Warp& warp, const Arguments& arguments) {
        for (const Thread* lane : warp.lanes) {
          if (lane == nullptr || lane->is_done) continue;
          auto& mine = *static_cast<Shuffle*>(arguments[lane->lane]);
          const bool is_there = (warp.alive >> mine.from_lane & 1U) != 0;
          // What an ended lane would give is not defined.
          mine.result = is_there ? static_cast<Shuffle*>(arguments[mine.from_lane])->value : ~0U;
        }
      },
      false);
  return own.result;
}

std::uint64_t ballot(bool is_true, Instruction what) {
  struct Vote {
    bool is_true;
    LaneMask result;
  } own{is_true, 0};
  machine().meet(
      what.name, &own, what.site,
      [](Warp& warp, const Arguments& arguments) {
        LaneMask result = 0;
        for (const Thread* lane : warp.lanes) {
          if (lane == nullptr || lane->is_done) continue;
          if (static_cast<Vote*>(arguments[lane->lane])->is_true)
            result |= LaneMask{1} << lane->lane;
        }
        for (const Thread* lane : warp.lanes) {
          if (lane == nullptr || lane->is_done) continue;
          static_cast<Vote*>(arguments[lane->lane])->result = result;
        }
      },
      false);
  return own.result;
}

bool elect(Instruction what) {
  require(90, what);
  bool is_elected = false;
  machine().meet(
      what.name, &is_elected, what.site,
      [](Warp& warp, const Arguments& arguments) {
        const bool is_there = (warp.alive >> warp.elected & 1U) != 0;
        *static_cast<bool*>(arguments[is_there ? warp.elected : warp.first_alive().lane]) = true;
      },
      true);
  return is_elected;
}

void sync_warp(Instruction what) {
  machine().meet(
      what.name, nullptr, what.site,
      [](Warp& warp, const Arguments&) {
        VectorClock all;
        for (const Thread* lane : warp.lanes) {
          if (lane != nullptr && !lane->is_done) all.join(lane->clock);
        }
        for (Thread* lane : warp.lanes) {
          if (lane == nullptr || lane->is_done) continue;
          lane->clock = all;
          machine().tick(*lane);
        }
      },
      false);
}

}  // namespace fovea::cuda::emulator
