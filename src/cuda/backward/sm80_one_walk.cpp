#include "cuda/backward/sm80_one_walk.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "core/ceil_div.hpp"
#include "cuda/backward/sm80.hpp"
#include "cuda/backward/turns.hpp"

namespace fovea::cuda {
namespace {

/// What clear_sums writes at a time.
constexpr std::int64_t kVectorBytes = 16;

/// Enumerated in order of preference; the first that has room is taken.
struct Tile {
  std::int32_t owned, walked, stages, column_warps;
};
constexpr std::int32_t kWarps = 8;
// 32 rows a warp: operands are read half as often as by 16. Sums take half of the registers, at head_dim 64 a quarter,
// and scores with their gradients as many as queries leave.
constexpr std::array kSlimTiles = {Tile{128, 128, 2, 2}, Tile{128, 64, 2, 2}, Tile{128, 64, 1, 2}};
constexpr std::array kTiles = {Tile{128, 64, 2, 2}, Tile{128, 64, 1, 2}};
// Programs, the generator of dropout and packed sequences need registers beside the sums.
constexpr std::array kLeanSlimTiles = {Tile{128, 64, 2, 2}, Tile{128, 64, 1, 2}};
constexpr std::array kLeanTiles = {Tile{128, 32, 2, 2}, Tile{128, 32, 1, 2}};
// Heads above 128: sums of 64 keys. Four warps side by side where columns are as many pairs of blocks, else two.
constexpr std::array kWideTiles = {Tile{64, 64, 2, 4}, Tile{64, 64, 1, 4}};
constexpr std::array kUnevenTiles = {Tile{64, 64, 2, 2}, Tile{64, 64, 1, 2}};

/// A word of progress stands for 128 keys, which is what heads up to here own.
constexpr std::int64_t kMostHeadDimOfTurns = 128;

std::int64_t widest_head_dim(const ForwardProblem& f) {
  return std::max(f.head_dim_qk, f.head_dim_v);
}

std::span<const Tile> tiles_of(const Sm80BackwardSpec& spec) {
  const bool is_lean = spec.has_origins || spec.has_dropout || spec.is_varlen;
  const std::int32_t widest = std::max(spec.head_dim_qk, spec.head_dim_v);
  if (widest <= 64) return is_lean ? std::span<const Tile>(kLeanSlimTiles) : kSlimTiles;
  if (widest > 128)
    return spec.head_dim_qk % 64 == 0 && spec.head_dim_v % 64 == 0
               ? std::span<const Tile>(kWideTiles)
               : kUnevenTiles;
  // Warps share the dq of 32 queries by fours alone, which takes columns in 64s.
  const bool has_lean = widest > 96 && spec.head_dim_qk % 64 == 0;
  return is_lean && has_lean ? std::span<const Tile>(kLeanTiles) : kTiles;
}

std::size_t shared_bytes(const Sm80BackwardSpec& spec) {
  return static_cast<std::size_t>(sm80_backward_shared_bytes(spec));
}

bool fits(const Sm80BackwardSpec& spec, const DeviceTraits& device) {
  return shared_bytes(spec) <= static_cast<std::size_t>(device.shared_bytes_per_cta);
}

Sm80BackwardSpec spec_without_tile(const GradientProblem& g) {
  Sm80BackwardSpec spec{{common_spec(g)}};
  set_gradients(Gradients::dk_and_dv, spec);
  spec.has_origins = has_program(g);
  spec.num_warps = kWarps;
  spec.asks_redo = asks_redo(g);
  spec.takes_turns = g.forward.problem.is_deterministic;
  return spec;
}

Sm80BackwardSpec with_tile(Sm80BackwardSpec spec, const Tile& tile, const GradientProblem& g) {
  spec.tile_owned = tile.owned;
  spec.tile_walked = tile.walked;
  spec.stages = tile.stages;
  spec.column_warps = tile.column_warps;
  spec.is_staggered = is_staggered(g.forward, spec.tile_owned, spec.tile_walked);
  return spec;
}

/// With the last of its tiles where none has room.
Sm80BackwardSpec spec_of(const GradientProblem& g, const DeviceTraits& device) {
  Sm80BackwardSpec spec = spec_without_tile(g);
  for (const Tile& tile : tiles_of(spec)) {
    spec = with_tile(spec, tile, g);
    if (fits(spec, device)) break;
  }
  return spec;
}

std::vector<BackwardStep> steps_of(const Sm80BackwardSpec& spec, const GradientProblem& g,
                                   const DeviceTraits& device) {
  BackwardStep clear{KernelRole::prepare, spec};
  clear.header = "sm80/backward/clear_sums.cuh";
  clear.entry = "sm80::clear_sums";
  clear.params = "ClearSumsParams";
  BackwardStep finish{KernelRole::convert, spec};
  finish.header = "sm80/backward/finish_queries.cuh";
  finish.entry = "sm80::finish_queries";
  std::vector<BackwardStep> steps = {{KernelRole::main, spec, shared_bytes(spec)}, clear, finish};
  if (spec.asks_redo) {
    const std::vector<BackwardStep> again = Sm80Backward::choose_redo(g, device);
    steps.insert(steps.end(), again.begin(), again.end());
  }
  return steps;
}

const Sm80BackwardSpec& spec_of(const BackwardPlan& plan) {
  return plan.steps.front().spec.as<Sm80BackwardSpec>();
}

/// A float for each element of dq, with the padding of statistics.
std::int64_t sums_bytes(const GradientProblem& g, const Sm80BackwardSpec& spec) {
  return 4 * static_cast<std::int64_t>(statistics_floats(g)) * spec.head_dim_qk;
}

/// Progress; behind it, where tiles may be computed again, the words that stand for them.
std::int64_t num_words(const GradientProblem& g, const Sm80BackwardSpec& spec) {
  return (spec.takes_turns ? num_key_words(g) : 0) + (spec.asks_redo ? num_redo_words(g) : 0);
}

/// Sums, of walks that have gone round, of others; words.
struct Scratch {
  std::int64_t round_sums = 0, sums, words, bytes;

