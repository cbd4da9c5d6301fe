// The four steps that a tile of attention takes, as a table of functions per target.
//
// Everything is key-major: a panel is a group of queries that sit side by side in the lanes of a few vectors, scores
// are Sᵀ [keys][lanes] and the output is Oᵀ [head_dim_v][lanes]. So
//   - Sᵀ = K Qᵀ broadcasts the elements of K where they lie: K is never transposed or packed;
//   - row maximum, sum and rescaling are vertical: no horizontal reduction anywhere;
//   - Oᵀ += Vᵀ P broadcasts V, and P is already in the layout of the second operand;
//   - a row's arithmetic never depends on its neighbours in the panel, so tiling queries never changes a bit.
// Read cpu/attention_forward.cpp for the loop around these steps, which cpu/forward/tile_walk.cpp walks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fovea/dtype.hpp"
#include "fovea/problem.hpp"

#include "core/philox.hpp"
#include "cpu/program.hpp"
#include "expr/tape.hpp"

namespace fovea::cpu {

/// A rectangle of K or V in the caller's memory; strides in elements. Its rows are row_stride apart from `data`, or,
/// where they lie in several pages of a cache, wherever `rows` says. Only scores_few, accumulate_few and NextTile take
/// the second kind. Rows of codes have scales: f32 kernels alone take them, few rows as they lie, tiles by `numbers`.
struct TileSource {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int64_t row_stride = 0, col_stride = 1;
  std::int64_t num_rows = 0, num_cols = 0;
  const std::byte* const* rows = nullptr;  // [num_rows]; data is null then
  const float* scales = nullptr;           // [num_rows] of codes

  std::int64_t row_bytes() const {
    return row_stride * static_cast<std::int64_t>(size_bytes(dtype));
  }
  const std::byte* row(std::int64_t index) const {
    return rows != nullptr ? rows[index] : data + index * row_bytes();
  }
};

/// Rows that will be needed soon, fetched into the second-level cache a few at a time between blocks of products: a row
/// often ends long before the page it lies in, where the hardware's prefetchers stop, and in decode nothing else would
/// keep the memory busy while a tile is multiplied.
class NextTile {
 public:
  NextTile() = default;
  /// fetch will be called about num_calls times. `first` comes before keys and values; it must outlive this.
  NextTile(const TileSource& keys, const TileSource& values, std::int64_t num_calls,
           std::span<const TileSource> first = {})
      : keys_and_values_{keys, values}, first_(first) {
    std::int64_t num_rows = keys.num_rows + values.num_rows;
    for (const TileSource& source : first) num_rows += source.num_rows;
    rows_per_call_ = (num_rows + num_calls - 1) / num_calls;
  }

  void fetch() {
    for (std::int64_t left = rows_per_call_; left > 0 && source_ < num_sources(); --left) {
      const TileSource& source = at(source_);
      if (row_ < source.num_rows) {
        fetch_row(source, row_++);
      } else {
        ++source_;
        row_ = 0;
      }
    }
  }

 private:
  std::size_t num_sources() const { return first_.size() + 2; }
  const TileSource& at(std::size_t index) const {
    return index < first_.size() ? first_[index] : keys_and_values_[index - first_.size()];
  }

  static void fetch_row(const TileSource& source, std::int64_t row) {
    constexpr std::int64_t kLine = 64;
    const auto bytes = source.num_cols * static_cast<std::int64_t>(size_bytes(source.dtype));
    const std::byte* begin = source.row(row);
    for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(begin + at, 0, 2);
  }

