// The gradient of a dense bias, a tile of it at a time. Chapter 3 of sm80/captured_gradients.cuh.
//
//   a CTA   | rows of visit 0 | S dP | rows of visit 1 on their way | P dS of visit 0, summed | S dP | ...
//
// A visit is a sequence and a head that add to the tile. Each brings rows of its own, 64 KB for 64 x 64 pairs of
// head_dim 128, so a CTA leaves memory to the next one while it is at its pairs.
#pragma once

#include "sm80/captured/pairs.cuh"

namespace fovea::cuda::sm80 {

/// Which tile of the gradient a CTA stores.
struct DenseTile {
  std::int32_t q_begin, kv_begin, batch_place, head_place;
};

template <CapturedSpec spec>
FOVEA_DEVICE DenseTile dense_tile(const DenseGradient& to, std::int32_t id) {
  const std::int32_t kv_tiles = ceil_div(to.num_kv, spec.tile_walked);
  const std::int32_t q_tiles = ceil_div(to.num_q, spec.tile_owned);
  const std::int32_t place = id / kv_tiles / q_tiles;
  return {id / kv_tiles % q_tiles * spec.tile_owned, id % kv_tiles * spec.tile_walked,
          place / to.num_heads, place % to.num_heads};
}

FOVEA_DEVICE void store_dense(const DenseGradient& to, const DenseTile& tile, int row, int key,
                              float sum) {
  const std::int32_t q_idx = tile.q_begin + row, kv_idx = tile.kv_begin + key;
  if (q_idx >= to.num_q || kv_idx >= to.num_kv) return;
  store_element(to.data, to.element,
                tile.batch_place * to.batch_stride + tile.head_place * to.head_stride +
                    q_idx * to.q_stride + kv_idx * to.kv_stride,
                sum);
}

/// Every sequence and head that sees something of a tile, in their order. Few words, as they live beside pairs.
template <CapturedSpec spec, class Mods>
class DenseVisits {
 public:
  FOVEA_DEVICE_MEMBER DenseVisits(const CapturedParams& c, const DenseTile& tile)
      : c_(c),
        p_(c.call.forward),
        tile_(tile),
        idx_(tile.batch_place * c.dense.sequences_per_place),
        head_(first_head()) {
    find();
  }

  FOVEA_DEVICE_MEMBER bool is_over() const { return idx_ >= end_idx(); }

  FOVEA_DEVICE_MEMBER void advance() {
    step();
    find();
  }

  // Of the visit, unless it is over.
  FOVEA_DEVICE_MEMBER OwnedTile queries() const {
    return {sequence(), tile_.q_begin, head_, false};
  }
  FOVEA_DEVICE_MEMBER WalkedTile keys() const {
    return {tile_.kv_begin / spec.tile_walked, head_, is_full_};
  }

 private:
  FOVEA_DEVICE_MEMBER std::int32_t first_head() const {
    return tile_.head_place * c_.dense.q_heads_per_place;
  }
  FOVEA_DEVICE_MEMBER std::int32_t end_head() const {
    return least(first_head() + c_.dense.q_heads_per_place, p_.num_heads_q);
  }
  FOVEA_DEVICE_MEMBER std::int32_t end_idx() const {
    return least((tile_.batch_place + 1) * c_.dense.sequences_per_place, p_.num_sequences);
  }

  FOVEA_DEVICE_MEMBER void step() {
    if (++head_ < end_head()) return;
    head_ = first_head();
    ++idx_;
  }

  /// From here on, this place included.
  FOVEA_DEVICE_MEMBER void find() {
    for (; !is_over(); step()) {
      const TileKind found = kind(sequence());
      is_full_ = found == TileKind::full;
      if (found != TileKind::empty) return;
    }
  }

  FOVEA_DEVICE_MEMBER Sequence sequence() const {
    if constexpr (!spec.is_varlen)
      return {idx_, idx_, 0, idx_, 0, p_.seqlen_q, p_.seqlen_kv, false};
    const PackedRows q = packed_rows(p_.cu_seqlens_q, idx_, p_.total_q);
    const PackedRows kv = packed_rows(p_.cu_seqlens_kv, idx_, p_.total_kv);
    return {idx_, 0, q.begin, 0, kv.begin, q.count, kv.count, false};
  }

  /// What is proven of the tile; beyond the lengths nothing is there to be seen.
  FOVEA_DEVICE_MEMBER TileKind kind(const Sequence& s) const {
    const std::int32_t q = tile_.q_begin, kv = tile_.kv_begin;
    if (q >= s.seqlen_q || kv >= s.seqlen_kv) return TileKind::empty;
    return Mods::tile_kind(
        TileSpan{s.idx, head_, head_ + 1, head_ / p_.group, q,
                 least(q + spec.tile_owned, s.seqlen_q), kv,
                 least(kv + spec.tile_walked, s.seqlen_kv), s.seqlen_q, s.seqlen_kv},
        p_.captures);
  }

  const CapturedParams& c_;
  const ForwardParams& p_;
  const DenseTile tile_;
  std::int32_t idx_, head_;
  bool is_full_ = false;
};

/// What a pair adds to its element of the bias. The slope of what has no gradient may be anything.
template <class Mods>
FOVEA_DEVICE float dense_term(const CapturedPair& pair, const Captures& captures) {
  return through_slope(pair.gradient,
                       Mods::site_slope(SiteIdx<0>(), pair.scaled, pair.at, captures));
}

/// By tensor cores: pairs and sums are accumulators.
template <CapturedSpec spec, class Mods>
struct DenseMmaSums {
  static constexpr Sm80BackwardSpec kRows{spec};
  using T = BackwardTraits<kRows>;
  using Rows = BackwardSums<kRows, Mods>;
  using Products = typename Rows::Products;
  static_assert(!spec.keeps_products);

