// Gradients, tangents and states through the C ABI: the same bits as the C++ functions, and refusals that name the
// argument.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fovea/backward.hpp"
#include "fovea/fovea.h"
#include "fovea/jvp.hpp"
#include "fovea/mask.hpp"
#include "fovea/state.hpp"

#include "unit/ffi/c_call.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

TensorView view_of(FloatTensor& tensor) {
  return {tensor.values.data(), make_spec(Dtype::f32, tensor.shape)};
}

/// A forward call that has run, with a bias, slopes and a formula that reads a tensor named like those of the ALiBi
/// word.
struct GradientCall : SmallCall {
  GradientCall() {
    for (std::size_t i = 0; i < dout.values.size(); ++i)
      dout.values[i] = std::sin(static_cast<float>(i));
    for (std::size_t i = 0; i < bias.values.size(); ++i)
      bias.values[i] = 0.1F * static_cast<float>(i % 4);
    slopes.values = {0.5F, 0.25F};
    own.values = {1.5F, -0.5F};
    args.lse = &lse.tensor;
    args.bias = &bias.tensor;
    args.alibi = &slopes.tensor;
    args.tensors = &named;
    args.num_tensors = 1;
    args.score_mod = "score * slopes[q_head]";
    args.causal = 1;
    EXPECT_EQ(outcome_of(fovea_attention_forward, &args).message, "");
  }

  AttentionForward cxx() {
    AttentionForward forward{.q = view_of(q),
                             .k = view_of(k),
                             .v = view_of(v),
                             .out = view_of(out),
                             .lse = view_of(lse)};
    forward.score =
        fovea::bias(view_of(bias)) | alibi(view_of(slopes)) |
        parse_score_mod("score * slopes[q_head]", {.tensors = {{"slopes", view_of(own)}}});
    forward.mask = causal();
    return forward;
  }

  FloatTensor lse{{1, 2, 5}}, bias{{2, 5, 5}}, slopes{{2}}, own{{2}}, dout{{1, 5, 2, 8}};
  fovea_named_tensor named{"slopes", &own.tensor};
};

struct Gradients {
  FloatTensor dq{{1, 5, 2, 8}, kPoison}, dk{{1, 5, 2, 8}, kPoison}, dv{{1, 5, 2, 8}, kPoison};
  FloatTensor dbias{{2, 5, 5}, kPoison}, dslopes{{2}, kPoison}, down{{2}, kPoison};
};

TEST(CAttentionBackward, EqualsTheCxxDoorAndTellsNamesApart) {
  GradientCall call;
  Gradients c;
  const fovea_named_tensor wanted[] = {
      {"bias", &c.dbias.tensor}, {"alibi", &c.dslopes.tensor}, {"slopes", &c.down.tensor}};
  fovea_attention_backward_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.forward = &call.args;
  args.dout = &call.dout.tensor;
  args.dq = &c.dq.tensor;
  args.dk = &c.dk.tensor;
  args.dv = &c.dv.tensor;
  args.dcaptured = wanted;
  args.num_dcaptured = 3;
  ASSERT_EQ(outcome_of(fovea_attention_backward, &args).message, "");

  Gradients cxx;
  attention_backward({.dout = view_of(call.dout),
                      .forward = call.cxx(),
                      .dq = view_of(cxx.dq),
                      .dk = view_of(cxx.dk),
                      .dv = view_of(cxx.dv),
                      .dcaptured = {{"bias", view_of(cxx.dbias)},
                                    {"slopes", view_of(cxx.dslopes)},
                                    {"slopes_2", view_of(cxx.down)}}});
  EXPECT_EQ(c.dq.values, cxx.dq.values);
  EXPECT_EQ(c.dk.values, cxx.dk.values);
  EXPECT_EQ(c.dv.values, cxx.dv.values);
  EXPECT_EQ(c.dbias.values, cxx.dbias.values);
  EXPECT_EQ(c.dslopes.values, cxx.dslopes.values);
  EXPECT_EQ(c.down.values, cxx.down.values);
  EXPECT_NE(c.down.values, c.dslopes.values);
}

