// Where the time of a gradient's work item goes: ns of each step, per panel and kv tile, per target and head_dim.
// One core, 4 panels against a chunk of 512 keys of one head again and again, steps in the order of
// cpu/attention_backward.cpp.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "fovea/problem.hpp"

#include "cpu/features.hpp"
#include "cpu/kernels/gradient.hpp"
#include "steps.hpp"

namespace fovea::cpu {
namespace {

constexpr int kPanels = 4;
constexpr std::int64_t kTileKv = 128;
constexpr std::int64_t kTiles = 4;
constexpr std::int64_t kKeys = kTiles * kTileKv;
constexpr int kRounds = 60;

enum Step {
  kPack,
  kLoad,
  kScores,
  kProducts,
  kSoftmax,
  kValues,
  kKeyRows,
  kQueries,
  kEmit,
  kNumSteps
};
constexpr std::array<const char*, kNumSteps> kNames = {"pack", "load", "S",  "dP",  "softmax",
                                                       "dV",   "dK",   "dQ", "emit"};
using Times = StepTimes<kNumSteps>;

class Item {
 public:
  Item(CpuTarget target, std::int64_t head_dim)
      : kernels_(*gradient_panel_kernels(target)),
        gradient_(*gradient_kernels(target)),
        head_dim_(head_dim),
        lanes_(kernels_.lanes),
        q_(bytes_of(kPanels * lanes_)),
        dout_(bytes_of(kPanels * lanes_)),
        k_(bytes_of(kKeys)),
        v_(bytes_of(kKeys)),
        queries_(kPanels * kernels_.query_bytes(head_dim)),
        douts_(kPanels * kernels_.query_bytes(head_dim)),
        query_rows_(kPanels * gradient_.row_bytes(head_dim)),
        dout_rows_(kPanels * gradient_.row_bytes(head_dim)),
        dq_(kPanels * kernels_.output_bytes(head_dim)),
        dq_rows_(static_cast<std::size_t>(kPanels * lanes_ * head_dim) * sizeof(float)),
        keys_(kTiles * kernels_.key_bytes(kTileKv, head_dim)),
        values_(kTiles * kernels_.key_bytes(kTileKv, head_dim)),
        columns_(kTiles * kernels_.value_bytes(kTileKv, head_dim)),
        dk_(sum_bytes()),
        dv_(sum_bytes()),
        scores_(kernels_.score_bytes(kTileKv)),
        products_(kernels_.score_bytes(kTileKv)),
        lane_terms_(4 * sizeof(float) * static_cast<std::size_t>(lanes_)) {
    for (Buffer* rows : {&q_, &dout_}) fill(*rows, kPanels * lanes_ * head_dim, kernels_.product);
    for (Buffer* rows : {&k_, &v_}) fill(*rows, kKeys * head_dim, kernels_.product);
    std::fill_n(lane_terms_.floats(), 3 * lanes_, 0.0F);
    std::fill_n(lane_terms_.floats() + lanes_, lanes_, std::log(2048.0F));
    std::fill_n(lane_terms_.floats() + 3 * lanes_, lanes_, 1.0F);
    std::fill_n(dq_rows_.floats(), kPanels * lanes_ * head_dim, 0.0F);
    for (Buffer* sums : {&dk_, &dv_}) std::fill_n(sums->floats(), sum_bytes() / 4, 0.0F);
  }

  Times run() {
    clock_ = {};
    if (kernels_.start != nullptr) kernels_.start();
    clock_.start();
    load();
    clock_.tick(kLoad);
    for (int panel = 0; panel < kPanels; ++panel) pack(panel);
    clock_.tick(kPack);
    for (std::int64_t tile = 0; tile < kTiles; ++tile) {
      for (int panel = 0; panel < kPanels; ++panel) step(tile, panel);
    }
    for (int panel = 0; panel < kPanels; ++panel) emit(panel);
    clock_.tick(kEmit);
    if (kernels_.stop != nullptr) kernels_.stop();
    return clock_.times();
  }

 private:
  static constexpr KeyRange kAll{0, kTileKv};

  std::size_t bytes_of(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * head_dim_) * size_bytes(kernels_.product);
  }
  std::size_t sum_bytes() const {
    return static_cast<std::size_t>(kKeys * gradient_.row_pitch(head_dim_)) * sizeof(float);
  }
  template <typename Size>
  static std::byte* part(Buffer& buffer, std::int64_t index, Size bytes) {
    return buffer.bytes() + static_cast<std::size_t>(index) * static_cast<std::size_t>(bytes);
  }
  TileSource tile_of(Buffer& rows, std::int64_t tile) {
    return {
        part(rows, tile, bytes_of(kTileKv)), kernels_.product, head_dim_, 1, kTileKv, head_dim_};
  }

  void load() {
    for (std::int64_t tile = 0; tile < kTiles; ++tile) {
      const auto i = static_cast<std::size_t>(tile);
      key_tiles_[i] = kernels_.load_keys(tile_of(k_, tile),
                                         part(keys_, tile, kernels_.key_bytes(kTileKv, head_dim_)));
      value_tiles_[i] = kernels_.load_keys(
          tile_of(v_, tile), part(values_, tile, kernels_.key_bytes(kTileKv, head_dim_)));
      kernels_.load_values(tile_of(k_, tile), /*is_careful=*/true,
                           part(columns_, tile, kernels_.value_bytes(kTileKv, head_dim_)));
    }
  }

