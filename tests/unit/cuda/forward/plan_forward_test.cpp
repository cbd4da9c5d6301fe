// From a choice to loaded kernels, on a fake device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fovea/error.hpp"

#include "cuda/attention_forward.hpp"
#include "cuda/forward_kernels.hpp"
#include "cuda/tuning.hpp"
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
  driver::Driver driver{FOVEA_FAKE_LIBCUDA};
  driver::DeviceContext context{driver, 0};
  ForwardProblem problem = pose({.dtype = Dtype::f32, .head_dim_qk = 64, .head_dim_v = 64});
};

TEST_F(PlanForward, TunedTileThatDoesNotCompileGivesWayToTheTables) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  ForwardPlan plan = choose_forward(problem, device(), tuning());
  ASSERT_TRUE(plan.is_tuned);
  ASSERT_EQ(plan.spec.tile_kv, 64);
  jit::Loader loader(options());
  load_or_fall_back(loader, context, problem, plan);
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
  load_or_fall_back(loader, context, problem, plan);
  EXPECT_EQ(plan.spec.tile_kv, 32);
  EXPECT_THAT(plan.tuning, HasSubstr("cuModuleLoadDataEx"));
}

TEST_F(PlanForward, TablesTileThatDoesNotCompileIsAnError) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  ForwardPlan plan = choose_forward(problem, device());
  plan.spec.tile_kv = 64;
  jit::Loader loader(options());
  EXPECT_THROW(load_or_fall_back(loader, context, problem, plan), CompileError);
}

TEST_F(PlanForward, CheckingWhatCanBeHadCompilesAndLoadsNothing) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  ForwardPlan plan = choose_forward(problem, device());
  jit::Loader loader(options());
  fake.calls.clear();
  check_kernels(loader, {9, 0}, problem, plan);
  EXPECT_EQ(plan.spec, choose_forward(problem, device()).spec);
  EXPECT_EQ(plan.candidate, "cuda/sm80/attention_forward_f32");
  EXPECT_EQ(loader.counts().compiled, 0);
  EXPECT_TRUE(fake.calls.empty());
}

TEST_F(PlanForward, CompilerThatIsTooOldForTheDeviceIsARefusal) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  ForwardPlan plan = choose_forward(problem, device());
  jit::Loader loader(options());
  check_kernels(loader, {99, 0}, problem, plan);
  EXPECT_EQ(plan.candidate, "");
  EXPECT_EQ(plan.refused.back().candidate, "cuda/sm80/attention_forward_f32");
  EXPECT_THAT(plan.refused.back().reason, HasSubstr("does not know sm_990a"));
}

TEST_F(PlanForward, TunedTileThatIsNowhereIsCheckedToo) {
  std::vector<jit::PackItem> items;
  for (const jit::KernelText& text : kernel_texts(choose_forward(problem, device()))) {
    items.push_back(
        {jit::text_key(text, jit::embedded_device_text(), {9, 0}), jit::entry_number(0)});
  }
  jit::write_pack(folder / "kernels.pack", items);
  jit::LoaderOptions packed = options();
  packed.device_text = jit::embedded_device_text();
  packed.nvrtc = jit::search_nowhere();
  packed.pack = folder / "kernels.pack";
  jit::Loader loader(packed);
  ForwardPlan plan = choose_forward(problem, device(), tuning());
  check_kernels(loader, {9, 0}, problem, plan);
  EXPECT_EQ(plan.spec, choose_forward(problem, device()).spec);
  EXPECT_THAT(plan.tuning, HasSubstr("not taken: kernel"));
}

// The decoding kernel does not wait for grids ahead, which build range tables and append keys; the combine kernel does.
TEST_F(PlanForward, DecodingIsNotLaunchedDependentAndItsCombineKernelIs) {
  const ForwardProblem decode = pose(decoding());
  ForwardPlan plan = choose_forward(decode, device());
  ASSERT_EQ(plan.candidate, "cuda/sm90/decode");
  auto kernels = std::make_shared<ForwardPlan::Kernels>();
  kernels->forward = kernels->deep_combine = kernels->wide_combine =
      std::make_shared<const jit::LoadedKernel>(
          context, jit::Cubin{.image = {4, std::byte{}}, .report = {}}, "a kernel");
  plan.kernels = kernels;
  alignas(16) std::uint16_t memory[8] = {};
  const Problem& p = decode.problem;
  AttentionForward args;
  args.q = TensorView(memory, p.q);
  args.k = TensorView(memory, p.k);
  args.v = TensorView(memory, p.v);
  args.out = TensorView(memory, p.out);
  attention_forward(decode, plan, args, memory, nullptr);
  EXPECT_EQ(fake.are_dependent, (std::vector{false, true}));
}

}  // namespace
}  // namespace fovea::cuda
