// A mask element by element, by the vector code that attention runs on partial tiles.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/expr.hpp"

#include "cpu/bound_tape.hpp"
#include "cpu/carver.hpp"
#include "cpu/kernels/panel.hpp"

namespace fovea::cpu {

/// Some keys, seen by up to `lanes` queries of one head.
struct MaskBlock {
  std::int64_t batch = 0, q_head = 0, kv_head = 0;
  std::int64_t seqlen_q = 0, seqlen_kv = 0;
  std::int64_t q_begin = 0, num_rows = 1;   // num_rows <= lanes()
  std::int64_t kv_begin = 0, num_keys = 1;  // num_keys <= kSubTileKeys
};

/// Not thread safe: it owns what a block is computed in.
class MaskElements {
 public:
  /// The tensors that the mask captures must stay alive and have data.
  explicit MaskElements(const MaskMod& mask);

  std::int64_t lanes() const { return kernels_.lanes; }
  /// All positions exist.
  void compute(const MaskBlock& block);
  /// Of the last block computed: does its query see its key?
  bool is_visible(std::int64_t row, std::int64_t key) const {
    return scores_[key * kernels_.lanes + row] == 0;
  }

 private:
  void carve(Carver& carver);

  const PanelKernels& kernels_;
  BoundTape tape_;
  Bindings bindings_;
  std::vector<std::byte> memory_;
  float* scores_ = nullptr;                            // [kSubTileKeys][lanes]
  std::int32_t *q_idx_ = nullptr, *q_head_ = nullptr;  // [lanes]
  std::byte* program_ = nullptr;
};

}  // namespace fovea::cpu
