// The append kernel under the emulator writes what the CPU's append writes, in every layout, and nothing else.
#include "cpu/append.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "common/append_to_cache.cuh"
#include "core/shape.hpp"
#include "cuda/append/append_to_cache.hpp"
#include "cuda/emulator/emulator.hpp"
#include "kernels/wrong_numbers.hpp"
#include "quant/row_codes.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/drawn_spec.hpp"
#include "support/launch_memory.hpp"
#include "support/long_run.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

constexpr std::int64_t kMaxPositions = 80;

/// Angles, and what turns by them.
struct Turning {
  std::int64_t num_pairs = 0;  // 0: no rotary
  bool is_interleaved = false;
  bool has_positions = false;
  Dtype dtype = Dtype::f32;
  bool has_positions_q = false;
};

struct AppendCase {
  std::string name;
  CacheCase cache;
  Dtype new_dtype = Dtype::bf16;
  Turning turning{};
  std::int64_t offset = 0;  // elements that the new tokens lie off a multiple of 64 bytes
};

/// A cache, tokens for it and queries; equal for equal cases.
struct AppendMemory {
  explicit AppendMemory(const AppendCase& problem)
      : call(problem.cache), cache(call.args().cache), turning(problem.turning) {
    const CacheCase& c = problem.cache;
    k = tokens(problem, c.packed_new, c.num_new, c.num_heads_kv, c.head_dim_qk, 1);
    v = tokens(problem, c.packed_new, c.num_new, c.num_heads_kv, c.head_dim_v, 2);
    append.k = k.view();
    if (!c.has_latent_values) append.v = v.view();
    const bool has_own = static_cast<bool>(call.cu_seqlens_new.view());
    if (!c.packed_new.empty())
      append.cu_seqlens = has_own ? call.cu_seqlens_new.view() : call.cu_seqlens_q.view();
    if (turning.num_pairs == 0) return;
    const auto drawn = [&](std::uint64_t stream, Dtype dtype, std::int64_t rows,
                           std::int64_t cols) {
      return GuardedTensor(drawn_spec(dtype, std::array{rows, cols}, Random(c.layout_seed, stream),
                                      Strides::of_input));
    };
    cos = drawn(1, turning.dtype, kMaxPositions, turning.num_pairs);
    sin = drawn(2, turning.dtype, kMaxPositions, turning.num_pairs);
    cos.fill([](std::int64_t i) { return std::cos(0.37 * static_cast<double>(i)); });
    sin.fill([](std::int64_t i) { return std::sin(0.37 * static_cast<double>(i)); });
    rotary = {.cos = cos.view(), .sin = sin.view(), .is_interleaved = turning.is_interleaved};
    if (turning.has_positions) {
      const bool is_packed = !c.packed_new.empty();
      positions = is_packed ? drawn(3, Dtype::i64, 1, k.view().size(0))
                            : drawn(3, Dtype::i64, c.batch(), c.num_new);
      positions.fill([](std::int64_t i) { return static_cast<double>(i * 7 % kMaxPositions); });
      rotary.positions = positions.view();
      if (is_packed) {
        rotary.positions = TensorView(positions.view().data(),
                                      make_spec(Dtype::i64, std::array{positions.view().size(1)},
                                                std::array{positions.view().stride(1)}));
      }
    }
    q = tokens(problem, c.packed_q, c.seqlen_q, c.num_heads_q, c.head_dim_qk, 3);
    if (turning.has_positions_q) {
      std::vector<std::int64_t> shape{c.batch(), c.seqlen_q};
      if (!c.packed_q.empty()) shape = {q.view().size(0)};
      positions_q =
          GuardedTensor(drawn_spec(Dtype::i32, shape, Random(c.layout_seed, 4), Strides::of_input));
      positions_q.fill([](std::int64_t i) { return static_cast<double>(i * 5 % kMaxPositions); });
      rotary.positions_q = positions_q.view();
    }
    const TensorSpec spec = q.view().spec();
    rotated_q = GuardedTensor(make_spec(spec.dtype, shape_of(spec)));
    rotated_q.poison();
  }

  NewTokens new_tokens() {
    NewTokens result{.cache = cache, .append = append, .batch = call.seqlens.view().size(0)};
    if (turning.num_pairs == 0) return result;
    result.rotary = &rotary;
    result.q = q.view();
    result.cu_seqlens_q = call.cu_seqlens_q.view();
    result.rotated_q = rotated_q.mutable_view();
    return result;
  }

