// The recurrence: products, softmax between them, and how the groups take turns. Read output.cuh next.
#pragma once

#include "common/dropout.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/far_rows.cuh"
#include "sm90/forward/output.cuh"
#include "sm90/forward/rows.cuh"
#include "sm90/forward/scores.cuh"
#include "sm90/forward/value_sums.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90 {

/// One thread of a group: it holds parts of two rows, from their first scores to their sums.
template <Sm90ForwardSpec spec, class Mods>
struct Compute {
  using T = Traits<spec>;
  using Rows = RowsOf<spec, Mods>;

  const Cta<spec>& cta;
  const ComputingWarp<spec> warp;
  Ring<T::kQStages> q{0};
  Ring<T::kStages> k{0}, v{0};
  Ring<T::kSlots> slots{0};

  Scores<spec, Mods> scores;
  Output<spec, Mods> output;
  typename Rows::Probabilities p;
  ValueSums<spec, Rows> sums;
  Rows rows;
  KvTile next = KvTile::none();  // after scores.kv_tile, of the same row tile
  ptx::MatrixDescriptor keys;    // of the stage that comes next: known before its turn

  // Full tiles are careful where many of the last row tile's would have had to be redone. Both ways give the same bits,
  // so what one row tile teaches the next shows in the time only.
  bool is_careful = false;
  std::uint32_t num_steps = 0;      // of this row tile
  std::uint32_t num_misses = 0;     // full tiles of it that this warp redid, or would have had to
  std::uint32_t num_row_tiles = 0;  // so far

  FOVEA_DEVICE_MEMBER explicit Compute(const Cta<spec>& of_cta)
      : cta(of_cta), warp(of_cta), scores(warp), output(warp), sums(warp), keys(keys_at(0)) {}

  FOVEA_DEVICE_MEMBER void run() {
    // The first group goes first.
    if (warp.group == T::kGroups - 1) ptx::bar_arrive(1, 256);
    if constexpr (T::kOverlapsTiles) {
      run_overlapped();
    } else {
      run_one_by_one();
    }
  }

 private:
  /// Where two row tiles meet: scores first where a mask or a program is to come, which takes longer than the sums, and
  /// where a third group fills the time. (Of 64 columns the sums are so short that a mask is longer either way.)
  static constexpr bool kSumsFirst = T::kGroups == 2 && !Mods::has_score &&
                                     !spec.multiplies_codes && !spec.loads_by_cp_async &&
                                     (!Mods::has_mask || spec.head_dim_v <= 64);

  /// Tiles of far rows are computed again by a walk of its own, and others know nothing of such rows, nor of passes.
  static_assert(!T::kTakesFarRows || T::kOverlapsTiles);

  /// Where a step that does not stand is repaired by a way of its own, no row tile has careful steps for full tiles.
  /// Not over caches, whose loops lack registers.
  static constexpr bool kRepairsCodes = Rows::kRepairsCodes && !T::kHasRoundedCache;

  /// What makes scores logarithms to base 2.
  FOVEA_DEVICE_MEMBER float c() const { return ScoreUnit<spec, Mods>::log2(cta.p.common); }

  /// Note: beginning stands here twice, so that one loop is around those over kv tiles. With a loop over rounds around
  /// it ptxas keeps uniform values in registers of threads; with one place for it, behind a branch, row tiles of 512
  /// keys took 1 to 3 % longer.
  FOVEA_DEVICE_MEMBER void run_overlapped() {
    RowTile tile = cta.next_row_tile(slots);
    if (tile.is_end()) return;
    begin<false>(tile);
    for (;;) {
      rest_of_tile(tile);
      RowTile after = cta.next_row_tile(slots);
      if (after.is_any_end()) {
        if constexpr (T::kTakesFarRows) {
          finish_last(tile, Pass::all);
          if (cta.end_round(Pass::all)) compute_again();
          return;
        }
        const Pass pass = cta.pass();
        finish_last(tile, pass);
        if (!cta.end_round(pass)) return;
        after = cta.next_row_tile(slots);
        if (after.is_end()) return;
        begin<true>(after);
      } else {
        overlap(tile, after);
      }
      tile = after;
    }
  }

