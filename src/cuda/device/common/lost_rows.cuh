// Rows that attention of eight bits has lost, once more: those whose scores are so large that the arithmetic of its
// loops, f32 and one fma for each score, does not hold them (common/code_units.cuh). A kernel behind it, so that
// nothing of this stands in its loops. Where no row is lost it reads one word, or the scale of each row, and ends.
//
//   s_j = (code_i · code_j) scale_i scale_g  in f64, less q · μ      P_j = 2^(s_j - m), in f32, or its code of e4m3
//
// The same codes, the same recipe; what f64 holds exactly needs neither origins nor rebased scores. A warp takes a row,
// and goes through its keys twice: for the greatest score, then for the sums. A lane has the score of one key of 32;
// beside a program, that of its natural score, which is rounded to f32 as programs read it. Values that are not finite
// are added as they are (common/passes.cuh).
//
// Bound: none that was worth working against. Every key is looked at, those that a mask hides too, and no code is
// shared by rows.
#pragma once

#include "common/bits.cuh"
#include "common/cache_tiles.cuh"
#include "common/code_units.cuh"
#include "common/coded_softmax.cuh"
#include "common/codes.cuh"
#include "common/dropout.cuh"
#include "common/element.cuh"
#include "common/element_pair.cuh"
#include "common/given_product.cuh"
#include "common/hadamard.cuh"
#include "common/lost_row_notes.cuh"
#include "common/online_softmax.cuh"
#include "common/passes.cuh"
#include "common/round_to_codes.cuh"
#include "common/row_view.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/lost_rows.h"
#include "shared/quantize_v.h"

namespace fovea::cuda {

/// Of a packed row, in each lane. Offsets that decrease give some sequence.
FOVEA_DEVICE std::int32_t sequence_of_row(const ForwardParams& p, std::int64_t row) {
  std::int32_t first = 0, end = p.num_sequences;
  while (end - first > 1) {
    const std::int32_t middle = first + (end - first) / 2;
    (index_at(p.cu_seqlens_q, middle) <= row ? first : end) = middle;
  }
  return first;
}

/// The sequence, head and query of the row of this number.
template <LostRowsSpec spec>
FOVEA_DEVICE Work work_of_row(const ForwardParams& p, std::int64_t number) {
  constexpr bool kIsPacked = kCountsPackedRows<spec>;
  const std::int64_t rows_of_list = kIsPacked ? p.total_q : p.seqlen_q;
  const std::int64_t list = number / rows_of_list, row = number - list * rows_of_list;
  Work work{};
  work.q_head = static_cast<std::int32_t>(kIsPacked ? list : list % p.num_heads_q);
  work.kv_head = work.q_head / p.group;
  Sequence& s = work.sequence;
  if constexpr (kIsPacked) {
    s.idx = sequence_of_row(p, row);
    const PackedRows queries = packed_rows(p.cu_seqlens_q, s.idx, p.total_q);
    s.q_row = queries.begin;
    s.seqlen_q = queries.count;
    if constexpr (spec.is_cached) {
      s.kv_batch = s.idx;
      find_keys<spec>(p, s);
    } else {
      const PackedRows keys = packed_rows(p.cu_seqlens_kv, s.idx, p.total_kv);
      s.kv_row = keys.begin;
      s.seqlen_kv = keys.count;
    }
  } else {
    s = dense_sequence<spec>(p, static_cast<std::int32_t>(list / p.num_heads_q));
  }
  work.q_begin = static_cast<std::int32_t>(row - s.q_row);
  return work;
}

inline constexpr double kLog2EInF64 = 0x1.71547652b82fep+0;
inline constexpr double kLn2InF64 = 0x1.62e42fefa39efp-1;

FOVEA_DEVICE double shfl_bfly_f64(double x, std::int32_t mask) {
  const auto words = ptx::bit_cast<ptx::U32x2>(x);
  return ptx::bit_cast<double>(
      ptx::U32x2{ptx::shfl_bfly(words.x, mask), ptx::shfl_bfly(words.y, mask)});
}

/// NaN is passed over.
FOVEA_DEVICE double warp_max_f64(double x) {
#pragma unroll
  for (int mask = 1; mask < ptx::kWarpLanes; mask *= 2) {
    const double other = shfl_bfly_f64(x, mask);
    x = other > x ? other : x;
  }
  return x;
}

/// Nearest, of any size.
FOVEA_DEVICE double whole_octave(double x) {
  constexpr double kOrigin = 0x1.8p52;
  return x > -0x1p51 && x < 0x1p51 ? (x + kOrigin) - kOrigin : x;
}

template <LostRowsSpec spec, class Mods>
class LostRow {
 public:
  FOVEA_DEVICE_MEMBER LostRow(const LostRowsParams& p, const Work& work)
      : p_(p), call_(p.call), work_(work), row_(p.call, work, 0) {
    find_codes();
    if constexpr (spec.has_query_codes) {
      read_query();
    } else {
      round_query();
    }
  }

