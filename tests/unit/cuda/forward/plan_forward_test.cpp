// From a choice to loaded kernels, on a fake device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fovea/error.hpp"

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/forward/sm80.hpp"
#include "cuda/forward/tuning.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"
#include "unit/cuda/forward/posed.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr std::string_view kHeader = "sm80/attention_forward_f32.cuh";

/// The device text, but for a kernel that compiles for the table's tile alone.
std::vector<jit::SourceFile> with_narrow_kernel() {
  static constexpr const char* kText =
      "#include \"shared/forward_params.h\"\n"
      "#include \"shared/forward_spec.h\"\n"
      "namespace fovea::cuda::sm80 {\n"
      "template <ForwardSpec spec, class Mods>\n"
      "void attention_forward_f32(const ForwardParams&) { static_assert(spec.tile_kv == 32); }\n"
      "}\n";
  std::vector<jit::SourceFile> files;
  for (jit::SourceFile file : jit::embedded_device_text().files) {
    if (file.name == kHeader) file.text = kText;
    files.push_back(file);
  }
  return files;
}

class PlanForward : public testing::Test {
 protected:
  jit::LoaderOptions options() const {
    jit::LoaderOptions result;
    result.device_text = jit::make_device_text(files);
    result.disk = {.folder = folder / "kernels"};
    result.pack = std::nullopt;
    return result;
  }
  DeviceTraits device() const { return traits_of(context.info()); }
  TuningFile tuning() const {
    TuningFile file{.where = "made.tuning", .tuning = Tuning(), .why_not = ""};
    TileChoice tile = tile_of(choose_forward(problem, device()).spec);
    tile.tile_kv = 64;
    file.tuning->set(
        device(), problem_class(problem),
        {.candidate = "cuda/sm80/attention_forward_f32", .tile = tile, .us = 1.5, .table_us = 2.5});
    return file;
  }

  jit::TemporaryFolder folder;
  std::vector<jit::SourceFile> files = with_narrow_kernel();
  driver::FakeState& fake = driver::fresh_fake();
  driver::Driver driver{kFakeLibcuda};
  driver::DeviceContext context{driver, 0};
  ForwardProblem problem = pose({.dtype = Dtype::f32, .head_dim_qk = 64, .head_dim_v = 64});
};

TEST_F(PlanForward, TunedTileThatDoesNotCompileGivesWayToTheTables) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  ForwardPlan plan = choose_forward(problem, device(), tuning());
  ASSERT_TRUE(plan.is_tuned);
  ASSERT_EQ(plan.spec->tile_kv, 64);
  jit::Loader loader(options());
  ForwardLadder::load_or_fall_back(loader, context, problem, plan);
  EXPECT_EQ(plan.spec, choose_forward(problem, device()).spec);
  EXPECT_NE(plan.kernels, nullptr);
  EXPECT_THAT(plan.tuning, AllOf(HasSubstr("by made.tuning"), HasSubstr("not taken: kernel"),
                                 HasSubstr("does not compile"), Not(HasSubstr("\n"))));
}

TEST_F(PlanForward, TunedTileThatTheDriverRefusesGivesWayToo) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  ForwardPlan plan = choose_forward(problem, device(), tuning());
  jit::LoaderOptions whole = options();
  whole.device_text = jit::embedded_device_text();
  jit::Loader loader(whole);
  constexpr driver::Result kInvalidImage = 200;
  fake.fail("cuModuleLoadDataEx", kInvalidImage, 1);
  ForwardLadder::load_or_fall_back(loader, context, problem, plan);
  EXPECT_EQ(plan.spec->tile_kv, 32);
  EXPECT_THAT(plan.tuning, HasSubstr("cuModuleLoadDataEx"));
}

TEST_F(PlanForward, TablesTileThatDoesNotCompileIsAnError) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  ForwardPlan plan = choose_forward(problem, device());
  plan.spec->tile_kv = 64;
  jit::Loader loader(options());
  EXPECT_THROW(ForwardLadder::load_or_fall_back(loader, context, problem, plan), CompileError);
}

TEST_F(PlanForward, CheckingWhatCanBeHadCompilesAndLoadsNothing) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  ForwardPlan plan = choose_forward(problem, device());
  jit::Loader loader(options());
  fake.calls.clear();
  ForwardLadder::check(loader, {9, 0}, problem, plan);
  EXPECT_EQ(plan.spec, choose_forward(problem, device()).spec);
  EXPECT_EQ(plan.candidate, "cuda/sm80/attention_forward_f32");
  EXPECT_EQ(plan.kernel_source, "NVRTC " + loader.compiler().version());
  EXPECT_EQ(loader.counts().compiled, 0);
  EXPECT_TRUE(fake.calls.empty());
}

TEST_F(PlanForward, CompilerThatIsTooOldForTheDeviceIsARefusal) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  ForwardPlan plan = choose_forward(problem, device());
  jit::Loader loader(options());
  ForwardLadder::check(loader, {99, 0}, problem, plan);
  EXPECT_EQ(plan.candidate, "");
  EXPECT_EQ(plan.refused.back().candidate, "cuda/sm80/attention_forward_f32");
  EXPECT_THAT(plan.refused.back().reason, HasSubstr("does not know sm_990a"));
}

TEST_F(PlanForward, TunedTileThatIsNowhereIsCheckedToo) {
  std::vector<jit::PackItem> items;
  for (const PlannedKernel& kernel : planned_kernels(choose_forward(problem, device()))) {
    items.push_back(
        {jit::text_key(kernel.text, jit::embedded_device_text(), {9, 0}), jit::entry_number(0)});
  }
  jit::write_pack(folder / "kernels.pack", items);
  jit::LoaderOptions packed = options();
  packed.device_text = jit::embedded_device_text();
  packed.nvrtc = jit::search_nowhere();
  packed.pack = folder / "kernels.pack";
  jit::Loader loader(packed);
  ForwardPlan plan = choose_forward(problem, device(), tuning());
  ForwardLadder::check(loader, {9, 0}, problem, plan);
  EXPECT_EQ(plan.spec, choose_forward(problem, device()).spec);
  EXPECT_THAT(plan.tuning, HasSubstr("not taken: kernel"));
}

