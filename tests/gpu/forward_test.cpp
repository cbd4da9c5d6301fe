// Attention forward on a GPU against the oracle: the feature matrix, tile edges, both 16-bit dtypes and f32. Without a
// driver or a device everything is skipped.
#include "problem/forward.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/forward/sm80_short.hpp"
#include "cuda/forward/sm90_short.hpp"
#include "gpu/device_copy.hpp"
#include "problem/decode.hpp"
#include "support/cache_case.hpp"
#include "support/case.hpp"
#include "support/features.hpp"
#include "support/kernel_compare.hpp"
#include "support/plan_without.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

/// Whose kernels a problem runs by: those of a compute capability; on Hopper those for long sequences too where it is
/// short.
struct Generation {
  int major = 8, minor = 0;
  bool takes_short = true;
};

constexpr Generation kTuring{.major = 7, .minor = 5};

/// Newer devices run the kernels of older ones too: a device of this compute capability and the size of ours; as Turing
/// with its shared memory, which decides on tiles.
cuda::DeviceTraits traits_as(const Generation& generation) {
  cuda::DeviceTraits device = cuda::traits_of(cuda::driver::process_context(Device::cuda()).info());
  device.major = generation.major;
  device.minor = generation.minor;
  if (generation.major == kTuring.major) {
    const cuda::DeviceTraits turing = cuda::typical_device(kTuring.major, kTuring.minor);
    device.shared_bytes_per_cta = turing.shared_bytes_per_cta;
    device.shared_bytes_per_sm = turing.shared_bytes_per_sm;
  }
  return device;
}

cuda::ForwardPlan loaded(cuda::ForwardPlan plan) {
  cuda::ForwardLadder::load(cuda::jit::process_loader(),
                            cuda::driver::process_context(Device::cuda()), plan);
  return plan;
}

cuda::ForwardPlan plan_as(const ForwardProblem& problem, const Generation& generation) {
  const cuda::DeviceTraits device = traits_as(generation);
  if (generation.takes_short) return loaded(cuda::choose_forward(problem, device));
  return loaded(plan_without({cuda::Sm80ForwardShort::kName, cuda::Sm90ForwardShort::kName},
                             problem, device));
}

void run_plan(const ForwardProblem& problem, const cuda::ForwardPlan& plan,
              const AttentionForward& args, const GrownCache* cache) {
  DeviceMemory workspace(cuda::driver::process_context(Device::cuda()), plan.workspace_bytes + 1);
  workspace.fill(0xFF, Stream(nullptr));
  cuda::attention_forward(problem, plan, args, workspace.data(), nullptr, cache);
}

void run_as(const Generation& generation, const AttentionForward& args) {
  DeviceCopies copies;
  copies.add(tensors_of_call(args));
  const AttentionForward call = copies.call(args);
  const ForwardProblem problem = validate(problem_of(call), "test");
  run_plan(problem, plan_as(problem, generation), call, nullptr);
  copies.copy_back();
}

/// Whose kernels this device runs a problem by: those of sm_80 everywhere, those of sm_90a on Hopper alone; in f16
/// Turing's too, which has no recipes.
std::vector<Generation> generations(const Case& problem) {
  std::vector<Generation> all = {{.major = 8}};
  if (cuda::driver::process_context(Device::cuda()).info().compute_capability_major == 9) {
    all.push_back({.major = 9});
    all.push_back({.major = 9, .takes_short = false});
  }
  if (problem.dtype == Dtype::f16 && problem.quant.is_none()) all.push_back(kTuring);
  return all;
}

/// On Hopper a reference stands some 80 octaves above a row's scores: exponents are rounded at 2^-18, which shows in
/// the lse of a row that sees a key or two.
constexpr double kHopperLseError = 0x1p-18;

void expect_right(const Case& problem) {
  for (const Generation& generation : generations(problem)) {
    SCOPED_TRACE(fmt::format("as compute capability {}.{}{}", generation.major, generation.minor,
                             generation.takes_short ? "" : ", as if long"));
    const auto run = [&](const AttentionForward& args) { run_as(generation, args); };
    expect_kernel_equals_oracle(problem, run, generation.major == 9 ? kHopperLseError : 0);
  }
}

