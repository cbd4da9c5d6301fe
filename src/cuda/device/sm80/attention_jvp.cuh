// Attention and its tangent by mma.sync and cp.async: forward mode on every tensor-core GPU from sm_80 up, and of f16
// on Turing, where copies pass through registers and are waited for.
//
//   S = scale Q Kᵀ,  S' = f_s(S) scale (Q' Kᵀ + Q K'ᵀ) + g(S),  S = mask(f(S)),  S' = 0 where S = -inf
//   O += P V,  T += (P (S' - r)) V + P V'                      common/tangent_row.cuh has r and the ends
//
// f is the score program, f_s its derivative by the score, g what tangents of captured data add. The walk is
// attention_forward.cuh's, with the pieces of team/: a CTA owns 64 rows, a warp 16 of them all along. Tensors and their
// tangents are two teams of the same threads, each with its queries and stages in shared memory. S and S', then P and P
// (S' - r), are accumulators that become A operands as they stand; a fragment of K serves Q and Q', one of V both
// weights, and one of Q both K and K'.
//
// Six products where forward has two. Heads whose O and T leave no registers come in two launches, each with half of
// the columns of V: S and S' are then computed twice.
//
// Bound: tensor cores at mma.sync's rate. For each key a warp reads 2 rows of head_dim_qk and 2 of head_dim_v elements
// from shared memory, and multiplies each twice or once: 3 (head_dim_qk + head_dim_v) multiply-adds of 16 rows for 4
// bytes of each pair of columns. docs/kernels/attention_jvp_sm80.md counts.
//
// NaN and infinity, and what leaves the range of f16: a CTA whose sums are not finite computes its rows again key by
// key in f32, by sm80/attention_jvp_f32.cuh.
//
// Refused: f32 inputs, tangents of another dtype than q, head dims above 256 (sm80/attention_jvp_f32.cuh).
#pragma once

#include "common/copies.cuh"
#include "common/element.cuh"
#include "common/passes.cuh"
#include "common/quad_reduce.cuh"
#include "common/range.cuh"
#include "common/row_view.cuh"
#include "common/score.cuh"
#include "common/sequence.cuh"
#include "common/tangent_row.cuh"
#include "common/tile_walk.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "shared/jvp_params.h"
#include "shared/jvp_spec.h"
#include "sm80/attention_jvp_f32.cuh"
#include "team/compute.cuh"
#include "team/load.cuh"
#include "team/scores.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"
#include "tile/product.cuh"

namespace fovea::cuda::sm80 {

using namespace team;

template <JvpSpec spec, class Mods>
struct Jvp {
  static constexpr TeamSpec kTeam = spec;
  using T = Traits<kTeam>;
  using Tiles = typename WalkOf<Mods>::Type;
  using Fragments = ScoreFragments<kTeam>;
  using Outputs = float[T::kRowBlocks][T::kColBlocks][4];
  using Operand = std::uint32_t[T::kRowBlocks][4];  // A, of one step

  static constexpr bool kHasProducts = spec.has_q_tangent || spec.has_k_tangent;

  const JvpParams& p;
  Team<kTeam> team;      // of q, k, v
  Team<kTeam> tangents;  // of their tangents

  Outputs out, out_tangent;
  TangentRow rows[T::kRowBlocks][2];

  FOVEA_DEVICE_MEMBER Jvp(const JvpParams& params, const Work& work)
      : p(params),
        team{params.forward, work, ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()},
        tangents{params.tangent, work, ptx::dynamic_shared() + sm80_jvp_tangents_at(spec),
                 ptx::warp_idx(), ptx::lane_idx()} {}

  // ---- scores ----------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER SharedAddress key_row(const typename T::KTile& keys) const {
    return keys.chunk(team.lane % 8 + team.lane / 16 * 8, team.lane / 8 % 2);
  }