/// A call of `formula` over tables a and b and a scalar, and its derivatives by name.
struct NamedCall : SmallCall {
  NamedCall(const char* formula, FloatTensor& a, FloatTensor& b, const char* scalar_name) {
    for (std::size_t i = 0; i < dout.values.size(); ++i)
      dout.values[i] = std::sin(static_cast<float>(i));
    tensors[0] = {"a", &a.tensor};
    tensors[1] = {"b", &b.tensor};
    scalar = {scalar_name, FOVEA_SCALAR_FLOAT, 0.7};
    args.lse = &lse.tensor;
    args.softcap = 5;
    args.score_mod = formula;
    args.tensors = tensors;
    args.num_tensors = 2;
    args.scalars = &scalar;
    args.num_scalars = 1;
    EXPECT_EQ(outcome_of(fovea_attention_forward, &args).message, "");
  }

  std::vector<float> gradient(const char* name, const std::vector<std::int64_t>& shape) {
    FloatTensor result(shape, kPoison);
    const fovea_named_tensor wanted{name, &result.tensor};
    fovea_attention_backward_args backward{};
    backward.struct_size = sizeof(backward);
    backward.version = FOVEA_ABI_VERSION;
    backward.forward = &args;
    backward.dout = &dout.tensor;
    backward.dcaptured = &wanted;
    backward.num_dcaptured = 1;
    EXPECT_EQ(outcome_of(fovea_attention_backward, &backward).message, "");
    return result.values;
  }

  std::vector<float> tangent(const char* name, FloatTensor& direction) {
    FloatTensor result({1, 5, 2, 8}, kPoison);
    const fovea_named_tensor along{name, &direction.tensor};
    fovea_attention_jvp_args jvp{};
    jvp.struct_size = sizeof(jvp);
    jvp.version = FOVEA_ABI_VERSION;
    jvp.forward = &args;
    jvp.captured_tangents = &along;
    jvp.num_captured_tangents = 1;
    jvp.out_tangent = &result.tensor;
    EXPECT_EQ(outcome_of(fovea_attention_jvp, &jvp).message, "");
    return result.values;
  }

  FloatTensor lse{{1, 2, 5}}, dout{{1, 5, 2, 8}};
  fovea_named_tensor tensors[2]{};
  fovea_named_scalar scalar{};
};

void fill_waves(FloatTensor& table) {
  for (std::size_t i = 0; i < table.values.size(); ++i)
    table.values[i] = std::cos(static_cast<float>(i));
}

TEST(CAttentionBackward, OneTensorUnderTwoNamesHasTwoDerivatives) {
  const char* const formula = "score * x + a[q_idx, kv_idx] + 3.0 * b[q_idx, kv_idx]";
  FloatTensor table({5, 5}), copy({5, 5});
  fill_waves(table);
  fill_waves(copy);
  NamedCall apart(formula, table, copy, "x"), tied(formula, table, table, "x");
  EXPECT_EQ(tied.gradient("a", {5, 5}), apart.gradient("a", {5, 5}));
  EXPECT_EQ(tied.gradient("b", {5, 5}), apart.gradient("b", {5, 5}));
  EXPECT_EQ(tied.tangent("b", copy), apart.tangent("b", copy));
  EXPECT_NE(tied.gradient("a", {5, 5}), tied.gradient("b", {5, 5}));

  tied.args.bias = apart.args.bias = &table.tensor;
  EXPECT_EQ(tied.gradient("b", {5, 5}), apart.gradient("b", {5, 5}));
  EXPECT_EQ(tied.gradient("bias", {5, 5}), apart.gradient("bias", {5, 5}));
}

