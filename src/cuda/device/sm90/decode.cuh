// Attention of few rows over many keys: decoding. What counts is how fast keys and values come from memory.
//
//   O = Σ_t exp(m_t - m) O_t,  l = Σ_t exp(m_t - m) l_t                 over teams, then over splits (sm80/combine.cuh)
//
// A CTA owns the rows of one kv head, heads of a group side by side, and one split of its keys. Its warps work in teams, each warp of
// a team on 16 of the rows: up to 16 rows make teams of one warp, 32 of two, 64 of four. Of four teams every one takes every fourth
// slice of keys, has shared memory of its own for it, and goes its own way: it copies slices by cp.async some ahead, and computes what
// sm80/attention_forward computes. Teams meet once, at the end of the split, where their sums are joined in the order of teams.
//
//   team 0   copy 0 4 8 | S0 P0 O0, copy 12 | S4 P4 O4, copy 16 | ...  \
//   team 1   copy 1 5 9 | S1 P1 O1, copy 13 | S5 P5 O5, copy 17 | ...   > meet, join, partial state
//   ...                                                                /
//   combine  starts beside the last CTAs and waits for them (programmatic dependent launch)
//
// Bound: memory. 4.2 TB/s are 19 bytes a clock of each SM, and a byte is asked for some 800 ns before it comes, so 26 KB must be
// under way on each SM. At head_dim 128, two CTAs of four warps with two slices of 8 KB on the way for each are 128 KB: also while one
// CTA starts or ends, and also on the few SMs that the last splits are left to. A warp computes a slice in about 800 of the 3,500
// clocks that memory takes for the slices of all eight. With more rows each warp of a team reads the team's slices from shared memory
// (74 % of its rate with 64 rows), and partial states grow: there are fewer and longer splits.
//
// Split boundaries follow from the sequence's own length (shared/split.h), so a row's bits do not depend on who else is in the
// batch. NaN and infinity in V at keys that a row does not see: a team whose sums are not finite computes them again, as
// sm80/attention_forward does.
//
// Refused (decode_sm90.cpp has the words): f32, packed sequences, more than 64 rows, head dims above 256, no
// more keys than one split has. More than 16 rows and head dims above 128 are not chosen: sm90/attention_forward is faster.
#pragma once

#include "common/online_softmax.cuh"
#include "common/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "sm80/attention_forward.cuh"
#include "sm80/forward/compute.cuh"
#include "sm80/forward/passes.cuh"
#include "sm80/forward/store.cuh"
#include "sm80/forward/team.cuh"

namespace fovea::cuda::sm90 {

using ptx::SharedAddress;
using sm80::AtEnd;
using sm80::Pass;
using sm80::Row;

/// Of the slices that the rows see, those of this team.
template <class Tiles, int num_teams, int team_warps>
class SlicesOfTeam {
 public:
  template <class... Args>
  FOVEA_DEVICE_MEMBER explicit SlicesOfTeam(const Args&... args) : tiles_(args...) {}

  FOVEA_DEVICE_MEMBER bool next(VisitedTile& slice) {
    do {
      if (!tiles_.next(slice)) return false;
    } while (slice.idx % num_teams != ptx::warp_idx() / team_warps);
    return true;
  }

 private:
  Tiles tiles_;
};

template <ForwardSpec spec, class Mods>
struct Decode {
  static constexpr ForwardSpec kTeamSpec = spec_of_team(spec);
  using Team = sm80::Forward<
      kTeamSpec, Mods,
      SlicesOfTeam<typename sm80::WalkOf<Mods>::Type, kTeamSpec.num_teams, kTeamSpec.num_warps>>;
  using T = typename Team::T;
  static_assert(spec.is_split, "results are partial states, which the combine kernel finishes");
  static_assert(kTeamSpec.tile_kv % 16 == 0, "a slice is a depth of the second product");
  static_assert(kTeamSpec.num_warps * kTeamSpec.num_teams == spec.num_warps && T::kWarpRows == 16,
                "a warp has 16 rows of one team");