  TileSource keys_and_values_[2];
  std::span<const TileSource> first_;
  std::size_t source_ = 0;  // being fetched: of first_, then of the two
  std::int64_t row_ = 0;    // in it
  std::int64_t rows_per_call_ = 0;
};

/// Keys of a loaded tile that a panel works on: what lies outside is hidden from all its rows. begin is a multiple of
/// the block map's granularity.
struct KeyRange {
  std::int64_t begin = 0, count = 0;
};

/// Queries of a panel.
struct LaneRange {
  std::int64_t begin = 0, count = 0;
};

/// Granularity of the block map inside a tile: a band that cuts a tile costs little more than what is seen of it.
inline constexpr std::int64_t kSubTileKeys = 32;

/// Keys ready for `scores`: the caller's own memory, or a converted copy.
struct KeyTile {
  const void* data = nullptr;
  std::int64_t row_stride = 0;  // in elements of the kernel's product type
  std::int64_t num_keys = 0;
};

/// Dropout of one panel's tile; row_threshold 0 keeps everything.
struct PanelDropout {
  std::uint64_t threshold = 0;  // a key is dropped when its random word is below
  float keep_scale = 1;         // 1 / (1 - p)
  std::uint32_t key[2] = {0, 0};
  std::uint32_t batch = 0;
  std::int64_t kv_begin = 0;
  const std::int32_t* q_idx = nullptr;   // [lanes]
  const std::int32_t* q_head = nullptr;  // [lanes]
  philox::Places places{};               // of what is above
};

/// Keys [begin, end) of the sequence that each row of a panel sees.
struct SeenKeys {
  const std::int32_t* begin = nullptr;  // [lanes]
  const std::int32_t* end = nullptr;    // [lanes]
};

/// State of the online softmax of a panel, in the units of the scores given to `softmax`. All [lanes].
struct PanelState {
  float* row_max = nullptr;
  float* row_sum = nullptr;
  float* rescale = nullptr;  // written: what the output so far must be multiplied by
  // What sums are relative to: an earlier maximum that is little less than row_max. Null: row_max itself.
  float* origin = nullptr;
};

/// A few rows of floats, `pitch` apart.
struct RowBlock {
  float* data = nullptr;
  std::int64_t pitch = 0;

  float* row(std::int64_t index) const { return data + index * pitch; }
  RowBlock part(std::int64_t first_row, std::int64_t first_col) const {
    return {row(first_row) + first_col, pitch};
  }
};
inline constexpr std::int64_t kFewRows = 8;
inline constexpr std::int64_t kFewKeys = 4;  // keys between two fetches of what is read next

/// One panel's part of a tile.
struct PanelTurn {
  const void* queries = nullptr;
  KeyTile keys{};
  const void* values = nullptr;  // of the whole tile; they stay until the flush, as the panel does
  KeyRange range{};
  float* out = nullptr;
  PanelState state{};

  // Programs and masks of the keys of `part`, all within kSubTileKeys keys; called for those bits of `prepared`,
  // counted from range.begin in steps of kSubTileKeys.
  void (*prepare)(const PanelTurn& turn, KeyRange part, float* scores) = nullptr;
  std::uint32_t prepared = 0;
  const void* walk = nullptr;   // for prepare
  const void* panel = nullptr;  // for prepare
};

/// Panels that go through their steps overlapped.
struct PanelPipeline {
  std::byte* memory = nullptr;  // pipeline_bytes
  std::int64_t tile_kv = 0, head_dim_qk = 0, head_dim_v = 0;
  float scale_log2 = 1;

  // What the kernels keep from one call to the next.
  PanelTurn current{}, prior{};
  bool has_current = false, has_prior = false, has_first_strip = false;
  std::int64_t first_strip = 0;
  int num_turns = 0;
};

struct PanelKernels {
  int lanes = 0;         // queries in a panel
  int key_block = 1;     // keys between two fetches of the next tile
  int value_block = 1;   // columns of V between two fetches in `accumulate`
  int vector_lanes = 0;  // queries in a vector: panels with fewer rows use fewer vectors
  Dtype product = Dtype::f32;
  // Sizes in bytes of what the functions below fill; each a multiple of 64.
  std::size_t (*query_bytes)(std::int64_t head_dim_qk);
  std::size_t (*key_bytes)(std::int64_t tile_kv, std::int64_t head_dim_qk);
  std::size_t (*value_bytes)(std::int64_t tile_kv, std::int64_t head_dim_v);
  std::size_t (*score_bytes)(std::int64_t tile_kv);
  std::size_t (*output_bytes)(std::int64_t head_dim_v);

  // Around the steps of a work item; null where there is nothing to set up.
  void (*start)() = nullptr;
  void (*stop)() = nullptr;

