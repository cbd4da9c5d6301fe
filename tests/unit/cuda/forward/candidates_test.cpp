// The choice of a forward kernel: what is refused and why, what a tile is, what a plan needs.
#include "cuda/forward/candidates.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "fovea/error.hpp"
#include "fovea/mask.hpp"

#include "cuda/device/shared/split.h"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/cdna.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/forward/sm100.hpp"
#include "cuda/forward/sm100_fp4.hpp"
#include "cuda/forward/sm120_fp4.hpp"
#include "cuda/forward/sm80_short.hpp"
#include "cuda/forward/sm90_quantized.hpp"
#include "cuda/forward/sm90_selections.hpp"
#include "cuda/forward/sm90_short.hpp"
#include "problem/decode.hpp"
#include "problem/forward.hpp"
#include "support/plan_without.hpp"

namespace fovea::cuda {
namespace {

constexpr const char* kTensorCores = "cuda/sm80/attention_forward";
constexpr const char* kDecode = "cuda/sm90/decode";
constexpr const char* kWide = "cuda/sm80/attention_forward_wide";
constexpr const char* kCdna = "cuda/cdna/attention_forward";
constexpr const char* kLatent = "cuda/sm90/decode_latent";
constexpr const char* kHopper = "cuda/sm90/attention_forward";
constexpr const char* kHopperCpAsync = "cuda/sm90/attention_forward_cp_async";
constexpr const char* kShort = "cuda/sm80/attention_forward_short";
constexpr const char* kHopperShort = "cuda/sm90/attention_forward_short";
constexpr const char* kQuantized = "cuda/sm90/attention_quantized";
constexpr const char* kSm80Quantized = "cuda/sm80/attention_quantized";
constexpr const char* kConverted = "cuda/sm90/attention_converted";
constexpr const char* kCoded = "cuda/sm90/attention_coded";
constexpr const char* kSm80Coded = "cuda/sm80/attention_coded";
constexpr const char* kFp4 = "cuda/sm120/attention_fp4";
constexpr const char* kTensorMemoryFp4 = "cuda/sm100/attention_fp4";
constexpr const char* kPlain = "cuda/sm80/attention_forward_f32";

struct Shape {
  Dtype dtype = Dtype::bf16;
  std::int64_t seqlen_q = 1024, seqlen_kv = 1024, num_heads_q = 8, num_heads_kv = 8;
  std::int64_t head_dim_qk = 128, head_dim_v = 128;
};

TensorSpec spec_of(Dtype dtype, std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
  const std::array<std::int64_t, 4> shape{2, rows, heads, head_dim};
  return make_spec(dtype, shape);
}

Problem problem_of(const Shape& s) {
  Problem p;
  p.q = spec_of(s.dtype, s.seqlen_q, s.num_heads_q, s.head_dim_qk);
  p.k = spec_of(s.dtype, s.seqlen_kv, s.num_heads_kv, s.head_dim_qk);
  p.v = spec_of(s.dtype, s.seqlen_kv, s.num_heads_kv, s.head_dim_v);
  return p;
}

ForwardPlan chosen(const Problem& problem, int major = 8, int minor = 0) {
  return choose_forward(validate(problem, "test"), typical_device(major, minor));
}
ForwardPlan chosen(const Shape& shape, int major = 8, int minor = 0) {
  return chosen(problem_of(shape), major, minor);
}

std::string reason_of(const ForwardPlan& plan, std::string_view candidate) {
  for (const auto& refused : plan.refused) {
    if (refused.candidate == candidate) return refused.reason;
  }
  return "";
}

TEST(ForwardCandidates, SixteenBitInputsGoToTensorCores) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16})
    EXPECT_EQ(chosen({.dtype = dtype}).candidate, kTensorCores);
}

TEST(ForwardCandidates, SinglePrecisionIsRefusedByTensorCoresInWords) {
  const ForwardPlan plan = chosen({.dtype = Dtype::f32});
  EXPECT_EQ(plan.candidate, kPlain);
  EXPECT_EQ(reason_of(plan, kTensorCores), "inputs are f32; expected f16 or bf16");
}

TEST(ForwardCandidates, AmdHasTheKernelThatNeedsNoTensorCores) {
  for (const auto& [gfx, num_warps] :
       {std::pair{0x942, 2}, std::pair{0x950, 2}, std::pair{0x1100, 4}, std::pair{0x1201, 4}}) {
    const DeviceTraits device = typical_amd_device(gfx);
    const ForwardPlan plan =
        choose_forward(validate(problem_of({.dtype = Dtype::f32}), "test"), device);
    EXPECT_EQ(plan.candidate, kPlain);
    EXPECT_EQ(plan.spec->num_warps, num_warps);  // 128 threads, whatever lanes warps have
    EXPECT_EQ(reason_of(plan, kTensorCores),
              fmt::format("this is gfx{:x} of AMD; expected a GPU of NVIDIA", gfx));
    const std::string unit = planned_kernels(plan).front().text.unit;
    EXPECT_NE(unit.find("__launch_bounds__(128) "), std::string::npos) << unit;
  }
  EXPECT_THROW(typical_amd_device(0x906), InvalidArgument);
}

TEST(ForwardCandidates, CdnaMultipliesByItsOwnKernel) {
  const auto chosen_on = [](const DeviceTraits& device, const Shape& shape) {
    return choose_forward(validate(problem_of(shape), "test"), device);
  };
  for (const int gfx : {0x942, 0x950}) {
    const DeviceTraits device = typical_amd_device(gfx);
    const ForwardPlan wide = chosen_on(device, {.head_dim_qk = 128, .head_dim_v = 64});
    EXPECT_EQ(wide.candidate, kCdna);
    EXPECT_EQ(wide.spec.as<CdnaForwardSpec>().gfx, gfx);
    EXPECT_EQ(wide.spec->tile_kv, 64);
    // Two waves of a SIMD, which LLVM must leave registers for.
    const std::string unit = planned_kernels(wide).front().text.unit;
    EXPECT_NE(unit.find("__launch_bounds__(256, 2) "), std::string::npos) << unit;
    // Two workgroups share LDS.
    EXPECT_LE(2 * wide.shared_bytes, static_cast<std::size_t>(device.shared_bytes_per_sm));
    EXPECT_EQ(chosen_on(device, {.head_dim_qk = 64, .head_dim_v = 64}).spec->tile_kv, 128);
    Problem dropped = problem_of({.head_dim_qk = 64, .head_dim_v = 128});
    dropped.dropout.p = 0.25F;
    EXPECT_EQ(choose_forward(validate(dropped, "test"), device).spec->tile_kv,
              gfx == 0x950 ? 64 : 32);
    const ForwardPlan padded = chosen_on(device, {.head_dim_qk = 72, .head_dim_v = 40});
    EXPECT_EQ(padded.candidate, kCdna);
    EXPECT_TRUE(padded.spec->has_padded_head_dim);
    EXPECT_EQ(padded.spec->head_dim_qk, 128);
    EXPECT_EQ(padded.spec->head_dim_v, 64);
    EXPECT_EQ(padded.spec->stages, gfx == 0x950 ? 2 : 1);
    const Shape latent{.head_dim_qk = 192, .head_dim_v = 128};
    EXPECT_EQ(chosen_on(device, latent).spec->head_dim_qk, 256);
    Problem beside = problem_of(latent);
    beside.dropout.p = 0.25F;
    const ForwardPlan held = choose_forward(validate(beside, "test"), device);
    EXPECT_EQ(held.candidate, gfx == 0x950 ? kCdna : kPlain);
    if (gfx == 0x942) {
      EXPECT_EQ(reason_of(held, kCdna),
                "head_dim_qk is 192 beside a score program, dropout or pages; expected at most 128 "
                "on gfx942");
    }
    for (const std::int64_t refused : {100, 136}) {
      const ForwardPlan other = chosen_on(device, {.head_dim_qk = 128, .head_dim_v = refused});
      EXPECT_EQ(other.candidate, kPlain);
      EXPECT_EQ(reason_of(other, kCdna),
                fmt::format("head_dim_v is {}; expected a multiple of 8 of "
                            "at most 128",
                            refused));
    }
    EXPECT_EQ(reason_of(chosen_on(device, {.dtype = Dtype::f32}), kCdna),
              "inputs are f32; expected f16 or bf16");
  }
  EXPECT_EQ(reason_of(chosen_on(typical_amd_device(0x1100), {}), kCdna),
            "this is gfx1100; expected gfx942 or gfx950");
  EXPECT_EQ(reason_of(chosen({.dtype = Dtype::f32}), kCdna),
            "this is a GPU of NVIDIA; expected one of AMD");
}

/// What a plan cannot know: where tensors begin, and how far apart their rows are.
TEST(ForwardCandidates, CdnaReadsAlignedRowsOfTilesThatABufferHolds) {
  const auto reads = [](std::uintptr_t address, std::int64_t row_stride) {
    const auto tensor = [&](std::int64_t stride) {
      TensorSpec spec = spec_of(Dtype::bf16, 2, 1, 64);
      spec.strides = {2 * stride, stride, 64, 1};
      return TensorView(reinterpret_cast<void*>(address), spec);
    };
    return CdnaForward::reads(
        {.q = tensor(64), .k = tensor(row_stride), .v = tensor(64), .out = tensor(64)}, nullptr);
  };
  EXPECT_TRUE(reads(4096, 64));
  EXPECT_TRUE(reads(4096, 0));
  EXPECT_FALSE(reads(4104, 64));
  EXPECT_TRUE(reads(4096, (1 << 23) - 128));
  EXPECT_FALSE(reads(4096, 1 << 23));
  EXPECT_FALSE(reads(4096, -64));
}

TEST(ForwardCandidates, AmdHasNoRegistersForWideValues) {
  Shape latent{.dtype = Dtype::f32, .head_dim_qk = 576, .head_dim_v = 256};
  const DeviceTraits device = typical_amd_device(0x942);
  const ForwardPlan plan = choose_forward(validate(problem_of(latent), "test"), device);
  EXPECT_EQ(plan.candidate, kPlain);
  EXPECT_LE(plan.shared_bytes, 64U << 10);
  latent.head_dim_v = 257;
  EXPECT_EQ(reason_of(choose_forward(validate(problem_of(latent), "test"), device), kPlain),
            "head_dim_v is 257; expected at most 256 on GPUs of AMD");
}

TEST(ForwardCandidates, WideHeadsHaveALaunchForEachPartOfTheirValues) {
  const ForwardPlan plan = chosen({.head_dim_qk = 64, .head_dim_v = 264});
  EXPECT_EQ(plan.candidate, kWide);
  EXPECT_EQ(plan.spec->head_dim_v, 160);  // 132, padded
  EXPECT_TRUE(plan.spec->has_padded_head_dim);
  EXPECT_EQ(reason_of(plan, kTensorCores), "head_dim_v is 264; expected at most 256");
  EXPECT_EQ(chosen({.head_dim_qk = 264, .head_dim_v = 64}).spec->head_dim_v, 64);
  // Where no tile fits, by its bytes.
  DeviceTraits small = typical_device(8, 6);
  small.shared_bytes_per_cta = 49152;
  const ForwardPlan refused =
      choose_forward(validate(problem_of({.head_dim_qk = 576, .head_dim_v = 512}), "test"), small);
  EXPECT_EQ(reason_of(refused, kWide),
            "tiles of these head dims take 90232 bytes of shared memory; there are 49152");
}

TEST(ForwardCandidates, LatentHeadsFitEveryDeviceAndWiderOnesAreRefused) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    Shape latent{.dtype = dtype, .seqlen_q = 1, .num_heads_q = 128, .num_heads_kv = 1};
    latent.head_dim_qk = 576;
    latent.head_dim_v = 512;
    for (const auto& [major, minor] : {std::pair{8, 0}, {8, 6}, {9, 0}, {12, 0}}) {
      const ForwardPlan plan = chosen(latent, major, minor);
      EXPECT_EQ(plan.candidate, dtype == Dtype::f32 ? kPlain : kWide);
      EXPECT_TRUE(plan.spec->is_split);
      EXPECT_LE(plan.shared_bytes,
                static_cast<std::size_t>(typical_device(major, minor).shared_bytes_per_cta));
    }
    latent.head_dim_v = 577;
    EXPECT_EQ(reason_of(chosen(latent), kPlain), "head_dim_v is 577; expected at most 576");
  }
}

/// Keys and values of a latent cache, decoded by so many heads.
ForwardProblem latent_problem(const CacheLayout& cache, std::int64_t num_heads = 128) {
  Shape latent{.seqlen_q = 1, .seqlen_kv = 8192, .num_heads_q = num_heads, .num_heads_kv = 1};
  latent.head_dim_qk = 576;
  latent.head_dim_v = 512;
  ForwardProblem f = validate(problem_of(latent), "test");
  f.is_cached = true;
  f.is_paged = cache.page_size > 0;
  f.cache = cache;
  return f;
}

constexpr CacheLayout kLatentPages{
    .page_size = 64, .has_aligned_rows = true, .has_latent_values = true};

