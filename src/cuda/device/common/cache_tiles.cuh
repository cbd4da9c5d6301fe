// Rows of a cache, 128 keys of one head at a time, for the kernels that round operands: what head_tiles.cuh is for
// tensors. Codes are read as the numbers that they stand for: times their scale, exactly, rounded to q's dtype.
#pragma once

#include "common/head_tiles.cuh"
#include "common/scaled_codes.cuh"
#include "common/sequence.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/element.h"
#include "shared/forward_params.h"
#include "shared/quantize_k.h"
#include "shared/tensor_params.h"

namespace fovea::cuda {

/// Eight elements of a row, or codes.
template <Codes codes>
struct EightOf {
  using Words = ptx::U32x2;
};
template <>
struct EightOf<Codes::none> {
  using Words = ptx::U32x4;
};

/// Keys of one sequence and head, in whichever pages or slot. `codes`: none, where they are elements. Threads have many
/// keys each: what they share of an address is in two pointers.
template <auto spec, Codes codes>
struct CacheRows {
  const ForwardParams& c;
  const BshdParam& from;
  const ScaleParam& scales;
  const char* first;         // of the head, in the slot of the sequence or in page 0
  const float* first_scale;  // likewise
  std::int32_t kv_row, count;
  std::int64_t pages;  // of the table or the list

  FOVEA_DEVICE CacheRows of(const ForwardParams& c, const BshdParam& from, const ScaleParam& scales,
                            const Sequence& sequence, std::int32_t head) {
    const KvPlace place{spec.is_paged ? 0 : sequence.kv_batch, 0};
    CacheRows rows{c,
                   from,
                   scales,
                   nullptr,
                   nullptr,
                   static_cast<std::int32_t>(sequence.kv_row),
                   sequence.seqlen_kv,
                   sequence.kv_batch};
    rows.first = static_cast<const char*>(from.data) + kBytes * place.in(from, head);
    if constexpr (codes != Codes::none)
      rows.first_scale = scale_at(scales, sequence.idx, place.batch, 0, head);
    return rows;
  }

  /// Eight numbers of a key, from this column on: zeros where there is no such key, and behind head_dim. Rows are
  /// aligned, of whole eights.
  template <bool reads_elements>
  FOVEA_DEVICE_MEMBER ptx::U32x4 eight(std::int64_t key, std::int32_t col, std::int32_t head_dim,
                                       bool /*is_aligned*/) const {
    static_assert(!reads_elements, "rows of caches are read by eights");
    if (key >= count || col >= head_dim) return {};
    const Place place = place_of(kv_row + static_cast<std::int32_t>(key));
    const char* const at = first + ptx::bit_cast<std::int64_t>(place.offset) + kBytes * col;
    return numbers(ptx::ld_global(reinterpret_cast<const Words*>(at)), place.scale);
  }

  /// The same of the keys of a warp, where there are some, by all its lanes: `groups` side by side and n of each lane,
  /// key_of(i, group) and put(i, eight). A lane looks for one: finds its page and asks for its scale. All codes are
  /// asked for before any become numbers: a thread would wait for memory n times. The last key stands in for those that
  /// there are not.
  template <int n, int groups, class KeyOf, class Put>
  FOVEA_DEVICE_MEMBER void eights(const KeyOf& key_of, std::int32_t col, std::int32_t head_dim,
                                  const Put& put) const {
    constexpr int kKeysOfWarp = n * groups;
    static_assert(kKeysOfWarp <= ptx::kWarpLanes);
    const int lane = ptx::lane_idx(), mine = lane % kKeysOfWarp;
    const int group = lane / (ptx::kWarpLanes / groups);
    const std::int32_t key = key_of(mine / groups, mine % groups);
    const Place place = place_of(kv_row + least(key, count - 1));
    const bool has_columns = col < head_dim;
    const char* const at = first + kBytes * (has_columns ? col : 0);
    Words words[n];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int owner = i * groups + group;
      const auto offset = ptx::bit_cast<std::int64_t>(
          ptx::U32x2{ptx::shfl_idx(place.offset.x, owner), ptx::shfl_idx(place.offset.y, owner)});
      words[i] = ptx::ld_global(reinterpret_cast<const Words*>(at + offset));
    }
#pragma unroll
    for (int i = 0; i < n; ++i)
      put(i, numbers(words[i], ptx::shfl_idx(place.scale, i * groups + group)));
    if (!ptx::vote_any(key >= count || !has_columns)) return;
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (!has_columns || key_of(i, group) >= count) put(i, ptx::U32x4{});
  }

 private:
  static constexpr int kBytes = codes == Codes::none ? 2 : 1;
  using Words = typename EightOf<codes>::Words;

  /// Of a row: where it begins, in bytes from `first`, and its scale.
  struct Place {
    ptx::U32x2 offset;  // the halves of an i64, as lanes exchange them
    float scale;
  };
  FOVEA_DEVICE_MEMBER Place place_of(std::int32_t row) const {
    std::int64_t page = 0;
    if constexpr (spec.is_paged) {
      const std::int32_t entry = entry_of_row(c, row);
      page = page_at(c, pages, entry);
      row -= entry * c.page_size;
    }
    const std::int64_t offset = kBytes * (page * from.batch_stride + row * from.row_stride);
    Place place{ptx::bit_cast<ptx::U32x2>(offset), 1.0F};
    if constexpr (codes != Codes::none) {
      place.scale =
          ptx::ld_global(first_scale + page * scales.slot_stride + row * scales.row_stride);
    }
    return place;
  }

  FOVEA_DEVICE ptx::U32x4 numbers(const Words& words, float scale) {
    if constexpr (codes == Codes::none)
      return words;
    else
      return eight_numbers<spec.element>(CodesTimesScale<codes>(scale), words.x, words.y);
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
    sequence.seqlen_kv = count;
    return CacheRows<spec, codes>::of(c, from, scales, sequence, head);
  }
};

}  // namespace fovea::cuda