  // Where a team's queries and slices were, it leaves its sums: a row of O, then origin, sum and maximum. Rows are 8 banks apart, so
  // that the pairs which lanes hold go to different ones.
  static constexpr int kStateAt = 4 * spec.head_dim_v;
  static constexpr int kRowBytes = kStateAt + 32;
  static constexpr int kTeamBytes = sm90_decode_team_bytes(spec);
  static_assert(spec.tile_q * kRowBytes <= T::kVotesAt, "sums fit where queries and slices were");

  Team mine;
  const int warp;

  FOVEA_DEVICE_MEMBER Decode(const ForwardParams& p, const Work& work)
      : mine(p, work, smem_of(ptx::warp_idx() / kTeamSpec.num_warps),
             ptx::warp_idx() % kTeamSpec.num_warps),
        warp(ptx::warp_idx()) {}

  FOVEA_DEVICE_MEMBER static SharedAddress smem_of(int team) {
    return ptx::dynamic_shared() + team * kTeamBytes;
  }

  // ---- compute ---------------------------------------------------------------------------------

  /// Which of this thread's sums an indicator reached, a bit each.
  struct Reached {
    std::uint32_t words[T::kRowBlocks][(T::kColBlocks * 4 + 31) / 32];
  };

  FOVEA_DEVICE_MEMBER Reached find_reached() const {
    Reached reached{};
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int at = 0; at < T::kColBlocks * 4; ++at)
        if (mine.sums.out[i][at / 4][at % 4] != 0) reached.words[i][at / 32] |= 1U << at % 32;
    return reached;
  }