  FOVEA_DEVICE_MEMBER void run() {
    const std::int32_t seqlen_kv = work_.sequence.seqlen_kv;
    double top = kNothing;
    bool is_nan = false;
#pragma unroll 1
    for (std::int32_t first = 0; first < seqlen_kv; first += kKeys) {
      const double score = score_of(first);
      if (score > top) top = score;
      is_nan = is_nan || !(score < kEverything);
    }
    top_ = warp_max_f64(top);
    // Of codes what has code 1; of others what has 1.
    if (top_ > kNothing) reference_ = kSumsCodes ? whole_octave(top_ - kHeadroom) : top_;
#pragma unroll 1
    for (std::int32_t first = 0; first < seqlen_kv; first += kKeys) add_keys(first);
    sum_ = ptx::vote_any(is_nan) ? quiet_nan() : warp_sum(sum_);
    store();
  }

 private:
  static constexpr int kKeys = 32;                     // a lane's each
  static constexpr int kLanes = spec.head_dim_qk / 8;  // of a row of codes: eight each
  static constexpr int kRows = 32 / kLanes;            // that a warp multiplies at once
  static_assert(kLanes == 8 || kLanes == 16);
  static constexpr int kColumns = (spec.head_dim_v + 31) / 32;  // of a lane, 32 apart
  static constexpr bool kSumsCodes = spec.sums_codes;
  using Coded = CodedRows<kQuantizedTile, 64, false>;
  static constexpr double kHeadroom = Coded::kHeadroom;
  static constexpr double kNothing = -0x1.fffffffffffffp1023, kEverything = 0x1p1000;

  // ---- where codes are ----

  FOVEA_DEVICE_MEMBER void find_codes() {
    const Sequence& s = work_.sequence;
    const QuantizeKParams& k = p_.rounded.k;
    constexpr bool kIsPacked = spec.is_varlen && !spec.is_cached;
    const std::int64_t pair =
        (kIsPacked ? 0 : std::int64_t{s.idx}) * call_.num_heads_kv + work_.kv_head;
    first_tile_ = pair * k.beside.num_tiles;
    if constexpr (kIsPacked) {
      first_tile_ += first_packed_tile(s.idx, s.kv_row);
      first_row_ = work_.kv_head * call_.total_kv + s.kv_row;
    } else {
      first_row_ = pair * call_.seqlen_kv;
    }
  }

  FOVEA_DEVICE_MEMBER int octet() const { return ptx::lane_idx() % kLanes; }
  FOVEA_DEVICE_MEMBER std::int64_t mean_of_head() const {
    return std::int64_t{work_.sequence.idx} * call_.num_heads_kv + work_.kv_head;
  }

  // ---- the query ----

  FOVEA_DEVICE_MEMBER void read_query() {
    const QuantizeQParams& q = p_.rounded.q;
    const Sequence& s = work_.sequence;
    const std::int64_t at = s.q_batch * q.beside.batch_stride + row_.q_head * q.beside.head_stride +
                            s.q_row + row_.q_idx;
    const auto beside = ptx::ld_global(q.beside.rows + at);
    take_codes(ptx::ld_global(reinterpret_cast<const ptx::U32x2*>(q.codes + at * spec.head_dim_qk +
                                                                  8 * octet())),
               beside.scale, beside.of_mean);
  }

