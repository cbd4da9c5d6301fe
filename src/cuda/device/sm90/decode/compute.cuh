// Scores, softmax and products of the slices of one warp, and what all warps' sums together are. Read ../decode.cuh for
// the picture.
#pragma once

#include "common/online_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/box_walk.cuh"
#include "sm90/decode/cluster.cuh"
#include "sm90/decode/codes.cuh"
#include "sm90/decode/cta.cuh"
#include "sm90/decode/fold.cuh"
#include "sm90/decode/group_products.cuh"
#include "sm90/decode/group_rows.cuh"
#include "sm90/decode/unit.cuh"
#include "team/compute.cuh"
#include "team/join.cuh"
#include "team/scores.cuh"
#include "team/store.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm90::decoding {

/// What a warp sums, and what it has beside that for products of codes.
template <Sm90DecodeSpec spec, class Mods, bool has_codes = spec.has_codes()>
struct PartsOfWarp {
  using Sums = team::Sums<Layout<spec>::kWarpSpec, Mods>;
  struct Products {};
};
template <Sm90DecodeSpec spec, class Mods>
struct PartsOfWarp<spec, Mods, true> {
  using Sums = SumsOfCodes<spec>;
  using Products = CodedProducts<spec, Mods>;
};

/// A warp that computes: of 16 rows, and of the slices of a split every so-manieth.
template <Sm90DecodeSpec spec, class Mods>
struct Reader {
  using L = Layout<spec>;
  using T = typename L::T;
  using Team = team::Team<L::kWarpSpec>;
  using Row = RowView<L::kWarpSpec>;
  using Scores = team::Scores<L::kWarpSpec, Mods>;
  using Sums = typename PartsOfWarp<spec, Mods>::Sums;
  using Products = typename PartsOfWarp<spec, Mods>::Products;
  using Groups = ProductsOfGroup<spec, Mods>;
  const Cta<spec>& cta;
  Ring<L::kStages> boxes{0};
  Ring<L::kRecords> records{0};
  Ring<1> joins{1}, queries{0};
  Products products{};

