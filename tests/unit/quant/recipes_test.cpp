// Recipes as text, and what a recipe is refused for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "fovea/error.hpp"
#include "fovea/quant.hpp"

#include "quant/check.hpp"
#include "quant/fields.hpp"

namespace fovea {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string refusal(const std::string& text) {
  try {
    return "no refusal: " + print(parse_quantization(text));
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

TEST(Recipes, HaveNamesOfTheirOwnAndSatisfyTheRules) {
  std::set<std::string_view> names;
  for (const NamedQuantization& named : quantizations()) {
    EXPECT_TRUE(names.insert(named.name).second);
    EXPECT_EQ(quant::obstacle(named.quant), "") << named.name;
    EXPECT_EQ(parse_quantization(named.name), named.quant);
    EXPECT_EQ(print(named.quant), named.name);
  }
  EXPECT_TRUE(quantizations().front().quant.is_none());
}

/// Each field is set to each of its words, on top of a recipe in which it counts.
TEST(Recipes, PrintWhatParsesBackToThem) {
  for (const NamedQuantization& named : quantizations()) {
    for (const quant::Field& field : quant::fields()) {
      for (const char* value : {"int8", "e4m3", "f16", "e2m1", "none", "tensor", "block", "token",
                                "channel", "group_16", "group_32", "sequence", "yes", "no",
                                "linear", "codes", "one_level", "64", "0.25"}) {
        Quantization changed = named.quant;
        if (!field.parse(value, changed) || !quant::obstacle(changed).empty()) continue;
        EXPECT_EQ(parse_quantization(print(changed)), changed) << print(changed);
      }
    }
  }
}

TEST(Recipes, AreNearestToANamedOneInPrint) {
  Quantization quant = parse_quantization("accurate, hadamard = yes");
  EXPECT_EQ(print(quant), "accurate,hadamard=yes");
  quant = parse_quantization("qk=int8");
  EXPECT_EQ(quant.qk, QuantFormat::int8);
  EXPECT_EQ(quant.pv, QuantFormat::none);
}

TEST(Recipes, RefuseWhatIsNoText) {
  EXPECT_THAT(refusal("acurate"),
              HasSubstr("no recipe is called 'acurate'; expected none, accurate, fast"));
  EXPECT_THAT(refusal(""), HasSubstr("no recipe is called ''"));
  EXPECT_THAT(refusal("accurate,fast"),
              HasSubstr("'fast' is no field; expected a recipe's name first"));
  EXPECT_THAT(refusal("accurate,hadamrd=yes"),
              HasSubstr("no field is called 'hadamrd'; expected qk, pv"));
  EXPECT_THAT(refusal("qk=int4"), HasSubstr("qk is 'int4'; expected none, int8, e4m3, f16, e2m1"));
  EXPECT_THAT(refusal("accurate,block_kv=64x"),
              HasSubstr("block_kv is '64x'; expected a whole number"));
  EXPECT_THAT(refusal("accurate,"), HasSubstr("'' is no field"));
}

/// One line for each rule of check.cpp.
TEST(Recipes, RefuseWhatCannotBe) {
  const std::pair<const char*, const char*> cases[] = {
      {"qk=f16", "quant.qk is f16; expected none, int8, e4m3, e2m1"},
      {"accurate,q_scales=channel",
       "quant.q_scales is channel; expected tensor, block, warp, thread, token"},
      {"accurate,k_scales=warp", "quant.k_scales is warp; expected tensor, block, thread, token"},
      {"fast,v_scales=token",
       "quant.v_scales is token; expected tensor, block, channel, tile_channel"},
      {"accurate,smooth_q=sample", "quant.smooth_q is sample; expected none, block"},
      {"accurate,smooth_k=block", "quant.smooth_k is block; expected none, sample, sequence"},
      {"fast,smooth_v=sample", "quant.smooth_v is sample; expected none, sequence"},
      {"none,hadamard=yes", "quant.hadamard is set and quant.qk is none"},
      {"none,smooth_k=sample", "quant.smooth_k is set and quant.qk is none"},
      {"accurate,smooth_v=sequence", "quant.smooth_v is set and quant.pv is none"},
      {"qk=e2m1", "quant.q_scales is token; expected group_16, group_32, for quant.qk e2m1"},
      {"nvfp4,k_scales=group_32",
       "quant.k_scales is group_32 and quant.q_scales is group_16; expected the same"},
      {"nvfp4,v_scales=channel",
       "quant.v_scales is channel; expected group_16, group_32, for quant.pv e2m1"},
      {"accurate,q_scales=group_16", "quant.q_scales is group_16; expected tensor, block, warp"},
      {"fast,v_scales=group_16", "quant.v_scales is group_16; expected tensor, block, channel"},
      {"nvfp4,p_max=2689", "quant.p_max is 2689; expected above 0, at most 2688"},
      {"nvfp4,p_codes=linear", "quant.p_codes is linear and quant.pv is e2m1; expected e4m3"},
      {"nvfp4,scales=given", "quant.scales is given and quant.qk is e2m1; expected measured"},
      {"sage1,scales=given", "quant.scales is given and quant.pv is f16"},
      {"accurate,scales=given",
       "quant.scales is given and quant.q_scales is token; expected tensor"},
      {"fp8_static,k_scales=token",
       "quant.scales is given and quant.k_scales is token; expected tensor"},
      {"fp8_static,v_scales=channel",
       "quant.scales is given and quant.v_scales is channel; expected tensor"},
      {"accurate,block_q=100", "quant.block_q is 100; expected a multiple of 16 up to 1024"},
      {"accurate,warp_q=48",
       "quant.warp_q is 48; expected a multiple of 8 that divides block_q, 128"},
      {"accurate,block_kv=512", "quant.block_kv is 512; expected a multiple of 32 up to 256"},
      {"int8,p_max=127", "quant.p_max is 127; expected 255, for quant.pv int8"},
      {"fast,p_max=449", "quant.p_max is 449; expected above 0, at most 448, for quant.pv e4m3"},
      {"sage1,p_codes=linear", "quant.p_codes is linear and quant.pv is f16; expected e4m3"},
      {"accuracy=-1", "quant.accuracy is -1; expected a relative error above 0, or 0 for none"},
      {"accuracy=inf", "quant.accuracy is inf; expected a relative error"},
      {"fast,accuracy=0.1", "quant.accuracy is 0.1 beside fast; expected one of them"},
      {"fast,p_step=-1", "quant.p_step is -1; expected octaves, 0 to 16"},
      {"fast,p_max=448",
       "quant.p_step is 1 and quant.p_max is 448; expected a greatest probability"},
      {"int8,p_step=1", "quant.p_step is 1 and quant.pv is int8; expected 0"},
      {"int8,row_sums=codes", "quant.row_sums is codes and quant.pv is int8; expected exact"},
      {"sage2,v_max=0", "quant.v_max is 0; expected above 0, at most 448"},
      {"int8,accumulation=one_level",
       "quant.pv is int8 with accumulation one_level; expected two_level"},
      {"fast,accumulation=one_level",
       "quant.v_scales is block with accumulation one_level; expected two_level"},
  };
  for (const auto& [text, reason] : cases) EXPECT_THAT(refusal(text), HasSubstr(reason)) << text;
}

TEST(Recipes, WantChannelsInPairsToRotate) {
  const Quantization rotated = parse_quantization("accurate,hadamard=yes");
  EXPECT_THAT(quant::obstacle(rotated, 65),
              StartsWith("quant.hadamard is yes and head_dim_qk is 65"));
  EXPECT_EQ(quant::obstacle(rotated, 66), "");
}

TEST(Recipes, AreDescribedInASentence) {
  EXPECT_EQ(describe(parse_quantization("fast")),
            "q k int8 by token and thread; p v e4m3 by block, p without exp2, mean of k removed "
            "(sample)");
  EXPECT_EQ(describe(parse_quantization("fp8_static")),
            "q k e4m3 by given scales; p v e4m3 by given scales");
  EXPECT_EQ(describe(parse_quantization("nvfp4")),
            "q k e2m1 by group_16 and group_16; p v e2m1 by group_16, mean of k removed "
            "(sequence), means of q removed");
  EXPECT_EQ(describe(Quantization{}), "nothing is rounded beyond the dtype of the inputs");
}

}  // namespace
}  // namespace fovea
