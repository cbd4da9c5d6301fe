// Context parallelism: one sequence's tokens over several ranks. A plan says who holds which tokens, who computes which
// rows and heads, what is sent, how many bytes that is and how even the work is; for every mask, from its block map.
//
//   ShardPlan shards = context_parallel_plan(problem, 8);                           // all-gather of keys and values
//   shards.tokens(3);       // what rank 3 holds: a few ranges of the sequence, ascending
//   shards.transfers(3);    // what it receives in a forward pass, and from whom
//   shards.balance();       // work of the busiest rank over the mean: 1 is even
//
// A pure function of its arguments: every rank makes the same plan by itself and nothing is communicated.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/block_map.hpp"
#include "fovea/problem.hpp"

namespace fovea {

/// How ranks come by the keys that their rows see.
///
/// all_gather             all keys and values to every rank, then one call
/// head_group_all_gather  the same in parts of the kv heads: a part is attended to while the next one arrives
/// ring                   shards of keys travel from rank to rank, partial results are merged: two shards in memory
/// ulysses                tokens are exchanged for heads: every rank has the whole sequence of a part of the heads
/// hybrid                 ulysses among neighbours, a ring across their groups
/// needed_only            tiles of keys that a rank's rows see and nothing else, for documents and windows
enum class ParallelScheme : std::uint8_t {
  all_gather,
  head_group_all_gather,
  ring,
  ulysses,
  hybrid,
  needed_only
};
inline constexpr int kNumParallelSchemes = 6;
FOVEA_EXPORT std::string_view name(ParallelScheme scheme);
FOVEA_EXPORT std::optional<ParallelScheme> parse_parallel_scheme(std::string_view name);

/// Half-open.
struct TokenRange {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const TokenRange&) const = default;
};
struct HeadRange {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const HeadRange&) const = default;
};

struct ShardOptions {
  std::int64_t tile_q = 128, tile_kv = 128;  // in which work and needs are counted
  std::int64_t chunk =
      0;  // tokens that stay together; 0: 16 chunks a rank, whole tiles where there are enough
  std::int64_t head_parts =
      0;  // head_group_all_gather: parts of the kv heads; 0: as many as divide them, up to 4
  int head_ranks =
      0;  // hybrid: ranks that share a group's heads; 0: as many as divide ranks and kv heads
};

/// One tensor's part that a rank receives in a forward pass. Keys and values travel together.
struct Transfer {
  enum class Tensor : std::uint8_t { q, kv, out };
  int step = 0;  // transfers of one step go at once, those of the next follow
  int from = 0;
  Tensor tensor = Tensor::kv;
  TokenRange tokens{};
  HeadRange heads{};  // kv heads for kv, query heads else
  bool operator==(const Transfer&) const = default;
};

/// A tile of a rank's rows: these rows in the map of the whole sequence.
struct RowTile {
  TokenRange rows{};
  std::span<const TileRun> runs{};  // of tiles of keys, counted in the whole sequence
};

/// Of one rank. Bytes are those received.
struct RankLoad {
  TileCount tiles{};  // of all sequences and heads that it computes
  double work = 0;    // full tiles, and 1.1 for each partial one
  std::int64_t forward_bytes = 0;
  std::int64_t backward_bytes = 0;  // keys and values once more, and f32 sums of their gradients
  std::int64_t kv_bytes = 0;        // keys and values in memory at once
};

/// Immutable, cheap to copy, thread safe. A rank out of range throws InvalidArgument.
class FOVEA_EXPORT ShardPlan {
 public:
  ParallelScheme scheme() const;
  int world_size() const;
  std::int64_t seqlen() const;
  /// How tokens were dealt: "contiguous", "zigzag", "balanced", or "evened out": neighbours but for some chunks.
  std::string_view dealing() const;

