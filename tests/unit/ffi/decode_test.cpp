// Attention over a cache through the C ABI: the same bits as the C++ function, and refusals that name the argument.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/kv_cache.hpp"

#include "unit/ffi/c_call.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

TensorView view_of(FloatTensor& tensor) {
  return {tensor.values.data(), make_spec(Dtype::f32, tensor.shape)};
}

/// Two sequences of 5 and 2 keys in pages of 4, two new tokens each.
struct CacheCall {
  CacheCall() {
    int i = 0;
    for (FloatTensor* tensor : {&q, &k, &v, &new_k, &new_v}) {
      for (float& value : tensor->values) value = std::sin(static_cast<float>(++i));
    }
    for (std::size_t at = 0; at < cos.values.size(); ++at) {
      cos.values[at] = std::cos(0.3F * static_cast<float>(at));
      sin.values[at] = std::sin(0.3F * static_cast<float>(at));
    }
    forward.struct_size = sizeof(forward);
    forward.version = FOVEA_ABI_VERSION;
    forward.q = &q.tensor;
    forward.k = &k.tensor;
    forward.v = &v.tensor;
    forward.out = &out.tensor;
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.forward = &forward;
    args.seqlens = &seqlens.tensor;
    args.page_table = &table.tensor;
    args.append_k = &new_k.tensor;
    args.append_v = &new_v.tensor;
    args.rotary_cos = &cos.tensor;
    args.rotary_sin = &sin.tensor;
    args.is_interleaved = 1;
  }

  AttentionDecode cxx() {
    return {.q = view_of(q),
            .cache = {.k = view_of(k),
                      .v = view_of(v),
                      .page_table = table.view(),
                      .seqlens = seqlens.view()},
            .append = {.k = view_of(new_k), .v = view_of(new_v)},
            .rotary = Rotary{.cos = view_of(cos), .sin = view_of(sin), .is_interleaved = true},
            .out = view_of(out)};
  }

  FloatTensor q{{2, 2, 4, 8}}, k{{4, 4, 2, 8}}, v{{4, 4, 2, 8}}, out{{2, 2, 4, 8}, -7.0F};
  FloatTensor new_k{{2, 2, 2, 8}}, new_v{{2, 2, 2, 8}}, cos{{16, 4}}, sin{{16, 4}};
  IndexTensor seqlens{{2}, {5, 2}}, table{{2, 3}, {2, 0, -1, 3, -1, 1 << 30}};
  fovea_attention_forward_args forward{};
  fovea_attention_decode_args args{};
};

TEST(CDecode, HasTheBitsOfTheCxxCall) {
  CacheCall c, cxx;
  EXPECT_EQ(outcome_of(fovea_attention_decode, &c.args).message, "");
  attention_decode(cxx.cxx());
  EXPECT_EQ(c.out.values, cxx.out.values);
  EXPECT_EQ(c.k.values, cxx.k.values);
  EXPECT_EQ(c.v.values, cxx.v.values);
}

/// The pages of CacheCall as codes, k in float8 with a scale that is given, v in int8 with one of each row.
struct CodedCall : CacheCall {
  CodedCall() {
    for (std::size_t i = 0; i < k_codes.size(); ++i) {
      k_codes[i] = static_cast<std::uint8_t>(0x28 + i % 16);  // numbers from 0.25 to 0.94
      v_codes[i] = static_cast<std::int8_t>(i % 255 - 127);
    }
    k_tensor = k.tensor;
    k_tensor.data = k_codes.data();
    k_tensor.dtype = {kDLFloat8_e4m3fn, 8, 1};
    v_tensor = v.tensor;
    v_tensor.data = v_codes.data();
    v_tensor.dtype = {kDLInt, 8, 1};
    forward.k = &k_tensor;
    forward.v = &v_tensor;
    args.k_scale = &k_scale.tensor;
    args.v_scale = &v_scale.tensor;
  }

  AttentionDecode cxx_coded() {
    AttentionDecode call = cxx();
    call.cache.k = TensorView(static_cast<void*>(k_codes.data()), make_spec(Dtype::e4m3, k.shape));
    call.cache.v = TensorView(static_cast<void*>(v_codes.data()), make_spec(Dtype::i8, v.shape));
    call.cache.k_scale = view_of(k_scale);
    call.cache.v_scale = view_of(v_scale);
    return call;
  }

