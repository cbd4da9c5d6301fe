// describe(): what it says of this machine and of operations is what calls find.
#include "fovea/describe.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/kv_cache.hpp"
#include "fovea/probabilities.hpp"
#include "fovea/rotary.hpp"
#include "fovea/runtime.hpp"
#include "fovea/state.hpp"

#include "plan/json.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

const Description& here() {
  static const Description description = describe();
  return description;
}

/// A call of each operation on f16, bf16 or f32 zeros, or on integers.
struct TinyCall {
  explicit TinyCall(Dtype dtype) : spec(make_spec(dtype, std::array<std::int64_t, 4>{1, 2, 1, 8})) {
    statistics_spec = make_spec(Dtype::f32, std::array<std::int64_t, 3>{1, 1, 2});
  }
  TensorView read() const { return {static_cast<const void*>(zeros.data()), spec}; }
  TensorView write(std::size_t i) { return {static_cast<void*>(outputs[i].data()), spec}; }

  AttentionForward forward() {
    return {.q = read(),
            .k = read(),
            .v = read(),
            .out = write(0),
            .lse = TensorView(static_cast<void*>(lse.data()), statistics_spec)};
  }
  KvCache cache() {
    static const std::int32_t lengths[1] = {2};
    return {.k = read(), .v = read(), .seqlens = view(lengths, {1})};
  }

  void run(const std::string& operation) {
    if (operation == "attention_forward") return attention_forward(forward());
    if (operation == "attention_backward")
      return attention_backward({.dout = read(), .forward = forward(), .dq = write(1)});
    if (operation == "attention_jvp")
      return attention_jvp({.forward = forward(), .q_tangent = read(), .out_tangent = write(1)});
    if (operation == "attention_double_backward") {
      return attention_double_backward(
          {.backward = {.dout = read(), .forward = forward()}, .ddq = read(), .grad_q = write(1)});
    }
    if (operation == "attention_probabilities") {
      const TensorSpec of_two_keys = make_spec(spec.dtype, std::array<std::int64_t, 4>{1, 1, 2, 2});
      return attention_probabilities(
          {.forward = forward(),
           .probabilities = TensorView(static_cast<void*>(outputs[1].data()), of_two_keys)});
    }
    if (operation == "attention_decode")
      return attention_decode({.q = read(), .cache = cache(), .out = write(0)});
    if (operation == "append_to_cache") {
      static const std::int32_t lengths[1] = {0};
      return append_to_cache(
          {.cache = {.k = write(0), .v = write(1), .seqlens = view(lengths, {1})},
           .append = {.k = read(), .v = read()}});
    }
    if (operation == "merge_states")
      return merge_states(
          {.outs = {read()},
           .lses = {TensorView(static_cast<const void*>(lse.data()), statistics_spec)},
           .out = write(0)});
    if (operation == "rotary") {
      static const float angles[2 * 4] = {};
      return rotary(
          {.x = read(), .out = write(0), .cos = view(angles, {2, 4}), .sin = view(angles, {2, 4})});
    }
    FAIL() << operation << " is no operation of this test";
  }

  TensorSpec spec, statistics_spec;
  alignas(64) std::array<std::int64_t, 16> zeros{};
  alignas(64) std::array<std::array<std::int64_t, 16>, 2> outputs{};
  alignas(64) std::array<float, 2> lse{};
};

TEST(Describe, OperationsTakeTheDtypesThatItNamesAndNoOthers) {
  ASSERT_EQ(here().operations.size(), 9U);
  for (const Description::Operation& operation : here().operations) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::i32, Dtype::i64}) {
      const bool is_named = std::ranges::count(operation.dtypes, dtype) > 0;
      TinyCall call(dtype);
      bool runs = true;
      std::string message;
      try {
        call.run(operation.name);
      } catch (const Error& error) {
        runs = false;
        message = error.what();
      }
      EXPECT_EQ(runs, is_named) << operation.name << ' ' << name(dtype) << ": " << message;
    }
  }
}

TEST(Describe, TargetsAreThoseThatRunHere) {
  ASSERT_EQ(here().targets.size(), 8U);
  for (const Description::Target& target : here().targets) {
    EXPECT_EQ(target.runs_here, target.reason.empty()) << name(target.target);
    Problem problem{.q = TinyCall(Dtype::bf16).spec};  // every target multiplies it
    problem.k = problem.v = problem.q;
    problem.cpu_target = target.target;
    if (target.target == CpuTarget::avx512_vnni || target.target == CpuTarget::avx_vnni)
      problem.quant = parse_quantization("int8");  // their codes, and nothing else
    EXPECT_EQ(!explain(problem).kernel.empty(), target.runs_here) << name(target.target);
  }
  EXPECT_EQ(here().version, version());
  EXPECT_GE(here().threads.automatic, 1);
}

TEST(Describe, LimitsAreThoseOfTheCode) {
  const auto limit = [](const char* wanted) {
    const auto& limits = here().limits;
    const auto found =
        std::ranges::find(limits, wanted, &std::pair<std::string, std::int64_t>::first);
    return found == limits.end() ? -1 : found->second;
  };
  EXPECT_EQ(limit("max_rank"), kMaxRank);
  const std::string too_deep(static_cast<std::size_t>(limit("max_formula_nesting")) + 1, '(');
  try {
    static_cast<void>(parse_score_mod(too_deep + "score"));
    FAIL() << "not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("nests more than " + std::to_string(limit("max_formula_nesting"))));
  }
  EXPECT_EQ(limit("max_plans"), 4096);
  EXPECT_EQ(limit("cuda_max_captured_tensors"), 8);
}

TEST(Describe, JsonHasEveryPart) {
  const std::string json = here().json();
  for (const char* part :
       {"\"fovea\": ", "\"processor\": ", "\"targets\": [", "\"threads\": {", "\"cuda\": {",
        "\"operations\": [", "\"limits\": {", "\"environment\": {"})
    EXPECT_THAT(json, HasSubstr(part));
}

TEST(Json, TextsAreEscaped) {
  JsonObject object;
  object.text("a\"b", "c\\d\n").number("n", -3).flag("f", false);
  EXPECT_EQ(object.done(), "{\"a\\\"b\": \"c\\\\d\\u000a\", \"n\": -3, \"f\": false}");
  EXPECT_EQ(json_list(std::vector<int>{1, 2}, [](int i) { return std::to_string(i); }), "[1, 2]");
}

}  // namespace
}  // namespace fovea::testing