TEST(CAttentionBackward, AScalarNamedAsAFieldIsTheScalarOfTheText) {
  FloatTensor a({5, 5}), b({5, 5}), one({1}, 1.0F);
  fill_waves(a);
  for (const double value : {0.7, 5.0}) {  // 5: the cap itself
    NamedCall plain("score * x + a[q_idx, kv_idx] + b[q_idx, kv_idx]", a, b, "x");
    NamedCall field("score * softcap + a[q_idx, kv_idx] + b[q_idx, kv_idx]", a, b, "softcap");
    for (NamedCall* call : {&plain, &field}) {
      call->scalar.value = value;
      ASSERT_EQ(outcome_of(fovea_attention_forward, &call->args).message, "");
    }
    EXPECT_EQ(field.gradient("softcap", {1}), plain.gradient("x", {1})) << value;
    EXPECT_EQ(field.tangent("softcap", one), plain.tangent("x", one)) << value;
  }
}

TEST(CAttentionForward, AScalarThatIsNaNMayBeReadTwice) {
  FloatTensor a({5, 5}), b({5, 5});
  NamedCall call("score * x + x + a[q_idx, kv_idx] + b[q_idx, kv_idx]", a, b, "x");
  call.scalar.value = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  EXPECT_TRUE(std::isnan(call.out.values[0]));
}

TEST(CAttentionBackward, RefusalsNameTheArgumentAndWriteNothing) {
  struct Row {
    std::function<void(fovea_attention_backward_args&, GradientCall&, fovea_named_tensor&)> spoil;
    const char* expected;
  };
  const Row rows[] = {
      {[](auto& args, auto&, auto&) { args.dout = nullptr; }, "dout: is NULL"},
      {[](auto& args, auto&, auto&) { args.forward = nullptr; }, "forward: the struct is NULL"},
      {[](auto&, auto& call, auto&) { call.args.lse = nullptr; }, "lse"},
      {[](auto&, auto&, auto& wanted) { wanted.name = "curve"; },
       "curve: is not read by the score"},
      {[](auto&, auto&, auto& wanted) { wanted.name = nullptr; }, "name is NULL"},
      {[](auto&, auto&, auto& wanted) { wanted.tensor = nullptr; }, "bias: is NULL"},
      {[](auto& args, auto&, auto&) { args.dcaptured = nullptr; }, "dcaptured: is NULL"},
      {[](auto&, auto& call, auto&) { call.dout.shape[1] = 4; }, "dout"},
      {[](auto& args, auto&, auto&) { args.workspace_bytes = 1; }, "workspace is NULL"},
  };
  for (const Row& row : rows) {
    GradientCall call;
    FloatTensor dq({1, 5, 2, 8}, -7.0F), dbias({2, 5, 5}, -7.0F);
    fovea_named_tensor wanted{"bias", &dbias.tensor};
    fovea_attention_backward_args args{};
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.forward = &call.args;
    args.dout = &call.dout.tensor;
    args.dq = &dq.tensor;
    args.dcaptured = &wanted;
    args.num_dcaptured = 1;
    row.spoil(args, call, wanted);
    const Outcome outcome = outcome_of(fovea_attention_backward, &args);
    EXPECT_EQ(outcome.kind, FOVEA_INVALID_ARGUMENT) << row.expected;
    EXPECT_THAT(outcome.message, HasSubstr(row.expected));
    EXPECT_EQ(dq.values, std::vector<float>(dq.values.size(), -7.0F)) << row.expected;
    EXPECT_EQ(dbias.values, std::vector<float>(dbias.values.size(), -7.0F)) << row.expected;
  }
}

TEST(CExplainBackward, NamesTheKernel) {
  GradientCall call;
  FloatTensor dq({1, 5, 2, 8});
  fovea_attention_backward_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.forward = &call.args;
  args.dout = &call.dout.tensor;
  args.dq = &dq.tensor;
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_explain_backward, &args, static_cast<std::int32_t>(FOVEA_JSON), &text)
                .message,
            "");
  EXPECT_THAT(std::string(text), HasSubstr("cpu/attention_backward"));
  fovea_string_free(text);
}

struct SecondGradients {
  FloatTensor q{{1, 5, 2, 8}, kPoison}, k{{1, 5, 2, 8}, kPoison}, v{{1, 5, 2, 8}, kPoison};
  FloatTensor dout{{1, 5, 2, 8}, kPoison}, dlse{{1, 2, 5}, kPoison}, sinks{{2}, kPoison};
  FloatTensor bias{{2, 5, 5}, kPoison}, slopes{{2}, kPoison};
};