  std::vector<std::uint8_t> k_codes = std::vector<std::uint8_t>(k.values.size());
  std::vector<std::int8_t> v_codes = std::vector<std::int8_t>(v.values.size());
  FloatTensor k_scale{{2, 2}, 0.5F}, v_scale{{4, 4, 2}, 0.25F};
  DLTensor k_tensor{}, v_tensor{};
};

TEST(CDecode, CodesAndTheirScalesHaveTheBitsOfTheCxxCall) {
  CodedCall c, cxx;
  EXPECT_EQ(outcome_of(fovea_attention_decode, &c.args).message, "");
  attention_decode(cxx.cxx_coded());
  EXPECT_EQ(c.out.values, cxx.out.values);
  EXPECT_EQ(c.k_codes, cxx.k_codes);
  EXPECT_EQ(c.v_codes, cxx.v_codes);
  EXPECT_EQ(c.v_scale.values, cxx.v_scale.values);
  EXPECT_NE(c.v_scale.values, std::vector<float>(32, 0.25F)) << "new rows have scales of their own";
  CodedCall alone;
  EXPECT_EQ(outcome_of(fovea_append_to_cache, &alone.args).message, "");
  EXPECT_EQ(alone.k_codes, cxx.k_codes);
  EXPECT_EQ(alone.v_scale.values, cxx.v_scale.values);
  alone.args.k_scale = nullptr;
  EXPECT_THAT(outcome_of(fovea_attention_decode, &alone.args).message,
              HasSubstr("cache.k is e4m3 and cache.k_scale is missing"));
}

TEST(CDecodePlan, RunsWithTheBitsOfACallAndRefusesOtherOperations) {
  CacheCall direct, run;
  ASSERT_EQ(outcome_of(fovea_attention_decode, &direct.args).message, "");
  fovea_plan* plan = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_create_decode, &run.args, std::int64_t{12}, &plan).message, "");
  std::vector<char> workspace(fovea_plan_workspace_bytes(plan));
  run.forward.workspace = workspace.data();
  run.forward.workspace_bytes = workspace.size();
  ASSERT_EQ(outcome_of(fovea_plan_run_decode, plan, &run.args).message, "");
  EXPECT_EQ(run.out.values, direct.out.values);
  EXPECT_EQ(run.k.values, direct.k.values);
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_explain, plan, FOVEA_TEXT, &text).message, "");
  EXPECT_THAT(text, HasSubstr("kernel     cpu/attention_forward"));
  fovea_string_free(text);
  EXPECT_EQ(
      outcome_of(fovea_plan_run, plan, &run.forward).message,
      "fovea_plan_run: the plan is one of attention_decode; expected one that this function's "
      "fovea_plan_create made");
  EXPECT_THAT(outcome_of(fovea_plan_run_append, plan, &run.args).message,
              HasSubstr("the plan is one of attention_decode"));
  fovea_plan_destroy(plan);
  EXPECT_THAT(outcome_of(fovea_plan_run_decode, nullptr, &run.args).message,
              HasSubstr("plan is NULL"));
  EXPECT_THAT(outcome_of(fovea_plan_create_decode, &run.args, std::int64_t{-1}, &plan).message,
              HasSubstr("max_seqlen_kv is -1"));
  EXPECT_EQ(plan, nullptr) << "a caller whose plan was refused frees nothing";
}

TEST(CAppendPlan, WritesWhatACallWrites) {
  CacheCall direct, run;
  ASSERT_EQ(outcome_of(fovea_append_to_cache, &direct.args).message, "");
  fovea_plan* plan = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_create_append, &run.args, &plan).message, "");
  EXPECT_EQ(fovea_plan_workspace_bytes(plan), 0U);
  ASSERT_EQ(outcome_of(fovea_plan_run_append, plan, &run.args).message, "");
  EXPECT_EQ(run.k.values, direct.k.values);
  EXPECT_EQ(run.v.values, direct.v.values);
  fovea_plan_destroy(plan);
}

TEST(CDecode, TakesPagesBehindOffsets) {
  CacheCall c, table;
  IndexTensor indptr{{3}, {0, 2, 4}}, indices{{4}, {2, 0, 3, -1}};
  c.args.page_table = nullptr;
  c.args.page_indptr = &indptr.tensor;
  c.args.page_indices = &indices.tensor;
  EXPECT_EQ(outcome_of(fovea_attention_decode, &c.args).message, "");
  EXPECT_EQ(outcome_of(fovea_attention_decode, &table.args).message, "");
  EXPECT_EQ(c.out.values, table.out.values);
  EXPECT_EQ(c.k.values, table.k.values);
  c.args.page_indices = nullptr;
  EXPECT_THAT(outcome_of(fovea_attention_decode, &c.args).message,
              HasSubstr("page_indices is missing"));
}

