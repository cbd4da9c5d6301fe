// What a call's captured scalars and tensors hold: it decides nothing but its own result, and 64-bit words are read
// whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/kv_cache.hpp"

#include "plan/runtime.hpp"
#include "unit/problem/problems.hpp"

namespace fovea::testing {
namespace {

constexpr std::int64_t kSeqlen = 8, kHeadDim = 4;

/// One head over eight positions, and a table of eight numbers that its score reads at kv_idx + n.
struct Call {
  std::vector<float> q = std::vector<float>(kSeqlen * kHeadDim, 0.1F), out = q, dq = q, tangent = q;
  std::vector<float> lse = std::vector<float>(kSeqlen), table = {1, -2, 3, -4, 5, -6, 7, -8};
  std::vector<std::int32_t> seqlens = {kSeqlen};

  static TensorView dense(std::vector<float>& floats) {
    return view(floats.data(), {1, kSeqlen, 1, kHeadDim});
  }
  ScoreMod score(int n) {
    return parse_score_mod("score + table[kv_idx + n]",
                           {.tensors = {{"table", view(table.data(), {kSeqlen})}},
                            .scalars = {CapturedScalar::of("n", n)}});
  }
  AttentionForward forward(const ScoreMod& score) {
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = 0.03F * static_cast<float>(i % 11);
    return {.q = dense(q),
            .k = dense(q),
            .v = dense(q),
            .out = dense(out),
            .lse = view(lse.data(), {1, 1, kSeqlen}),
            .score = score};
  }
};

/// Runs one operation with this score in this runtime, and returns what it wrote.
using Operation =
    std::function<std::vector<float>(const std::function<ScoreMod(Call&)>&, Runtime&)>;

std::vector<float> run_forward(const std::function<ScoreMod(Call&)>& score, Runtime& runtime) {
  Call call;
  attention_forward(call.forward(score(call)), runtime);
  return call.out;
}

std::vector<float> run_backward(const std::function<ScoreMod(Call&)>& score, Runtime& runtime) {
  Call call;
  const AttentionForward forward = call.forward(score(call));
  Runtime apart(1);
  attention_forward(forward, apart);
  std::vector<float> dout(call.out.size(), 0.5F);
  dout[5] = -3;
  attention_backward({.dout = Call::dense(dout), .forward = forward, .dq = Call::dense(call.dq)},
                     runtime);
  return call.dq;
}

std::vector<float> run_decode(const std::function<ScoreMod(Call&)>& score, Runtime& runtime) {
  Call call;
  const AttentionForward forward = call.forward(score(call));
  attention_decode(
      {.q = view(call.q.data(), {1, 1, 1, kHeadDim}),
       .cache = {.k = forward.k, .v = forward.v, .seqlens = view(call.seqlens.data(), {1})},
       .out = view(call.out.data(), {1, 1, 1, kHeadDim}),
       .score = forward.score},
      runtime);
  return call.out;
}

std::vector<float> run_jvp(const std::function<ScoreMod(Call&)>& score, Runtime&) {
  Call call;
  const AttentionForward forward = call.forward(score(call));
  attention_jvp(
      {.forward = forward, .v_tangent = forward.q, .out_tangent = Call::dense(call.tangent)});
  return call.tangent;
}

std::vector<float> run_double_backward(const std::function<ScoreMod(Call&)>& score, Runtime&) {
  Call call;
  const AttentionForward forward = call.forward(score(call));
  attention_double_backward({.backward = {.dout = forward.q, .forward = forward},
                             .ddq = forward.q,
                             .grad_dout = Call::dense(call.dq)});
  return call.dq;
}

const std::vector<std::pair<std::string, Operation>> kOperations = {
    {"forward", run_forward},
    {"backward", run_backward},
    {"decode", run_decode},
    {"jvp", run_jvp},
    {"double backward", run_double_backward}};

TEST(CapturedScalars, AcceptOrRefuseNoCallWhateverCameBefore) {
  const auto with = [](int n) { return [n](Call& call) { return call.score(n); }; };
  for (const auto& [name, run] : kOperations) {
    for (const auto& order :
         {std::vector{1000, 0}, std::vector{0, 1000}, std::vector{-1000, 1000}}) {
      Runtime runtime(1);
      for (const int n : order) {
        SCOPED_TRACE(name + ", n = " + std::to_string(n));
        std::vector<float> got;
        ASSERT_NO_THROW(got = run(with(n), runtime));
        Runtime fresh(1);
        EXPECT_EQ(got, run(with(n), fresh));
        // Beyond either end the nearest element is read.
        const int nearest = n > 0 ? 7 : n < 0 ? -7 : 0;
        EXPECT_EQ(got, run(with(nearest), fresh));
      }
    }
  }
}

TEST(CapturedScalars, LoadsThatNoScalarBringsIntoRangeAreRefusedAlways) {
  const auto beyond = [](Call& call) {
    return parse_score_mod("score + table[kv_idx + 8] * n",
                           {.tensors = {{"table", view(call.table.data(), {kSeqlen})}},
                            .scalars = {CapturedScalar::of("n", 0)}});
  };
  for (const auto& [name, run] : kOperations) {
    Runtime runtime(1);
    run([](Call& call) { return call.score(0); }, runtime);
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(refusal([&] { run(beyond, runtime); }),
                  ::testing::HasSubstr("index 0 of 'table', kv_idx + 8, is in [8, 15]"))
          << name;
    }
  }
}

TEST(CapturedTensors, WithoutElementsAreRefused) {
  // Before kv_idx - 3 is known to be in range at all, and where a plan was made with elements.
  const auto none = [](Call& call) {
    return parse_score_mod("score + table[kv_idx - 3]",
                           {.tensors = {{"table", view(call.table.data(), {0})}}});
  };
  for (const auto& [name, run] : kOperations) {
    Runtime runtime(1);
    EXPECT_THAT(refusal([&] { run(none, runtime); }),
                ::testing::HasSubstr("expected 0 <= index < 0"))
        << name;
  }
  Call call;
  const AttentionForward args = call.forward(call.score(0));
  AttentionForward emptied = args;
  emptied.score = parse_score_mod("score + table[kv_idx + n]",
                                  {.tensors = {{"table", view(call.table.data(), {0})}},
                                   .scalars = {CapturedScalar::of("n", 0)}});
  const Plan planned = plan(problem_of(args));
  std::vector<std::byte> workspace(planned.workspace_bytes());
  emptied.workspace = workspace;
  EXPECT_EQ(refusal([&] { planned.run(emptied); }),
            "attention_forward: captured 'table' is f32 [0]; expected elements to read");
}

TEST(CapturedLongs, AreNotLookedForWhereThereAreNone) {
  Call call;
  const std::int64_t* nothing = nullptr;
  const TensorView no_rows = view(call.q.data(), {1, 0, 1, kHeadDim});
  AttentionForward args{
      .q = no_rows, .k = no_rows, .v = no_rows, .out = view(call.out.data(), {1, 0, 1, kHeadDim})};
  args.score = parse_score_mod(
      "score + float(ids[q_idx, kv_idx])",
      {.tensors = {{"ids", view(nothing, {std::int64_t{1} << 40, 0})}}, .scalars = {}});
  attention_forward(args);  // at once
}

TEST(CapturedLongs, ThatAreNoIntsAreRefused) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const std::int64_t wrong :
       {kMost + 1, -kMost - 2, std::int64_t{1} << 32, std::numeric_limits<std::int64_t>::min(),
        std::numeric_limits<std::int64_t>::max()}) {
    std::vector<std::int64_t> ids(2 * kSeqlen);
    ids[0] = kMost;
    ids[1] = -kMost - 1;
    const auto reading = [&](std::int64_t last_stride) {
      return [&ids, last_stride](Call&) {
        return parse_score_mod(
            "score + float(ids[q_idx % 2, kv_idx])",
            {.tensors = {{"ids", view(ids.data(), {2, kSeqlen},
                                      {last_stride == 1 ? kSeqlen : 1, last_stride})}}});
      };
    };
    for (const auto& [name, run] : kOperations) {
      SCOPED_TRACE(name);
      Runtime runtime(1);
      ids[13] = 0;
      EXPECT_EQ(refusal([&] { run(reading(1), runtime); }), "(not refused)");
      ids[13] = wrong;
      const std::string refused =
          "expected integers of 32 bits, or as_words32 of the tensor where its bits are meant";
      EXPECT_THAT(refusal([&] { run(reading(1), runtime); }),
                  ::testing::HasSubstr("captured 'ids' holds " + std::to_string(wrong) +
                                       " at [1, 5]; " + refused));
      EXPECT_THAT(refusal([&] { run(reading(2), runtime); }),
                  ::testing::HasSubstr("captured 'ids' holds " + std::to_string(wrong) +
                                       " at [1, 6]; " + refused));
    }
  }
}

