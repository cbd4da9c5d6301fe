#include <fmt/format.h>

#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

bool is_count(std::uint32_t registers) {
  return registers >= 24 && registers <= 256 && registers % 8 == 0;
}

void budget(const Thread& who, const std::string& text, Site site) {
  machine().report(Fault::register_budget, &who, text, site);
}

}  // namespace

void setmaxnreg(std::uint32_t registers, bool is_inc, Instruction what) {
  require(90, what);
  Thread& self = machine().thread();
  Warp& warp = *self.warp;
  const std::uint32_t old = warp.registers;
  // Everybody looks before the last one changes it.
  machine().meet(
      what.name, nullptr, what.site,
      [&](Warp& all, const Arguments&) {
        const bool is_right_way = is_inc ? registers >= old : registers <= old;
        if (!is_count(registers) || !is_right_way) {
          budget(
              self,
              fmt::format("calls {} {} with {} registers; expected a multiple of 8 from 24 to "
                          "256, {}",
                          what.name, registers, old, is_inc ? "at least those" : "at most those"),
              what.site);
          return;
        }
        if (is_inc) return;
        all.cta->free_registers += (old - registers) * kWarpLanes;
        all.registers = registers;
        machine().wake(&all.cta->free_registers);
      },
      true);
  if (!is_inc || registers <= old || !is_count(registers)) return;
  std::uint32_t& free = warp.cta->free_registers;
  const std::uint32_t needed = (registers - old) * kWarpLanes;
  const Wait wait{
      .what = what.name,
      .object = &free,
      .details =
          [&] { return fmt::format("needs {} registers for its warp, {} are free", needed, free); },
      .site = what.site};
  machine().wait_until(wait, [&] {
    if (warp.registers >= registers) return true;
    if (free < needed) return false;
    free -= needed;
    warp.registers = registers;
    return true;
  });
}

void check_registers_at_exit(Machine& machine, const Cta& cta) {
  for (std::size_t first = 0; first + 4 <= cta.warps.size(); first += 4) {
    for (std::size_t i = first + 1; i < first + 4; ++i) {
      if (cta.warps[i]->registers == cta.warps[first]->registers) continue;
      machine.report(Fault::register_budget, cta.warps[i]->lanes[0],
                     fmt::format("has {} registers by setmaxnreg, the first warp of its warpgroup "
                                 "{}: all four run it together",
                                 cta.warps[i]->registers, cta.warps[first]->registers),
                     {});
    }
  }
}

}  // namespace fovea::cuda::emulator
