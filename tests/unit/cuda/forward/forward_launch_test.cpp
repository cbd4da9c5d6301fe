// Parameters and grids of a forward call: what kernels are told.
#include <gtest/gtest.h>

#include <vector>

#include "core/philox.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/forward/sm80_wide.hpp"
#include "cuda/forward/sm90.hpp"
#include "cuda/forward/sm90_decode.hpp"
#include "cuda/forward/sm90_decode_latent.hpp"
#include "cuda/forward/sm90_short.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "problem/forward.hpp"
#include "support/plan_without.hpp"

namespace fovea::cuda {
namespace {

/// Addresses are passed on, never read.
struct Call {
  alignas(16) std::uint16_t memory[64] = {};
  AttentionForward args;
  ForwardProblem problem;
  ForwardPlan plan;

  Call(std::int64_t seqlen_q, std::int64_t seqlen_kv, std::int64_t num_heads_q) {
    const auto tensor = [&](std::int64_t rows, std::int64_t heads) {
      const std::array<std::int64_t, 4> shape{2, rows, heads, 64};
      return TensorView(memory, make_spec(Dtype::bf16, shape));
    };
    args.q = tensor(seqlen_q, num_heads_q);
    args.k = args.v = tensor(seqlen_kv, 2);
    args.out = tensor(seqlen_q, num_heads_q);
    prepare();
  }