  FOVEA_DEVICE_MEMBER void run_one_by_one() {
    for (;;) {
      const RowTile tile = cta.next_row_tile(slots);
      if (tile.is_end()) return;
      if (tile.is_any_end()) {
        if (!cta.end_round(cta.pass())) return;
        continue;
      }
      begin<true>(tile);
      rest_of_tile(tile);
      finish_last(tile, cta.pass());
    }
  }

  /// Rounds behind the first: a row tile each.
  FOVEA_DEVICE_MEMBER void compute_again() {
    for (;;) {
      const RowTile tile = cta.next_row_tile(slots);
      if (tile.is_end()) return;
      const Pass pass = cta.pass();
      compute_again(tile, pass);
      cta.next_row_tile(slots);  // the end of the round
      cta.end_round(pass);
    }
  }

  /// Its kv tiles one by one, each with its maxima before its powers: rare, so it may take long.
  FOVEA_DEVICE_MEMBER void compute_again(const RowTile& tile, Pass pass) {
    const int q_stage = q.stage;
    await_queries();
    await_keys();
    next = posted(0);
    scores.look_at_rows(tile, next, q_stage);
    FarRows<spec, Rows> far(warp, q_stage, scores.codes);
    rows.begin();
    sums.begin();
    for (bool is_first = true; is_first || !next.is_none(); is_first = false) {
      scores.begin_sums();
      await_keys();
      scores.template look_ahead<false>(tile, next);
      await_turn();
      issue_scores(q_stage);
      pass_turn();
      next = posted(1);
      scores.look_further(tile, next);
      ptx::wgmma_wait_group<0>();
      release_keys();
      make_scores<true>(tile);
      far.rebase(scores.s, rows);
      if (is_first) {
        rows.template raise<true>(scores.s, c());
      } else if (rows.template raise<false>(scores.s, c())) {
        rows.scale(sums.o);
      }
      float part[2];
      rows.template exponentiate<true, T::kChunk>(scores.s, p, part, c(), cta.p.zero);
      end_step(tile, part);
      look_at_values(first_tile(), scores.kv_tile);
      issue_sums();
      await_sums(rows);
    }
    q.advance();
    far.add_to_what_lse_lacks();
    float factor[2];
    output.finish_rows(tile, q_stage, rows, pass, factor);
    output.finish(tile, q_stage, factor, rows, sums.o, num_row_tiles, pass);
  }

  /// kv tiles from the second on. Both kinds of step give the same bits.
  FOVEA_DEVICE_MEMBER void rest_of_tile(const RowTile& tile) {
    bool is_next_full = next.is_full();
    for (;;) {
      if constexpr (!spec.wants_row_max) {
        if (is_next_full && !is_careful) {
          // What repairs a step stands behind their loop: jumped over in it, it would cost each of them.
          float part[2];
          bool stands = true;
          while (is_next_full && stands) {
            is_next_full = products<true>(tile);
            modify(tile);
            await_sums(rows);
            stands = rows.template exponentiate<false, T::kChunk>(
                scores.s, p, part, c(), cta.p.zero, scores.lacks_given_products());
            if (stands) end_step(tile, part);
          }
          if (!stands) {
            repair_powers(tile, part);
            end_step(tile, part);
          }
          continue;
        }
      }
      if (next.is_none()) return;
      is_next_full = careful_step(tile);
    }
  }

  // The groups take turns to issue products: named barriers 1 to kGroups, one for each group.
  FOVEA_DEVICE_MEMBER void await_turn() const { ptx::bar_sync(1 + warp.group, 256); }
  FOVEA_DEVICE_MEMBER void pass_turn() const {
    ptx::bar_arrive(1 + (warp.group + 1) % T::kGroups, 256);
  }

  FOVEA_DEVICE_MEMBER SharedAddress misses_at() const {
    return cta.smem + T::kAt.misses + 16 * (2 * warp.group + static_cast<int>(num_row_tiles % 2));
  }