TEST(CAttentionDoubleBackward, EqualsTheCxxDoor) {
  GradientCall call;
  FloatTensor sinks({2}, 0.5F), dlse({1, 2, 5}, 0.25F), ddsinks({2}, 2.0F);
  SecondGradients c, cxx;
  call.args.sinks = &sinks.tensor;
  // The directions differ: the inputs of the call, in turn.
  const fovea_named_tensor directions[] = {{"slopes", &call.own.tensor},
                                           {"bias", &call.bias.tensor}};
  const fovea_named_tensor wanted[] = {{"bias", &c.bias.tensor}, {"slopes", &c.slopes.tensor}};
  fovea_attention_double_backward_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.forward = &call.args;
  args.dout = &call.dout.tensor;
  args.dlse = &dlse.tensor;
  args.ddq = &call.k.tensor;
  args.ddk = &call.v.tensor;
  args.ddv = &call.q.tensor;
  args.ddsinks = &ddsinks.tensor;
  args.ddcaptured = directions;
  args.num_ddcaptured = 2;
  args.grad_dout = &c.dout.tensor;
  args.grad_dlse = &c.dlse.tensor;
  args.grad_q = &c.q.tensor;
  args.grad_k = &c.k.tensor;
  args.grad_v = &c.v.tensor;
  args.grad_sinks = &c.sinks.tensor;
  args.grad_captured = wanted;
  args.num_grad_captured = 2;
  ASSERT_EQ(outcome_of(fovea_attention_double_backward, &args).message, "");

  AttentionForward forward = call.cxx();
  forward.sinks = view_of(sinks);
  attention_double_backward(
      {.backward = {.dout = view_of(call.dout), .dlse = view_of(dlse), .forward = forward},
       .ddq = view_of(call.k),
       .ddk = view_of(call.v),
       .ddv = view_of(call.q),
       .ddsinks = view_of(ddsinks),
       .ddcaptured = {{"slopes_2", view_of(call.own)}, {"bias", view_of(call.bias)}},
       .grad_dout = view_of(cxx.dout),
       .grad_dlse = view_of(cxx.dlse),
       .grad_q = view_of(cxx.q),
       .grad_k = view_of(cxx.k),
       .grad_v = view_of(cxx.v),
       .grad_sinks = view_of(cxx.sinks),
       .grad_captured = {{"bias", view_of(cxx.bias)}, {"slopes_2", view_of(cxx.slopes)}}});
  for (FloatTensor SecondGradients::*each :
       {&SecondGradients::q, &SecondGradients::k, &SecondGradients::v, &SecondGradients::dout,
        &SecondGradients::dlse, &SecondGradients::sinks, &SecondGradients::bias,
        &SecondGradients::slopes})
    EXPECT_EQ((c.*each).values, (cxx.*each).values);

  char* text = nullptr;
  ASSERT_EQ(
      outcome_of(fovea_explain_double_backward, &args, static_cast<std::int32_t>(FOVEA_TEXT), &text)
          .message,
      "");
  EXPECT_THAT(std::string(text), HasSubstr("cpu/attention_double_backward, the plain path"));
  fovea_string_free(text);

  args.grad_sinks = &c.bias.tensor;
  EXPECT_THAT(outcome_of(fovea_attention_double_backward, &args).message,
              HasSubstr("grad_sinks is f32 [2, 5, 5]; expected f32 [2]"));
  args.dout = nullptr;
  EXPECT_EQ(outcome_of(fovea_attention_double_backward, &args).message,
            "fovea_attention_double_backward: dout: is NULL; expected a tensor");
}