  FOVEA_DEVICE_MEMBER void add_where(const Reached& reached, float value) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int at = 0; at < T::kColBlocks * 4; ++at)
        if ((reached.words[i][at / 32] >> at % 32 & 1U) != 0)
          mine.sums.out[i][at / 4][at % 4] += value;
  }

  /// This team's sums. Where they are not finite: which of them infinities of either sign reach, NaN being both; then the sums of
  /// what is finite, and these added.
  FOVEA_DEVICE_MEMBER void compute() {
    Reached up{}, down{};
    Pass pass = Pass::all;
#pragma unroll 1
    while (true) {
      mine.walk(pass);
      if (pass == Pass::all) {
        if (is_finite(mine.team, mine.sums)) return;
        pass = Pass::positive;
      } else if (pass == Pass::positive) {
        up = find_reached();
        pass = Pass::negative;
      } else if (pass == Pass::negative) {
        down = find_reached();
        pass = Pass::finite;
      } else {
        break;
      }
      mine.team.meet();  // slices are read: the next walk may write there
    }
    add_where(up, infinity());
    add_where(down, -infinity());
  }

  // ---- join ------------------------------------------------------------------------------------

  /// A row of one team.
  struct Part {
    float origin, sum, row_max;
  };

  FOVEA_DEVICE_MEMBER void put_rows() {
    mine.team.meet();
    const int lane = mine.team.lane;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowState row = mine.sums.rows[i][half];
        row.sum += ptx::shfl_bfly(row.sum, 1);
        row.sum += ptx::shfl_bfly(row.sum, 2);
        const SharedAddress to = mine.team.smem + mine.team.my_row(i, half) * kRowBytes;
        if (lane % 4 == 0) {
          const float row_max = spec.wants_row_max ? mine.sums.row_max[i][half] : 0.0F;
          ptx::st_shared(to + kStateAt, ptx::F32x4{row.origin, row.sum, row_max, 0.0F});
        }
#pragma unroll
        for (int j = 0; j < T::kColBlocks; ++j) {
          ptx::st_shared(
              to + (j * 8 + lane % 4 * 2) * 4,
              ptx::F32x2{mine.sums.out[i][j][half * 2], mine.sums.out[i][j][half * 2 + 1]});
        }
      }
    }
  }

  FOVEA_DEVICE_MEMBER static Part part_of(int team, int row) {
    const auto state = ptx::ld_shared<ptx::F32x4>(smem_of(team) + row * kRowBytes + kStateAt);
    return {state.x, state.y, state.z};
  }

  /// exp(m_t - m); 0 for a team that saw no key.
  FOVEA_DEVICE_MEMBER static float weight_of(const Part& part, float origin, float c) {
    if (part.origin == -infinity()) return is_nan(part.sum) ? 1.0F : 0.0F;
    return ptx::ex2_approx_ftz((part.origin - origin) * c);
  }

  /// Four columns, in the order of teams.
  FOVEA_DEVICE_MEMBER static ptx::F32x4 join_columns(const float (&weights)[kTeamSpec.num_teams],
                                                     int row, int col) {
    ptx::F32x4 sum{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kTeamSpec.num_teams; ++i) {
      const auto part = ptx::ld_shared<ptx::F32x4>(smem_of(i) + row * kRowBytes + col * 4);
      sum = {ptx::fma_rn(weights[i], part.x, sum.x), ptx::fma_rn(weights[i], part.y, sum.y),
             ptx::fma_rn(weights[i], part.z, sum.z), ptx::fma_rn(weights[i], part.w, sum.w)};
    }
    return sum;
  }

  FOVEA_DEVICE_MEMBER void join_row(const Work& work, const Row& r, int row) const {
    const ForwardParams& p = mine.team.p;
    const AtEnd<kTeamSpec> end{mine.team, work};
    const float unit = spec.is_prescaled ? 1.0F : p.softmax_scale;
    const float c = spec.is_prescaled ? kLog2E : p.softmax_scale_log2;
    Part parts[kTeamSpec.num_teams];
    Part whole{-infinity(), 0.0F, -infinity()};
#pragma unroll
    for (int i = 0; i < kTeamSpec.num_teams; ++i) {
      parts[i] = part_of(i, row);
      whole.origin = ptx::max_ftz(whole.origin, parts[i].origin);
      whole.row_max = ptx::max_ftz(whole.row_max, parts[i].row_max);
    }
    float weights[kTeamSpec.num_teams];
#pragma unroll
    for (int i = 0; i < kTeamSpec.num_teams; ++i) {
      weights[i] = weight_of(parts[i], whole.origin, c);
      whole.sum = ptx::fma_rn(weights[i], parts[i].sum, whole.sum);
    }
    RowResult result = finish_row({whole.origin, whole.sum}, unit, -infinity());
    if constexpr (spec.has_dropout) result.factor *= p.dropout_keep_scale;
    if (mine.team.lane == 0)
      store_row_values(end, r, result.lse, finish_row_max(whole.row_max, whole.sum, unit));
    auto* const to = reinterpret_cast<ptx::F32x4*>(out_row(end, r));
    for (int col = mine.team.lane * 4; col < spec.head_dim_v; col += 128) {
      const ptx::F32x4 sum = join_columns(weights, row, col);
      ptx::st_global(to + col / 4, ptx::F32x4{sum.x * result.factor, sum.y * result.factor,
                                              sum.z * result.factor, sum.w * result.factor});
    }
  }

  FOVEA_DEVICE_MEMBER void run() {
    mine.team.keep_work();
    mine.team.meet();
    compute();
    const Work work = mine.team.kept_work();
    mine.team.renew_lane();
    put_rows();
    ptx::sync_threads();
#pragma unroll 1
    for (int row = warp; row < spec.tile_q; row += spec.num_warps) {
      const Row r = mine.team.row_of(work, row);
      if (r.exists) join_row(work, r, row);
    }
  }
};

/// Where there are more splits than the launch has CTAs for, a CTA takes every so-manieth.
template <ForwardSpec spec, class Mods>
FOVEA_DEVICE void decode(const ForwardParams& p) {
  ptx::griddepcontrol_launch_dependents();
  Work work = find_work<spec>(p);
#pragma unroll 1
  while (!work.is_nothing) {
    Decode<spec, Mods>(p, work).run();
    take_split<spec>(work, work.split + ptx::grid_dim().y);
    ptx::sync_threads();
  }
}

}  // namespace fovea::cuda::sm90