TEST(ForwardCandidates, LatentCachesRunOnHoppersOwnKernel) {
  // By rows of a kv head: splits are longer where their states are more.
  for (const auto& [num_heads, heads_per_tile, most_splits] :
       {std::array{1, 1, 32}, {16, 16, 32}, {24, 24, 16}, {64, 64, 8}, {128, 64, 8}, {80, 40, 8}}) {
    const ForwardPlan plan =
        choose_forward(latent_problem(kLatentPages, num_heads), typical_device(9, 0));
    EXPECT_EQ(plan.candidate, kLatent);
    EXPECT_EQ(plan.spec->heads_per_tile, heads_per_tile);
    EXPECT_EQ(plan.spec->most_splits, most_splits);
    EXPECT_EQ(plan.spec->tile_q, 64);
  }
  CacheLayout contiguous = kLatentPages;
  contiguous.page_size = 0;
  EXPECT_EQ(choose_forward(latent_problem(contiguous), typical_device(9, 0)).candidate, kLatent);
}

TEST(ForwardCandidates, LatentCachesThatTmaCannotReadOnceAreMultipliedInParts) {
  const auto reason = [](const ForwardProblem& f, int major = 9) {
    const ForwardPlan plan = choose_forward(f, typical_device(major, 0));
    EXPECT_EQ(plan.candidate, kWide);
    return reason_of(plan, kLatent);
  };
  const auto changed = [](auto&& change) {
    CacheLayout cache = kLatentPages;
    change(cache);
    return latent_problem(cache);
  };
  EXPECT_EQ(reason(changed([](CacheLayout& c) { c.has_latent_values = false; })),
            "v has a memory of its own; expected the view of k's first 512 columns");
  EXPECT_EQ(reason(changed([](CacheLayout& c) { c.page_size = 12; })),
            "page_size is 12; expected a multiple of 8");
  EXPECT_EQ(reason(changed([](CacheLayout& c) { c.has_left_padding = true; })),
            "left_padding is given; then keys of a tile begin inside a page");
  EXPECT_EQ(reason(changed([](CacheLayout& c) { c.has_aligned_rows = false; })),
            "rows of q, out, k or v do not lie at multiples of 16 bytes, as TMA reads them");
  EXPECT_EQ(reason(latent_problem(kLatentPages), 8), "compute capability is 8.0; expected 9.0");
  ForwardProblem dropped = latent_problem(kLatentPages);
  dropped.problem.dropout.p = 0.5F;
  EXPECT_EQ(reason(dropped), "dropout is given; this kernel has none");
  ForwardProblem narrow = latent_problem(kLatentPages);
  narrow.head_dim_qk = 512;
  EXPECT_EQ(reason_of(choose_forward(narrow, typical_device(9, 0)), kLatent),
            "head dims are 512 and 512; expected 576 and 512");
}

/// Without addresses: strides alone say whether v may be k's memory.
TEST(ForwardCandidates, DenseLatentValuesAreKnownByTheirStrides) {
  Shape latent{.seqlen_q = 1, .num_heads_q = 16, .num_heads_kv = 1};
  latent.head_dim_qk = 576;
  latent.head_dim_v = 512;
  Problem problem = problem_of(latent);
  EXPECT_EQ(chosen(problem, 9).candidate, kWide);
  problem.v.strides = problem.k.strides;
  EXPECT_EQ(chosen(problem, 9).candidate, kLatent);
}

/// Queries over a cache of codes.
ForwardProblem coded_problem(const Shape& shape, const CacheLayout& cache,
                             Dtype codes = Dtype::i8) {
  Problem problem = problem_of(shape);
  problem.k.dtype = problem.v.dtype = codes;
  problem.mask = causal();
  return validate_decode_problem(problem, cache, "test");
}

TEST(ForwardCandidates, ChunksOverCodesRunOnHoppersForwardKernel) {
  const auto chosen_for = [](const Shape& shape, std::int64_t page_size = 16,
                             bool has_left_padding = false, bool has_aligned_rows = true) {
    return choose_forward(coded_problem(shape, {.page_size = page_size,
                                                .has_left_padding = has_left_padding,
                                                .has_aligned_rows = has_aligned_rows}),
                          typical_device(9, 0));
  };
  for (const std::int64_t page_size : {0, 1, 11, 16}) {
    const ForwardPlan plan = chosen_for({.seqlen_q = 64, .num_heads_kv = 2}, page_size, true);
    EXPECT_EQ(plan.candidate, kCoded);
    EXPECT_EQ(plan.spec->num_warps, 16);
    EXPECT_LE(plan.shared_bytes,
              static_cast<std::size_t>(typical_device(9, 0).shared_bytes_per_cta));
    ASSERT_NE(plan.unaligned, nullptr) << "codes that begin anywhere are read byte by byte";
    EXPECT_EQ(plan.unaligned->plan().candidate, kSm80Coded);
  }
  const auto reason = [&](const ForwardPlan& plan) {
    EXPECT_EQ(plan.candidate, kSm80Coded);
    return reason_of(plan, kCoded);
  };
  EXPECT_EQ(
      reason(chosen_for({.seqlen_q = 63, .num_heads_kv = 2})),
      "seqlen_q is 63; expected at least 64 beside a cache, fewer leave most of a tile of one "
      "head empty");
  EXPECT_EQ(
      reason(chosen_for({.seqlen_q = 64})),
      "64 rows share a kv head; expected more than 64, fewer leave most of a tile of one head "
      "empty");
  EXPECT_EQ(reason(chosen_for({.head_dim_v = 192})), "head_dim_v is 192; expected at most 128");
  EXPECT_EQ(reason(chosen_for({.head_dim_qk = 72})),
            "head_dim_qk is 72; expected a multiple of 16");
  EXPECT_EQ(reason(chosen_for({}, 16, false, false)),
            "rows of q, out, k or v do not lie at multiples of 16 bytes");
  EXPECT_EQ(reason_of(chosen_for({.dtype = Dtype::f32}), kCoded), "q is f32; expected f16 or bf16");
  EXPECT_EQ(reason(choose_forward(coded_problem({}, {.has_aligned_rows = true}, Dtype::e4m3),
                                  typical_device(10, 0))),
            "compute capability is 10.0; expected 9.0");
}

/// Where workspace has room for the numbers of all codes, 8 KB for a row of both sequences here.
TEST(ForwardCandidates, CodesBecomeNumbersBeforeAttentionWhereThereIsRoom) {
  const auto plan_for = [](const Shape& shape, bool has_left_padding = false) {
    return choose_forward(coded_problem(shape, {.page_size = 16,
                                                .has_left_padding = has_left_padding,
                                                .has_aligned_rows = true}),
                          typical_device(9, 0));
  };
  const ForwardPlan plan = plan_for({});
  EXPECT_EQ(plan.candidate, kConverted);
  EXPECT_EQ(plan.spec, choose_forward(coded_problem({}, {.has_aligned_rows = true}, Dtype::bf16),
                                      typical_device(9, 0))
                           .spec)
      << "what 16 bits run";
  const PlannedKernels kernels = planned_kernels(plan);
  EXPECT_EQ(std::ranges::count(kernels, KernelRole::numbers, &PlannedKernel::role), 1);
  const PlannedKernels unaligned = planned_unaligned_kernels(plan);
  EXPECT_FALSE(unaligned.empty());
  EXPECT_EQ(std::ranges::count(unaligned, KernelRole::numbers, &PlannedKernel::role), 0)
      << "whose kernel reads codes";
  EXPECT_GE(plan.workspace_bytes, std::size_t{2 * 2} * 2 * 1024 * 8 * 128);
  EXPECT_EQ(reason_of(plan_for({}, true), kConverted),
            "left_padding is given; numbers of a sequence begin where its memory does");
  ForwardProblem windowed = coded_problem({}, {.has_aligned_rows = true});
  windowed.problem.mask = window(100, 0);
  EXPECT_EQ(reason_of(choose_forward(windowed, typical_device(9, 0)), kConverted),
            "the mask may hide most keys, of which numbers would be made all the same; expected "
            "none, or causal");
  const ForwardPlan longest = plan_for({.seqlen_kv = 1 << 17});
  EXPECT_EQ(longest.candidate, kConverted);
  const ForwardPlan longer = plan_for({.seqlen_kv = (1 << 17) + 1});
  EXPECT_EQ(longer.candidate, kCoded);
  EXPECT_EQ(reason_of(longer, kConverted),
            "numbers of all codes take 1073750016 bytes of workspace, as long as sequences may be; "
            "expected at most 1073741824");
}

/// Whatever the cache holds, K and V are rounded anew, into workspace: two bytes for a key's pair of columns in `fast`.
TEST(ForwardCandidates, RecipesRoundWhatCachesHold) {
  const auto plan_for = [](const char* recipe, const Shape& shape, const CacheLayout& cache,
                           Dtype codes = Dtype::i8, int major = 9) {
    ForwardProblem f = coded_problem(shape, cache, codes);
    f.problem.quant = parse_quantization(recipe);
    return choose_forward(f, typical_device(major, 0));
  };
  const CacheLayout pages{.page_size = 11, .has_left_padding = true, .has_aligned_rows = true};
  for (const Dtype codes : {Dtype::i8, Dtype::e4m3, Dtype::bf16}) {
    const ForwardPlan plan = plan_for("fast", {}, pages, codes);
    EXPECT_EQ(plan.candidate, kQuantized) << name(codes);
    const PlannedKernels kernels = planned_kernels(plan);
    EXPECT_EQ(std::ranges::count(kernels, KernelRole::quantize, &PlannedKernel::role), 1);
    EXPECT_EQ(std::ranges::count(kernels, KernelRole::numbers, &PlannedKernel::role), 0);
    EXPECT_GE(plan.workspace_bytes, std::size_t{2} * 2 * 1024 * 8 * 128);
    EXPECT_LT(plan.workspace_bytes, std::size_t{2} * 2 * 1024 * 8 * 128 * 11 / 10);
  }
  // V stays in 16 bits, and goes to workspace with K.
  EXPECT_GE(plan_for("accurate", {}, pages).workspace_bytes, std::size_t{2} * 3 * 1024 * 8 * 128);
  const auto reason = [&](const Shape& shape, const CacheLayout& cache, Dtype codes = Dtype::i8) {
    return reason_of(plan_for("fast", shape, cache, codes), kQuantized);
  };
  EXPECT_EQ(reason({.seqlen_q = 1}, pages),
            "1 rows share a kv head; expected more than 64, fewer leave most of a tile of one head "
            "empty");
  EXPECT_EQ(reason({.head_dim_qk = 68}, pages), "head_dim_qk is 68; expected a multiple of 8");
  EXPECT_EQ(reason({}, pages, Dtype::f16), "k is f16 and q is bf16; expected that, or codes");
  EXPECT_EQ(reason({}, {.page_size = 16}),
            "rows of q, out, k or v do not lie at multiples of 16 bytes, as TMA reads them");
  EXPECT_EQ(reason({.seqlen_kv = 1 << 20}, pages),
            "rounded keys and values take 4299694336 bytes of workspace, as long as sequences may "
            "be; expected at most 4294967296");
  const ForwardPlan elsewhere = plan_for("fast", {}, pages, Dtype::i8, 10);
  EXPECT_EQ(elsewhere.candidate, "");
  EXPECT_EQ(reason_of(elsewhere, kSm80Quantized), "keys lie in a cache; expected tensors");
}

TEST(ForwardCandidates, OldDevicesAreRefusedByAll) {
  const ForwardPlan plan = chosen(Shape{}, 7, 0);
  EXPECT_EQ(plan.candidate, "");
  EXPECT_EQ(reason_of(plan, kTensorCores), "compute capability is 7.0; expected 7.5 or above");
}

/// Its instructions are in the spec, every tile has one stage and fits 64 KB, those of heads up to 64 twice.
TEST(ForwardCandidates, TuringMultipliesF16ThroughRegisters) {
  for (const std::int64_t head_dim : {8, 64, 72, 128, 192, 256}) {
    for (const std::int64_t rows : {1, 4096}) {
      const ForwardPlan plan = chosen(
          {.dtype = Dtype::f16, .seqlen_q = rows, .head_dim_qk = head_dim, .head_dim_v = head_dim},
          7, 5);
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << ", rows " << rows);
      ASSERT_EQ(plan.candidate, kTensorCores);
      EXPECT_EQ(plan.spec.as<TeamSpec>().instructions, Instructions::sm75);
      EXPECT_EQ(plan.spec->stages, 1);
      EXPECT_LE(plan.shared_bytes, std::size_t{65536});
      EXPECT_EQ(plan.spec->ctas_per_sm, head_dim <= 64 || (rows == 1 && head_dim == 72) ? 2 : 1);
    }
  }
  EXPECT_EQ(chosen({.dtype = Dtype::f16}).spec.as<TeamSpec>().instructions, Instructions::sm80);
}

TEST(ForwardCandidates, TuringHasBf16AndWideHeadsInSinglePrecision) {
  const ForwardPlan plan = chosen({.dtype = Dtype::bf16}, 7, 5);
  EXPECT_EQ(plan.candidate, kPlain);
  EXPECT_EQ(
      reason_of(plan, kTensorCores),
      "inputs are bf16, which tensor cores of compute capability 7.5 do not multiply; expected "
      "f16, or a kernel of f32");
  const ForwardPlan wide = chosen({.dtype = Dtype::f16, .head_dim_v = 264}, 7, 5);
  EXPECT_EQ(wide.candidate, kPlain);
  EXPECT_EQ(reason_of(wide, kWide), "compute capability is 7.5; expected 8.0 or above");
}