  /// As sm90/forward/query_codes.cuh does.
  FOVEA_DEVICE_MEMBER void round_query() {
    const bool exists = 8 * octet() < call_.head_dim_qk;  // Hopper's head dims are multiples of 8
    ptx::U32x4 chunk{};
    if (exists) {
      chunk = ptx::ld_global(reinterpret_cast<const ptx::U32x4*>(
          static_cast<const std::uint16_t*>(call_.q.data) + given_query_at() + 8 * octet()));
    }
    const bool is_given = ptx::vote_any(has_nonfinite<spec.element>(chunk));
    EightNumbers x;
    unpack<spec.element>(chunk, x);
    const float* const mean =
        p_.rounded.k.beside.mean + 8 * octet() +
        mean_of_head() * key_mean_floats(spec.head_dim_qk, reads_greatest_scale(spec));
    double of_mean = 0;
#pragma unroll
    for (int d = 0; d < 8; ++d)
      of_mean += static_cast<double>(x[d]) * static_cast<double>(ptx::ld_global(mean + d));
#pragma unroll
    for (int apart = 1; apart < kLanes; apart *= 2) of_mean += shfl_bfly_f64(of_mean, apart);
    if constexpr (spec.rotates) rotate<kLanes>(p_.rounded.k.beside.rotation, octet(), x);
    float greatest = greatest_of(x);
#pragma unroll
    for (int apart = 1; apart < kLanes; apart *= 2)
      greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, apart));
    const float scale = scale_of_codes(greatest);
    take_codes(codes_of(x, ptx::div_rn(1.0F, scale)), is_given ? 0.0F : scale,
               is_given ? 0.0 : of_mean);
  }

  FOVEA_DEVICE_MEMBER void take_codes(const ptx::U32x2& codes, float scale, double of_mean) {
    unpack_codes(codes, 1.0F, query_);
    scale_ = scale;
    of_mean_ = of_mean;
  }

  // ---- scores: logarithms to base 2, less what the row's keys have in common ----

  FOVEA_DEVICE_MEMBER double common_part() const {
    return of_mean_ * static_cast<double>(call_.softmax_scale) * kLog2EInF64;
  }

  /// Of this lane's key; kNothing where the row does not see it.
  FOVEA_DEVICE_MEMBER double score_of(std::int32_t first) const {
    const std::int32_t key = first + ptx::lane_idx();
    double product = product_of_codes(first) + of_mean_;
    if (key >= work_.sequence.seqlen_kv) return kNothing;
    Position at = row_.position();
    at.kv_idx = key;
    if constexpr (Mods::has_mask) {
      if (!Mods::mask(at, call_.captures)) return kNothing;
    }
    if (scale_ == 0.0F || is_unrounded(key)) product = static_cast<double>(given(key));
    double natural = product * static_cast<double>(call_.softmax_scale);
    if constexpr (Mods::has_score) {
      const float score = Mods::score(static_cast<float>(natural), at, call_.captures);
      if (score == -infinity()) return kNothing;
      natural = static_cast<double>(score);
    }
    if (natural == static_cast<double>(-infinity())) return kNothing;
    return natural * kLog2EInF64 - common_part();
  }

  /// Sums of products of codes are below 2^24, so f32 holds them. Each kLanes lanes multiply a key; a lane keeps that
  /// of its own.
  FOVEA_DEVICE_MEMBER double product_of_codes(std::int32_t first) const {
    const int lane = ptx::lane_idx();
    const std::int32_t last = work_.sequence.seqlen_kv - 1;
    float mine = 0.0F;
#pragma unroll 4
    for (int step = 0; step < kLanes; ++step) {
      const std::int32_t key = least(first + step * kRows + lane / kLanes, last);
      EightNumbers codes;
      unpack_codes(ptx::ld_global(reinterpret_cast<const ptx::U32x2*>(
                       p_.rounded.k.codes + (first_row_ + key) * spec.head_dim_qk + 8 * octet())),
                   1.0F, codes);
      float sum = 0.0F;
#pragma unroll
      for (int d = 0; d < 8; ++d) sum = ptx::fma_rn(query_[d], codes[d], sum);
#pragma unroll
      for (int apart = 1; apart < kLanes; apart *= 2) sum += ptx::shfl_bfly(sum, apart);
      sum = ptx::shfl_idx(sum, lane % kRows * kLanes);
      if (step == lane / kRows) mine = sum;
    }
    const std::int32_t key = least(first + lane, last);
    return static_cast<double>(mine) * static_cast<double>(scale_) *
           static_cast<double>(ptx::abs_ftz(beside(key).scale));
  }

  FOVEA_DEVICE_MEMBER QuantizedKeys beside(std::int32_t key) const {
    constexpr int kParts = kQuantizedTile / spec.scale_tile;
    const std::int64_t part =
        (first_tile_ + key / kQuantizedTile) * kParts + key % kQuantizedTile / spec.scale_tile;
    return ptx::ld_global(p_.rounded.k.beside.keys + part * kScalesOfTile + key % 8 / 2);
  }

  FOVEA_DEVICE_MEMBER bool is_unrounded(std::int32_t key) const {
    const int bit = key % spec.scale_tile / 8 * 2 + key % 2;
    return (beside(key).unrounded >> bit & 1U) != 0;
  }

  /// q · k of rows that are not both rounded.
  FOVEA_DEVICE_MEMBER float given(std::int32_t key) const {
    if constexpr (!spec.is_cached) {
      return given_product(row_, key, call_.q, call_.k, call_.head_dim_qk);
    } else {
      const auto cached = cached_row<spec.k_codes>(call_.k, p_.k_scale, key);
      const std::int64_t q_at = given_query_at();
      float sum = 0.0F;
#pragma unroll 1
      for (std::int32_t d = 0; d < call_.head_dim_qk; ++d)
        sum = ptx::fma_rn(load_element(call_.q.data, spec.element, q_at + d),
                          low_of<spec.element>(cached.bits(d)), sum);
      return sum;
    }
  }

  FOVEA_DEVICE_MEMBER std::int64_t given_query_at() const {
    const Sequence& s = work_.sequence;
    return s.q_batch * call_.q.batch_stride + (s.q_row + row_.q_idx) * call_.q.row_stride +
           row_.q_head * call_.q.head_stride;
  }

  template <Codes codes>
  FOVEA_DEVICE_MEMBER CacheRow<spec.element, codes> cached_row(const BshdParam& from,
                                                               const ScaleParam& scales,
                                                               std::int32_t key) const {
    return CacheRow<spec.element, codes>::of(from, scales,
                                             place_of_key<spec>(call_, work_.sequence, key),
                                             work_.sequence.idx, work_.kv_head);
  }

  // ---- sums ----

  /// Of 32 keys: a lane's probability, then all of them in each of its columns.
  FOVEA_DEVICE_MEMBER void add_keys(std::int32_t first) {
    const double score = score_of(first);
    const bool is_seen = score != kNothing;
    float weight = is_seen ? probability_of(score) : 0.0F;
    sum_ += weight;
    if (is_dropped_at(first + ptx::lane_idx())) weight = 0.0F;
    for (ptx::LaneMask seen = ptx::ballot(is_seen); seen != 0; seen &= seen - 1) {
      const int lane = lowest_bit(seen);
      const float of_key = ptx::shfl_idx(weight, lane);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const std::int32_t column = 32 * i + ptx::lane_idx();
        if (column < call_.head_dim_v)
          out_[i] = sum_with_seen(out_[i], of_key, value(first + lane, column));
      }
    }
  }

  /// exp(score), relative to the reference.
  FOVEA_DEVICE_MEMBER float probability_of(double score) const {
    const auto log2 = static_cast<float>(score - reference_);
    if constexpr (!kSumsCodes) return ptx::ex2_approx_ftz(log2);
    const float code = ptx::fma_rn(log2, kCodesOfOctave, kCodeOfOne);
    return numbers_of_e4m3(ptx::cvt_u8x4(code, 0.0F, 0.0F, 0.0F) & 0xffU, 1.0F).x[0];
  }

  FOVEA_DEVICE_MEMBER bool is_dropped_at(std::int32_t key) const {
    if constexpr (!spec.has_dropout) return false;
    return is_dropped(call_, dropout_key<spec>(call_), work_.sequence.idx, row_.q_head, row_.q_idx,
                      key);
  }

  FOVEA_DEVICE_MEMBER float value(std::int32_t key, std::int32_t column) const {
    const QuantizeVParams& v = p_.rounded.v;
    if constexpr (kSumsCodes) {
      const std::int64_t tile = first_tile_ + key / kQuantizedTile;
      const std::int32_t code =
          ptx::ld_global(v.codes + (tile * spec.head_dim_v + column) * kQuantizedTile +
                         byte_of_key(key % kQuantizedTile));
      if (code == kNanCode) return given_value(key, column);
      return numbers_of_e4m3(code, ptx::ld_global(v.beside.scales + tile)).x[0];
    } else if constexpr (spec.reads_numbers) {
      return load_element(v.numbers, spec.element, (first_row_ + key) * spec.head_dim_v + column);
    } else {
      return given_value(key, column);
    }
  }

  FOVEA_DEVICE_MEMBER float given_value(std::int32_t key, std::int32_t column) const {
    if constexpr (spec.is_cached) {
      return low_of<spec.element>(cached_row<spec.v_codes>(call_.v, p_.v_scale, key).bits(column));
    } else {
      const KvPlace place = place_of_key<spec>(call_, work_.sequence, key);
      return load_element(call_.v.data, spec.element,
                          place.in(call_.v, work_.kv_head) + column * call_.v.col_stride);
    }
  }

  // ---- the end ----

  FOVEA_DEVICE_MEMBER void store() const {
    const double reference = reference_ + common_part();
    const bool is_empty = sum_ == 0.0F;
    const float excess = kSumsCodes ? Coded::kLog2Excess : 0.0F;
    RowResult result{0.0F, -infinity()};
    if (!is_empty) {
      result.factor = ptx::rcp_approx_ftz(sum_);
      result.lse = static_cast<float>(
          kLn2InF64 * (reference + static_cast<double>(ptx::lg2_approx_ftz(sum_) - excess)));
    }
    if (call_.sinks != nullptr) {
      const float sink = ptx::ld_global(call_.sinks + row_.q_head * call_.sinks_stride);
      const RowResult beside_sink =
          is_empty ? RowResult{0.0F, sink} : with_sink(result.lse, 1.0F, sink);
      result = {is_empty ? 0.0F : result.factor * beside_sink.factor, beside_sink.lse};
    }
    if (ptx::lane_idx() == 0) {
      const float greatest =
          top_ > kNothing ? static_cast<float>(kLn2InF64 * (top_ + common_part())) : -infinity();
      row_.store_values(result.lse, sum_, finish_row_max(greatest, sum_, 1.0F));
    }
    store_out(result.factor);
  }

  FOVEA_DEVICE_MEMBER void store_out(float factor) const {
    const float kept = spec.has_dropout ? factor * call_.dropout_keep_scale : factor;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const std::int32_t column = 32 * i + ptx::lane_idx();
      if (column >= call_.head_dim_v) continue;
      float sum = out_[i];
      if constexpr (spec.smooths_v) {
        const float* const mean = p_.rounded.v.beside.mean + mean_of_head() * spec.head_dim_v;
        sum = ptx::fma_rn(sum_, ptx::ld_global(mean + column), sum);
      }
      store_element(const_cast<void*>(call_.out.data), spec.out_element,
                    row_.out_at() + column * call_.out.col_stride, scaled_sum(sum, kept));
    }
  }

  const LostRowsParams& p_;
  const ForwardParams& call_;
  const Work& work_;
  const RowView<spec> row_;
  std::int64_t first_tile_,
      first_row_;       // of the sequence's keys, among those of all that are codes
  EightNumbers query_;  // codes
  float scale_;         // 0: it is not rounded
  double of_mean_;      // q · μ
  double top_ = kNothing, reference_ = 0;
  float sum_ = 0.0F;
  float out_[kColumns] = {};
};

