// What all roles of Hopper's backward kernel know: what follows from the spec, where things lie in shared memory, what
// the roles post for each other. ../attention_backward.cuh has the picture; read load.cuh next.
#pragma once

#include "common/backward_work.cuh"
#include "common/ring.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "shared/backward_params_sm90.h"
#include "shared/backward_spec_sm90.h"
#include "sm90/backward/posted_tile.cuh"
#include "sm90/role_warp.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm90 {

/// All that follows from the spec. Blackwell's kernel has traits of its own (sm100/backward/cta.cuh) and the same roles
/// that load and take turns.
template <auto spec>
struct BackwardTraits {
  static_assert(spec.element != Element::f32, "wgmma multiplies 16-bit elements here");
  static_assert(spec.dout_element == spec.element, "dout is multiplied with v, and P with dout");
  static_assert(spec.head_dim_qk % 64 == 0 && spec.head_dim_v % 64 == 0,
                "rows are whole panels of 128 bytes");
  static constexpr int kQueryProducts = spec.tile_q * spec.head_dim_qk / (64 * 64);
  static_assert(kQueryProducts == 1 || kQueryProducts == 2, "dq of a tile is one product or two");
  static_assert(spec.head_dim_qk == spec.head_dim_v, "dk lies where q did, dv where v did");
  static_assert(!spec.is_staggered ||
                    (spec.is_deterministic && !spec.is_varlen && !spec.hides_keys),
                "every tile of queries is visited, by turns");

  static constexpr int kKeys = kSm90BackwardKeys;
  static constexpr int kGroups = 2;  // that own keys, 64 each
  static constexpr int kStages = spec.stages;
  static constexpr Sm90BackwardLayout kAt = sm90_backward_layout(spec);
  static_assert(kAt.bytes <= 232448, "an SM has no more");
  static constexpr ptx::WgmmaType kType =
      spec.element == Element::bf16 ? ptx::WgmmaType::bf16 : ptx::WgmmaType::f16;

  static constexpr int kElementBytes = element_bytes(spec.element);
  using KTile = SharedTile<kKeys, kElementBytes * spec.head_dim_qk, Swizzle::bytes128>;
  using VTile = SharedTile<kKeys, kElementBytes * spec.head_dim_v, Swizzle::bytes128>;
  using QTile = SharedTile<spec.tile_q, kElementBytes * spec.head_dim_qk, Swizzle::bytes128>;
  using DoutTile = SharedTile<spec.tile_q, kElementBytes * spec.head_dim_v, Swizzle::bytes128>;
  using DsTile = SharedTile<kKeys, kElementBytes * spec.tile_q, Swizzle::bytes128>;
  using DkTile = SharedTile<64, kElementBytes * spec.head_dim_qk, Swizzle::bytes128>;
  using DvTile = SharedTile<64, kElementBytes * spec.head_dim_v, Swizzle::bytes128>;

  // 65,536 registers: what each group makes of its share. 2 * 216 + 72 = 3 * 168; with a fourth group, which loads and
  // takes turns, 2 * 208 + 64 + 32 = 4 * 128.
  static constexpr bool kHasAside = spec.is_deterministic;
  static_assert(spec.num_warps == (kHasAside ? 16 : 12), "two groups own keys, one sums dq");
  static constexpr int kKeyRegisters = kHasAside ? 208 : 216;
  static constexpr int kQueryRegisters = kHasAside ? 64 : 72;
  static constexpr int kAsideRegisters = 32;

  static constexpr int kDeltaTileBytes = spec.tile_q * delta_bytes(spec);
  /// Floats of dq_sums that one product has.
  static constexpr int kProductSums = 64 * 64;
};

/// What the CTA owns: keys kv_begin and on of one head, of one sequence.
struct OwnedKeys {
  std::int32_t kv_begin, kv_head, batch, seqlen_q;
  std::int32_t seqlen_kv, q_row, kv_row, is_nothing;
};

struct OwnedWords {
  ptx::U32x4 lo, hi;
};

/// What all roles know.
template <auto spec>
struct BackwardCta : RoleWarp {
  using T = BackwardTraits<spec>;
  const Sm90BackwardParams& p;

