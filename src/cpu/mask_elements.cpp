#include "cpu/mask_elements.hpp"

#include <algorithm>

namespace fovea::cpu {
namespace {

constexpr std::size_t kAlignment = 64;

std::byte* aligned(std::byte* memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  return memory + (kAlignment - address % kAlignment) % kAlignment;
}

}  // namespace

MaskElements::MaskElements(const MaskMod& mask)
    : kernels_(best_f32_kernels()),
      tape_(mask.expr().shared(), mask.captures()),
      bindings_(tape_.bindings(mask)) {
  Carver sizes(nullptr);
  carve(sizes);
  memory_.resize(sizes.used() + kAlignment);
  Carver pieces(aligned(memory_.data()));
  carve(pieces);
}

void MaskElements::carve(Carver& carver) {
  const auto lanes = static_cast<std::size_t>(kernels_.lanes);
  scores_ = carver.take<float>(lanes * static_cast<std::size_t>(kSubTileKeys));
  q_idx_ = carver.take<std::int32_t>(lanes);
  q_head_ = carver.take<std::int32_t>(lanes);
  program_ = carver.take<std::byte>(
      program_scratch_bytes(tape_.tape, kSubTileKeys, static_cast<int>(kernels_.lanes)));
}

void MaskElements::compute(const MaskBlock& block) {
  std::fill_n(scores_, block.num_keys * kernels_.lanes, 0.0F);
  for (std::int64_t lane = 0; lane < kernels_.lanes; ++lane) {
    const std::int64_t row = std::min(lane, block.num_rows - 1);  // padding lanes repeat the last
    q_idx_[lane] = static_cast<std::int32_t>(block.q_begin + row);
    q_head_[lane] = static_cast<std::int32_t>(block.q_head);
  }
  kernels_.run_mask(tape_.tape, {.scores = scores_,
                                 .num_keys = block.num_keys,
                                 .lanes = static_cast<int>(kernels_.lanes),
                                 .kv_begin = block.kv_begin,
                                 .q_idx = q_idx_,
                                 .q_head = q_head_,
                                 .batch = static_cast<std::int32_t>(block.batch),
                                 .kv_head = static_cast<std::int32_t>(block.kv_head),
                                 .seqlen_q = static_cast<std::int32_t>(block.seqlen_q),
                                 .seqlen_kv = static_cast<std::int32_t>(block.seqlen_kv),
                                 .tensors = bindings_.tensors.data(),
                                 .scalars = bindings_.scalars.data(),
                                 .scratch = program_});
}

}  // namespace fovea::cpu