/// Calls on Hopper, whose kernels read by TMA: tensors of one address, which is told and never read.
class HopperCalls : public PlanForward {
 protected:
  /// Of a pack that has all kernels: cubins that are none, which the fake driver takes.
  ForwardPlan loaded_plan(const ForwardProblem& f) {
    ForwardPlan plan = choose_forward(f, device());
    std::vector<jit::PackItem> items;
    for (const ForwardPlan& each : {plan, plan.unaligned->plan()}) {
      for (const PlannedKernel& kernel : planned_kernels(each)) {
        const jit::Sha256 key = jit::text_key(kernel.text, jit::embedded_device_text(), {9, 0});
        if (std::ranges::find(items, key, &jit::PackItem::key) == items.end())
          items.push_back({key, jit::entry_number(0)});
      }
    }
    jit::write_pack(folder / "kernels.pack", items);
    jit::LoaderOptions packed = options();
    packed.device_text = jit::embedded_device_text();
    packed.nvrtc = jit::search_nowhere();
    packed.pack = folder / "kernels.pack";
    loader.emplace(packed);
    ForwardLadder::load(*loader, context, plan);
    return plan;
  }
  /// With each tensor `offset` bytes behind an aligned address, where its bit of `moved` is set.
  void call(const ForwardProblem& f, const ForwardPlan& plan, unsigned moved) {
    const auto at = [&](unsigned tensor, const TensorSpec& spec) {
      return TensorView(memory + ((moved >> tensor & 1U) != 0 ? 1 : 0), spec);
    };
    const Problem& p = f.problem;
    AttentionForward args;
    args.q = at(0, p.q);
    args.k = at(1, p.k);
    args.v = at(2, p.v);
    args.out = at(3, p.out);
    fake.are_dependent.clear();
    attention_forward(f, plan, args, memory, nullptr);
  }
  /// Threads of the first kernel that a call launches.
  unsigned threads_of(const ForwardPlan& plan) const {
    return static_cast<unsigned>(plan.spec->num_warps) * 32;
  }

  alignas(16) std::uint16_t memory[64] = {};
  std::optional<jit::Loader> loader;
};

using UnalignedCalls = HopperCalls;

// The decoding kernel does not wait for grids ahead, which build range tables and append keys; the combine kernel does.
TEST_F(HopperCalls, DecodingIsNotLaunchedDependentAndItsCombineKernelIs) {
  const ForwardProblem decode = pose(decoding());
  const ForwardPlan plan = loaded_plan(decode);
  ASSERT_EQ(plan.candidate, "cuda/sm90/decode");
  call(decode, plan, 0);
  EXPECT_EQ(fake.are_dependent, (std::vector{false, true}));
}

TEST_F(UnalignedCalls, TakeAKernelThatReadsThemLoadedByTheFirst) {
  const ForwardProblem f = pose({});
  const ForwardPlan plan = loaded_plan(f);
  ASSERT_EQ(plan.candidate, "cuda/sm90/attention_forward");
  const ForwardPlan& other = plan.unaligned->plan();
  EXPECT_EQ(other.candidate, Sm80Forward::kName);
  EXPECT_GE(plan.workspace_bytes, other.workspace_bytes);
  ASSERT_NE(threads_of(plan), threads_of(other));
  const int loads = fake.count("cuModuleLoadDataEx");
  call(f, plan, 0);
  EXPECT_EQ(fake.launch.block_x, threads_of(plan));
  EXPECT_EQ(fake.count("cuModuleLoadDataEx"), loads);
  for (const unsigned tensor : {0U, 1U, 2U, 3U}) {
    call(f, plan, 1U << tensor);
    EXPECT_EQ(fake.launch.block_x, threads_of(other)) << tensor;
    EXPECT_EQ(fake.count("cuModuleLoadDataEx"), loads + 1) << tensor;
  }
  call(f, plan, 0);
  EXPECT_EQ(fake.launch.block_x, threads_of(plan));
}

TEST_F(UnalignedCalls, OfFewRowsHaveRoomInTheWorkspaceOfTheOthers) {
  const Posed few{.seqlen_q = 4, .seqlen_kv = 32768, .num_heads_q = 56, .num_heads_kv = 8};
  for (const Posed& posed : {decoding(), few}) {
    const ForwardProblem f = pose(posed);
    const ForwardPlan plan = loaded_plan(f);
    ASSERT_TRUE(plan.spec->is_split);
    const ForwardPlan& other = plan.unaligned->plan();
    EXPECT_EQ(other.candidate, Sm80Forward::kName);
    EXPECT_EQ(other.spec->most_splits, plan.spec->most_splits);
    EXPECT_GE(plan.workspace_bytes, other.workspace_bytes);
    EXPECT_EQ(plan.workspace_bytes, candidate_named(plan.candidate).scratch_bytes(plan.spec, f))
        << "no more than without them";
    call(f, plan, 2);
    EXPECT_EQ(fake.are_dependent.size(), 2U) << "the kernel and what joins its splits";
  }
}

TEST_F(UnalignedCalls, ElsewhereAreTheSameKernels) {
  EXPECT_EQ(choose_forward(pose({}), typical_device(8, 0)).unaligned, nullptr);
  EXPECT_EQ(choose_forward(problem, device()).unaligned, nullptr) << "f32";
}

}  // namespace
}  // namespace fovea::cuda