  FOVEA_DEVICE_MEMBER SharedAddress q_at(int stage) const {
    return smem + T::kAt.q + stage * T::QTile::kBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress dout_at(int stage) const {
    return smem + T::kAt.dout + stage * T::DoutTile::kBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress ds_at(int buffer) const {
    return smem + T::kAt.ds + buffer * T::DsTile::kBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress delta_at(int stage) const {
    return smem + T::kAt.delta + stage * T::kDeltaTileBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress log_sum_at(int stage) const {
    return smem + T::kAt.log_sum + stage * 4 * spec.tile_q;
  }
  /// Of the i-th tile of queries that the CTA visits.
  FOVEA_DEVICE_MEMBER SharedAddress posted_at(int i) const {
    return smem + T::kAt.words + 8 * (i % kSm90BackwardWords);
  }

  FOVEA_DEVICE_MEMBER PostedTile posted(int i) const {
    const auto words = ptx::ld_shared<ptx::U32x2>(posted_at(i));
    return {words.x, static_cast<std::int32_t>(words.y)};
  }

  /// From shared memory, whenever it is asked for: nobody has registers for it.
  FOVEA_DEVICE_MEMBER OwnedKeys owned() const {
    return ptx::bit_cast<OwnedKeys>(
        OwnedWords{ptx::ld_shared<ptx::U32x4>(smem + T::kAt.work),
                   ptx::ld_shared<ptx::U32x4>(smem + T::kAt.work + 16)});
  }
  FOVEA_DEVICE_MEMBER void post_owned(const OwnedTile& tile) const {
    const Sequence& s = tile.sequence;
    const auto words = ptx::bit_cast<OwnedWords>(OwnedKeys{
        tile.begin, tile.head, s.idx, s.seqlen_q, s.seqlen_kv, static_cast<std::int32_t>(s.q_row),
        static_cast<std::int32_t>(s.kv_row), tile.is_nothing ? 1 : 0});
    ptx::st_shared(smem + T::kAt.work, words.lo);
    ptx::st_shared(smem + T::kAt.work + 16, words.hi);
  }

  /// By one thread: barriers of what is loaded, whose stages so many arrivals give back, and those of turns.
  FOVEA_DEVICE_MEMBER void init_load_barriers(std::uint32_t stage_readers) const {
    ptx::mbarrier_init(barrier(T::kAt.k_full, 0), 1);
    ptx::mbarrier_init(barrier(T::kAt.v_full, 0), 1);
    for (int i = 0; i < T::kStages; ++i) {
      ptx::mbarrier_init(barrier(T::kAt.q_full, i), 1);
      ptx::mbarrier_init(barrier(T::kAt.dout_full, i), 1);
      ptx::mbarrier_init(barrier(T::kAt.stage_empty, i), stage_readers);
    }
  }
  FOVEA_DEVICE_MEMBER void init_turn_barriers() const {
    for (int i = 0; i < kSm90BackwardTurns; ++i) {
      ptx::mbarrier_init(barrier(T::kAt.turn, i), 1);
      ptx::mbarrier_init(barrier(T::kAt.added, i), 4);
      ptx::mbarrier_init(barrier(T::kAt.passed, i), 1);
    }
  }

  FOVEA_DEVICE_MEMBER static Sequence sequence_of(const OwnedKeys& keys) {
    Sequence s{};
    s.idx = keys.batch;
    s.q_batch = s.kv_batch = spec.is_varlen ? 0 : keys.batch;
    s.q_row = keys.q_row;
    s.kv_row = keys.kv_row;
    s.seqlen_q = keys.seqlen_q;
    s.seqlen_kv = keys.seqlen_kv;
    return s;
  }

  FOVEA_DEVICE_MEMBER static StaggeredWalk staggered_walk(const OwnedKeys& keys) {
    return StaggeredWalk::of(keys.kv_begin / T::kKeys, ceil_div(keys.seqlen_kv, T::kKeys),
                             ceil_div(keys.seqlen_q, spec.tile_q));
  }

  /// Of the rows that prepare_rows made, that of row 0 of a head.
  FOVEA_DEVICE_MEMBER std::int64_t first_row(const OwnedKeys& keys, std::int32_t q_head) const {
    return statistics_at<spec.is_varlen>(p.common.rows, sequence_of(keys), q_head);
  }

  /// Where dq of a tile of queries is summed, and is there nothing yet? Elsewhere prepare_rows has left zeros.
  FOVEA_DEVICE_MEMBER float* dq_sums_of(const OwnedKeys& keys, std::int32_t tile) const {
    if constexpr (spec.is_staggered)
      return staggered_walk(keys).is_round(tile) ? p.rows.dq_round_sums : p.rows.dq_sums;
    return p.rows.dq_sums;
  }
  FOVEA_DEVICE_MEMBER bool is_first_sum(const OwnedKeys& keys, std::int32_t tile) const {
    if constexpr (spec.is_staggered) return ptx::vote_any(staggered_walk(keys).is_first(tile));
    return spec.finishes_queries && ptx::vote_any(keys.kv_begin == 0);  // which every tile sees
  }
};

}  // namespace fovea::cuda::sm90
