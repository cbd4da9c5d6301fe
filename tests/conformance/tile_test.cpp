// The nouns of device/tile: where elements of a tile lie, what descriptors say, who holds which element.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "tile/fragment.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda {
namespace {

TEST(Swizzle, IsItsOwnInverseAndStaysWithinItsPeriod) {
  const auto check = [](auto swizzle) {
    const std::uint32_t period = swizzle_period(swizzle.value);
    for (std::uint32_t address = 0; address < 4096; ++address) {
      const std::uint32_t there = swizzled<swizzle.value>(address);
      EXPECT_EQ(swizzled<swizzle.value>(there), address);
      EXPECT_EQ(there / period, address / period);
    }
  };
  check(std::integral_constant<Swizzle, Swizzle::none>());
  check(std::integral_constant<Swizzle, Swizzle::bytes32>());
  check(std::integral_constant<Swizzle, Swizzle::bytes64>());
  check(std::integral_constant<Swizzle, Swizzle::bytes128>());
}

TEST(Swizzle, EightRowsOfAColumnLieInDifferentBanks) {
  const SharedTile<8, 128, Swizzle::bytes128> wide{0};
  const SharedTile<8, 64, Swizzle::bytes64> middle{0};
  const SharedTile<8, 32, Swizzle::bytes32> narrow{0};
  for (int chunk = 0; chunk < 2; ++chunk) {
    std::set<std::uint32_t> banks[3];
    for (int row = 0; row < 8; ++row) {
      banks[0].insert(wide.chunk(row, chunk) / 16 % 8);
      banks[1].insert(middle.chunk(row, chunk) / 16 % 8);
      banks[2].insert(narrow.chunk(row, chunk) / 16 % 8);
    }
    for (const auto& set : banks) EXPECT_EQ(set.size(), 8U);
  }
}

template <class Tile>
void expect_every_byte_once() {
  const Tile tile{4096};
  std::set<std::uint32_t> addresses;
  for (int row = 0; row < Tile::kRows; ++row) {
    for (int byte = 0; byte < Tile::kRowBytes; ++byte) addresses.insert(tile.at(row, byte));
  }
  EXPECT_EQ(addresses.size(), static_cast<std::size_t>(Tile::kBytes));
  EXPECT_EQ(*addresses.begin(), 4096U);
  EXPECT_EQ(*addresses.rbegin(), 4096U + Tile::kBytes - 1);
}

TEST(SharedTile, HasAPlaceForEveryByte) {
  expect_every_byte_once<SharedTile<64, 256, Swizzle::bytes128>>();
  expect_every_byte_once<SharedTile<16, 128, Swizzle::bytes64>>();
  expect_every_byte_once<SharedTile<24, 64, Swizzle::bytes32>>();
  expect_every_byte_once<SharedTile<8, 48, Swizzle::none>>();
  expect_every_byte_once<JoinedTile<16, 256>>();
  expect_every_byte_once<JoinedTile<24, 192>>();
  expect_every_byte_once<JoinedTile<8, 96>>();
}

TEST(SharedTile, PanelsFollowEachOther) {
  const SharedTile<64, 256, Swizzle::bytes128> tile{1024};
  EXPECT_EQ(tile.at(0, 0), 1024U);
  EXPECT_EQ(tile.at(0, 128), 1024U + 64 * 128);
  EXPECT_EQ(tile.at(3, 128), 1024U + 64 * 128 + 3 * 128 + 3 * 16);
  EXPECT_EQ(tile.panel(1), 1024U + 64 * 128);
}

TEST(SharedTile, JoinedRowsAreWhole) {
  const JoinedTile<24, 192> tile{1024};  // three panels of 64 bytes
  EXPECT_EQ(tile.at(1, 0), 1024U + 192);
  EXPECT_EQ(tile.at(0, 64), 1024U + 64);
  EXPECT_EQ(tile.at(5, 64), 1024U + 5 * 192 + 64 + 2 * 16);
}

TEST(SharedTile, EightJoinedRowsOfAColumnLieInDifferentBanks) {
  const auto check = [](const auto& tile) {
    for (int chunk = 0; chunk < tile.kChunks; ++chunk) {
      std::set<std::uint32_t> banks;
      for (int row = 0; row < 8; ++row) banks.insert(tile.chunk(row, chunk) / 16 % 8);
      EXPECT_EQ(banks.size(), 8U) << tile.kRowBytes << " bytes, chunk " << chunk;
    }
  };
  check(JoinedTile<8, 64>{0});
  check(JoinedTile<8, 128>{0});
  check(JoinedTile<8, 192>{0});
  check(JoinedTile<8, 512>{0});
}

TEST(SharedTile, ChunksAheadAreOneXorAway) {
  const auto check = [](const auto& tile) {
    for (int row = 0; row < tile.kRows; ++row) {
      for (int chunk = 0; chunk < tile.kChunks; ++chunk) {
        EXPECT_EQ(tile.chunk_ahead(tile.chunk(row, chunk % 2), chunk / 2 * 2),
                  tile.chunk(row, chunk))
            << "row " << row << ", chunk " << chunk;
      }
    }
  };
  check(SharedTile<64, 256, Swizzle::bytes128>{1024});
  check(JoinedTile<16, 256>{1024});
  check(JoinedTile<16, 192>{1024});
}

TEST(MatrixDescriptor, OfAKMajorTile) {
  const SharedTile<64, 256, Swizzle::bytes128> tile{0x4400};
  EXPECT_EQ(k_major_descriptor(tile), 0x4000004000010440U);
  // Four steps of 32 bytes, then the next panel of 64 rows.
  EXPECT_EQ(advanced(k_major_descriptor(tile), k_major_offset<decltype(tile)>(3)),
            0x4000004000010446U);
  EXPECT_EQ(advanced(k_major_descriptor(tile), k_major_offset<decltype(tile)>(4)),
            0x4000004000010640U);
}

TEST(MatrixDescriptor, OfAnMnMajorTile) {
  const SharedTile<128, 256, Swizzle::bytes128> tile{0x4400};
  EXPECT_EQ(mn_major_descriptor(tile), 0x4000004004000440U);
  EXPECT_EQ(advanced(mn_major_descriptor(tile), mn_major_offset<decltype(tile)>(1)),
            0x40000040040004C0U);
}

TEST(MatrixDescriptor, DropsTheRankOfTheCta) {
  const SharedTile<64, 128, Swizzle::bytes128> tile{0x01004400}, own{0x4400};
  EXPECT_EQ(k_major_descriptor(tile), k_major_descriptor(own));
  EXPECT_EQ(mn_major_descriptor(tile), mn_major_descriptor(own));
}

TEST(Fragment, EveryElementHasOneHolder) {
  std::set<std::pair<int, int>> sums, a16, a8;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < 48 / 2; ++i) {
      const Coordinate at = wgmma_coordinate(thread, i);
      sums.emplace(at.row, at.column);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 4; ++r) {
      const Coordinate of16 = a_coordinate_16_bit(lane, r), of8 = a_coordinate_8_bit(lane, r);
      for (int e = 0; e < 2; ++e) a16.emplace(of16.row, of16.column + e);
      for (int e = 0; e < 4; ++e) a8.emplace(of8.row, of8.column + e);
    }
  }
  EXPECT_EQ(sums.size(), 64U * 48U);
  EXPECT_EQ(*sums.rbegin(), std::pair(63, 47));
  EXPECT_EQ(a16.size(), 16U * 16U);
  EXPECT_EQ(*a16.rbegin(), std::pair(15, 15));
  EXPECT_EQ(a8.size(), 16U * 32U);
  EXPECT_EQ(*a8.rbegin(), std::pair(15, 31));
}

TEST(Fragment, SumsPackedInPairsAreAnA) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int step = 0; step < 3; ++step) {
      for (int r = 0; r < 4; ++r) {
        const Coordinate sum = accumulator_coordinate(lane, 8 * step + 2 * r);
        const Coordinate a = a_coordinate_16_bit(lane, r);
        EXPECT_EQ(sum.row, a.row);
        EXPECT_EQ(sum.column, 16 * step + a.column);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::cuda