TEST(CAttentionJvp, EqualsTheCxxDoor) {
  GradientCall call;
  FloatTensor out_tangent({1, 5, 2, 8}, kPoison), lse_tangent({1, 2, 5}, kPoison);
  const fovea_named_tensor tangent{"alibi", &call.own.tensor};
  fovea_attention_jvp_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.forward = &call.args;
  args.q_tangent = &call.dout.tensor;
  args.captured_tangents = &tangent;
  args.num_captured_tangents = 1;
  args.out_tangent = &out_tangent.tensor;
  args.lse_tangent = &lse_tangent.tensor;
  ASSERT_EQ(outcome_of(fovea_attention_jvp, &args).message, "");

  FloatTensor cxx_out({1, 5, 2, 8}, kPoison), cxx_lse({1, 2, 5}, kPoison);
  attention_jvp({.forward = call.cxx(),
                 .q_tangent = view_of(call.dout),
                 .captured_tangents = {{"slopes", view_of(call.own)}},
                 .out_tangent = view_of(cxx_out),
                 .lse_tangent = view_of(cxx_lse)});
  EXPECT_EQ(out_tangent.values, cxx_out.values);
  EXPECT_EQ(lse_tangent.values, cxx_lse.values);

  args.out_tangent = nullptr;
  EXPECT_THAT(outcome_of(fovea_attention_jvp, &args).message, HasSubstr("out_tangent: is NULL"));
}

/// What a call along q and the slopes of ALiBi writes.
struct Tangents {
  explicit Tangents(GradientCall& call) : along{"alibi", &call.own.tensor} {
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.forward = &call.args;
    args.q_tangent = &call.dout.tensor;
    args.captured_tangents = &along;
    args.num_captured_tangents = 1;
    args.out_tangent = &out.tensor;
    args.lse_tangent = &lse.tensor;
  }

  fovea_named_tensor along;
  FloatTensor out{{1, 5, 2, 8}, kPoison}, lse{{1, 2, 5}, kPoison};
  fovea_attention_jvp_args args{};
};

TEST(CJvpPlan, RunsWithTheBitsOfACall) {
  GradientCall call;
  Tangents direct(call), run(call);
  ASSERT_EQ(outcome_of(fovea_attention_jvp, &direct.args).message, "");
  fovea_plan* plan = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_create_jvp, &run.args, &plan).message, "");
  EXPECT_THAT(outcome_of(fovea_plan_run_jvp, plan, &run.args).message,
              HasSubstr("workspace has 0 bytes; expected"));
  EXPECT_TRUE(std::isnan(run.out.values[0]));
  std::vector<char> workspace(fovea_plan_workspace_bytes(plan));
  run.args.workspace = workspace.data();
  run.args.workspace_bytes = workspace.size();
  ASSERT_EQ(outcome_of(fovea_plan_run_jvp, plan, &run.args).message, "");
  EXPECT_EQ(run.out.values, direct.out.values);
  EXPECT_EQ(run.lse.values, direct.lse.values);
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_explain, plan, FOVEA_TEXT, &text).message, "");
  EXPECT_THAT(text, HasSubstr("kernel     cpu/attention_jvp"));
  fovea_string_free(text);
  EXPECT_THAT(outcome_of(fovea_plan_run, plan, &call.args).message,
              HasSubstr("the plan is one of attention_jvp"));
  fovea_plan_destroy(plan);
}

TEST(CJvpPlan, RefusesOtherArgumentsThanItsOwnAndWritesNothing) {
  GradientCall call;
  Tangents given(call);
  fovea_plan* plan = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_create_jvp, &given.args, &plan).message, "");
  std::vector<char> workspace(fovea_plan_workspace_bytes(plan));
  given.args.workspace = workspace.data();
  given.args.workspace_bytes = workspace.size();
  given.args.q_tangent = nullptr;
  EXPECT_THAT(outcome_of(fovea_plan_run_jvp, plan, &given.args).message,
              HasSubstr("q_tangent is missing; the plan was made with it"));
  EXPECT_TRUE(std::isnan(given.out.values[0]));
  given.args.workspace = nullptr;
  EXPECT_EQ(outcome_of(fovea_plan_run_jvp, plan, &given.args).message,
            "fovea_plan_run_jvp: workspace is NULL; expected workspace_bytes bytes");
  fovea_plan_destroy(plan);
  plan = reinterpret_cast<fovea_plan*>(&call);
  EXPECT_THAT(outcome_of(fovea_plan_create_jvp, &given.args, &plan).message,
              HasSubstr("workspace is NULL"));
  EXPECT_EQ(plan, nullptr);
}