  /// [batch, each, heads, head_dim], or packed with two rows of nobody.
  static GuardedTensor tokens(const AppendCase& problem, const std::vector<std::int64_t>& lengths,
                              std::int64_t each, std::int64_t heads, std::int64_t head_dim,
                              std::uint64_t stream) {
    std::vector<std::int64_t> shape{problem.cache.batch(), each, heads, head_dim};
    if (!lengths.empty())
      shape = {std::reduce(lengths.begin(), lengths.end()) + 2, heads, head_dim};
    GuardedTensor tensor(make_spec(problem.new_dtype, shape), problem.offset);
    const Random random(problem.cache.seed, stream);
    tensor.fill([&](std::int64_t i) { return random.normal(i); });
    return tensor;
  }

  CacheMemory call;
  KvCache cache;
  Turning turning;
  GuardedTensor k, v, q, rotated_q, cos, sin, positions, positions_q;
  Append append;
  Rotary rotary;
};

cuda::emulator::Report report_of(AppendMemory& memory,
                                 const cuda::emulator::Options& options = {}) {
  const NewTokens tokens = memory.new_tokens();
  cuda::emulator::Device device;
  for (const TensorBytes& tensor : tensors_of_tokens(tokens))
    device.register_buffer(tensor.name, tensor.begin, tensor.size);
  const cuda::AppendLaunch launch = cuda::append_launch(tokens);
  const cuda::emulator::LaunchConfig config{
      .grid = {static_cast<std::int32_t>(launch.grid.x), static_cast<std::int32_t>(launch.grid.y),
               1},
      .block = {static_cast<std::int32_t>(launch.block.x), 1, 1}};
  return device.launch(config, options, [&] { cuda::append_to_cache(launch.params); });
}

void run_emulated(AppendMemory& memory) { EXPECT_EQ(report_of(memory).text(), ""); }

