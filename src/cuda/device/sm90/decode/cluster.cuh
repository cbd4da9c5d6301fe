// All splits of the rows of a kv head by the CTAs of a cluster, one each: where they are few and the machine is empty,
// nothing takes time but waiting, and of a kernel that combines them all would be. Each CTA sends its rows' states to
// those CTAs that fold them: row r is that of rank r % CTAs.
#pragma once

#include "common/sequence.cuh"
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/split.h"
#include "sm90/decode/cta.cuh"
#include "sm90/decode/fold.cuh"

namespace fovea::cuda::sm90::decoding {

/// The split of this CTA: sequences, and of each its kv heads, are clusters. It may have none, and rows all the same.
template <Sm90DecodeSpec spec>
FOVEA_DEVICE Work work_of_cluster(const ForwardParams& p) {
  const std::int32_t head_units = p.num_heads_q / spec.heads_per_tile;
  const std::int32_t cluster = ptx::block_idx().x / spec.ctas_of_cluster;
  Work work{};
  work.sequence = dense_sequence<spec>(p, cluster / head_units);
  work.q_head = cluster % head_units * spec.heads_per_tile;
  work.kv_head = work.q_head / p.group;
  take_split<spec>(work, ptx::cluster_cta_rank());
  if constexpr (spec.has_packed_q) work.is_nothing = work.is_nothing || work.sequence.seqlen_q == 0;
  return work;
}

template <Sm90DecodeSpec spec, class Mods>
class ClusterOfSplits {
  using L = Layout<spec>;
  using Fold = RowFold<spec, Mods>;
  using Join = typename Fold::Join;
  using Row = typename Fold::Row;

 public:
  FOVEA_DEVICE_MEMBER ClusterOfSplits(const Cta<spec>& cta, const Join& join)
      : cta_(cta), join_(join) {}

  /// Rows warp, warp + kReaders, ... of the CTA's split. All CTAs have started.
  FOVEA_DEVICE_MEMBER void send() const {
#pragma unroll 1
    for (int row = cta_.warp; row < spec.tile_q; row += L::kReaders) {
      const Row r = join_.team.row_at(row);
      if (!r.exists) continue;
      const Part part = Fold::part_of(cta_, join_.join(row), r);
      const SharedAddress to = ptx::mapa(state_at(row / kCtas, r.work.split), row % kCtas);
      if (Fold::has_columns()) ptx::st_shared_cluster(to + ptx::lane_idx() * 16, part.columns);
      if (ptx::lane_idx() == 0) {
        ptx::st_shared_cluster(to + kBesideAt, part.lse);
        ptx::st_shared_cluster(to + kBesideAt + 4, part.beside);
      }
    }
  }

  /// Rows of this CTA, of whose splits all have come.
  FOVEA_DEVICE_MEMBER void fold() const {
    const int num = num_splits(join_.team.work.sequence.seqlen_kv, spec.most_splits);
    const int step = kCtas * L::kReaders;
#pragma unroll 1
    for (int row = ptx::cluster_cta_rank() + kCtas * cta_.warp; row < spec.tile_q; row += step) {
      const Row r = join_.team.row_at(row);
      if (!r.exists) continue;
      Folded group, all;
#pragma unroll 1
      for (int split = 0; split < num; ++split) {
        group.add(load(row / kCtas, split));
        if ((split + 1) % kSplitsOfGroup != 0 && split + 1 < num) continue;
        all.add(group.finished_group());
        group = {};
      }
      Fold::store_row(r, all);
    }
  }

 private:
  static constexpr int kCtas = spec.ctas_of_cluster;
  static constexpr int kBesideAt = 4 * spec.head_dim_v;
  static_assert(spec.tile_q % kCtas == 0, "rows are dealt evenly: a CTA has room for so many");

  /// Of the CTA's row-th.
  FOVEA_DEVICE_MEMBER SharedAddress state_at(int row, int split) const {
    return cta_.smem + L::kAt.states + (row * kCtas + split) * L::kAt.state_bytes;
  }

  FOVEA_DEVICE_MEMBER Part load(int row, int split) const {
    const SharedAddress at = state_at(row, split);
    const auto beside = ptx::ld_shared<ptx::U32x2>(at + kBesideAt);
    Part part{ptx::bit_cast<float>(beside.x), ptx::bit_cast<float>(beside.y), {0, 0, 0, 0}};
    if (Fold::has_columns()) part.columns = ptx::ld_shared<ptx::F32x4>(at + ptx::lane_idx() * 16);
    return part;
  }

  const Cta<spec>& cta_;
  const Join& join_;
};

}  // namespace fovea::cuda::sm90::decoding
