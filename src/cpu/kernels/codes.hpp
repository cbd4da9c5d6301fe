// Steps of attention by a recipe that panel.hpp has none for: operands and probabilities become codes, and codes of
// eight bits are multiplied as such.
//
// Products of codes work on the panels of panel.hpp, four codes where an f32 kernel has one number:
//   queries        [head_dim / 4][lanes]  quads of s8, then -128 Σ of each lane's codes, s32
//   keys           [keys][pitch]          u8: code + 128, because the instruction wants one operand without sign
//   probabilities  [keys / 4][lanes]      quads of u8
//   values         [head_dim_v][pitch]    s8, the keys of one tile side by side
// Sums are exact: |Σ| < 2^24, so f32 holds them too. Read cpu/quantized/walk.hpp for the loop around these.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/dtype.hpp"
#include "fovea/problem.hpp"
#include "fovea/quant.hpp"

#include "cpu/kernels/panel.hpp"
#include "problem/head_dim.hpp"

namespace fovea::cpu {

/// What is known of the rows of a panel. All [lanes].
struct QuantizedRows {
  float* row_max = nullptr;  // as PanelState: in raw scores
  float* origin = nullptr;   // the reference: sums are relative to it
  float* row_sum = nullptr;
  float* kept_sum =
      nullptr;  // of what dropout keeps, scaled as it is; written where something is dropped
  float* rescale = nullptr;  // written: what sums so far are multiplied by
  float* weight =
      nullptr;  // written: what the tile's product of codes is multiplied by, before the scales of v
};

struct QuantizedTile {
  float* scores = nullptr;  // [num_keys][lanes], from a multiple of kSubTileKeys on; -inf is hidden
  std::int64_t num_keys = 0;
  const float* octaves = nullptr;  // [lanes]: of a score of 1
  const float* common = nullptr;  // [lanes]: of all scores of a row; references are counted from it
};

/// Elements of a row or of a tile's columns that become codes.
struct RowSource {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int64_t col_stride = 1, count = 0;
};

/// What elements of a row are multiplied by to become codes.
struct CodeScales {
  const float* reciprocals = nullptr;
  bool is_of_row = true;  // one for all: q and k. Else one a column: values
  // Scales of groups, which stay in the numbers, alike one or one a column; null: codes alone.
  const float* groups = nullptr;
};

struct RowFacts {
  bool is_finite = true;
  float greatest = 0;  // magnitude, of a row that is finite
};

struct RoundingSteps {
  /// row = source - mean (null: 0). A row that holds a value that is not finite becomes zeros.
  RowFacts (*smooth_row)(const RowSource& source, const float* mean, float* row) = nullptr;
  /// The same element by element: zeros where a value is not finite. Were all finite?
  bool (*smooth_values)(const RowSource& source, const float* mean, float* row) = nullptr;
  /// sums += the elements of a row that is finite, or of all that are where by_element.
  void (*add_to_sums)(const RowSource& source, bool by_element, float* scratch,
                      double* sums) = nullptr;
  float (*greatest_of)(const float* row, std::int64_t count) = nullptr;
  /// greatest = max(greatest, |row|)
  void (*raise_greatest)(const float* row, std::int64_t count, float* greatest) = nullptr;
  /// a · b, to less than an f32 shows.
  double (*dot)(const float* a, const float* b, std::int64_t count) = nullptr;
  /// Codes of row · reciprocals, of which a row of q or k has one (is_of_row) and values have one a column.
  void (*int8_codes)(const float* row, const float* reciprocals, bool is_of_row, std::int64_t count,
                     std::uint8_t offset, std::uint8_t* codes) = nullptr;
  /// Rows [count][width] become columns, `pitch` apart, which is a multiple of 16; zeros behind the last row.
  void (*transpose_codes)(const std::uint8_t* rows, std::int64_t count, std::int64_t width,
                          std::int64_t pitch, std::uint8_t* columns) = nullptr;
  /// As int8_codes, in 16 bits that hold them exactly: f16 for the format f16, bf16 for the others, with the scales of
  /// their groups, which have no more than four bits.
  void (*wide_codes)(const float* row, const CodeScales& scales, std::int64_t count,
                     QuantFormat format, std::uint16_t* codes) = nullptr;
  /// score = score · (scale of its key · scale of its lane) + shift of its lane
  void (*dequantize)(float* scores, std::int64_t num_keys, const float* key_scale,
                     const float* scale, const float* shift) = nullptr;
  /// Scores become codes in f32, in place. A row that sees NaN or +inf has row_sum NaN from then on.
  void (*round_probabilities)(const Quantization& quant, const QuantizedTile& tile,
                              const PanelDropout& dropout, const QuantizedRows& rows) = nullptr;
  /// out = out · rescale + weight · scale of its column · sums
  void (*add_scaled)(const float* sums, const float* scale, std::int64_t head_dim,
                     const QuantizedRows& rows, float* out) = nullptr;
};

/// Of every target that has panels of f32 products.
const RoundingSteps& rounding_steps(CpuTarget f32_target);

/// The codes of a tile's keys that a panel works on.
struct CodedKeys {
  const std::uint8_t* codes = nullptr;  // of the first key
  std::int64_t pitch = 0;
  const float* scale = nullptr;  // [count]
  std::int64_t count = 0;
};

/// Of lanes; null shift: scores stay relative to the row, without its scale and shift.
struct LaneScales {
  const float* scale = nullptr;
  const float* shift = nullptr;
};

struct CodedValues {
  const std::uint8_t* codes = nullptr;  // of the first channel, from the first key of the range on
  std::int64_t pitch = 0;
  const float* scale = nullptr;  // [head_dim]
  std::int64_t head_dim = 0, num_keys = 0;
};

/// A panel's turn with a whole tile of kPitch keys; scores stay relative to the row.
struct CodeTurn {
  const void* queries = nullptr;
  CodedKeys keys{};
  CodedValues values{};
  const float* octaves = nullptr;  // [lanes]
  QuantizedRows rows{};  // rescale is written and means nothing afterwards; weight is not read
  float* out = nullptr;
  // Hides scores [kPitch][lanes] that the mask does; null where all rows see all keys. Called until the next push or
  // flush returns.
  void (*hide)(const void* context, float* scores) = nullptr;
  const void* context = nullptr;
};

/// Turns that overlap. What a turn gives is in place after the flush.
struct CodePipeline {
  std::byte* memory = nullptr;  // pipeline_bytes

