// Panels that overlap their steps against the same panels step by step: the bits are the same. Needs a processor with
// AMX.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "fovea/dtype.hpp"

#include "cpu/features.hpp"
#include "cpu/kernels/panel.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kPanels = 3;  // one ahead of, one in, one behind the softmax
constexpr std::int64_t kTileKv = 128;
constexpr std::int64_t kKeys = 2 * kTileKv + 75;  // a last strip of 11 keys
constexpr std::int64_t kHiddenKeys = 40, kHiddenLanes = 10;

class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : memory_(bytes + kAlignment) {
    void* at = memory_.data();
    std::size_t space = memory_.size();
    at_ = static_cast<std::byte*>(std::align(kAlignment, bytes, at, space));
  }
  std::byte* bytes() const { return at_; }
  float* floats() const { return reinterpret_cast<float*>(at_); }

 private:
  static constexpr std::size_t kAlignment = 64;
  std::vector<std::byte> memory_;
  std::byte* at_ = nullptr;
};

/// Rows of 16-bit numbers; `growth` more in each tile.
std::vector<std::uint16_t> random_rows(std::int64_t rows, std::int64_t width, Dtype dtype,
                                       float growth) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> result;
  for (std::int64_t i = 0; i < rows * width; ++i) {
    const float x = normal(random) * (1 + growth * static_cast<float>(i / width / kTileKv));
    result.push_back(dtype == Dtype::f16 ? float16(x).bits : bfloat16(x).bits);
  }
  return result;
}

/// The first lanes of each panel do not see the first keys.
void hide(const PanelTurn& turn, KeyRange part, float* scores) {
  const auto lanes = *static_cast<const int*>(turn.walk);
  for (std::int64_t key = part.begin; key < std::min(part.begin + part.count, kHiddenKeys); ++key)
    std::fill_n(scores + (key - part.begin) * lanes, kHiddenLanes, -kInfinity);
}

class Walk {
 public:
  Walk(const PanelKernels& kernels, Dtype dtype, std::int64_t head_dim_qk, std::int64_t head_dim_v,
       float growth)
      : kernels_(kernels),
        dtype_(dtype),
        qk_(head_dim_qk),
        v_(head_dim_v),
        k_rows_(random_rows(kKeys, qk_, dtype, growth)),
        v_rows_(random_rows(kKeys, v_, dtype, 0)),
        queries_(kPanels * kernels.query_bytes(qk_)),
        keys_(kernels.key_bytes(kTileKv, qk_)),
        values_(kernels.value_bytes(kTileKv, v_)),
        scores_(kernels.score_bytes(kTileKv)),
        pipeline_(kernels.pipeline_bytes(kTileKv)),
        out_(kPanels * kernels.output_bytes(v_)),
        state_(4 * kPanels * static_cast<std::size_t>(kernels.lanes) * sizeof(float)) {
    const auto q_rows = random_rows(kPanels * kernels.lanes, qk_, dtype, 0);
    for (std::int64_t panel = 0; panel < kPanels; ++panel) {
      std::vector<const std::byte*> rows;
      for (std::int64_t lane = 0; lane < kernels.lanes; ++lane) {
        rows.push_back(reinterpret_cast<const std::byte*>(
            &q_rows[static_cast<std::size_t>((panel * kernels.lanes + lane) * qk_)]));
      }
      kernels.pack_queries(rows.data(), dtype, 1, qk_, queries(panel));
    }
  }

  /// Sums, maxima and Oᵀ of all panels.
  std::vector<float> run(bool is_overlapped) {
    std::fill_n(state_.floats(), num_lanes(), -kInfinity);
    std::fill_n(state_.floats() + num_lanes(), num_lanes(), 0.0F);
    std::fill_n(state_.floats() + 2 * num_lanes(), num_lanes(), -kInfinity);
    std::memset(out_.bytes(), 0, kPanels * kernels_.output_bytes(v_));
    kernels_.start();
    for (std::int64_t begin = 0; begin < kKeys; begin += kTileKv) {
      const std::int64_t count = std::min(kTileKv, kKeys - begin);
      const KeyTile keys = kernels_.load_keys(source(k_rows_, qk_, begin, count), keys_.bytes());
      kernels_.load_values(source(v_rows_, v_, begin, count), false, values_.bytes());
      is_overlapped ? overlap(keys, begin == 0) : step(keys, begin == 0);
    }
    kernels_.stop();
    std::vector<float> result(state_.floats(), state_.floats() + 2 * num_lanes());
    for (std::int64_t panel = 0; panel < kPanels; ++panel)
      result.insert(result.end(), out(panel), out(panel) + v_ * kernels_.lanes);
    return result;
  }