  Scratch(const GradientProblem& g, const Sm80BackwardSpec& spec)
      : sums(spec.is_staggered ? sums_bytes(g, spec) : 0),
        words(sums + sums_bytes(g, spec)),
        bytes(words + ceil_div(4 * num_words(g, spec), kVectorBytes) * kVectorBytes) {}

  /// Behind it all is 0 at the start: first parts of staggered sums are stored, not added.
  std::int64_t zeroed_from(const Sm80BackwardSpec& spec) const {
    return spec.is_staggered ? words : round_sums;
  }
};

/// Of tiles of queries.
std::uint32_t num_finish_ctas(const GradientProblem& g, const Sm80BackwardSpec& walk,
                              const AttentionBackward& args) {
  Sm80BackwardSpec queries = walk;
  queries.owns_keys = false;
  queries.tile_owned = walk.tile_walked;
  return static_cast<std::uint32_t>(num_owned_tiles(queries, g, args));
}

}  // namespace

std::optional<Refusal> Sm80OneWalk::refuses(const GradientProblem& g, const DeviceTraits& device) {
  if (auto refusal = refuses_before(kFirstOfSm80, device)) return refusal;
  if (auto refusal = refuses_16_bit(g, device)) return refusal;
  const ForwardProblem& f = g.forward;
  if (auto refusal = refuses_head_dims(f, kMaxTensorCoreHeadDim)) return refusal;
  if (f.problem.is_deterministic && widest_head_dim(f) > kMostHeadDimOfTurns)
    return Refusal{fmt::format(
        "head dims are {} and {}; above {} dq is summed in any order, and is_deterministic is set",
        f.head_dim_qk, f.head_dim_v, kMostHeadDimOfTurns)};
  if (f.problem.is_deterministic && f.seqlen_q * f.group >= kMostPositions)
    return Refusal{
        fmt::format("{} rows share a kv head; expected fewer than 2^28", f.seqlen_q * f.group)};
  if (!g.wants_dq() || !g.wants_dk() || !g.wants_dv())
    return Refusal{"one of dq, dk and dv is not wanted; walks for the others alone are less work"};
  const Sm80BackwardSpec spec = spec_of(g, device);
  if (!fits(spec, device))
    return Refusal{fmt::format("a CTA takes {} bytes of shared memory; the device has {}",
                               shared_bytes(spec), device.shared_bytes_per_cta)};
  return std::nullopt;
}

std::vector<BackwardStep> Sm80OneWalk::choose(const GradientProblem& g,
                                              const DeviceTraits& device) {
  if (!g.wants_dq() && !g.wants_dk() && !g.wants_dv()) return {};
  return steps_of(spec_of(g, device), g, device);
}

std::vector<std::vector<BackwardStep>> Sm80OneWalk::alternatives(const GradientProblem& g,
                                                                 const DeviceTraits& device) {
  std::vector<std::vector<BackwardStep>> all;
  const Sm80BackwardSpec spec = spec_without_tile(g);
  for (const Tile& tile : tiles_of(spec)) {
    const Sm80BackwardSpec other = with_tile(spec, tile, g);
    if (fits(other, device)) all.push_back(steps_of(other, g, device));
  }
  return all;
}

std::size_t Sm80OneWalk::scratch_bytes(const std::vector<BackwardStep>& steps,
                                       const GradientProblem& g) {
  if (steps.empty()) return 0;
  return static_cast<std::size_t>(Scratch(g, steps.front().spec.as<Sm80BackwardSpec>()).bytes);
}

Sm80OneWalkLaunch Sm80OneWalk::prepare(const GradientProblem& g, const BackwardPlan& plan,
                                       const AttentionBackward& args, void* workspace) {
  Sm80OneWalkLaunch launch;
  launch.common = backward_launch(g, plan, args, workspace);
  if (plan.steps.empty()) return launch;
  const Sm80BackwardSpec& spec = spec_of(plan);
  const Scratch scratch(g, spec);
  std::byte* const start = static_cast<std::byte*>(workspace) + plan.memory.scratch_at;
  Sm80OneWalkParams& p = launch.params;
  p.common = launch.common.params;
  if (spec.takes_turns) {
    p.common.kv_pairs_per_section =
        spec.is_staggered
            ? 1
            : pairs_of_section(p.common.kv_pairs_per_section, true, hides_keys(g.forward));
  }
  p.dq_sums = reinterpret_cast<float*>(start + scratch.sums);
  if (spec.is_staggered) p.dq_round_sums = reinterpret_cast<float*>(start + scratch.round_sums);
  auto* const words = reinterpret_cast<std::int32_t*>(start + scratch.words);
  if (spec.takes_turns) p.progress = words;
  if (spec.asks_redo) place_redo(g, words + (spec.takes_turns ? num_key_words(g) : 0), p.common);
  const std::int64_t zeroed_from = scratch.zeroed_from(spec);
  launch.clear = {.to = start + zeroed_from, .count = (scratch.bytes - zeroed_from) / kVectorBytes};
  launch.num_clear_ctas = static_cast<std::uint32_t>(
      ceil_div(launch.clear.count, std::int64_t{32} * spec.num_warps * kClearedVectors));
  launch.num_ctas = launch.common.num_ctas[0];
  launch.num_finish_ctas = num_finish_ctas(g, spec, args);
  launch.prepare_redo(plan);
  return launch;
}

void Sm80OneWalkLaunch::prepare_redo(const BackwardPlan& plan) {
  redo = redo_launches(plan, params.common, common);
}

KernelLaunches Sm80OneWalkLaunch::launches(const BackwardPlan& plan) const {
  KernelLaunches all;
  common.add_before(all);
  const auto add = [&](const BackwardStep& step, const auto& of, std::uint32_t num) {
    all.add(step_launch(step, of, num));
  };
  if (!plan.steps.empty()) {
    add(plan.steps[1], clear, num_clear_ctas);
    add(plan.steps[0], params, num_ctas);
    add(plan.steps[2], params, num_finish_ctas);
  }
  for (std::size_t i = 0; i < plan.steps.size(); ++i)
    if (plan.steps[i].is_redo()) add(plan.steps[i], redo[i].params, redo[i].num_ctas);
  common.add_after(all);
  return all;
}

}  // namespace fovea::cuda