/// Sequences of 3 queries and 1, as many new tokens.
struct PackedCall : CacheCall {
  PackedCall() {
    forward.q = &packed_q.tensor;
    forward.out = &packed_out.tensor;
    forward.cu_seqlens_q = &offsets.tensor;
    args.append_k = &packed_k.tensor;
    args.append_v = &packed_v.tensor;
    packed_q.values = q.values;
    packed_k.values = new_k.values;
    packed_v.values = new_v.values;
  }
  AttentionDecode cxx() {
    AttentionDecode call = CacheCall::cxx();
    call.q = view_of(packed_q);
    call.append = {.k = view_of(packed_k), .v = view_of(packed_v)};
    call.out = view_of(packed_out);
    call.cu_seqlens_q = offsets.view();
    return call;
  }

  FloatTensor packed_q{{4, 4, 8}}, packed_out{{4, 4, 8}, -7.0F};
  FloatTensor packed_k{{4, 2, 8}}, packed_v{{4, 2, 8}};
  IndexTensor offsets{{3}, {0, 3, 4}}, new_offsets{{3}, {0, 2, 3}};
};

TEST(CDecode, PacksQueriesAndNewTokens) {
  PackedCall c, cxx;
  c.args.max_seqlen_q = 3;
  EXPECT_EQ(outcome_of(fovea_attention_decode, &c.args).message, "");
  attention_decode(cxx.cxx());
  EXPECT_EQ(c.packed_out.values, cxx.packed_out.values);
  EXPECT_EQ(c.k.values, cxx.k.values);
  c.args.max_seqlen_q = 2;
  EXPECT_THAT(outcome_of(fovea_attention_decode, &c.args).message,
              HasSubstr("a length of 3; expected at most 2, max_seqlen_q"));
  c.args.max_seqlen_q = 0;
  c.forward.cu_seqlens_kv = &c.offsets.tensor;
  EXPECT_THAT(outcome_of(fovea_attention_decode, &c.args).message,
              HasSubstr("cu_seqlens_kv is given; expected none over a cache"));
}

TEST(CDecode, SharesAPrefixInGroups) {
  CacheCall c, cxx;
  IndexTensor groups{{3}, {0, 1, 2}};
  c.args.shared_prefix = 2;
  c.args.shared_cu_sequences = &groups.tensor;
  EXPECT_EQ(outcome_of(fovea_attention_decode, &c.args).message, "");
  AttentionDecode args = cxx.cxx();
  args.shared_prefix = {.seqlen = 2, .cu_sequences = groups.view()};
  attention_decode(args);
  EXPECT_EQ(c.out.values, cxx.out.values);
  c.args.shared_prefix = -1;
  EXPECT_THAT(outcome_of(fovea_attention_decode, &c.args).message,
              HasSubstr("shared_prefix.seqlen is -1; expected 0 to"));
}

TEST(CDecode, NewTokensMayHaveOffsetsOfTheirOwn) {
  PackedCall c, cxx, alone;
  c.args.append_cu_seqlens = &c.new_offsets.tensor;
  EXPECT_EQ(outcome_of(fovea_attention_decode, &c.args).message, "");
  AttentionDecode args = cxx.cxx();
  args.append.cu_seqlens = cxx.new_offsets.view();
  attention_decode(args);
  EXPECT_EQ(c.packed_out.values, cxx.packed_out.values);
  EXPECT_EQ(c.k.values, cxx.k.values);
  alone.args.append_cu_seqlens = &alone.new_offsets.tensor;
  EXPECT_EQ(outcome_of(fovea_append_to_cache, &alone.args).message, "");
  EXPECT_EQ(alone.k.values, cxx.k.values);
}

TEST(CDecode, AppendsAloneWithoutQueries) {
  CacheCall c, cxx;
  c.forward.q = c.forward.out = nullptr;
  EXPECT_EQ(outcome_of(fovea_append_to_cache, &c.args).message, "");
  const AttentionDecode args = cxx.cxx();
  append_to_cache({.cache = args.cache, .append = args.append, .rotary = args.rotary});
  EXPECT_EQ(c.k.values, cxx.k.values);
  EXPECT_EQ(c.v.values, cxx.v.values);
  EXPECT_EQ(c.out.values, cxx.out.values);
  c.args.append_v = nullptr;
  EXPECT_EQ(
      outcome_of(fovea_append_to_cache, &c.args).message,
      "append_to_cache: append.v is missing; expected [batch, seqlen_new, num_heads_kv, head_dim], "
      "or packed with append.cu_seqlens");
}