TEST(ForwardCandidates, SmsAreLeftFreeByKernelsThatRunACtaOnEach) {
  Problem problem = problem_of({.seqlen_q = 1, .seqlen_kv = 4096, .num_heads_q = 16});
  problem.sm_margin = 131;
  EXPECT_EQ(chosen(problem, 9, 0).candidate, kDecode);
  problem = problem_of(Shape{});
  problem.sm_margin = 131;
  EXPECT_EQ(chosen(problem, 9, 0).candidate, kHopper);
  EXPECT_EQ(chosen(problem, 9, 0).unaligned, nullptr) << "no other kernel leaves them free";
  problem.sm_margin = 132;
  EXPECT_EQ(chosen(problem, 9, 0).candidate, "");
  EXPECT_EQ(reason_of(chosen(problem, 9, 0), kHopper),
            "sm_margin is 132; expected less than the 132 SMs of the device");
  problem.sm_margin = 1;
  const ForwardPlan ampere = chosen(problem, 8, 0);
  EXPECT_EQ(ampere.candidate, "");
  for (const char* kernel : {kTensorCores, kPlain}) {
    EXPECT_EQ(reason_of(ampere, kernel),
              "sm_margin is 1; this kernel has a CTA for each tile and leaves no SM free");
  }
}

Problem with_recipe(const Shape& shape, std::string_view recipe) {
  Problem problem = problem_of(shape);
  problem.quant = parse_quantization(recipe);
  return problem;
}

TEST(ForwardCandidates, RecipesOfEightBitScoresRunOnHopper) {
  for (const std::int64_t head_dim : {32, 64, 72, 128}) {
    const Shape shape{.num_heads_kv = 2, .head_dim_qk = head_dim, .head_dim_v = 64};
    const ForwardPlan plan = chosen(with_recipe(shape, "accurate"), 9, 0);
    EXPECT_EQ(plan.candidate, kQuantized);
    EXPECT_EQ(plan.spec->tile_kv, 128) << "keys that share scales";
    EXPECT_EQ(plan.spec->head_dim_qk, head_dim <= 64 ? 64 : 128);
    EXPECT_GT(plan.workspace_bytes, chosen(shape, 9, 0).workspace_bytes + 2 * 1024 * 10 * head_dim)
        << "codes of q and k";
    EXPECT_EQ(reason_of(plan, kHopper), "quant is accurate; this kernel rounds no operand");
  }
}

TEST(ForwardCandidates, RecipesOfEightBitScoresRunOnEveryTensorCore) {
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 6}, {8, 9}, {10, 0}, {12, 0}}) {
    for (const std::int64_t head_dim : {29, 64, 72, 128}) {
      const Shape shape{.num_heads_kv = 2, .head_dim_qk = head_dim, .head_dim_v = 160};
      const ForwardPlan plan = chosen(with_recipe(shape, "accurate"), major, minor);
      EXPECT_EQ(plan.candidate, kSm80Quantized);
      EXPECT_EQ(128 % plan.spec->tile_kv, 0) << "keys of a tile share scales";
      EXPECT_EQ(plan.spec->head_dim_qk, head_dim <= 64 ? 32 : 64) << "pairs of codes";
      EXPECT_GT(plan.workspace_bytes, 2 * 1024 * 10 * head_dim) << "codes of q and k";
    }
  }
}

TEST(ForwardCandidates, BlackwellsKernelHasTilesThatFillItsMemory) {
  // Until a GPU has seen it, it is taken by name alone.
  EXPECT_EQ(chosen(Shape{}, 10, 0).candidate, kTensorCores);
  struct Tile {
    Shape shape;
    int head_dim_qk, head_dim_v, groups, stages, polynomial_keys;
    bool is_p_over_s;
  };
  for (const Tile& tile : {Tile{{.head_dim_qk = 40, .head_dim_v = 40}, 64, 64, 2, 4, 6, false},
                           {{.head_dim_qk = 64, .head_dim_v = 64}, 64, 64, 2, 4, 6, false},
                           {{.head_dim_qk = 72, .head_dim_v = 72}, 96, 96, 2, 3, 6, true},
                           {{.head_dim_qk = 96, .head_dim_v = 96}, 96, 96, 2, 3, 6, true},
                           {{}, 128, 128, 2, 2, 4, true},
                           {{.seqlen_q = 128}, 128, 128, 1, 3, 6, false},
                           {{.head_dim_qk = 192}, 192, 128, 1, 2, 6, false},
                           {{.head_dim_qk = 160, .head_dim_v = 160}, 192, 192, 1, 1, 6, false},
                           {{.head_dim_qk = 256, .head_dim_v = 256}, 256, 256, 1, 1, 6, false}}) {
    const ForwardProblem f = validate(problem_of(tile.shape), "test");
    for (const int minor : {0, 3}) {
      const DeviceTraits device = typical_device(10, minor);
      ASSERT_FALSE(Sm100Forward::refuses(f, device));
      const Sm100ForwardSpec spec = Sm100Forward::choose(f, device);
      EXPECT_EQ(spec.head_dim_qk, tile.head_dim_qk);
      EXPECT_EQ(spec.head_dim_v, tile.head_dim_v);
      EXPECT_EQ(sm100_groups(spec), tile.groups);
      EXPECT_EQ(spec.stages, tile.stages);
      EXPECT_EQ(spec.polynomial_keys, minor == 0 ? tile.polynomial_keys : 0)
          << "ex2 of sm_103 suffices";
      EXPECT_LE(Sm100Forward::shared_bytes(spec),
                static_cast<std::size_t>(device.shared_bytes_per_cta));
      EXPECT_LE(sm100_tensor_layout(spec).columns, kSm100Columns);
      EXPECT_EQ(sm100_tensor_layout(spec).is_p_over_s, tile.is_p_over_s);
    }
  }
}

TEST(ForwardCandidates, BlackwellsKernelPacksHeadsOfFewRowsAndSplitsKeys) {
  const Shape shape{.seqlen_q = 3, .seqlen_kv = 8192, .num_heads_q = 8, .num_heads_kv = 1};
  const ForwardProblem f = validate(problem_of(shape), "test");
  const DeviceTraits device = typical_device(10, 0);
  ASSERT_FALSE(Sm100Forward::refuses(f, device));
  const Sm100ForwardSpec spec = Sm100Forward::choose(f, device);
  EXPECT_EQ(sm100_groups(spec), 1);
  EXPECT_EQ(spec.heads_per_tile, 8);
  EXPECT_EQ(spec.tile_kv, 128);
  EXPECT_TRUE(spec.is_split);
  EXPECT_EQ(max_splits(spec, f), 16) << "of 512 keys: 24 rows share them";
}

TEST(ForwardCandidates, BlackwellsKernelRefusesInWords) {
  const auto reason = [](const Shape& shape, int major, int minor) {
    const auto refusal =
        Sm100Forward::refuses(validate(problem_of(shape), "test"), typical_device(major, minor));
    return refusal ? refusal->reason : "";
  };
  EXPECT_EQ(reason({}, 10, 3), "");
  EXPECT_EQ(reason({}, 9, 0), "compute capability is 9.0; expected 10.0 or 10.3");
  EXPECT_EQ(reason({}, 12, 0), "compute capability is 12.0; expected 10.0 or 10.3");
  EXPECT_EQ(reason({.dtype = Dtype::f32}, 10, 0), "inputs are f32; expected f16 or bf16");
  EXPECT_EQ(reason({.head_dim_v = 264}, 10, 0), "head_dim_v is 264; expected at most 256");
  EXPECT_EQ(reason({.seqlen_q = 64, .seqlen_kv = 256}, 10, 0),
            "256 keys are one split and 64 rows share a kv head; expected more");
  EXPECT_EQ(reason({.seqlen_q = 65, .seqlen_kv = 256}, 10, 0), "");
}

TEST(ForwardCandidates, WhatHopperDoesNotRoundFallsBack) {
  // Head dims of v above 128, and where TMA cannot read.
  const Shape wide{.head_dim_qk = 128, .head_dim_v = 160};
  EXPECT_EQ(chosen(with_recipe(wide, "accurate"), 9, 0).candidate, kSm80Quantized);
  const ForwardPlan plan = chosen(with_recipe({}, "accurate"), 9, 0);
  EXPECT_EQ(plan.candidate, kQuantized);
  ASSERT_NE(plan.unaligned, nullptr);
  EXPECT_EQ(plan.unaligned->plan().candidate, kSm80Quantized);
}

TEST(ForwardCandidates, CodesOfProbabilitiesRunOnHopper) {
  const Shape shape{.num_heads_kv = 2, .head_dim_qk = 128, .head_dim_v = 72};
  const ForwardPlan plan = chosen(with_recipe(shape, "fast"), 9, 0);
  EXPECT_EQ(plan.candidate, kQuantized);
  EXPECT_EQ(plan.spec->head_dim_v, 128);
  const auto bytes_of_codes = [&shape](const char* recipe) {
    const ForwardProblem f = validate(with_recipe(shape, recipe), "test");
    const DeviceTraits hopper = typical_device(9, 0);
    return quantized_bytes(quantize_kv_spec(Sm90ForwardQuantized::choose(f, hopper)), f);
  };
  EXPECT_GT(bytes_of_codes("fast"), bytes_of_codes("accurate") + 2 * 1024 * 2 * 128)
      << "codes of v";
}

TEST(ForwardCandidates, CodesOfProbabilitiesRunWhereTensorCoresMultiplyThem) {
  for (const auto& [major, minor] : {std::pair{8, 9}, {10, 0}, {10, 3}, {12, 0}}) {
    for (const std::int64_t head_dim : {29, 64, 128}) {
      const Shape shape{.num_heads_kv = 2, .head_dim_qk = 72, .head_dim_v = head_dim};
      const ForwardPlan plan = chosen(with_recipe(shape, "fast"), major, minor);
      EXPECT_EQ(plan.candidate, kSm80Quantized);
      EXPECT_TRUE(plan.spec.as<TeamSpec>().sums_codes);
      EXPECT_EQ(plan.spec->head_dim_v, head_dim <= 64 ? 64 : 128) << "codes are padded";
      EXPECT_GT(plan.workspace_bytes,
                chosen(with_recipe(shape, "accurate"), major, minor).workspace_bytes)
          << "codes of v";
    }
  }
  const ForwardPlan hopper = chosen(with_recipe({}, "fast"), 9, 0);
  ASSERT_NE(hopper.unaligned, nullptr);
  EXPECT_EQ(hopper.unaligned->plan().candidate, kSm80Quantized);
}

/// Codes depend on the greatest score of 128 or 64 keys, and of all keys before them.
TEST(ForwardCandidates, RoundedExponentialsHaveTilesOfAllKeysTheyDependOn) {
  for (const char* recipe :
       {"sage2", "fp8_static", "fp8_static,p_max=448",
        "sage2,block_q=128,warp_q=32,block_kv=64,v_max=2.25", "sage2,block_kv=64,smooth_k=none"}) {
    for (const auto& [major, minor] : {std::pair{8, 9}, {9, 0}, {12, 0}}) {
      for (const Shape& shape : {Shape{}, Shape{.seqlen_q = 1, .seqlen_kv = 70000},
                                 Shape{.head_dim_qk = 64, .head_dim_v = 64}}) {
        const ForwardPlan plan = chosen(with_recipe(shape, recipe), major, minor);
        ASSERT_EQ(plan.candidate, kSm80Quantized) << recipe << major << minor;
        EXPECT_EQ(plan.spec->tile_kv, parse_quantization(recipe).block_kv);
        EXPECT_EQ(plan.spec->tile_q, 16 * plan.spec->num_warps);
        EXPECT_FALSE(plan.spec->is_split);
        EXPECT_LE(plan.spec->num_warps * plan.spec->ctas_per_sm, 8) << "registers of an SM";
      }
    }
  }
  const auto reason = [](const Shape& shape, std::string_view recipe, int minor = 9) {
    return reason_of(chosen(with_recipe(shape, recipe), 8, minor), kSm80Quantized);
  };
  EXPECT_EQ(
      reason({}, "sage2", 6),
      "quant.pv is e4m3 and compute capability 8.6; expected 8.9 or above, whose tensor cores "
      "multiply e4m3");
  EXPECT_EQ(reason({}, "sage2,block_q=96,warp_q=48"),
            "quant.warp_q is 48; expected a divisor of 128, rows of a tile");
  EXPECT_EQ(reason({}, "sage2,block_q=256,q_scales=block"),
            "quant.block_q is 256; expected a divisor of 128, rows of a tile");
  EXPECT_EQ(reason({}, "sage2,block_kv=32"), "quant.block_kv is 32; expected 64 or 128");
  EXPECT_EQ(reason({}, "sage2,k_scales=tensor"),
            "quant.k_scales is tensor; expected block or thread");
  EXPECT_EQ(reason({}, "sage2,q_scales=tensor"),
            "quant.q_scales is tensor; expected block, warp, thread or token");
  EXPECT_EQ(reason({}, "sage2,row_sums=codes"), "quant.row_sums is codes; expected exact");
  EXPECT_EQ(reason({}, "fp8_static,scales=measured"), "quant.qk is e4m3; expected int8");
  EXPECT_EQ(reason({}, "fp8_static,p_step=1,p_max=128"), "quant.p_step is 1; expected 0");
  EXPECT_EQ(reason({.head_dim_v = 160}, "fp8_static"),
            "head_dim_v is 160 beside quant.pv e4m3; expected at most 128");
}

