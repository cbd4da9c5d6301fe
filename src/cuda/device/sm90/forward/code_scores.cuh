// Scores of codes of 8 bits: their product, exact in 32 bits, and what turns it into scores. Called by scores.cuh.
//
//   score = scale_i scale_g (code_i · code_j) + q_i · μ                                    shared/quantize_k.h
//
// A lane holds keys of a tile that share one scale, so a row's scores of it have one factor. The last term is the same
// for all keys of a row: the softmax does not need it, lse and row_max get it at the end (output.cuh), programs with
// each score.
//
// Sums of products begin at the bits of 1.5 · 2^23, so that they *are* floats, that number and the sum: no conversion.
// A sum is below 127² 128, half of what may be added. The softmax takes the origin off in the fma that scales
// (common/optimistic_softmax.cuh). Sums that a program reads begin at 0 and are converted: as many instructions, and
// the fma that scales them may add what a program adds, which an origin would round to whole products of codes.
//
// A key or a row that holds NaN or infinity has no codes; its scores are products of what was given, one by one.
#pragma once

#include "common/bits.cuh"
#include "common/cache_tiles.cuh"
#include "common/code_units.cuh"
#include "common/element.cuh"
#include "common/element_pair.cuh"
#include "common/float_constants.cuh"
#include "common/row_view.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/ordered.cuh"
#include "ptx/wgmma.cuh"
#include "shared/quantize_k.h"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/query_codes.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90 {

/// Kernels that multiply Q and K themselves have none.
template <Sm90ForwardSpec spec, bool multiplies_codes = spec.multiplies_codes>
struct CodeScores {
  FOVEA_DEVICE_MEMBER explicit CodeScores(const ComputingWarp<spec>&) {}
};

/// Of one thread: two rows, and a lane's keys of a tile.
template <Sm90ForwardSpec spec>
struct CodeScores<spec, true> {
  using T = Traits<spec>;
  static constexpr int kScores = spec.tile_kv / 2;
  static constexpr std::int32_t kNoTiles = -0x7fffffff;
  static constexpr bool kHaveOrigin = !spec.is_prescaled;  // the sums

  const ComputingWarp<spec> warp;
  std::int32_t sums[kScores];
  float row_scale[2];
  std::int32_t
      first_tile;  // of the row tile's keys, among those of all heads; there are none: kNoTiles
  float key_scale, scale_ahead;  // of this lane's keys of the kv tile, and of the next
  float of_mean[2];              // of rows, where programs read scores

  FOVEA_DEVICE_MEMBER explicit CodeScores(const ComputingWarp<spec>& of_warp) : warp(of_warp) {}