  /// Tokens whose q, k, v and out this rank holds: equally many on every rank, ascending.
  std::span<const TokenRange> tokens(int rank) const;
  /// Rows and heads that it computes: its own tokens and all heads, but for ulysses and hybrid.
  std::span<const TokenRange> rows(int rank) const;
  HeadRange q_heads(int rank) const;
  HeadRange kv_heads(int rank) const;
  /// Keys that some of these rows see, in whole tiles; ascending.
  std::span<const TokenRange> needed_kv(int rank) const;
  /// Slices of the sequence's one block map: nothing is mapped again.
  std::vector<RowTile> row_tiles(int rank, std::int64_t sequence = 0,
                                 std::int64_t q_head = 0) const;
  /// What it receives in a forward pass, by step.
  std::vector<Transfer> transfers(int rank) const;

  RankLoad load(int rank) const;
  /// Work of the busiest rank over the mean; 1 where there is none.
  double balance() const;

  /// [seqlen]: the token at each place when ranks' tokens stand one after the other. Rank r's are the r-th of
  /// world_size equal parts.
  std::vector<std::int64_t> permutation() const;

  /// A page a person can read, and the same as one JSON object.
  std::string print() const;
  std::string json() const;
  /// Who computes what: queries down, keys across, a character of 0-9, a-z, A-Z (and again) for the rank that computes
  /// most of the tiles there, blank where no key is visible.
  std::string print_ranks(std::int64_t sequence = 0, std::int64_t q_head = 0, int max_width = 96,
                          int max_height = 48) const;
  /// The same in colours.
  MaskPicture draw_ranks(std::int64_t sequence = 0, std::int64_t q_head = 0,
                         int max_size = 1024) const;

  struct Impl;
  explicit ShardPlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// problem   dense, seqlen_q = seqlen_kv, a multiple of world_size (pad with tokens that a mask hides)
/// Balance   chunks of tokens are dealt by the tiles that the mask leaves in them, equally many to each rank;
///           neighbours where that is even. One causal sequence has a closed form: chunks r and 2 · world_size - 1 - r.
///           needed_only begins with neighbours and exchanges no more than an even load (2 %) asks.
/// Reads     what the mask captures, on the host; a captured tensor without data may hold anything.
/// Throws    InvalidArgument: lengths that differ or do not divide, packed problems, bounds in place of lengths,
///           heads that a scheme cannot divide.
[[nodiscard]] FOVEA_EXPORT ShardPlan context_parallel_plan(
    const Problem& problem, int world_size, ParallelScheme scheme = ParallelScheme::all_gather,
    const ShardOptions& options = {});

/// What a rank computes and receives in a second. A prediction is as good as these; the defaults are those of H200s on
/// NVLink: bf16 attention of long sequences, all-gather of large tensors.
struct RankSpeed {
  double flops = 650e12;
  double bytes = 250e9;
};

/// One scheme's plan in numbers: a prediction, nothing is run.
struct SchemeForecast {
  ParallelScheme scheme = ParallelScheme::all_gather;
  std::string refusal{};  // in words, where the scheme cannot serve the problem: no number is known
  double balance = 1;
  std::int64_t forward_bytes = 0, backward_bytes = 0, kv_bytes = 0;  // of the rank that has most
  double forward_ms = 0,
         backward_ms = 0;  // exchange included, behind computation where the scheme overlaps
};

/// Every scheme, in the order of ParallelScheme. Throws as context_parallel_plan for what no scheme can serve, and for
/// speeds that are not above 0.
[[nodiscard]] FOVEA_EXPORT std::vector<SchemeForecast> forecast_context_parallel(
    const Problem& problem, int world_size, const ShardOptions& options = {},
    const RankSpeed& speed = {});
/// As a table, and as a JSON list of objects.
[[nodiscard]] FOVEA_EXPORT std::string print_forecasts(std::span<const SchemeForecast> forecasts);
[[nodiscard]] FOVEA_EXPORT std::string json_forecasts(std::span<const SchemeForecast> forecasts);

}  // namespace fovea
