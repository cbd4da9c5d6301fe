// Records into shared memory by bulk copies, as Hopper's loading warp asks for them (sm90/forward/load.cuh). What no
// record was made of arrives as zeros: rows that are nobody's, keys of sequences that have none. Read products.cuh
// next.
//
// In passes over row tiles whose values are not finite, indicators take the place of values that have arrived: codes of
// 1, scales of 1 (common/passes.cuh). The pass of finite values needs nothing: codes of others are 0.
#pragma once

#include "common/passes.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm100/fp4/cta.cuh"
#include "sm90/forward/load.cuh"

namespace fovea::cuda::sm100 {

template <Sm100Fp4Spec spec>
class Fp4Copies {
 public:
  using T = Traits<spec>;

  FOVEA_DEVICE_MEMBER explicit Fp4Copies(const Cta<spec>& cta)
      : cta_(cta), places_{cta}, operands_(operands_of(cta)) {}

  FOVEA_DEVICE_MEMBER void before_wait(SharedAddress, std::uint32_t) const {}
  FOVEA_DEVICE_MEMBER void finish() const {}
  FOVEA_DEVICE_MEMBER void clear_unused_rows() const {}
  FOVEA_DEVICE_MEMBER std::int32_t look_up(const SequencePlace&, std::int32_t, VisitedTile) const {
    return 0;
  }

  FOVEA_DEVICE_MEMBER void queries(int /*stage*/, const RowTile& rows, const SequencePlace& place,
                                   int group) {
    const QueryRecord record = query_record(cta_, operands_, rows, place, group);
    if (group == 0) {  // before any keys of the row tile
      first_block_ = static_cast<std::int32_t>(record.number);
      num_blocks_ = T::kGroups > 1 && query_record(cta_, operands_, rows, place, 1).exists ? 2 : 1;
    }
    constexpr int kBytes = fp4_rows_at(spec.head_dim_qk);  // codes and scales
    const SharedAddress to = places_.queries(group), full = cta_.barrier(T::kAt.q_full, group);
    if (!record.exists) return clear(to, kBytes, full);
    if (!ptx::elect_one()) return;
    ptx::mbarrier_arrive_expect_tx(full, kBytes);
    copy(to, operands_.queries + record.number * fp4_query_record_bytes(spec.head_dim_qk), kBytes,
         full);
  }

  /// `posted`: words of this kv tile and the one after it.
  FOVEA_DEVICE_MEMBER void keys(int stage, const sm90::KvRows& kv, ptx::U32x2 posted) const {
    const SharedAddress to = places_.keys(stage), full = cta_.barrier(T::kAt.k_full, stage);
    if (ptx::elect_one()) ptx::st_shared(cta_.kv_tile_at(stage), posted);
    if (kv.num_keys <= 0) return clear(to, T::kAt.k_bytes, full);
    if (!ptx::elect_one()) return;
    constexpr int kBytes = fp4_used_bytes(spec.head_dim_qk);
    ptx::mbarrier_arrive_expect_tx(full,
                                   kBytes + kFp4MarkBytes + T::kGroups * kFp4BlockScoresBytes);
    const std::int64_t record = key_record(kv);
    copy(to, operands_.keys + record * fp4_record_bytes(spec.head_dim_qk), kBytes, full);
    copy(to + T::kAt.value_marks,
         operands_.values + record * fp4_record_bytes(spec.head_dim_v) +
             fp4_marks_at(spec.head_dim_v),
         kFp4MarkBytes, full);
    for (int group = 0; group < T::kGroups; ++group) {
      // Of a group without a block those of the one before it: its rows are nobody's.
      const std::int64_t block = std::int64_t{first_block_} + least(group, num_blocks_ - 1);
      const std::int64_t tile =
          block * operands_.tiles_of_longest + least(kv.idx, operands_.tiles_of_longest - 1);
      copy(places_.block_scores(stage, group), operands_.block_scores + tile * kQuantizedTile,
           kFp4BlockScoresBytes, full);
    }
  }

