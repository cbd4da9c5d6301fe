#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {

void fence_proxy_async(bool is_shared, bool is_global, Instruction what) {
  Thread& self = machine().thread();
  machine().tick(self);
  const Actor fence = machine().actor(what.name, what.site);
  for (const UnfencedWrites::Write& write : self.unfenced.take()) {
    const bool is_of_shared = write.block->is_shared();
    if (is_of_shared ? !is_shared : !is_global) {
      self.unfenced.push_back(write.block, write.range);
      continue;
    }
    write.block->publish(self.agent, fence, write.range);
    if (self.copies.agent != 0) write.block->publish(self.copies.agent, fence, write.range);
  }
  if (is_shared) publish_mbarriers(machine(), self);
  machine().tick(self);
}

void fence_mbarrier_init(Instruction what) {
  Thread& self = machine().thread();
  machine().tick(self);
  machine().actor(what.name, what.site);
  publish_mbarriers(machine(), self);
  machine().tick(self);
}

}  // namespace fovea::cuda::emulator
