// Gradients of what a score program captures: biases, tables, slopes, temperatures.
//
//   dcaptured[e] = Σ dS · d score / d captured[e]     over the pairs (query, key) whose load reads element e
//   dS = P (dP - delta)
//
// S and dP are computed again, as sm80/attention_backward.cuh has them, so that dq, dk and dv stay with whichever
// kernel runs them. Who adds to an element depends on an index formula, and nearly always neighbours load one element:
// a slope is one for a whole head, a table by distance has one element for each diagonal. So products go through shared
// memory, and each thread walks along a line of the tile, a row, a column or a diagonal, whichever the formula runs
// along. It adds in a register while the element stays the same, from tile to tile too, and to memory when it changes:
//
//   a CTA   | K V of tile 0 | S dP to shared | K V of tile 1 on their way | lines of tile 0 | S dP | ...
//   lines   | slope: a sum for each thread | table by distance: two for each tile and thread | key bias: one
//
// Sums in memory are exact (common/exact_sum.cuh), so atomics leave no trace in the bits. Sums in registers have a
// fixed order, whoever is first.
//
// A dense bias has an element for each (q_idx, kv_idx) and gains nothing from lines: 104 bytes of an exact sum would
// stand behind 2 of it. captured_tiles has a CTA for each tile of it instead, which meets every sequence and head that
// adds to the tile one after the other, and stores it once.
//
// captured_deltas: a formula that multiplies what it captures gives every term of a row the error of the row's delta,
// by factors that may have a sign in common. Where out was rounded, delta = Σ P dP is summed again, from these P and
// dP.
//
// Bound: the instructions of a pair in a line, some 40 to 60 with exp2 and a short formula: 10 to 15 clocks of an SM
// for each 32 pairs; two products of head_dim 128 take half as long.
// docs/kernels/captured_gradients.md counts.
//
// Chapters, in captured/: products.cuh, pairs.cuh; the walks and entries are here.
#pragma once

#include "common/backward_work.cuh"
#include "common/element.cuh"
#include "common/exact_sum.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"
#include "sm80/captured/pairs.cuh"

namespace fovea::cuda::sm80 {

/// Every tile of keys that the owned queries see, in its order: visit(tile), while the next keys are on their way.
template <CapturedSpec spec, class Mods, class Visit>
FOVEA_DEVICE void walk_tiles(const CapturedPairs<spec, Mods>& pairs, Visit&& visit) {
  OwnerWalk<Mods, false> tiles(pairs.p, pairs.owned, spec.tile_owned, spec.tile_walked);
  pairs.products.load_queries();
  WalkedTile tile = tiles.next();
  pairs.products.load_keys(tile);
#pragma unroll 1
  while (tile.idx >= 0) {
    pairs.products.wait();
    pairs.products.multiply();
    ptx::sync_threads();
    const WalkedTile next = tiles.next();
    pairs.products.load_keys(next);
    visit(tile);
    tile = next;
  }
  pairs.products.wait();
}

// ---- sums ----------------------------------------------------------------------------------------

/// The sum of what one thread adds to one element without a break.
class Run {
 public:
  FOVEA_DEVICE_MEMBER void add(ExactSum* sums, std::int64_t element, float value) {
    if (element != element_) {
      flush(sums);
      element_ = element;
    }
    of_tile_ += value;
  }

  FOVEA_DEVICE_MEMBER void end_tile() {
    sum_ += of_tile_;
    of_tile_ = 0;
  }

  FOVEA_DEVICE_MEMBER void flush(ExactSum* sums) {
    end_tile();
    if (element_ >= 0 && sum_ != 0) add_exactly(sums + element_, sum_);
    sum_ = 0;
  }

