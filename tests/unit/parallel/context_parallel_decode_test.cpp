// Caches whose pages are dealt over ranks against one cache: lengths around pages, new tokens, masks, programs, rotary,
// sinks; queries of all sequences on every rank, or of a part of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fovea/context_parallel.hpp"

namespace fovea {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// 24 sequences go into 1, 2, 3, 4 and 8 ranks.
constexpr std::int64_t kBatch = 24, kPageSize = 4, kMaxPages = 12, kHeadsKv = 2, kHeadsQ = 4;
constexpr std::int64_t kDimQk = 8, kDimV = 4;
constexpr int kRanks[] = {1, 2, 3, 4, 8};

std::vector<float> random_values(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

struct Options {
  MaskMod mask = causal();
  ScoreMod score{};
  std::int64_t seqlen_q = 1, num_new = 1;
  bool has_rotary = false;
  std::vector<float>* sinks = nullptr;
};

/// All sequences, and one cache for them.
struct Whole {
  explicit Whole(const Options& given)
      : options(given),
        q(random_values(kBatch * options.seqlen_q * kHeadsQ * kDimQk, 1)),
        k_new(random_values(kBatch * options.num_new * kHeadsKv * kDimQk, 2)),
        v_new(random_values(kBatch * options.num_new * kHeadsKv * kDimV, 3)),
        k(random_values(kBatch * kMaxPages * kPageSize * kHeadsKv * kDimQk, 4)),
        v(random_values(kBatch * kMaxPages * kPageSize * kHeadsKv * kDimV, 5)),
        cos(random_values(64 * kDimQk / 2, 6)),
        sin(random_values(64 * kDimQk / 2, 7)),
        out(static_cast<std::size_t>(kBatch * options.seqlen_q * kHeadsQ * kDimV)),
        lse(static_cast<std::size_t>(kBatch * kHeadsQ * options.seqlen_q)),
        table(kBatch * kMaxPages) {
    // From empty ones on, so that ranks have no key of some; around the ends of pages.
    for (std::int64_t b = 0; b < kBatch; ++b)
      seqlens.push_back(static_cast<std::int32_t>(b < 20 ? b : 2 * b - 7));
    std::iota(table.begin(), table.end(), 0);
  }

  std::int64_t num_own_sequences(int parts) const { return kBatch / parts; }

  /// A call for one of `parts` parts of the sequences.
  AttentionDecode call(int part, int parts, std::vector<float>& out_of,
                       std::vector<float>& lse_of) {
    const std::int64_t count = kBatch / parts, first = part * count;
    const auto rows = [&](std::vector<float>& x, std::int64_t tokens, std::int64_t heads,
                          std::int64_t dim) {
      return view(x.data() + first * tokens * heads * dim, {count, tokens, heads, dim});
    };
    AttentionDecode args{.q = rows(q, options.seqlen_q, kHeadsQ, kDimQk),
                         .cache = {.seqlens = view(seqlens.data(), {kBatch})},
                         .out = view(out_of.data(), {count, options.seqlen_q, kHeadsQ, kDimV}),
                         .lse = view(lse_of.data(), {count, kHeadsQ, options.seqlen_q}),
                         .score = options.score,
                         .mask = options.mask};
    if (options.num_new != 0) {
      args.append.k = rows(k_new, options.num_new, kHeadsKv, kDimQk);
      args.append.v = rows(v_new, options.num_new, kHeadsKv, kDimV);
    }
    if (options.has_rotary) {
      args.rotary = Rotary{.cos = view(cos.data(), {64, kDimQk / 2}),
                           .sin = view(sin.data(), {64, kDimQk / 2})};
    }
    if (options.sinks != nullptr) args.sinks = view(options.sinks->data(), {kHeadsQ});
    return args;
  }

  Options options;
  std::vector<float> q, k_new, v_new, k, v, cos, sin, out, lse;
  std::vector<std::int32_t> table, seqlens;
};

constexpr std::int64_t kPageK = kPageSize * kHeadsKv * kDimQk,
                       kPageV = kPageSize * kHeadsKv * kDimV;

/// A rank's pages of every sequence, in another order than the sequences'.
struct Pages {
  Pages(const Whole& whole, int rank, int world_size) {
    columns = (kMaxPages + world_size - 1) / world_size;
    table.resize(static_cast<std::size_t>(kBatch * columns));
    const auto num_pages = static_cast<std::int64_t>(table.size());
    // What nobody uses may hold anything.
    k.assign(static_cast<std::size_t>(num_pages * kPageK), NAN);
    v.assign(static_cast<std::size_t>(num_pages * kPageV), NAN);
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t column = 0; column < columns; ++column) {
        const std::int64_t page = (num_pages - 1) - (b * columns + column);
        table[static_cast<std::size_t>(b * columns + column)] = static_cast<std::int32_t>(page);
        const std::int64_t n = column * world_size + rank;
        if (n >= kMaxPages) continue;
        const std::int64_t from = b * kMaxPages + n;
        std::copy_n(whole.k.begin() + from * kPageK, kPageK, k.begin() + page * kPageK);
        std::copy_n(whole.v.begin() + from * kPageV, kPageV, v.begin() + page * kPageV);
      }
    }
  }
  void give(KvCache& cache) {
    const auto num_pages = static_cast<std::int64_t>(table.size());
    cache.k = view(k.data(), {num_pages, kPageSize, kHeadsKv, kDimQk});
    cache.v = view(v.data(), {num_pages, kPageSize, kHeadsKv, kDimV});
    cache.page_table = view(table.data(), {kBatch, columns});
  }

