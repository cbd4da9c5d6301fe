// What a pair (query, key) has to say to what the program captures, and the orders in which the threads of a CTA take
// the pairs of a tile. Chapter 2 of sm80/captured_gradients.cuh.
#pragma once

#include "common/backward_work.cuh"
#include "common/dropout.cuh"
#include "common/position.cuh"
#include "common/program.cuh"
#include "sm80/captured/products.cuh"

namespace fovea::cuda::sm80 {

struct PlaceInTile {
  int row, key;
};

/// The place of a step of this thread. Threads divide the lines of a tile among them, several to a line where there are
/// more of them; in each step neighbours read neighbouring words of shared memory.
template <CapturedSpec spec, PairOrder order>
FOVEA_DEVICE PlaceInTile place_in_tile(int thread, int step) {
  constexpr int kThreads = spec.num_warps * 32;
  constexpr int kLines = order == PairOrder::rows ? spec.tile_owned : spec.tile_walked;
  static_assert(kThreads % kLines == 0, "every line has as many threads");
  constexpr int kSteps = spec.tile_owned * spec.tile_walked / kThreads;
  const int line = thread % kLines;
  const int along = thread / kLines * kSteps + step;
  if constexpr (order == PairOrder::rows) return {line, along};
  if constexpr (order == PairOrder::keys) return {along, line};
  return {along, (along + line) % spec.tile_walked};  // a diagonal goes on at the other edge
}

/// A pair as a gradient of captured data meets it.
struct CapturedPair {
  Position at;
  float scaled;  // q·k, what the program starts from
  // 0 where the query does not see the key, whatever it holds.
  float weight;    // P
  float dweight;   // dP of what dropout has kept
  float gradient;  // dS, by the score that the program made
};

/// What a pair's two products and its row make of it, without a branch: loads of many pairs are on their way at once. A
/// hidden pair's program runs, too, on whatever is there; its indices are clamped as all are.
template <class Mods>
FOVEA_DEVICE CapturedPair captured_pair(const ForwardParams& p, const Position& at, bool may_see,
                                        float product, float dweight, const RowStatistic& row) {
  const float scaled = product * p.softmax_scale;
  const float score = Mods::score(scaled, at, p.captures);
  const bool is_visible = may_see && score != -infinity();
  const float weight = weight_of<true>(score, row, kLog2E);
  if (!is_visible) return {at, scaled, 0, 0, 0};
  return {at, scaled, weight, dweight, weight * (dweight - row.delta)};
}

/// As far as its place says.
template <class Mods>
FOVEA_DEVICE bool may_see(const Position& at, bool is_full, const Captures& captures) {
  const bool exists = at.q_idx < at.seqlen_q && at.kv_idx < at.seqlen_kv;
  if constexpr (Mods::has_mask) return exists && (is_full || Mods::mask(at, captures));
  return exists;
}

template <CapturedSpec spec, class Mods>
struct CapturedPairs {
  using Products = typename ProductsOf<spec, Mods>::Type;
  using Layout = PairLayout<spec>;
  static constexpr int kSteps = spec.tile_owned * spec.tile_walked / Layout::kThreads;

  const BackwardParams& b;
  const ForwardParams& p;
  const OwnedTile owned;
  const std::int32_t kv_head;
  const ptx::SharedAddress smem;
  const int thread;
  const Products products;

  FOVEA_DEVICE_MEMBER CapturedPairs(const BackwardParams& params, const OwnedTile& tile)
      : b(params),
        p(params.forward),
        owned(tile),
        kv_head(tile.head / params.forward.group),
        smem(ptx::dynamic_shared()),
        thread(ptx::thread_idx().x),
        products(params, tile) {}

  FOVEA_DEVICE_MEMBER float shared_float(int at) const { return ptx::ld_shared<float>(smem + at); }

  FOVEA_DEVICE_MEMBER CapturedPair find(const WalkedTile& tile, const PlaceInTile& place) const {
    const Sequence& s = owned.sequence;
    const Position at{s.idx,
                      owned.head,
                      kv_head,
                      owned.begin + place.row,
                      tile.idx * spec.tile_walked + place.key,
                      s.seqlen_q,
                      s.seqlen_kv};
    const int offset = Layout::offset(place.row, place.key);
    const int of_row = Layout::kStatisticsAt + 4 * place.row;
    float dweight = shared_float(Layout::kDweightsAt + offset);
    if constexpr (spec.has_dropout) dweight = is_kept(at) ? dweight * p.dropout_keep_scale : 0.0F;
    return captured_pair<Mods>(p, at, may_see<Mods>(at, tile.is_full, p.captures),
                               shared_float(Layout::kScoresAt + offset), dweight,
                               {shared_float(of_row), shared_float(of_row + 4 * spec.tile_owned),
                                shared_float(of_row + 8 * spec.tile_owned)});
  }

  FOVEA_DEVICE_MEMBER bool is_kept(const Position& at) const {
    return !is_dropped(p, dropout_key<spec>(p), at.batch, at.q_head, at.q_idx, at.kv_idx);
  }
};

}  // namespace fovea::cuda::sm80