/// P and V in f16 are those of inputs in f16.
TEST(ForwardCandidates, HalvesAreMultipliedWhereInputsAreHalves) {
  const Shape half{.dtype = Dtype::f16};
  for (const char* recipe : {"sage1", "sage1,q_scales=warp", "sage1,smooth_k=none",
                             "sage1,q_scales=thread,k_scales=thread,block_kv=128,row_sums=exact"}) {
    for (const int major : {8, 9, 12}) {
      const ForwardPlan plan = chosen(with_recipe(half, recipe), major, 0);
      ASSERT_EQ(plan.candidate, kSm80Quantized) << recipe << major;
      EXPECT_LE(plan.spec->tile_kv, parse_quantization(recipe).block_kv) << "keys share scales";
      EXPECT_FALSE(plan.spec.as<TeamSpec>().sums_codes);
    }
  }
  const auto reason = [](const Shape& shape, std::string_view recipe) {
    return reason_of(chosen(with_recipe(shape, recipe), 8, 0), kSm80Quantized);
  };
  EXPECT_EQ(reason({}, "sage1"),
            "quant.pv is f16 and v is bf16; expected v of f16, which is multiplied as it is");
  EXPECT_EQ(reason(half, "sage1,p_max=2"), "quant.p_max is 2; expected 1");
  EXPECT_EQ(
      reason(half, "int8"),
      "quant.pv is int8, which is for CPUs; expected none, f16 or e4m3: accurate has the same "
      "error on GPUs");
}

/// Hopper's kernel rotates rows of q itself; sm_80's reads codes, whatever was done to them before.
TEST(ForwardCandidates, RowsAreRotatedWhereverTheyAreRounded) {
  const Shape narrow{.head_dim_qk = 40, .head_dim_v = 64};
  for (const auto& [shape, recipe] :
       {std::pair{Shape{}, "accurate,hadamard=yes"}, {narrow, "fast,hadamard=yes"}}) {
    const ForwardPlan plan = chosen(with_recipe(shape, recipe), 9, 0);
    ASSERT_EQ(plan.candidate, kQuantized) << recipe;
    EXPECT_TRUE(plan.spec.as<Sm90ForwardSpec>().rotates);
  }
  const ForwardPlan wide = chosen(with_recipe({}, "fast,hadamard=yes"), 9, 0);
  EXPECT_EQ(wide.candidate, kSm80Quantized);
  EXPECT_EQ(reason_of(wide, kQuantized),
            "quant.hadamard beside quant.pv e4m3 and a head dim of 128; expected at most 64, whose "
            "rows leave registers for sums");
  EXPECT_FALSE(chosen(with_recipe({}, "accurate"), 9, 0).spec.as<Sm90ForwardSpec>().rotates);
  for (const std::string recipe : {"accurate", "fast", "sage2", "fp8_static"}) {
    const ForwardPlan plain = chosen(with_recipe({}, recipe), 8, 9);
    const ForwardPlan rotated = chosen(with_recipe({}, recipe + ",hadamard=yes"), 8, 9);
    ASSERT_EQ(rotated.candidate, kSm80Quantized) << recipe;
    EXPECT_EQ(rotated.spec.as<TeamSpec>(), plain.spec.as<TeamSpec>()) << "one kernel for both";
    const PlannedKernels kernels = planned_kernels(rotated);
    EXPECT_TRUE(std::ranges::any_of(kernels, [](const PlannedKernel& kernel) {
      return kernel.role == KernelRole::quantize &&
             kernel.text.unit.find("s.rotates = true") != std::string::npos;
    }));
  }
}

/// What V is rounded to makes no difference, nor whether it is.
TEST(ForwardCandidates, MeansOfValuesAreTakenOffWhereverValuesAreWrittenAnew) {
  const char* fast = "fast,smooth_v=sequence";
  EXPECT_TRUE(chosen(with_recipe({}, fast), 9, 0).spec.as<Sm90ForwardSpec>().smooths_v);
  EXPECT_FALSE(chosen(with_recipe({}, "fast"), 9, 0).spec.as<Sm90ForwardSpec>().smooths_v);
  const Shape half{.dtype = Dtype::f16, .head_dim_v = 72};
  for (const auto& [shape, recipe] : {std::pair{Shape{}, fast},
                                      {Shape{}, "sage2,smooth_v=sequence"},
                                      {half, "sage1,smooth_v=sequence"}}) {
    const ForwardPlan plan = chosen(with_recipe(shape, recipe), 8, 9);
    ASSERT_EQ(plan.candidate, kSm80Quantized) << recipe;
    EXPECT_TRUE(plan.spec.as<TeamSpec>().smooths_v);
    EXPECT_EQ(plan.spec->head_dim_v, 128) << "what is written anew is padded";
  }
  const auto reason = [](const Problem& problem) {
    return reason_of(chosen(problem, 8, 9), kSm80Quantized);
  };
  EXPECT_EQ(reason(with_recipe({}, "fp8_static,smooth_v=sequence")),
            "quant.smooth_v is sequence; expected none");
  EXPECT_EQ(
      reason(with_recipe({.dtype = Dtype::f16, .head_dim_v = 160}, "sage1,smooth_v=sequence")),
      "head_dim_v is 160 beside quant.smooth_v, which writes them anew; expected at most 128");
  Problem dropped = with_recipe({}, "sage2,smooth_v=sequence");
  dropped.dropout.p = 0.1F;
  EXPECT_EQ(reason(dropped),
            "dropout beside quant.smooth_v, whose mean comes back times a sum of which nothing is "
            "dropped");
}

/// q, k and v that are codes run where tensor cores multiply them, whatever out is.
TEST(ForwardCandidates, CodesRunByTheKernelOfTheirRecipe) {
  Problem problem = with_recipe({.dtype = Dtype::e4m3, .num_heads_kv = 2}, "fp8_static");
  for (const Dtype out : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
    problem.out = problem.q;
    problem.out.dtype = out;
    for (const auto& [major, minor] : {std::pair{8, 9}, {9, 0}, {12, 0}}) {
      const ForwardPlan plan = chosen(problem, major, minor);
      ASSERT_EQ(plan.candidate, kSm80Quantized) << major;
      EXPECT_TRUE(plan.spec.as<TeamSpec>().takes_codes);
    }
  }
  EXPECT_NE(reason_of(chosen(problem, 8, 0), kSm80Quantized).find("expected 8.9 or above"),
            std::string::npos);
}

TEST(ForwardCandidates, FourBitsRunWhereWarpsMultiplyThem) {
  for (const char* recipe : {"nvfp4", "mxfp4"}) {
    for (const int minor : {0, 1}) {
      const Shape shape{.num_heads_kv = 2, .head_dim_qk = 29, .head_dim_v = 72};
      const ForwardPlan plan = chosen(with_recipe(shape, recipe), 12, minor);
      EXPECT_EQ(plan.candidate, kFp4);
      EXPECT_EQ(plan.spec.as<Fp4ForwardSpec>().group, recipe == std::string("nvfp4") ? 16 : 32);
      EXPECT_EQ(plan.spec->head_dim_qk, 64) << "codes are padded";
      EXPECT_EQ(plan.spec->head_dim_v, 128);
      EXPECT_EQ(plan.spec->tile_q, 128) << "128 tiles of 84 SMs";
    }
  }
  EXPECT_EQ(chosen(with_recipe({.seqlen_q = 128}, "nvfp4"), 12, 0).spec->tile_q, 64);
  const auto reason = [](Problem problem, int major = 12) {
    const ForwardPlan plan = chosen(problem, major, 0);
    EXPECT_EQ(plan.candidate, "");
    return reason_of(plan, kFp4);
  };
  EXPECT_EQ(reason(with_recipe({}, "mxfp4"), 9),
            "quant.qk is e2m1 and compute capability 9.0; expected 12.0 or 12.1, whose warps "
            "multiply four bits");
  EXPECT_EQ(reason(with_recipe({}, "nvfp4,hadamard=yes")), "quant.hadamard is yes; expected no");
  EXPECT_EQ(reason(with_recipe({}, "mxfp4,p_max=2688")), "quant.p_max is 2688; expected 6");
  EXPECT_EQ(reason(with_recipe({.head_dim_v = 136}, "nvfp4")),
            "head_dim_v is 136; expected at most 128");
  EXPECT_EQ(reason(with_recipe({.dtype = Dtype::f32}, "nvfp4")),
            "inputs are f32; expected f16 or bf16");
  Problem dropped = with_recipe({}, "nvfp4");
  dropped.dropout.p = 0.1F;
  EXPECT_EQ(reason(dropped),
            "dropout beside quant.pv e2m1, whose probabilities are multiplied in groups");
}

TEST(ForwardCandidates, FourBitsRunWhereTensorMemoryHasTheirScales) {
  for (const char* recipe : {"nvfp4", "mxfp4"}) {
    for (const int minor : {0, 3}) {
      const Shape shape{.num_heads_kv = 2, .head_dim_qk = 29, .head_dim_v = 72};
      const ForwardPlan plan = chosen(with_recipe(shape, recipe), 10, minor);
      EXPECT_EQ(plan.candidate, kTensorMemoryFp4);
      const auto& spec = plan.spec.as<Sm100Fp4Spec>();
      EXPECT_EQ(spec.scale_group, recipe == std::string("nvfp4") ? 16 : 32);
      EXPECT_EQ(spec.head_dim_qk, 64) << "codes are padded";
      EXPECT_EQ(spec.head_dim_v, 128);
      EXPECT_EQ(spec.tile_q, 256) << "two groups";
      EXPECT_LE(sm100_tensor_layout(spec).columns, kSm100Columns);
    }
  }
  EXPECT_EQ(chosen(with_recipe({.seqlen_q = 128}, "nvfp4"), 10, 0).spec->tile_q, 128);
  const auto reason = [](Problem problem, int major = 10) {
    const ForwardPlan plan = chosen(problem, major, 0);
    EXPECT_EQ(plan.candidate, "");
    return reason_of(plan, kTensorMemoryFp4);
  };
  EXPECT_EQ(reason(with_recipe({}, "nvfp4"), 9),
            "quant.qk is e2m1 and compute capability 9.0; expected 10.0 or 10.3, whose tensor "
            "memory has scales");
  EXPECT_EQ(reason(with_recipe({}, "nvfp4,hadamard=yes")), "quant.hadamard is yes; expected no");
  EXPECT_EQ(reason(with_recipe({.head_dim_v = 136}, "mxfp4")),
            "head_dim_v is 136; expected at most 128");
  Problem dropped = with_recipe({}, "nvfp4");
  dropped.dropout.p = 0.1F;
  EXPECT_EQ(reason(dropped),
            "dropout beside quant.pv e2m1, whose probabilities are multiplied in groups");
}

TEST(ForwardCandidates, OtherRecipesAreRefusedByTheirField) {
  const auto reason = [](const Shape& shape, std::string_view recipe, int major = 9) {
    const ForwardPlan plan = chosen(with_recipe(shape, recipe), major, 0);
    EXPECT_EQ(plan.candidate, "") << recipe;
    EXPECT_EQ(plan.refused.size(), forward_candidates().size());
    return reason_of(plan, kQuantized);
  };
  EXPECT_EQ(reason({}, "sage1"), "quant.pv is f16; expected none or e4m3");
  EXPECT_EQ(reason({}, "fast,p_step=0"), "quant.p_step is 0; expected 1");
  EXPECT_EQ(reason({}, "fast,v_scales=tensor"), "quant.v_scales is tensor; expected block");
  EXPECT_EQ(reason({}, "fast,row_sums=exact"), "quant.row_sums is exact; expected codes");
  EXPECT_EQ(reason({}, "fp8_static,scales=measured"), "quant.qk is e4m3; expected int8");
  EXPECT_EQ(reason({}, "nvfp4"), "quant.pv is e2m1; expected none or e4m3");
  EXPECT_EQ(reason({}, "accurate,k_scales=token"), "quant.k_scales is token; expected thread");
  EXPECT_EQ(reason_of(chosen(with_recipe({}, "accurate,block_kv=64"), 9, 0), kQuantized),
            "quant.block_kv is 64; expected 128");
  EXPECT_EQ(reason({.head_dim_qk = 192, .head_dim_v = 128}, "accurate"),
            "head_dim_qk is 192; expected at most 128");
  EXPECT_EQ(reason({.dtype = Dtype::f32}, "accurate"), "inputs are f32; expected f16 or bf16");
  EXPECT_EQ(reason({}, "fast", 8), "compute capability is 8.0; expected 9.0");
  const auto on_ampere = [](const Shape& shape, std::string_view recipe) {
    return reason_of(chosen(with_recipe(shape, recipe), 8, 0), kSm80Quantized);
  };
  EXPECT_EQ(
      on_ampere({}, "fast"),
      "quant.pv is e4m3 and compute capability 8.0; expected 8.9 or above, whose tensor cores "
      "multiply e4m3");
  EXPECT_EQ(on_ampere({.head_dim_qk = 136, .head_dim_v = 64}, "accurate"),
            "head_dim_qk is 136; expected at most 128");
  EXPECT_EQ(on_ampere({.dtype = Dtype::f32}, "accurate"), "inputs are f32; expected f16 or bf16");
  EXPECT_EQ(reason_of(chosen(Shape{.dtype = Dtype::f32, .head_dim_qk = 700}, 9, 0), kQuantized),
            "quant is none; this kernel multiplies codes of eight bits");
}

TEST(ForwardCandidates, CodesOfProbabilitiesAreThoseOfProgramsToo) {
  Problem scored = with_recipe({}, "fast");
  scored.score = softcap(30);
  Problem negative = with_recipe({}, "fast");
  negative.softmax_scale = -1;
  for (const Problem& problem : {scored, negative}) {
    EXPECT_EQ(chosen(problem, 9, 0).candidate, kQuantized);
    EXPECT_EQ(chosen(problem, 8, 9).candidate, kSm80Quantized);
  }
}

