// Joins the partial states that the kernels of split problems wrote for the splits of a sequence:
//
//   out = Σ_s exp(lse_s - lse) out_s,  lse = log Σ_s exp(lse_s)
//
// A warp for each row, four columns of a lane. Its splits go to four sums in turn, which are added up in their order:
// the same bits in every run, however many splits are asked for at once. No shared memory, no barrier.
// Where splits come in groups (shared/split.h), those of a group are folded first, then groups are joined; or they come
// folded.
//
// Bound: memory, splits * head_dim_v * 4 bytes a row, which the L2 cache still holds: one wait of some 600 clocks for
// lse and the first sums together, then one for each kAtOnce splits more. Where rows are few, nothing but these waits
// takes time: sixteen splits at once, in 128 registers. Where rows come in waves, or have no more than eight splits,
// eight, in 80. Lengths and sinks are read before the grid ahead has ended.
#pragma once

#include "common/fold_splits.cuh"
#include "common/online_softmax.cuh"
#include "common/sequence.cuh"
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

/// One row, as all lanes of its warp see it.
template <CombineSpec spec>
struct CombinedRow {
  std::int32_t batch, q_head, q_idx;
  std::int64_t row;            // of partial states
  std::int64_t queries_begin;  // packed: rows of out before the sequence's
  int count;                   // of partial states; 0: there is no such row
  int group_size;              // so many are folded

  /// Pages may be listed whatever the kernel was compiled for: it is asked once.
  static constexpr CacheKind kCombinedCache{true, spec.has_packed_q};

  FOVEA_DEVICE_MEMBER void find(const CombineParams& p, std::int64_t number) {
    row = number;
    batch = static_cast<std::int32_t>(row / p.seqlen_q / p.num_heads_q);
    // Keys of the sequence, as those had it who wrote its partial states.
    count = row < p.num_rows ? num_states(cached_rows<kCombinedCache>(p, batch).count) : 0;
    q_idx = static_cast<std::int32_t>(row % p.seqlen_q);
    q_head = static_cast<std::int32_t>(row / p.seqlen_q % p.num_heads_q);
    if constexpr (spec.has_packed_q) {
      if (count == 0) return;
      const PackedRows queries = few_queries(p, batch);
      if (q_idx >= queries.count) count = 0;
      queries_begin = queries.begin;
    }
  }

  FOVEA_DEVICE_MEMBER int num_states(std::int32_t seqlen_kv) {
    if constexpr (spec.are_folded) return num_groups(seqlen_kv, spec.most_splits);
    if constexpr (spec.has_groups) group_size = splits_of_group(seqlen_kv, spec.most_splits);
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
    return p.partial_out + (row * p.max_splits + split) * p.partial_width;
  }

  /// Four columns of this lane.
  FOVEA_DEVICE_MEMBER void store(const CombineParams& p, int col, const ptx::F32x4& values) const {
    const std::int64_t at = batch * p.out.batch_stride + out_row() * p.out.row_stride +
                            q_head * p.out.head_stride + col * p.out.col_stride;
    if constexpr (spec.out_element == Element::f32) {
      auto* const to = static_cast<float*>(const_cast<void*>(p.out.data)) + at;
      const float columns[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (col + i < p.head_dim_v) ptx::st_global(to + i * p.out.col_stride, columns[i]);
    } else {
      store_halves(p, col, at, values);
    }
  }

  FOVEA_DEVICE_MEMBER void store_halves(const CombineParams& p, int col, std::int64_t at,
                                        const ptx::F32x4& values) const {
    auto* const to = static_cast<std::uint16_t*>(const_cast<void*>(p.out.data)) + at;
    const std::uint32_t lo = pack(values.x, values.y), hi = pack(values.z, values.w);
    const bool is_whole = col + 4 <= p.head_dim_v && p.out.col_stride == 1;
    if (is_whole && reinterpret_cast<std::uint64_t>(to) % 8 == 0) {
      ptx::st_global(reinterpret_cast<ptx::U32x2*>(to), ptx::U32x2{lo, hi});
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i >= p.head_dim_v) return;
      ptx::st_global(to + i * p.out.col_stride,
                     static_cast<std::uint16_t>((i < 2 ? lo : hi) >> (i % 2 * 16)));
    }
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
                     is_nan(greatest) ? greatest : finish_row_max(greatest, sum, 1.0F));
    }
  }

 private:
  FOVEA_DEVICE std::uint32_t pack(float lo, float hi) {
    return spec.out_element == Element::bf16 ? ptx::cvt_bf16x2(lo, hi) : ptx::cvt_f16x2(lo, hi);
  }
};