  FOVEA_DEVICE_MEMBER void values(int stage, const sm90::KvRows& kv, Pass pass) {
    constexpr int kBytes = fp4_marks_at(spec.head_dim_v);  // codes and scales
    const SharedAddress to = places_.values(stage), full = cta_.barrier(T::kAt.v_full, stage);
    if (kv.num_keys <= 0) return clear(to, kBytes, full);
    const bool is_rewritten = is_indicator(pass);
    const SharedAddress landed = is_rewritten ? cta_.barrier(T::kAt.v_landed, 0) : full;
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive_expect_tx(landed, kBytes);
      copy(to, operands_.values + key_record(kv) * fp4_record_bytes(spec.head_dim_v), kBytes,
           landed);
    }
    if (!is_rewritten) return;
    cta_.await(landed, landings_.parity);
    landings_.advance();
    rewrite(to, kv, pass);
    ptx::fence_proxy_async_shared_cta();
    cta_.release(full);
  }

 private:
  FOVEA_DEVICE void copy(SharedAddress to, const void* from, int bytes, SharedAddress full) {
    ptx::cp_async_bulk_load(to, from, static_cast<std::uint32_t>(bytes), full,
                            ptx::CachePolicy::evict_normal);
  }

  FOVEA_DEVICE_MEMBER std::int64_t key_record(const sm90::KvRows& kv) const {
    const ForwardParams& c = cta_.p.common;
    return (std::int64_t{kv.batch} * c.num_heads_kv + kv.kv_head) * operands_.key_tiles +
           kv.first_tile + kv.idx;
  }

  /// Zeros in the place of a copy.
  FOVEA_DEVICE_MEMBER void clear(SharedAddress to, int bytes, SharedAddress full) const {
#pragma unroll 1
    for (int at = 16 * cta_.lane; at < bytes; at += 16 * 32) ptx::st_shared(to + at, ptx::U32x4{});
    ptx::fence_proxy_async_shared_cta();
    cta_.release(full);
  }

  /// Of eight keys of a channel at a time.
  FOVEA_DEVICE_MEMBER void rewrite(SharedAddress values, const sm90::KvRows& kv, Pass pass) const {
    constexpr int kWords = kQuantizedTile / 8;  // of a channel
    constexpr std::uint32_t kScaleOne = spec.scale_group == 16 ? 0x38383838U : 0x7f7fU;
    const typename T::VTile tile{values};
#pragma unroll 1
    for (int at = cta_.lane; at < spec.head_dim_v * kWords; at += 32)
      ptx::st_shared(tile.at(at / kWords, at % kWords * 4),
                     indicators(kv, at / kWords, at % kWords * 8, pass));
#pragma unroll 1
    for (int at = cta_.lane; at < fp4_scales_bytes(spec.head_dim_v) / 4; at += 32)
      ptx::st_shared(values + fp4_codes_bytes(spec.head_dim_v) + 4 * at, kScaleOne);
  }

  FOVEA_DEVICE_MEMBER std::uint32_t indicators(const sm90::KvRows& kv, int channel, int first,
                                               Pass pass) const {
    constexpr std::uint32_t kCodeOfOne = 2;
    const ForwardParams& c = cta_.p.common;
    const auto* const column = static_cast<const std::uint16_t*>(c.v.data) +
                               kv.batch * c.v.batch_stride + kv.kv_head * c.v.head_stride +
                               channel * c.v.col_stride;
    std::uint32_t codes = 0;
    if (channel >= c.head_dim_v) return codes;
#pragma unroll 1
    for (int i = 0; i < 8 && first + i < kv.num_keys; ++i) {
      const std::int64_t row = std::int64_t{kv.first_row} + kv.idx * kQuantizedTile + first + i;
      const std::uint32_t given = ptx::ld_global(column + row * c.v.row_stride);
      if (value_of_pass<spec.element>(given, pass) != 0) codes |= kCodeOfOne << 4 * i;
    }
    return codes;
  }

  const Cta<spec>& cta_;
  const Fp4Places<spec> places_;
  const Fp4Operands& operands_;
  std::int32_t first_block_ = 0;  // of the row tile: the record of its first group's queries
  std::int32_t num_blocks_ = 1;
  Ring<1> landings_{0};
};

}  // namespace fovea::cuda::sm100

namespace fovea::cuda::sm90 {

template <auto spec, bool loads_by_cp_async>
requires requires { spec.scale_group; }
struct CopiesOf<spec, loads_by_cp_async> {
  using Type = sm100::Fp4Copies<spec>;
};

}  // namespace fovea::cuda::sm90