  /// And at its first kv tile. Its rows have arrived in this stage, and become codes.
  FOVEA_DEVICE_MEMBER void look_at_rows(const RowTile& tile, KvTile first, int q_stage) {
    const ForwardParams& common = warp.cta.p.common;
    const QuantizedParams& keys = warp.cta.p.quantized;
    const Work work = warp.work_of(tile);  // once a row tile: its division by the group is slow
    const SequencePlace place = warp.cta.place_of(tile);
    const std::int32_t pair = Cta<spec>::rounded_batch(tile) * common.num_heads_kv + work.kv_head;
    first_tile = place.seqlen_kv == 0
                     ? kNoTiles
                     : pair * keys.num_tiles + Cta<spec>::first_tile_of_codes(tile, place);
    look_further(tile, first);
    const RoundedRows rows = QueryCodes<spec>{warp, q_stage}.round(work);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_scale[r] = rows.scale[r];
      of_mean[r] = rows.of_mean[r];
    }
  }

  /// What is beside this lane's keys of a kv tile.
  FOVEA_DEVICE_MEMBER const QuantizedKeys* keys_of(std::int32_t kv_idx) const {
    return warp.cta.p.quantized.keys + warp.cta.lane % kScalesOfTile +
           std::int64_t{first_tile + kv_idx} * kScalesOfTile;
  }

  /// Of a kv tile before its product is issued; it is the one that was looked further to, but for a row tile's first.
  FOVEA_DEVICE_MEMBER void look_at_keys() { key_scale = scale_ahead; }

  /// To the kv tile after it: behind a product that waits for them these loads would hold up the tensor cores.
  FOVEA_DEVICE_MEMBER void look_further(const RowTile& tile, KvTile next) {
    scale_ahead = 1.0F;
    const std::int32_t seqlen_kv = warp.cta.place_of(tile).seqlen_kv;
    if (next.is_none() || next.idx() * spec.tile_kv >= seqlen_kv) return;  // there are no keys
    look_further(next);
  }

  /// Likewise, where there are keys. Behind the last tile the first is asked for once more: without a branch.
  FOVEA_DEVICE_MEMBER void look_further(KvTile next) {
    scale_ahead = ptx::ld_global(&keys_of(next.idx())->scale);
  }

  /// Where sums begin, of a row tile's first product.
  FOVEA_DEVICE_MEMBER void begin_sums() {
#pragma unroll
    for (std::int32_t& sum : sums) sum = ptx::bit_cast<std::int32_t>(kIntegerOrigin);
  }

  /// Of all others: in the place of the scores before, which are done with. Whatever they were, the same bits come of
  /// them, as ptxas does not see. Plain moves it puts behind the barrier of the turn, where the tensor cores wait for
  /// them, and a 0 from memory, to hide all of them by, took longer to come than a quarter of the starts.
  FOVEA_DEVICE_MEMBER void begin_sums_behind(const float (&s)[kScores]) {
    constexpr std::uint32_t kSomeBits = 0x4b000000U;
    const auto origin = ptx::bit_cast<std::uint32_t>(kIntegerOrigin);
    const auto none = ptx::bit_cast<std::uint32_t>(warp.cta.p.zero);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const auto before = ptx::bit_cast<std::uint32_t>(s[i]);
      sums[i] = static_cast<std::int32_t>(begins_by_product(i)
                                              ? ptx::ordered_mad_lo(before, none, origin)
                                              : ptx::ordered_and_or(before, kSomeBits, origin));
    }
  }

  FOVEA_DEVICE_MEMBER void issue(ptx::MatrixDescriptor queries, ptx::MatrixDescriptor key_tile) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::kQkSteps; ++i) {
      ptx::wgmma_ss<ptx::WgmmaType::s8, ptx::WgmmaType::s8, spec.tile_kv>(
          sums, advanced(queries, k_major_offset<typename T::QTile>(i)),
          advanced(key_tile, k_major_offset<typename T::KTile>(i)), kHaveOrigin || i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// When the product is there.
  FOVEA_DEVICE_MEMBER void take(float (&s)[kScores]) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      s[i] = kHaveOrigin ? ptx::bit_cast<float>(sums[i]) : static_cast<float>(sums[i]);
  }

  /// What makes codes of each row logarithms to base 2.
  FOVEA_DEVICE_MEMBER void set_units(float (&unit)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      unit[r] = code_unit(row_scale[r] * warp.cta.p.common.softmax_scale_log2, key_scale);
  }

  /// What the scores of each row have in common, log2.
  FOVEA_DEVICE_MEMBER void set_common_parts(float (&common)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) common[r] = of_mean[r] * warp.cta.p.common.softmax_scale_log2;
  }

  /// For programs: what makes products of the sums of a row. Its mean's is added.
  FOVEA_DEVICE_MEMBER float factor(int r) const { return row_scale[r] * ptx::abs_ftz(key_scale); }

  /// The products, times this.
  FOVEA_DEVICE_MEMBER void multiply_out(float (&s)[kScores], float scale) const {
    const float factors[2] = {factor(0) * scale, factor(1) * scale};
    const float added[2] = {of_mean[0] * scale, of_mean[1] * scale};
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      s[i] = ptx::fma_rn(s[i], factors[i / 2 % 2], added[i / 2 % 2]);
  }

  /// Whether one of this thread's rows or keys is not rounded.
  FOVEA_DEVICE_MEMBER bool has_unrounded() const {
    return key_scale < 0.0F || row_scale[0] == 0.0F || row_scale[1] == 0.0F;
  }

  /// Where a thread of the warp has; products of values may be under way, so all lanes go the same way. Rare, so it may
  /// take long: a product of given numbers for each pair of which one is not rounded. score(product, r, offset): of the
  /// thread's row r, and of its key that is so much further on than its first.
  template <class ScoreOf>
  FOVEA_DEVICE_MEMBER void restore_unrounded(const RowTile& tile, std::int32_t kv_idx,
                                             float (&s)[kScores], ScoreOf&& score) const {
    const Work work = warp.work_of(tile);
    if (work.sequence.seqlen_kv == 0) return;
    const std::uint32_t unrounded =
        key_scale < 0.0F ? ptx::ld_global(&keys_of(kv_idx)->unrounded) : 0U;
    constexpr int kRowsAtOnce = spec.sums_codes ? 1 : 2;  // registers are scarce beside its sums
#pragma unroll 1
    for (int key = 0; key < kScores / 2; ++key) {  // of those that this lane holds
      const std::int32_t offset = key / 2 * 8 + key % 2;
      const std::int32_t of_tile = offset + warp.cta.lane % 4 * 2;
#pragma unroll kRowsAtOnce
      for (int r = 0; r < 2; ++r) {
        const bool is_mine =
            (r == 0 ? row_scale[0] : row_scale[1]) == 0.0F || (unrounded >> key & 1U) != 0;
        if (!ptx::vote_any(is_mine)) continue;
        const RowView<spec> row(warp.cta.p.common, work, warp.row(r));
        const float given =
            score(given_product(tile, row, kv_idx * spec.tile_kv + of_tile), r, offset);
        const int at = is_mine ? key / 2 * 4 + 2 * r + key % 2 : -1;
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = i == at ? given : s[i];
      }
    }
  }

 private:
  /// Where P becomes codes too, a step waits for the unit of logic and conversions: every second start is a product
  /// with 0, of the unit that multiplies. Beside exponentials it gains nothing, and loses 8 % at head_dim 64.
  static constexpr bool begins_by_product(int i) { return spec.sums_codes && i % 2 == 1; }

  /// q · k of a row and a key; of the last ones where they do not exist.
  FOVEA_DEVICE_MEMBER float given_product(const RowTile& tile, const RowView<spec>& row,
                                          std::int32_t key) const {
    const ForwardParams& p = warp.cta.p.common;
    const Sequence& sequence = row.work.sequence;
    const std::int32_t q_idx = least(row.q_idx, sequence.seqlen_q - 1);
    const std::int32_t kv_idx = least(key, sequence.seqlen_kv - 1);
    const std::int64_t q_at = sequence.q_batch * p.q.batch_stride + row.q_head * p.q.head_stride +
                              (sequence.q_row + q_idx) * p.q.row_stride;
    if constexpr (T::kHasRoundedCache)
      return product_with_cached(tile, row.work.kv_head, q_at, kv_idx);
    const std::int64_t k_at = Cta<spec>::map_batch(tile) * p.k.batch_stride +
                              row.work.kv_head * p.k.head_stride +
                              (warp.cta.place_of(tile).kv_row + kv_idx) * p.k.row_stride;
    float sum = 0;
#pragma unroll 1
    for (std::int32_t d = 0; d < p.head_dim_qk; ++d) {
      sum = ptx::fma_rn(load_element(p.q.data, spec.element, q_at + d),
                        load_element(p.k.data, spec.element, k_at + d), sum);
    }
    return sum;
  }

  /// Of the row of q that begins there, and a key as the cache has it.
  FOVEA_DEVICE_MEMBER float product_with_cached(const RowTile& tile, std::int32_t kv_head,
                                                std::int64_t q_at, std::int32_t kv_idx) const {
    const Sm90ForwardParams& p = warp.cta.p;
    Sequence sequence{};
    sequence.kv_batch = sequence.idx = tile.batch;
    sequence.kv_row = warp.cta.place_of(tile).kv_row;
    find_slot<spec>(p.common, sequence);
    const auto key = CacheRow<spec.element, spec.k_codes>::of(
        p.common.k, p.k_scale, place_of_key<spec>(p.common, sequence, kv_idx), tile.batch, kv_head);
    float sum = 0;
#pragma unroll 1
    for (std::int32_t d = 0; d < p.common.head_dim_qk; ++d) {
      sum = ptx::fma_rn(load_element(p.common.q.data, spec.element, q_at + d),
                        low_of<spec.element>(key.bits(d)), sum);
    }
    return sum;
  }
};

}  // namespace fovea::cuda::sm90
