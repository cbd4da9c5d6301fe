// Who touched a few bytes last, and the question whether a new access races with it. Read block.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/emulator/vector_clock.hpp"

namespace fovea::cuda::emulator {

struct Thread;

using SiteId = std::uint16_t;

enum class AccessKind : std::uint8_t { read, write, atomic };

/// One agent at one moment, about to touch memory.
struct Actor {
  AgentId agent = 0;
  std::uint32_t time = 0;
  std::uint32_t wave = 0;  // CTAs of one wave run together and share agents
  SiteId site = 0;
  bool is_async = false;  // a stream of operations that overlap each other
  const VectorClock* seen = nullptr;
  // of tensor memory: `seen` and what no tcgen05 fence took over
  const VectorClock* known = nullptr;
  const Thread* thread = nullptr;  // who issued the instruction
  const char* what = "";           // the instruction
};

/// Somebody else's access. time 0: none.
struct Stamp {
  std::uint32_t time = 0;
  std::uint32_t wave = 0;
  AgentId agent = 0;
  SiteId site = 0;
};

inline Stamp stamp(const Actor& actor) { return {actor.time, actor.wave, actor.agent, actor.site}; }

/// The last access of each of several readers, by agent.
class Readers {
 public:
  bool is_empty() const { return stamps_.empty(); }
  std::span<const Stamp> stamps() const { return stamps_; }
  void note(const Stamp& reader);
  void clear();

 private:
  std::vector<Stamp> stamps_;
  std::size_t next_ = 0;  // who comes next where the lanes of a warp read in turn
};

/// Every reader since the last write is kept: any one of them may be the one that nobody waited for.
class ReaderLists {
 public:
  std::uint32_t make();
  Readers& at(std::uint32_t list) { return lists_[list - 1]; }
  void free(std::uint32_t list);

 private:
  std::vector<Readers> lists_;
  std::vector<std::uint32_t> free_;
};

struct History {
  Stamp write, read;
  std::uint32_t more_readers = 0;         // list of ReaderLists, 0: none
  std::uint32_t last_wave_of_others = 0;  // that read it, before the one of `read`; 0: none
  std::uint32_t fence_time = 0;           // of the fence that published the last write, 0: none
  AgentId fence_agent = 0;
  bool write_is_atomic = false;
};

}  // namespace fovea::cuda::emulator