TEST(ForwardCandidates, DropoutOfCodesIsLeftToTheKernelThatSumsRowsApart) {
  Problem dropped = with_recipe({}, "fast");
  dropped.dropout.p = 0.1F;
  const ForwardPlan plan = chosen(dropped, 9, 0);
  EXPECT_EQ(plan.candidate, kSm80Quantized);
  EXPECT_EQ(reason_of(plan, kQuantized),
            "dropout beside quant.pv e4m3, whose row sums are of what is multiplied");
  EXPECT_EQ(chosen(dropped, 8, 9).candidate, kSm80Quantized);
  EXPECT_EQ(reason_of(chosen(with_recipe({.head_dim_v = 160}, "fast"), 8, 9), kSm80Quantized),
            "head_dim_v is 160 beside quant.pv e4m3; expected at most 128");
}

TEST(ForwardCandidates, RecipesOfAnAccuracyAreTakenWhereTheyAreFaster) {
  const auto why = [](Problem problem) {
    return Sm90ForwardQuantized::why_slower(validate(problem, "test"));
  };
  const Shape measured{
      .seqlen_q = 16384, .seqlen_kv = 16384, .head_dim_qk = 128, .head_dim_v = 128};
  const auto differing = [&](auto change) {
    Shape shape = measured;
    change(shape);
    return why(problem_of(shape));
  };
  EXPECT_EQ(why(problem_of(measured)), "");
  EXPECT_EQ(differing([](Shape& s) { s.head_dim_v = 96; }),
            "head dims are 128 and 96; it is faster with more than 96 or, of quant.pv e4m3 without "
            "mask and score program, with 64");
  EXPECT_EQ(differing([](Shape& s) { s.seqlen_kv = 8192; }),
            "seqlen_kv is 8192; without a mask it is faster from 16384 on");
  EXPECT_EQ(differing([](Shape& s) { s.seqlen_q = 1; }),
            "seqlen_q is 1; without a mask it is faster from 16384 on");
  Shape shorter = measured;
  shorter.seqlen_q = shorter.seqlen_kv = 4096;
  EXPECT_EQ(why(with_recipe(shorter, "fast")), "");
  shorter.seqlen_q = shorter.seqlen_kv = 2048;
  EXPECT_EQ(why(with_recipe(shorter, "fast")),
            "seqlen_kv is 2048; without a mask it is faster from 4096 on");
  const auto masked = [&](Shape shape, const MaskMod& mask, std::string_view recipe = "fast") {
    Problem problem = with_recipe(shape, recipe);
    problem.mask = mask;
    return why(problem);
  };
  EXPECT_EQ(masked(measured, causal()), "");
  EXPECT_EQ(masked(measured, causal(Align::top_left), "accurate"), "");
  shorter.seqlen_q = shorter.seqlen_kv = 4096;
  EXPECT_EQ(masked(shorter, causal()), "seqlen_kv is 4096; causal it is faster from 16384 on");
  constexpr const char* kOthers =
      "it is faster with dense tensors, no mask or a causal one of equal lengths, no dropout and "
      "no "
      "score program but, of quant.pv e4m3 without row_max, a cap";
  EXPECT_EQ(masked(measured, window(1024, 0)), kOthers);
  Shape longer = measured;
  longer.seqlen_kv = 32768;
  EXPECT_EQ(masked(longer, causal()), kOthers);
  const auto capped = [&](std::string_view recipe, const auto& change) {
    Problem problem = with_recipe(shorter, recipe);
    problem.score = softcap(30);
    change(problem);
    return why(problem);
  };
  EXPECT_EQ(capped("fast", [](Problem&) {}), "");
  EXPECT_EQ(capped("fast", [](Problem& p) { p.mask = causal(); }), "");
  EXPECT_EQ(capped("accurate", [](Problem&) {}), kOthers);
  EXPECT_EQ(capped("fast", [](Problem& p) { p.wants_row_max = true; }), kOthers);
  EXPECT_EQ(capped("fast", [](Problem& p) { p.score = parse_score_mod("score * 2"); }), kOthers);
  Problem dropped = problem_of(measured);
  dropped.dropout.p = 0.1F;
  EXPECT_EQ(why(dropped), kOthers);
}

TEST(ForwardCandidates, OfNarrowHeadDimsOneIsFasterWhereCodesAreSummed) {
  const Shape measured{.seqlen_q = 16384, .seqlen_kv = 16384, .head_dim_qk = 64, .head_dim_v = 64};
  const auto why = [](const Shape& shape, std::string_view recipe, const auto& change) {
    Problem problem = with_recipe(shape, recipe);
    change(problem);
    return Sm90ForwardQuantized::why_slower(validate(problem, "test"));
  };
  const auto as_it_is = [](Problem&) {};
  const auto differing = [&](auto change) {
    Shape shape = measured;
    change(shape);
    return why(shape, "fast", as_it_is);
  };
  EXPECT_EQ(why(measured, "fast", as_it_is), "");
  EXPECT_EQ(differing([](Shape& s) { s.seqlen_kv = 16383; }),
            "seqlen_kv is 16383; without a mask it is faster from 16384 on");
  EXPECT_EQ(differing([](Shape& s) { s.seqlen_q = 4096; }),
            "seqlen_q is 4096; without a mask it is faster from 16384 on");
  const auto is_narrow = ::testing::StartsWith("head dims are ");
  EXPECT_THAT(differing([](Shape& s) { s.head_dim_qk = 96; }), is_narrow);
  EXPECT_THAT(differing([](Shape& s) { s.head_dim_v = 128; }), is_narrow);
  EXPECT_THAT(differing([](Shape& s) { s.head_dim_qk = s.head_dim_v = 56; }), is_narrow);
  EXPECT_THAT(why(measured, "accurate", as_it_is), is_narrow);
  EXPECT_THAT(why(measured, "fast", [](Problem& p) { p.mask = causal(); }), is_narrow);
  EXPECT_THAT(why(measured, "fast", [](Problem& p) { p.score = softcap(30); }), is_narrow);
  EXPECT_THAT(why(measured, "fast", [](Problem& p) { p.dropout.p = 0.1F; }),
              ::testing::HasSubstr("no dropout"));
}

TEST(ForwardCandidates, EveryTileFitsEveryDevice) {
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 6}, {8, 9}, {12, 0}}) {
    const DeviceTraits device = typical_device(major, minor);
    for (const std::int64_t qk : {1, 32, 64, 96, 128, 192, 256}) {
      for (const std::int64_t v : {1, 64, 128, 256}) {
        for (const std::int64_t rows : {1, 64, 4096}) {
          const ForwardPlan plan =
              chosen({.seqlen_q = rows, .head_dim_qk = qk, .head_dim_v = v}, major, minor);
          EXPECT_LE(plan.shared_bytes, static_cast<std::size_t>(device.shared_bytes_per_cta))
              << major << minor << " " << qk << "/" << v << " rows " << rows;
          EXPECT_GE(plan.spec->ctas_per_sm, 1);
        }
      }
    }
  }
}

TEST(ForwardCandidates, HeadDimsArePaddedToTheSwizzle) {
  const ForwardSpec spec = *chosen({.head_dim_qk = 80, .head_dim_v = 64}).spec;
  EXPECT_EQ(spec.head_dim_qk, 96);
  EXPECT_EQ(spec.head_dim_v, 64);
  EXPECT_TRUE(spec.has_padded_head_dim);
  EXPECT_FALSE(chosen(Shape{}).spec->has_padded_head_dim);
}

TEST(ForwardCandidates, HopperPadsHeadDimsToPanelsOfOneSwizzle) {
  struct Dims {
    std::int64_t seqlen_kv, qk, v;
    std::int32_t tile_qk, tile_v, tile_q;
  };
  for (const Dims& dims : {Dims{4096, 64, 40, 64, 64, 192},
                           {4096, 72, 72, 96, 96, 192},
                           {1024, 72, 72, 128, 128, 128},
                           {4096, 96, 64, 96, 64, 192},
                           {1024, 96, 64, 96, 64, 128},
                           {4096, 104, 72, 128, 128, 128}}) {
    const ForwardSpec spec = *chosen({.seqlen_q = 4096,
                                      .seqlen_kv = dims.seqlen_kv,
                                      .head_dim_qk = dims.qk,
                                      .head_dim_v = dims.v},
                                     9, 0)
                                  .spec;
    EXPECT_EQ(spec.head_dim_qk, dims.tile_qk) << dims.qk;
    EXPECT_EQ(spec.head_dim_v, dims.tile_v) << dims.v;
    EXPECT_EQ(spec.tile_q, dims.tile_q) << dims.qk << " of " << dims.seqlen_kv;
  }
}

TEST(ForwardCandidates, DecodePacksTheHeadsOfAGroupAndSplitsKeys) {
  const ForwardPlan plan =
      chosen({.seqlen_q = 1, .seqlen_kv = 32768, .num_heads_q = 64, .num_heads_kv = 8});
  EXPECT_EQ(plan.spec->heads_per_tile, 8);
  EXPECT_TRUE(plan.spec->is_split);
  // 64 splits of 512 keys; a row of each is 128 sums, lse and row_max.
  EXPECT_EQ(plan.workspace_bytes, 2U * 64 * 64 * 130 * sizeof(float));
}

TEST(ForwardCandidates, PackedHeadsDivideTheGroup) {
  // 65 rows would not fit a tile of 64: of 13 heads with 5 queries each, no divisor but 1 does.
  const ForwardSpec spec = *chosen({.seqlen_q = 5, .num_heads_q = 13, .num_heads_kv = 1}).spec;
  EXPECT_EQ(13 % spec.heads_per_tile, 0);
  EXPECT_LE(spec.heads_per_tile * 5, spec.tile_q);
}

TEST(ForwardCandidates, FewRowsOnHopperAreStreamed) {
  const Shape few{.seqlen_q = 2, .seqlen_kv = 32768, .num_heads_q = 64, .num_heads_kv = 8};
  const ForwardPlan plan = chosen(few, 9, 0);
  EXPECT_EQ(plan.candidate, kDecode);
  EXPECT_EQ(plan.spec->tile_q, 16);
  EXPECT_EQ(plan.spec->heads_per_tile, 8);
  EXPECT_TRUE(plan.spec->is_split && candidate_named(plan.candidate).is_chained);
  EXPECT_EQ(reason_of(chosen(few, 8, 9), kDecode),
            "compute capability is 8.9; expected 9.0, or 10.0 to 10.3");
}

// Bits follow from how keys are split: the room of a cache has no say.
TEST(ForwardCandidates, SplitsOfDecodingAreFewerOfMoreRowsAndKvHeads) {
  for (const auto& [num_heads_kv, group, most_splits] : {std::array{1, 8, 64},
                                                         {2, 16, 64},
                                                         {3, 8, 32},
                                                         {4, 8, 32},
                                                         {5, 8, 16},
                                                         {8, 8, 16},
                                                         {8, 5, 16},
                                                         {8, 4, 64},
                                                         {32, 1, 64},
                                                         {200, 8, 16}}) {
    for (const std::int64_t seqlen_kv : {1025, 32768}) {
      const Shape shape{.seqlen_q = 1,
                        .seqlen_kv = seqlen_kv,
                        .num_heads_q = group * num_heads_kv,
                        .num_heads_kv = num_heads_kv};
      const ForwardPlan plan = chosen(shape, 9, 0);
      EXPECT_EQ(plan.candidate, kDecode);
      EXPECT_EQ(plan.spec->most_splits, most_splits) << num_heads_kv << " heads of " << group;
    }
  }
}

TEST(ForwardCandidates, HeadsShareATileOfHoppersOwnKernelAndKeysAreSplit) {
  Shape shape{.seqlen_q = 4, .seqlen_kv = 5000, .num_heads_q = 42, .num_heads_kv = 6};
  EXPECT_EQ(chosen(shape, 9, 0).candidate, kDecode);
  shape.head_dim_qk = shape.head_dim_v = 192;
  const ForwardPlan plan = chosen(shape, 9, 0);
  EXPECT_EQ(plan.candidate, kHopper);
  EXPECT_EQ(plan.spec->tile_q, 64);
  EXPECT_EQ(plan.spec->heads_per_tile, 7);
  EXPECT_TRUE(plan.spec->is_split && candidate_named(plan.candidate).is_chained);
  EXPECT_LE(plan.shared_bytes, static_cast<std::size_t>(typical_device(9, 0).shared_bytes_per_cta));
}

TEST(ForwardCandidates, HeadsShareNoTileWhereAProgramTellsThemApart) {
  Problem problem = problem_of(
      {.seqlen_q = 4, .num_heads_q = 64, .num_heads_kv = 8, .head_dim_qk = 192, .head_dim_v = 192});
  problem.score = parse_score_mod("score * float(q_head)");
  EXPECT_EQ(reason_of(chosen(problem, 9, 0), kHopper),
            "the score program reads q_head, and heads share a tile of rows");
  problem.score = ScoreMod();
  const std::int32_t ids[1024] = {};
  const std::array<std::int64_t, 1> shape{1024};
  problem.mask = parse_mask_mod(
      "doc[kv_idx] == 0", {.tensors = {{"doc", TensorView(ids, make_spec(Dtype::i32, shape))}}});
  EXPECT_EQ(reason_of(chosen(problem, 9, 0), kHopper),
            "the mask reads tensor doc, and heads share a tile of rows");
  problem = problem_of({.seqlen_q = 33, .head_dim_qk = 192, .head_dim_v = 192});
  problem.score = parse_score_mod("score * float(q_head)");
  EXPECT_EQ(chosen(problem, 9, 0).candidate, kHopper) << "one head a tile";
}