class GpuFeatures : public Gpu, public ::testing::WithParamInterface<Feature> {};

TEST_P(GpuFeatures, EqualTheOracle) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
    Case problem = plain_case(dtype);
    problem.label = GetParam().name;
    GetParam().add(problem);
    if (GetParam().group == "products") continue;  // of CPUs
    expect_right(problem);
  }
}

/// A case of a recipe with this feature.
Case rounded_case(std::string_view recipe, std::int64_t head_dim, const Feature& feature) {
  Case problem = plain_case(head_dim == 64 ? Dtype::f16 : Dtype::bf16);
  problem.label = fmt::format("{} + {}", recipe, feature.name);
  problem.head_dim_qk = problem.head_dim_v = head_dim;
  problem.seqlen_q = 140;
  problem.seqlen_kv = 270;
  feature.add(problem);
  problem.quant = parse_quantization(recipe);
  return problem;
}

/// By the kernel of each generation that rounds.
TEST_P(GpuFeatures, EqualTheOracleWithRoundedOperands) {
  if (GetParam().group == "products") return;  // of CPUs
  for (const std::int64_t head_dim : {64, 128}) {
    const Case problem = rounded_case("accurate", head_dim, GetParam());
    if (problem.head_dim_qk <= 128) expect_right(problem);  // there is no wider kernel
  }
}

/// Whose kernels multiply codes of probabilities here: by mma.sync as on 8.9, where this GPU has such products; on
/// Hopper by its own too.
std::vector<Generation> generations_of_e4m3() {
  const cuda::DeviceTraits device =
      cuda::traits_of(cuda::driver::process_context(Device::cuda()).info());
  std::vector<Generation> all;
  if (device.compute_capability() >= 89) all.push_back({.major = 8, .minor = 9});
  if (device.major == 9) all.push_back({.major = 9});
  return all;
}

/// Hopper adds row sums where it adds products of codes, and keeps 13 bits below the greatest of those that it adds at
/// once: 7e-4 of a sum on an H200.
double lse_error_of(const Generation& generation) { return generation.major == 9 ? 0x1p-9 : 0; }

/// What is refused has a test of its own.
TEST_P(GpuFeatures, EqualTheOracleWithCodesOfProbabilities) {
  if (GetParam().group == "products") return;  // of CPUs
  if (generations_of_e4m3().empty()) GTEST_SKIP() << "tensor cores multiply no e4m3";
  for (const std::int64_t head_dim : {64, 128}) {
    Case problem = rounded_case("fast", head_dim, GetParam());
    // Of sharper scores more have the smallest codes or none, by the reference of the tile that meets them first.
    if (problem.softmax_scale && *problem.softmax_scale < 0)
      problem.softmax_scale = -1 / std::sqrt(static_cast<float>(head_dim));
    CaseMemory memory(problem);
    const ForwardProblem f = validate(problem_of(memory.args()), "test");
    for (const Generation& generation : generations_of_e4m3()) {
      SCOPED_TRACE(fmt::format("as compute capability {}.{}", generation.major, generation.minor));
      if (cuda::choose_forward(f, traits_as(generation)).candidate.empty()) continue;
      expect_kernel_equals_oracle(
          problem, [&](const AttentionForward& args) { run_as(generation, args); },
          lse_error_of(generation));
    }
  }
}

/// By mma.sync alone. Sharp scores as they are: references are a row's greatest score, whatever it is.
TEST_P(GpuFeatures, EqualTheOracleWithRoundedExponentials) {
  if (GetParam().group == "products") return;  // of CPUs
  if (generations_of_e4m3().empty()) GTEST_SKIP() << "tensor cores multiply no e4m3";
  const Generation generation{.major = 8, .minor = 9};
  for (const std::string_view recipe :
       {"sage2", "sage2,block_q=128,warp_q=32,block_kv=64,v_max=2.25", "fp8_static"}) {
    for (const std::int64_t head_dim : {64, 128}) {
      const Case problem = rounded_case(recipe, head_dim, GetParam());
      if (std::max(problem.head_dim_qk, problem.head_dim_v) > 128) continue;
      expect_kernel_equals_oracle(problem,
                                  [&](const AttentionForward& args) { run_as(generation, args); });
    }
  }
}