TEST(CapturedLongs, RepeatedOnesAreLookedAtOnce) {
  // 2^40 elements in one place: looking at each would take an hour.
  const std::int64_t id = 3;
  const auto reading = [&](Call&) {
    return parse_score_mod(
        "score + float(ids[q_idx, kv_idx])",
        {.tensors = {{"ids", view(&id, {std::int64_t{1} << 20, std::int64_t{1} << 20}, {0, 0})}}});
  };
  Runtime runtime(1);
  EXPECT_EQ(refusal([&] { run_forward(reading, runtime); }), "(not refused)");
}

TEST(CapturedLongs, PackedMasksAreReadByHalves) {
  // 100 keys in two words a query, bits 31, 32, 63 and 64 among those that are set.
  constexpr std::int64_t kKeys = 100, kWords = 2;
  const auto sees = [](std::int64_t q, std::int64_t key) {
    return (key * 7 + q * 5) % 3 != 0 || key % 32 == 31 || key % 32 == 0;
  };
  std::vector<std::int64_t> words(kSeqlen * kWords);
  const std::unique_ptr<bool[]> dense(new bool[kSeqlen * kKeys]);
  for (std::int64_t q = 0; q < kSeqlen; ++q) {
    for (std::int64_t key = 0; key < kKeys; ++key) {
      dense[static_cast<std::size_t>(q * kKeys + key)] = sees(q, key);
      if (sees(q, key))
        words[static_cast<std::size_t>(q * kWords + key / 64)] |=
            static_cast<std::int64_t>(std::uint64_t{1} << static_cast<unsigned>(key % 64));
    }
  }
  const TensorView bits = as_words32(view(words.data(), {kSeqlen, kWords}));
  const MaskMod packed =
      parse_mask_mod("(bits[q_idx, kv_idx // 64, kv_idx // 32 % 2] >> kv_idx % 32 & 1) != 0",
                     {.tensors = {{"bits", bits}}});
  const MaskMod plain = parse_mask_mod(
      "sees[q_idx, kv_idx]", {.tensors = {{"sees", view(dense.get(), {kSeqlen, kKeys})}}});
  std::vector<float> kv(kKeys * kHeadDim);
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = 0.01F * static_cast<float>(i * 37 % 101);
  const auto out_with = [&](const MaskMod& mask) {
    Call call;
    AttentionForward args = call.forward({});
    args.k = args.v = view(kv.data(), {1, kKeys, 1, kHeadDim});
    args.mask = mask;
    attention_forward(args);
    return call.out;
  };
  EXPECT_EQ(out_with(packed), out_with(plain));
}

}  // namespace
}  // namespace fovea::testing