TEST(ForwardCandidates, ManyRowsWideHeadsAndFewKeysAreNotStreamed) {
  Shape shape{.seqlen_q = 9, .num_heads_q = 64, .num_heads_kv = 8};
  EXPECT_EQ(reason_of(chosen(shape, 9, 0), kDecode),
            "72 rows share a kv head; expected at most 64");
  shape.seqlen_q = 3;
  EXPECT_EQ(reason_of(chosen(shape, 10, 0), kDecode),
            "24 rows share a kv head; expected at most 16");
  shape.seqlen_q = 1;
  shape.head_dim_v = 136;
  EXPECT_EQ(reason_of(chosen(shape, 9, 0), kDecode), "head_dim_v is 136; expected at most 128");
  shape.head_dim_v = 128;
  shape.seqlen_kv = 256;
  EXPECT_EQ(reason_of(chosen(shape, 9, 0), kDecode),
            "256 keys are one split; expected more than 256");
  shape.seqlen_kv = std::int64_t{1} << 28;
  EXPECT_EQ(reason_of(chosen(shape, 9, 0), kDecode), "more than 2^28 keys");
  shape = {.seqlen_q = 1, .num_heads_q = std::int64_t{1} << 23, .num_heads_kv = 1 << 23};
  EXPECT_EQ(reason_of(chosen(shape, 9, 0), kDecode),
            "2^30 splits of all sequences and heads, or more");
}

std::string refusal_of_cache(std::int64_t page_size, bool has_left_padding, bool has_aligned_rows) {
  ForwardProblem f =
      validate(problem_of({.seqlen_q = 1, .num_heads_q = 64, .num_heads_kv = 8}), "test");
  f.is_cached = true;
  f.is_paged = page_size > 0;
  f.cache = {.page_size = page_size,
             .has_left_padding = has_left_padding,
             .has_aligned_rows = has_aligned_rows};
  return reason_of(choose_forward(f, typical_device(9, 0)), kDecode);
}

TEST(ForwardCandidates, CachesThatTmaCannotReadBySlicesAreNotStreamed) {
  EXPECT_EQ(refusal_of_cache(24, false, true), "");
  EXPECT_EQ(refusal_of_cache(0, true, true), "");
  EXPECT_EQ(refusal_of_cache(12, false, true), "page_size is 12; expected a multiple of 8");
  EXPECT_EQ(refusal_of_cache(16, true, true),
            "left_padding is given; then keys of a slice begin inside a page");
  EXPECT_EQ(refusal_of_cache(16, false, false),
            "rows of q, out, k or v do not lie at multiples of 16 bytes, as TMA reads them");
}

TEST(ForwardCandidates, SlicesOfDecodingFillSharedMemory) {
  for (const int major : {9, 10}) {
    const DeviceTraits device = typical_device(major, 0);
    for (const std::int64_t head_dim : {16, 64, 128}) {
      SCOPED_TRACE(::testing::Message() << "sm_" << major << "0, head_dim " << head_dim);
      const Shape shape{.seqlen_q = 1, .head_dim_qk = head_dim, .head_dim_v = head_dim};
      const ForwardPlan plan = chosen(shape, major, 0);
      ASSERT_EQ(plan.candidate, kDecode);
      EXPECT_GT(plan.spec->stages, 0);
      const auto& spec = plan.spec.as<Sm90DecodeSpec>();
      EXPECT_EQ(spec.stages * spec.slices_of_box % sm90_decode_readers(spec), 0);
      EXPECT_EQ(spec.stages % sm90_decode_loaders(spec), 0);
      EXPECT_LE(plan.shared_bytes, static_cast<std::size_t>(device.shared_bytes_per_cta));
      const int more = sm90_decode_loaders(spec) * sm90_decode_layout(spec).box_bytes;
      EXPECT_GT(plan.shared_bytes + static_cast<std::size_t>(more) + 8192,
                static_cast<std::size_t>(device.shared_bytes_per_cta));
    }
  }
}

// A warpgroup has 64 rows, whoever of them is there; codes are multiplied by mma.sync.
TEST(ForwardCandidates, MoreRowsThanAWarpsAreMultipliedByWgmma) {
  for (const std::int64_t rows : {17, 32, 33, 64}) {
    for (const std::int64_t head_dim : {64, 128}) {
      Shape shape{.seqlen_q = rows, .num_heads_q = 2, .num_heads_kv = 2};
      shape.head_dim_qk = shape.head_dim_v = head_dim;
      const ForwardPlan plan = chosen(shape, 9, 0);
      ASSERT_EQ(plan.candidate, kDecode) << rows << " rows";
      const auto& spec = plan.spec.as<Sm90DecodeSpec>();
      EXPECT_TRUE(multiplies_by_wgmma(spec));
      EXPECT_EQ(spec.tile_q, 64);
      EXPECT_GE(spec.stages * sm90_decode_layout(spec).box_bytes, 64 << 10) << "boxes under way";
      EXPECT_LE(plan.shared_bytes,
                static_cast<std::size_t>(typical_device(9, 0).shared_bytes_per_cta));
    }
  }
}

TEST(ForwardCandidates, ScalesThatCannotBeFoldedAreAppliedOneByOne) {
  Problem problem = problem_of({});
  EXPECT_FALSE(chosen(problem).spec->is_prescaled);
  problem.softmax_scale = -1.0F;
  EXPECT_TRUE(chosen(problem).spec->is_prescaled);
  problem.softmax_scale = 0.0F;
  EXPECT_TRUE(chosen(problem).spec->is_prescaled);
  problem.softmax_scale.reset();
  problem.score = softcap(20);
  EXPECT_TRUE(chosen(problem).spec->is_prescaled);
}

TEST(ForwardCandidates, ComputeDtypeIsKeptOrRefused) {
  Problem problem = problem_of({});
  problem.compute_dtype = ComputeDtype::bf16;
  EXPECT_EQ(chosen(problem).candidate, kTensorCores);
  problem.compute_dtype = ComputeDtype::f32;
  EXPECT_EQ(chosen(problem).candidate, kPlain);
  EXPECT_EQ(reason_of(chosen(problem), kTensorCores),
            "compute_dtype is f32; this kernel multiplies inputs of 16 bits");
  problem = problem_of({.dtype = Dtype::f16});
  problem.compute_dtype = ComputeDtype::bf16;
  EXPECT_EQ(chosen(problem).candidate, "");
  problem = problem_of({.dtype = Dtype::f32});
  problem.compute_dtype = ComputeDtype::bf16;
  EXPECT_EQ(reason_of(chosen(problem), kPlain),
            "compute_dtype is bf16; this kernel multiplies f32");
}

TEST(ForwardCandidates, KeysInACacheGoToKernelsThatReadIt) {
  ForwardProblem problem = validate(problem_of({}), "test");
  EXPECT_TRUE(choose_forward(problem, typical_device(9, 0)).candidate.starts_with("cuda/sm90/"));
  problem.is_cached = true;
  problem.cache = {.has_aligned_rows = true};
  EXPECT_EQ(choose_forward(problem, typical_device(9, 0)).candidate, kHopper);
  problem.cache = {};
  EXPECT_EQ(choose_forward(problem, typical_device(9, 0)).candidate, kTensorCores) << "unaligned";
}

ForwardProblem paged_problem(const CacheLayout& cache, std::int64_t seqlen_q = 65,
                             std::int64_t num_heads_q = 8) {
  ForwardProblem problem =
      validate(problem_of({.seqlen_q = seqlen_q, .num_heads_q = num_heads_q}), "test");
  problem.is_cached = problem.is_paged = true;
  problem.cache = cache;
  return problem;
}

TEST(ForwardCandidates, PagesOfPowersOfTwoRunOnHoppersOwnKernel) {
  for (const std::int64_t page_size : {8, 16, 32, 64, 128, 256, 4096}) {
    const ForwardPlan plan = choose_forward(
        paged_problem({.page_size = page_size, .has_aligned_rows = true}), typical_device(9, 0));
    EXPECT_EQ(plan.candidate, kHopper) << page_size;
    EXPECT_TRUE(plan.spec->is_paged && plan.spec.as<Sm90ForwardSpec>().is_dynamic);
  }
  const auto reason = [](const ForwardProblem& problem) {
    const ForwardPlan plan = choose_forward(problem, typical_device(9, 0));
    EXPECT_EQ(plan.candidate, kHopperCpAsync);
    return reason_of(plan, kHopper);
  };
  EXPECT_EQ(reason(paged_problem({.page_size = 48, .has_aligned_rows = true})),
            "page_size is 48; expected a power of two from 8 on");
  EXPECT_EQ(reason(paged_problem({.page_size = 4, .has_aligned_rows = true})),
            "page_size is 4; expected a power of two from 8 on");
  EXPECT_EQ(
      reason(paged_problem({.page_size = 16, .has_left_padding = true, .has_aligned_rows = true})),
      "left_padding is given; then keys of a tile begin inside a page");
  const ForwardPlan unaligned =
      choose_forward(paged_problem({.page_size = 16}), typical_device(9, 0));
  EXPECT_EQ(unaligned.candidate, kTensorCores);
  EXPECT_EQ(reason_of(unaligned, kHopper),
            "rows of q, out, k or v do not lie at multiples of 16 bytes, as TMA reads them");
  EXPECT_EQ(
      reason_of(unaligned, kHopperCpAsync),
      "rows of q, out, k or v do not lie at multiples of 16 bytes; by elements mma.sync is faster");
}

TEST(ForwardCandidates, ChunksOfFewQueriesOverACacheGoToSmallerTiles) {
  const ForwardPlan plan = choose_forward(
      paged_problem({.page_size = 16, .has_aligned_rows = true}, 63, 16), typical_device(9, 0));
  EXPECT_EQ(plan.candidate, kTensorCores);
  for (const char* const candidate : {kHopper, kHopperCpAsync}) {
    EXPECT_EQ(reason_of(plan, candidate),
              "seqlen_q is 63; expected at least 64 beside a cache, fewer leave most of a tile of "
              "one head empty");
  }
}

TEST(ForwardCandidates, LeftPaddingOfAContiguousCacheIsReadByTma) {
  Shape shape{.seqlen_q = 5, .seqlen_kv = 5000, .num_heads_q = 42, .num_heads_kv = 6};
  for (const auto& [head_dim, kernel] : {std::pair{128, kDecode}, {192, kHopper}}) {
    shape.head_dim_qk = shape.head_dim_v = head_dim;
    ForwardProblem f = validate(problem_of(shape), "test");
    f.is_cached = true;
    f.cache = {.has_left_padding = true, .has_aligned_rows = true};
    EXPECT_EQ(choose_forward(f, typical_device(9, 0)).candidate, kernel);
  }
}

TEST(ForwardCandidates, LengthsThatKernelsCannotCountAreRefusedByAll) {
  Shape shape;
  shape.seqlen_kv = kMostOfSequence;
  EXPECT_EQ(chosen(shape).candidate, kTensorCores);
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    shape = {.dtype = dtype, .seqlen_kv = kMostOfSequence + 1};
    for (const int major : {8, 9}) {
      const ForwardPlan plan = chosen(shape, major, 0);
      EXPECT_EQ(plan.candidate, "");
      EXPECT_EQ(reason_of(plan, kPlain), "seqlen_kv is 2147418113; expected at most 2147418112");
    }
  }
  EXPECT_EQ(
      reason_of(chosen({.seqlen_q = kMostOfSequence + 1, .num_heads_q = 1, .num_heads_kv = 1}),
                kTensorCores),
      "seqlen_q is 2147418113; expected at most 2147418112");
}

// Rounded up to splits, the last length still fits.
TEST(ForwardCandidates, LongestSequenceCanBeCutIntoSplits) {
  constexpr std::int64_t kInts = std::int64_t{1} << 31;
  for (const std::int64_t most : {16, 32, kMostSplits}) {
    const std::int64_t fewest = fewest_keys_per_split(static_cast<int>(most));
    const std::int64_t even = (kMostOfSequence + most - 1) / most;
    EXPECT_LT((even + fewest) * most, kInts) << most;
  }
}

// 2^25 rows and more with 64 splits each: their numbers would wrap.
TEST(ForwardCandidates, RowsWhoseSplitsCannotBeNumberedAreRefused) {
  Shape shape{.seqlen_q = 16, .seqlen_kv = 257, .num_heads_q = 1 << 19, .num_heads_kv = 1 << 19};
  EXPECT_EQ(chosen(shape).candidate, kTensorCores);
  shape.num_heads_q = shape.num_heads_kv = 1 << 21;
  for (const int major : {8, 9}) {
    EXPECT_EQ(reason_of(chosen(shape, major, 0), kTensorCores),
              "67108864 rows of all heads over more than 256 keys; expected at most 2^31 / 64");
  }
  shape.seqlen_kv = 256;
  EXPECT_EQ(chosen(shape).candidate, kTensorCores) << "not split";
}

