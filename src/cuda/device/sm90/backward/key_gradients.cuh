// dk and dv of 64 keys: the recurrence of a warpgroup over tiles of queries. Read query_gradients.cuh for dq.
#pragma once

#include "common/backward_work.cuh"
#include "common/element.cuh"
#include "common/float_constants.cuh"
#include "common/passes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/ordered.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/cta.cuh"
#include "sm90/backward/last_tiles.cuh"
#include "sm90/backward/probabilities.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90 {

/// One thread of a group. Scores are transposed, so that P and dS are operands in registers as they are.
template <Sm90BackwardSpec spec, class Mods>
struct KeyGradients {
  using T = BackwardTraits<spec>;
  using Scores = Probabilities<spec, Mods>;
  static constexpr int kNumScores = spec.tile_q / 2;
  static constexpr int kNumDk = spec.head_dim_qk / 2;
  static constexpr int kNumDv = spec.head_dim_v / 2;
  /// Where there is no register for what follows from a thread's number alone.
  static constexpr bool kSparesAddress =
      spec.element == Element::f16 || (spec.finishes_queries && spec.hides_keys);

  const BackwardCta<spec>& cta;
  const int group, warp;  // of the CTA, of the group
  Ring<T::kStages> stages{0};
  Ring<2> buffers{1};

  FOVEA_DEVICE_MEMBER explicit KeyGradients(const BackwardCta<spec>& of_cta)
      : cta(of_cta), group(of_cta.warp / 4), warp(of_cta.warp % 4) {}

