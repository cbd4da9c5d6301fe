// The choices of a problem on a GPU: compiled, run, compared and timed.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "gpu.hpp"
#include "jobs.hpp"
#include "kernel_difference.hpp"
#include "tuner.hpp"

namespace fovea::tools {

/// One problem's tensors and kernels on a GPU.
class GpuTrack : public Track {
 public:
  GpuTrack(const Job& job, const Gpu& gpu, FlushedClock& clock, std::function<bool()> is_over);
  ~GpuTrack() override;

  const TunedProblem& tuned() const;

  std::string why_out(std::size_t contender) override;
  double seconds(std::size_t contender) override;
  bool is_over() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fovea::tools
