// Operations of the cpu alone, given tensors of a GPU: refused by name, and no address of the device is followed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/probabilities.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

/// Packed sequences, a bias and documents, so that each kind of tensor is there: those that `moved` names lie on a GPU,
/// at addresses that a host which followed them would die of.
class Call {
 public:
  explicit Call(std::set<std::string> moved, bool all = false)
      : moved_(std::move(moved)), all_(all) {}

  AttentionForward forward() {
    AttentionForward args = scores();
    args.v = rows("v");
    args.out = rows("out");
    args.lse = tensor("lse", {2, 5});
    return args;
  }
  /// What probabilities are made of.
  AttentionForward scores() {
    AttentionForward args{.q = rows("q"), .k = rows("k")};
    args.score =
        parse_score_mod("score + bias[q_idx]", {.tensors = {{"bias", tensor("bias", {5})}}});
    args.mask =
        parse_mask_mod("ids[q_idx] == ids[kv_idx]", {.tensors = {{"ids", indices("ids", {5})}}});
    args.sinks = tensor("sinks", {2});
    args.cu_seqlens_q = args.cu_seqlens_kv = indices("cu_seqlens", {2});
    return args;
  }
  AttentionProbabilities probabilities() {
    return {.forward = scores(), .probabilities = tensor("probabilities", {1, 2, 5, 5})};
  }
  AttentionBackward backward() {
    return {.dout = rows("dout"),
            .dlse = tensor("dlse", {2, 5}),
            .forward = forward(),
            .dq = rows("dq"),
            .dk = rows("dk"),
            .dv = rows("dv"),
            .dsinks = tensor("dsinks", {2}),
            .dcaptured = {{"bias", tensor("dbias", {5})}}};
  }
  AttentionDoubleBackward double_backward() {
    AttentionBackward backward{
        .dout = rows("dout"), .dlse = tensor("dlse", {2, 5}), .forward = forward()};
    return {.backward = backward,
            .ddq = rows("ddq"),
            .ddk = rows("ddk"),
            .ddv = rows("ddv"),
            .ddsinks = tensor("ddsinks", {2}),
            .ddcaptured = {{"bias", tensor("ddbias", {5})}},
            .grad_dout = rows("grad_dout"),
            .grad_dlse = tensor("grad_dlse", {2, 5}),
            .grad_q = rows("grad_q"),
            .grad_k = rows("grad_k"),
            .grad_v = rows("grad_v"),
            .grad_sinks = tensor("grad_sinks", {2}),
            .grad_captured = {{"bias", tensor("grad_bias", {5})}}};
  }
  AttentionJvp jvp() {
    return {.forward = forward(),
            .q_tangent = rows("q_tangent"),
            .k_tangent = rows("k_tangent"),
            .v_tangent = rows("v_tangent"),
            .sinks_tangent = tensor("sinks_tangent", {2}),
            .captured_tangents = {{"bias", tensor("bias_tangent", {5})}},
            .out_tangent = rows("out_tangent"),
            .lse_tangent = tensor("lse_tangent", {2, 5})};
  }

  /// The names of all tensors that were asked for.
  const std::set<std::string>& names() const { return names_; }
  bool is_untouched() const {
    for (const auto& memory : floats_) {
      for (const float value : *memory) {
        if (value != kFilled) return false;
      }
    }
    return true;
  }

 private:
  static constexpr float kFilled = 0.25F;

  TensorView rows(const std::string& name) { return tensor(name, {5, 2, 8}); }
  TensorView tensor(const std::string& name, std::initializer_list<std::int64_t> shape) {
    floats_.push_back(std::make_unique<std::array<float, 80>>());
    floats_.back()->fill(kFilled);
    return placed(name, view(floats_.back()->data(), shape));
  }
  TensorView indices(const std::string& name, std::initializer_list<std::int64_t> shape) {
    indices_.push_back(std::make_unique<std::array<std::int32_t, 5>>(std::array{0, 5, 5, 5, 5}));
    return placed(name, view(indices_.back()->data(), shape));
  }
  TensorView placed(const std::string& name, const TensorView& here) {
    names_.insert(name);
    if (!all_ && !moved_.contains(name)) return here;
    TensorSpec spec = here.spec();
    spec.device = Device::cuda(0);
    return {reinterpret_cast<void*>(std::uintptr_t{64} * ++num_moved_), spec};
  }

  std::set<std::string> moved_, names_;
  bool all_;
  std::uintptr_t num_moved_ = 0;
  std::vector<std::unique_ptr<std::array<float, 80>>> floats_;
  std::vector<std::unique_ptr<std::array<std::int32_t, 5>>> indices_;
};

