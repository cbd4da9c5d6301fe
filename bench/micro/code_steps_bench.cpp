// Steps of attention by int8 codes, ns a panel and tile of 64 keys, per target and head_dim: step by step, and as a
// pipeline where the products have one. One core, one panel against 4096 keys of one head, which stay in the
// second-level cache. Contenders take turns; the least of many.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "cpu/features.hpp"
#include "cpu/kernels/codes.hpp"
#include "cpu/kernels/kernel_scope.hpp"
#include "cpu/kernels/panel.hpp"
#include "steps.hpp"

namespace fovea::cpu {
namespace {

constexpr std::int64_t kLanes = 48, kTileKv = 64, kTiles = 64;
constexpr int kRounds = 200;

enum Step { kScores, kRound, kAccumulate, kPipeline, kNumSteps };
constexpr std::array<const char*, kNumSteps> kNames = {"scores", "codes", "values", "pipeline"};
using Times = StepTimes<kNumSteps>;

class Item {
 public:
  Item(const CodeProducts& products, std::int64_t head_dim)
      : products_(products),
        head_dim_(head_dim),
        pitch_(CodeProducts::pitch_of(head_dim)),
        keys_(static_cast<std::size_t>(kTiles * kTileKv * pitch_) + CodeProducts::kReadBeyond),
        values_(static_cast<std::size_t>(kTiles * tile_bytes()) + CodeProducts::kReadBeyond),
        queries_(CodeProducts::query_bytes(head_dim, kLanes)),
        scores_(kTileKv * kLanes * 4),
        out_(static_cast<std::size_t>(kLanes * CodeProducts::value_rows(head_dim)) * 4),
        rows_(kNumRows * kLanes * 4),
        key_scale_(kTiles * kTileKv * 4),
        value_scale_(static_cast<std::size_t>(head_dim) * 4),
        pipeline_(products.push == nullptr ? 0 : products.pipeline_bytes()) {
    std::uint32_t state = 1;
    const auto fill_codes = [&](Buffer& buffer, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) {
        state = state * 1664525U + 1013904223U;
        buffer.codes()[i] = static_cast<std::uint8_t>((state >> 24U) % 255 + 1);
      }
    };
    fill_codes(keys_, kTiles * kTileKv * pitch_);
    fill_codes(values_, kTiles * tile_bytes());
    Buffer row(static_cast<std::size_t>(kLanes * pitch_));
    fill_codes(row, kLanes * pitch_);
    std::array<const std::uint8_t*, kLanes> rows{};
    for (std::int64_t i = 0; i < kLanes; ++i) {
      std::fill(row.codes() + i * pitch_ + head_dim, row.codes() + (i + 1) * pitch_,
                std::uint8_t{0});
      rows[static_cast<std::size_t>(i)] = row.codes() + i * pitch_;
    }
    products.pack_queries(rows.data(), head_dim, queries_.codes());
    std::fill_n(key_scale_.floats(), kTiles * kTileKv, 0.02F);
    std::fill_n(value_scale_.floats(), head_dim, 0.02F);
    std::fill_n(octaves(), kLanes, 0.02F / std::sqrt(static_cast<float>(head_dim)));
  }

  Times run() {
    clock_ = {};
    start();
    for (std::int64_t tile = 0; tile < kTiles; ++tile) {
      const CodeTurn turn = turn_of(tile);
      clock_.start();
      products_.scores(turn.queries, turn.keys, head_dim_, {}, scores_.floats());
      clock_.tick(kScores);
      products_.round_probabilities(
          {.scores = scores_.floats(), .num_keys = kTileKv, .octaves = octaves()}, {}, turn.rows);
      clock_.tick(kRound);
      products_.accumulate(turn.values, scores_.floats(), turn.rows, turn.out);
      clock_.tick(kAccumulate);
    }
    const std::vector<float> expected(out_.floats(), out_.floats() + head_dim_ * kLanes);
    if (products_.push == nullptr) return clock_.times();
    start();
    CodePipeline pipeline{.memory = pipeline_.bytes()};
    clock_.start();
    for (std::int64_t tile = 0; tile < kTiles; ++tile) products_.push(pipeline, turn_of(tile));
    products_.flush(pipeline);
    clock_.tick(kPipeline);
    if (!std::equal(expected.begin(), expected.end(), out_.floats())) std::printf("not equal\n");
    return clock_.times();
  }

 private:
  enum Row { kMax, kOrigin, kSum, kKept, kRescale, kWeight, kOctaves, kNumRows };

  std::int64_t tile_bytes() const { return CodeProducts::value_rows(head_dim_) * kTileKv; }
  float* row(Row which) { return rows_.floats() + which * kLanes; }
  float* octaves() { return row(kOctaves); }
  void start() {
    std::fill_n(row(kMax), 2 * kLanes, -std::numeric_limits<float>::infinity());
    std::fill_n(row(kSum), 2 * kLanes, 0.0F);
    std::fill_n(out_.floats(), head_dim_ * kLanes, 0.0F);
  }
  CodeTurn turn_of(std::int64_t tile) {
    return {.queries = queries_.codes(),
            .keys = {.codes = keys_.codes() + tile * kTileKv * pitch_,
                     .pitch = pitch_,
                     .scale = key_scale_.floats() + tile * kTileKv,
                     .count = kTileKv},
            .values = {.codes = values_.codes() + tile * tile_bytes(),
                       .pitch = kTileKv,
                       .scale = value_scale_.floats(),
                       .head_dim = head_dim_,
                       .num_keys = kTileKv},
            .octaves = octaves(),
            .rows = {.row_max = row(kMax),
                     .origin = row(kOrigin),
                     .row_sum = row(kSum),
                     .kept_sum = row(kKept),
                     .rescale = row(kRescale),
                     .weight = row(kWeight)},
            .out = out_.floats()};
  }

  const CodeProducts& products_;
  std::int64_t head_dim_, pitch_;
  Buffer keys_, values_, queries_, scores_, out_, rows_, key_scale_, value_scale_, pipeline_;
  StepClock<kNumSteps> clock_;
};

void bench(const char* target, const CodeProducts& products, std::int64_t head_dim) {
  Item item(products, head_dim);
  Times best;
  best.fill(std::numeric_limits<double>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    const Times times = item.run();
    for (std::size_t step = 0; step < kNumSteps; ++step)
      best[step] = std::min(best[step], times[step]);
  }
  std::printf("%-8s head_dim %3d", target, static_cast<int>(head_dim));
  print_steps(kNames, best, kTiles);
}

}  // namespace
}  // namespace fovea::cpu

int main() {
  using namespace fovea;
  using namespace fovea::cpu;
  if (!missing_for_codes(CpuTarget::amx_bf16).empty()) return 0;
  const KernelScope scope(*panel_kernels(CpuTarget::amx_bf16));
  for (const std::int64_t head_dim : {64, 128, 256}) {
    bench("vnni", *code_products_avx512(), head_dim);
    bench("amx", *code_products_amx(), head_dim);
  }
  return 0;
}
