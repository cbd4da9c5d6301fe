// Programs as handles: the same bits as their texts, whatever else the call poses, and refusals that name the argument.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "fovea/fovea.h"

#include "unit/ffi/c_call.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

constexpr DLDataType kF32{kDLFloat, 32, 1};
constexpr DLDataType kI32{kDLInt, 32, 1};

fovea_program_args program_args(fovea_mod kind, const char* text,
                                const std::vector<fovea_tensor_slot>& tensors = {},
                                const std::vector<fovea_scalar_slot>& scalars = {}) {
  fovea_program_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.kind = kind;
  args.text = text;
  args.tensors = tensors.data();
  args.num_tensors = tensors.size();
  args.scalars = scalars.data();
  args.num_scalars = scalars.size();
  return args;
}

struct OwnedProgram {
  OwnedProgram(fovea_mod kind, const char* text, const std::vector<fovea_tensor_slot>& tensors = {},
               const std::vector<fovea_scalar_slot>& scalars = {}) {
    const fovea_program_args args = program_args(kind, text, tensors, scalars);
    outcome = outcome_of(fovea_program_create, &args, &program);
    EXPECT_EQ(outcome.kind == FOVEA_OK, program != nullptr);
  }
  OwnedProgram(const OwnedProgram&) = delete;
  OwnedProgram& operator=(const OwnedProgram&) = delete;
  ~OwnedProgram() { fovea_program_destroy(program); }

  std::string text() const {
    char* text = nullptr;
    if (fovea_program_text(program, &text, nullptr) != FOVEA_OK) return "(refused)";
    std::string copy = text;
    fovea_string_free(text);
    return copy;
  }

  fovea_program* program = nullptr;
  Outcome outcome;
};

TEST(CProgram, TellsWhatItWasMadeWith) {
  const OwnedProgram score(FOVEA_SCORE_MOD, "score+( slopes [q_head]*kv_idx)*n",
                           {{"unread", kI32, 3}, {"slopes", kF32, 1}},
                           {{"n", FOVEA_SCALAR_FLOAT}, {"m", FOVEA_SCALAR_INT}});
  ASSERT_EQ(score.outcome.message, "");
  EXPECT_EQ(score.text(), "score + slopes[q_head] * kv_idx * n");
  EXPECT_EQ(fovea_program_kind(score.program), FOVEA_SCORE_MOD);
  EXPECT_EQ(fovea_program_num_tensors(score.program), 2U);
  EXPECT_STREQ(fovea_program_tensor_name(score.program, 0), "unread");
  EXPECT_STREQ(fovea_program_tensor_name(score.program, 1), "slopes");
  EXPECT_EQ(fovea_program_tensor_name(score.program, 2), nullptr);
  EXPECT_EQ(fovea_program_num_scalars(score.program), 2U);
  EXPECT_STREQ(fovea_program_scalar_name(score.program, 1), "m");
  EXPECT_EQ(fovea_program_scalar_name(score.program, 2), nullptr);
  const OwnedProgram mask(FOVEA_MASK_MOD, "kv_idx <= q_idx");
  EXPECT_EQ(fovea_program_kind(mask.program), FOVEA_MASK_MOD);
  EXPECT_EQ(mask.text(), "kv_idx <= q_idx");
}

TEST(CProgram, NullIsRefusedOrIgnored) {
  char* text = nullptr;
  EXPECT_EQ(outcome_of(fovea_program_text, nullptr, &text).kind, FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_program_kind(nullptr), -1);
  EXPECT_EQ(fovea_program_num_tensors(nullptr), 0U);
  EXPECT_EQ(fovea_program_num_scalars(nullptr), 0U);
  EXPECT_EQ(fovea_program_tensor_name(nullptr, 0), nullptr);
  EXPECT_EQ(fovea_program_scalar_name(nullptr, 0), nullptr);
  fovea_program_destroy(nullptr);
}

