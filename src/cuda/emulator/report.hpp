// What a launch found. A finding names its kind, who did it, at which line; the report replays by its options.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/emulator/site.hpp"

namespace fovea::cuda::emulator {

enum class Fault : std::uint8_t {
  out_of_bounds,
  misaligned,
  uninitialised,
  race,
  non_coherent_read,
  divergence,
  barrier_count,
  deadlock,
  copy_not_waited,
  mbarrier_misuse,
  transaction_bytes,
  parity_aliasing,
  proxy_fence_missing,
  accumulator_in_flight,
  operand_overwritten,
  wgmma_fence_missing,
  wgmma_not_committed,
  wgmma_not_waited,
  descriptor,
  tensor_map,
  register_budget,
  cluster_lifetime,
  tensor_allocation,
  tensor_address,
  tensor_issue,
  tensor_fence_missing,
  tensor_load_in_flight,
  tensor_not_awaited,
  instruction_descriptor,
  scale_factors,
  architecture,
  trap,
  livelock,
};

std::string_view name(Fault fault);

struct Finding {
  Fault fault{};
  std::string text;  // "race: cta 0 thread 37 ...", whole
  Site site;         // of the later of two instructions
  Site other;        // of the earlier one, where two are at fault
  int count = 0;     // how often it was seen in this launch
};

/// When asynchronous work lands between its issue and its wait.
enum class Landing : std::uint8_t {
  seeded,    // any moment, by the seed
  earliest,  // at the issue
  latest,    // when a wait asks for it, or nothing else can run
};

std::string_view name(Landing landing);

struct Report {
  std::uint64_t seed = 0;
  Landing landing = Landing::seeded;
  std::vector<Finding> findings{};
  std::uint64_t switches = 0;  // of fibers

  bool is_clean() const { return findings.empty(); }
  bool has(Fault fault) const;

  /// One line a finding, then how to replay the run; empty when clean.
  std::string text() const;
};

}  // namespace fovea::cuda::emulator