/// Of f16, as P and V are.
TEST_P(GpuFeatures, EqualTheOracleWithRoundedOperandsInHalf) {
  if (GetParam().group == "products") return;  // of CPUs
  Case problem = rounded_case("sage1,q_scales=thread,k_scales=thread", 64, GetParam());
  if (problem.dtype != Dtype::f16 || problem.head_dim_qk > 128) return;
  expect_kernel_equals_oracle(problem,
                              [&](const AttentionForward& args) { run_as({.major = 8}, args); });
}

/// Dense with grouped heads, packed, by elements.
std::vector<Case> layouts_by(std::string_view recipe) {
  Case problem = plain_case(recipe.starts_with("sage1") ? Dtype::f16 : Dtype::bf16);
  problem.quant = parse_quantization(recipe);
  problem.label = recipe;
  problem.seqlen_q = 270;
  problem.seqlen_kv = 400;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.head_dim_qk = problem.head_dim_v = 128;
  problem.mask = causal();
  problem.has_sinks = true;
  Case packed = problem;
  packed.label += " packed";
  packed.sequences = {{0, 0}, {1, 1}, {140, 300}, {70, 0}, {0, 9}, {200, 128}, {3, 257}};
  packed.trailing_rows = 3;
  packed.head_dim_qk = packed.head_dim_v = 64;
  Case by_elements = problem;
  by_elements.label += " by elements";
  by_elements.head_dim_qk = 29;
  by_elements.layout = Layout::odd_offset;
  by_elements.mask = {};
  if (problem.quant.hadamard) by_elements.head_dim_qk = 28;  // an odd one has no pairs to mix
  return {problem, packed, by_elements};
}