  /// Two blocks of keys of one step: S += A Bᵀ.
  FOVEA_DEVICE_MEMBER static void add_products(Fragments& s, int j, const Operand& a,
                                               const U32x4& b) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
      multiply_add<spec.element, spec.instructions>(s[i][j], a[i], b.x, b.y);
      multiply_add<spec.element, spec.instructions>(s[i][j + 1], a[i], b.z, b.w);
    }
  }

  /// s = Q Kᵀ and t = Q' Kᵀ + Q K'ᵀ.
  FOVEA_DEVICE_MEMBER void multiply_keys(Fragments& s, Fragments& t, int stage) const {
    using Tile = typename T::KTile;
    using Scores = team::Scores<kTeam, Mods>;
    const SharedAddress k = key_row(team.keys_at(stage));
    const SharedAddress k_tangent = key_row(tangents.keys_at(stage));
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = t[i][j][e] = 0;
#pragma unroll
    for (int step = 0; step < T::kQkSteps; ++step) {
      Operand q, q_tangent;
      load_a_step<typename T::QTile>(q, Scores::query_row(team), step);
      if constexpr (spec.has_q_tangent)
        load_a_step<typename T::QTile>(q_tangent, Scores::query_row(tangents), step);
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; j += 2) {
        const int ahead = j * 8 * Tile::kRowPitch;
        const U32x4 keys = ptx::ldmatrix_x4(Tile::chunk_ahead(k, 2 * step) + ahead);
        add_products(s, j, q, keys);
        if constexpr (spec.has_q_tangent) add_products(t, j, q_tangent, keys);
        if constexpr (spec.has_k_tangent)
          add_products(t, j, q, ptx::ldmatrix_x4(Tile::chunk_ahead(k_tangent, 2 * step) + ahead));
      }
    }
  }

  /// Scale, programs and mask; what a row does not see is -inf and 0.
  FOVEA_DEVICE_MEMBER void find_scores(Fragments& s, Fragments& t, const VisitedTile& tile) const {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Position at = team.row_at(team.my_row(i, half)).position();
#pragma unroll
        for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            at.kv_idx = tile.idx * spec.tile_kv + j * 8 + team.lane % 4 * 2 + e;
            float& score = s[i][j][half * 2 + e];
            float& tangent = t[i][j][half * 2 + e];
            Dual dual = dual_score<Mods, kHasProducts>({score, tangent}, at, p.forward);
            if (!tile.is_full)
              mask_score<Mods>(dual.value, at, team.work.kv_end, p.forward.captures);
            score = dual.value;
            tangent = dual.value == -infinity() ? 0.0F : dual.tangent;
          }
        }
      }
    }
  }

  // ---- softmax ---------------------------------------------------------------------------------

  /// Of one row: s becomes P, t becomes P (S' - r).
  FOVEA_DEVICE_MEMBER TangentStep softmax_row(Fragments& s, Fragments& t, int i, int half) {
    TangentRow& row = rows[i][half];
    TangentStep step = begin_tile<Mods::has_score>(row, greatest_of_row<kTeam>(s, i, half));
    float sum = 0, moments = 0, rest = 0;
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
      for (int e = half * 2; e < half * 2 + 2; ++e) {
        s[i][j][e] = probability(s[i][j][e], step.origin);
        sum += s[i][j][e];
        moments = ptx::fma_rn(s[i][j][e], t[i][j][e] - row.centre, moments);
      }
    }
    move_centre(row, step, quad_sum(sum), quad_sum(moments));
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
      for (int e = half * 2; e < half * 2 + 2; ++e) {
        t[i][j][e] = s[i][j][e] * (t[i][j][e] - row.centre);
        rest += t[i][j][e];
      }
    }
    row.tangent += quad_sum(rest);
    return step;
  }

  FOVEA_DEVICE_MEMBER void softmax(Fragments& s, Fragments& t) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const TangentStep step = softmax_row(s, t, i, half);