  /// rows[lane] points at a query row, null for a padding lane (zeros).
  void (*pack_queries)(const std::byte* const* rows, Dtype dtype, std::int64_t col_stride,
                       std::int64_t head_dim_qk, void* queries);
  KeyTile (*load_keys)(const TileSource& source, void* buffer);
  /// Where is_careful, elements that are not finite become 0: they are added apart (see forward/non_finite.hpp).
  void (*load_values)(const TileSource& source, bool is_careful, void* buffer);
  /// scores[i][lane] = Σ_d keys[range.begin + i][d] · queries[d][lane]; calls next.fetch once every key_block keys
  void (*scores)(const void* queries, const KeyTile& keys, KeyRange range, std::int64_t head_dim_qk,
                 int num_vectors, float* scores, NextTile& next);
  void (*scale)(float* scores, std::int64_t num_keys, float factor);
  void (*run_score)(const expr::Tape& tape, const ProgramTile& tile);
  void (*run_mask)(const expr::Tape& tape, const ProgramTile& tile);
  /// What run_mask leaves where a row sees one range of keys: -inf outside. kv_begin: of the first key.
  void (*hide)(float* scores, std::int64_t num_keys, std::int64_t kv_begin, const SeenKeys& seen);
  /// scores become probabilities 2^((score - origin) * scale_log2) in the layout that accumulate wants, updating the
  /// state; scale_log2 > 0.
  void (*softmax)(float* scores, std::int64_t num_keys, int num_vectors, float scale_log2,
                  const PanelState& state, const PanelDropout& dropout);
  /// Probabilities in f32 become what accumulate wants, in place; null where they are it.
  void (*pack_probabilities)(float* probabilities, std::int64_t num_keys) = nullptr;
  /// out[d][lane] = out[d][lane] * rescale[lane] + Σ_i values[range.begin + i][d] · probabilities[i][lane]; values hold
  /// tile_keys keys. Calls next.fetch once every value_block columns.
  void (*accumulate)(const void* values, std::int64_t tile_keys, KeyRange range,
                     const void* probabilities, std::int64_t head_dim_v, int num_vectors,
                     const float* rescale, float* out, NextTile& next);

  // Where a core can multiply and take exponentials at the same time: scores, softmax and accumulate of one panel after
  // the other, to the same bits. What a turn gives is in place after the flush. Null elsewhere.
  std::size_t (*pipeline_bytes)(std::int64_t tile_kv) = nullptr;
  void (*push)(PanelPipeline& pipeline, const PanelTurn& turn, NextTile& next) = nullptr;
  void (*flush)(PanelPipeline& pipeline, NextTile& next) = nullptr;

  /// Is every element of the vectors in use finite? Padding lanes count too: they are 0, or NaN where a key in sight
  /// is.
  bool (*is_finite)(const float* out, std::int64_t head_dim_v, int num_vectors);
  /// rows[i][d] = out[d][lanes.begin + i]; rows lie `pitch` apart.
  void (*extract_rows)(const float* out, LaneRange lanes, std::int64_t head_dim_v, float* rows,
                       std::int64_t pitch);
  /// to = row * factor, in any dtype and stride.
  void (*store_row)(const float* row, float factor, std::int64_t count, Dtype dtype,
                    std::int64_t col_stride, std::byte* to);

  /// Rows of codes as the numbers that they stand for, f32 side by side in `buffer`.
  TileSource (*numbers)(const TileSource& codes, float* buffer) = nullptr;

  // The same for sequences of at most kFewRows rows, straight from the caller's K and V in f32 (few_rows-inl.hpp): rows
  // of scores and sums lie side by side. scores_few and accumulate_few call next.fetch once every kFewKeys keys.
  /// scores[r][i] = Σ_d keys[i][d] · queries[r][d]
  void (*scores_few)(RowBlock queries, int num_rows, const TileSource& keys, RowBlock scores,
                     NextTile& next);
  /// As softmax, of [num_rows] states. Rows have room for num_keys up to a whole vector.
  void (*softmax_few)(RowBlock scores, int num_rows, std::int64_t num_keys, float scale_log2,
                      const PanelState& state);
  /// sums[r][d] += Σ_i probabilities[r][i] · values[i][d]
  void (*accumulate_few)(const TileSource& values, bool is_careful, RowBlock probabilities,
                         int num_rows, RowBlock sums, NextTile& next);
};

/// Null where this build has no such kernels; whether the processor can run them is features.hpp's business.
const PanelKernels* panel_kernels(CpuTarget target);

/// The best of this build for f32 that this processor runs.
const PanelKernels& best_f32_kernels();

const PanelKernels* panel_kernels_avx512_bf16();
const PanelKernels* panel_kernels_amx_bf16();

/// fp32 products of f16 and bf16 inputs on the tiles of CpuTarget::amx_bf16; null without them. A row that meets an
/// infinity or a NaN becomes NaN: it has to be computed again by the kernels of CpuTarget::avx512, whose panels are as
/// wide and whose operands take no more room.
const PanelKernels* panel_kernels_amx_split();

}  // namespace fovea::cpu
