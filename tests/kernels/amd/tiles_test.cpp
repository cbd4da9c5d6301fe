// Do lanes of CDNA that LDS serves together meet in a bank? By what is known of the hardware: gfx942 has 32 banks and
// serves lanes in order; of gfx950 HipKittens (arXiv 2511.08083) measured which 16 lanes are served together, by 64.
#include "cdna/forward/tiles.cuh"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <vector>

namespace fovea::cuda::cdna {
namespace {

/// Lanes whose chunks of 16 bytes are read or written at once, and how many bytes have each bank once.
struct Service {
  std::vector<std::vector<int>> lanes;
  int line_bytes;
};

Service in_order() {
  Service service{.lanes = {}, .line_bytes = 128};
  for (int first = 0; first < 64; first += 8) {
    service.lanes.emplace_back();
    for (int lane = first; lane < first + 8; ++lane) service.lanes.back().push_back(lane);
  }
  return service;
}

Service of_gfx950() {
  const std::vector<int> first = {0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27};
  const std::vector<int> second = {4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31};
  Service service{.lanes = {first, second, first, second}, .line_bytes = 256};
  for (int& lane : service.lanes[2]) lane += 32;
  for (int& lane : service.lanes[3]) lane += 32;
  return service;
}

void expect_no_conflict(const Service& service,
                        const std::function<ptx::SharedAddress(int lane)>& address,
                        int bytes = kChunkBytes) {
  for (const std::vector<int>& lanes : service.lanes) {
    std::set<int> places;
    for (const int lane : lanes)
      places.insert(static_cast<int>(address(lane)) % service.line_bytes / bytes);
    EXPECT_EQ(places.size(), lanes.size()) << "lanes from " << lanes[0];
  }
}

/// Reads of 8 bytes there: 32 lanes together, by HipKittens' measurements; or any 16 in order, should transposed ones
/// be served so.
Service of_eight_bytes(int lanes_at_once) {
  Service service{.lanes = {}, .line_bytes = 256};
  for (int lane = 0; lane < 64; ++lane) {
    if (lane % lanes_at_once == 0) service.lanes.emplace_back();
    service.lanes.back().push_back(lane);
  }
  return service;
}

template <int keys, int row_bytes, int line_bytes>
void expect_keys_are_read_at_once(const Service& service) {
  const KeyTile<keys, row_bytes, line_bytes> tile{0};
  for (int step = 0; step < row_bytes / 32; ++step)
    expect_no_conflict(service,
                       [&](int lane) { return tile.at(lane % 32, 32 * step + 16 * (lane / 32)); });
}

/// A lane's part of four keys, for a block of 32 columns.
template <int row_bytes>
void expect_transposed_values_are_read_at_once(const Service& service) {
  const TransposedTile<64, row_bytes, 256> tile{0};
  for (int key = 0; key < 64; key += 8) {
    for (int block = 0; block < row_bytes / 64; ++block) {
      expect_no_conflict(
          service,
          [&](int lane) {
            return tile.at(key + 4 * (lane / 32) + lane % 16 / 4,
                           64 * block + 32 * (lane / 16 % 2) + 8 * (lane % 4));
          },
          8);
    }
  }
}

template <int columns>
void expect_values_are_read_at_once(const Service& service) {
  const ValueTile<64, columns> tile{0};
  for (int block = 0; block < columns; block += 32)
    expect_no_conflict(service, [&](int lane) { return tile.chunk(lane / 32, block + lane % 32); });
}

TEST(CdnaTiles, KeysAreReadWithoutConflicts) {
  expect_keys_are_read_at_once<64, 256, 128>(in_order());
  expect_keys_are_read_at_once<128, 128, 128>(in_order());
  expect_keys_are_read_at_once<32, 512, 128>(in_order());
  expect_keys_are_read_at_once<64, 256, 256>(of_gfx950());
  expect_keys_are_read_at_once<128, 128, 256>(of_gfx950());
  expect_keys_are_read_at_once<32, 512, 256>(of_gfx950());
}

TEST(CdnaTiles, TransposedValuesAreReadWithoutConflicts) {
  for (const int lanes_at_once : {16, 32}) {
    expect_transposed_values_are_read_at_once<128>(of_eight_bytes(lanes_at_once));
    expect_transposed_values_are_read_at_once<256>(of_eight_bytes(lanes_at_once));
  }
}

TEST(CdnaTiles, ValuesAreReadAndWrittenWithoutConflicts) {
  expect_values_are_read_at_once<64>(in_order());
  expect_values_are_read_at_once<128>(in_order());
  const ValueTile<64, 128> wide{0};
  const ValueTile<64, 64> narrow{0};
  for (const int second : {0, 1}) {
    expect_no_conflict(in_order(), [&](int lane) { return wide.chunk(3, 2 * lane + second); });
    expect_no_conflict(in_order(), [&](int lane) {
      return narrow.chunk(2 + lane / 32, 2 * (lane % 32) + second);
    });
  }
}

}  // namespace
}  // namespace fovea::cuda::cdna