TEST(ForwardCandidates, StridesThatTmaDoesNotHaveGoToTheKernelWithoutIt) {
  Problem problem = problem_of({});
  for (TensorSpec* spec : {&problem.k, &problem.v}) spec->strides[0] = (std::int64_t{1} << 39) - 8;
  EXPECT_EQ(chosen(problem, 9, 0).candidate, kHopper);
  problem.k.strides[0] = std::int64_t{1} << 39;
  const ForwardPlan plan = chosen(problem, 9, 0);
  EXPECT_EQ(plan.candidate, kHopperCpAsync);
  EXPECT_EQ(reason_of(plan, kHopper),
            "k has stride 549755813888 in dimension 0; expected less than 2^40 bytes");
}

TEST(ForwardCandidates, LengthsAndWantedLseMakeNoOtherKernel) {
  Problem a = problem_of({.seqlen_q = 1000, .seqlen_kv = 3000});
  Problem b = problem_of({.seqlen_q = 2000, .seqlen_kv = 777});
  b.wants_lse = true;
  b.has_sinks = true;
  EXPECT_EQ(chosen(a).spec, chosen(b).spec);
}

/// Of sm_80's kernel and those behind it: without Hopper's own.
ForwardPlan sm80_short_plan(const Problem& problem) {
  return testing::plan_without({kHopperShort}, validate(problem, "test"), typical_device(9, 0));
}

Shape square(std::int64_t seqlen, std::int64_t head_dim) {
  return {.seqlen_q = seqlen, .seqlen_kv = seqlen, .head_dim_qk = head_dim, .head_dim_v = head_dim};
}

TEST(ForwardCandidates, ShortSequencesOnHopperHaveTilesOfTheirLength) {
  struct Expected {
    std::int64_t seqlen, head_dim;
    std::int32_t tile_q, tile_kv, stages, ctas_per_sm;
  };
  for (const Expected& e : {Expected{49, 64, 64, 64, 1, 5},
                            {77, 64, 80, 80, 1, 3},
                            {112, 64, 112, 112, 1, 2},
                            {128, 64, 128, 64, 2, 2},
                            {257, 32, 96, 96, 3, 3},
                            {288, 32, 96, 96, 3, 3},
                            {77, 72, 80, 80, 1, 3},
                            {77, 128, 80, 80, 1, 2},
                            // 128 rows leave no registers for another CTA.
                            {128, 128, 64, 64, 2, 2}}) {
    SCOPED_TRACE(::testing::Message() << e.seqlen << " tokens, head_dim " << e.head_dim);
    const ForwardPlan plan = sm80_short_plan(problem_of(square(e.seqlen, e.head_dim)));
    ASSERT_EQ(plan.candidate, kShort);
    EXPECT_TRUE(plan.spec.as<TeamSpec>().holds_all_keys);
    EXPECT_EQ(plan.spec->tile_q, e.tile_q);
    EXPECT_EQ(plan.spec->num_warps, e.tile_q / 16);
    EXPECT_EQ(plan.spec->tile_kv, e.tile_kv);
    EXPECT_EQ(plan.spec->stages, e.stages);
    EXPECT_EQ(plan.spec->ctas_per_sm, e.ctas_per_sm);
  }
}

/// A mask that selects tiles of so many queries and keys, of a problem that it leaves long.
Problem selecting(std::int64_t rows, std::int64_t keys, std::int64_t head_dim) {
  Problem problem = problem_of(
      {.seqlen_q = 4096, .seqlen_kv = 4096, .head_dim_qk = head_dim, .head_dim_v = head_dim});
  const TensorSpec table = make_spec(Dtype::boolean, std::array<std::int64_t, 3>{8, 4096, 4096});
  const std::string mask = "sel[q_head, q_idx // " + std::to_string(rows) + ", kv_idx // " +
                           std::to_string(keys) + "] && kv_idx <= q_idx";
  problem.mask = parse_mask_mod(
      mask, {.tensors = {{"sel", TensorView(static_cast<const void*>(nullptr), table)}}});
  return problem;
}

TEST(ForwardCandidates, SelectionsOnHopperHaveTilesThatNoSelectedTileCuts) {
  struct Expected {
    std::int64_t rows, keys, head_dim;
    std::int32_t tile_q, tile_kv, ctas_per_sm, stages;
  };
  for (const Expected& e :
       {Expected{64, 64, 128, 64, 64, 2, 2},
        {64, 64, 64, 64, 64, 3, 2},
        {192, 128, 128, 64, 64, 2, 2},
        {128, 64, 128, 128, 64, 1, 4},
        {32, 32, 128, 64, 32, 2, 4},
        {64, 96, 128, 64, 32, 2, 4},
        {128, 128, 64, 128, 128, 1, 2},
        // The usual tiles: of such pieces already, of others' width, of no piece at all.
        {128, 128, 128, 128, 128, 1, 2},
        {192, 128, 64, 192, 128, 1, 2},
        {64, 64, 192, 128, 96, 1, 2},
        {8, 64, 128, 128, 128, 1, 2},
        {64, 1, 128, 128, 128, 1, 2}}) {
    SCOPED_TRACE(::testing::Message() << e.rows << " x " << e.keys << ", head_dim " << e.head_dim);
    const ForwardPlan plan = chosen(selecting(e.rows, e.keys, e.head_dim), 9, 0);
    ASSERT_EQ(plan.candidate, kHopper);
    EXPECT_EQ(plan.spec->tile_q, e.tile_q);
    EXPECT_EQ(plan.spec->tile_kv, e.tile_kv);
    EXPECT_EQ(plan.spec->ctas_per_sm, e.ctas_per_sm);
    EXPECT_EQ(plan.spec->stages, e.stages);
    EXPECT_EQ(plan.spec->num_warps, 4 + e.tile_q / 16);
    const int of_sm = e.ctas_per_sm * (static_cast<int>(plan.shared_bytes) + kReservedSharedBytes);
    EXPECT_LE(of_sm, typical_device(9, 0).shared_bytes_per_sm);
  }
}

// 50 MB of keys and values of a head, and more; with one CTA on an SM row tiles are claimed as ever.
TEST(ForwardCandidates, SelectionsOfMoreKeysThanTheCacheHoldsComeInWaves) {
  const DeviceTraits device = typical_device(9, 0);
  const auto claims = [&](std::int64_t seqlen_kv, std::int64_t rows) {
    Problem problem = selecting(rows, 64, 128);
    problem.k.shape[1] = problem.v.shape[1] = seqlen_kv;
    const ForwardProblem f = validate(problem, "test");
    const ForwardPlan plan = choose_forward(f, device);
    return claims_of_wave(plan.spec.as<Sm90ForwardSpec>(), f, device, 264);
  };
  const std::int64_t that_fit = device.l2_bytes / (2 * (128 + 128));
  EXPECT_EQ(claims(that_fit, 64), 0);
  EXPECT_EQ(claims(that_fit + 1, 64), 132);
  EXPECT_EQ(claims(that_fit + 1, 128), 0);
}

/// A plan's CTAs fit the registers and the shared memory of an SM, its stages all keys, its tiles all
/// rows.
TEST(ForwardCandidates, ShortSequencesFitTheSm) {
  const DeviceTraits device = typical_device(9, 0);
  for (std::int64_t seqlen = 17; seqlen <= 289; seqlen += 4) {
    for (const std::int64_t head_dim : {1, 32, 64, 72, 96, 128}) {
      for (const std::int64_t group : {1, 3, 8}) {
        Problem problem = problem_of({.seqlen_q = group == 3 ? 20 : seqlen,
                                      .seqlen_kv = seqlen,
                                      .num_heads_q = 2 * group,
                                      .num_heads_kv = 2,
                                      .head_dim_qk = head_dim,
                                      .head_dim_v = head_dim});
        if (seqlen % 8 == 1) problem.mask = causal();
        if (seqlen % 3 == 0) problem.score = softcap(3);
        const ForwardPlan plan = sm80_short_plan(problem);
        if (plan.candidate != kShort) continue;
        const ForwardSpec& spec = *plan.spec;
        SCOPED_TRACE(::testing::Message()
                     << seqlen << " tokens, head_dim " << head_dim << ", group " << group);
        EXPECT_GE(spec.ctas_per_sm, 2);
        EXPECT_LE(spec.ctas_per_sm * (static_cast<int>(plan.shared_bytes) + kReservedSharedBytes),
                  device.shared_bytes_per_sm);
        EXPECT_LE(spec.ctas_per_sm * spec.num_warps, 4 * (512 / 96)) << "of 96 registers at least";
        EXPECT_GE(spec.stages * spec.tile_kv, seqlen);
        EXPECT_LT((spec.stages - 1) * spec.tile_kv, seqlen);
        EXPECT_EQ(group % spec.heads_per_tile, 0);
        if (spec.heads_per_tile > 1) {
          EXPECT_GE(spec.tile_q / spec.heads_per_tile, problem.q.shape[1]);
        }
      }
    }
  }
}

/// Why a kernel refuses, whatever is asked before it.
template <typename Kernel>
std::string refusal_of(const ForwardProblem& problem,
                       const DeviceTraits& device = typical_device(9, 0)) {
  const auto refusal = Kernel::refuses(problem, device);
  return refusal ? refusal->reason : "";
}

TEST(ForwardCandidates, WhatIsNotShortOrNotHoppersIsLeftToOthersInWords) {
  const auto reason = [](const Problem& problem, int major = 9) {
    return refusal_of<Sm80ForwardShort>(validate(problem, "test"), typical_device(major, 0));
  };
  const Shape shape = square(77, 64);
  EXPECT_EQ(reason(problem_of(shape)), "");
  EXPECT_EQ(reason(problem_of(shape), 8), "compute capability is 8.0; expected 9.0");
  Shape other = shape;
  other.seqlen_kv = 129;
  EXPECT_EQ(reason(problem_of(other)), "seqlen_kv is 129; expected at most 128");
  other = shape;
  other.seqlen_q = 129;
  EXPECT_EQ(reason(problem_of(other)), "seqlen_q is 129; expected at most 128");
  other = {.seqlen_q = 289, .seqlen_kv = 77, .head_dim_qk = 32, .head_dim_v = 32};
  EXPECT_EQ(reason(problem_of(other)), "seqlen_q is 289; expected at most 288");
  other = shape;
  other.seqlen_q = 16;
  EXPECT_EQ(reason(problem_of(other)), "16 rows share a kv head; expected at least 17");
  other = shape;
  other.head_dim_v = 136;
  EXPECT_EQ(reason(problem_of(other)), "head_dim_v is 136; expected at most 128");
  DeviceTraits narrow = typical_device(9, 0);
  narrow.shared_bytes_per_sm = 100 << 10;
  const ForwardProblem wide = validate(problem_of({.seqlen_q = 100, .seqlen_kv = 100}), "test");
  EXPECT_EQ(refusal_of<Sm80ForwardShort>(wide, narrow),
            "100 keys of head dims 128 and 128 leave no room for 2 CTAs on an SM");
  Problem margin = problem_of(shape);
  margin.sm_margin = 1;
  EXPECT_EQ(reason(margin),
            "sm_margin is 1; this kernel has a CTA for each tile and leaves no SM free");
  ForwardProblem cached = validate(problem_of(shape), "test");
  cached.is_cached = true;
  cached.cache = {.has_aligned_rows = true};
  EXPECT_EQ(refusal_of<Sm80ForwardShort>(cached), "keys lie in a cache; expected those of a call");
}

/// Of two sequences, all heads their own.
ForwardPlan chosen_for_short(std::int64_t seqlen, std::int64_t head_dim, std::int64_t num_heads,
                             bool is_causal) {
  Shape shape = square(seqlen, head_dim);
  shape.num_heads_q = shape.num_heads_kv = num_heads;
  Problem problem = problem_of(shape);
  if (is_causal) problem.mask = causal();
  return chosen(problem, 9, 0);
}

/// By tiles of rows and keys in equal parts, whose CTAs fit the SM.
TEST(ForwardCandidates, ShortSequencesOnHoppersTensorCoresHaveTilesOfTheirLength) {
  struct Expected {
    std::int64_t seqlen, head_dim;
    bool is_causal;
    std::int32_t tile_q, num_warps, tile_kv, stages, ctas_per_sm;
    std::int64_t num_heads = 128;  // of two sequences
  };
  for (const Expected& e : {Expected{49, 64, false, 64, 4, 64, 1, 5},
                            {77, 64, false, 64, 4, 80, 1, 5},
                            {77, 128, false, 128, 8, 80, 1, 2},
                            {197, 64, false, 64, 4, 208, 1, 3},
                            {197, 64, true, 256, 8, 64, 4, 2},
                            {197, 72, false, 208, 5, 208, 1, 2, 112},
                            {197, 80, false, 208, 5, 208, 1, 2, 96},
                            {197, 80, false, 64, 5, 208, 1, 2, 8},  // few heads, likewise
                            {192, 80, false, 192, 4, 192, 1, 2, 96},
                            {197, 128, false, 256, 8, 112, 2, 1, 64},
                            {256, 128, false, 256, 8, 128, 2, 1, 64},
                            {257, 32, false, 320, 4, 96, 3, 4, 256},
                            {257, 64, false, 320, 8, 64, 5, 2},
                            {257, 80, true, 192, 12, 64, 5, 1, 96},
                            {257, 128, false, 320, 12, 64, 5, 1, 64},
                            {384, 64, true, 384, 8, 64, 6, 2},
                            {384, 64, true, 128, 8, 64, 6, 2, 8},  // few heads: rows for all SMs
                            {384, 72, true, 384, 12, 64, 6, 1, 112},
                            {197, 80, true, 208, 5, 208, 1, 2, 96},
                            {384, 128, true, 384, 8, 64, 6, 1, 64}}) {
    SCOPED_TRACE(::testing::Message() << e.seqlen << " tokens, head_dim " << e.head_dim);
    const ForwardPlan plan = chosen_for_short(e.seqlen, e.head_dim, e.num_heads, e.is_causal);
    ASSERT_EQ(plan.candidate, kHopperShort);
    EXPECT_EQ(plan.spec->tile_q, e.tile_q);
    EXPECT_EQ(plan.spec->num_warps, e.num_warps);
    EXPECT_EQ(plan.spec->tile_kv, e.tile_kv);
    EXPECT_EQ(plan.spec->stages, e.stages);
    EXPECT_EQ(plan.spec->ctas_per_sm, e.ctas_per_sm);
    EXPECT_LE(e.ctas_per_sm * (static_cast<int>(plan.shared_bytes) + kReservedSharedBytes),
              typical_device(9, 0).shared_bytes_per_sm);
  }
}