  void pack(int panel) {
    pack(q_, panel, queries_, query_rows_);
    pack(dout_, panel, douts_, dout_rows_);
    std::memset(part(dq_, panel, kernels_.output_bytes(head_dim_)), 0,
                kernels_.output_bytes(head_dim_));
  }
  void pack(Buffer& source, int panel, Buffer& columns, Buffer& rows) {
    std::array<const std::byte*, 64> at{};
    for (std::int64_t lane = 0; lane < lanes_; ++lane)
      at[static_cast<std::size_t>(lane)] = source.bytes() + bytes_of(panel * lanes_ + lane);
    kernels_.pack_queries(at.data(), kernels_.product, 1, head_dim_,
                          part(columns, panel, kernels_.query_bytes(head_dim_)));
    gradient_.pack_rows(at.data(), lanes_, kernels_.product, 1, head_dim_,
                        part(rows, panel, gradient_.row_bytes(head_dim_)));
  }

  void step(std::int64_t tile, int panel) {
    const auto i = static_cast<std::size_t>(tile);
    NextTile next;
    kernels_.scores(part(queries_, panel, kernels_.query_bytes(head_dim_)), key_tiles_[i], kAll,
                    head_dim_, num_vectors(), scores_.floats(), next);
    clock_.tick(kScores);
    kernels_.scores(part(douts_, panel, kernels_.query_bytes(head_dim_)), value_tiles_[i], kAll,
                    head_dim_, num_vectors(), products_.floats(), next);
    clock_.tick(kProducts);
    const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim_));
    gradient_.softmax_gradient({.scores = scores_.floats(),
                                .products = products_.floats(),
                                .num_keys = kTileKv,
                                .lanes = lanes_,
                                .num_vectors = num_vectors(),
                                .scale = scale,
                                .factor = scale,
                                .origin = lane_terms_.floats(),
                                .log_sum = lane_terms_.floats() + lanes_,
                                .delta = lane_terms_.floats() + 2 * lanes_});
    clock_.tick(kSoftmax);
    const std::int64_t sums = tile * kTileKv * gradient_.row_pitch(head_dim_);
    gradient_.accumulate_rows(scores_.floats(), kTileKv, lanes_,
                              part(dout_rows_, panel, gradient_.row_bytes(head_dim_)), head_dim_,
                              dv_.floats() + sums);
    clock_.tick(kValues);
    gradient_.accumulate_rows(products_.floats(), kTileKv, lanes_,
                              part(query_rows_, panel, gradient_.row_bytes(head_dim_)), head_dim_,
                              dk_.floats() + sums);
    clock_.tick(kKeyRows);
    kernels_.accumulate(part(columns_, tile, kernels_.value_bytes(kTileKv, head_dim_)), kTileKv,
                        kAll, products_.floats(), head_dim_, num_vectors(),
                        lane_terms_.floats() + 3 * lanes_, dq(panel), next);
    clock_.tick(kQueries);
  }

  void emit(int panel) {
    std::array<float*, 64> rows{};
    for (std::int64_t lane = 0; lane < lanes_; ++lane)
      rows[static_cast<std::size_t>(lane)] =
          dq_rows_.floats() + (panel * lanes_ + lane) * head_dim_;
    gradient_.add_queries(dq(panel), lanes_, head_dim_, rows.data(), 1);
  }

  float* dq(int panel) {
    return reinterpret_cast<float*>(part(dq_, panel, kernels_.output_bytes(head_dim_)));
  }
  int num_vectors() const { return static_cast<int>(lanes_) / kernels_.vector_lanes; }

  const PanelKernels& kernels_;
  const GradientKernels& gradient_;
  std::int64_t head_dim_, lanes_;
  Buffer q_, dout_, k_, v_, queries_, douts_, query_rows_, dout_rows_, dq_, dq_rows_;
  Buffer keys_, values_, columns_, dk_, dv_, scores_, products_;
  Buffer lane_terms_;  // origin, lse, delta and ones, [lanes] each
  std::array<KeyTile, kTiles> key_tiles_{}, value_tiles_{};
  StepClock<kNumSteps> clock_;
};

void bench(CpuTarget target, std::int64_t head_dim) {
  Item item(target, head_dim);
  const Times best = least_of(kRounds, [&] { return item.run(); });
  constexpr double kUnits = kPanels * kTiles;
  const int lanes = gradient_panel_kernels(target)->lanes;
  const double flops = 10.0 * lanes * static_cast<double>(kTileKv * head_dim) * kUnits;
  std::printf("%-9s head_dim %3d, %d lanes  %6.0f GFLOP/s", std::string(name(target)).c_str(),
              static_cast<int>(head_dim), lanes, flops / total(best) * 1e-9);
  print_steps(kNames, best, kUnits);
}

}  // namespace
}  // namespace fovea::cpu

int main() {
  using namespace fovea;
  using namespace fovea::cpu;
  for (const CpuTarget target : {CpuTarget::scalar, CpuTarget::neon, CpuTarget::avx2,
                                 CpuTarget::avx512, CpuTarget::avx512_bf16, CpuTarget::amx_bf16}) {
    if (gradient_kernels(target) == nullptr || !missing_for(target).empty()) continue;
    for (const std::int64_t head_dim : {64, 128}) bench(target, head_dim);
  }
  return 0;
}