TEST(CProgram, ATextThatIsRefusedHasAColumn) {
  const std::vector<fovea_tensor_slot> slots{{"slopes", kF32, 1}};
  const fovea_program_args args = program_args(FOVEA_SCORE_MOD, "score + slpoes[q_head]", slots);
  fovea_program* program = nullptr;
  fovea_error* error = nullptr;
  EXPECT_EQ(fovea_program_create(&args, &program, &error), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(program, nullptr);
  EXPECT_EQ(fovea_error_column(error), 9U);
  EXPECT_THAT(fovea_error_message(error), HasSubstr("did you mean 'slopes'?"));
  fovea_error_free(error);
}

TEST(CProgram, RefusalsNameTheArgument) {
  const auto refusal = [](fovea_program_args args) {
    fovea_program* program = nullptr;
    const Outcome outcome = outcome_of(fovea_program_create, &args, &program);
    EXPECT_EQ(outcome.kind, FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(program, nullptr);
    return outcome.message;
  };
  EXPECT_THAT(refusal(program_args(FOVEA_SCORE_MOD, nullptr)), HasSubstr("text is NULL"));
  fovea_program_args wrong_kind = program_args(FOVEA_SCORE_MOD, "score");
  wrong_kind.kind = 7;
  EXPECT_THAT(refusal(wrong_kind), HasSubstr("kind is 7"));
  EXPECT_THAT(refusal(program_args(FOVEA_SCORE_MOD, "score", {{nullptr, kF32, 1}})),
              HasSubstr("tensors[0]: name is NULL"));
  EXPECT_THAT(refusal(program_args(FOVEA_SCORE_MOD, "score", {{"t", kF32, 9}})),
              HasSubstr("tensors[0]: rank is 9; expected 0 to 8"));
  EXPECT_THAT(refusal(program_args(FOVEA_SCORE_MOD, "score", {{"t", {kDLFloat, 64, 1}, 1}})),
              HasSubstr("tensors[0]: dtype is f64; expected f32"));
  EXPECT_THAT(refusal(program_args(FOVEA_SCORE_MOD, "score", {}, {{"n", 2}})),
              HasSubstr("scalars[0]: type is 2"));
  EXPECT_THAT(
      refusal(program_args(FOVEA_SCORE_MOD, "score", {{"t", kF32, 1}}, {{"t", FOVEA_SCALAR_INT}})),
      HasSubstr("'t' is given twice"));
  EXPECT_THAT(refusal(program_args(FOVEA_MASK_MOD, "score > 1")),
              HasSubstr("column 1: a mask cannot read"));
  EXPECT_THAT(refusal(program_args(FOVEA_SCORE_MOD, "q_idx < 3")), HasSubstr("is bool"));
  fovea_program_args no_slots = program_args(FOVEA_SCORE_MOD, "score");
  no_slots.num_tensors = 1;
  EXPECT_THAT(refusal(no_slots), HasSubstr("tensors is NULL"));
}

/// A call that every word takes part in, and its two programs as texts and as handles. Names of one program mean
/// something else in the other, and what words call their tensors.
class CProgramCall : public ::testing::Test {
 protected:
  CProgramCall() {
    for (std::size_t i = 0; i < bias.values.size(); ++i) bias.values[i] = 0.1F * float(i % 11);
    for (std::size_t i = 0; i < table.values.size(); ++i) table.values[i] = float(i % 3) - 1;
    for (auto* call : {&texts, &handles}) {
      call->args.lse = call == &texts ? &lses[0].tensor : &lses[1].tensor;
      call->args.softcap = 20;
      call->args.bias = &bias.tensor;
      call->args.alibi = &slopes.tensor;
      call->args.causal = 1;
      call->args.has_window_left = 1;
      call->args.window_left = 3;
    }
    texts.args.score_mod = kScore;
    texts.args.mask_mod = kMaskText;
    texts.args.tensors = named;
    texts.args.num_tensors = 3;
    texts.args.scalars = named_scalars;
    texts.args.num_scalars = 2;
    handles.args.score_program = score.program;
    handles.args.score_tensors = score_tensors;
    handles.args.num_score_tensors = 2;
    handles.args.score_scalars = &gain;
    handles.args.num_score_scalars = 1;
    handles.args.mask_program = mask.program;
    handles.args.mask_tensors = mask_tensors;
    handles.args.num_mask_tensors = 1;
    handles.args.mask_scalars = &reach;
    handles.args.num_mask_scalars = 1;
  }

  void expect_equal(const std::string& what) {
    const auto run = [](SmallCall& call) {
      call.out.values.assign(call.out.values.size(), -7);
      return outcome_of(fovea_attention_forward, &call.args).message;
    };
    named_scalars[0].value = gain;
    named_scalars[1].value = reach;
    ASSERT_EQ(run(texts), "") << what;
    ASSERT_EQ(run(handles), "") << what;
    EXPECT_EQ(handles.out.values, texts.out.values) << what;
    EXPECT_EQ(lses[0].values, lses[1].values) << what;
  }

  static constexpr const char* kScore = "score * gain + slopes[q_head] * kv_idx + bias[0, q_head]";
  static constexpr const char* kMaskText = "kv_idx <= reach || window_left[q_idx, kv_idx] > 0.5";
  static constexpr const char* kMask = "kv_idx <= gain || slopes[q_idx, kv_idx] > 0.5";
  FloatTensor bias{{2, 5, 5}}, slopes{{2}, 0.25F}, own{{2}, -0.5F}, row{{1, 2}, 0.75F},
      table{{5, 5}};
  FloatTensor lses[2] = {FloatTensor({1, 2, 5}), FloatTensor({1, 2, 5})};
  fovea_named_tensor named[3] = {
      {"slopes", &own.tensor}, {"bias", &row.tensor}, {"window_left", &table.tensor}};
  fovea_named_scalar named_scalars[2] = {{"gain", FOVEA_SCALAR_FLOAT, 0},
                                         {"reach", FOVEA_SCALAR_INT, 0}};
  double gain = 0.5, reach = 1;
  const DLTensor* score_tensors[2] = {&row.tensor, &own.tensor};
  const DLTensor* mask_tensors[1] = {&table.tensor};
  OwnedProgram score{FOVEA_SCORE_MOD,
                     kScore,
                     {{"bias", kF32, 2}, {"slopes", kF32, 1}},
                     {{"gain", FOVEA_SCALAR_FLOAT}}};
  OwnedProgram mask{FOVEA_MASK_MOD, kMask, {{"slopes", kF32, 2}}, {{"gain", FOVEA_SCALAR_INT}}};
  SmallCall texts, handles;
};

TEST_F(CProgramCall, GivesTheBitsOfItsTextBesideEveryWord) {
  ASSERT_EQ(score.outcome.message + mask.outcome.message, "");
  expect_equal("all words");
  const std::vector<float> before = handles.out.values;
  gain = 2;
  reach = 0;
  own.values[1] = 3;
  expect_equal("other numbers");
  EXPECT_NE(handles.out.values, before);
  FloatTensor others({5, 5}, 1);
  mask_tensors[0] = named[2].tensor = &others.tensor;
  expect_equal("another tensor");
  FloatTensor wide_bias({1, 5, 5}, 2);
  texts.args.bias = handles.args.bias = &wide_bias.tensor;
  expect_equal("a bias that broadcasts");
  texts.args.window_left = handles.args.window_left = 0;
  expect_equal("another window");
  texts.args.bias = handles.args.bias = &bias.tensor;
  expect_equal("a bias of each head");
  for (auto* call : {&texts, &handles}) {
    call->args.softcap = 0;
    call->args.bias = call->args.alibi = nullptr;
    call->args.causal = call->args.has_window_left = 0;
  }
  expect_equal("no words");
  texts.args.mask = handles.args.mask = nullptr;
  IndexTensor ids({1, 5}, {0, 0, 1, 1, -1});
  texts.args.segments_q = handles.args.segments_q = &ids.tensor;
  expect_equal("segments");
}

TEST_F(CProgramCall, PlansServeItsRunsWithWhateverTheyCapture) {
  fovea_plan* plan = nullptr;
  fovea_plan_options* const no_options = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_create, &handles.args, no_options, &plan).message, "");
  std::vector<std::byte> workspace(fovea_plan_workspace_bytes(plan));
  std::list<FloatTensor> tensors;
  for (int i = 0; i < 3; ++i) {
    gain = named_scalars[0].value = 0.5 * i;
    named_scalars[1].value = reach;
    FloatTensor& fresh = tensors.emplace_back(std::vector<std::int64_t>{2}, 0.25F * float(i));
    score_tensors[1] = named[0].tensor = &fresh.tensor;
    ASSERT_EQ(outcome_of(fovea_attention_forward, &texts.args).message, "");
    fovea_attention_forward_args args = handles.args;
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size();
    ASSERT_EQ(outcome_of(fovea_plan_run, plan, &args).message, "");
    EXPECT_EQ(handles.out.values, texts.out.values) << i;
  }
  // The formula is the plan's, whoever says it.
  ASSERT_EQ(outcome_of(fovea_attention_forward, &texts.args).message, "");
  const OwnedProgram other(FOVEA_SCORE_MOD, "score - slopes[q_head]",
                           {{"bias", kF32, 2}, {"slopes", kF32, 1}},
                           {{"gain", FOVEA_SCALAR_FLOAT}});
  handles.args.score_program = other.program;
  EXPECT_THAT(outcome_of(fovea_plan_run, plan, &handles.args).message,
              HasSubstr("expected the plan's"));
  fovea_plan_destroy(plan);
}