TEST(CExplainJvp, NamesTheKernelAndWhatMoves) {
  GradientCall call;
  Tangents given(call);
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_explain_jvp, &given.args, FOVEA_TEXT, &text).message, "");
  EXPECT_THAT(text, HasSubstr("kernel     cpu/attention_jvp"));
  EXPECT_THAT(text, HasSubstr("along q slopes"));
  fovea_string_free(text);
  EXPECT_EQ(outcome_of(fovea_explain_jvp, &given.args, FOVEA_TEXT, nullptr).kind,
            FOVEA_INVALID_ARGUMENT);
}

TEST(CAttentionJvp, TakesItsWorkspaceFromTheRuntimeOfItsForwardCall) {
  GradientCall call;
  Tangents given(call);
  fovea_runtime* runtime = nullptr;
  ASSERT_EQ(outcome_of(fovea_runtime_create, 1, &runtime).message, "");
  fovea_allocator nothing{};
  nothing.struct_size = sizeof(nothing);
  nothing.version = FOVEA_ABI_VERSION;
  nothing.allocate = [](void*, std::size_t, std::size_t, DLDevice, void*) -> void* {
    return nullptr;
  };
  nothing.deallocate = [](void*, void*, std::size_t, DLDevice, void*) {};
  ASSERT_EQ(outcome_of(fovea_runtime_set_allocator, runtime, &nothing).message, "");
  call.args.runtime = runtime;
  EXPECT_EQ(outcome_of(fovea_attention_jvp, &given.args).kind, FOVEA_INTERNAL);
  EXPECT_TRUE(std::isnan(given.out.values[0]));
  fovea_runtime_destroy(runtime);
}

/// Addresses of a GPU that no host may follow.
void move_to_gpu(GradientCall& call) {
  std::uintptr_t place = 0;
  for (FloatTensor* tensor : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.bias,
                              &call.slopes, &call.own, &call.dout}) {
    tensor->tensor.device = {kDLCUDA, 0};
    tensor->tensor.data = reinterpret_cast<void*>(place += 64);
  }
}

TEST(CGradients, OfTensorsOnAGpuAreRefusedAndFollowNoAddress) {
  GradientCall call;
  move_to_gpu(call);
  call.args.stream = reinterpret_cast<void*>(std::uintptr_t{64});
  fovea_attention_backward_args backward{};
  backward.struct_size = sizeof(backward);
  backward.version = FOVEA_ABI_VERSION;
  backward.forward = &call.args;
  backward.dout = &call.dout.tensor;
  backward.dq = &call.dout.tensor;
  fovea_attention_double_backward_args second{};
  second.struct_size = sizeof(second);
  second.version = FOVEA_ABI_VERSION;
  second.forward = &call.args;
  second.dout = &call.dout.tensor;
  second.grad_q = &call.dout.tensor;
  Tangents tangents(call);
  tangents.args.out_tangent = &call.dout.tensor;
  tangents.args.lse_tangent = nullptr;
  // No driver, or an output over an input.
  EXPECT_NE(outcome_of(fovea_attention_backward, &backward).kind, FOVEA_OK);
  EXPECT_NE(outcome_of(fovea_attention_jvp, &tangents.args).kind, FOVEA_OK);
  const Outcome outcome = outcome_of(fovea_attention_double_backward, &second);
  EXPECT_EQ(outcome.kind, FOVEA_UNSUPPORTED) << outcome.message;
  EXPECT_THAT(outcome.message, HasSubstr("q lives on cuda:0; expected the cpu"));
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_explain_jvp, &tangents.args, FOVEA_TEXT, &text).message, "");
  EXPECT_THAT(text, HasSubstr("cuda/sm80/attention_jvp"));  // chosen, or refused
  fovea_string_free(text);
}