  FOVEA_DEVICE_MEMBER explicit Reader(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER int my_block() const { return cta.warp % L::kBlocks; }
  FOVEA_DEVICE_MEMBER int my_part() const { return cta.warp / L::kBlocks; }

  FOVEA_DEVICE_MEMBER void run() {
    if constexpr (is_clustered(spec)) {
      run_in_cluster(cta.take(records));
    } else if constexpr (multiplies_by_wgmma(spec)) {
      run_groups();
    } else {
      run_units();
    }
  }

 private:
  /// Those of the split behind `work`. Codes come so fast that nobody may wait for them: they are asked for before the
  /// join of the split ahead, and stay where it is of the same rows.
  FOVEA_DEVICE_MEMBER void ask_for_queries(const Work& work) {
    const Work next = cta.look(records).work;
    if (next.is_nothing) return;
    if (!work.is_nothing && next.sequence.idx == work.sequence.idx && next.q_head == work.q_head)
      return;
    products.ask_for_queries(Team{cta.p.common, next, cta.smem, my_block(), cta.lane});
  }

  FOVEA_DEVICE_MEMBER void run_units() {
    if constexpr (spec.has_codes()) ask_for_queries(Work{.is_nothing = true});
#pragma unroll 1
    for (;;) {
      const Posted split = cta.take(records);
      if (split.work.is_nothing) return;
      Sums sums;
      compute(split, sums);
      if constexpr (spec.has_codes()) ask_for_queries(split.work);
      meet();
      join(split);
      cta.release(cta.barrier(L::kAt.joined, 0));
      joins.advance();
    }
  }

  /// Instructions come from memory, some 3 KB of them in a microsecond, and those of a sequence's end would be waited
  /// for there. So it is rehearsed once with rows that are nobody's, while keys are on their way.
  FOVEA_DEVICE_MEMBER void run_groups() {
    RowsOfGroup<spec, Mods> rows(cta, my_part());
#pragma unroll 1
    for (std::int32_t rehearsals = cta.p.rehearsals;; --rehearsals) {
      const bool is_rehearsal = spec.takes_groups && rehearsals > 0;
      Sums sums;
      if (is_rehearsal) {
        sums.start();
      } else {
        const Posted split = cta.look(records);
        if (split.work.is_nothing) return;
        compute(split, sums);
      }
      // Once more: registers are the sums' meanwhile.
      const Posted split = is_rehearsal ? Posted{{}, Unit::sequence} : cta.take(records);
      rows.add(Team{cta.p.common, split.work, cta.smem, my_block(), cta.lane}, sums, split.unit);
    }
  }

  FOVEA_DEVICE_MEMBER void run_in_cluster(const Posted& split) {
    const Work& work = split.work;
    static_assert(!spec.has_codes(), "nobody asks for their queries");
    const Team team{cta.p.common, work, cta.smem, 0, cta.lane};
    const team::Join<L::kWarpSpec, Mods, typename L::Parts> rows{team, cta.parts()};
    const ClusterOfSplits<spec, Mods> cluster(cta, rows);
    if (!work.is_nothing) {
      Sums sums;
      compute(split, sums);
      if constexpr (multiplies_by_wgmma(spec)) {
        RowsOfGroup<spec, Mods>(cta, my_part())
            .put(Team{cta.p.common, work, cta.smem, my_block(), cta.lane}, sums);
      }
      meet();
    }
    ptx::barrier_cluster_wait();  // all CTAs have started
    if (!work.is_nothing) cluster.send();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    cluster.fold();
  }

  FOVEA_DEVICE_MEMBER static void meet() { ptx::bar_sync(kMeeting, 32 * L::kReaders); }

  // ---- slices ------------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void compute(const Posted& split, Sums& sums) {
    const Work& work = split.work;
    const Team team{cta.p.common, work, cta.smem, my_block(), cta.lane};
    if constexpr (spec.has_codes()) {
      products.start();
    } else if constexpr (multiplies_by_wgmma(spec)) {
      if constexpr (L::kQueryLoaders == 0) share_queries(team);
    } else {
      read_queries(team, sums.scores);
    }
    sums.start();
    const TileSpan rows = span_of<L::kWarpSpec>(work);
    BoxWalk<spec, Mods> walk(cta, work, rows);
    if constexpr (L::kQueryLoaders > 0) await_queries(split);
    const int part [[maybe_unused]] = first_slot_from(boxes.stage * L::kSlices);
#pragma unroll 1
    for (VisitedBox box; walk.next(box); boxes.advance()) {
      const int mine = first_slot_from(boxes.stage * L::kSlices);
      if (mine >= L::kSlices) continue;
      if constexpr (multiplies_by_wgmma(spec)) {
        add_box(team, sums, {box.first, box.is_full(0)});
        continue;
      }
      ptx::mbarrier_wait_parity(cta.barrier(L::kAt.full, boxes.stage), boxes.parity);
      if (box.sees(mine)) add_slice(team, sums, mine, {box.first + mine, box.is_full(mine)});
      cta.release(cta.barrier(L::kAt.empty, boxes.stage));
    }
    if constexpr (L::kQueryLoaders > 0) {
      if (ends_unit(work, split.unit)) cta.release(cta.barrier(L::kAt.queries_empty, 0));
    }
    if constexpr (multiplies_by_wgmma(spec)) return;
    // What warps left of the split ahead is read: nobody has waited for that since.
    ptx::mbarrier_wait_parity(cta.barrier(L::kAt.joined, 0), joins.parity);
    if constexpr (spec.has_codes()) {
      products.put_rows(team, sums, cta.parts(), part);
    } else {
      put_rows(team, sums, part);
    }
  }

  /// Slots belong to parts in turn: how many behind this one is the first of this warp. From a split's first slot on it
  /// is the warp's part of the split, so that the order of the parts' sum does not depend on what came before it.
  FOVEA_DEVICE_MEMBER int first_slot_from(int slot) const {
    return (my_part() + L::kParts - slot % L::kParts) % L::kParts;
  }

