// Where the time of a work item goes: ns of each step, per panel and kv tile, per target and head_dim.
// One core, 8 panels against 2048 keys of one head (they stay in the second-level cache), steps in the order of
// cpu/attention_forward.cpp. Kernels that overlap their steps are timed both ways: step by step, and as a pipeline.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numbers>

#include "fovea/problem.hpp"

#include "cpu/features.hpp"
#include "cpu/forward/workspace.hpp"
#include "cpu/kernels/panel.hpp"
#include "steps.hpp"

namespace fovea::cpu {
namespace {

constexpr int kPanels = 8;
constexpr std::int64_t kTileKv = 128;
constexpr std::int64_t kTiles = 16;
constexpr int kRounds = 40;

enum Step {
  kPack,
  kLoadKeys,
  kLoadValues,
  kScores,
  kSoftmax,
  kAccumulate,
  kPipeline,
  kEmit,
  kNumSteps
};
constexpr std::array<const char*, kNumSteps> kNames = {
    "pack", "load k", "load v", "scores", "softmax", "accumulate", "pipeline", "emit"};
using Times = StepTimes<kNumSteps>;

class Item {
 public:
  Item(const PanelKernels& kernels, std::int64_t head_dim)
      : kernels_(kernels),
        head_dim_(head_dim),
        q_(bytes_of(kPanels * kernels.lanes)),
        k_(bytes_of(kTiles * kTileKv)),
        v_(bytes_of(kTiles * kTileKv)),
        out_rows_(bytes_of(kPanels * kernels.lanes)),
        queries_(kPanels * kernels.query_bytes(head_dim)),
        keys_(kernels.key_bytes(kTileKv, head_dim)),
        values_(kernels.value_bytes(kTileKv, head_dim)),
        out_(kPanels * kernels.output_bytes(head_dim)),
        scores_(kernels.score_bytes(kTileKv)),
        pipeline_(kernels.pipeline_bytes != nullptr ? kernels.pipeline_bytes(kTileKv) : 0),
        state_(4 * sizeof(float) * static_cast<std::size_t>(kPanels * kernels.lanes)),
        rows_(static_cast<std::size_t>(kRowsAtOnce * head_dim) * sizeof(float)) {
    fill(q_, kPanels * kernels.lanes * head_dim, kernels.product);
    fill(k_, kTiles * kTileKv * head_dim, kernels.product);
    fill(v_, kTiles * kTileKv * head_dim, kernels.product);
  }

  Times run(bool is_overlapped) {
    is_overlapped_ = is_overlapped;
    clock_ = {};
    if (kernels_.start != nullptr) kernels_.start();
    clock_.start();
    for (int panel = 0; panel < kPanels; ++panel) pack(panel);
    clock_.tick(kPack);
    for (std::int64_t tile = 0; tile < kTiles; ++tile) walk(tile);
    for (int panel = 0; panel < kPanels; ++panel) emit(panel);
    clock_.tick(kEmit);
    if (kernels_.stop != nullptr) kernels_.stop();
    return clock_.times();
  }

 private:
  std::size_t bytes_of(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * head_dim_) * size_bytes(kernels_.product);
  }
  float* out(int panel) {
    return reinterpret_cast<float*>(out_.bytes() + static_cast<std::size_t>(panel) *
                                                       kernels_.output_bytes(head_dim_));
  }
  std::byte* queries(int panel) {
    return queries_.bytes() + static_cast<std::size_t>(panel) * kernels_.query_bytes(head_dim_);
  }
  PanelState state(int panel) {
    const std::int64_t all = kPanels * kernels_.lanes;
    float* const at = state_.floats() + panel * kernels_.lanes;
    return {.row_max = at,
            .row_sum = at + all,
            .rescale = state_.floats() + 3 * all,
            .origin = at + 2 * all};
  }
  TileSource tile_of(Buffer& rows, std::int64_t tile) {
    const auto bytes = static_cast<std::int64_t>(bytes_of(kTileKv));
    return {rows.bytes() + tile * bytes, kernels_.product, head_dim_, 1, kTileKv, head_dim_};
  }

  void pack(int panel) {
    std::array<const std::byte*, 64> rows{};
    for (int lane = 0; lane < kernels_.lanes; ++lane)
      rows[static_cast<std::size_t>(lane)] = q_.bytes() + bytes_of(panel * kernels_.lanes + lane);
    kernels_.pack_queries(rows.data(), kernels_.product, 1, head_dim_, queries(panel));
    const PanelState s = state(panel);
    std::fill_n(s.row_max, kernels_.lanes, -std::numeric_limits<float>::infinity());
    std::fill_n(s.origin, kernels_.lanes, -std::numeric_limits<float>::infinity());
    std::fill_n(s.row_sum, kernels_.lanes, 0.0F);
    std::memset(out(panel), 0, kernels_.output_bytes(head_dim_));
  }