std::vector<AppendCase> append_cases() {
  CacheCase paged;
  // Before the append 0 rows, 16: a page begins with the first new token, 14: with the third, 37.
  paged.seqlens = {3, 19, 17, 40};
  paged.num_new = paged.seqlen_q = 3;
  paged.num_heads_q = 4;
  paged.num_heads_kv = 2;
  paged.q_dtype = paged.k_dtype = paged.v_dtype = Dtype::bf16;
  paged.page_size = 16;
  CacheCase slots = paged;
  slots.page_size = 0;
  slots.has_batch_idx = slots.has_left_padding = slots.has_heads_first = true;
  slots.index_dtype = Dtype::i64;
  CacheCase odd_pages = paged;
  odd_pages.page_size = 5;
  odd_pages.has_left_padding = true;
  odd_pages.head_dim_qk = 23;  // rows of no whole 16 bytes
  CacheCase mixed = slots;
  mixed.k_dtype = Dtype::f16;
  mixed.v_dtype = Dtype::f32;
  CacheCase more_queries = paged;  // the first ones stand before the first key
  more_queries.seqlen_q = 7;
  CacheCase packed = odd_pages;
  packed.seqlens = {3, 19, 17, 40, 9};
  packed.num_new = 0;
  packed.packed_new = packed.packed_q = {3, 0, 1, 7, 2};
  packed.has_page_list = true;
  CacheCase own_offsets = slots;
  own_offsets.num_new = 0;
  own_offsets.packed_q = {1, 2, 0, 5};
  own_offsets.packed_new = {0, 4, 1, 0};
  // More sequences than lanes.
  CacheCase many = packed;
  many.seqlens.clear();
  many.packed_q.clear();
  for (std::int64_t i = 0; i < 70; ++i) {
    many.packed_q.push_back(i % 7 == 0 ? 3 : i % 3);
    many.seqlens.push_back(many.packed_q.back() + i % 5);
  }
  many.packed_new = many.packed_q;
  CacheCase latent = paged;  // values are written as columns of keys
  latent.num_heads_kv = 1;
  latent.head_dim_qk = 24;
  latent.head_dim_v = 16;
  latent.has_latent_values = true;
  CacheCase codes = paged;
  codes.k_dtype = Dtype::i8;
  codes.v_dtype = Dtype::e4m3;
  CacheCase odd_codes = odd_pages;
  odd_codes.k_dtype = Dtype::e4m3;
  odd_codes.v_dtype = Dtype::i8;
  odd_codes.head_dim_v = 70;  // more than two columns of a lane
  CacheCase given = slots;
  given.k_dtype = given.v_dtype = Dtype::e4m3;
  given.has_given_scales = true;
  CacheCase packed_codes = own_offsets;
  packed_codes.k_dtype = packed_codes.v_dtype = Dtype::i8;
  return {
      {"codes", codes},
      {"codes_of_odd_rows", odd_codes, Dtype::f32},
      {"codes_by_given_scales", given},
      {"codes_packed", packed_codes, Dtype::f16},
      {"codes_turned", odd_codes, Dtype::bf16, {.num_pairs = 5}},
      {"values_in_the_memory_of_keys", latent},
      {"packed", packed},
      {"packed_and_turned", packed, Dtype::bf16, {.num_pairs = 5}},
      {"packed_by_positions", packed, Dtype::f32, {.num_pairs = 3, .has_positions = true}},
      {"packed_by_offsets_of_their_own", own_offsets, Dtype::bf16, {.num_pairs = 8}},
      {"packed_of_many_sequences", many, Dtype::bf16, {.num_pairs = 4}},
      {"copied_into_pages", paged},
      {"copied_into_slots", slots},
      {"rows_of_odd_bytes", odd_pages},
      {"off_any_alignment", paged, Dtype::bf16, {}, 1},
      {"converted", mixed, Dtype::bf16},
      {"converted_from_f32", paged, Dtype::f32},
      {"turned_in_halves", paged, Dtype::bf16, {.num_pairs = 8}},
      {"turned_in_pairs", slots, Dtype::f32, {.num_pairs = 8, .is_interleaved = true}},
      {"turned_in_part", odd_pages, Dtype::f16, {.num_pairs = 5, .dtype = Dtype::bf16}},
      {"turned_by_positions",
       mixed,
       Dtype::f32,
       {.num_pairs = 3, .is_interleaved = true, .has_positions = true, .dtype = Dtype::f16}},
      {"queries_before_keys", more_queries, Dtype::bf16, {.num_pairs = 4}},
      {"queries_by_positions_of_their_own",
       more_queries,
       Dtype::bf16,
       {.num_pairs = 4, .has_positions = true, .has_positions_q = true}},
      {"packed_queries_by_positions_of_their_own",
       packed,
       Dtype::bf16,
       {.num_pairs = 5, .has_positions_q = true}},
  };
}

/// Bits, but where a compiler may have fused a product and a sum: one rounding.
void expect_same(const char* name, const TensorView& got, const TensorView& expected,
                 bool is_turned) {
  if (!is_turned) {
    EXPECT_TRUE(bits_of(got) == bits_of(expected)) << name;
    return;
  }
  const std::vector<double> a = values_of(got);
  const std::vector<double> b = values_of(expected);
  const bool are_codes = quant::is_code(got.dtype());  // the next one, an eighth further at most
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    const double allowed =
        are_codes ? std::max(1.0, std::abs(b[i]) / 8) : 2 * rounding(got.dtype(), b[i]) + 0x1p-22;
    ASSERT_TRUE(a[i] == b[i] || std::abs(a[i] - b[i]) <= allowed)
        << name << " element " << i << ": got " << a[i] << ", expected " << b[i];
  }
}

class EmulatedAppends : public ::testing::TestWithParam<AppendCase> {};

TEST_P(EmulatedAppends, WriteWhatTheCpuWrites) {
  AppendMemory expected(GetParam());
  const auto pool = make_thread_pool(1);
  cpu::append_tokens(expected.new_tokens(), *pool);
  AppendMemory got(GetParam());
  run_emulated(got);
  const bool is_turned = GetParam().turning.num_pairs > 0;
  expect_same("cache.k", got.cache.k, expected.cache.k, is_turned);
  expect_same("cache.v", got.cache.v, expected.cache.v, false);
  if (got.cache.k_scale)
    expect_same("cache.k_scale", got.cache.k_scale, expected.cache.k_scale, is_turned);
  expect_same("cache.v_scale", got.cache.v_scale, expected.cache.v_scale, false);
  if (is_turned) expect_same("q", got.rotated_q.view(), expected.rotated_q.view(), true);
  EXPECT_EQ(got.call.damage(), "");
  EXPECT_TRUE(!is_turned || got.rotated_q.has_intact_guards());
}