  std::int64_t columns = 0;
  std::vector<std::int32_t> table;
  std::vector<float> k, v;
};

double difference(const std::vector<float>& got, const std::vector<float>& expected,
                  std::int64_t first) {
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const float y = expected[static_cast<std::size_t>(first) + i];
    if (got[i] == y) continue;
    const double away = std::abs(static_cast<double>(got[i]) - y);
    worst = std::max(worst, std::isnan(away) ? INFINITY : away);
  }
  return worst;
}

/// What is wrong, in words.
std::string compare(const Options& options, int world_size, bool is_shared_out) {
  Whole whole(options);
  AttentionDecode one = whole.call(0, 1, whole.out, whole.lse);
  Pages all(whole, 0, 1);
  all.give(one.cache);
  // Ranks begin with the cache as it is before the call.
  std::vector<Pages> pages;
  for (int rank = 0; rank < world_size; ++rank) pages.emplace_back(whole, rank, world_size);
  attention_decode(one);
  const int parts = is_shared_out ? world_size : 1;
  std::vector<std::string> errors(static_cast<std::size_t>(world_size));
  std::vector<std::jthread> threads;
  for (auto& end : make_thread_communicators(world_size)) {
    threads.emplace_back([&, end = std::shared_ptr<Communicator>(std::move(end))]() mutable {
      const int rank = end->rank();
      std::string& wrong = errors[static_cast<std::size_t>(rank)];
      const int part = is_shared_out ? rank : 0;
      std::vector<float> out(whole.out.size() / static_cast<std::size_t>(parts));
      std::vector<float> lse(whole.lse.size() / static_cast<std::size_t>(parts));
      try {
        AttentionDecode args = whole.call(part, parts, out, lse);
        pages[static_cast<std::size_t>(rank)].give(args.cache);
        ContextParallelDecode decoding(std::move(end));
        decoding.run(args);
      } catch (const Error& error) {
        wrong = error.what();
        return;
      }
      const double of_out =
          difference(out, whole.out, part * static_cast<std::int64_t>(out.size()));
      const double of_lse =
          difference(lse, whole.lse, part * static_cast<std::int64_t>(lse.size()));
      if (of_out > 1e-5) wrong += "out is " + std::to_string(of_out) + " away; ";
      if (of_lse > 1e-5) wrong += "lse is " + std::to_string(of_lse) + " away; ";
    });
  }
  threads.clear();  // joins
  std::string result;
  for (const std::string& wrong : errors) result += wrong;
  return result;
}

