// The walk of one panel of rows over the tiles of its keys. Read attention_quantized.hpp first.
#pragma once

#include <cstdint>

#include "cpu/forward/call.hpp"
#include "cpu/forward/results.hpp"
#include "cpu/forward/row_panel.hpp"
#include "cpu/forward/score_programs.hpp"
#include "cpu/quantized/operands.hpp"
#include "cpu/quantized/probabilities.hpp"

namespace fovea::cpu {

/// What a worker needs beside the scratch of attention_forward.
struct QuantizedScratch {
  ForwardScratch forward{};
  float* tile_out = nullptr;     // one panel's Oᵀ of a tile of codes
  float* zeros = nullptr;        // [lanes]
  float* weight = nullptr;       // [lanes]
  float* kept_sum = nullptr;     // [lanes]
  float* mean_scores = nullptr;  // one panel's tile: means of q times keys; null without smooth_q
  std::byte* mean_queries = nullptr;  // a packed panel of them

  static QuantizedScratch carve(Carver& carver, const ForwardSpec& spec,
                                const ForwardProblem& problem, std::size_t program_bytes);
};

class QuantizedWalk {
 public:
  QuantizedWalk(const ForwardCall& call, const QuantizedOperands& operands, const ForwardItem& item,
                const QuantizedScratch& scratch);

  /// Over all tiles; out, lse and row_max are written.
  void run(const ForwardResults& results);

 private:
  bool rounds_qk() const { return quant_.qk != QuantFormat::none; }
  bool rounds_pv() const { return quant_.pv != QuantFormat::none; }
  std::size_t query_row(std::int64_t lane) const;
  std::size_t key_row(std::int64_t kv_idx) const;

  void pack();
  void pack_means();
  void step(std::int64_t tile);
  TileSource keys_of(std::int64_t tile, std::int64_t count) const;
  TileSource values_of(std::int64_t tile, std::int64_t count) const;
  void dequantize(const TileStep& step);
  void add_means(const TileStep& step);
  void restore_plain(const TileStep& step);
  void add_values(const TileStep& step);
  void add_rounded(const TileStep& step);
  void finish(const ForwardResults& results);

  const ForwardCall& call_;
  const Quantization& quant_;
  const PanelKernels& kernels_;
  const QuantizedOperands& operands_;
  const ForwardItem& item_;
  const QuantizedScratch& scratch_;
  const OperandRows rows_;
  RowPanel panel_;
  NextTile next_{};
};

}  // namespace fovea::cpu