#pragma unroll
        for (int j = 0; j < T::kColBlocks; ++j) {
#pragma unroll
          for (int e = half * 2; e < half * 2 + 2; ++e) {
            out_tangent[i][j][e] = moved(out_tangent[i][j][e], out[i][j][e], step);
            out[i][j][e] *= step.origin.rescale;
          }
        }
      }
    }
  }

  /// What dropout takes from P it takes from P (S' - r).
  FOVEA_DEVICE_MEMBER void drop(Fragments& s, Fragments& t, const VisitedTile& tile) const {
    Sums<kTeam, Mods>::drop(team, s, tile);
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) t[i][j][e] = s[i][j][e] == 0 ? 0.0F : t[i][j][e];
  }

  // ---- the second product ----------------------------------------------------------------------

  /// Two blocks of S side by side, rounded, are one A operand.
  FOVEA_DEVICE_MEMBER static void pack_step(Operand& a, const Fragments& s, int step) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* pair = &s[i][step * 2 + e / 2][e % 2 * 2];
        a[i][e] = pack<spec.element>(pair[0], pair[1]);
      }
    }
  }

  FOVEA_DEVICE_MEMBER static void add_values(Outputs& sums, int j, const Operand& a,
                                             const U32x4& b) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
      multiply_add<spec.element, spec.instructions>(sums[i][j], a[i], b.x, b.y);
      multiply_add<spec.element, spec.instructions>(sums[i][j + 1], a[i], b.z, b.w);
    }
  }

  /// O += P V and T += W V + P V'.
  FOVEA_DEVICE_MEMBER void multiply_values(const Fragments& s, const Fragments& t, int stage) {
    using Tile = typename T::VTile;
    const SharedAddress v = team.values_at(stage).chunk(team.lane % 16, team.lane / 16);
    const SharedAddress v_tangent = tangents.values_at(stage).chunk(team.lane % 16, team.lane / 16);
#pragma unroll
    for (int step = 0; step < T::kPvSteps; ++step) {
      Operand weights, moments;
      pack_step(weights, s, step);
      pack_step(moments, t, step);
      const int ahead = step * 16 * Tile::kRowPitch;
#pragma unroll
      for (int j = 0; j < T::kColBlocks; j += 2) {
        const U32x4 values = ptx::ldmatrix_x4_trans(Tile::chunk_ahead(v, j) + ahead);
        add_values(out, j, weights, values);
        add_values(out_tangent, j, moments, values);
        if constexpr (spec.has_v_tangent)
          add_values(out_tangent, j, weights,
                     ptx::ldmatrix_x4_trans(Tile::chunk_ahead(v_tangent, j) + ahead));
      }
    }
  }

  // ---- the walk --------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void start() {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
      rows[i][0] = rows[i][1] = empty_tangent_row();
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][j][e] = out_tangent[i][j][e] = 0;
    }
  }

  /// Full only where all keys exist, too; idx -1: there are no more.
  FOVEA_DEVICE_MEMBER VisitedTile next_tile(Tiles& tiles) const {
    VisitedTile tile;
    if (!tiles.next(tile)) return {-1, false};
    tile.is_full = tile.is_full && (tile.idx + 1) * spec.tile_kv <= team.work.kv_end;
    return tile;
  }

  FOVEA_DEVICE_MEMBER void load(const VisitedTile& tile, int stage) const {
    load_tile(team, tile, stage);
    if constexpr (spec.has_k_tangent) load_keys(tangents, tile, stage);
    if constexpr (spec.has_v_tangent) load_values(tangents, tile, stage);
  }

  FOVEA_DEVICE_MEMBER void add_tile(const VisitedTile& tile, int stage) {
    Fragments s, t;
    multiply_keys(s, t, stage);
    find_scores(s, t, tile);
    softmax(s, t);
    if constexpr (spec.has_dropout) drop(s, t, tile);
    multiply_values(s, t, stage);
  }

  /// Every tile that the rows see, the next one's copies under way.
  FOVEA_DEVICE_MEMBER void walk() {
    const TileSpan rows_span = span_of<kTeam>(team.work);
    Tiles tiles = start_tiles<Tiles>(team, rows_span);
    const bool has_rows = team.warp_has_rows();
    start();
    load_queries(team);
    if constexpr (spec.has_q_tangent) load_queries(tangents);
    VisitedTile tile = next_tile(tiles);
    load(tile, 0);
    int stage = 0;
#pragma unroll 1
    while (tile.idx >= 0) {
      wait_for_copies<spec.instructions>();
      team.meet();
      const VisitedTile next = next_tile(tiles);
      const int other = spec.stages - 1 - stage;
      if constexpr (spec.stages == 2) load(next, other);
      if (has_rows) add_tile(tile, stage);
      if constexpr (spec.stages == 1) {
        team.meet();
        load(next, 0);
      }
      tile = next;
      stage = other;
    }
    wait_for_copies<spec.instructions>();
    team.meet();
  }

  // ---- the end ---------------------------------------------------------------------------------

  /// The same answer in every thread.
  FOVEA_DEVICE_MEMBER bool is_finite() const {
    float zero = 0;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
        zero += zero_if_finite(out[i][j]) + zero_if_finite(out_tangent[i][j]);
    }
    const bool mine = ptx::vote_all(!is_nan(zero));
    const SharedAddress votes = team.smem + T::kAt.votes;
    if (team.lane == 0) ptx::st_shared(votes + team.warp * 4, static_cast<std::uint32_t>(mine));
    team.meet();
    bool all = true;