  /// By all lanes of a warp: as one, where they have one element.
  FOVEA_DEVICE_MEMBER void finish(ExactSum* sums) {
    end_tile();
    const auto low = static_cast<std::int32_t>(element_);
    const auto high = static_cast<std::int32_t>(element_ >> 32);
    const std::int32_t first_low = ptx::shfl_idx(low, 0), first_high = ptx::shfl_idx(high, 0);
    if (ptx::vote_all(low == first_low && high == first_high)) {
      sum_ = warp_sum(static_cast<float>(sum_));
      if (ptx::lane_idx() != 0) return;
    }
    flush(sums);
  }

 private:
  std::int64_t element_ = -1;
  float of_tile_ = 0;
  double sum_ = 0;  // a row of 10^5 keys loses no digits
};

template <CapturedSpec spec, class Mods>
struct SiteSums {
  const CapturedParams& c;
  const CapturedPairs<spec, Mods> pairs;
  Run runs[Mods::num_sites];

  FOVEA_DEVICE_MEMBER SiteSums(const CapturedParams& params, const OwnedTile& tile)
      : c(params), pairs(params.call, tile) {}

  FOVEA_DEVICE_MEMBER ExactSum* sums_of(int site) const {
    return c.sums + c.first_sum[Mods::site_gradient[site]];
  }

  template <PairOrder order>
  FOVEA_DEVICE_MEMBER static constexpr bool has_sites() {
    for (int site = 0; site < Mods::num_sites; ++site)
      if (Mods::site_order[site] == order) return true;
    return false;
  }

  /// Of the sites of this order, from `site` on.
  template <PairOrder order, int site = 0>
  FOVEA_DEVICE_MEMBER void add(const typename CapturedPairs<spec, Mods>::Gradient& pair,
                               float gradient) {
    if constexpr (site < Mods::num_sites) {
      if constexpr (Mods::site_order[site] == order) {
        const Captures& captures = pairs.p.captures;
        const float slope = Mods::site_slope(SiteIdx<site>(), pair.scaled, pair.at, captures);
        runs[site].add(sums_of(site),
                       Mods::site_element(SiteIdx<site>(), pair.scaled, pair.at, captures),
                       gradient * slope);
      }
      add<order, site + 1>(pair, gradient);
    }
  }

  template <PairOrder order>
  FOVEA_DEVICE_MEMBER void walk_lines(const WalkedTile& tile) {
    if constexpr (has_sites<order>()) {
#pragma unroll 2
      for (int step = 0; step < CapturedPairs<spec, Mods>::kSteps; ++step) {
        const PlaceInTile place = place_in_tile<spec, order>(pairs.thread, step);
        const auto pair = pairs.find(tile, place);
        const float gradient = pairs.gradient_of(pair, place);
        // The slope of what has no gradient may be anything.
        if (gradient != 0) add<order>(pair, gradient);
      }
    }
  }

  FOVEA_DEVICE_MEMBER void run() {
    walk_tiles(pairs, [this](const WalkedTile& tile) {
      walk_lines<PairOrder::rows>(tile);
      walk_lines<PairOrder::keys>(tile);
      walk_lines<PairOrder::diagonals>(tile);
#pragma unroll
      for (int site = 0; site < Mods::num_sites; ++site) runs[site].end_tile();
    });
#pragma unroll
    for (int site = 0; site < Mods::num_sites; ++site) runs[site].finish(sums_of(site));
  }
};

template <CapturedSpec spec, class Mods>
FOVEA_DEVICE void captured_sums(const CapturedParams& c) {
  const OwnedTile tile =
      find_tile<spec.is_varlen, false>(c.call, ptx::block_idx().x, spec.tile_owned);
  if (tile.is_nothing || tile.sequence.is_trailing) return;
  SiteSums<spec, Mods>(c, tile).run();
}

// ---- delta, summed again -------------------------------------------------------------------------

template <CapturedSpec spec, class Mods>
struct DeltasAgain {
  using Pairs = CapturedPairs<spec, Mods>;
  const Pairs pairs;

