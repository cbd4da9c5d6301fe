// The walk of an item's panels over the tiles of its keys. Read attention_quantized.hpp first.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/forward/call.hpp"
#include "cpu/forward/results.hpp"
#include "cpu/forward/row_panel.hpp"
#include "cpu/forward/score_programs.hpp"
#include "cpu/kernels/codes.hpp"
#include "cpu/quantized/operands.hpp"

namespace fovea::cpu {

/// What multiplies and rounds codes beside the kernels of panels.
struct QuantizedKernels {
  const RoundingSteps* steps = nullptr;
  const CodeProducts* products = nullptr;  // null: codes are multiplied by the kernels of panels
  ByteProducts bytes{};

  /// Can turns overlap?
  bool has_pipeline(const ForwardProblem& problem) const;
};

/// What a worker needs beside the scratch of attention_forward.
struct QuantizedScratch {
  ForwardScratch forward{};
  std::byte* code_queries =
      nullptr;                // packed panels of codes; null where codes are multiplied as numbers
  float* scale = nullptr;     // [panels][lanes]: of q
  float* shift = nullptr;     // [panels][lanes]: q_shift
  float* octaves = nullptr;   // [panels][lanes]: of a score as the softmax gets it
  float* common = nullptr;    // [panels][lanes]: what q_shift is of such a score
  float* kept_sum = nullptr;  // [panels][lanes]
  float* tile_out = nullptr;  // Oᵀ of a tile of codes; finite between two of them
  float* zeros = nullptr;     // [lanes]
  float* weight = nullptr;    // [lanes]
  std::byte* pipeline = nullptr;      // null where turns do not overlap
  float* mean_scores = nullptr;       // a tile of means of q times keys; null without smooth_q
  std::byte* mean_keys = nullptr;     // a converted tile for them
  std::byte* mean_queries = nullptr;  // [panels] packed panels of them

  static QuantizedScratch carve(Carver& carver, const ForwardSpec& spec,
                                const ForwardProblem& problem, const QuantizedKernels& how,
                                std::size_t program_bytes);
};

/// A panel, and what is known of its rows beside RowPanel.
struct QuantizedPanel {
  RowPanel rows;
  std::byte* code_queries = nullptr;
  std::byte* mean_queries = nullptr;
  float* scale = nullptr;
  float* shift = nullptr;
  float* octaves = nullptr;
  float* common = nullptr;
  QuantizedRows sums{};
  std::vector<float> extra{};  // Oᵀ of values that are not finite; empty where none has been seen
  bool has_plain_rows = false;
  // Scores stay sums of codes times the scale of their key: the softmax multiplies by the scale of the row, and what
  // shifts all scores of a row is added to its maximum in the end.
  bool is_unscaled = false;
};

class QuantizedWalk {
 public:
  QuantizedWalk(const ForwardCall& call, const QuantizedKernels& how,
                const QuantizedOperands& operands, const ForwardItem& item,
                const QuantizedScratch& scratch);

  /// Over all tiles; out, lse and row_max are written.
  void run(const ForwardResults& results);

 private:
  bool rounds_qk() const { return quant_.qk != QuantFormat::none; }
  bool rounds_pv() const { return quant_.pv != QuantFormat::none; }
  std::size_t query_row(const RowPanel& panel, std::int64_t lane) const;
  std::size_t key_row(std::int64_t kv_idx) const;
  std::size_t tile_flag(std::int64_t tile) const;

  QuantizedPanel panel_of(const RowPanel& rows, std::size_t index) const;
  void start(QuantizedPanel& panel) const;
  void find_scales(QuantizedPanel& panel) const;
  bool can_stay_unscaled(const QuantizedPanel& panel) const;
  void pack_codes(const QuantizedPanel& panel) const;
  void pack_means(const QuantizedPanel& panel) const;

  void load(std::int64_t tile, std::int64_t count);
  bool overlaps(const QuantizedPanel& panel, std::int64_t tile, std::int64_t count) const;
  void push(const QuantizedPanel& panel, std::int64_t tile);
  static void hide(const void* masked_turn, float* scores);
  void flush();
  CodedKeys coded_keys(std::int64_t tile, KeyRange range) const;
  CodedValues coded_values(std::int64_t tile, KeyRange range) const;
  void step(QuantizedPanel& panel, std::int64_t tile, std::int64_t count);
  TileSource keys_of(std::int64_t tile, std::int64_t count) const;
  TileSource values_of(std::int64_t tile, std::int64_t count) const;
  void multiply_keys(const QuantizedPanel& panel, const TileStep& step);
  void add_means(const QuantizedPanel& panel, const TileStep& step);
  void restore_plain(const QuantizedPanel& panel, const TileStep& step) const;
  void add_plain(QuantizedPanel& panel, const TileStep& step) const;
  void add_values(const TileStep& step);
  void add_rounded(const QuantizedPanel& panel, const TileStep& step);
  void clear_tile_out() const;
  void finish(QuantizedPanel& panel, const ForwardResults& results) const;

  const ForwardCall& call_;
  const Quantization& quant_;
  const QuantizedKernels& how_;
  const PanelKernels& kernels_;
  const QuantizedOperands& operands_;
  const ForwardItem& item_;
  const QuantizedScratch& scratch_;
  const OperandRows rows_;
  std::vector<QuantizedPanel> panels_;
  KeyTile keys_{};  // of the tile that is loaded
  NextTile next_{};
  CodePipeline pipeline_{};
  // What the masks of the last two turns were told: the pipeline is one turn behind.
  struct MaskedTurn {
    const QuantizedWalk* walk = nullptr;
    TileStep step{};
  };
  MaskedTurn masked_turns_[2]{};
  std::size_t num_masked_ = 0;
};

}  // namespace fovea::cpu
