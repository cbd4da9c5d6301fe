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
// adds to the tile one after the other, and stores it once. Its products and sums stay in registers.
//
// Where another kernel has left dS, which is what such a bias gets, only tiles whose sum is not finite are computed
// here (dense_redo).
//
// captured_deltas: a formula that multiplies what it captures gives every term of a row the error of the row's delta,
// by factors that may have a sign in common. Where out was rounded, delta = Σ P dP is summed again, from these P and
// dP.
//
// Bound: the instructions of a pair in a line, some 40 to 60 with exp2 and a short formula: 10 to 15 clocks of an SM
// for each 32 pairs; two products of head_dim 128 take half as long.
// docs/kernels/captured_gradients.md counts.
//
// Chapters, in captured/: products.cuh, pairs.cuh, dense.cuh; the walks along lines and the entries are here.
#pragma once

#include "common/backward_work.cuh"
#include "common/element.cuh"
#include "common/exact_sum.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"
#include "sm80/captured/dense.cuh"
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

  /// To the sites of this order, from `site` on.
  template <PairOrder order, int site = 0>
  FOVEA_DEVICE_MEMBER void add(const CapturedPair& pair) {
    if constexpr (site < Mods::num_sites) {
      if constexpr (Mods::site_order[site] == order) {
        const Captures& captures = pairs.p.captures;
        const float slope = Mods::site_slope(SiteIdx<site>(), pair.scaled, pair.at, captures);
        runs[site].add(sums_of(site),
                       Mods::site_element(SiteIdx<site>(), pair.scaled, pair.at, captures),
                       pair.gradient * slope);
      }
      add<order, site + 1>(pair);
    }
  }

  template <PairOrder order>
  FOVEA_DEVICE_MEMBER void walk_lines(const WalkedTile& tile) {
    if constexpr (has_sites<order>()) {
      constexpr int kSteps = CapturedPairs<spec, Mods>::kSteps;
      constexpr int kAtOnce =
          kSteps < 4 ? kSteps : 4;  // what their programs read is on its way together
      static_assert(kSteps % kAtOnce == 0);
#pragma unroll 1
      for (int step = 0; step < kSteps; step += kAtOnce) {
        CapturedPair found[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          found[i] = pairs.find(tile, place_in_tile<spec, order>(pairs.thread, step + i));
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          // The slope of what has no gradient may be anything.
          if (found[i].gradient != 0) add<order>(found[i]);
        }
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
#pragma unroll 4
      for (int step = 0; step < Pairs::kSteps; ++step) {
        const auto pair =
            pairs.find(tile, place_in_tile<spec, PairOrder::rows>(pairs.thread, step));
        of_tile = ptx::fma_rn(pair.weight, pair.dweight, of_tile);
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
FOVEA_DEVICE void sum_dense_tile(const CapturedParams& c, std::int32_t id) {
  if constexpr (spec.multiplies_by_mma) {
    DenseMmaSums<spec, Mods>(c, id).run();
  } else {
    DensePlainSums<spec, Mods>(c, id).run();
  }
}

/// A CTA for each tile; or, where others have summed them (dense_redo), as many as the machine has room for.
template <CapturedSpec spec, class Mods>
FOVEA_DEVICE void captured_tiles(const CapturedParams& c) {
  const RedoTiles& redo = c.dense_redo;
  const auto num_ctas = static_cast<std::int32_t>(ptx::grid_dim().x);
  std::int32_t end = num_ctas;
  if (redo.tiles != nullptr) end = ptx::ld_global(redo.any) == 0 ? 0 : redo.num_owned;
#pragma unroll 1
  for (std::int32_t id = ptx::block_idx().x; id < end; id += num_ctas)
    if (redo.tiles == nullptr || ptx::ld_global(redo.tiles + id) != 0)
      sum_dense_tile<spec, Mods>(c, id);
}

}  // namespace fovea::cuda::sm80