std::string name_of_recipe(const ::testing::TestParamInfo<const char*>& recipe) {
  std::string name = recipe.param;
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

/// Rows and keys that share scales otherwise, and other means.
class GpuRecipesOfOtherGroups : public Gpu, public ::testing::WithParamInterface<const char*> {};

TEST_P(GpuRecipesOfOtherGroups, EqualTheOracle) {
  if (generations_of_e4m3().empty()) GTEST_SKIP() << "tensor cores multiply no e4m3";
  for (const Case& each : layouts_by(GetParam())) {
    expect_kernel_equals_oracle(
        each, [&](const AttentionForward& args) { run_as({.major = 8, .minor = 9}, args); });
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, GpuRecipesOfOtherGroups,
    ::testing::Values("sage2,block_q=128,warp_q=32,block_kv=64,v_max=2.25,smooth_k=none",
                      "sage2,block_q=128,warp_q=32,block_kv=64,q_scales=warp,k_scales=block",
                      "sage2,q_scales=warp,k_scales=block", "sage2,q_scales=block,smooth_k=sample",
                      "sage1,row_sums=exact,accumulation=two_level", "sage1,q_scales=warp",
                      "sage1,q_scales=thread,k_scales=thread,block_kv=128,smooth_k=none",
                      "accurate,q_scales=block,k_scales=block,block_kv=64,smooth_k=sequence"),
    name_of_recipe);

/// Rows that are rotated and values without their mean, by mma.sync and, where it takes them, by Hopper's own kernel.
class GpuRecipesOfRotationsAndMeans : public Gpu,
                                      public ::testing::WithParamInterface<const char*> {};

TEST_P(GpuRecipesOfRotationsAndMeans, EqualTheOracle) {
  if (generations_of_e4m3().empty()) GTEST_SKIP() << "tensor cores multiply no e4m3";
  for (const Case& each : layouts_by(GetParam())) {
    for (const Generation& generation : generations_of_e4m3()) {
      SCOPED_TRACE(fmt::format("as compute capability {}.{}", generation.major, generation.minor));
      expect_kernel_equals_oracle(
          each, [&](const AttentionForward& args) { run_as(generation, args); },
          lse_error_of(generation));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, GpuRecipesOfRotationsAndMeans,
    ::testing::Values("accurate,hadamard=yes", "fast,hadamard=yes", "fast,smooth_v=sequence",
                      "fast,smooth_v=sequence,hadamard=yes", "sage2,smooth_v=sequence,hadamard=yes",
                      "sage2,block_q=128,warp_q=32,block_kv=64,v_max=2.25,smooth_v=sequence",
                      "sage1,smooth_v=sequence", "fp8_static,hadamard=yes"),
    name_of_recipe);

/// q, k and v that come as codes of e4m3, whatever the dtypes of the features.
TEST_P(GpuFeatures, EqualTheOracleOfCodes) {
  if (GetParam().group == "products") return;  // of CPUs
  if (generations_of_e4m3().empty()) GTEST_SKIP() << "tensor cores multiply no e4m3";
  for (const std::int64_t head_dim : {64, 128}) {
    Case problem = rounded_case("fp8_static", head_dim, GetParam());
    if (std::max(problem.head_dim_qk, problem.head_dim_v) > 128) continue;
    if (!problem.out_dtype) problem.out_dtype = problem.dtype;
    problem.dtype = Dtype::e4m3;
    expect_kernel_equals_oracle(
        problem, [&](const AttentionForward& args) { run_as({.major = 8, .minor = 9}, args); });
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFeatures,
                         ::testing::ValuesIn(features().begin(), features().end()),
                         [](const auto& each) { return std::string(each.param.name); });

// Cases of their own, here and below, where one has many kernels to compile: they run beside each other.
class GpuTileEdges : public Gpu,
                     public ::testing::WithParamInterface<std::tuple<Dtype, std::int64_t>> {};

TEST_P(GpuTileEdges, EqualTheOracle) {
  const auto& [dtype, head_dim] = GetParam();
  for (const std::int64_t seqlen_q : {1, 63, 64, 65, 127, 128, 129, 257}) {
    for (const std::int64_t seqlen_kv : {1, 63, 64, 65, 128, 200, 515}) {
      Case problem = plain_case(dtype);
      problem.label = "edges";
      problem.batch = 1;
      problem.seqlen_q = seqlen_q;
      problem.seqlen_kv = seqlen_kv;
      problem.head_dim_qk = problem.head_dim_v = head_dim;
      if (seqlen_q % 2 == 1) problem.mask = causal();
      problem.wants_row_max = seqlen_q % 4 == 1;
      expect_right(problem);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuTileEdges,
                         ::testing::Combine(::testing::Values(Dtype::bf16, Dtype::f16),
                                            ::testing::Values(32, 64, 128, 256)));

TEST_F(Gpu, HeadDims) {
  for (const std::int64_t qk : {1, 8, 40, 72, 96, 160, 192, 256}) {
    for (const std::int64_t v : {8, 33, 64, 128, 256}) {
      Case problem = plain_case(Dtype::f16);
      problem.label = "head_dims";
      problem.seqlen_q = 130;
      problem.head_dim_qk = qk;
      problem.head_dim_v = v;
      problem.mask = causal();
      expect_right(problem);
    }
  }
}

TEST_F(Gpu, SplitsOfManyKeys) {
  for (const std::int64_t keys : {257, 1000, 2048, 17000, 40001}) {
    for (const std::int64_t group : {1, 7, 8}) {
      Case problem = plain_case(Dtype::bf16);
      problem.label = "splits";
      problem.batch = 1;
      problem.seqlen_q = 2;
      problem.seqlen_kv = keys;
      problem.num_heads_q = 2 * group;
      problem.num_heads_kv = 2;
      problem.head_dim_qk = problem.head_dim_v = 64;
      problem.mask = causal();
      problem.has_sinks = group == 7;
      expect_right(problem);
    }
  }
}

/// Shapes, heads and head dims with every program and mask.
TEST_P(GpuFeatures, EqualTheOracleInPairs) {
  const Feature& first = GetParam();
  if (first.group.empty() || first.group == "products") return;  // of others' pairs
  for (const Feature& second : features()) {
    if (second.group == first.group || second.group == "products") continue;
    if (!second.group.empty() && second.group < first.group) continue;
    Case problem = plain_case(Dtype::bf16);
    problem.label = fmt::format("{} + {}", first.name, second.name);
    first.add(problem);
    second.add(problem);
    expect_right(problem);
  }
}

// ---- tensors that start anywhere ----

/// Bytes of a tensor on the device, some elements behind an aligned address.
class Shifted {
 public:
  Shifted(const TensorSpec& spec, std::uint64_t stream, std::size_t shift)
      : memory_(cuda::driver::process_context(Device::cuda()), num_bytes(spec) + 256),
        spec_(spec),
        shift_(2 * shift) {
    std::vector<std::uint16_t> host(static_cast<std::size_t>(spec.num_elements()));
    const Random random(11, stream);
    for (std::size_t i = 0; i < host.size(); ++i)
      host[i] = bfloat16(static_cast<float>(random.normal(static_cast<std::int64_t>(i)))).bits;
    std::vector<std::byte> staged(memory_.bytes());
    std::memcpy(staged.data() + shift_, host.data(), num_bytes(spec));
    memory_.copy_from(staged, Stream(nullptr));
    spec_.device = Device::cuda(0);
  }

  TensorView view() const {
    return {static_cast<void*>(static_cast<std::byte*>(memory_.data()) + shift_), spec_};
  }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> staged(memory_.bytes());
    memory_.copy_to(staged, Stream(nullptr));
    const auto begin = staged.begin() + static_cast<std::ptrdiff_t>(shift_);
    return {begin, begin + static_cast<std::ptrdiff_t>(num_bytes(spec_))};
  }

 private:
  static std::size_t num_bytes(const TensorSpec& spec) {
    return 2 * static_cast<std::size_t>(spec.num_elements());
  }

  DeviceMemory memory_;
  TensorSpec spec_;
  std::size_t shift_;
};

// A plan serves them all: on Hopper, whose kernels read at multiples of 16 bytes, with the bits of the kernel of sm_80.
TEST_F(Gpu, TensorsOfOnePlanStartAnywhere) {
  struct Shape {
    std::int64_t seqlen_q, seqlen_kv, num_heads_q;
  };
  constexpr unsigned kOther = 16;  // nothing is moved, but the kernel is that for moved tensors
  for (const Shape& shape : {Shape{200, 300, 4}, Shape{4, 5000, 24}, Shape{1, 5000, 8}}) {
    const TensorSpec rows = make_spec(
        Dtype::bf16,
        std::array{std::int64_t{2}, shape.seqlen_q, shape.num_heads_q, std::int64_t{128}});
    const TensorSpec keys = make_spec(Dtype::bf16, std::array{std::int64_t{2}, shape.seqlen_kv,
                                                              std::int64_t{2}, std::int64_t{128}});
    const Problem posed{.q = rows, .k = keys, .v = keys, .out = rows, .mask = causal()};
    const Plan served = plan(posed, Device::cuda(0));
    std::vector<std::byte> by_kernel, by_other;
    for (const unsigned moved : {0U, kOther, 1U, 2U, 4U, 8U, 15U}) {
      const auto shift = [&](unsigned tensor) { return std::size_t{moved >> tensor & 1U}; };
      const Shifted q(rows, 0, shift(0)), k(keys, 1, shift(1)), v(keys, 2, shift(2)),
          out(rows, 3, shift(3));
      AttentionForward args{
          .q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .mask = causal()};
      if (moved == kOther) {
        const ForwardProblem problem = validate(problem_of(args), "test");
        const cuda::ForwardPlan chosen = cuda::choose_forward(
            problem, cuda::traits_of(cuda::driver::process_context(Device::cuda()).info()));
        run_plan(problem, loaded(chosen.unaligned ? chosen.unaligned->plan() : chosen), args,
                 nullptr);
      } else {
        const DeviceMemory workspace(cuda::driver::process_context(Device::cuda()),
                                     served.workspace_bytes() + 1);
        args.workspace = {static_cast<std::byte*>(workspace.data()), served.workspace_bytes()};
        served.run(args);
      }
      if (moved == 0) by_kernel = out.bytes();
      if (moved == kOther) by_other = out.bytes();
      const bool decodes = shape.seqlen_q < 200;  // into out wherever it starts
      const bool takes_kernel = moved == 0 || (moved == 8 && decodes);
      EXPECT_EQ(out.bytes(), takes_kernel ? by_kernel : by_other)
          << shape.seqlen_q << " rows, moved " << moved;
    }
  }
}

// ---- short sequences on Hopper ----

class GpuShort : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (IsSkipped()) return;
    if (cuda::driver::process_context(Device::cuda()).info().compute_capability_major != 9)
      GTEST_SKIP() << "the device is not of sm_90";
  }
};

/// A caller who says how long packed sequences are at most.
ForwardProblem bounded(const AttentionForward& args, std::int64_t most) {
  Problem problem = problem_of(args);
  if (problem.num_sequences) problem.seqlen_q = problem.seqlen_kv = up_to(most);
  return validate(problem, "test");
}

/// By a kernel for short sequences, of which the table would take Hopper's own first.
template <typename Kernel>
void expect_right_short(const Case& problem) {
  const std::int64_t most = std::max(problem.max_seqlen_q(), problem.max_seqlen_kv());
  const auto run = [&](const AttentionForward& args) {
    DeviceCopies copies;
    copies.add(tensors_of_call(args));
    const AttentionForward call = copies.call(args);
    const ForwardProblem posed = bounded(call, most);
    constexpr bool kIsHoppers = std::is_same_v<Kernel, cuda::Sm90ForwardShort>;
    const cuda::ForwardPlan plan =
        kIsHoppers
            ? plan_as(posed, {.major = 9})
            : loaded(plan_without({cuda::Sm90ForwardShort::kName}, posed, traits_as({.major = 9})));
    ASSERT_EQ(plan.candidate, Kernel::kName);
    run_plan(posed, plan, call, nullptr);
    copies.copy_back();
  };
  expect_kernel_equals_oracle(problem, run, 0);
}

/// Of every head dim, up to the longest that is taken.
TEST_F(GpuShort, LengthsAndHeadDims) {
  for (const auto& [head_dim, longest] : {std::pair<std::int64_t, std::int64_t>{32, 288},
                                          {40, 128},
                                          {64, 128},
                                          {72, 128},
                                          {80, 128},
                                          {128, 128}}) {
    for (const std::int64_t seqlen : {17, 49, 64, 77, 80, 81, 113, 128, 197, 288}) {
      if (seqlen > longest) continue;
      Case problem = plain_case(seqlen == 64 ? Dtype::f16 : Dtype::bf16);
      problem.label = "short";
      problem.seqlen_q = problem.seqlen_kv = seqlen;
      problem.head_dim_qk = problem.head_dim_v = head_dim;
      problem.wants_row_max = false;
      expect_right_short<cuda::Sm80ForwardShort>(problem);
      problem.seqlen_q = std::max<std::int64_t>(17, seqlen - 30);
      problem.mask = causal();
      problem.has_sinks = true;
      problem.has_infinite_values = seqlen == 128;
      expect_right_short<cuda::Sm80ForwardShort>(problem);
    }
  }
}

TEST_F(GpuShort, Features) {
  for (const Feature& feature : features()) {
    if (feature.group == "shape" || feature.group == "products") continue;
    Case problem = plain_case(Dtype::bf16);
    problem.label = feature.name;
    problem.seqlen_q = 90;
    problem.seqlen_kv = 120;
    feature.add(problem);
    expect_right_short<cuda::Sm80ForwardShort>(problem);
  }
}

TEST_F(GpuShort, Packed) {
  for (const std::int64_t head_dim : {64, 80, 128}) {
    Case problem = plain_case(Dtype::bf16);
    problem.label = "short_packed";
    problem.head_dim_qk = problem.head_dim_v = head_dim;
    for (std::int64_t i = 0; i < 300; ++i)
      problem.sequences.push_back({i * 37 % 129, i % 7 == 0 ? i * 11 % 129 : i * 37 % 129});
    problem.trailing_rows = 5;
    problem.mask = causal();
    expect_right_short<cuda::Sm80ForwardShort>(problem);
  }
}

class GpuHoppersShort : public GpuShort, public ::testing::WithParamInterface<std::int64_t> {};

/// Around row tiles, kv tiles and the longest; then what it has of features, packed sequences among them.
TEST_P(GpuHoppersShort, LengthsOfAHeadDim) {
  const std::int64_t head_dim = GetParam();
  const bool leaves_half = head_dim > 64 && head_dim <= 96;  // of a panel
  for (const std::int64_t seqlen :
       {17, 49, 63, 64, 65, 77, 127, 128, 129, 197, 208, 256, 257, 320, 384}) {
    Case problem = plain_case(seqlen % 2 == 0 ? Dtype::f16 : Dtype::bf16);
    problem.label = "hopper_short";
    problem.seqlen_q = problem.seqlen_kv = seqlen;
    problem.head_dim_qk = problem.head_dim_v = head_dim;
    if (seqlen <= (leaves_half ? 208 : 320)) expect_right_short<cuda::Sm90ForwardShort>(problem);
    if (seqlen > (head_dim == 80 || head_dim == 96 ? 320 : 384)) continue;
    problem.seqlen_q = std::max<std::int64_t>(17, seqlen - 30);
    problem.num_heads_q = 2 * problem.num_heads_kv;
    problem.mask = seqlen % 3 == 0 ? window(40, 7) : causal();
    problem.has_sinks = true;
    problem.has_infinite_values = seqlen == 129 || seqlen == 257 || seqlen == 384;
    expect_right_short<cuda::Sm90ForwardShort>(problem);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuHoppersShort, ::testing::Values(32, 40, 64, 72, 80, 96, 128));

TEST_F(GpuShort, PackedByHoppersOwn) {
  for (const std::int64_t head_dim : {64, 80, 128}) {
    Case problem = plain_case(Dtype::bf16);
    problem.label = "hopper_short_packed";
    problem.head_dim_qk = problem.head_dim_v = head_dim;
    for (std::int64_t i = 0; i < 150; ++i)
      problem.sequences.push_back({i * 37 % 273, i % 7 == 0 ? i * 11 % 273 : i * 37 % 273});
    problem.trailing_rows = 5;
    problem.mask = causal();
    expect_right_short<cuda::Sm90ForwardShort>(problem);
  }
}

// ---- few rows on Hopper: sm90/decode up to 16, sm90/attention_forward up to 64 ----

class GpuFewRows : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (IsSkipped()) return;
    if (cuda::driver::process_context(Device::cuda()).info().compute_capability_major < 9)
      GTEST_SKIP() << "the device is older than sm_90";
  }
};

void few_rows_on_gpu(const AttentionForward& args) {
  run_as({.major = 9, .takes_short = false}, args);
}

void decode_on_gpu(const CacheCase& each, const AttentionDecode& host) {
  DeviceCopies copies;
  copies.add(tensors_of_call(forward_of(host)));
  copies.add(tensors_of_cache(host.cache));
  const AttentionDecode decode = copies.call(host);
  const std::int64_t longest = *std::ranges::max_element(each.seqlens);
  const ForwardProblem problem = validate_decode_problem(decode_problem(decode, longest, 1, "test"),
                                                         cache_layout(decode), "test");
  const GrownCache cache{decode.cache};
  run_plan(problem, plan_as(problem, {.major = 9}), forward_of(decode), &cache);
  copies.copy_back();
}

/// Each sequence against the oracle on its keys laid out densely; another run gives the same bits.
void expect_right_cache(const CacheCase& problem) {
  SCOPED_TRACE(fmt::format("heads {}/{} queries {} dims {} pages of {}", problem.num_heads_q,
                           problem.num_heads_kv, problem.seqlen_q, problem.head_dim_qk,
                           problem.page_size));
  CacheMemory memory(problem), again(problem);
  const AttentionDecode decode = memory.args();
  decode_on_gpu(problem, decode);
  decode_on_gpu(problem, again.args());
  expect_sequences_equal_oracle(problem, memory, decode, kHopperLseError);
  for (std::int64_t i = 0; i < problem.batch(); ++i)
    EXPECT_EQ(memory.out_bits(i), again.out_bits(i)) << i;
}

TEST_F(GpuFewRows, RowsHeadsAndLengths) {
  for (const std::int64_t group : {1, 3, 8}) {
    for (const std::int64_t seqlen_q : {1, 2, 5, 8, 16}) {
      if (group * seqlen_q > 64) continue;
      for (const std::int64_t seqlen_kv : {257, 1031, 17000, 40001}) {
        Case problem = plain_case(seqlen_q == 2 ? Dtype::f16 : Dtype::bf16);
        problem.label = "few_rows";
        problem.batch = 1;
        problem.seqlen_q = seqlen_q;
        problem.seqlen_kv = seqlen_kv;
        problem.num_heads_q = 2 * group;
        problem.num_heads_kv = 2;
        problem.head_dim_qk = problem.head_dim_v = group == 3 ? 72 : 128;
        if (seqlen_q != 2) problem.mask = seqlen_q == 5 ? window(700, 0) : causal();
        problem.has_sinks = group == 3;
        expect_kernel_equals_oracle(problem, few_rows_on_gpu, kHopperLseError);
      }
    }
  }
}

TEST_F(GpuFewRows, Features) {
  for (const Feature& feature : features()) {
    if (feature.group == "shape" || feature.group == "heads" || feature.group == "products")
      continue;
    for (const std::int64_t seqlen_q : {2, 12, 32}) {
      Case problem = plain_case(Dtype::bf16);
      problem.label = feature.name;
      problem.seqlen_q = seqlen_q;
      problem.seqlen_kv = 531;  // three splits, the last cut
      problem.num_heads_q = 4;
      problem.num_heads_kv = 2;
      feature.add(problem);
      expect_kernel_equals_oracle(problem, few_rows_on_gpu, kHopperLseError);
    }
  }
}

/// Of a head, of a page.
class GpuFewRowsOfCaches
    : public GpuFewRows,
      public ::testing::WithParamInterface<std::tuple<std::int64_t, std::int64_t>> {};

TEST_P(GpuFewRowsOfCaches, EqualTheOracle) {
  const auto& [head_dim, page_size] = GetParam();
  for (const std::int64_t seqlen_q : {1, 2, 4, 8}) {
    CacheCase problem;
    problem.seqlens = {0, 1, 15, 16, 17, 64, 255, 256, 257, 523, 5003};
    problem.num_heads_kv = 2;
    problem.q_dtype = problem.k_dtype = problem.v_dtype = Dtype::bf16;
    problem.head_dim_qk = problem.head_dim_v = head_dim;
    problem.page_size = page_size;
    problem.seqlen_q = seqlen_q;
    problem.num_heads_q = page_size == 3 ? 10 : 16;
    problem.has_left_padding = page_size == 3;
    problem.has_batch_idx = page_size == 0;
    problem.index_dtype = page_size == 64 ? Dtype::i64 : Dtype::i32;
    if (page_size == 1) problem.mask = window(300, 0);
    expect_right_cache(problem);
  }
}

INSTANTIATE_TEST_SUITE_P(OfPages, GpuFewRowsOfCaches,
                         ::testing::Combine(::testing::Values(64, 128),
                                            ::testing::Values(0, 1, 3, 8, 16, 24, 64)));
INSTANTIATE_TEST_SUITE_P(OfTheWidestHead, GpuFewRowsOfCaches,
                         ::testing::Values(std::tuple<std::int64_t, std::int64_t>{256, 16}));

}  // namespace
}  // namespace fovea::testing