  /// A operands of Q Kᵀ, straight from memory: two elements of a row at a time. Rows that do not exist are the first
  /// one: nobody asks for what becomes of them.
  FOVEA_DEVICE_MEMBER void read_queries(const Team& team, Scores& scores) const {
    const ForwardParams& p = cta.p.common;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = team.my_row(0, half);
      const Row row = team.row_at(team.row_at(mine).exists ? mine : 0);
      const char* from = static_cast<const char*>(p.q.data) + row.query_at() * T::kElement.bytes +
                         team.lane % 4 * 4;
#pragma unroll
      for (int chunk = 0; chunk < 2 * T::kQkSteps; ++chunk) {
        const bool exists =
            !spec.has_padded_head_dim || chunk * T::kElement.of_chunk < p.head_dim_qk;
        scores.queries[chunk / 2][0][half + chunk % 2 * 2] =
            exists ? ptx::ld_global_nc(reinterpret_cast<const std::uint32_t*>(from + chunk * 16))
                   : 0;
      }
    }
  }

  /// A operand of Q Kᵀ for both warpgroups, when both have multiplied the one before. Rows that do not exist are zeros.
  FOVEA_DEVICE_MEMBER void share_queries(const Team& team) const {
    using Tile = typename L::QTile;
    meet();
    constexpr int kAtOnce = 4;  // what counts is how soon all have come
#pragma unroll kAtOnce
    for (int i = 0; i < spec.tile_q * Tile::kChunks; i += 32 * L::kReaders) {
      const int at = i + 32 * cta.warp + cta.lane;
      const int chunk = at % Tile::kChunks;
      const Row row = team.row_at(at / Tile::kChunks);
      const bool exists = row.exists && (!spec.has_padded_head_dim ||
                                         chunk * T::kElement.of_chunk < cta.p.common.head_dim_qk);
      const char* from = static_cast<const char*>(cta.p.common.q.data) +
                         row.query_at() * T::kElement.bytes + chunk * kChunkBytes;
      ptx::st_shared(
          cta.queries().chunk(at / Tile::kChunks, chunk),
          exists ? ptx::ld_global_nc(reinterpret_cast<const ptx::U32x4*>(from)) : ptx::U32x4{});
    }
    ptx::fence_proxy_async_shared_cta();
    meet();
  }

  /// Of the unit that the split begins.
  FOVEA_DEVICE_MEMBER void await_queries(const Posted& split) {
    if (!begins_unit(split.work, split.unit)) return;
    ptx::mbarrier_wait_parity(cta.barrier(L::kAt.queries_full, 0), queries.parity);
    queries.advance();
  }

  /// By a warpgroup: of a box, keys make room before values are multiplied.
  FOVEA_DEVICE_MEMBER void add_box(const Team& team, Sums& sums, VisitedTile box) const {
    const int num_keys = team.work.kv_end - box.idx * spec.tile_kv;
    const bool is_cut = num_keys < spec.tile_kv;
    box.is_full = box.is_full && !is_cut;
    const auto values = cta.values_at(boxes.stage);
    typename Scores::Fragments s;
    ptx::mbarrier_wait_parity(cta.barrier(L::kAt.full, boxes.stage), boxes.parity);
    Groups::multiply_keys(cta.queries(), s, cta.keys_at(boxes.stage));
    cta.release(cta.barrier(L::kAt.empty, boxes.stage));
    make_probabilities(team, sums, s, box);
    ptx::mbarrier_wait_parity(cta.barrier(L::kAt.full_values, boxes.stage), boxes.parity);
    if (is_cut) clear_behind_keys(values, num_keys);
    Groups::multiply_values(sums, s, values);
    if (is_cut) ptx::fence_proxy_async_shared_cta();
    cta.release(cta.barrier(L::kAt.empty_values, boxes.stage));
  }

  /// Of the box that has arrived its slice `at`.
  FOVEA_DEVICE_MEMBER void add_slice(const Team& team, Sums& sums, int at, VisitedTile slice) {
    const auto values = cta.slice_of(cta.values_at(boxes.stage), at);
    const int num_keys = team.work.kv_end - slice.idx * spec.tile_kv;
    const bool is_cut = num_keys < spec.tile_kv;
    if (is_cut) clear_behind_keys(values, num_keys);
    slice.is_full = slice.is_full && !is_cut;
    const auto keys = cta.slice_of(cta.keys_at(boxes.stage), at);
    const int first = at * spec.tile_kv;
    if constexpr (spec.has_codes()) {
      products.add_slice(team, sums, keys, values, cta.key_scales_at(boxes.stage, first),
                         cta.value_scales_at(boxes.stage, first), slice);
    } else {
      add_products(team, sums, keys, values, slice);
    }
    if (is_cut) ptx::fence_proxy_async_shared_cta();
  }

  FOVEA_DEVICE_MEMBER void add_products(const Team& team, Sums& sums, const typename L::KTile& keys,
                                        const typename L::VTile& values, VisitedTile slice) const {
    typename Scores::Fragments s;
    sums.scores.multiply_keys(team, s, keys);
    make_probabilities(team, sums, s, slice);
    sums.multiply_values(team, s, values);
  }

  /// s: scores.
  FOVEA_DEVICE_MEMBER static void make_probabilities(const Team& team, Sums& sums,
                                                     typename Scores::Fragments& s,
                                                     VisitedTile slice) {
    sums.scores.modify(team, s, slice);
    sums.scores.mask(team, s, slice);
    sums.softmax(team, s);
    if constexpr (spec.has_dropout) sums.drop(team, s, slice);
  }

  /// Where the sequence ends inside the slice there may be NaN behind it, and 0 * NaN is not 0. The warps that read the
  /// slice clear it together.
  FOVEA_DEVICE_MEMBER void clear_behind_keys(const typename L::VTile& values, int num_keys) const {
    using Tile = typename L::VTile;
#pragma unroll 1
    for (int at = 32 * my_block() + cta.lane; at < (spec.tile_kv - num_keys) * Tile::kChunks;
         at += 32 * L::kBlocks) {
      const int key = num_keys + at / Tile::kChunks;
      ptx::st_shared(values.chunk(key, at % Tile::kChunks), ptx::U32x4{});
    }
    if constexpr (multiplies_by_wgmma(spec)) ptx::fence_proxy_async_shared_cta();
    if constexpr (L::kBlocks == 1) {
      ptx::sync_warp();
    } else {
#pragma unroll
      for (int part = 0; part < L::kParts; ++part)
        if (part == my_part()) ptx::bar_sync(kFirstOfParts + part, 32 * L::kBlocks);
    }
  }

  // ---- join --------------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void put_rows(const Team& team, const Sums& sums, int part) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowState row = sums.whole_row(0, half);
      if (!team.row_at(team.my_row(0, half)).exists) continue;
      const SharedAddress to = cta.parts().at(part, team.my_row(0, half));
      if (cta.lane % 4 == 0) {
        const float row_max = spec.wants_row_max ? sums.row_max[0][half] : 0.0F;
        cta.parts().put_state(part, team.my_row(0, half), row, row_max);
      }
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j) {
        ptx::st_shared(to + (j * 8 + cta.lane % 4 * 2) * 4,
                       ptx::F32x2{sums.out[0][j][half * 2], sums.out[0][j][half * 2 + 1]});
      }
    }
  }

  FOVEA_DEVICE_MEMBER void join(const Posted& split) {
    const Team team{cta.p.common, split.work, cta.smem, 0, cta.lane};
    const team::Join<L::kWarpSpec, Mods, typename L::Parts> rows{team, cta.parts()};
    if constexpr (spec.takes_groups) return UnitOfSplits<spec, Mods>(cta, rows, split.unit).add();
    rows.run(cta.warp, L::kReaders,
             [this](const Row& row) { compute_carefully<spec, Mods>(cta, row); });
  }
};

}  // namespace fovea::cuda::sm90::decoding