/// Whatever lengths, slots, pages and positions hold.
TEST_P(EmulatedAppends, WriteNowhereElse) {
  for (int i = 0; i < 4 * times_longer(); ++i) {
    const std::uint64_t draw = first_seed() + static_cast<std::uint64_t>(i);
    SCOPED_TRACE("FOVEA_TEST_SEED=" + std::to_string(draw));
    AppendMemory memory(GetParam());
    const KvCache& cache = memory.cache;
    spoil_numbers(cache.seqlens, cache_capacity(cache), 5 * draw);
    spoil_numbers(cache.left_padding, cache_capacity(cache), 5 * draw + 1);
    spoil_numbers(cache.batch_idx, cache.k.size(0), 5 * draw + 2);
    spoil_numbers(cache.page_table, cache.k.size(0), 5 * draw + 3);
    spoil_numbers(cache.page_indices, cache.k.size(0), 5 * draw + 3);
    if (cache.page_indptr)
      spoil_numbers(cache.page_indptr, cache.page_indices.size(0), 5 * draw + 5);
    spoil_numbers(memory.append.cu_seqlens, memory.k.view().size(0), 5 * draw + 6);
    spoil_numbers(memory.rotary.positions, kMaxPositions, 5 * draw + 4);
    spoil_numbers(memory.rotary.positions_q, kMaxPositions, 5 * draw + 7);
    for (GuardedTensor* numbers :
         {&memory.call.seqlens, &memory.call.left_padding, &memory.call.batch_idx,
          &memory.call.page_table, &memory.call.page_indptr, &memory.call.page_indices,
          &memory.call.cu_seqlens_q, &memory.call.cu_seqlens_new})
      numbers->seal();
    const cuda::emulator::Report report =
        report_of(memory, {.seed = draw, .max_switches = kMostSwitches});
    for (const cuda::emulator::Finding& finding : report.findings)
      EXPECT_TRUE(is_order_alone(finding)) << finding.text;
    EXPECT_EQ(memory.call.damage(), "");
    EXPECT_TRUE(memory.rotated_q.has_intact_guards());
  }
}

/// A row behind the capacity is another sequence's, or nobody's.
TEST_P(EmulatedAppends, WriteNothingBehindTheCapacity) {
  AppendMemory memory(GetParam());
  const auto capacity = static_cast<double>(cache_capacity(memory.cache));
  memory.call.seqlens.fill([=](std::int64_t) { return capacity; });
  const auto before = std::pair(bits_of(memory.cache.k), bits_of(memory.cache.v));
  run_emulated(memory);
  EXPECT_EQ(std::pair(bits_of(memory.cache.k), bits_of(memory.cache.v)), before);
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedAppends, ::testing::ValuesIn(append_cases()),
                         [](const auto& each) { return each.param.name; });

AppendCase append_case(const std::string& name) {
  const std::vector<AppendCase> cases = append_cases();
  return *std::ranges::find(cases, name, &AppendCase::name);
}

TEST(AppendLaunch, HasACtaForEachTokenOfEachTensor) {
  AppendCase problem = append_case("copied_into_pages");
  AppendMemory plain(problem);
  const cuda::AppendLaunch copied = cuda::append_launch(plain.new_tokens());
  EXPECT_EQ(copied.grid.x, 4U * 3);
  EXPECT_EQ(copied.grid.y, 2U);
  EXPECT_TRUE(copied.params.rows[0].is_copied && copied.params.rows[1].is_copied);
  problem.turning.num_pairs = 4;
  problem.cache.seqlen_q = 5;
  AppendMemory turned(problem);
  const cuda::AppendLaunch launch = cuda::append_launch(turned.new_tokens());
  EXPECT_EQ(launch.grid.x, 4U * 5);
  EXPECT_EQ(launch.grid.y, 3U);
  EXPECT_FALSE(launch.params.rows[0].is_copied);
  EXPECT_TRUE(launch.params.rows[1].is_copied);
}

TEST(AppendLaunch, NothingIsLaunchedForNoTokens) {
  AppendCase problem = append_case("copied_into_pages");
  problem.cache.seqlens.clear();
  AppendMemory memory(problem);
  EXPECT_EQ(cuda::append_launch(memory.new_tokens()).grid.x, 0U);
}

}  // namespace
}  // namespace fovea::testing