TEST(CMergeStates, JoinsStatesAndRefusesHalfOfOne) {
  FloatTensor first({1, 1, 1, 2}, 1.0F), second({1, 1, 1, 2}, 4.0F), out({1, 1, 1, 2}, kPoison);
  FloatTensor first_lse({1, 1, 1}, 0.0F), second_lse({1, 1, 1}, std::log(2.0F)), lse({1, 1, 1});
  const DLTensor* outs[] = {&first.tensor, &second.tensor};
  const DLTensor* lses[] = {&first_lse.tensor, &second_lse.tensor};
  fovea_merge_states_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.outs = outs;
  args.lses = lses;
  args.num_states = 2;
  args.out = &out.tensor;
  args.lse = &lse.tensor;
  ASSERT_EQ(outcome_of(fovea_merge_states, &args).message, "");
  EXPECT_NEAR(out.values[0], 3.0F, 1e-6F);  // weights 1/3 and 2/3
  EXPECT_NEAR(lse.values[0], std::log(3.0F), 1e-6F);

  lses[1] = nullptr;
  EXPECT_THAT(outcome_of(fovea_merge_states, &args).message, HasSubstr("lses[1]: is NULL"));
  args.lses = nullptr;
  EXPECT_THAT(outcome_of(fovea_merge_states, &args).message, HasSubstr("lses: is NULL"));
}

TEST(CMergeStates, PlansRunAndExplain) {
  FloatTensor first({1, 1, 1, 2}, 1.0F), second({1, 1, 1, 2}, 4.0F), out({1, 1, 1, 2}, kPoison);
  FloatTensor first_lse({1, 1, 1}, 0.0F), second_lse({1, 1, 1}, std::log(2.0F));
  const DLTensor* outs[] = {&first.tensor, &second.tensor};
  const DLTensor* lses[] = {&first_lse.tensor, &second_lse.tensor};
  fovea_merge_states_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.outs = outs;
  args.lses = lses;
  args.num_states = 2;
  args.out = &out.tensor;
  fovea_plan* plan = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_create_merge_states, &args, &plan).message, "");
  EXPECT_THAT(outcome_of(fovea_plan_run_merge_states, plan, &args).message,
              HasSubstr("workspace has 0 bytes"));
  std::vector<char> workspace(fovea_plan_workspace_bytes(plan));
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size();
  ASSERT_EQ(outcome_of(fovea_plan_run_merge_states, plan, &args).message, "");
  EXPECT_NEAR(out.values[0], 3.0F, 1e-6F);
  EXPECT_THAT(outcome_of(fovea_plan_run_append, plan, nullptr).message,
              HasSubstr("the plan is one of merge_states"));
  fovea_plan_destroy(plan);
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_explain_merge_states, &args, FOVEA_TEXT, &text).message, "");
  EXPECT_THAT(text, HasSubstr("kernel     cpu/merge_states"));
  fovea_string_free(text);
}

TEST(CBackwardPlan, RunsWithTheBitsOfACall) {
  GradientCall call;
  Gradients direct, run;
  const auto args_of = [&](Gradients& gradients) {
    fovea_attention_backward_args args{};
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.forward = &call.args;
    args.dout = &call.dout.tensor;
    args.dq = &gradients.dq.tensor;
    args.dk = &gradients.dk.tensor;
    args.dv = &gradients.dv.tensor;
    return args;
  };
  const fovea_attention_backward_args direct_args = args_of(direct);
  ASSERT_EQ(outcome_of(fovea_attention_backward, &direct_args).message, "");
  fovea_attention_backward_args args = args_of(run);
  fovea_plan* plan = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_create_backward, &args, &plan).message, "");
  std::vector<char> workspace(fovea_plan_workspace_bytes(plan));
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size();
  ASSERT_EQ(outcome_of(fovea_plan_run_backward, plan, &args).message, "");
  EXPECT_EQ(run.dq.values, direct.dq.values);
  EXPECT_EQ(run.dk.values, direct.dk.values);
  EXPECT_EQ(run.dv.values, direct.dv.values);
  EXPECT_THAT(outcome_of(fovea_plan_run, plan, &call.args).message,
              HasSubstr("the plan is one of attention_backward"));
  fovea_plan_destroy(plan);
}

