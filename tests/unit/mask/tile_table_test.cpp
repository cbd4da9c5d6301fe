// Lists of tiles as a table: what is written, and what is refused before anything is.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/error.hpp"
#include "fovea/mask.hpp"

namespace fovea {
namespace {

/// Two heads of three rows of four tiles; the second row of the first head sees nothing.
struct Lists {
  std::vector<std::int64_t> indptr{0, 2, 2, 3, 7, 8, 9};
  std::vector<std::int32_t> indices{0, 3, 1, 0, 1, 2, 3, 2, 0};
  std::vector<std::int64_t> shape{2, 3, 4};
  std::vector<std::uint8_t> table = std::vector<std::uint8_t>(24, 7);

  TileLists lists() {
    const auto count = [](const auto& values) {
      return std::array{static_cast<std::int64_t>(values.size())};
    };
    return {.indptr = {indptr.data(), make_spec(Dtype::i64, count(indptr))},
            .indices = {indices.data(), make_spec(Dtype::i32, count(indices))},
            .table = {table.data(), make_spec(Dtype::u8, shape)}};
  }

  /// Of a call that must not write.
  std::string refusal() {
    try {
      tile_table(lists());
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::ranges::count(table, 7), 24) << "written before it was refused";
      return error.what();
    }
    return "nothing was thrown";
  }
};

TEST(TileTable, HasTheTilesOfTheLists) {
  Lists of;
  tile_table(of.lists());
  EXPECT_EQ(of.table, (std::vector<std::uint8_t>{1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0,  //
                                                 1, 1, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0}));
}

TEST(TileTable, FollowsStrides) {
  Lists of;
  TileLists lists = of.lists();
  TensorSpec turned =
      lists.table.spec();  // [heads, rows, columns] of memory [rows, columns, heads]
  turned.strides = {1, 8, 2};
  lists.table = {of.table.data(), turned};
  tile_table(lists);
  EXPECT_EQ(of.table, (std::vector<std::uint8_t>{1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0,  //
                                                 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0}));
}

TEST(TileTable, RefusesListsThatAreNone) {
  const auto refused = [](auto&& change) {
    Lists of;
    change(of);
    return of.refusal();
  };
  EXPECT_EQ(refused([](Lists& of) { of.indptr.pop_back(); }),
            "tile_table: indptr has 6 elements; expected 7, the rows of the table + 1");
  EXPECT_EQ(refused([](Lists& of) { of.indptr[0] = 1; }), "tile_table: indptr[0] is 1; expected 0");
  EXPECT_EQ(refused([](Lists& of) { of.indptr[3] = 8; }),
            "tile_table: indptr[4] is 7 behind 8; expected offsets that never fall");
  EXPECT_EQ(refused([](Lists& of) { of.indices.push_back(3); }),
            "tile_table: indptr ends at 9; expected 10, the elements of indices");
  EXPECT_EQ(refused([](Lists& of) { of.indices[7] = 4; }),
            "tile_table: indices[7] is 4, in row 4; expected 0 to 3, the last tile of keys");
  EXPECT_EQ(refused([](Lists& of) { of.indices[8] = -1; }),
            "tile_table: indices[8] is -1, in row 5; expected 0 to 3, the last tile of keys");
  constexpr const char* kOrder =
      ", in row 3; expected each tile once, in rising order: sort the row, and drop what is twice";
  EXPECT_EQ(refused([](Lists& of) { of.indices[5] = 1; }),
            std::string("tile_table: indices[5] is 1 behind 1") + kOrder);
  EXPECT_EQ(refused([](Lists& of) { std::swap(of.indices[5], of.indices[6]); }),
            std::string("tile_table: indices[6] is 2 behind 3") + kOrder);
}

TEST(TileTable, RefusesTensorsOfOtherKinds) {
  const auto refused = [](auto&& change) {
    Lists of;
    TileLists lists = of.lists();
    change(lists, of);
    try {
      tile_table(lists);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(refused([](TileLists& lists, Lists&) { lists.indices = {}; }),
            "tile_table: indices is missing; expected i32 or i64 [number of visible tiles]");
  EXPECT_EQ(refused([](TileLists& lists, Lists& of) {
              const std::array<std::int64_t, 2> shape{7, 1};
              lists.indptr = {of.indptr.data(), make_spec(Dtype::i64, shape)};
            }),
            "tile_table: indptr is i64 [7, 1]; expected i32 or i64 [rows of the table + 1]");
  EXPECT_EQ(refused([](TileLists& lists, Lists& of) {
              lists.table = {of.table.data(), make_spec(Dtype::i8, of.shape)};
            }),
            "tile_table: table is i8 [2, 3, 4]; expected bool or u8 [q_tiles, kv_tiles], [heads, "
            "q_tiles, kv_tiles] or [batch, heads, q_tiles, kv_tiles]");
  EXPECT_NE(refused([](TileLists& lists, Lists& of) {
              lists.table = {reinterpret_cast<std::uint8_t*>(of.indices.data()),
                             make_spec(Dtype::u8, of.shape)};
            }).find("table overlaps indices"),
            std::string::npos);
}

}  // namespace
}  // namespace fovea
