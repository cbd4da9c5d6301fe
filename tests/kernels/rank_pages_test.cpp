// The kernel that finds a rank's pages, under the emulator: what the rank owns of every sequence, counted one key after
// another, and nothing else is written.
#include "common/rank_pages.cuh"

#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "cuda/pages/rank_pages.hpp"
#include "kernels/wrong_numbers.hpp"
#include "support/guarded_tensor.hpp"
#include "support/launch_memory.hpp"
#include "support/long_run.hpp"

namespace fovea::testing {
namespace {

struct PagesCase {
  std::string name;
  int num_ranks = 3;
  std::int64_t page_size = 4, num_new = 1, seqlen_q = 1;
  std::vector<std::int64_t> seqlens{0, 1, 3, 4, 5, 11, 12, 13, 23};
  std::int64_t columns = 4;
  Dtype index_dtype = Dtype::i32;
};

void PrintTo(const PagesCase& c, std::ostream* out) { *out << c.name; }

/// Lengths and a table of a rank's pages, and memory for what the kernel writes.
struct PagesMemory {
  PagesMemory(const PagesCase& c, int rank)
      : batch(static_cast<std::int64_t>(c.seqlens.size())),
        lengths(make_spec(c.index_dtype, std::array{batch})),
        table(make_spec(c.index_dtype, std::array{batch, c.columns})) {
    lengths.fill([&](std::int64_t i) {
      return static_cast<double>(c.seqlens[static_cast<std::size_t>(i)]);
    });
    // Pages in another order than the sequences'.
    table.fill([&](std::int64_t i) { return static_cast<double>((i * 7 + 3) % 101); });
    source = {.rank = rank,
              .num_ranks = c.num_ranks,
              .page_size = c.page_size,
              .num_new = c.num_new,
              .seqlen_q = c.seqlen_q,
              .seqlens = lengths.view(),
              .page_table = table.view()};
    const std::int64_t num_pages = cuda::num_append_pages(source);
    for (const std::int64_t count :
         {std::int64_t{0}, std::int64_t{0}, std::int64_t{0}, num_pages, c.num_new, c.seqlen_q}) {
      const TensorSpec spec = count == 0 && written.size() < 3
                                  ? make_spec(Dtype::i32, std::array{batch})
                                  : make_spec(Dtype::i32, std::array{batch, count});
      written.emplace_back(spec);
      written.back().poison();
    }
    pages = {.seqlens = written[0].mutable_view(),
             .own_seqlens = written[1].mutable_view(),
             .append_seqlens = written[2].mutable_view(),
             .append_pages = written[3].mutable_view(),
             .positions_new = written[4].mutable_view(),
             .positions_q = written[5].mutable_view()};
  }

  cuda::emulator::Report run(const cuda::emulator::Options& options = {}) {
    cuda::emulator::Device device;
    std::vector<TensorBytes> tensors{tensor_bytes("seqlens", lengths.view()),
                                     tensor_bytes("page_table", table.view())};
    for (std::size_t i = 0; i < written.size(); ++i)
      tensors.push_back(
          tensor_bytes("written " + std::to_string(i), written[i].mutable_view(), true));
    for (const TensorBytes& tensor : tensors) {
      if (tensor.size != 0) device.register_buffer(tensor.name, tensor.begin, tensor.size);
    }
    const cuda::RankPagesLaunch launch = cuda::rank_pages_launch(source, pages);
    return device.launch({.grid = {static_cast<std::int32_t>(launch.grid.x), 1, 1},
                          .block = {static_cast<std::int32_t>(launch.num_threads), 1, 1}},
                         options, [&] { cuda::rank_pages(launch.params); });
  }

  bool has_intact_guards() const {
    for (const GuardedTensor& tensor : written) {
      if (!tensor.has_intact_guards()) return false;
    }
    return true;
  }
  std::int32_t at(std::size_t tensor, std::int64_t i) {
    return static_cast<const std::int32_t*>(written[tensor].view().data())[i];
  }

  std::int64_t batch;
  GuardedTensor lengths, table;
  std::vector<GuardedTensor> written;
  cuda::RankPagesSource source;
  cuda::RankPages pages;
};

class EmulatedRankPages : public ::testing::TestWithParam<PagesCase> {};

TEST_P(EmulatedRankPages, AreThoseOfEveryKeyInTurn) {
  const PagesCase& c = GetParam();
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    PagesMemory memory(c, rank);
    EXPECT_EQ(memory.run().text(), "");
    EXPECT_TRUE(memory.has_intact_guards());
    const std::int64_t num_pages = cuda::num_append_pages(memory.source);
    for (std::int64_t b = 0; b < memory.batch; ++b) {
      const std::int64_t before = c.seqlens[static_cast<std::size_t>(b)],
                         after = before + c.num_new;
      std::int64_t own = 0;
      for (std::int64_t key = 0; key < after; ++key) own += key / c.page_size % c.num_ranks == rank;
      EXPECT_EQ(memory.at(0, b), after);
      EXPECT_EQ(memory.at(1, b), own) << "rank " << rank << ", " << after << " keys";
      EXPECT_EQ(memory.at(2, b), before % c.page_size);
      for (std::int64_t i = 0; i < c.num_new; ++i) {
        EXPECT_EQ(memory.at(4, b * c.num_new + i), before + i);
        // Where append_to_cache finds this token: the page of the whole table, or none.
        const std::int64_t page = (before + i) / c.page_size, column = page / c.num_ranks;
        const std::int64_t entry = (before % c.page_size + i) / c.page_size;
        ASSERT_LT(entry, num_pages);
        const bool is_own = page % c.num_ranks == rank && column < c.columns;
        EXPECT_EQ(memory.at(3, b * num_pages + entry),
                  is_own ? ((b * c.columns + column) * 7 + 3) % 101 : -1);
      }
      for (std::int64_t i = 0; i < c.seqlen_q; ++i)
        EXPECT_EQ(memory.at(5, b * c.seqlen_q + i), after - c.seqlen_q + i);
    }
  }
}

/// Whatever lengths and pages hold.
TEST_P(EmulatedRankPages, AreWrittenNowhereElse) {
  for (int i = 0; i < 4 * times_longer(); ++i) {
    const std::uint64_t draw = first_seed() + static_cast<std::uint64_t>(i);
    SCOPED_TRACE("FOVEA_TEST_SEED=" + std::to_string(draw));
    PagesMemory memory(GetParam(), GetParam().num_ranks - 1);
    spoil_numbers(memory.lengths.mutable_view(), 40, 2 * draw);
    spoil_numbers(memory.table.mutable_view(), 101, 2 * draw + 1);
    EXPECT_EQ(memory.run({.seed = draw, .max_switches = kMostSwitches}).text(), "");
    EXPECT_TRUE(memory.has_intact_guards());
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, EmulatedRankPages,
    ::testing::Values(
        PagesCase{.name = "a_token"}, PagesCase{.name = "nothing_new", .num_new = 0},
        // Over several pages, and more than lanes.
        PagesCase{.name = "a_chunk", .num_new = 45, .seqlen_q = 40, .columns = 6},
        PagesCase{.name = "pages_of_one_key", .page_size = 1, .num_new = 5, .columns = 12},
        PagesCase{.name = "one_rank", .num_ranks = 1, .columns = 7},
        PagesCase{.name = "more_ranks_than_pages", .num_ranks = 8, .num_new = 2, .columns = 1},
        PagesCase{.name = "wide_indices", .num_ranks = 2, .index_dtype = Dtype::i64}),
    [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace fovea::testing