  /// Before the turn that ends a row tile: the barrier of the turn lets the group's other warps see it.
  FOVEA_DEVICE_MEMBER void post_misses() const {
    if constexpr (kRepairsCodes) return;
    if (cta.lane == 0) ptx::st_shared(misses_at() + 4 * warp.idx, num_misses);
  }

  /// After it. All warps of a group go the same way, as their products ask. More than one miss in eight: careful tiles
  /// cost less.
  FOVEA_DEVICE_MEMBER void choose_kind_of_steps() {
    if constexpr (!kRepairsCodes) {
      const auto misses = ptx::ld_shared<ptx::U32x4>(misses_at());
      const std::uint32_t sum = misses.x + misses.y + misses.z + misses.w;
      is_careful = ptx::shfl_idx(sum, 0) * 2 > num_steps;
    }
    num_steps = num_misses = 0;
    ++num_row_tiles;
  }

  FOVEA_DEVICE_MEMBER int q_stage_of_last() const {
    return (q.stage + T::kQStages - 1) % T::kQStages;
  }

  FOVEA_DEVICE_MEMBER void await_queries() {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.q_full, q.stage * T::kGroups + warp.group),
                              q.parity);
  }

  FOVEA_DEVICE_MEMBER ptx::MatrixDescriptor keys_at(int stage) const {
    return k_major_descriptor(typename T::KTile{cta.k_at(stage)});
  }

  FOVEA_DEVICE_MEMBER void await_keys() {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, k.stage), k.parity);
  }

  /// Beside the keys that have come: their kv tile (0), and the one after it (1). By the lane that will say that it has
  /// been read.
  FOVEA_DEVICE_MEMBER KvTile posted_to_leader(int i) const {
    KvTile tile{0};
    if (cta.lane == 0) tile.word = ptx::ld_shared<std::uint32_t>(cta.kv_tile_at(k.stage) + 4 * i);
    return tile;
  }

  FOVEA_DEVICE_MEMBER KvTile posted(int i) const {
    return {ptx::shfl_idx(posted_to_leader(i).word, 0)};
  }

  /// S = Q Kᵀ.
  FOVEA_DEVICE_MEMBER void issue_scores(int q_stage) {
    auto a = k_major_descriptor(typename T::QTile{cta.multiplied_q_at(q_stage, warp.group)});
    // With one stage the compiler would keep the descriptors of all steps in registers, from before the loop on, and
    // keys' with them.
    if constexpr (T::kQStages == 1) a = ptx::computed_here(a);
    scores.issue(a, keys);
  }

  FOVEA_DEVICE_MEMBER void issue_sums() {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.v_full, v.stage), v.parity);
    sums.issue(p, cta.v_at(v.stage));
  }

  FOVEA_DEVICE_MEMBER void release_keys() {
    cta.release(cta.barrier(T::kAt.k_empty, k.stage));
    k.advance();
    keys = keys_at(k.stage);
  }

  FOVEA_DEVICE_MEMBER void release_values() {
    cta.release(cta.barrier(T::kAt.v_empty, v.stage));
    v.advance();
  }

  /// A row tile's first scores, with nothing to overlap them. can_be_redo: the round may be another pass than the
  /// first.
  template <bool can_be_redo>
  FOVEA_DEVICE_MEMBER void begin(const RowTile& tile) {
    await_queries();
    await_keys();
    const KvTile first = posted(0);
    scores.look_at_rows(tile, first, q.stage);
    scores.template look_ahead<false>(tile, first);
    scores.begin_sums();
    await_turn();
    issue_scores(q.stage);
    pass_turn();
    next = posted(1);
    scores.look_further(tile, next);
    ptx::wgmma_wait_group<0>();
    q.advance();
    release_keys();
    begin_rows<can_be_redo>(tile);
    first_probabilities(tile);
  }

  /// Scores of the next kv tile beside the sums of the last one, which still run then. Whether the kv tile after it is
  /// full.
  template <bool is_known_full>
  FOVEA_DEVICE_MEMBER bool products(const RowTile& tile) {
    constexpr bool kKeepsCodes = Scores<spec, Mods>::kKeepsCodes;
    constexpr bool kSumsAreLong = spec.sums_codes && spec.head_dim_v > 64;
    if constexpr (kKeepsCodes && !kSumsAreLong) return products_of_codes<is_known_full>(tile);
    scores.begin_sums_behind();
    await_keys();
    const KvTile of_sums = scores.kv_tile;
    scores.template look_ahead<is_known_full>(tile, next);
    // Codes take so few instructions that what stands before a turn is in nobody's shadow; behind it, products are.
    constexpr bool kLooksLate = spec.multiplies_codes;
    bool is_next_full = false;
    if constexpr (!kLooksLate) is_next_full = find_next(tile);
    await_turn();
    issue_scores(q_stage_of_last());
    issue_sums();
    pass_turn();
    if constexpr (is_known_full && kSumsAreLong)
      sums.look_at_values_late(first_tile() + of_sums.idx());
    else
      look_at_values(first_tile(), of_sums);
    if constexpr (kLooksLate) is_next_full = find_next(tile);
    ptx::wgmma_wait_group<1>();
    release_keys();
    return is_next_full;
  }

  /// The same where scores stay codes and sums are too short to hide a search behind them, or their exponentials wait
  /// for it: all latencies of such a step count. Loads are asked for before the starts of sums, and read a product
  /// later; what makes the tile after it known as uniform stands behind the products.
  template <bool is_known_full>
  FOVEA_DEVICE_MEMBER bool products_of_codes(const RowTile& tile) {
    const KvTile of_sums = scores.kv_tile;
    scores.template look_ahead<is_known_full>(tile, next);
    if constexpr (is_known_full && spec.sums_codes)
      sums.look_at_values(first_tile() + of_sums.idx());
    else
      look_at_values(first_tile(), of_sums);
    scores.begin_sums_behind();
    await_keys();
    const KvTile posted_next{ptx::ld_shared<std::uint32_t>(cta.kv_tile_at(k.stage) + 4)};
    scores.codes.look_further(posted_next);
    await_turn();
    issue_scores(q_stage_of_last());
    issue_sums();
    pass_turn();
    const bool is_next_full = ptx::vote_any(posted_next.is_full());
    next = {ptx::shfl_idx(posted_next.word, 0)};
    ptx::wgmma_wait_group<1>();
    release_keys();
    return is_next_full;
  }

  /// The kv tile after the one whose keys have come: is it full?
  FOVEA_DEVICE_MEMBER bool find_next(const RowTile& tile) {
    const KvTile posted_next = posted_to_leader(1);
    const bool is_next_full = ptx::vote_any(posted_next.is_full());
    next = {ptx::shfl_idx(posted_next.word, 0)};
    scores.look_further(tile, next);
    return is_next_full;
  }

  /// Of codes, of the row tile whose scores were issued last.
  FOVEA_DEVICE_MEMBER std::int32_t first_tile() const {
    if constexpr (spec.sums_codes) return scores.codes.first_tile;
    return 0;
  }

  /// Of a kv tile whose sums have been issued.
  FOVEA_DEVICE_MEMBER void look_at_values(std::int32_t first_tile, KvTile of) {
    if constexpr (spec.sums_codes) sums.look_at_values(first_tile + of.idx(), of);
  }

  /// `of`: the rows whose P was multiplied.
  FOVEA_DEVICE_MEMBER void await_sums(Rows& of) {
    ptx::wgmma_wait_group<0>();
    release_values();
    sums.take(of);
  }

  FOVEA_DEVICE_MEMBER void end_step(const RowTile& tile, const float (&part)[2]) {
    rows.add(part);
    if constexpr (spec.has_dropout) drop(tile);
    ++num_steps;
  }

  /// Powers that may not stand: the reference was too far below, or scores are other than codes say.
  FOVEA_DEVICE_MEMBER void repair_powers(const RowTile& tile, float (&part)[2]) {
    rebase();  // again, where no register holds it
    const bool is_given = scores.give_products(tile, rows.base);
    if constexpr (kRepairsCodes) {
      if (!is_given) return rows.repair(scores.s, p, sums.o);
    }
    if (is_given || rows.must_redo(part)) {
      if (is_given || Rows::kMayBeNan) rows.look_for_nan(scores.s);
      if (rows.template raise<false>(scores.s, c())) rows.scale(sums.o);
      rows.template exponentiate<true, T::kChunk>(scores.s, p, part, c(), cta.p.zero);
      ++num_misses;
    }
    rows.soften(p, sums.o, part);
  }

  FOVEA_DEVICE_MEMBER bool careful_step(const RowTile& tile) {
    const bool is_next_full = products<false>(tile);
    make_scores<true>(tile);
    const bool is_raised =
        rows.template raise<false>(scores.s, c(), scores.kv_tile.pass() == Pass::low);
    if (is_raised && scores.kv_tile.is_full()) ++num_misses;
    await_sums(rows);
    if (is_raised) rows.scale(sums.o);
    float part[2];
    if (!rows.template exponentiate<true, T::kChunk>(scores.s, p, part, c(), cta.p.zero))
      rows.soften(p, sums.o, part);
    end_step(tile, part);
    return is_next_full;
  }

  /// The same across a boundary: first scores of `after` beside the last sums of `tile`, which is then finished.
  FOVEA_DEVICE_MEMBER void overlap(const RowTile& tile, const RowTile& after) {
    if constexpr (kSumsFirst) {
      overlap_sums_first(tile, after);
    } else {
      overlap_scores_first(tile, after);
    }
    first_probabilities(after);
  }

  FOVEA_DEVICE_MEMBER void overlap_scores_first(const RowTile& tile, const RowTile& after) {
    const int q_stage = q_stage_of_last();
    const KvTile of_sums = scores.kv_tile;
    const std::int32_t first_tile_of_sums = first_tile();
    look_at_first(after);
    scores.begin_sums();
    post_misses();
    await_turn();
    issue_scores(q.stage);
    issue_sums();
    pass_turn();
    look_at_values(first_tile_of_sums, of_sums);
    look_behind_first(after);
    // Beside the products, unless a mask is to come, which takes longer than they do: then it would only come later (1
    // % at 512 keys).
    constexpr bool kFinishesEarly = !Mods::has_mask && !spec.sums_codes;
    float factor[2];
    if constexpr (kFinishesEarly) output.finish_rows(tile, q_stage, rows, Pass::all, factor);
    ptx::wgmma_wait_group<1>();
    q.advance();
    release_keys();
    Rows last = rows;
    begin_rows<false>(after);
    await_sums(last);
    if constexpr (!kFinishesEarly) output.finish_rows(tile, q_stage, last, Pass::all, factor);
    output.finish(tile, q_stage, factor, last, sums.o, num_row_tiles, Pass::all);
  }

  /// O is finished beside the scores; they are issued behind the sums, for which nothing needs to be known of `after`.
  FOVEA_DEVICE_MEMBER void overlap_sums_first(const RowTile& tile, const RowTile& after) {
    const int q_stage = q_stage_of_last();
    post_misses();
    await_turn();
    issue_sums();
    look_at_first(after);
    issue_scores(q.stage);
    pass_turn();
    look_behind_first(after);
    float factor[2];
    output.finish_rows(tile, q_stage, rows, Pass::all, factor);
    ptx::wgmma_wait_group<1>();
    release_values();
    output.finish(tile, q_stage, factor, rows, sums.o, num_row_tiles, Pass::all);
    ptx::wgmma_wait_group<0>();
    q.advance();
    release_keys();
    begin_rows<false>(after);
  }

  /// Waits for the queries and first keys of a row tile, and for what its first kv tile is.
  FOVEA_DEVICE_MEMBER void look_at_first(const RowTile& after) {
    await_queries();
    await_keys();
    const KvTile first = posted(0);
    scores.look_at_rows(after, first, q.stage);
    scores.template look_ahead<false>(after, first);
  }

  FOVEA_DEVICE_MEMBER void look_behind_first(const RowTile& after) {
    next = posted(1);
    scores.look_further(after, next);
    choose_kind_of_steps();
  }

  /// Where no row tile follows that could be multiplied beside it.
  FOVEA_DEVICE_MEMBER void finish_last(const RowTile& tile, Pass pass) {
    post_misses();
    await_turn();
    issue_sums();
    pass_turn();
    look_at_values(first_tile(), scores.kv_tile);
    choose_kind_of_steps();
    float factor[2];
    if constexpr (!spec.sums_codes) output.finish_rows(tile, q_stage_of_last(), rows, pass, factor);
    await_sums(rows);
    if constexpr (spec.sums_codes) output.finish_rows(tile, q_stage_of_last(), rows, pass, factor);
    output.finish(tile, q_stage_of_last(), factor, rows, sums.o, num_row_tiles, pass);
  }

  template <bool can_be_redo>
  FOVEA_DEVICE_MEMBER void begin_rows(const RowTile& tile) {
    rows.begin();
    make_scores<can_be_redo>(tile);
    rows.template raise<true>(scores.s, c(), can_be_redo && scores.kv_tile.pass() == Pass::low);
  }

  FOVEA_DEVICE_MEMBER void modify(const RowTile& tile) {
    if constexpr (Scores<spec, Mods>::kKeepsCodes) scores.codes.set_units(rows.unit);
    rebase();
    scores.modify(tile, rows.base);
  }

  FOVEA_DEVICE_MEMBER void rebase() {
    if constexpr (spec.sums_codes) {
      float common[2] = {};
      if constexpr (ScoreUnit<spec, Mods>::kHasCommonPart) scores.codes.set_common_parts(common);
      rows.rebase(common);
    } else {
      rows.rebase();
    }
  }

  /// All that there is to scores, for steps that are careful.
  template <bool can_be_redo>
  FOVEA_DEVICE_MEMBER void make_scores(const RowTile& tile) {
    modify(tile);
    const bool is_given = scores.give_products(tile, rows.base);
    if (!scores.kv_tile.is_full()) mask<can_be_redo>(tile);
    if (is_given || Rows::kMayBeNan) rows.look_for_nan(scores.s);
  }

  template <bool can_be_redo>
  FOVEA_DEVICE_MEMBER void mask(const RowTile& tile) {
    scores.mask(tile);
    if (can_be_redo && is_indicator(scores.kv_tile.pass())) scores.shrink();
  }

  FOVEA_DEVICE_MEMBER void first_probabilities(const RowTile& tile) {
    float part[2];
    rows.template exponentiate<true, T::kChunk>(scores.s, p, part, c(), cta.p.zero);
    rows.add(part);
    if constexpr (spec.has_dropout) drop(tile);
    sums.begin();
  }

  /// Of P alone: l and the maximum are those of all that a row sees. Infinity reaches a row whatever is dropped.
  FOVEA_DEVICE_MEMBER void drop(const RowTile& tile) {
    if (is_indicator(scores.kv_tile.pass())) return;
    const ForwardParams& common = cta.p.common;
    const Work work = warp.work_of(tile);
    const RowView<spec> row(common, work, warp.row(cta.lane % 2));
    const DropoutKeyOf<spec> mixed = dropout_key<spec>(common);
#pragma unroll
    for (int block = 0; block < spec.tile_kv / 8; ++block) {
      // Of the parameters it is asked for where it is used: held across the blocks, it spills.
      const DropoutKeyOf<spec> key = spec.reads_dropout_seed ? mixed : dropout_key<spec>(common);
      const ptx::U32x4 words = fragment_words(key, tile.batch, row.q_head, row.q_idx,
                                              scores.kv_tile.idx() * spec.tile_kv + block * 8);
      p[block / 2][block % 2 * 2] &= kept_pair(common, words.x, words.y);
      p[block / 2][block % 2 * 2 + 1] &= kept_pair(common, words.z, words.w);
    }
  }
};

}  // namespace fovea::cuda::sm90