TEST_F(CProgramCall, OutlivesNoPlan) {
  fovea_plan* plan = nullptr;
  fovea_plan_options* const no_options = nullptr;
  {
    const OwnedProgram twin(FOVEA_SCORE_MOD, kScore, {{"bias", kF32, 2}, {"slopes", kF32, 1}},
                            {{"gain", FOVEA_SCALAR_FLOAT}});
    fovea_attention_forward_args args = handles.args;
    args.score_program = twin.program;
    ASSERT_EQ(outcome_of(fovea_plan_create, &args, no_options, &plan).message, "");
  }
  std::vector<std::byte> workspace(fovea_plan_workspace_bytes(plan));
  handles.args.workspace = workspace.data();
  handles.args.workspace_bytes = workspace.size();
  EXPECT_EQ(outcome_of(fovea_plan_run, plan, &handles.args).message, "");
  fovea_plan_destroy(plan);
}

TEST_F(CProgramCall, HasGradientsAndTangentsByName) {
  FloatTensor dout({1, 5, 2, 8});
  for (std::size_t i = 0; i < dout.values.size(); ++i) dout.values[i] = std::sin(float(i));
  struct Results {
    FloatTensor dq{{1, 5, 2, 8}}, dbias{{2, 5, 5}}, dslopes{{2}}, down{{2}}, dgain{{1}};
    FloatTensor tangent{{1, 5, 2, 8}};
  };
  Results by_text, by_handle;
  FloatTensor motion({2}, 1);
  const fovea_named_tensor moved{"slopes", &motion.tensor};
  for (const bool is_handle : {false, true}) {
    SmallCall& call = is_handle ? handles : texts;
    Results& results = is_handle ? by_handle : by_text;
    named_scalars[0].value = gain;
    named_scalars[1].value = reach;
    ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
    const fovea_named_tensor wanted[] = {{"bias", &results.dbias.tensor},
                                         {"alibi", &results.dslopes.tensor},
                                         {"slopes", &results.down.tensor},
                                         {"gain", &results.dgain.tensor}};
    fovea_attention_backward_args backward{};
    backward.struct_size = sizeof(backward);
    backward.version = FOVEA_ABI_VERSION;
    backward.forward = &call.args;
    backward.dout = &dout.tensor;
    backward.dq = &results.dq.tensor;
    backward.dcaptured = wanted;
    backward.num_dcaptured = 4;
    ASSERT_EQ(outcome_of(fovea_attention_backward, &backward).message, "");
    fovea_attention_jvp_args jvp{};
    jvp.struct_size = sizeof(jvp);
    jvp.version = FOVEA_ABI_VERSION;
    jvp.forward = &call.args;
    jvp.captured_tangents = &moved;
    jvp.num_captured_tangents = 1;
    jvp.out_tangent = &results.tangent.tensor;
    ASSERT_EQ(outcome_of(fovea_attention_jvp, &jvp).message, "");
  }
  EXPECT_EQ(by_handle.dq.values, by_text.dq.values);
  EXPECT_EQ(by_handle.dbias.values, by_text.dbias.values);
  EXPECT_EQ(by_handle.dslopes.values, by_text.dslopes.values);
  EXPECT_EQ(by_handle.down.values, by_text.down.values);
  EXPECT_EQ(by_handle.dgain.values, by_text.dgain.values);
  EXPECT_EQ(by_handle.tangent.values, by_text.tangent.values);
  EXPECT_NE(by_handle.down.values, by_handle.dslopes.values);
}