/// Whether attention has left scales of rows, and no notes.
template <LostRowsSpec spec>
inline constexpr bool kHasRowScales = !spec.has_query_codes && reads_greatest_scale(spec);

/// In each lane.
template <LostRowsSpec spec>
FOVEA_DEVICE bool is_lost_row(const LostRowsParams& p, std::int64_t number) {
  if constexpr (!kHasRowScales<spec>) return is_noted(p.notes, number);
  const Work work = work_of_row<spec>(p.call, number);
  const Sequence& s = work.sequence;
  if (work.q_begin >= s.seqlen_q || s.seqlen_kv == 0) return false;
  const auto scale = ptx::bit_cast<float>(ptx::ld_global(
      p.notes + place_of_row_scale<spec>(p.call, s.idx, s.q_row, work.q_head, work.q_begin)));
  const std::int64_t head = std::int64_t{s.idx} * p.call.num_heads_kv + work.kv_head;
  const float greatest = ptx::ld_global(
      p.rounded.k.beside.mean + head * key_mean_floats(spec.head_dim_qk, true) + spec.head_dim_qk);
  return is_far_row(scale * p.call.softmax_scale_log2, greatest);
}

/// A warp looks at rows that lie as many apart as there are warps, so that neighbours, which are lost together, are of
/// different ones.
template <LostRowsSpec spec, class Mods>
FOVEA_DEVICE void lost_rows(const LostRowsParams& p) {
  ptx::griddepcontrol_wait();
  if (!kHasRowScales<spec> && ptx::ld_global(p.notes) == 0) return;
  const std::int64_t num_warps = std::int64_t{ptx::grid_dim().x} * (kLostRowsThreads / 32);
  const std::int64_t warp =
      std::int64_t{ptx::block_idx().x} * (kLostRowsThreads / 32) + ptx::warp_idx();
#pragma unroll 1
  for (std::int64_t first = warp; first < p.num_rows; first += 32 * num_warps) {
    const std::int64_t mine = first + ptx::lane_idx() * num_warps;
    ptx::LaneMask lost = ptx::ballot(mine < p.num_rows && is_lost_row<spec>(p, mine));
#pragma unroll 1
    for (; lost != 0; lost &= lost - 1) {
      const Work work = work_of_row<spec>(p.call, first + lowest_bit(lost) * num_warps);
      // Where there are no keys nobody has waited for the notes to be cleared.
      if (work.q_begin < work.sequence.seqlen_q) LostRow<spec, Mods>(p, work).run();
    }
  }
}

}  // namespace fovea::cuda
