// What an agent (a thread, or a stream of asynchronous operations) knows to have happened: one counter per agent.
// Two accesses race when neither agent knew of the other's (Flanagan & Freund 2009, FastTrack). Read history.hpp next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fovea::cuda::emulator {

using AgentId = std::uint16_t;

class VectorClock {
 public:
  std::uint32_t of(AgentId agent) const { return agent < times_.size() ? times_[agent] : 0; }

  void set(AgentId agent, std::uint32_t time) {
    if (agent >= times_.size()) times_.resize(agent + 1U);
    times_[agent] = time;
  }

  void raise(AgentId agent, std::uint32_t time) { set(agent, std::max(of(agent), time)); }

  void join(const VectorClock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
    for (std::size_t i = 0; i < other.times_.size(); ++i) {
      times_[i] = std::max(times_[i], other.times_[i]);
    }
  }

  void clear() { std::fill(times_.begin(), times_.end(), 0); }

 private:
  std::vector<std::uint32_t> times_;
};

}  // namespace fovea::cuda::emulator