void expect_equal(const std::string& name, const Options& options) {
  for (const int world_size : kRanks) {
    for (const bool is_shared_out : {false, true}) {
      EXPECT_THAT(compare(options, world_size, is_shared_out), IsEmpty())
          << name << ", " << world_size << " ranks" << (is_shared_out ? ", own queries" : "");
    }
  }
}

TEST(ContextParallelDecodeTest, RanksEqualOneCache) {
  expect_equal("a token", {});
  expect_equal("nothing new", {.num_new = 0});
  expect_equal("a chunk over three pages", {.seqlen_q = 9, .num_new = 9});
  expect_equal("window", {.mask = window(5, 0), .seqlen_q = 3, .num_new = 3});
  expect_equal("no mask", {.mask = {}});
}

TEST(ContextParallelDecodeTest, ProgramsRotaryAndSinksSpeakOfWholeSequences) {
  std::vector<float> sinks = random_values(kHeadsQ, 8);
  expect_equal("programs",
               {.mask = parse_mask_mod("kv_idx % 3 != batch % 3"),
                .score = parse_score_mod("score + 0.1 * float(kv_idx) / float(1 + seqlen_kv)")});
  expect_equal("rotary", {.seqlen_q = 2, .num_new = 2, .has_rotary = true});
  expect_equal("sinks", {.sinks = &sinks});
}

// More states than a GPU merges at once: some become the first of those that follow.
TEST(ContextParallelDecodeTest, StatesOfManyRanksAreMergedInTurn) {
  for (const int world_size : {33, 70}) EXPECT_THAT(compare({}, world_size, false), IsEmpty());
}

/// What each of two ranks is told where rank 1 calls with other arguments.
std::vector<std::string> errors_where_one_has(const std::function<void(AttentionDecode&)>& change) {
  Whole whole({});
  std::vector<std::string> errors(2);
  std::vector<std::jthread> threads;
  for (auto& end : make_thread_communicators(2)) {
    threads.emplace_back([&, end = std::shared_ptr<Communicator>(std::move(end))]() mutable {
      const int rank = end->rank();
      Pages pages(whole, rank, 2);
      std::vector<float> out(whole.out), lse(whole.lse);
      AttentionDecode args = whole.call(0, 1, out, lse);
      pages.give(args.cache);
      if (rank == 1) change(args);
      ContextParallelDecode decoding(std::move(end));
      try {
        decoding.run(args);
      } catch (const InvalidArgument& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  threads.clear();  // joins
  return errors;
}

TEST(ContextParallelDecodeTest, WhatRanksCannotComputeIsRefusedByNameOnAll) {
  EXPECT_THAT(errors_where_one_has([](AttentionDecode& args) { args.cache.page_table = {}; }),
              Each(HasSubstr("context_parallel_decode: rank 1: cache.page_table is "
                             "missing; expected pages, dealt over ranks in turn")));
  const std::vector<float> slopes(kHeadsQ - 1);
  EXPECT_THAT(
      errors_where_one_has(
          [&](AttentionDecode& args) { args.score = alibi(view(std::span(slopes))); }),
      Each(HasSubstr("context_parallel_decode: rank 1: alibi: slopes is f32 [3]; expected [4]")));
  const float scale = 1;
  EXPECT_THAT(errors_where_one_has([&](AttentionDecode& args) {
                const std::array<std::int64_t, 1> one{1};
                args.cache.v_scale = TensorView(&scale, make_spec(Dtype::f32, one));
              }),
              Each(HasSubstr("context_parallel_decode: rank 1: cache has scales; expected ")));
  EXPECT_THAT(
      errors_where_one_has([](AttentionDecode& args) { args.quant = parse_quantization("fast"); }),
      Each(
          HasSubstr("context_parallel_decode: rank 1: quant is given; expected none where keys are "
                    "dealt over ranks")));
}

}  // namespace
}  // namespace fovea