/// As many buffers of Q as cost no CTA; or one, where a masked CTA of more than 320 rows keeps queries in registers.
TEST(ForwardCandidates, ShortSequencesOnHopperHaveTheirNextQueriesAtHand) {
  struct Expected {
    std::int64_t seqlen, head_dim;
    bool is_causal;
    std::int32_t q_stages;
    bool keeps_queries;
    std::int64_t num_heads = 96;  // of two sequences
  };
  for (const Expected& e : {Expected{197, 80, false, 2, false},
                            {197, 72, true, 2, false, 112},
                            {197, 128, false, 2, false, 64},
                            {320, 64, true, 2, false},
                            {384, 64, true, 1, true},
                            {384, 72, true, 1, true},
                            {384, 128, true, 1, true, 64},
                            {384, 80, true, 1, false}}) {
    SCOPED_TRACE(::testing::Message() << e.seqlen << " tokens, head_dim " << e.head_dim);
    const ForwardPlan plan = chosen_for_short(e.seqlen, e.head_dim, e.num_heads, e.is_causal);
    ASSERT_EQ(plan.candidate, kHopperShort);
    const auto spec = plan.spec.as<Sm90ShortSpec>();
    EXPECT_EQ(spec.q_stages, e.q_stages);
    EXPECT_EQ(spec.keeps_queries, e.keeps_queries);
    EXPECT_EQ(spec.runs_ahead, e.keeps_queries && e.head_dim <= 72);
  }
}

/// Two CTAs of two groups, whose keys pass through two buffers; packed sequences and short ones have another kernel.
TEST(ForwardCandidates, ShortSequencesOnHopperMayHaveKeysInARing) {
  const ForwardPlan plan = chosen_for_short(384, 80, 192, true);
  ASSERT_EQ(plan.candidate, kHopperShort);
  const auto spec = plan.spec.as<Sm90ShortSpec>();
  EXPECT_EQ(std::tuple(spec.kv_buffers, spec.stages, spec.tile_q, spec.ctas_per_sm),
            std::tuple(2, 6, 128, 2));
  EXPECT_EQ(chosen_for_short(320, 80, 192, true).spec.as<Sm90ShortSpec>().kv_buffers, 0);
}

/// What Hopper's own kernel for short sequences leaves to the others.
TEST(ForwardCandidates, ShortSequencesOnHoppersTensorCoresAreRefusedInWords) {
  const auto reason = [](const Problem& problem, int major = 9) {
    return refusal_of<Sm90ForwardShort>(validate(problem, "test"), typical_device(major, 0));
  };
  const auto changed = [](auto&& change) {
    Problem problem = problem_of(square(77, 64));
    change(problem);
    return problem;
  };
  EXPECT_EQ(reason(problem_of(square(77, 64))), "");
  EXPECT_EQ(reason(problem_of(square(77, 64)), 8), "compute capability is 8.0; expected 9.0");
  EXPECT_EQ(reason(problem_of(square(320, 64))), "");
  EXPECT_EQ(reason(problem_of(square(321, 64))), "seqlen_q is 321; expected at most 320");
  EXPECT_EQ(reason(problem_of(square(209, 80))), "seqlen_q is 209; expected at most 208");
  const auto masked = [&](std::int64_t seqlen, std::int64_t head_dim) {
    Problem problem = problem_of(square(seqlen, head_dim));
    problem.mask = causal();
    return reason(problem);
  };
  EXPECT_EQ(masked(384, 64), "");
  EXPECT_EQ(masked(385, 64), "seqlen_q is 385; expected at most 384");
  EXPECT_EQ(masked(384, 72), "");
  EXPECT_EQ(masked(384, 80), "");
  EXPECT_EQ(masked(321, 88), "seqlen_q is 321; expected at most 320");
  Shape few = square(77, 64);
  few.seqlen_q = 16;
  EXPECT_EQ(reason(problem_of(few)), "seqlen_q is 16; expected at least 17");
  EXPECT_EQ(reason(problem_of(square(77, 136))), "head_dim_qk is 136; expected at most 128");
  EXPECT_EQ(reason(problem_of(square(77, 68))), "q has head_dim 68; expected a multiple of 8");
  EXPECT_EQ(reason(changed([](Problem& p) { p.sm_margin = 1; })),
            "sm_margin is 1; this kernel has a CTA for each tile and leaves no SM free");
  EXPECT_EQ(reason(changed([](Problem& p) { p.dropout.p = 0.5F; })),
            "dropout is given; this kernel has none");
  EXPECT_EQ(reason(changed([](Problem& p) { p.out = p.q, p.out.dtype = Dtype::f32; })),
            "out is f32; expected f16 or bf16");
  const std::string no_programs =
      "a score program is given, or the scale is below 1e-30; this kernel has neither";
  EXPECT_EQ(reason(changed([](Problem& p) { p.score = softcap(3); })), no_programs);
  EXPECT_EQ(reason(changed([](Problem& p) { p.softmax_scale = -1.0F; })), no_programs);
  EXPECT_EQ(reason(changed([](Problem& p) { p.mask = causal(); })), "");
  EXPECT_EQ(reason(changed([](Problem& p) { p.mask = parse_mask_mod("kv_idx % 2 == 0"); })),
            "the mask is no range of keys for each row, as causal and window are");
  ForwardProblem cached = validate(problem_of(square(77, 64)), "test");
  cached.is_cached = true;
  cached.cache = {.has_aligned_rows = true};
  EXPECT_EQ(refusal_of<Sm90ForwardShort>(cached), "keys lie in a cache; expected those of a call");
}

Problem packed_problem(std::int64_t rows) {
  Problem p;
  const std::array<std::int64_t, 3> shape{rows, 8, 128};
  p.q = p.k = p.v = make_spec(Dtype::bf16, shape);
  p.num_sequences = 5;
  return p;
}

TEST(ForwardCandidates, PackedSequencesRunOnHoppersOwnKernel) {
  const ForwardPlan plan = chosen(packed_problem(1000), 9, 0);
  EXPECT_EQ(plan.candidate, "cuda/sm90/attention_forward");
  EXPECT_TRUE(plan.spec->is_varlen);
  EXPECT_TRUE(plan.spec.as<Sm90ForwardSpec>().is_dynamic);  // row tiles of unequal length
  // 1000 / 128 tiles, one more for each of 5 sequences and the rows behind them, a word each for 8 heads; a counter.
  EXPECT_EQ(plan.workspace_bytes, 256 * ((256 + 13U * 8 * 4 + 255) / 256));
}

/// Else the bits of a sequence would depend on what is packed beside it.
TEST(ForwardCandidates, PackedSequencesAreShortWhereTheirBoundsSaySo) {
  Problem problem = packed_problem(200);
  for (const char* const candidate : {kShort, kHopperShort}) {
    EXPECT_EQ(reason_of(chosen(problem, 9, 0), candidate),
              "sequences are packed; expected bounds of their lengths, seqlen_q and seqlen_kv");
  }
  problem = packed_problem(5000);
  problem.seqlen_q = problem.seqlen_kv = up_to(77);
  EXPECT_EQ(chosen(problem, 9, 0).candidate, kHopperShort);
  const ForwardPlan plan = sm80_short_plan(problem);
  EXPECT_EQ(plan.candidate, kShort);
  EXPECT_TRUE(plan.spec->is_varlen);
  EXPECT_EQ(plan.spec->tile_kv, 80);
}

TEST(ForwardCandidates, PackedSequencesOfFewRowsShareTiles) {
  Problem few = packed_problem(1000);
  few.seqlen_q = up_to(4);
  const ForwardPlan plan = chosen(few, 9, 0);
  EXPECT_EQ(plan.candidate, kTensorCores);
  EXPECT_EQ(
      reason_of(plan, "cuda/sm90/attention_forward"),
      "sequences are packed and 4 rows share a kv head; expected more than 64, sequences of a "
      "batch, or keys in a cache");
}

TEST(ForwardCandidates, PackedQueriesOfFewRowsOverACacheShareTilesOnHopper) {
  Problem problem = packed_problem(100);
  problem.k = problem.v = make_spec(Dtype::bf16, std::array<std::int64_t, 3>{4096, 2, 128});
  problem.seqlen_q = up_to(16);  // of four heads: 64 rows
  problem.seqlen_kv = up_to(32768);
  ForwardProblem f = validate(problem, "test");
  f.is_cached = f.is_paged = true;
  f.cache = {.page_size = 16, .has_aligned_rows = true};
  const ForwardPlan plan = choose_forward(f, typical_device(9, 0));
  EXPECT_EQ(plan.candidate, kDecode);
  EXPECT_FALSE(plan.spec->is_varlen);
  EXPECT_TRUE(plan.spec->has_packed_q && plan.spec->is_split);
  EXPECT_EQ(plan.spec->heads_per_tile, 4);
  // What a page or a row cannot be read as is left to mma.sync, as for queries of a batch.
  f.cache.page_size = 20;
  EXPECT_EQ(choose_forward(f, typical_device(9, 0)).candidate, kTensorCores);
}

/// Of two splits: 1,024 keys at most.
TEST(ForwardCandidates, ClustersFoldTheSplitsOfFewSequences) {
  const auto ctas = [](std::int64_t seqlen_kv, std::int64_t num_heads_kv) {
    const Shape shape{.seqlen_q = 1,
                      .seqlen_kv = seqlen_kv,
                      .num_heads_q = 8 * num_heads_kv,
                      .num_heads_kv = num_heads_kv};
    return chosen(shape, 9, 0).spec.as<Sm90DecodeSpec>().ctas_of_cluster;
  };
  EXPECT_EQ(ctas(1024, 5), 2);
  EXPECT_EQ(ctas(1025, 5), 1);   // three splits
  EXPECT_EQ(ctas(1024, 30), 1);  // 120 CTAs of two sequences
  EXPECT_EQ(ctas(512, 5), 1);
}

TEST(Splits, AreCutByTheLengthAloneAndCoverIt) {
  for (const int most : {16, 32, kMostSplits}) {
    for (const int keys : {1, 255, 256, 257, 5000, 16384, 16385, 32768, 131072, 1000003}) {
      const int each = keys_per_split(keys, most);
      EXPECT_EQ(each % kFewestKeysPerSplit, 0);
      EXPECT_LE(num_splits(keys, most), most) << keys;
      EXPECT_GE(num_splits(keys, most) * each, keys);
      EXPECT_LT((num_splits(keys, most) - 1) * each, keys);
    }
    EXPECT_EQ(num_splits(0, most), 1);
  }
}

/// 132 CTAs, 8 kv heads: what a CTA takes where all sequences have as many keys.
TEST(Units, AreTheLongestThatAllCtasHaveAsManyOf) {
  const auto unit = [](int sequences, int keys) {
    const float share = 8.0F * static_cast<float>(sequences) * static_cast<float>(keys) / 132;
    return unit_of(keys, /*most_splits=*/16, {.keys = share, .is_even = true});
  };
  EXPECT_EQ(unit(1, 8192), Unit::split);
  EXPECT_EQ(unit(8, 1024), Unit::split);    // 64 sequences of heads of one group
  EXPECT_EQ(unit(8, 8192), Unit::group);    // 256 groups, 1.94 for each CTA
  EXPECT_EQ(unit(8, 131072), Unit::group);  // of longer splits
  EXPECT_EQ(unit(32, 8191), Unit::sequence);
  EXPECT_EQ(unit(40, 8192), Unit::group);      // 2.4 sequences for each CTA would be three
  EXPECT_EQ(unit(300, 8192), Unit::sequence);  // 18.2, at most 19
  EXPECT_EQ(unit(1, 512), Unit::sequence);     // one split
  EXPECT_EQ(unit_of(0, 16, {.keys = 1, .is_even = true}), Unit::sequence);
}

TEST(Units, AreNoLongerThanAGroupWhereLengthsDiffer) {
  const auto unit = [](int keys, float share) {
    return unit_of(keys, /*most_splits=*/16, {.keys = share, .is_even = false});
  };
  EXPECT_EQ(unit(2048, 100000), Unit::sequence);
  EXPECT_EQ(unit(2049, 100000), Unit::group);
  EXPECT_EQ(unit(131072, 16000), Unit::split);  // a group is 32,768 keys
  EXPECT_EQ(unit(1024, 1024), Unit::split);
  EXPECT_EQ(unit(8192, 0), Unit::split);  // CTAs take splits
}

}  // namespace
}  // namespace fovea::cuda