 private:
  std::int64_t num_lanes() const { return kPanels * kernels_.lanes; }
  std::byte* queries(std::int64_t panel) const {
    return queries_.bytes() + static_cast<std::size_t>(panel) * kernels_.query_bytes(qk_);
  }
  float* out(std::int64_t panel) const {
    return reinterpret_cast<float*>(out_.bytes() +
                                    static_cast<std::size_t>(panel) * kernels_.output_bytes(v_));
  }
  PanelState state(std::int64_t panel) const {
    float* const at = state_.floats() + panel * kernels_.lanes;
    return {.row_max = at,
            .row_sum = at + num_lanes(),
            .rescale = state_.floats() + 3 * num_lanes(),
            .origin = at + 2 * num_lanes()};
  }
  TileSource source(const std::vector<std::uint16_t>& rows, std::int64_t width, std::int64_t begin,
                    std::int64_t count) const {
    return {reinterpret_cast<const std::byte*>(&rows[static_cast<std::size_t>(begin * width)]),
            dtype_,
            width,
            1,
            count,
            width};
  }
  PanelTurn turn(const KeyTile& keys, std::int64_t panel, bool hides) const {
    return {.queries = queries(panel),
            .keys = keys,
            .values = values_.bytes(),
            .range = {0, keys.num_keys},
            .out = out(panel),
            .state = state(panel),
            .prepare = hide,
            .prepared = hides ? 3U : 0U,
            .walk = &kernels_.lanes};
  }

  void overlap(const KeyTile& keys, bool hides) {
    NextTile next;
    PanelPipeline pipeline{.memory = pipeline_.bytes(),
                           .tile_kv = kTileKv,
                           .head_dim_qk = qk_,
                           .head_dim_v = v_,
                           .scale_log2 = kScale};
    for (std::int64_t panel = 0; panel < kPanels; ++panel)
      kernels_.push(pipeline, turn(keys, panel, hides), next);
    kernels_.flush(pipeline, next);
  }

  void step(const KeyTile& keys, bool hides) {
    NextTile next;
    for (std::int64_t panel = 0; panel < kPanels; ++panel) {
      const PanelTurn t = turn(keys, panel, hides);
      kernels_.scores(t.queries, keys, t.range, qk_, 3, scores_.floats(), next);
      if (hides) hide(t, t.range, scores_.floats());
      kernels_.softmax(scores_.floats(), t.range.count, 3, kScale, t.state, {});
      kernels_.accumulate(t.values, keys.num_keys, t.range, scores_.floats(), v_, 3,
                          t.state.rescale, t.out, next);
    }
  }

  static constexpr float kScale = 0.25F;

  const PanelKernels& kernels_;
  const Dtype dtype_;
  const std::int64_t qk_, v_;
  const std::vector<std::uint16_t> k_rows_, v_rows_;
  Buffer queries_, keys_, values_, scores_, pipeline_, out_, state_;
};

class CpuPipeline : public testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    if (panel_kernels(CpuTarget::amx_bf16) == nullptr || !missing_for(CpuTarget::amx_bf16).empty())
      GTEST_SKIP() << "the processor lacks AMX";
    kernels_ =
        GetParam() == Dtype::f16 ? panel_kernels_amx_split() : panel_kernels(CpuTarget::amx_bf16);
  }
  void expect_equal_bits(std::int64_t head_dim_qk, std::int64_t head_dim_v, float growth) const {
    Walk walk(*kernels_, GetParam(), head_dim_qk, head_dim_v, growth);
    const std::vector<float> steps = walk.run(false);
    const std::vector<float> overlapped = walk.run(true);
    EXPECT_TRUE(std::all_of(steps.begin(), steps.end(), [](float x) { return std::isfinite(x); }));
    EXPECT_EQ(std::memcmp(steps.data(), overlapped.data(), steps.size() * sizeof(float)), 0);
  }

  const PanelKernels* kernels_ = nullptr;
};

TEST_P(CpuPipeline, GivesTheBitsOfItsSteps) {
  expect_equal_bits(128, 128, 0);
  expect_equal_bits(64, 64, 0);
  expect_equal_bits(40, 100, 0);  // neither a multiple of a tile's depth
}

TEST_P(CpuPipeline, TakesScoresAgainWhereMaximaGrow) { expect_equal_bits(64, 64, 20); }

INSTANTIATE_TEST_SUITE_P(Of, CpuPipeline, testing::Values(Dtype::bf16, Dtype::f16),
                         [](const auto& each) { return std::string(name(each.param)); });

}  // namespace
}  // namespace fovea::cpu
