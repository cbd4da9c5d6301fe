// Rows of a cache, 128 keys of one head at a time, for the kernels that round operands: what head_tiles.cuh is for
// tensors. Codes are read as the numbers that they stand for: times their scale, exactly, rounded to q's dtype.
#pragma once

#include "common/head_tiles.cuh"
#include "common/scaled_codes.cuh"
#include "common/sequence.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "shared/element.h"
#include "shared/forward_params.h"
#include "shared/quantize_k.h"
#include "shared/tensor_params.h"

namespace fovea::cuda {

/// Keys of one sequence and head, in whichever pages or slot. `codes`: none, where they are elements.
template <auto spec, Codes codes>
struct CacheRows {
  const ForwardParams& c;
  const BshdParam& from;
  const ScaleParam& scales;
  Sequence sequence;
  std::int32_t head, count;

  /// Eight numbers of a key, from this column on: zeros where there is no such key, and behind head_dim. Rows are
  /// aligned, of whole eights.
  template <bool reads_elements = false>
  FOVEA_DEVICE_MEMBER ptx::U32x4 eight(std::int64_t key, std::int32_t col, std::int32_t head_dim,
                                       bool /*is_aligned*/ = true) const {
    static_assert(!reads_elements, "rows of caches are read by eights");
    if (key >= count || col >= head_dim) return {};
    const KvPlace place = place_of(static_cast<std::int32_t>(key));
    const std::int64_t at = place.in(from, head) + col;
    if constexpr (codes == Codes::none) {
      return ptx::ld_global_nc(
          reinterpret_cast<const ptx::U32x4*>(static_cast<const std::uint16_t*>(from.data) + at));
    } else {
      const auto words = ptx::ld_global_nc(
          reinterpret_cast<const ptx::U32x2*>(static_cast<const std::uint8_t*>(from.data) + at));
      const float scale =
          ptx::ld_global(scale_at(scales, sequence.idx, place.batch, place.row, head));
      return eight_numbers<spec.element>(CodesTimesScale<codes>(scale), words.x, words.y);
    }
  }

 private:
  /// Of most pages by shifts: each thread has many keys.
  FOVEA_DEVICE_MEMBER KvPlace place_of(std::int32_t key) const {
    if constexpr (!spec.is_paged) return place_of_key<spec>(c, sequence, key);
    const auto row = static_cast<std::int32_t>(sequence.kv_row) + key;
    const std::int32_t entry = entry_of_row(c, row);
    return {page_at(c, sequence.kv_batch, entry), row - entry * c.page_size};
  }
};

/// One row of a cache and head, element by element: for who seldom reads one, and lacks registers.
template <Element element, Codes codes>
struct CacheRow {
  const char* row;
  float scale;

  FOVEA_DEVICE CacheRow of(const BshdParam& from, const ScaleParam& scales, const KvPlace& place,
                           std::int32_t sequence, std::int32_t head) {
    constexpr int kBytes = codes == Codes::none ? 2 : 1;
    CacheRow row{static_cast<const char*>(from.data) + kBytes * place.in(from, head), 1.0F};
    if constexpr (codes != Codes::none)
      row.scale = ptx::ld_global(scale_at(scales, sequence, place.batch, place.row, head));
    return row;
  }

  FOVEA_DEVICE_MEMBER std::uint32_t bits(std::int32_t col) const {
    if constexpr (codes == Codes::none) {
      return ptx::ld_global(reinterpret_cast<const std::uint16_t*>(row) + col);
    } else {
      const std::uint32_t code = ptx::ld_global(reinterpret_cast<const std::uint8_t*>(row) + col);
      const float number = CodesTimesScale<codes>(scale).of(code).x[0];
      return pair_of<element>(number, 0.0F) & 0xffffU;
    }
  }
};

/// K or V of a cache.
template <auto spec, Codes codes>
struct CacheTiles {
  const ForwardParams& c;
  const BshdParam& from;
  const ScaleParam& scales;
  std::int32_t num_tiles;  // of a sequence and head

  /// Rounded, keys of a sequence lie from its row 0 on, wherever they begin in the cache.
  FOVEA_DEVICE_MEMBER HeadTile tile(std::int32_t cta) const {
    const std::int32_t pair = cta / num_tiles;
    const std::int32_t number = cta - pair * num_tiles;
    const std::int32_t sequence = pair / c.num_heads_kv;
    return {sequence, pair - sequence * c.num_heads_kv, number, number * kQuantizedTile,
            std::int64_t{pair} * c.seqlen_kv};
  }

  FOVEA_DEVICE_MEMBER CacheRows<spec, codes> rows(std::int32_t idx, std::int32_t head) const {
    Sequence sequence{};
    sequence.idx = idx;
    sequence.kv_batch = idx;
    find_keys<spec>(c, sequence);
    std::int32_t count = sequence.seqlen_kv;
    if constexpr (spec.has_packed_q) {  // a sequence without queries is nobody's
      if (packed_rows(c.cu_seqlens_q, idx, c.total_q).count == 0) count = 0;
    }
    return {c, from, scales, sequence, head, count};
  }
};

}  // namespace fovea::cuda
