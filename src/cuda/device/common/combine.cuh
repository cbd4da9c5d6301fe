// Joins the partial states that the kernels of split problems wrote for the splits of a sequence:
//
//   out = Σ_s exp(lse_s - lse) out_s,  lse = log Σ_s exp(lse_s)
//
// A warp for each row, four columns of a lane. Its splits go to four sums in turn, which are added up in their order:
// the same bits in every run, however many splits are asked for at once. No shared memory, no barrier.
// Where splits come in groups (shared/split.h), those of a group are folded, and groups likewise, in their order, as a
// CTA does that has them all; or they come folded, or nothing is left to do, which a warp sees of several rows, and at
// once where that goes for all sequences.
//
// Bound: memory, splits * head_dim_v * 4 bytes a row, which the L2 cache still holds: one wait of some 600 clocks for
// lse and the first sums together, then one for each kAtOnce splits more. Where rows are few, nothing but these waits
// takes time: sixteen splits at once, in 128 registers. Where rows come in waves, or have no more than eight splits,
// eight, in 80; where they may be groups, which are fewer yet, four, in 64: 4,096 rows are there at once. Lengths and
// sinks are read before the grid ahead has ended.
#pragma once

#include "common/fold_splits.cuh"
#include "common/key_share.cuh"
#include "common/online_softmax.cuh"
#include "common/sequence.cuh"
#include "common/store_columns.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/combine.h"
#include "shared/split.h"

namespace fovea::cuda {

/// Columns that a warp's lanes hold, four each.
inline constexpr int kCombineCols = 4 * ptx::kWarpLanes;
/// Of a row's columns: every so-manieth split is added to the same one.
inline constexpr int kCombineSums = 4;

/// Of two splits in each lane: split lane and split lane + kWarpLanes.
struct SplitValues {
  float low, high;
};

FOVEA_DEVICE SplitValues load_splits(const float* from, int count, float otherwise) {
  static_assert(kMostSplits <= 2 * ptx::kWarpLanes, "a lane holds two splits");
  const int lane = ptx::lane_idx();
  return {
      lane < count ? ptx::ld_global(from + lane) : otherwise,
      lane + ptx::kWarpLanes < count ? ptx::ld_global(from + lane + ptx::kWarpLanes) : otherwise};
}

/// Who splits by groups has fewer than 2^31 rows.
template <bool is_small>
struct RowNumberOf {
  using Type = std::int64_t;
};
template <>
struct RowNumberOf<true> {
  using Type = std::uint32_t;
};
template <bool is_small>
using RowNumber = typename RowNumberOf<is_small>::Type;

/// One row, as all lanes of its warp see it.
template <CombineSpec spec>
struct CombinedRow {
  std::int32_t batch, q_head, q_idx;
  RowNumber<spec.has_groups> row;  // of partial states
  std::int64_t queries_begin;      // packed: rows of out before the sequence's
  int count;                       // of splits; 0: there is no such row, or it has been written
  bool are_groups;                 // the last split of each has its state

  /// Pages may be listed whatever the kernel was compiled for: it is asked once.
  static constexpr CacheKind kCombinedCache{true, spec.has_packed_q};

  using Number = RowNumber<spec.has_groups>;

  FOVEA_DEVICE_MEMBER void find(const CombineParams& p, Number number, const KeyShare& share) {
    row = number;
    const auto seqlen_q = static_cast<Number>(p.seqlen_q);
    const auto num_heads_q = static_cast<Number>(p.num_heads_q);
    batch = static_cast<std::int32_t>(row / seqlen_q / num_heads_q);
    // Keys of the sequence, as those had it who wrote its partial states.
    count = row < p.num_rows ? num_left(share, cached_rows<kCombinedCache>(p, batch).count) : 0;
    q_idx = static_cast<std::int32_t>(row % seqlen_q);
    q_head = static_cast<std::int32_t>(row / seqlen_q % num_heads_q);
    if constexpr (spec.has_packed_q) {
      if (count == 0) return;
      const PackedRows queries = few_queries(p, batch);
      if (q_idx >= queries.count) count = 0;
      queries_begin = queries.begin;
    }
  }