  // What the kernels keep from one call to the next.
  CodeTurn current{}, prior{};
  bool has_current = false, has_prior = false;
};

/// Of one vector of rows in a tile.
struct TileOrigins {
  alignas(64) float greatest[16];  // scores
  alignas(64) float origin[16];    // written: what codes are relative to
  alignas(64) float weight[16];    // written: what they weigh in sums relative to the rows' origins
};

struct CodeProducts {
  /// Bytes that codes of head_dim channels, or of the keys of a tile, are padded to. Whole blocks of kBlock keys or
  /// channels are read: kReadBeyond bytes behind the last codes are anything.
  static constexpr std::int64_t kPitch = 64;
  static constexpr std::int64_t kBlock = 32;
  static constexpr std::size_t kReadBeyond = kBlock * kMaxHeadDim;
  static constexpr std::int64_t pitch_of(std::int64_t count) {
    return (count + kPitch - 1) / kPitch * kPitch;
  }
  static constexpr std::int64_t value_rows(std::int64_t head_dim) {
    return (head_dim + kBlock - 1) / kBlock * kBlock;
  }
  static constexpr std::size_t query_bytes(std::int64_t head_dim, std::int64_t lanes) {
    return static_cast<std::size_t>((pitch_of(head_dim) + 4) * lanes);
  }

  /// rows[lane]: its codes, pitch_of(head_dim) of them and zeros behind head_dim; null for a padding lane.
  void (*pack_queries)(const std::uint8_t* const* rows, std::int64_t head_dim,
                       void* queries) = nullptr;
  /// scores[key][lane] = Σ codes · scale of the key, then the lane's scale and shift where there is one. Room for
  /// whole blocks of kSubTileKeys keys.
  void (*scores)(const void* queries, const CodedKeys& keys, std::int64_t head_dim,
                 const LaneScales& lanes, float* scores) = nullptr;
  /// Scores become quads of codes in place, zeros up to a multiple of kPitch keys.
  void (*round_probabilities)(const QuantizedTile& tile, const PanelDropout& dropout,
                              const QuantizedRows& rows) = nullptr;
  /// out = out · rescale + weight · scale of its column · Σ codes
  void (*accumulate)(const CodedValues& values, const void* probabilities,
                     const QuantizedRows& rows, float* out) = nullptr;

  /// Raises the references of a vector of rows, from `lane` on.
  void (*raise_origins)(const CodeTurn& turn, int lane, TileOrigins& of) = nullptr;

  // Where a core can multiply and take exponentials at the same time: the steps above, of whole tiles, to the same
  // bits. Null elsewhere.
  std::size_t (*pipeline_bytes)() = nullptr;
  void (*push)(CodePipeline& pipeline, const CodeTurn& turn) = nullptr;
  void (*flush)(CodePipeline& pipeline) = nullptr;
};

/// Products that go with the panels of these targets; null where the build has none.
const CodeProducts* code_products_avx2();    // by AVX-VNNI
const CodeProducts* code_products_avx512();  // by AVX512-VNNI
const CodeProducts* code_products_amx();     // by AMX-INT8

}  // namespace fovea::cpu
