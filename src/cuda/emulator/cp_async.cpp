#include <fmt/format.h>

#include <cstring>

#include "cuda/emulator/copy_groups.hpp"
#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr std::uint32_t kMostBytes = 16;

struct Copy final : Operation {
  Actor actor;
  std::shared_ptr<const VectorClock> seen;
  Machine::Place from, to;  // no block in `from`: nothing is read
  Thread* thread = nullptr;

  void land(Machine& machine) override {
    std::byte bytes[kMostBytes] = {};
    if (from.block != nullptr) from.block->read(machine, actor, from.range, bytes);
    to.block->write(machine, actor, to.range, bytes);
    thread->unfenced.push_back(to.block, to.range);
  }
};

}  // namespace

void cp_async(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t src_bytes,
              Instruction what) {
  require(80, what);
  Thread& self = machine().thread();
  const Actor issuer = machine().actor(what.name, what.site);
  if (src_bytes > bytes) {
    machine().report(Fault::out_of_bounds, &self,
                     fmt::format("calls {} with {} source bytes; expected at most {}", what.name,
                                 src_bytes, bytes),
                     what.site);
    src_bytes = bytes;
  }
  auto copy = std::make_shared<Copy>();
  copy->to = machine().shared_place(to, bytes, bytes, what.name, issuer);
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  if (src_bytes != 0) {
    copy->from = machine().global_place(address, src_bytes, bytes, what.name, issuer);
  } else if (address % bytes != 0) {
    machine().report(
        Fault::misaligned, &self,
        fmt::format("{} from {:#x}, expected a multiple of {}", what.name, address, bytes),
        what.site);
  }
  if (copy->to.block == nullptr || (src_bytes != 0 && copy->from.block == nullptr)) return;
  copy->thread = &self;
  copy->seen = machine().snapshot(self);
  copy->actor = issuer;
  copy->actor.seen = copy->seen.get();
  add_to_open_group(self.copies, self, copy->actor);
  self.copies.open.push_back(copy);
  machine().issue(copy);
}

void copy_to_shared(std::uint32_t to, const void* from, std::uint32_t bytes, Instruction what) {
  machine().meet(
      what.name, &to, what.site,
      [=](Warp& warp, const Arguments& arguments) {
        if (bytes == 16) check_gfx950(warp, what);
        const std::uint32_t base = *static_cast<std::uint32_t*>(arguments[warp.first_alive().lane]);
        for (const Thread* lane : warp.lanes) {
          if (lane == nullptr || lane->is_done) continue;
          auto& mine = *static_cast<std::uint32_t*>(arguments[lane->lane]);
          if (mine != base) {
            machine().report(Fault::divergence, lane,
                             fmt::format("calls {} to shared address {:#x}, and lanes before it to "
                                         "{:#x}; one address holds for the warp",
                                         what.name, mine, base),
                             what.site);
          }
          mine = base + lane->lane * bytes;
        }
      },
      true);
  cp_async(to, from, bytes, from == nullptr ? 0 : bytes, what);
  cp_async_commit(what);  // each is waited for by itself
}

void cp_async_commit(Instruction what) {
  require(80, what);
  commit_group(machine().thread().copies);
}

void cp_async_wait(std::uint32_t pending, Instruction what) {
  require(80, what);
  Thread& self = machine().thread();
  wait_for_groups(self.copies, self, pending);
}

}  // namespace fovea::cuda::emulator