  /// Of a sequence that was taken whole there is none left.
  FOVEA_DEVICE_MEMBER int num_left(const KeyShare& share, std::int32_t seqlen_kv) {
    are_groups = false;
    if constexpr (spec.takes_groups) {
      const Unit unit = unit_of(seqlen_kv, spec.most_splits, share);
      are_groups = unit == Unit::group;
      if (unit == Unit::sequence) return 0;
    }
    return num_splits(seqlen_kv, spec.most_splits);
  }

  /// Of the sequence, or of packed rows.
  FOVEA_DEVICE_MEMBER auto out_row() const {
    if constexpr (spec.has_packed_q) {
      return queries_begin + q_idx;
    } else {
      return q_idx;
    }
  }

  FOVEA_DEVICE_MEMBER const float* sums(const CombineParams& p, int split) const {
    return p.partial_out + (std::int64_t{row} * p.max_splits + split) * p.partial_width;
  }

  /// Four columns of this lane.
  FOVEA_DEVICE_MEMBER void store(const CombineParams& p, int col, const ptx::F32x4& values) const {
    const std::int64_t at = batch * p.out.batch_stride + out_row() * p.out.row_stride +
                            q_head * p.out.head_stride + col * p.out.col_stride;
    store_columns<spec.out_element>(p.out, at, p.head_dim_v - col, values);
  }

  /// parts: what is beside lses.
  FOVEA_DEVICE_MEMBER void store_row_values(const CombineParams& p, const SplitValues& lses,
                                            SplitValues parts, float lse, float sum) const {
    float greatest = -infinity();
    if constexpr (spec.wants_row_max) {
      if (is_huge(lses.low)) parts.low = lses.low;
      if (is_huge(lses.high)) parts.high = lses.high;
      greatest = warp_max(ptx::max_ftz(parts.low, parts.high));
      if (ptx::vote_any(is_nan(parts.low) || is_nan(parts.high))) greatest = quiet_nan();
    }
    if (ptx::lane_idx() != 0) return;
    if (p.lse != nullptr) {
      ptx::st_global(p.lse + batch * p.lse_batch_stride + q_head * p.lse_head_stride +
                         out_row() * p.lse_row_stride,
                     lse);
    }
    if constexpr (spec.wants_row_max) {
      ptx::st_global(p.row_max + batch * p.row_max_batch_stride + q_head * p.row_max_head_stride +
                         out_row() * p.row_max_row_stride,
                     finished_max(greatest, sum));
    }
  }
};

/// kAtOnce: splits whose sums are on their way.
template <CombineSpec spec, int kAtOnce>
struct Combine {
  static_assert(kAtOnce % kCombineSums == 0, "which sum a split goes to does not depend on it");
  static_assert(ptx::kWarpLanes % kAtOnce == 0, "their weights are all low or all high");
  static constexpr bool kFolds = spec.has_groups;
  static constexpr int kMostGroups = spec.most_splits / kSplitsOfGroup;
  static_assert(!kFolds || (kAtOnce % kSplitsOfGroup == 0 && spec.most_splits <= ptx::kWarpLanes),
                "a lane has one split, and groups are whole");

  const CombineParams& p;
  CombinedRow<spec> row;

  /// Sums of kAtOnce splits, in the columns of this lane.
  struct Parts {
    ptx::F32x4 part[kAtOnce];
  };

  FOVEA_DEVICE_MEMBER explicit Combine(const CombineParams& params) : p(params) {}

  FOVEA_DEVICE_MEMBER void look_up_sink() {
    sink_ =
        p.sinks == nullptr ? -infinity() : ptx::ld_global(p.sinks + row.q_head * p.sinks_stride);
  }

  /// Of one row, whose partial states are there.
  FOVEA_DEVICE_MEMBER void run() {
    lse_ = load_of_row(p.partial_lse, -infinity());
    // All lanes, with columns or without: each knows the weights of two splits.
    for (int first = 0; first < p.partial_width; first += kCombineCols) {
      const int col = first + 4 * ptx::lane_idx();
      const ptx::F32x4 sum = join(col, first == 0);
      if (col < p.head_dim_v)
        row.store(p, col,
                  {finished(sum.x, factor_), finished(sum.y, factor_), finished(sum.z, factor_),
                   finished(sum.w, factor_)});
    }
  }

