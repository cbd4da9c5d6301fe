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

  struct Gradient {
    Position at;
    float scaled;   // q·k, what the program starts from
    float weight;   // P
    float dweight;  // dP of what dropout has kept
    bool is_visible;
  };

  FOVEA_DEVICE_MEMBER float shared_float(int at) const { return ptx::ld_shared<float>(smem + at); }

  /// A pair that its query does not see has no weight, whatever it holds.
  FOVEA_DEVICE_MEMBER Gradient find(const WalkedTile& tile, const PlaceInTile& place) const {
    const Sequence& s = owned.sequence;
    Gradient pair{{s.idx, owned.head, kv_head, owned.begin + place.row,
                   tile.idx * spec.tile_walked + place.key, s.seqlen_q, s.seqlen_kv},
                  0,
                  0,
                  0,
                  false};
    if (pair.at.q_idx >= s.seqlen_q || pair.at.kv_idx >= s.seqlen_kv) return pair;
    if constexpr (Mods::has_mask) {
      if (!tile.is_full && !Mods::mask(pair.at, p.captures)) return pair;
    }
    const int offset = Layout::offset(place.row, place.key);
    pair.scaled = shared_float(Layout::kScoresAt + offset) * p.softmax_scale;
    const float score = Mods::score(pair.scaled, pair.at, p.captures);
    if (score == -infinity()) return pair;
    pair.is_visible = true;
    const int of_row = Layout::kStatisticsAt + 4 * place.row;
    const RowStatistic row{shared_float(of_row), 0, shared_float(of_row + 8 * spec.tile_owned)};
    pair.weight = weight_of<true>(score, row, kLog2E);
    pair.dweight = shared_float(Layout::kDweightsAt + offset);
    if constexpr (spec.has_dropout)
      pair.dweight = is_kept(pair.at) ? pair.dweight * p.dropout_keep_scale : 0.0F;
    return pair;
  }

  FOVEA_DEVICE_MEMBER bool is_kept(const Position& at) const {
    return !is_dropped(p, dropout_key<spec.reads_dropout_seed>(p), at.batch, at.q_head, at.q_idx,
                       at.kv_idx);
  }

  /// dS, by the score that the program made; 0 of what is hidden.
  FOVEA_DEVICE_MEMBER float gradient_of(const Gradient& pair, const PlaceInTile& place) const {
    if (!pair.is_visible) return 0;
    const int delta = Layout::kStatisticsAt + 4 * (spec.tile_owned + place.row);
    return pair.weight * (pair.dweight - shared_float(delta));
  }
};

}  // namespace fovea::cuda::sm80
