// What the files of tensor memory share.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {

/// Reports what an instruction of this thread must not do.
void wrong(Fault fault, const Thread& who, const std::string& text, Instruction what,
           Site other = {});

/// The CTA that keeps the streams of the pair; without a pair itself.
Cta& tensor_leader(Cta& cta, int cta_group);
/// Of a pair the CTA of this parity; null where the cluster has none.
Cta* tensor_cta(const Cta& cta, int cta_group, std::uint32_t half);

/// Reports a second cta_group, and a pair where the cluster has none. False: do nothing.
bool is_right_group(Thread& self, int cta_group, Instruction what);

/// Is it in one allocation of the CTA? Reported where not.
bool is_allocated(const Cta& cta, TensorPlace place, std::uint32_t lanes, std::uint32_t columns,
                  const Thread& who, Instruction what);

/// What the thread's next access to tensor memory comes after.
VectorClock tensor_seen(Thread& self);
/// An access of the thread is complete: its own come after it, and others' after its next fence.
void tensor_complete(Thread& self, AgentId agent, std::uint32_t time);

/// fence::before_thread_sync, which tcgen05.commit implies.
void tensor_release(Thread& self);

}  // namespace fovea::cuda::emulator
