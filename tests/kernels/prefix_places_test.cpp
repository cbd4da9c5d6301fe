// The kernel that finds the places of a shared prefix writes, under the emulator, what the CPU writes, in every layout,
// and nothing else.
#include "common/prefix_places.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "cpu/prefix_places.hpp"
#include "cuda/emulator/emulator.hpp"
#include "cuda/prefix/prefix_places.hpp"
#include "kernels/wrong_numbers.hpp"
#include "problem/shared_prefix.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/launch_memory.hpp"
#include "support/long_run.hpp"

namespace fovea::testing {
namespace {

struct PrefixCase {
  std::string name;
  CacheCase cache;
  bool wants_rows = true;
};

/// A cache, and memory for the places; equal for equal cases.
struct PrefixMemory {
  explicit PrefixMemory(const PrefixCase& problem) : call(problem.cache), args(call.args()) {
    if (problem.wants_rows) args.mask = window(10, 0);
    programs = prefix_programs(args.score, args.mask, !problem.cache.groups.empty());
    const auto bytes = static_cast<std::int64_t>(measure_prefix(args, args.q, programs).bytes);
    memory = GuardedTensor(make_spec(Dtype::u8, std::array{bytes}));
    memory.poison();
  }
  PrefixCalls calls() {
    return split_at_prefix(args, args.q, programs,
                           static_cast<std::byte*>(memory.mutable_view().mutable_data()));
  }

  CacheMemory call;
  AttentionDecode args;
  PrefixPrograms programs;
  GuardedTensor memory;
};

std::vector<TensorView> views_of(const PrefixPlaces& p) {
  return {p.prefix_seqlens, p.prefix_left_padding, p.slots, p.page_table, p.cu_seqlens,
          p.suffix_seqlens, p.suffix_left_padding, p.rows};
}

cuda::emulator::Report report_of(PrefixMemory& memory,
                                 const cuda::emulator::Options& options = {}) {
  const PrefixCalls calls = memory.calls();
  cuda::emulator::Device device;
  const AttentionDecode& args = memory.args;
  std::vector<TensorBytes> tensors = tensors_of_cache(args.cache);
  for (const auto& [name, view] :
       {std::pair{"cu_seqlens_q", TensorView(args.cu_seqlens_q)},
        std::pair{"append.cu_seqlens", TensorView(args.append.cu_seqlens)},
        std::pair{"cu_sequences", TensorView(args.shared_prefix.cu_sequences)}}) {
    if (view) tensors.push_back(tensor_bytes(name, view));
  }
  for (const TensorBytes& tensor : tensors)
    device.register_buffer(tensor.name, tensor.begin, tensor.size);
  for (std::size_t i = 0; const TensorView& view : views_of(calls.places)) {
    const TensorBytes bytes = tensor_bytes("place " + std::to_string(i++), view, true);
    if (bytes.size > 0) device.register_buffer(bytes.name, bytes.begin, bytes.size);
  }
  const cuda::PrefixLaunch launch = cuda::prefix_launch(calls.source, calls.places);
  const cuda::emulator::LaunchConfig config{
      .grid = {static_cast<std::int32_t>(launch.grid.x), static_cast<std::int32_t>(launch.grid.y),
               1},
      .block = {static_cast<std::int32_t>(launch.num_threads), 1, 1}};
  return device.launch(config, options, [&] { cuda::prefix_places(launch.params); });
}

std::vector<PrefixCase> prefix_cases() {
  CacheCase paged;
  paged.seqlens = {70, 48, 51, 64, 49};
  paged.shared_prefix = 45;
  paged.num_new = paged.seqlen_q = 3;
  paged.num_heads_q = 4;
  paged.page_size = 16;
  CacheCase whole_pages = paged;
  whole_pages.shared_prefix = 32;
  whole_pages.groups = {0, 2, 2, 4};
  CacheCase listed = whole_pages;
  listed.has_page_list = true;
  listed.has_left_padding = true;
  listed.index_dtype = Dtype::i64;
  CacheCase slots = paged;
  slots.page_size = 0;
  slots.has_batch_idx = slots.has_left_padding = true;
  slots.groups = {0, 3};
  CacheCase contiguous = paged;
  contiguous.page_size = 0;
  CacheCase packed = listed;
  packed.num_new = 0;
  packed.packed_q = packed.packed_new = {9, 0, 1, 7, 2};
  packed.seqlens = {70, 12, 51, 64, 49};
  // More sequences than lanes and than threads of a CTA.
  CacheCase many = paged;
  many.num_new = 0;
  many.seqlens.clear();
  for (std::int64_t i = 0; i < 150; ++i) {
    many.packed_q.push_back(i % 7 == 0 ? 3 : i % 3);
    many.seqlens.push_back(45 + many.packed_q.back() + i % 5);
    if (i % 4 == 0) many.groups.push_back(i);
  }
  many.packed_new = many.packed_q;
  return {{"part_of_a_page", paged},          {"whole_pages", whole_pages},
          {"listed_and_padded", listed},      {"slots", slots},
          {"contiguous", contiguous},         {"packed", packed},
          {"packed_of_many_sequences", many}, {"without_rows", whole_pages, false}};
}

class EmulatedPrefixPlaces : public ::testing::TestWithParam<PrefixCase> {};

TEST_P(EmulatedPrefixPlaces, AreThoseOfTheCpu) {
  PrefixMemory expected(GetParam());
  const PrefixCalls on_cpu = expected.calls();
  cpu::write_prefix_places(on_cpu.source, on_cpu.places);
  PrefixMemory got(GetParam());
  EXPECT_EQ(report_of(got).text(), "");
  const std::vector<TensorView> a = views_of(got.calls().places);
  const std::vector<TensorView> b = views_of(on_cpu.places);
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i]) continue;
    EXPECT_EQ(bits_of(a[i]), bits_of(b[i])) << "place " << i;
  }
  EXPECT_TRUE(got.memory.has_intact_guards());
  EXPECT_EQ(got.call.damage(), "");
}

