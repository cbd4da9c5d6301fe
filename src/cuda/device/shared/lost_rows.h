// Rows that attention of eight bits loses, since their scores are so large: what it notes of them, and what the kernel
// behind it, which computes them again, is compiled for and takes. Read common/lost_rows.cuh for the kernel.
#pragma once

#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "shared/quantize_kv.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// Word 0 is 0 where no row is lost. Behind it stands a bit for each row: [batch, num_heads_q, seqlen_q], packed
/// [num_heads_q, total_q].
constexpr std::int64_t num_note_words(std::int64_t num_rows) { return 1 + (num_rows + 31) / 32; }

/// Where scores stay codes Hopper's kernel leaves scales of rows in the place of notes: floats, as many of each list of
/// rows, [batch, num_heads_q] or packed [num_heads_q]. Tiles of packed rows are counted as those of codes are, and a
/// tile may be cut.
constexpr std::int64_t num_row_scales(bool is_packed, std::int64_t num_sequences,
                                      std::int64_t rows) {
  const std::int64_t tiles = (rows + kQuantizedTile - 1) / kQuantizedTile;
  return (is_packed ? first_packed_tile(num_sequences, rows) + 2 : tiles) * kQuantizedTile;
}

/// Head dims are those of codes, and of V as it lies in workspace. A row is a tile.
struct LostRowsSpec : ForwardSpec {
  bool has_query_codes = false;  // Q was rounded before attention; else it is here
  bool rotates = false;          // rows of Q, where they are rounded here
  std::int32_t scale_tile = kQuantizedTile;
  // Where the kernel before attention has written V: as codes of e4m3, or as elements.
  bool sums_codes = false, reads_numbers = false;
  bool smooths_v = false;  // V is without its mean there
  bool is_cached =
      false;  // K and V are codes of what lies in a cache, as these codes or, none, as elements
  Codes k_codes = Codes::none, v_codes = Codes::none;

  bool operator==(const LostRowsSpec&) const = default;
};

struct LostRowsParams {
  ForwardParams call;        // K and V as given
  QuantizeKvParams rounded;  // what was written of Q, K and V
  ScaleParam k_scale, v_scale;
  const std::uint32_t* notes;  // [num_note_words]
  std::int64_t num_rows;
};

inline constexpr std::int32_t kLostRowsThreads = 256;

}  // namespace fovea::cuda