#pragma unroll
    for (int i = 0; i < spec.num_warps; ++i)
      all = all && ptx::ld_shared<std::uint32_t>(votes + i * 4) != 0;
    return all;
  }

  /// Two neighbours of a row whose column 0 is element `at`.
  FOVEA_DEVICE_MEMBER static void store_pair(const ForwardParams& to, Element element,
                                             std::int64_t at, int col, float lo, float hi) {
    void* const data = const_cast<void*>(to.out.data);
    if (to.is_out_aligned != 0 && element != Element::f32) {
      if (col >= to.head_dim_v) return;
      const std::uint32_t pair =
          element == Element::bf16 ? ptx::cvt_bf16x2(lo, hi) : ptx::cvt_f16x2(lo, hi);
      ptx::st_global(reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(data) + at + col),
                     pair);
      return;
    }
    if (col < to.head_dim_v) store_element(data, element, at + col * to.out.col_stride, lo);
    if (col + 1 < to.head_dim_v)
      store_element(data, element, at + (col + 1) * to.out.col_stride, hi);
  }

  FOVEA_DEVICE_MEMBER void finish_row(const Work& work, int i, int half) const {
    const RowView<kTeam> row(p.forward, work, team.my_row(i, half));
    const RowView<kTeam> tangent(p.tangent, work, team.my_row(i, half));
    if (!row.exists) return;
    const Dual sink = sink_of(p, row.q_head, work.sequence.is_trailing);
    const TangentResult result = finish_tangent_row(
        rows[i][half], sink, spec.has_dropout ? p.forward.dropout_keep_scale : 1.0F);
    const std::int64_t at = row.out_at(), tangent_at = tangent.out_at();
#pragma unroll
    for (int j = 0; j < T::kColBlocks; ++j) {
      const int col = j * 8 + team.lane % 4 * 2;
      const int e = half * 2;
      const Dual lo = finish_column(out[i][j][e], out_tangent[i][j][e], result);
      const Dual hi = finish_column(out[i][j][e + 1], out_tangent[i][j][e + 1], result);
      store_pair(p.forward, spec.out_element, at, col, lo.value, hi.value);
      store_pair(p.tangent, spec.out_tangent_element, tangent_at, col, lo.tangent, hi.tangent);
    }
    if (team.lane % 4 != 0) return;
    row.store_values(result.lse.value, 0.0F, 0.0F);
    tangent.store_values(result.lse.tangent, 0.0F, 0.0F);
  }

  /// As many rows at a time as the plain kernel has room for.
  FOVEA_DEVICE_MEMBER void run_carefully(Work work) const {
    constexpr JvpSpec kCareful = careful_jvp_spec(spec);
#pragma unroll 1
    for (int begin = 0; begin < spec.tile_q; begin += kCareful.tile_q) {
      ptx::sync_threads();  // shared memory changes hands
      if (work.q_begin < work.sequence.seqlen_q) PlainJvp<kCareful, Mods>(p, work).run();
      work.q_begin += kCareful.tile_q;
    }
  }

  FOVEA_DEVICE_MEMBER void run() {
    static_assert(spec.heads_per_tile == 1, "rows of a tile are queries of one head");
    team.keep_work();
    tangents.keep_work();
    team.meet();
    walk();
    const bool is_done = is_finite();
    const Work kept = team.kept_work();
    team.renew_lane();
    if (!is_done) return run_carefully(kept);
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) finish_row(kept, i, half);
  }
};

template <JvpSpec spec, class Mods>
FOVEA_DEVICE void attention_jvp(const JvpParams& p) {
  const Work work = find_work<spec>(p.forward);
  if (work.is_nothing) return;
  Jvp<spec, Mods>(p, work).run();
}

}  // namespace fovea::cuda::sm80
