#include "tools/cases.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "tools/failure.hpp"
#include "tools/paged_call.hpp"
#include "tools/visible_work.hpp"

namespace fovea::tools {
namespace {

TEST(Cases, TheBuiltInOnesHaveNamesOfTheirOwnAndReasons) {
  std::set<std::string> names;
  for (const Case& problem : built_in_cases()) {
    EXPECT_TRUE(names.insert(problem.name).second) << problem.name;
    EXPECT_GT(problem.why.size(), 10U) << problem.name;
  }
  EXPECT_GE(names.size(), 10U);
}

TEST(Cases, PackedSequencesShareOneAxis) {
  const std::vector<Case> cases = parse_cases(
      R"({"cases": [{"name": "x", "why": "y", "seqlen_q": [3, 0, 2], "seqlen_kv": [3, 1, 2], "head_dim": 4}]})",
      "here");
  const Inputs inputs = make_inputs(cases.front());
  EXPECT_EQ(inputs.q.spec.shape[0], 5);
  EXPECT_EQ(inputs.k.spec.shape[0], 6);
  EXPECT_EQ(reinterpret_cast<const std::int32_t*>(inputs.cu_seqlens_kv.data)[2], 4);
}

TEST(Cases, ARecipeIsThatOfTheCall) {
  const std::vector<Case> cases = parse_cases(
      R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 3, "quant": "fast"}]})", "here");
  const Inputs inputs = make_shapes(cases.front());
  EXPECT_EQ(print(make_call(cases.front().options, inputs).quant), "fast");
}

TEST(Cases, LatentValuesAreTheFirstColumnsOfKeysAndCountOnce) {
  const std::vector<Case> cases = parse_cases(
      R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 2, "seqlen_kv": 8, "num_heads_q": 2, "num_heads_kv": 1,
                     "head_dim": 6, "head_dim_v": 4, "latent_values": true, "page_size": 4}]})",
      "here");
  const Inputs inputs = make_inputs(cases.front());
  AttentionForward args = make_call(cases.front().options, inputs);
  EXPECT_EQ(args.v.data(), args.k.data());
  EXPECT_EQ(args.v.stride(1), 6);
  std::vector<float> out(2 * 2 * 4);
  args.out = view(out.data(), {1, 2, 2, 4});
  EXPECT_EQ(visible_work(args, 4, 4).bytes, 4 * (2 * 2 * 6 + 8 * 6 + 2 * 2 * 4));
  const PagedCall call(args, 4, nullptr);
  EXPECT_EQ(call.args.cache.v.data(), call.args.cache.k.data());
  for (const TensorView& view : {call.args.cache.k, call.args.cache.v}) {
    EXPECT_EQ(view.size(0), 2);
    EXPECT_EQ(view.stride(0), 4 * 6);
    EXPECT_EQ(view.stride(1), 6);
  }
}

TEST(Cases, AFaultNamesTheCaseAndTheKey) {
  const auto refusal = [](const std::string& text) -> std::string {
    try {
      parse_cases(text, "here");
    } catch (const Failure& failure) {
      return failure.what();
    }
    return "no refusal";
  };
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 3, "sofcap": 1}]})"),
            "here: case 'x': sofcap is an unknown key");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "seqlen_q": 3}]})"),
            "here: case 'x': why is not a string");
  EXPECT_EQ(refusal(R"({"cases": [], "case": []})"),
            "here: case is an unknown key; expected \"cases\" alone");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 3, "seqlen_q": 4}]})"),
            "here: the key \"seqlen_q\" stands twice in one object");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 3},]})"),
            "here: no JSON from byte 53 on; expected {\"cases\": [...]}");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "softcap": 1e400}]})"),
            "here: holds a number beyond the range of doubles");
  for (const std::string key : {"batch", "documents"}) {
    EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": [3, 4],
                                     "seqlen_kv": [3, 4], ")" +
                      key + R"(": 2}]})"),
              "here: case 'x': " + key + " stands beside packed sequences");
  }
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 3, "mask_mod": "kv_idx < n",
                                   "scalars": {"n": 18446744073709551615}}]})"),
            "here: case 'x': scalars holds 18446744073709551615, which is beyond 32 bits");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 1, "seqlen_kv": 64,
                                   "page_size": 16, "quant": "fast"}]})"),
            "here: case 'x': page_size stands beside quant: a cache is not rounded");
  const auto of_recipe = [&](const std::string& recipe) {
    return refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 3, "quant": ")" + recipe +
                   R"("}]})");
  };
  EXPECT_THAT(of_recipe("quick"), ::testing::HasSubstr("here: case 'x': quant"));
  EXPECT_THAT(of_recipe("accuracy=0.02"), ::testing::HasSubstr("quant is an accuracy"));
  EXPECT_THAT(of_recipe("fp8_static"), ::testing::HasSubstr("quant has scales=given"));
  EXPECT_EQ(
      refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 3, "head_dim": 4, "head_dim_v": 5,
                                   "latent_values": true}]})"),
      "here: case 'x': latent_values stands beside values that are wider than keys");
  EXPECT_EQ(
      refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 1, "seqlen_kv": 64,
                                   "shared_prefix": 64}]})"),
      "here: case 'x': shared_prefix is more than seqlen_kv - seqlen_q: queries stand behind it");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": [1], "seqlen_kv": [64],
                                   "shared_prefix": 8}]})"),
            "here: case 'x': shared_prefix stands beside packed sequences");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 1, "cached": true,
                                   "backward": true}]})"),
            "here: case 'x': cached stands beside backward: a cache has no gradients");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 1, "codes": "i8"}]})"),
            "here: case 'x': codes stands beside no cache; expected page_size or cached");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 1, "cached": true,
                                   "codes": "int4"}]})"),
            "here: case 'x': codes is not i8 or e4m3");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": 1, "cached": true,
                                   "shared_prefix": 8, "codes": "i8"}]})"),
            "here: case 'x': codes stands beside shared_prefix");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y", "seqlen_q": -3}]})"),
            "here: case 'x': seqlen_q is not a count");
  EXPECT_EQ(refusal(R"({"cases": [{"name": "x", "why": "y"}]})"),
            "here: case 'x': seqlen_q is missing");
  EXPECT_THAT(refusal("nonsense"), testing::HasSubstr("no JSON from byte"));
}

}  // namespace
}  // namespace fovea::tools
