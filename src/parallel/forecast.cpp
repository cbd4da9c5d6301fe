// What each scheme would cost, by one model of time: a rank computes at one rate and receives at another, and what a
// scheme overlaps costs the longer of the two.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/check.hpp"
#include "parallel/scheme.hpp"
#include "parallel/shard_plan.hpp"
#include "parallel/words.hpp"
#include "plan/json.hpp"
#include "problem/forward.hpp"

namespace fovea {
namespace {

using parallel::HeadDivision;
using parallel::Shape;

constexpr std::string_view kWhere = "forecast_context_parallel";

// Backward has five products where forward has two.
constexpr double kBackwardFlops = 2.5;

struct Pass {
  double compute = 0, exchange = 0;  // seconds of the rank that has most
};

/// Seconds of a pass of `steps` equal parts of computation, each beside the exchange for the next one; `first` of the
/// exchange's parts goes before.
double overlapped(const Pass& pass, double steps, bool waits_for_first) {
  const double compute = pass.compute / steps;
  const double exchanges = waits_for_first ? steps : std::max(steps - 1, 1.0);
  const double exchange = pass.exchange / exchanges;
  return (waits_for_first ? exchange : 0) + (steps - 1) * std::max(compute, exchange) + compute;
}

double seconds(const Pass& pass, const ShardPlan& plan, const HeadDivision& heads) {
  switch (plan.scheme()) {
    case ParallelScheme::ring:
      return overlapped(pass, plan.world_size(), false);
    case ParallelScheme::head_group_all_gather:
      return overlapped(pass, static_cast<double>(heads.head_parts), true);
    // The heads' exchange is the first step's.
    case ParallelScheme::hybrid:
      return overlapped(pass, static_cast<double>(plan.world_size()) / heads.head_ranks, true);
    case ParallelScheme::all_gather:
    case ParallelScheme::ulysses:
    case ParallelScheme::needed_only:
      break;
  }
  return pass.compute + pass.exchange;
}

SchemeForecast forecast(const ShardPlan& plan, const Shape& shape, const HeadDivision& heads,
                        const ShardOptions& options, const RankSpeed& speed) {
  SchemeForecast result{.scheme = plan.scheme(), .balance = plan.balance()};
  std::int64_t tiles = 0;
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    const RankLoad load = plan.load(rank);
    tiles = std::max(tiles, load.tiles.full + load.tiles.partial);
    result.forward_bytes = std::max(result.forward_bytes, load.forward_bytes);
    result.backward_bytes = std::max(result.backward_bytes, load.backward_bytes);
    result.kv_bytes = std::max(result.kv_bytes, load.kv_bytes);
  }
  const double flops = 2.0 * static_cast<double>(shape.head_dim_qk + shape.head_dim_v) *
                       static_cast<double>(options.tile_q) * static_cast<double>(options.tile_kv) *
                       static_cast<double>(tiles);
  const auto milliseconds = [&](double work, std::int64_t bytes) {
    const Pass pass{work / speed.flops, static_cast<double>(bytes) / speed.bytes};
    return 1e3 * seconds(pass, plan, heads);
  };
  result.forward_ms = milliseconds(flops, result.forward_bytes);
  result.backward_ms = milliseconds(kBackwardFlops * flops, result.backward_bytes);
  return result;
}

void check_speed(std::string_view name, double value) {
  if (value > 0 && std::isfinite(value)) return;
  invalid(std::string(kWhere), fmt::format("{} is {}; expected above 0", name, value));
}

}  // namespace

std::vector<SchemeForecast> forecast_context_parallel(const Problem& problem, int world_size,
                                                      const ShardOptions& options,
                                                      const RankSpeed& speed) {
  check_speed("flops", speed.flops);
  check_speed("bytes", speed.bytes);
  // Refuses all that no scheme can serve.
  const ShardPlan gathered =
      context_parallel_plan(problem, world_size, ParallelScheme::all_gather, options);
  const Shape shape = parallel::shape_of(validate(problem, kWhere));
  std::vector<SchemeForecast> result;
  for (int i = 0; i < kNumParallelSchemes; ++i) {
    const auto scheme = static_cast<ParallelScheme>(i);
    const HeadDivision heads = parallel::divide_heads(shape, world_size, scheme, options);
    if (!heads.refusal.empty()) {
      result.push_back({.scheme = scheme, .refusal = heads.refusal});
      continue;
    }
    const ShardPlan plan = scheme == ParallelScheme::all_gather
                               ? gathered
                               : context_parallel_plan(problem, world_size, scheme, options);
    result.push_back(forecast(plan, shape, heads, options, speed));
  }
  return result;
}

std::string print_forecasts(std::span<const SchemeForecast> forecasts) {
  std::string text =
      fmt::format("{:<22} {:>8} {:>12} {:>12} {:>12} {:>11} {:>11}\n", "predicted", "balance",
                  "received", "in backward", "keys, values", "forward", "backward");
  for (const SchemeForecast& f : forecasts) {
    if (!f.refusal.empty()) {
      text += fmt::format("{:<22} no: {}\n", name(f.scheme), f.refusal);
      continue;
    }
    text += fmt::format("{:<22} {:>8.3f} {:>12} {:>12} {:>12} {:>8.3f} ms {:>8.3f} ms\n",
                        name(f.scheme), f.balance, parallel::bytes_in_words(f.forward_bytes),
                        parallel::bytes_in_words(f.backward_bytes),
                        parallel::bytes_in_words(f.kv_bytes), f.forward_ms, f.backward_ms);
  }
  return text;
}

std::string json_forecasts(std::span<const SchemeForecast> forecasts) {
  return json_list(forecasts, [](const SchemeForecast& f) {
    JsonObject json;
    json.text("scheme", name(f.scheme));
    if (!f.refusal.empty()) return json.text("refusal", f.refusal).done();
    return json.json("balance", fmt::format("{:.6f}", f.balance))
        .number("forward_bytes", f.forward_bytes)
        .number("backward_bytes", f.backward_bytes)
        .number("kv_bytes", f.kv_bytes)
        .json("forward_ms", fmt::format("{:.6f}", f.forward_ms))
        .json("backward_ms", fmt::format("{:.6f}", f.backward_ms))
        .done();
  });
}

}  // namespace fovea