  FOVEA_DEVICE_MEMBER void run() {
    float dk[kNumDk], dv[kNumDv];
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, 0), 0);
    int last = -1;  // of the tiles that it visits
    if (!ptx::vote_any(cta.posted(0).is_none())) last = sum(dk, dv);
    const bool is_seen = last >= 0;
    if constexpr (spec.asks_redo) {
      if (is_seen && ptx::vote_any(is_nan(zero_if_finite(dk) + zero_if_finite(dv)))) ask_redo();
    }
    // The groups' last products have read what is written over now.
    ptx::bar_sync(1, 256);
    write(dk, dv, is_seen);
    if constexpr (spec.finishes_queries)
      if (is_seen) LastTiles<spec, Mods>(cta, group, warp, last).run();
    ptx::cp_async_bulk_wait_group<0>();
  }

 private:
  /// Returns which tile was the last.
  FOVEA_DEVICE_MEMBER int sum(float (&dk)[kNumDk], float (&dv)[kNumDv]) {
    Scores scores(cta, group, warp);
    float s[kNumScores], dp[kNumScores];
    typename Scores::Operand p, ds;
    std::uint32_t delta_weights[4];
    take_delta_weights<spec.element>(cta.lane, delta_weights);

    await_queries();
    issue_scores(s);
    scores.look_ahead(stages.stage);
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.v_full, 0), 0);
    PostedTile tile = cta.posted(0);
    scores.draw(tile);
    for (int i = 0;; ++i) {
      ptx::wgmma_wait_group<0>();  // dk of the tile before, scores of this one
      if (i > 0 && cta.lane == 0)
        ptx::mbarrier_arrive(cta.barrier(T::kAt.stage_empty, stage_before()));
      const bool is_masked = !ptx::vote_any(tile.is_full());
      const bool is_last = ptx::vote_any(tile.is_last());
      if (is_masked) scores.mask(s, tile);
      // Waits stand ahead of the loads whose results they would wait for as well.
      ptx::mbarrier_wait_parity(cta.barrier(T::kAt.ds_empty, buffers.stage), buffers.parity);
      constexpr int kAhead = Scores::kPowersAhead;
      scores.template exponentiate<0, kAhead>(s, tile, stages.stage, p, ds);
      ptx::mbarrier_wait_parity(
          cta.barrier(T::kAt.dout_full, stages.stage) + scores.template zero_behind<kAhead>(p),
          stages.parity);
      scores.template exponentiate<kAhead, spec.tile_q / 16>(s, tile, stages.stage, p, ds);
      if constexpr (Scores::kIsDvFirst) {
        issue_dv(dv, p, i > 0);
        ptx::wgmma_wait_group<0>();
      }
      issue_probability_gradients(dp, delta_weights);
      if constexpr (!Scores::kIsDvFirst) issue_dv(dv, p, i > 0);
      ptx::wgmma_wait_group<Scores::kAwaitsDv ? 0 : 1>();
      const auto& weights = Scores::kHasWeights ? ds : p;
      if constexpr (spec.has_dropout) scores.drop(dp, stages.stage);
      if (is_masked) Scores::hide(dp, weights);
      Scores::score_gradients(dp, weights, ds);
      store(ds);
      if constexpr (spec.stores_pairs) store_pairs(ds, tile);
      ptx::wgmma_wait_group<0>();  // dv: P's registers are free
      issue_dk(dk, ds, i > 0);
      publish();
      if (is_last) {
        ptx::wgmma_wait_group<0>();
        return i;
      }
      stages.advance();
      buffers.advance();
      await_queries();
      issue_scores(s);
      scores.look_ahead(stages.stage);
      tile = cta.posted(i + 1);
      scores.draw(tile);
    }
  }

  FOVEA_DEVICE_MEMBER int stage_before() const {
    return stages.stage == 0 ? T::kStages - 1 : stages.stage - 1;
  }

  FOVEA_DEVICE_MEMBER void await_queries() const {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.q_full, stages.stage), stages.parity);
  }

  // ---- products ----

  /// Of a tile of keys, this group's rows.
  template <class Tile>
  FOVEA_DEVICE_MEMBER ptx::MatrixDescriptor own_rows(SharedAddress at) const {
    return k_major_descriptor(Tile{at + static_cast<SharedAddress>(64 * Tile::kSpan * group)});
  }

  /// Sᵀ = K Qᵀ.
  FOVEA_DEVICE_MEMBER void issue_scores(float (&s)[kNumScores]) const {
    using QTile = typename T::QTile;
    using KTile = typename T::KTile;
    const auto a = own_rows<KTile>(cta.smem + T::kAt.k);
    const auto b = k_major_descriptor(QTile{cta.q_at(stages.stage)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.head_dim_qk / 16; ++i) {
      ptx::wgmma_ss<T::kType, T::kType, spec.tile_q>(s, advanced(a, k_major_offset<KTile>(i)),
                                                     advanced(b, k_major_offset<QTile>(i)), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// dPᵀ - delta = V doutᵀ - 1 deltaᵀ: the delta of a row is three numbers whose weighted sum it is, one step of depth.
  /// With dropout V doutᵀ alone.
  FOVEA_DEVICE_MEMBER void issue_probability_gradients(
      float (&dp)[kNumScores], const std::uint32_t (&delta_weights)[4]) const {
    constexpr bool kHasDelta = !spec.has_dropout;
    using VTile = typename T::VTile;
    using DoutTile = typename T::DoutTile;
    const SharedAddress delta = cta.delta_at(stages.stage);
    const auto a = own_rows<VTile>(cta.smem + T::kAt.v);
    const auto b = k_major_descriptor(DoutTile{cta.dout_at(stages.stage)});
    ptx::wgmma_fence();
    if constexpr (kHasDelta) {
      // Behind the eight numbers of each row come the zeros of all.
      ptx::wgmma_rs<T::kType, T::kType, spec.tile_q>(
          dp, delta_weights,
          matrix_descriptor(delta, cta.smem + T::kAt.zeros - delta, 8 * kDeltaBytes, Swizzle::none),
          false);
    }
#pragma unroll
    for (int i = 0; i < spec.head_dim_v / 16; ++i) {
      ptx::wgmma_ss<T::kType, T::kType, spec.tile_q>(dp, advanced(a, k_major_offset<VTile>(i)),
                                                     advanced(b, k_major_offset<DoutTile>(i)),
                                                     kHasDelta || i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// dv += Pᵀ dout.
  FOVEA_DEVICE_MEMBER void issue_dv(float (&dv)[kNumDv], const typename Scores::Operand& p,
                                    bool has_sums) const {
    using DoutTile = typename T::DoutTile;
    const auto b = mn_major_descriptor(DoutTile{cta.dout_at(stages.stage)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.tile_q / 16; ++i) {
      ptx::wgmma_rs<T::kType, T::kType, spec.head_dim_v, ptx::Major::mn>(
          dv, p[i], advanced(b, mn_major_offset<DoutTile>(i)), i > 0 || has_sums);
    }
    ptx::wgmma_commit_group();
  }

  /// dk += dSᵀ Q.
  FOVEA_DEVICE_MEMBER void issue_dk(float (&dk)[kNumDk], const typename Scores::Operand& ds,
                                    bool has_sums) const {
    using QTile = typename T::QTile;
    const auto b = mn_major_descriptor(QTile{cta.q_at(stages.stage)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.tile_q / 16; ++i) {
      ptx::wgmma_rs<T::kType, T::kType, spec.head_dim_qk, ptx::Major::mn>(
          dk, ds[i], advanced(b, mn_major_offset<QTile>(i)), i > 0 || has_sums);
    }
    ptx::wgmma_commit_group();
  }

  // ---- dS, for the group that sums dq ----

  FOVEA_DEVICE_MEMBER void store(const typename Scores::Operand& ds) const {
    const typename T::DsTile tile{cta.ds_at(buffers.stage)};
    // With a 0 that the compiler does not know to be one: it would keep the address through all tiles.
    const int lane = kSparesAddress ? cta.lane ^ static_cast<int>(ds[0][0] & cta.p.zero) : cta.lane;
    const SharedAddress mine = tile.chunk(64 * group + 16 * warp + lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < spec.tile_q / 16; ++i)
      ptx::stmatrix_x4(tile.chunk_ahead(mine, 2 * i), {ds[i][0], ds[i][1], ds[i][2], ds[i][3]});
  }

  /// Behind the next product: the fence waits for the stores, which wait for operands of products.
  FOVEA_DEVICE_MEMBER void publish() const {
    ptx::fence_proxy_async_shared_cta();
    cta.release(cta.barrier(T::kAt.ds_full, buffers.stage));
  }

  // ---- dS, for the gradient of a bias ----

  FOVEA_DEVICE_MEMBER void store_pairs(const typename Scores::Operand& ds,
                                       const PostedTile& tile) const {
    static_assert(spec.tile_q == kPairQueries && !spec.is_varlen);
    constexpr int kPieces = spec.tile_q / 16;
    const OwnedKeys keys = cta.owned();
    const std::int64_t at = pair_tile_at(cta.p.common.forward, keys.batch, tile.q_head,
                                         keys.kv_begin / T::kKeys, tile.idx());
    auto* const mine = static_cast<ptx::U32x4*>(cta.p.pairs.tiles) + at * kPairPieces +
                       (4 * group + warp) * (32 * kPieces) + cta.lane;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      ptx::st_global(mine + 32 * i, ptx::U32x4{ds[i][0], ds[i][1], ds[i][2], ds[i][3]});
    if (cta.warp == 0 && cta.lane == 0) ptx::st_global(cta.p.pairs.visited + at, 1);
  }

  // ---- the end ----

  FOVEA_DEVICE_MEMBER void ask_redo() const {
    const OwnedKeys keys = cta.owned();
    if (cta.lane == 0)
      cuda::ask_redo<spec.is_varlen, true>(cta.p.common, cta.sequence_of(keys), keys.kv_head,
                                           keys.kv_begin);
  }

  /// dv where V lay, dk where Q did; then to memory.
  FOVEA_DEVICE_MEMBER void write(const float (&dk)[kNumDk], const float (&dv)[kNumDv],
                                 bool is_seen) const {
    using DkTile = typename T::DkTile;
    using DvTile = typename T::DvTile;
    const float scale = cta.p.common.forward.softmax_scale;
    const float value_scale = spec.has_dropout ? cta.p.common.forward.dropout_keep_scale : 1.0F;
    if constexpr (spec.writes_elements) {
      write_elements(cta.p.common.dv, dv, is_seen, value_scale);
      write_elements(cta.p.common.dk, dk, is_seen, scale);
      return;
    }
    const DvTile values{cta.smem + T::kAt.v + static_cast<SharedAddress>(group * DvTile::kBytes)};
    const DkTile scores{cta.smem + T::kAt.q + static_cast<SharedAddress>(group * DkTile::kBytes)};
    if (is_seen) {
      pack<DvTile, kNumDv>(values, dv, value_scale);
      pack<DkTile, kNumDk>(scores, dk, scale);
    } else {
      clear(values);
      clear(scores);
    }
    ptx::fence_proxy_async_shared_cta();
    // The number of a barrier is a constant.
    group == 0 ? ptx::bar_sync(2, 128) : ptx::bar_sync(3, 128);
    const OwnedKeys keys = cta.owned();
    const std::int32_t left = keys.seqlen_kv - keys.kv_begin - 64 * group;
    if (spec.is_varlen && left < 64) {
      store_rows(cta.p.common.dv, keys, values, left, cta.p.common.forward.head_dim_v);
      store_rows(cta.p.common.dk, keys, scores, left, cta.p.common.forward.head_dim_qk);
    } else if (warp == 0 && ptx::elect_one()) {
      if (cta.p.common.dv.tensor.data != nullptr) store(cta.p.dv, keys, values);
      if (cta.p.common.dk.tensor.data != nullptr) store(cta.p.dk, keys, scores);
      ptx::cp_async_bulk_commit_group();
    }
  }

  template <class Tile, int n>
  FOVEA_DEVICE_MEMBER void pack(const Tile& tile, const float (&sums)[n], float factor) const {
    const SharedAddress mine = tile.chunk(16 * warp + cta.lane % 16, cta.lane / 16);
#pragma unroll
    for (int j = 0; j < n / 8; ++j) {
      const float* d = sums + 8 * j;
      ptx::stmatrix_x4(tile.chunk_ahead(mine, 2 * j),
                       {pair_of<spec.element>(d[0] * factor, d[1] * factor),
                        pair_of<spec.element>(d[2] * factor, d[3] * factor),
                        pair_of<spec.element>(d[4] * factor, d[5] * factor),
                        pair_of<spec.element>(d[6] * factor, d[7] * factor)});
    }
  }

  template <class Tile>
  FOVEA_DEVICE_MEMBER void clear(const Tile& tile) const {
#pragma unroll 1
    for (int at = 32 * warp + cta.lane; at < Tile::kBytes / 16; at += 128)
      ptx::st_shared(tile.base + 16 * at, ptx::U32x4{});
  }

  template <class Tile>
  FOVEA_DEVICE_MEMBER void store(const TensorMapParam& map, const OwnedKeys& keys,
                                 const Tile& tile) const {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const std::int32_t at[4] = {64 * panel, keys.kv_row + keys.kv_begin + 64 * group,
                                  keys.kv_head, spec.is_varlen ? 0 : keys.batch};
      ptx::cp_async_bulk_tensor_store<4>(tensor_map(map), at, tile.panel(panel));
    }
  }

  /// Of this group's first key.
  FOVEA_DEVICE_MEMBER std::int64_t offset_of(const BshdParam& t, const OwnedKeys& keys) const {
    const std::int64_t batch = spec.is_varlen ? 0 : keys.batch;
    const std::int64_t row = keys.kv_row + keys.kv_begin + 64 * group;
    return batch * t.batch_stride + row * t.row_stride + keys.kv_head * t.head_stride;
  }

  /// Only the first `left` rows: those behind them are another sequence's, or nobody's.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void store_rows(const GradientParam& to, const OwnedKeys& keys,
                                      const Tile& tile, std::int32_t left,
                                      std::int32_t head_dim) const {
    if (to.tensor.data == nullptr) return;
    constexpr int kChunks = Tile::kRowBytes / 16;
    auto* const first =
        static_cast<std::uint16_t*>(const_cast<void*>(to.tensor.data)) + offset_of(to.tensor, keys);
#pragma unroll 1
    for (int at = 32 * warp + cta.lane; at < left * kChunks; at += 128) {
      const int row = at / kChunks;
      const int chunk = at % kChunks;
      if (8 * chunk >= head_dim) continue;
      ptx::st_global(reinterpret_cast<ptx::U32x4*>(first + row * to.tensor.row_stride + 8 * chunk),
                     ptx::ld_shared<ptx::U32x4>(tile.chunk(row, chunk)));
    }
  }

  template <int n>
  FOVEA_DEVICE_MEMBER void write_elements(const GradientParam& to, const float (&sums)[n],
                                          bool is_seen, float factor) const {
    if (to.tensor.data == nullptr) return;
    const OwnedKeys keys = cta.owned();
    const std::int32_t left = keys.seqlen_kv - keys.kv_begin - 64 * group;
    const std::int32_t width = &to == &cta.p.common.dv ? cta.p.common.forward.head_dim_v
                                                       : cta.p.common.forward.head_dim_qk;
    const std::int64_t first = offset_of(to.tensor, keys);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int row = 16 * warp + cta.lane / 4 + 8 * (i / 2 % 2);
      const int column = 8 * (i / 4) + 2 * (cta.lane % 4) + i % 2;
      if (row >= left || column >= width) continue;
      store_element(const_cast<void*>(to.tensor.data), to.element,
                    first + row * to.tensor.row_stride + column * to.tensor.col_stride,
                    is_seen ? sums[i] * factor : 0.0F);
    }
  }
};

}  // namespace fovea::cuda::sm90