 private:
  /// No load asks: behind the last split it is read again, with weight 0, and columns that a lane does not have are
  /// others. Addresses as integers: of pointers the compiler sums up each one from its parts, and the loads go out one
  /// by one.
  FOVEA_DEVICE_MEMBER Parts load(int first, int col) const {
    const auto from =
        reinterpret_cast<std::uint64_t>(row.sums(p, 0) + (col < p.partial_width ? col : 0));
    const auto row_bytes = static_cast<std::uint32_t>(4 * p.partial_width);
    Parts parts;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const auto split = static_cast<std::uint32_t>(place_of(first + i));
      parts.part[i] = ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(
          from + std::uint64_t{split} * std::uint64_t{row_bytes}));
    }
    return parts;
  }

  /// Of a group that comes folded, every split's is the last one's.
  FOVEA_DEVICE_MEMBER int place_of(int split) const {
    const int place = spec.takes_groups && row.are_groups ? split | kSplitsOfGroup - 1 : split;
    return least(place, row.count - 1);
  }

  /// Weights, and what sums are multiplied by at the end; writes lse and row_max.
  FOVEA_DEVICE_MEMBER void weigh() {
    if constexpr (kFolds) return weigh_groups();
    const float top = warp_max(ptx::max_ftz(lse_.low, lse_.high));
    weights_ = {weight_of(lse_.low, top), weight_of(lse_.high, top)};
    if (is_huge(top)) weigh_maxima(top);
    const float sum = warp_sum(weights_.low + weights_.high);
    const RowResult result = finish_row({top, sum}, 1.0F, sink_);
    SplitValues parts{};
    if constexpr (spec.wants_row_max) parts = load_besides(-infinity());
    row.store_row_values(p, lse_, parts, result.lse, sum);
    factor_ = result.factor;
  }

  /// Where lse is the maximum itself, those that have it count by their sums; all others have weight 0 already.
  FOVEA_DEVICE_MEMBER void weigh_maxima(float top) {
    const SplitValues log_sums = load_besides(0);
    if (lse_.low == top) weights_.low = ptx::ex2_approx_ftz(log_sums.low * kLog2E);
    if (lse_.high == top) weights_.high = ptx::ex2_approx_ftz(log_sums.high * kLog2E);
  }

  /// Of its splits. A group that comes folded has written its last split's alone.
  FOVEA_DEVICE_MEMBER SplitValues load_of_row(const float* values, float otherwise) const {
    const float* const from = values + std::int64_t{row.row} * p.max_splits;
    if constexpr (!kFolds) return load_splits(from, row.count, otherwise);
    const int lane = ptx::lane_idx();
    return {lane < row.count ? ptx::ld_global(from + place_of(lane)) : otherwise, otherwise};
  }

  /// What partial states have beside lse, which of most nobody asks.
  FOVEA_DEVICE_MEMBER SplitValues load_besides(float otherwise) const {
    return load_of_row(p.partial_max, otherwise);
  }

  // ---- groups ------------------------------------------------------------------------------------

  /// Lane s has split s, and takes its step of its group; those behind the last take steps that change nothing. Then
  /// lane g has lse of group g.
  FOVEA_DEVICE_MEMBER void fold_lse() {
    static_assert(kSplitsOfGroup == 4, "maxima by two steps, sums by three");
    const int lane = ptx::lane_idx();
    const int place = lane % kSplitsOfGroup;
    const float lse = lse_.low;
    FoldedSplits group;  // up to and with the lane's split
    group.top = ptx::max_ftz(-infinity(), lse);
    for (int by = 1; by <= 2; by *= 2) {
      const float before = of_lane(group.top, lane - by);
      if (place >= by) group.top = ptx::max_ftz(group.top, before);
    }
    float beside = -infinity();
    if (spec.wants_row_max || ptx::vote_any(is_huge(lse))) {
      beside = load_besides(-infinity()).low;
      group.row_max = max_of_split(lse, beside);
      for (int by = 1; by <= 2; by *= 2)
        group.row_max = max_or_nan(group.row_max, of_lane(group.row_max, lane ^ by));
    }
    const float before = of_lane(group.top, lane - 1);
    step_ = fold_step(place == 0 ? -infinity() : before, group.top, lse, beside);
    group.sum = step_.added;
    for (int i = 1; i < kSplitsOfGroup; ++i) {
      const float sum_before = of_lane(group.sum, lane - 1);
      if (place == i) group.sum = ptx::fma_rn(step_.kept, sum_before, step_.added);
    }
    finish_groups(group);
  }

  /// They come folded.
  FOVEA_DEVICE_MEMBER void take_groups() {
    const int lane = ptx::lane_idx();
    const bool is_last = place_of(lane) == lane;
    step_ = {1.0F, is_last ? 1.0F : 0.0F, is_last && lse_.low != -infinity()};
    group_factor_ = 1.0F;
    const int first = kSplitsOfGroup * lane;
    const float its_lse = of_lane(lse_.low, place_of(first));
    lse_.low = first < row.count ? its_lse : -infinity();
    if (!spec.wants_row_max && !ptx::vote_any(is_huge(lse_.low))) return;
    const float its_beside = of_lane(load_besides(-infinity()).low, place_of(first));
    beside_group_ = first < row.count ? its_beside : -infinity();
  }

  /// group: of lane 4 g + 3, group g.
  FOVEA_DEVICE_MEMBER void finish_groups(const FoldedSplits& group) {
    const RowResult result = group.result();
    group_factor_ = result.factor;
    const float beside = beside_lse(result.lse, group.sum, group.row_max);
    const int first = kSplitsOfGroup * ptx::lane_idx();
    const float its_lse = of_lane(result.lse, first + kSplitsOfGroup - 1);
    const float its_beside = of_lane(beside, first + kSplitsOfGroup - 1);
    lse_.low = first < row.count ? its_lse : -infinity();
    beside_group_ = first < row.count ? its_beside : -infinity();
  }

  /// Groups are folded as splits of a group are. Lane g has group g, and takes its step; all lanes take all sums, one
  /// after the other.
  FOVEA_DEVICE_MEMBER void weigh_groups() {
    if (spec.takes_groups && row.are_groups) {
      take_groups();
    } else {
      fold_lse();
    }
    const int lane = ptx::lane_idx();
    float top = ptx::max_ftz(-infinity(), lse_.low);
#pragma unroll
    for (int by = 1; by < kMostGroups; by *= 2) {
      const float before = of_lane(top, lane - by);
      if (lane >= by) top = ptx::max_ftz(top, before);
    }
    SplitValues beside{-infinity(), -infinity()};
    if (spec.wants_row_max || ptx::vote_any(is_huge(lse_.low))) beside.low = beside_group_;
    const float before = of_lane(top, lane - 1);
    group_step_ = fold_step(lane == 0 ? -infinity() : before, top, lse_.low, beside.low);
    float sum = 0;
#pragma unroll
    for (int group = 0; group < kMostGroups; ++group)
      sum = ptx::fma_rn(ptx::shfl_idx(group_step_.kept, group), sum,
                        ptx::shfl_idx(group_step_.added, group));
    const RowResult result = finish_row({of_lane(top, kMostGroups - 1), sum}, 1.0F, sink_);
    row.store_row_values(p, lse_, beside, result.lse, sum);
    factor_ = result.factor;
  }

  /// Of the lane, or of any where there is no such lane.
  FOVEA_DEVICE_MEMBER static float of_lane(float x, int lane) {
    return ptx::shfl_idx(x, lane & (ptx::kWarpLanes - 1));
  }

  FOVEA_DEVICE_MEMBER static FoldStep of_lane(const FoldStep& step, int lane) {
    return {ptx::shfl_idx(step.kept, lane), ptx::shfl_idx(step.added, lane),
            ptx::shfl_idx(step.is_seen ? 1 : 0, lane) != 0};
  }

  /// Where it is known that none of the sums are lost.
  FOVEA_DEVICE_MEMBER static ptx::F32x4 fold_part(const ptx::F32x4& sums, const FoldStep& step,
                                                  int lane, const ptx::F32x4& part) {
    return fold_finite(sums, {ptx::shfl_idx(step.kept, lane), ptx::shfl_idx(step.added, lane)},
                       part);
  }

  /// An empty state's sums are not looked at.
  FOVEA_DEVICE_MEMBER static void add(ptx::F32x4& sum, float weight, const ptx::F32x4& part) {
    if (weight == 0) return;
    sum = {ptx::fma_rn(weight, part.x, sum.x), ptx::fma_rn(weight, part.y, sum.y),
           ptx::fma_rn(weight, part.z, sum.z), ptx::fma_rn(weight, part.w, sum.w)};
  }

  // ---- sums --------------------------------------------------------------------------------------

  /// Weights are computed while the first sums are under way. It is a branch for the compiler's sake, which else asks
  /// for some of the sums behind the weights, one wait later.
  FOVEA_DEVICE_MEMBER ptx::F32x4 join(int col, bool has_no_weights) {
    if constexpr (kFolds) {
      const ptx::F32x4 all = fold_all(col, has_no_weights);
      return ptx::vote_any(
                 !(is_finite(all.x) && is_finite(all.y) && is_finite(all.z) && is_finite(all.w)))
                 ? fold_non_finite(col)
                 : all;
    } else {
      ptx::F32x4 sums[kCombineSums] = {};
      join_states(sums, col, has_no_weights);
      const ptx::F32x4 all = total(sums);
      return ptx::vote_any(is_faint(weights_.low, lse_.low) || is_faint(weights_.high, lse_.high))
                 ? with_faint_states(all, col)
                 : all;
    }
  }

  FOVEA_DEVICE_MEMBER static ptx::F32x4 total(const ptx::F32x4 (&sums)[kCombineSums]) {
    ptx::F32x4 all{0, 0, 0, 0};
#pragma unroll
    for (const ptx::F32x4& sum : sums)
      all = {all.x + sum.x, all.y + sum.y, all.z + sum.z, all.w + sum.w};
    return all;
  }

  FOVEA_DEVICE_MEMBER void join_states(ptx::F32x4 (&sums)[kCombineSums], int col,
                                       bool has_no_weights) {
#pragma unroll 1
    for (int first = 0; first < row.count; first += kAtOnce) {
      const Parts parts = load(first, col);
      if (first == 0 && has_no_weights) weigh();
      const float of_these = first < ptx::kWarpLanes ? weights_.low : weights_.high;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)  // weights are 0 behind the last
        add(sums[i % kCombineSums], ptx::shfl_idx(of_these, first % ptx::kWarpLanes + i),
            parts.part[i]);
    }
  }

  /// Each onto the sums of its group, and where that ends, they onto those of all. Lanes behind the last split have a
  /// step that changes nothing.
  FOVEA_DEVICE_MEMBER ptx::F32x4 fold_all(int col, bool has_no_weights) {
    ptx::F32x4 all{0, 0, 0, 0};
#pragma unroll 1
    for (int first = 0; first < row.count; first += kAtOnce) {
      const Parts parts = load(first, col);
      if (first == 0 && has_no_weights) weigh();
      ptx::F32x4 group{0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int split = first + i;
        group = fold_part(group, step_, split, parts.part[i]);
        if (i % kSplitsOfGroup != kSplitsOfGroup - 1) continue;
        all = fold_part(all, group_step_, split / kSplitsOfGroup,
                        times(group, ptx::shfl_idx(group_factor_, split)));
        group = {0, 0, 0, 0};
      }
    }
    return all;
  }

  /// Once more, where infinity or NaN may be that of what weighs nothing.
  FOVEA_DEVICE_MEMBER ptx::F32x4 fold_non_finite(int col) const {
    ptx::F32x4 all{0, 0, 0, 0}, group{0, 0, 0, 0};
#pragma unroll 1
    for (int split = 0; split < row.count; ++split) {
      group = fold(group, of_lane(step_, split), sums_of(place_of(split), col));
      if (split % kSplitsOfGroup != kSplitsOfGroup - 1 && split + 1 < row.count) continue;
      const int number = split / kSplitsOfGroup;
      const float factor =
          ptx::shfl_idx(group_factor_, number * kSplitsOfGroup + kSplitsOfGroup - 1);
      all = fold(all, of_lane(group_step_, number), times(group, factor));
      group = {0, 0, 0, 0};
    }
    return all;
  }

  /// Did a state see keys, none of which weigh anything beside those of others?
  FOVEA_DEVICE_MEMBER static bool is_faint(float weight, float lse) {
    return weight == 0 && lse != -infinity();
  }

  /// Its infinity and NaN count all the same.
  FOVEA_DEVICE_MEMBER ptx::F32x4 with_faint_states(ptx::F32x4 sum, int col) const {
#pragma unroll 1
    for (int state = 0; state < row.count; ++state) {
      const bool is_low = state < ptx::kWarpLanes;
      const int lane = state % ptx::kWarpLanes;
      const float weight = ptx::shfl_idx(is_low ? weights_.low : weights_.high, lane);
      const float lse = ptx::shfl_idx(is_low ? lse_.low : lse_.high, lane);
      if (is_faint(weight, lse)) sum = with_non_finite(sum, sums_of(state, col));
    }
    return sum;
  }

  FOVEA_DEVICE_MEMBER ptx::F32x4 sums_of(int state, int col) const {
    const int own_col = col < p.partial_width ? col : 0;
    return ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(row.sums(p, state) + own_col));
  }

  SplitValues lse_{}, weights_{};           // of partial states; has_groups: lse of groups
  FoldStep step_{1.0F, 0.0F, false};        // of the lane's split onto its group
  FoldStep group_step_{1.0F, 0.0F, false};  // of the lane's group
  float group_factor_ = 0, beside_group_ = 0;
  float sink_ = 0, factor_ = 0;
};