struct Operation {
  const char* name;
  const char* kernel_of_gpus;  // the last that is asked; null: there is none
  std::function<void(Call&)> run;
  std::function<void(Call&)> make_plan;       // or nothing
  std::function<Explanation(Call&)> explain;  // or nothing
};

std::vector<Operation> operations() {
  return {{"attention_backward", "cuda/sm80/attention_backward_f32",
           [](Call& call) { attention_backward(call.backward()); },
           [](Call& call) { (void)plan_backward(problem_of(call.backward())); },
           [](Call& call) { return explain(problem_of(call.backward())); }},
          {"attention_jvp", "cuda/sm80/attention_jvp_f32",
           [](Call& call) { attention_jvp(call.jvp()); },
           [](Call& call) { (void)plan_jvp(problem_of(call.jvp())); },
           [](Call& call) { return explain(problem_of(call.jvp())); }},
          {"attention_double_backward", nullptr,
           [](Call& call) { attention_double_backward(call.double_backward()); }, nullptr,
           [](Call& call) { return explain_double_backward(call.double_backward()); }},
          {"attention_probabilities", nullptr,
           [](Call& call) { attention_probabilities(call.probabilities()); }, nullptr, nullptr}};
}

template <typename Refusal>
std::string refusal_of(const std::function<void(Call&)>& run, Call& call) {
  try {
    run(call);
  } catch (const Refusal& refusal) {
    return refusal.what();
  }
  return "accepted";
}

constexpr const char* kWhyQ =
    "q lives on cuda:0; expected the cpu, the only device that has kernels of this operation";

TEST(CpuOnly, TensorsOnTheHostAreTaken) {
  for (const Operation& operation : operations()) {
    Call call({});
    EXPECT_EQ(refusal_of<Error>(operation.run, call), "accepted") << operation.name;
    EXPECT_FALSE(call.is_untouched()) << operation.name;
  }
}

TEST(CpuOnly, ACallOnAGpuIsUnsupportedByName) {
  for (const Operation& operation : operations()) {
    if (operation.kernel_of_gpus) continue;
    Call call({}, /*all=*/true);
    EXPECT_EQ(refusal_of<Unsupported>(operation.run, call),
              std::string(operation.name) + ": " + kWhyQ);
    if (operation.make_plan) {
      EXPECT_THAT(refusal_of<Unsupported>(operation.make_plan, call), HasSubstr(kWhyQ))
          << operation.name;
    }
    EXPECT_TRUE(call.is_untouched()) << operation.name;
    if (!operation.explain) continue;
    const Explanation explained = operation.explain(call);
    EXPECT_EQ(explained.kernel, "") << operation.name;
    ASSERT_EQ(explained.refused.size(), 1U) << operation.name;
    EXPECT_EQ(explained.refused[0].reason, kWhyQ) << operation.name;
    EXPECT_TRUE(call.is_untouched()) << operation.name;
  }
}

/// Where there is no driver every kernel says so.
TEST(CpuOnly, DerivativesOnAGpuThatIsNotThereAreRefusedByEachKernelWithItsReason) {
  for (const Operation& operation : operations()) {
    if (!operation.kernel_of_gpus) continue;
    Call call({}, /*all=*/true);
    const std::string refusal = refusal_of<Unsupported>(operation.run, call);
    EXPECT_THAT(refusal, HasSubstr("no kernel for this problem on cuda:0"));
    EXPECT_THAT(refusal, HasSubstr(operation.kernel_of_gpus));
    const Explanation explained = operation.explain(call);
    EXPECT_EQ(explained.kernel, "");
    EXPECT_FALSE(explained.refused.empty());
    EXPECT_TRUE(call.is_untouched());
  }
}

TEST(CpuOnly, OneTensorOnAGpuIsRefusedBeforeItIsFollowed) {
  for (const Operation& operation : operations()) {
    Call plain({});
    operation.run(plain);
    for (const std::string& name : plain.names()) {
      Call call({name});
      EXPECT_THAT(refusal_of<Error>(operation.run, call), HasSubstr("cuda:0"))
          << operation.name << ", " << name;
      EXPECT_TRUE(call.is_untouched()) << operation.name << ", " << name;
      if (operation.explain)
        refusal_of<Error>([&](Call& again) { (void)operation.explain(again); }, call);
    }
  }
}

}  // namespace
}  // namespace fovea::testing