TEST(CDecode, AppendsOnTheExecutorOfForward) {
  CacheCall plain, call;
  EXPECT_EQ(outcome_of(fovea_append_to_cache, &plain.args).message, "");
  std::int64_t tasks = 0;
  fovea_executor executor{};
  executor.struct_size = sizeof(executor);
  executor.version = FOVEA_ABI_VERSION;
  executor.context = &tasks;
  executor.concurrency = [](void*) -> std::int32_t { return 1; };
  executor.run = [](void* context, std::int64_t count, fovea_task task, void* task_context) {
    *static_cast<std::int64_t*>(context) += count;
    for (std::int64_t i = 0; i < count; ++i) task(task_context, 0, i);
  };
  call.forward.executor = &executor;
  EXPECT_EQ(outcome_of(fovea_append_to_cache, &call.args).message, "");
  EXPECT_GT(tasks, 0);
  EXPECT_EQ(call.k.values, plain.k.values);
  executor.run = nullptr;
  EXPECT_THAT(outcome_of(fovea_append_to_cache, &call.args).message, HasSubstr("executor"));
}

TEST(CDecode, SeesAllKeysWhenAskedTo) {
  CacheCall c, cxx;
  c.args.sees_all_keys = 1;
  EXPECT_EQ(outcome_of(fovea_attention_decode, &c.args).message, "");
  AttentionDecode args = cxx.cxx();
  attention_decode(args);
  EXPECT_NE(c.out.values, cxx.out.values);
  CacheCall again;
  args = again.cxx();
  args.mask = {};
  attention_decode(args);
  EXPECT_EQ(c.out.values, again.out.values);
}

TEST(CDecode, WorkspaceIsNamedAndEnough) {
  CacheCall c, expected;
  std::size_t bytes = 0;
  ASSERT_EQ(fovea_decode_workspace_bytes(&c.args, 7, &bytes, nullptr), FOVEA_OK);
  EXPECT_EQ(bytes, decode_workspace_bytes(c.cxx(), 7));
  std::vector<std::byte> workspace(bytes);
  c.forward.workspace = workspace.data();
  c.forward.workspace_bytes = bytes;
  EXPECT_EQ(outcome_of(fovea_attention_decode, &c.args).message, "");
  EXPECT_EQ(outcome_of(fovea_attention_decode, &expected.args).message, "");
  EXPECT_EQ(c.out.values, expected.out.values);
}

TEST(CDecode, RefusalsNameTheArgument) {
  const std::pair<std::function<void(CacheCall&)>, std::string> faults[] = {
      {[](CacheCall& c) { c.args.forward = nullptr; }, "fovea_attention_decode: forward"},
      {[](CacheCall& c) { c.forward.row_max = &c.out.tensor; },
       "fovea_attention_decode: forward: row_max is given; expected none over a cache"},
      {[](CacheCall& c) { c.forward.dropout.p = 0.5F; },
       "fovea_attention_decode: forward: dropout is given; expected none over a cache"},
      {[](CacheCall& c) { c.forward.quant = "fp8_static"; },
       "attention_decode: quant is fp8_static, whose scales the call gives; expected a recipe of "
       "measured scales over a cache"},
      {[](CacheCall& c) { c.args.is_interleaved = 2; },
       "fovea_attention_decode: is_interleaved: is 2; expected 0 to 1"},
      {[](CacheCall& c) { c.args.seqlens = nullptr; },
       "attention_decode: cache.seqlens is missing; expected i32 or i64 [2]"},
      {[](CacheCall& c) { c.args.rotary_sin = nullptr; }, "rotary.sin"},
      {[](CacheCall& c) { c.table.values[1] = 4; },
       "attention_decode: cache.page_table[0, 1] is 4; expected 0 to 3, a page of cache.k"},
  };
  for (const auto& [spoil, expected] : faults) {
    CacheCall c;
    spoil(c);
    const Outcome outcome = outcome_of(fovea_attention_decode, &c.args);
    EXPECT_EQ(outcome.kind, FOVEA_INVALID_ARGUMENT) << expected;
    EXPECT_THAT(outcome.message, HasSubstr(expected));
    EXPECT_EQ(c.out.values, CacheCall().out.values);
    EXPECT_EQ(c.k.values, CacheCall().k.values);
  }
}

}  // namespace
}  // namespace fovea::testing