/// Has each sequence been taken whole, so that no row is left? Of a warp, all lanes together. To look at each of 65,536
/// rows for it took 38 us (an H200).
template <CombineSpec spec>
FOVEA_DEVICE bool are_all_whole(const CombineParams& p, const KeyShare& share) {
  bool is_left = false;
#pragma unroll 1
  for (std::int32_t idx = ptx::lane_idx(); idx < p.num_sequences; idx += ptx::kWarpLanes) {
    const std::int32_t keys = shared_keys<CombinedRow<spec>::kCombinedCache>(p, idx);
    is_left = is_left || unit_of(keys, spec.most_splits, share) != Unit::sequence;
  }
  return !ptx::vote_any(is_left);
}

/// Ahead of a warp's end too: whoever comes behind this grid waits for it alone, so it may not end before the one ahead
/// of it.
template <CombineSpec spec>
FOVEA_DEVICE void await_grid_ahead() {
  if constexpr (spec.is_chained) ptx::griddepcontrol_wait();
}

/// Rows of each warp: one; where a warp may find that all are done, as many as there are more than warps.
template <CombineSpec spec, int kAtOnce>
FOVEA_DEVICE void combine(const CombineParams& p) {
  const int warps = ptx::block_dim().x / ptx::kWarpLanes;
  KeyShare share{0, false};
  if constexpr (spec.takes_groups)
    share = key_share<CombinedRow<spec>::kCombinedCache>(p, p.tiles_of_cta);
  if (spec.takes_groups && are_all_whole<spec>(p, share)) return await_grid_ahead<spec>();
  using Number = typename CombinedRow<spec>::Number;
#pragma unroll 1
  for (Number row = static_cast<Number>(ptx::block_idx().x) * warps + ptx::warp_idx();;
       row += static_cast<Number>(ptx::grid_dim().x) * warps) {
    Combine<spec, kAtOnce> mine(p);
    mine.row.find(p, row, share);
    if (mine.row.count != 0) {
      mine.look_up_sink();
      await_grid_ahead<spec>();
      mine.run();
    }
    if (!spec.takes_groups || row >= p.num_rows) return await_grid_ahead<spec>();
  }
}

}  // namespace fovea::cuda