  void walk(std::int64_t tile) {
    const KeyTile keys = kernels_.load_keys(tile_of(k_, tile), keys_.bytes());
    clock_.tick(kLoadKeys);
    kernels_.load_values(tile_of(v_, tile), /*is_careful=*/false, values_.bytes());
    clock_.tick(kLoadValues);
    if (is_overlapped_) {
      walk_overlapped(keys);
      return;
    }
    NextTile next;
    for (int panel = 0; panel < kPanels; ++panel) {
      float* const scores = scores_.floats();
      const PanelState s = state(panel);
      kernels_.scores(queries(panel), keys, {0, kTileKv}, head_dim_, num_vectors(), scores, next);
      clock_.tick(kScores);
      kernels_.softmax(scores, kTileKv, num_vectors(), scale_log2(), s, {});
      clock_.tick(kSoftmax);
      kernels_.accumulate(values_.bytes(), kTileKv, {0, kTileKv}, scores, head_dim_, num_vectors(),
                          s.rescale, out(panel), next);
      clock_.tick(kAccumulate);
    }
  }

  void walk_overlapped(const KeyTile& keys) {
    NextTile next;
    PanelPipeline pipeline{.memory = pipeline_.bytes(),
                           .tile_kv = kTileKv,
                           .head_dim_qk = head_dim_,
                           .head_dim_v = head_dim_,
                           .scale_log2 = scale_log2()};
    for (int panel = 0; panel < kPanels; ++panel) {
      kernels_.push(pipeline,
                    {.queries = queries(panel),
                     .keys = keys,
                     .values = values_.bytes(),
                     .range = {0, kTileKv},
                     .out = out(panel),
                     .state = state(panel)},
                    next);
    }
    kernels_.flush(pipeline, next);
    clock_.tick(kPipeline);
  }

  float scale_log2() const {
    return std::numbers::log2e_v<float> / std::sqrt(static_cast<float>(head_dim_));
  }

  void emit(int panel) {
    for (int lane = 0; lane < kernels_.lanes; ++lane) {
      const int place = lane % static_cast<int>(kRowsAtOnce);
      if (place == 0) {
        const LaneRange lanes{lane, std::min<std::int64_t>(kRowsAtOnce, kernels_.lanes - lane)};
        kernels_.extract_rows(out(panel), lanes, head_dim_, rows_.floats(), head_dim_);
      }
      const float* row = rows_.floats() + place * head_dim_;
      kernels_.store_row(row, 1.0F / state(panel).row_sum[lane], head_dim_, kernels_.product, 1,
                         out_rows_.bytes() + bytes_of(panel * kernels_.lanes + lane));
    }
  }

  int num_vectors() const { return kernels_.lanes / kernels_.vector_lanes; }

  const PanelKernels& kernels_;
  std::int64_t head_dim_;
  Buffer q_, k_, v_, out_rows_, queries_, keys_, values_, out_, scores_, pipeline_, state_, rows_;
  bool is_overlapped_ = false;
  StepClock<kNumSteps> clock_;
};

void bench(CpuTarget target, std::int64_t head_dim, bool is_overlapped) {
  const PanelKernels& kernels = *panel_kernels(target);
  Item item(kernels, head_dim);
  const Times best = least_of(kRounds, [&] { return item.run(is_overlapped); });
  constexpr double kUnits = kPanels * kTiles;
  const double flops = 4.0 * kernels.lanes * static_cast<double>(kTileKv * head_dim) * kUnits;
  std::printf("%-12s head_dim %3d  %6.0f GFLOP/s", std::string(name(target)).c_str(),
              static_cast<int>(head_dim), flops / total(best) * 1e-9);
  print_steps(kNames, best, kUnits);
}

}  // namespace
}  // namespace fovea::cpu

int main() {
  using namespace fovea;
  using namespace fovea::cpu;
  for (const CpuTarget target : {CpuTarget::scalar, CpuTarget::neon, CpuTarget::avx2,
                                 CpuTarget::avx512, CpuTarget::avx512_bf16, CpuTarget::amx_bf16}) {
    if (panel_kernels(target) == nullptr || !missing_for(target).empty()) continue;
    for (const std::int64_t head_dim : {64, 128}) {
      bench(target, head_dim, false);
      if (panel_kernels(target)->push != nullptr) bench(target, head_dim, true);
    }
  }
  return 0;
}