  FOVEA_DEVICE_MEMBER float dlse_of(std::int32_t q_idx) const {
    const BackwardParams& b = pairs.b;
    const Sequence& s = pairs.owned.sequence;
    if (b.dlse == nullptr) return 0;
    return ptx::ld_global(b.dlse + s.q_batch * b.dlse_batch_stride +
                          pairs.owned.head * b.dlse_head_stride +
                          (s.q_row + q_idx) * b.dlse_row_stride);
  }

  /// Threads of a row leave what they have for the first of them.
  FOVEA_DEVICE_MEMBER void store(float mine) const {
    const ptx::SharedAddress parts = pairs.smem + Pairs::Layout::kScoresAt;
    ptx::st_shared(parts + 4 * pairs.thread, mine);
    ptx::sync_threads();
    const OwnedTile& owned = pairs.owned;
    const std::int32_t q_idx = owned.begin + pairs.thread;
    if (pairs.thread >= spec.tile_owned || q_idx >= owned.sequence.seqlen_q) return;
    float sum = 0;
    for (int at = pairs.thread; at < Pairs::Layout::kThreads; at += spec.tile_owned)
      sum += ptx::ld_shared<float>(parts + 4 * at);
    const RowStatistics& rows = pairs.b.rows;
    ptx::st_global(
        rows.delta + statistics_at<spec.is_varlen>(rows, owned.sequence, owned.head) + q_idx,
        sum - dlse_of(q_idx));
  }

  FOVEA_DEVICE_MEMBER void run() const {
    double sum = 0;
    walk_tiles(pairs, [&](const WalkedTile& tile) {
      float of_tile = 0;
#pragma unroll 2
      for (int step = 0; step < Pairs::kSteps; ++step) {
        const auto pair =
            pairs.find(tile, place_in_tile<spec, PairOrder::rows>(pairs.thread, step));
        if (pair.is_visible) of_tile = ptx::fma_rn(pair.weight, pair.dweight, of_tile);
      }
      sum += of_tile;
    });
    store(static_cast<float>(sum));
  }
};

template <CapturedSpec spec, class Mods>
FOVEA_DEVICE void captured_deltas(const CapturedParams& c) {
  const OwnedTile tile =
      find_tile<spec.is_varlen, false>(c.call, ptx::block_idx().x, spec.tile_owned);
  if (tile.is_nothing || tile.sequence.is_trailing) return;
  DeltasAgain<spec, Mods>{{c.call, tile}}.run();
}

// ---- tiles of a dense bias -----------------------------------------------------------------------

template <CapturedSpec spec, class Mods>
struct DenseTile {
  using Pairs = CapturedPairs<spec, Mods>;
  const CapturedParams& c;
  const std::int32_t q_tile, kv_tile, batch_place, head_place;
  float sums[Pairs::kSteps];

  FOVEA_DEVICE_MEMBER static DenseTile from_cta(const CapturedParams& c) {
    const std::int32_t kv_tiles = ceil_div(c.dense.num_kv, spec.tile_walked);
    const std::int32_t q_tiles = ceil_div(c.dense.num_q, spec.tile_owned);
    const std::int32_t id = ptx::block_idx().x;
    const std::int32_t place = id / kv_tiles / q_tiles;
    return {c, id / kv_tiles % q_tiles, id % kv_tiles, place / c.dense.num_heads,
            place % c.dense.num_heads};
  }

  FOVEA_DEVICE_MEMBER Sequence sequence(std::int32_t idx) const {
    const ForwardParams& p = c.call.forward;
    if constexpr (!spec.is_varlen) return {idx, idx, 0, idx, 0, p.seqlen_q, p.seqlen_kv, false};
    const PackedRows q = packed_rows(p.cu_seqlens_q, idx, p.total_q);
    const PackedRows kv = packed_rows(p.cu_seqlens_kv, idx, p.total_kv);
    return {idx, 0, q.begin, 0, kv.begin, q.count, kv.count, false};
  }