  void prepare(const DeviceTraits& device = typical_device(8, 0)) {
    Problem posed;
    posed.q = args.q.spec();
    posed.k = args.k.spec();
    posed.v = args.v.spec();
    posed.out = args.out.spec();
    posed.mask = args.mask;
    posed.sm_margin = args.sm_margin;
    posed.dropout.p = args.dropout.p;
    posed.reads_dropout_seed = args.dropout_seed || args.dropout_offset;
    problem = validate(posed, "test");
    plan = choose_forward(problem, device);
  }
  ForwardLaunch launch() { return forward_launch(problem, plan, args, memory, nullptr); }
  /// The last of its launches; its parameters are gone.
  KernelLaunch combine() {
    const ForwardLaunch call = launch();
    KernelLaunch last;
    for (const KernelLaunch& each : call.launches(plan)) last = each;
    return last;
  }
  DecodeLaunch decode_on(const DeviceTraits& device) {
    prepare(device);
    return Sm90Decode::prepare(problem, plan, args, nullptr, memory,
                               [](const auto&, const void*) { return TensorMapParam{}; });
  }
  DecodeLaunch decode_on_hopper(int num_sms) {
    DeviceTraits device = typical_device(9, 0);
    device.num_sms = num_sms;
    return decode_on(device);
  }
  Sm90ShortLaunch short_launch() {
    EXPECT_EQ(plan.candidate, Sm90ForwardShort::kName);
    return Sm90ForwardShort::prepare(problem, plan, args, nullptr, memory,
                                     [](const auto&, const void*) { return TensorMapParam{}; });
  }
  Sm90Launch launch_on_hopper(int num_sms) {
    DeviceTraits device = typical_device(9, 0);
    device.num_sms = num_sms;
    prepare(device);
    return Sm90Forward::prepare(problem, plan, args, nullptr, memory,
                                [](const auto&, const void*) { return TensorMapParam{}; });
  }
};

TEST(ForwardLaunch, GridHasATileForEveryRowOfEveryHead) {
  Call call(300, 500, 6);  // three tiles of 128 rows
  const ForwardLaunch launch = call.launch();
  EXPECT_EQ(launch.params.num_q_tiles, 3);
  EXPECT_EQ(launch.grid.x, 3U * 2 * 6);
  EXPECT_EQ(launch.grid.y, 1U);
  EXPECT_EQ(launch.num_threads, 128U);
}

TEST(ForwardLaunch, NothingIsLaunchedForNoRows) {
  Call call(0, 500, 6);
  EXPECT_EQ(call.launch().grid.x, 0U);
}

TEST(ForwardLaunch, SplitsHaveACombineForEachRow) {
  Call call(1, 1000, 16);
  const ForwardLaunch launch = call.launch();
  ASSERT_TRUE(call.plan.spec->is_split);
  EXPECT_EQ(launch.params.max_splits, 4);
  EXPECT_EQ(launch.grid.x, 2U * 2);  // a tile has the 8 heads of a group
  EXPECT_EQ(launch.grid.y, 4U);
  EXPECT_EQ(call.combine().role, KernelRole::wide_combine);
  EXPECT_EQ(call.combine().grid.x, 2U * 16 / 4);  // four of a CTA
  EXPECT_EQ(launch.params.partial_lse - launch.params.partial_out, 2 * 16 * 4 * 64);
}

TEST(ForwardLaunch, ManySplitsOfFewRowsAreCombinedDeep) {
  Call eight(1, 8 * 256, 16);
  EXPECT_EQ(eight.combine().role, KernelRole::wide_combine);
  Call nine(1, 9 * 256, 16);
  EXPECT_EQ(nine.combine().role, KernelRole::deep_combine);
  EXPECT_EQ(nine.combine().grid.x, 2U * 16);
}

TEST(ForwardLaunch, ManyRowsAreCombinedWide) {
  Call call(1, 17 * 256, 16);
  // As many sequences as have 2,048 rows, all at one address.
  const auto stretched = [&](const TensorView& tensor, std::int64_t batch) {
    const std::array<std::int64_t, 4> shape{batch, tensor.size(1), tensor.size(2), tensor.size(3)};
    const std::array<std::int64_t, 4> strides{0, tensor.stride(1), tensor.stride(2), 1};
    return TensorView(call.memory, make_spec(Dtype::bf16, shape, strides));
  };
  for (TensorView* tensor : {&call.args.q, &call.args.k, &call.args.v})
    *tensor = stretched(*tensor, 128);
  const std::array<std::int64_t, 4> shape{128, 1, 16, 64};
  call.args.out = TensorView(call.memory, make_spec(Dtype::bf16, shape));
  call.prepare();
  EXPECT_EQ(call.combine().role, KernelRole::wide_combine);
  EXPECT_EQ(call.combine().grid.x, 2048U / 4);
}

TEST(ForwardLaunch, DecodingHasNoMoreCtasThanSms) {
  Call call(1, 131072, 16);  // 64 splits for each of two groups of heads of 2 sequences
  EXPECT_EQ(call.decode_on_hopper(132).num_ctas, 132U);
  EXPECT_EQ(call.decode_on_hopper(500).num_ctas, 256U);
  EXPECT_EQ(call.decode_on_hopper(132).params.rows_per_box, 64);
}

TEST(ForwardLaunch, DecodingAsksForBoxesOfSlicesAndForNothingBesideThem) {
  Call call(1, 4096, 16);
  call.prepare(typical_device(9, 0));
  std::vector<driver::TensorMapSpec> maps;
  Sm90Decode::prepare(call.problem, call.plan, call.args, nullptr, call.memory,
                      [&](const driver::TensorMapSpec& spec, const void*) {
                        maps.push_back(spec);
                        return TensorMapParam{};
                      });
  // Of keys and values: four slices, then one.
  const std::array<std::uint32_t, 4> rows{64, 64, 16, 16};
  ASSERT_EQ(maps.size(), rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(maps[i].box[1], rows[i]);
    EXPECT_EQ(maps[i].l2_promotion, driver::TensorMapL2Promotion::bytes_128);
  }
}

/// Of heads of 144 bytes L2 would have most of the next one beside them.
TEST(ForwardLaunch, TmaHasL2FetchNoNeighbourOfAHead) {
  const auto promotion_of = [](std::int64_t head_dim) {
    alignas(16) std::uint16_t memory[8] = {};
    const std::array<std::int64_t, 4> shape{2, 384, 6, head_dim};
    driver::TensorMapSpec asked;
    tensor_map(
        [&](const driver::TensorMapSpec& spec, const void*) {
          asked = spec;
          return TensorMapParam{};
        },
        TensorView(memory, make_spec(Dtype::bf16, shape)), 64);
    return asked.l2_promotion;
  };
  EXPECT_EQ(promotion_of(64), driver::TensorMapL2Promotion::bytes_128);
  EXPECT_EQ(promotion_of(72), driver::TensorMapL2Promotion::bytes_128);
  EXPECT_EQ(promotion_of(128), driver::TensorMapL2Promotion::bytes_256);
  EXPECT_EQ(promotion_of(192), driver::TensorMapL2Promotion::bytes_128);
}

TEST(ForwardLaunch, RowTilesOfOneWaveAreClaimedFromNoCounter) {
  Call call(512, 512, 6);
  call.args.mask = causal();  // 4 tiles of 128 rows for 6 heads of 2 sequences
  const Sm90Launch one_wave = call.launch_on_hopper(48);
  ASSERT_TRUE(call.plan.spec.as<Sm90ForwardSpec>().is_dynamic);
  EXPECT_EQ(one_wave.num_ctas, 48U);
  EXPECT_FALSE(one_wave.has_counter);
  const Sm90Launch two_waves = call.launch_on_hopper(47);
  EXPECT_EQ(two_waves.num_ctas, 47U);
  EXPECT_TRUE(two_waves.has_counter);
  call.args.mask = {};
  EXPECT_FALSE(call.launch_on_hopper(1).has_counter) << "row tiles of equal length take turns";
}

TEST(ForwardLaunch, SmsOfTheMarginAreLeftFree) {
  Call decode(1, 131072, 16);
  Call causal_call(512, 512, 6);
  causal_call.args.mask = causal();  // 48 tiles
  for (Call* call : {&decode, &causal_call}) call->args.sm_margin = 32;
  EXPECT_EQ(decode.decode_on_hopper(132).num_ctas, 100U);
  EXPECT_EQ(decode.decode_on_hopper(33).num_ctas, 1U);
  EXPECT_EQ(decode.decode_on_hopper(500).num_ctas, 256U) << "splits are fewer than SMs";
  EXPECT_EQ(causal_call.launch_on_hopper(132).num_ctas, 48U);
  const Sm90Launch two_waves = causal_call.launch_on_hopper(79);
  EXPECT_EQ(two_waves.num_ctas, 47U);
  EXPECT_TRUE(two_waves.has_counter);
}

TEST(ForwardLaunch, LatentDecodeLeavesSmsFree) {
  Call call(1, 8192, 128);
  const auto view_of = [&](std::int64_t seqlen, std::int64_t heads, std::int64_t head_dim) {
    const std::array shape{std::int64_t{2}, seqlen, heads, head_dim};
    const std::array strides{seqlen * heads * 576, heads * 576, std::int64_t{576}, std::int64_t{1}};
    return TensorView(call.memory, make_spec(Dtype::bf16, shape, strides));
  };
  call.args.q = view_of(1, 128, 576);
  call.args.k = view_of(8192, 1, 576);
  call.args.v = view_of(8192, 1, 512);
  call.args.out = view_of(1, 128, 512);
  const auto num_ctas = [&](std::int32_t margin) {
    call.args.sm_margin = margin;
    DeviceTraits device = typical_device(9, 0);
    device.num_sms = 13;
    call.prepare(device);
    return Sm90DecodeLatent::prepare(call.problem, call.plan, call.args, nullptr, call.memory,
                                     [](const auto&, const void*) { return TensorMapParam{}; })
        .num_ctas;
  };
  EXPECT_EQ(num_ctas(0), 13U);
  EXPECT_EQ(num_ctas(4), 9U);
}

/// Each part of V's columns with the combine kernel that joins its splits, before the next part writes there.
TEST(ForwardLaunch, WideHeadsAreLaunchedPartByPart) {
  Call call(1, 8192, 16);
  const auto view_of = [&](std::int64_t seqlen, std::int64_t heads, std::int64_t head_dim) {
    const std::array shape{std::int64_t{2}, seqlen, heads, head_dim};
    return TensorView(call.memory, make_spec(Dtype::bf16, shape));
  };
  call.args.q = view_of(1, 16, 576);
  call.args.k = view_of(8192, 1, 576);
  call.args.v = view_of(8192, 1, 500);
  call.args.out = view_of(1, 16, 500);
  call.prepare(typical_device(8, 0));
  ASSERT_EQ(call.plan.candidate, Sm80ForwardWide::kName);
  const WideLaunch wide =
      Sm80ForwardWide::prepare(call.problem, call.plan, call.args, nullptr, call.memory, {});
  const KernelLaunches launches = wide.launches(call.plan);
  ASSERT_EQ(launches.size(), 4U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(launches.begin()[2 * i].role, KernelRole::main);
    EXPECT_EQ(launches.begin()[2 * i].params, &wide.parts[i].params);
    EXPECT_EQ(launches.begin()[2 * i + 1].params, &wide.parts[i].combine_params);
    EXPECT_EQ(wide.parts[i].params.head_dim_v, i == 0 ? 256 : 244);
    const void* const begin = reinterpret_cast<std::byte*>(call.memory) + i * 512;
    EXPECT_EQ(wide.parts[i].params.v.data, begin);
    EXPECT_EQ(wide.parts[i].params.out.data, begin);
    EXPECT_EQ(wide.parts[i].combine_params.out.data, begin);
    EXPECT_EQ(wide.parts[i].combine_params.head_dim_v, i == 0 ? 256 : 244);
  }
}

TEST(ForwardLaunch, ShortSequencesOnHopperHaveACtaForEachOfTheirTiles) {
  Call call(77, 77, 6);  // two tiles of 64 rows
  call.prepare(typical_device(9, 0));
  ASSERT_EQ(call.plan.spec->tile_q, 64);
  const Sm90ShortLaunch launch = call.short_launch();
  const KernelLaunches launches = launch.launches(call.plan);
  ASSERT_EQ(launches.size(), 1U);
  EXPECT_EQ(launches.begin()->grid.x, 2U * 2 * 6);
  EXPECT_EQ(launches.begin()->num_threads, 128U);
}

TEST(ForwardLaunch, PersistentCtasAreNoMoreThanRunAtOnce) {
  Call call(77, 77, 6);
  DeviceTraits device = typical_device(9, 0);
  device.num_sms = 2;
  call.prepare(device);
  ASSERT_TRUE(call.plan.spec.as<Sm90ShortSpec>().is_persistent);
  ASSERT_EQ(call.plan.spec->ctas_per_sm, 5);
  EXPECT_EQ(call.short_launch().common.grid.x, 10U);  // of 24 tiles
}

TEST(ForwardLaunch, HopperLaunchesNothingForNoRows) {
  Call call(0, 500, 6);
  EXPECT_EQ(call.decode_on_hopper(132).num_ctas, 0U);
}

/// TMA knows no tensor without rows.
TEST(ForwardLaunch, HopperLaunchesNothingForNoPackedRows) {
  Call call(8, 4096, 16);  // eight heads of a group and eight queries: a tile
  call.problem.is_varlen = call.problem.is_cached = true;
  call.problem.cache.has_aligned_rows = true;
  call.problem.total_q = 100;
  call.plan = testing::plan_without({Sm90Decode::kName}, call.problem, typical_device(9, 0));
  ASSERT_EQ(call.plan.candidate, Sm90Forward::kName);
  ASSERT_TRUE(call.plan.spec->has_packed_q);
  const auto packed = [&](std::int64_t rows) {
    const std::array<std::int64_t, 3> shape{rows, 16, 64};
    return TensorView(call.memory, make_spec(Dtype::bf16, shape));
  };
  const KvCache tensors{.k = call.args.k, .v = call.args.v};
  const GrownCache cache{.cache = tensors};
  const auto num_ctas = [&](std::int64_t rows) {
    call.args.q = call.args.out = packed(rows);
    return Sm90Forward::prepare(call.problem, call.plan, call.args, &cache, call.memory,
                                [](const auto&, const void*) { return TensorMapParam{}; })
        .num_ctas;
  };
  EXPECT_EQ(num_ctas(3), 2U * 2 * 8);  // sequences, kv heads, splits of 512 keys
  EXPECT_EQ(num_ctas(0), 0U);
}

TEST(ForwardLaunch, UnalignedRowsAreToldOfEachTensor) {
  Call call(300, 500, 6);
  EXPECT_NE(call.launch().params.is_q_aligned, 0);
  const std::array<std::int64_t, 4> shape{2, 300, 6, 64};
  const std::array<std::int64_t, 4> strides{300 * 6 * 65, 6 * 65, 65, 1};
  call.args.q = TensorView(call.memory, make_spec(Dtype::bf16, shape, strides));
  const ForwardLaunch launch = call.launch();
  EXPECT_EQ(launch.params.is_q_aligned, 0);
  EXPECT_NE(launch.params.is_kv_aligned, 0);
  EXPECT_EQ(launch.params.q.head_stride, 65);
}

TEST(ForwardLaunch, DropoutIsTheGeneratorsKeyAndThreshold) {
  Call call(300, 500, 6);
  call.args.dropout = {.p = 0.25F, .seed = 5, .offset = 6};
  const ForwardLaunch launch = call.launch();
  const philox::Key key = philox::dropout_key(5, 6);
  EXPECT_EQ(launch.params.dropout_key[0], key[0]);
  EXPECT_EQ(launch.params.dropout_key[1], key[1]);
  EXPECT_EQ(launch.params.dropout_threshold, std::uint32_t{1} << 30);
  EXPECT_FLOAT_EQ(launch.params.dropout_keep_scale, 4.0F / 3);
  call.args.dropout.p = 1;
  EXPECT_EQ(call.launch().params.dropout_threshold, 0xffffffffU);
  EXPECT_EQ(call.launch().params.dropout_keep_scale, 0);
}

TEST(ForwardLaunch, DropoutByASeedInMemoryIsAnAddressAndANumberToAdd) {
  Call call(300, 500, 6);
  std::int64_t seed = 5, offset = 6;
  call.args.dropout = {.p = 0.25F, .seed = 2, .offset = 3};
  call.args.dropout_seed = view(&seed, {1});
  call.args.dropout_offset = view(&offset, {1});
  call.prepare();
  EXPECT_TRUE(call.plan.spec->reads_dropout_seed);
  const ForwardLaunch launch = call.launch();
  EXPECT_EQ(static_cast<const void*>(launch.params.dropout_seed_at), &seed);
  EXPECT_EQ(static_cast<const void*>(launch.params.dropout_offset_at), &offset);
  EXPECT_EQ(launch.params.dropout_seed, 2U);
  EXPECT_EQ(launch.params.dropout_offset, 3U);
  call.args.dropout_seed = {};
  call.args.dropout_offset = {};
  call.prepare();
  EXPECT_FALSE(call.plan.spec->reads_dropout_seed) << "keys by value have their own code";
}

TEST(ForwardLaunch, SectionsShareTheL2Cache) {
  // 40 MB of L2 hold 24 MB of keys and values: three of the four heads of 8 MB.
  Call call(32768, 32768, 2);
  EXPECT_EQ(call.launch().params.heads_per_section, 3);
}

}  // namespace
}  // namespace fovea::cuda