TEST_F(CProgramCall, ServesDecoding) {
  std::vector<float> outs[2];
  IndexTensor lengths({1}, {5});
  for (const bool is_handle : {false, true}) {
    SmallCall& call = is_handle ? handles : texts;
    named_scalars[0].value = gain;
    named_scalars[1].value = reach;
    fovea_attention_decode_args decode{};
    decode.struct_size = sizeof(decode);
    decode.version = FOVEA_ABI_VERSION;
    decode.forward = &call.args;
    decode.seqlens = &lengths.tensor;
    ASSERT_EQ(outcome_of(fovea_attention_decode, &decode).message, "");
    outs[is_handle] = call.out.values;
  }
  EXPECT_EQ(outs[0], outs[1]);
}

TEST_F(CProgramCall, MayLeaveOutWhatTheFormulaDoesNotRead) {
  const OwnedProgram program(FOVEA_SCORE_MOD, "score * gain",
                             {{"bias", kF32, 2}, {"slopes", kF32, 1}},
                             {{"gain", FOVEA_SCALAR_FLOAT}});
  handles.args.score_program = program.program;
  score_tensors[0] = score_tensors[1] = nullptr;
  EXPECT_EQ(outcome_of(fovea_attention_forward, &handles.args).message, "");
}

TEST_F(CProgramCall, RefusalsNameTheArgumentAndWriteNothing) {
  const auto refusal = [&](const std::function<void()>& change) {
    const fovea_attention_forward_args args = handles.args;
    const std::vector<const DLTensor*> tensors(score_tensors, score_tensors + 2);
    change();
    handles.out.values.assign(handles.out.values.size(), -7);
    const Outcome outcome = outcome_of(fovea_attention_forward, &handles.args);
    EXPECT_EQ(outcome.kind, FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(handles.out.values, std::vector<float>(handles.out.values.size(), -7));
    handles.args = args;
    std::copy(tensors.begin(), tensors.end(), score_tensors);
    return outcome.message;
  };
  fovea_attention_forward_args& args = handles.args;
  EXPECT_EQ(
      refusal([&] { args.score_mod = "score"; }),
      "fovea_attention_forward: score_program: is given beside score_mod; expected one of the "
      "two");
  EXPECT_THAT(refusal([&] { args.mask_mod = "true"; }),
              HasSubstr("mask_program: is given beside mask_mod"));
  EXPECT_THAT(refusal([&] { args.mask_program = score.program; }),
              HasSubstr("mask_program: is a score program"));
  EXPECT_THAT(refusal([&] { args.score_program = mask.program; }),
              HasSubstr("score_program: is a mask program"));
  EXPECT_THAT(refusal([&] { args.num_score_tensors = 1; }),
              HasSubstr("score_program: is given 1 tensors; expected 2"));
  EXPECT_THAT(refusal([&] { args.mask_scalars = nullptr; }),
              HasSubstr("mask_program: is given 0 scalars; expected 1"));
  EXPECT_THAT(refusal([&] { args.score_program = nullptr; }),
              HasSubstr("score_program: is NULL and tensors or scalars for it are given"));
  EXPECT_THAT(refusal([&] { score_tensors[1] = nullptr; }),
              HasSubstr("slopes: is NULL; expected a tensor"));
  EXPECT_THAT(refusal([&] { score_tensors[1] = &row.tensor; }),
              HasSubstr("slopes: is f32 [1, 2]; expected f32 of rank 1, as score_program"));
  reach = 1.5;
  EXPECT_THAT(refusal([] {}), HasSubstr("gain: is 1.500000; expected a whole number"));
}

TEST_F(CProgramCall, ManyThreadsShareOne) {
  named_scalars[0].value = gain;
  named_scalars[1].value = reach;
  ASSERT_EQ(outcome_of(fovea_attention_forward, &texts.args).message, "");
  std::vector<std::thread> threads;
  std::vector<int> is_equal(4, 0);
  for (int& result : is_equal) {
    threads.emplace_back([&] {
      result = 1;
      for (int i = 0; i < 20; ++i) {
        SmallCall call;
        FloatTensor lse({1, 2, 5});
        fovea_attention_forward_args args = handles.args;
        args.q = &call.q.tensor;
        args.k = &call.k.tensor;
        args.v = &call.v.tensor;
        args.out = &call.out.tensor;
        args.lse = &lse.tensor;
        args.softcap = float(20 + i % 3);  // some formulas are new, some are there
        const bool is_right = fovea_attention_forward(&args, nullptr) == FOVEA_OK &&
                              (i % 3 != 0 || call.out.values == texts.out.values);
        if (!is_right) result = 0;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(is_equal, std::vector<int>(4, 1));
}

TEST(CProgram, ATensorOfRankZeroIsReadAtTheRun) {
  const OwnedProgram by_tensor(FOVEA_SCORE_MOD, "score * gain", {{"gain", kF32, 0}});
  ASSERT_EQ(by_tensor.outcome.message, "");
  float value = 0.5F;
  const DLTensor gain{&value, {kDLCPU, 0}, 0, kF32, nullptr, nullptr, 0};
  const DLTensor* tensors[] = {&gain};
  SmallCall handle, text;
  handle.args.score_program = by_tensor.program;
  handle.args.score_tensors = tensors;
  handle.args.num_score_tensors = 1;
  fovea_named_scalar scalar{"gain", FOVEA_SCALAR_FLOAT, 0};
  text.args.score_mod = "score * gain";
  text.args.scalars = &scalar;
  text.args.num_scalars = 1;
  const fovea_named_tensor named{"gain", &gain};
  SmallCall named_call;
  named_call.args.score_mod = "score * gain";
  named_call.args.tensors = &named;
  named_call.args.num_tensors = 1;
  for (const float next : {0.5F, 4.0F}) {
    scalar.value = value = next;
    for (SmallCall* call : {&handle, &text, &named_call})
      ASSERT_EQ(outcome_of(fovea_attention_forward, &call->args).message, "");
    EXPECT_EQ(handle.out.values, text.out.values);
    EXPECT_EQ(named_call.out.values, text.out.values);
  }
  // Its gradient is one element, of rank 0 or 1.
  FloatTensor lse({1, 2, 5}), dout({1, 5, 2, 8}, 1), element({}), line({1});
  handle.args.lse = &lse.tensor;
  ASSERT_EQ(outcome_of(fovea_attention_forward, &handle.args).message, "");
  for (std::size_t i = 0; i < dout.values.size(); ++i) dout.values[i] = std::sin(float(i));
  for (FloatTensor* dgain : {&element, &line}) {
    const fovea_named_tensor wanted{"gain", &dgain->tensor};
    fovea_attention_backward_args backward{};
    backward.struct_size = sizeof(backward);
    backward.version = FOVEA_ABI_VERSION;
    backward.forward = &handle.args;
    backward.dout = &dout.tensor;
    backward.dcaptured = &wanted;
    backward.num_dcaptured = 1;
    ASSERT_EQ(outcome_of(fovea_attention_backward, &backward).message, "");
  }
  EXPECT_NE(element.values[0], 0);
  EXPECT_EQ(element.values, line.values);
}

}  // namespace
}  // namespace fovea::testing