/// kAtOnce: splits whose sums are on their way.
template <CombineSpec spec, int kAtOnce>
struct Combine {
  static_assert(kAtOnce % kCombineSums == 0, "which sum a split goes to does not depend on it");
  static_assert(ptx::kWarpLanes % kAtOnce == 0, "their weights are all low or all high");
  static constexpr bool kFolds = spec.has_groups && !spec.are_folded;
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
    lse_ = load_splits(p.partial_lse + row.row * p.max_splits, row.count, -infinity());
    // All lanes, with columns or without: each knows the weights of two splits.
    for (int first = 0; first < p.partial_width; first += kCombineCols) {
      const int col = first + 4 * ptx::lane_idx();
      const ptx::F32x4 sum = join(col, first == 0);
      if (col < p.head_dim_v)
        row.store(p, col, {scaled(sum.x), scaled(sum.y), scaled(sum.z), scaled(sum.w)});
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
      const auto split = static_cast<std::uint32_t>(least(first + i, row.count - 1));
      parts.part[i] = ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(
          from + std::uint64_t{split} * std::uint64_t{row_bytes}));
    }
    return parts;
  }

  /// Weights, and what sums are multiplied by at the end; writes lse and row_max.
  FOVEA_DEVICE_MEMBER void weigh() {
    if constexpr (kFolds)
      if (row.group_size > 1) fold_lse();
    const float top = warp_max(ptx::max_ftz(lse_.low, lse_.high));
    weights_ = {weight_of(lse_.low, top), weight_of(lse_.high, top)};
    if (is_huge(top)) weigh_maxima(top);
    const float sum = warp_sum(weights_.low + weights_.high);
    const RowResult result = finish_row({top, sum}, 1.0F, sink_);
    SplitValues parts{};
    if constexpr (spec.wants_row_max) parts = besides(-infinity());
    row.store_row_values(p, lse_, parts, result.lse, sum);
    factor_ = result.factor;
  }

  /// Where lse is the maximum itself, those that have it count by their sums; all others have weight 0 already.
  FOVEA_DEVICE_MEMBER void weigh_maxima(float top) {
    const SplitValues log_sums = besides(0);
    if (lse_.low == top) weights_.low = ptx::ex2_approx_ftz(log_sums.low * kLog2E);
    if (lse_.high == top) weights_.high = ptx::ex2_approx_ftz(log_sums.high * kLog2E);
  }

  /// What partial states have beside lse, which of most nobody asks.
  FOVEA_DEVICE_MEMBER SplitValues besides(float otherwise) const {
    if constexpr (kFolds)
      if (row.group_size > 1) return {beside_group_, otherwise};
    return load_splits(p.partial_max + row.row * p.max_splits, row.count, otherwise);
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
      beside = load_splits(p.partial_max + row.row * p.max_splits, row.count, -infinity()).low;
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

  /// Of the lane, or of any where there is no such lane.
  FOVEA_DEVICE_MEMBER static float of_lane(float x, int lane) {
    return ptx::shfl_idx(x, lane & (ptx::kWarpLanes - 1));
  }

  FOVEA_DEVICE_MEMBER FoldStep step_of(int split) const {
    return {ptx::shfl_idx(step_.kept, split), ptx::shfl_idx(step_.added, split),
            ptx::shfl_idx(step_.is_seen ? 1 : 0, split) != 0};
  }

  /// The next split onto the sums of its group, and where that ends, they onto `sum`. Lanes behind the last split have
  /// a step that changes nothing.
  FOVEA_DEVICE_MEMBER void fold_part(ptx::F32x4& group, ptx::F32x4& sum, int split,
                                     const ptx::F32x4& part) const {
    const float kept = ptx::shfl_idx(step_.kept, split), added = ptx::shfl_idx(step_.added, split);
    group = fold_finite(group, {kept, added}, part);
    if (split % kSplitsOfGroup != kSplitsOfGroup - 1) return;
    add(sum, ptx::shfl_idx(weights_.low, split / kSplitsOfGroup),
        times(group, ptx::shfl_idx(group_factor_, split)));
    group = {0, 0, 0, 0};
  }

  FOVEA_DEVICE_MEMBER static ptx::F32x4 times(const ptx::F32x4& sums, float factor) {
    return {sums.x * factor, sums.y * factor, sums.z * factor, sums.w * factor};
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
    ptx::F32x4 sums[kCombineSums] = {};
    const bool folds = kFolds && row.group_size > 1;
    if (folds) {
      join_groups(sums, col, has_no_weights);
    } else {
      join_states(sums, col, has_no_weights);
    }
    ptx::F32x4 all = total(sums);
    if (folds && ptx::vote_any(!(is_finite(all.x) && is_finite(all.y) && is_finite(all.z) &&
                                 is_finite(all.w))))
      all = join_non_finite_groups(col);
    return ptx::vote_any(is_faint(weights_.low, lse_.low) || is_faint(weights_.high, lse_.high))
               ? with_faint_states(all, col)
               : all;
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

  /// Group g goes to sum g % kCombineSums, as it would if it came folded.
  FOVEA_DEVICE_MEMBER void join_groups(ptx::F32x4 (&sums)[kCombineSums], int col,
                                       bool has_no_weights) {
    constexpr int kGroupsAtOnce = kAtOnce / kSplitsOfGroup;
    static_assert(kGroupsAtOnce == 2 || kGroupsAtOnce == kCombineSums);
    ptx::F32x4 group{0, 0, 0, 0};
    int first = 0;
#pragma unroll 1
    for (; first < row.count; first += kAtOnce) {
      const Parts parts = load(first, col);
      if (first == 0 && has_no_weights) weigh();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        fold_part(group, sums[i / kSplitsOfGroup], first + i, parts.part[i]);
      if constexpr (kGroupsAtOnce == 2) swap_pairs(sums);
    }
    if (kGroupsAtOnce == 2 && first / kAtOnce % 2 != 0) swap_pairs(sums);
  }

  /// Once more, where infinity or NaN may be that of a split which weighs nothing in its group.
  FOVEA_DEVICE_MEMBER ptx::F32x4 join_non_finite_groups(int col) const {
    ptx::F32x4 sums[kCombineSums] = {};
    const int num_groups = (row.count + kSplitsOfGroup - 1) / kSplitsOfGroup;
#pragma unroll 1
    for (int first = 0; first < num_groups; first += kCombineSums) {
#pragma unroll
      for (int i = 0; i < kCombineSums; ++i) {
        const int group = least(first + i, num_groups - 1);
        add(sums[i], first + i == group ? ptx::shfl_idx(weights_.low, group) : 0.0F,
            sums_of(group, col));
      }
    }
    return total(sums);
  }

  FOVEA_DEVICE_MEMBER static void swap_pairs(ptx::F32x4 (&sums)[kCombineSums]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const ptx::F32x4 other = sums[i];
      sums[i] = sums[i + 2];
      sums[i + 2] = other;
    }
  }

  /// Did a state see keys, none of which weigh anything beside those of others?
  FOVEA_DEVICE_MEMBER static bool is_faint(float weight, float lse) {
    return weight == 0 && lse != -infinity();
  }

  /// Its infinity and NaN count all the same.
  FOVEA_DEVICE_MEMBER ptx::F32x4 with_faint_states(ptx::F32x4 sum, int col) const {
    const int size = kFolds ? row.group_size : 1;
#pragma unroll 1
    for (int state = 0; state * size < row.count; ++state) {
      const bool is_low = state < ptx::kWarpLanes;
      const int lane = state % ptx::kWarpLanes;
      const float weight = ptx::shfl_idx(is_low ? weights_.low : weights_.high, lane);
      const float lse = ptx::shfl_idx(is_low ? lse_.low : lse_.high, lane);
      if (is_faint(weight, lse)) sum = with_non_finite(sum, sums_of(state, col));
    }
    return sum;
  }

  /// Of a split; or of a group, folded once more.
  FOVEA_DEVICE_MEMBER ptx::F32x4 sums_of(int state, int col) const {
    const int own_col = col < p.partial_width ? col : 0;
    const auto of_split = [&](int split) {
      return ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(row.sums(p, split) + own_col));
    };
    if (!kFolds || row.group_size == 1) return of_split(state);
    ptx::F32x4 group{0, 0, 0, 0}, sums{0, 0, 0, 0};
#pragma unroll 1
    for (int split = state * kSplitsOfGroup; split < least((state + 1) * kSplitsOfGroup, row.count);
         ++split) {
      group = fold(group, step_of(split), of_split(split));
    }
    return times(group, ptx::shfl_idx(group_factor_, (state + 1) * kSplitsOfGroup - 1));
  }

  /// Beside a large sink too, infinity stays.
  FOVEA_DEVICE_MEMBER float scaled(float sum) const {
    return factor_ == 0.0F && !is_finite(sum) ? sum : sum * factor_;
  }

  SplitValues lse_{}, weights_{};     // of partial states; of groups, where these are folded here
  FoldStep step_{1.0F, 0.0F, false};  // of the lane's split
  float group_factor_ = 0, beside_group_ = 0;
  float sink_ = 0, factor_ = 0;
};

/// A row of each warp of a CTA.
template <CombineSpec spec, int kAtOnce>
FOVEA_DEVICE void combine(const CombineParams& p) {
  Combine<spec, kAtOnce> mine(p);
  mine.row.find(p, std::int64_t{ptx::block_idx().x} * (ptx::block_dim().x / ptx::kWarpLanes) +
                       ptx::warp_idx());
  if (mine.row.count == 0) return;
  mine.look_up_sink();
  if constexpr (spec.is_chained) ptx::griddepcontrol_wait();
  mine.run();
}

}  // namespace fovea::cuda