/// Whatever lengths, slots and pages hold.
TEST_P(EmulatedPrefixPlaces, AreWrittenNowhereElse) {
  for (int i = 0; i < 4 * times_longer(); ++i) {
    const std::uint64_t draw = first_seed() + static_cast<std::uint64_t>(i);
    SCOPED_TRACE("FOVEA_TEST_SEED=" + std::to_string(draw));
    PrefixMemory memory(GetParam());
    const AttentionDecode& args = memory.args;
    const KvCache& cache = args.cache;
    spoil_numbers(cache.seqlens, cache_capacity(cache), 8 * draw);
    spoil_numbers(cache.left_padding, cache_capacity(cache), 8 * draw + 1);
    spoil_numbers(cache.batch_idx, cache.k.size(0), 8 * draw + 2);
    spoil_numbers(cache.page_table, cache.k.size(0), 8 * draw + 3);
    if (cache.page_indptr) {
      spoil_numbers(cache.page_indices, cache.k.size(0), 8 * draw + 3);
      spoil_numbers(cache.page_indptr, cache.page_indices.size(0), 8 * draw + 4);
    }
    spoil_numbers(args.cu_seqlens_q, args.q.size(0), 8 * draw + 5);
    spoil_numbers(args.append.cu_seqlens, args.q.size(0), 8 * draw + 6);
    spoil_numbers(args.shared_prefix.cu_sequences, cache.seqlens.size(0), 8 * draw + 7);
    const cuda::emulator::Report report =
        report_of(memory, {.seed = draw, .max_switches = kMostSwitches});
    EXPECT_EQ(report.text(), "");
    EXPECT_TRUE(memory.memory.has_intact_guards());
  }
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedPrefixPlaces, ::testing::ValuesIn(prefix_cases()),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace fovea::testing