  /// What is proven of the tile in one sequence and head; beyond the lengths nothing is there to be seen.
  FOVEA_DEVICE_MEMBER TileKind kind(const Sequence& s, std::int32_t q_head) const {
    const ForwardParams& p = c.call.forward;
    const std::int32_t q = q_tile * spec.tile_owned, kv = kv_tile * spec.tile_walked;
    if (q >= s.seqlen_q || kv >= s.seqlen_kv) return TileKind::empty;
    return Mods::tile_kind(
        TileSpan{s.idx, q_head, q_head + 1, q_head / p.group, q,
                 least(q + spec.tile_owned, s.seqlen_q), kv,
                 least(kv + spec.tile_walked, s.seqlen_kv), s.seqlen_q, s.seqlen_kv},
        p.captures);
  }

  FOVEA_DEVICE_MEMBER void add(const Sequence& s, std::int32_t q_head, bool is_full) {
    const Pairs pairs(c.call, {s, q_tile * spec.tile_owned, q_head, false});
    const WalkedTile tile{kv_tile, q_head, is_full};
    pairs.products.load_queries();
    pairs.products.load_keys(tile);
    pairs.products.wait();
    pairs.products.multiply();
    ptx::sync_threads();
#pragma unroll
    for (int step = 0; step < Pairs::kSteps; ++step) {
      const PlaceInTile place = place_in_tile<spec, PairOrder::keys>(pairs.thread, step);
      const auto pair = pairs.find(tile, place);
      const float gradient = pairs.gradient_of(pair, place);
      if (gradient != 0)
        sums[step] += gradient *
                      Mods::site_slope(SiteIdx<0>(), pair.scaled, pair.at, c.call.forward.captures);
    }
    ptx::sync_threads();
  }

  FOVEA_DEVICE_MEMBER void store() const {
    const DenseGradient& to = c.dense;
    const std::int64_t first = batch_place * to.batch_stride + head_place * to.head_stride;
#pragma unroll
    for (int step = 0; step < Pairs::kSteps; ++step) {
      const PlaceInTile place = place_in_tile<spec, PairOrder::keys>(ptx::thread_idx().x, step);
      const std::int32_t q_idx = q_tile * spec.tile_owned + place.row;
      const std::int32_t kv_idx = kv_tile * spec.tile_walked + place.key;
      if (q_idx < to.num_q && kv_idx < to.num_kv)
        store_element(to.data, to.element, first + q_idx * to.q_stride + kv_idx * to.kv_stride,
                      sums[step]);
    }
  }

  FOVEA_DEVICE_MEMBER void run() {
#pragma unroll
    for (int step = 0; step < Pairs::kSteps; ++step) sums[step] = 0;
    const DenseGradient& to = c.dense;
    const ForwardParams& p = c.call.forward;
    const std::int32_t first_idx = batch_place * to.sequences_per_place;
    const std::int32_t end_idx = least(first_idx + to.sequences_per_place, p.num_sequences);
    const std::int32_t first_head = head_place * to.q_heads_per_place;
    const std::int32_t end_head = least(first_head + to.q_heads_per_place, p.num_heads_q);
#pragma unroll 1
    for (std::int32_t idx = first_idx; idx < end_idx; ++idx) {
      const Sequence s = sequence(idx);
#pragma unroll 1
      for (std::int32_t head = first_head; head < end_head; ++head) {
        const TileKind kind = this->kind(s, head);
        if (kind != TileKind::empty) add(s, head, kind == TileKind::full);
      }
    }
    store();
  }
};

template <CapturedSpec spec, class Mods>
FOVEA_DEVICE void captured_tiles(const CapturedParams& c) {
  DenseTile<spec, Mods> tile = DenseTile<spec, Mods>::from_cta(c);
  tile.run();
}

}  // namespace fovea::cuda::sm80