/// An id for each packed row: the same bits as documents(PackedSegments), forward and backward.
struct PackedCall : SmallCall {
  PackedCall() {
    for (FloatTensor* tensor : {&q, &k, &v, &out, &dq, &dk, &dv}) {
      tensor->shape = {5, 2, 8};
      tensor->tensor.ndim = 3;
    }
    args.lse = &lse.tensor;
    args.cu_seqlens_q = args.cu_seqlens_kv = &cu_tensor;
    args.segments_q = &ids_tensor;
    for (std::size_t i = 0; i < q.values.size(); ++i) dout.values[i] = static_cast<float>(i % 3);
    dout.shape = {5, 2, 8};
    dout.tensor.ndim = 3;
  }
  AttentionForward cxx() {
    const TensorView ids_view = view(ids, {5}), cu_view = view(cu, {3});
    return {.q = view_of(q),
            .k = view_of(k),
            .v = view_of(v),
            .out = view_of(out),
            .lse = view_of(lse),
            .mask = documents({.segments_q = ids_view, .cu_seqlens_q = cu_view}),
            .cu_seqlens_q = cu_view,
            .cu_seqlens_kv = cu_view};
  }

  std::int32_t ids[5] = {0, 0, 1, 1, -1}, cu[3] = {0, 3, 5};
  std::int64_t five[1] = {5}, three[1] = {3};
  DLTensor ids_tensor{ids, {kDLCPU, 0}, 1, {kDLInt, 32, 1}, five, nullptr, 0};
  DLTensor cu_tensor{cu, {kDLCPU, 0}, 1, {kDLInt, 32, 1}, three, nullptr, 0};
  FloatTensor lse{{2, 5}}, dout{{1, 5, 2, 8}};
  FloatTensor dq{{1, 5, 2, 8}, kPoison}, dk{{1, 5, 2, 8}, kPoison}, dv{{1, 5, 2, 8}, kPoison};
};

TEST(CPackedSegments, AreThoseOfCpp) {
  PackedCall call;
  ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  const std::vector<float> out = call.out.values, lse = call.lse.values;
  EXPECT_EQ(out[4 * 16], 0) << "padding sees nothing";
  EXPECT_EQ(out[2 * 16], call.v.values[2 * 16]) << "alone in its document and sequence";
  attention_forward(call.cxx());
  EXPECT_EQ(call.out.values, out);
  EXPECT_EQ(call.lse.values, lse);

  fovea_attention_backward_args backward{};
  backward.struct_size = sizeof(backward);
  backward.version = FOVEA_ABI_VERSION;
  backward.forward = &call.args;
  backward.dout = &call.dout.tensor;
  backward.dq = &call.dq.tensor;
  backward.dk = &call.dk.tensor;
  backward.dv = &call.dv.tensor;
  ASSERT_EQ(outcome_of(fovea_attention_backward, &backward).message, "");
  const std::vector<float> dq = call.dq.values, dk = call.dk.values, dv = call.dv.values;
  attention_backward({.dout = view_of(call.dout),
                      .forward = call.cxx(),
                      .dq = view_of(call.dq),
                      .dk = view_of(call.dk),
                      .dv = view_of(call.dv)});
  EXPECT_EQ(call.dq.values, dq);
  EXPECT_EQ(call.dk.values, dk);
  EXPECT_EQ(call.dv.values, dv);
}

TEST(CPackedSegments, HaveAnIdForEachRow) {
  PackedCall call;
  call.five[0] = 4;
  EXPECT_EQ(outcome_of(fovea_attention_forward, &call.args).message,
            "fovea_attention_forward: segments_q: is i32 [4]; expected i32 or i64 [5], an id for "
            "each packed row");
  EXPECT_EQ(call.out.values, std::vector<float>(80, -7.0F));
  call.five[0] = 5;
  call.args.cu_seqlens_kv = nullptr;
  EXPECT_THAT(outcome_of(fovea_attention_forward, &call.args).message,
              HasSubstr("cu_seqlens_kv: is NULL"));
}

}  // namespace
}  // namespace fovea::testing
