// Plans in stages, over a compiler that is held while it compiles the last one.
#include "cuda/forward/staged.hpp"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fovea/error.hpp"

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/forward/sm80.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"
#include "unit/cuda/forward/posed.hpp"
#include "unit/cuda/jit/fake_libnvrtc.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda {
namespace {

using testing::HasSubstr;

constexpr const char* kHopper = "cuda/sm90/attention_forward";
constexpr const char* kHoppersText = "sm90/attention_forward.cuh";

class StagedPlan : public testing::Test {
 protected:
  StagedPlan() { hold(kHoppersText); }
  ~StagedPlan() override { hold(nullptr); }  // before the loader, whose background would wait

  template <typename Function>
  static Function of_compiler(const char* name) {
    void* const library = ::dlopen(kFakeLibnvrtc, RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<Function>(::dlsym(library, name));
  }
  static void hold(const char* words) { of_compiler<jit::FakeNvrtcHold>("fake_nvrtc_hold")(words); }
  jit::LoaderOptions options() const {
    jit::LoaderOptions result;
    result.nvrtc.named = kFakeLibnvrtc;
    result.disk = {.folder = folder / "kernels"};
    result.pack = std::nullopt;
    result.max_in_background = 1;
    return result;
  }
  DeviceTraits device() const { return traits_of(context.info()); }
  ForwardPlan staged(const ForwardProblem& f) {
    return load_in_stages(*loader, context, f, choose_forward(f, device()));
  }
  ForwardPlan staged() { return staged(problem); }

  /// Whose kernel a call says that it launches.
  std::string_view kernel_of_call(const ForwardPlan& plan, std::size_t first = 0) {
    const Problem& p = problem.problem;
    AttentionForward args;
    args.q = TensorView(memory + first, p.q);
    args.k = TensorView(memory, p.k);
    args.v = TensorView(memory, p.v);
    args.out = TensorView(memory, p.out);
    return attention_forward(problem, plan, args, memory, nullptr);
  }
  /// Threads of the kernel that it launches.
  unsigned threads_of_call(const ForwardPlan& plan) {
    kernel_of_call(plan);
    return fake.launch.block_x;
  }
  static unsigned threads_of(const ForwardPlan& plan) {
    return static_cast<unsigned>(plan.spec->num_warps) * 32;
  }
  std::string failure_of(const auto& call) const {
    try {
      call();
    } catch (const CompileError& error) {
      return error.what();
    }
    return "none";
  }

  alignas(16) std::uint16_t memory[64] = {};
  jit::TemporaryFolder folder;
  driver::FakeState& fake = driver::fresh_fake();
  driver::Driver driver{kFakeLibcuda};
  driver::DeviceContext context{driver, 0};
  ForwardProblem problem = pose({});
  std::optional<jit::Loader> loader{options()};
};

TEST_F(StagedPlan, CallsRunByTheFirstKernelUntilTheTablesIsLoaded) {
  const ForwardPlan table = choose_forward(problem, device());
  ASSERT_EQ(table.candidate, kHopper);
  const ForwardPlan plan = staged();
  EXPECT_EQ(plan.candidate, Sm80Forward::kName);
  EXPECT_FALSE(is_final(plan));
  ASSERT_NE(threads_of(plan), threads_of(table));
  EXPECT_EQ(threads_of_call(plan), threads_of(plan));
  EXPECT_EQ(plan.refused.back().candidate, kHopper);
  hold(nullptr);
  wait_for_final(plan);
  EXPECT_TRUE(is_final(plan));
  EXPECT_EQ(current_stage(plan).spec, table.spec);
  EXPECT_EQ(threads_of_call(plan), threads_of(table));
}

TEST_F(StagedPlan, CallsSayWhoseKernelTookThem) {
  const ForwardPlan plan = staged();
  const std::string_view before = kernel_of_call(plan);
  EXPECT_EQ(before, Sm80Forward::kName);
  hold(nullptr);
  wait_for_final(plan);
  EXPECT_EQ(before, Sm80Forward::kName) << "of that call, whatever runs the next";
  EXPECT_EQ(kernel_of_call(plan), kHopper);
  EXPECT_EQ(kernel_of_call(plan, 1), Sm80Forward::kName) << "q is 2 bytes off";
}

TEST_F(StagedPlan, WorkspaceIsThatOfTheGreaterStage) {
  // Hopper's kernel wants a counter; a split of few rows, partial states.
  for (const Posed& posed :
       {Posed{}, Posed{.seqlen_q = 4, .seqlen_kv = 32768, .num_heads_q = 56, .num_heads_kv = 8}}) {
    hold("sm90/");
    const ForwardProblem f = pose(posed);
    const ForwardPlan table = choose_forward(f, device());
    const ForwardPlan plan = staged(f);
    ASSERT_NE(plan.later, nullptr);
    EXPECT_FALSE(plan.spec->is_split);
    EXPECT_GT(table.workspace_bytes, 0U);
    EXPECT_GE(plan.workspace_bytes, table.workspace_bytes);
    hold(nullptr);
    wait_for_final(plan);
  }
}

TEST_F(StagedPlan, WhatNeedsNoCompilerHasOneStage) {
  hold(nullptr);
  jit::LoaderOptions forgetful = options();
  forgetful.disk.folder = "";
  loader.emplace(forgetful);
  const ForwardPlan first = staged();
  wait_for_final(first);
  const ForwardPlan again = staged();
  EXPECT_EQ(again.candidate, kHopper) << "in memory";
  EXPECT_TRUE(is_final(again));
  loader.emplace(options());
  wait_for_final(staged());
  loader.emplace(options());
  hold(kHoppersText);
  const ForwardPlan kept = staged();
  EXPECT_EQ(kept.candidate, kHopper) << "on disk";
  EXPECT_EQ(kept.later, nullptr);
  EXPECT_EQ(loader->counts().compiled, 0);
}

TEST_F(StagedPlan, KernelsWithoutAStandInHaveOneStage) {
  hold(nullptr);
  const ForwardPlan plan = staged(pose({.dtype = Dtype::f32, .head_dim_qk = 64, .head_dim_v = 64}));
  EXPECT_EQ(plan.candidate, "cuda/sm80/attention_forward_f32");
  EXPECT_TRUE(is_final(plan));
}

TEST_F(StagedPlan, FailureOfTheLastStageIsToldByEveryCall) {
  problem = pose({.score = parse_score_mod("score * 2")});
  const ForwardPlan plan = staged();
  ASSERT_FALSE(is_final(plan));
  constexpr driver::Result kOutOfMemory = 2;
  fake.fail("cuModuleLoadDataEx", kOutOfMemory);
  hold(nullptr);
  EXPECT_THROW(wait_for_final(plan), DeviceError);
  EXPECT_THROW(static_cast<void>(is_final(plan)), DeviceError);
  for (int i = 0; i < 2; ++i) EXPECT_THROW(threads_of_call(plan), DeviceError);
}

TEST_F(StagedPlan, PlanThatNobodyKeepsIsNotCompiled) {
  std::optional<ForwardPlan> kept = staged();
  std::optional<ForwardPlan> dropped = staged(pose({.score = parse_score_mod("score * 2")}));
  dropped.reset();
  hold(nullptr);
  wait_for_final(*kept);
  loader->stop();
  EXPECT_FALSE(loader->is_in_memory(
      planned_kernels(choose_forward(pose({.score = parse_score_mod("score * 2")}), device()))
          .front()
          .text,
      context));
}

TEST_F(StagedPlan, EndDoesNotWaitForTheCompiler) {
  const ForwardPlan begun = staged();
  const ForwardPlan waiting = staged(pose({.score = parse_score_mod("score * 2")}));
  loader->stop();  // while the compiler is held
  EXPECT_THAT(failure_of([&] { wait_for_final(begun); }), HasSubstr("sm90/attention_forward"));
  EXPECT_THAT(failure_of([&] { wait_for_final(waiting); }), HasSubstr("the process ends"));
}

TEST_F(StagedPlan, ChildOfTheProcessNeitherWaitsNorRuns) {
  const ForwardPlan plan = staged();
  EXPECT_TRUE(jit::holds_in_child([&] {
    try {
      wait_for_final(plan);
    } catch (const DeviceError&) {
      loader->stop();
      return true;
    }
    return false;
  }));
}

TEST_F(StagedPlan, ManyThreadsMayRunWhileItTurns) {
  const ForwardPlan plan = staged();
  const ForwardPlan table = choose_forward(problem, device());
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (!is_final(plan)) std::this_thread::yield();
      EXPECT_EQ(current_stage(plan).spec, table.spec);
    });
  }
  hold(nullptr);
}

TEST_F(StagedPlan, OnlyWhoAsksHasStages) {
  EXPECT_FALSE(has_stages(problem));
  problem.problem.compile_mode = CompileMode::staged;
  EXPECT_TRUE(has_stages(problem));
  problem.problem.compile_mode = CompileMode::automatic;
  ::setenv("FOVEA_COMPILE", "staged", 1);
  EXPECT_TRUE(has_stages(problem));
  problem.problem.compile_mode = CompileMode::complete;
  EXPECT_FALSE(has_stages(problem));
  problem.problem.compile_mode = CompileMode::automatic;
  ::setenv("FOVEA_COMPILE", "quickly", 1);
  EXPECT_THROW(static_cast<void>(has_stages(problem)), InvalidArgument);
  ::unsetenv("FOVEA_COMPILE");
}

TEST_F(StagedPlan, ExplanationNamesTheFirstStage) {
  ForwardPlan plan = choose_forward(problem, device());
  plan.kernel_source = "NVRTC 13.0.88";
  tell_stages(problem, plan);
  EXPECT_EQ(plan.candidate, kHopper);
  EXPECT_THAT(plan.kernel_source, HasSubstr("cuda/sm80/attention_forward runs the calls"));
}

}  // namespace
}  // namespace fovea::cuda