  const CapturedParams& c;
  const DenseTile tile;
  Products sums;

  FOVEA_DEVICE_MEMBER DenseMmaSums(const CapturedParams& params, std::int32_t id)
      : c(params), tile(dense_tile<spec>(params.dense, id)) {}

  FOVEA_DEVICE_MEMBER void load(const DenseVisits<spec, Mods>& visits) const {
    if (visits.is_over()) return;
    const Owner<kRows> owner(c.call, visits.queries());
    owner.load_owned();
    owner.load_walked(visits.keys(), 0);
  }

  /// sees_all: every pair of the tile exists and is visible.
  template <bool sees_all>
  FOVEA_DEVICE_MEMBER void add(const Owner<kRows>& owner, const QueryStatistics<kRows>& queries,
                               const WalkedTile& keys, const Products& scores,
                               const Products& dweights) {
    const ForwardParams& p = owner.p;
    DropoutKeyOf<spec> key{};
    if constexpr (spec.has_dropout) key = dropout_key<spec>(p);
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < T::kBlocks; ++j) {
        std::uint32_t drops = 0;
        if constexpr (spec.has_dropout) drops = Rows::dropped(owner, key, keys, i, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Position at =
              owner.position(keys, owner.owned_row(i, e / 2), owner.walked_row(keys, j, e % 2));
          float dweight = dweights[i][j][e];
          if constexpr (spec.has_dropout) {
            const bool is_kept = (drops >> static_cast<std::uint32_t>(e) & 1U) == 0;
            dweight = is_kept ? dweight * p.dropout_keep_scale : 0.0F;
          }
          const bool may_see = sees_all || sm80::may_see<Mods>(at, keys.is_full, p.captures);
          const auto pair = captured_pair<Mods>(p, at, may_see, scores[i][j][e], dweight,
                                                queries.of_row(i, e / 2));
          sums[i][j][e] += dense_term<Mods>(pair, p.captures);
        }
      }
    }
  }

  FOVEA_DEVICE_MEMBER bool sees_all(const OwnedTile& queries, const WalkedTile& keys) const {
    const Sequence& s = queries.sequence;
    return keys.is_full && tile.q_begin + spec.tile_owned <= s.seqlen_q &&
           tile.kv_begin + spec.tile_walked <= s.seqlen_kv;
  }

  FOVEA_DEVICE_MEMBER void run() {
    Rows::clear(sums);
    DenseVisits<spec, Mods> visits(c, tile);
    load(visits);
#pragma unroll 1
    while (!visits.is_over()) {
      const Owner<kRows> owner(c.call, visits.queries());
      const WalkedTile keys = visits.keys();
      const QueryStatistics<kRows> queries(owner);
      wait_for_copies<spec.instructions>();
      ptx::sync_threads();
      Products scores, dweights;
      const SharedAddress stage = owner.stage_at(0);
      Rows::template multiply_rows<typename T::QkRows, T::kQkSteps>(owner, scores, owner.smem,
                                                                    stage);
      Rows::template multiply_rows<typename T::VRows, T::kVSteps>(
          owner, dweights, owner.smem + T::kOwnedVAt, stage + T::kWalkedVAt);
      ptx::sync_threads();
      visits.advance();
      load(visits);
      if (sees_all(owner.owned, keys)) {
        add<true>(owner, queries, keys, scores, dweights);
      } else {
        add<false>(owner, queries, keys, scores, dweights);
      }
    }
    store();
  }

  FOVEA_DEVICE_MEMBER void store() const {
    const int warp = ptx::warp_idx(), lane = ptx::lane_idx();
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < T::kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = warp * T::kWarpRows + i * 16 + e / 2 * 8 + lane / 4;
          store_dense(c.dense, tile, row, j * 8 + lane % 4 * 2 + e % 2, sums[i][j][e]);
        }
      }
    }
  }
};

/// Inputs of any dtypes and head dims: products go through shared memory.
template <CapturedSpec spec, class Mods>
struct DensePlainSums {
  using Pairs = CapturedPairs<spec, Mods>;

  const CapturedParams& c;
  const DenseTile tile;
  float sums[Pairs::kSteps];

  FOVEA_DEVICE_MEMBER DensePlainSums(const CapturedParams& params, std::int32_t id)
      : c(params), tile(dense_tile<spec>(params.dense, id)) {}

  FOVEA_DEVICE_MEMBER void add(const OwnedTile& queries, const WalkedTile& keys) {
    const Pairs pairs(c.call, queries);
    pairs.products.load_queries();
    pairs.products.load_keys(keys);
    pairs.products.wait();
    pairs.products.multiply();
    ptx::sync_threads();
#pragma unroll
    for (int step = 0; step < Pairs::kSteps; ++step) {
      const PlaceInTile place = place_in_tile<spec, PairOrder::keys>(pairs.thread, step);
      sums[step] += dense_term<Mods>(pairs.find(keys, place), c.call.forward.captures);
    }
    ptx::sync_threads();
  }

  FOVEA_DEVICE_MEMBER void run() {
#pragma unroll
    for (int step = 0; step < Pairs::kSteps; ++step) sums[step] = 0;
    DenseVisits<spec, Mods> visits(c, tile);
#pragma unroll 1
    for (; !visits.is_over(); visits.advance()) add(visits.queries(), visits.keys());
#pragma unroll
    for (int step = 0; step < Pairs::kSteps; ++step) {
      const PlaceInTile place = place_in_tile<spec, PairOrder::keys>(ptx::thread_idx().x, step);
      store_dense(c.dense, tile, place.row, place.key, sums[step]);
    }
  }
};

}  // namespace fovea::cuda::sm80
