// The choices of a problem on a GPU: compiled, run, compared and timed.
#pragma once

#include <functional>
#include <memory>

#include "gpu.hpp"
#include "jobs.hpp"
#include "tuner.hpp"

namespace fovea::tools {

/// One problem's tensors and kernels on a GPU.
class GpuTrack : public Track {
 public:
  /// Of the call, or of its gradients.
  static std::unique_ptr<GpuTrack> make(const Job& job, bool is_of_gradients, const Gpu& gpu,
                                        FlushedClock& clock, std::function<bool()> is_over);

  const TunedProblem& tuned() const { return tuned_; }

  std::string why_out(std::size_t contender) final;
  double seconds(std::size_t contender) final;
  bool is_over() final { return is_over_(); }

 protected:
  GpuTrack(const Gpu& gpu, FlushedClock& clock, std::function<bool()> is_over)
      : gpu_(gpu), clock_(clock), is_over_(std::move(is_over)) {}

  const Gpu& gpu() const { return gpu_; }
  TunedProblem& tuned() { return tuned_; }

 private:
  /// Loads a contender, runs it over outputs that were poisoned, and copies them back. Throws Error.
  virtual void try_out(std::size_t contender) = 0;
  /// The table's kernel is compared with the oracle where that is quick, the others with it.
  virtual std::string why_wrong(std::size_t contender) = 0;
  virtual void enqueue(std::size_t contender) = 0;

  const Gpu& gpu_;
  FlushedClock& clock_;
  std::function<bool()> is_over_;
  TunedProblem tuned_;
};

}  // namespace fovea::tools
