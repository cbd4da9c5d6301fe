// Philox4x32-10, the counter-based generator of dropout. Source: Salmon et al., "Parallel random numbers: as easy as 1,
// 2, 3", SC 2011, section 3.3. The counter of a decision is (kv_idx / 4, q_idx, q_head, batch), its word kv_idx % 4.
#pragma once

#include <array>
#include <cstdint>

#include "fovea/problem.hpp"

namespace fovea::philox {

inline constexpr std::uint32_t kMultiplier0 = 0xD2511F53U, kMultiplier1 = 0xCD9E8D57U;
inline constexpr std::uint32_t kWeyl0 = 0x9E3779B9U, kWeyl1 = 0xBB67AE85U;
inline constexpr int kRounds = 10;

using Counter = std::array<std::uint32_t, 4>;
using Key = std::array<std::uint32_t, 2>;

constexpr Counter philox4x32(Counter c, Key key) {
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kMultiplier0} * c[0];
    const std::uint64_t product1 = std::uint64_t{kMultiplier1} * c[2];
    c = {static_cast<std::uint32_t>(product1 >> 32U) ^ c[1] ^ key[0],
         static_cast<std::uint32_t>(product1),
         static_cast<std::uint32_t>(product0 >> 32U) ^ c[3] ^ key[1],
         static_cast<std::uint32_t>(product0)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return c;
}

/// The key of a call: the offset is mixed into the seed by one application of the generator.
constexpr Key dropout_key(std::uint64_t seed, std::uint64_t offset) {
  const Counter mixed = philox4x32(
      {static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(offset >> 32U), 0, 0},
      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32U)});
  return {mixed[0], mixed[1]};
}

/// A key is dropped when its random word is below this; 2^32 (p = 1) drops all.
constexpr std::uint64_t drop_threshold(float p) {
  return static_cast<std::uint64_t>(static_cast<double>(p) * 4294967296.0);
}

constexpr std::uint32_t random_word(Key key, std::int64_t batch, std::int64_t q_head,
                                    std::int64_t q_idx, std::int64_t kv_idx) {
  const Counter words =
      philox4x32({static_cast<std::uint32_t>(kv_idx / 4), static_cast<std::uint32_t>(q_idx),
                  static_cast<std::uint32_t>(q_head), static_cast<std::uint32_t>(batch)},
                 key);
  return words[static_cast<std::size_t>(kv_idx % 4)];
}

/// Where batch entries, query heads, queries and keys of a call stand in the whole that dropout draws for; null: index
/// for index.
struct Places {
  const std::int32_t* batch = nullptr;
  const std::int32_t* q_head = nullptr;
  const std::int32_t* q = nullptr;
  const std::int32_t* kv = nullptr;

  static std::int64_t of(const std::int32_t* table, std::int64_t index) {
    return table == nullptr ? index : table[index];
  }
};

inline std::uint32_t random_word(Key key, const Places& places, std::int64_t batch,
                                 std::int64_t q_head, std::int64_t q_idx, std::int64_t kv_idx) {
  return random_word(key, Places::of(places.batch, batch), Places::of(places.q_head, q_head),
                     Places::of(places.q, q_idx), Places::of(places.kv, kv_idx));
}

}  // namespace fovea::philox
