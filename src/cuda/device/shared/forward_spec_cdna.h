// The spec of CDNA's forward kernel, and where things lie in its shared memory (LDS).
#pragma once

#include "shared/element.h"
#include "shared/forward_spec.h"
#include "shared/types.h"

namespace fovea::cuda {

/// In what its GPUs differ, as far as the kernel's text asks.
struct CdnaTraits {
  std::int32_t product_depth;  // of v_mfma_f32_32x32xK of elements of 16 bits
  std::int32_t copy_bytes;     // of each lane, that a copy to LDS brings
  std::int32_t line_bytes;     // of LDS: all banks once
  bool reads_transposed;       // values lie in LDS as in memory; else with their keys side by side
};

constexpr bool is_cdna(std::int32_t gfx) { return gfx == 0x942 || gfx == 0x950; }

constexpr CdnaTraits cdna_traits(std::int32_t gfx) {
  return gfx == 0x950 ? CdnaTraits{16, 16, 256, true} : CdnaTraits{8, 4, 128, false};
}

/// cdna/attention_forward. With one stage keys of the next tile come beside the softmax of this one, and its values in
/// registers; with two, where both are copied, beside all of it.
struct CdnaForwardSpec : ForwardSpec {
  std::int32_t gfx = 0x942;  // 0x942 of gfx942

  bool operator==(const CdnaForwardSpec&) const = default;
};

/// Rows of a wave, one for two lanes.
inline constexpr std::int32_t kCdnaWaveRows = 32;

struct CdnaForwardLayout {
  std::int32_t keys, values;  // [stage]
  std::int32_t key_bytes, value_bytes;
  std::int32_t votes;  // [wave] a word
  std::int32_t bytes;
};

constexpr CdnaForwardLayout cdna_forward_layout(const CdnaForwardSpec& spec) {
  SharedRoom room;
  CdnaForwardLayout at{};
  at.key_bytes = element_bytes(spec.element) * spec.tile_kv * spec.head_dim_qk;
  at.value_bytes = element_bytes(spec.element) * spec.tile_kv * spec.head_dim_v;
  at.keys = room.take(spec.stages * at.key_bytes);
  at.values = room.take(spec.stages * at.value_bytes);
  at.votes = room.take(4 * spec.num_warps);
  at.bytes = room.end;
  return at;
}

}  // namespace fovea::cuda
