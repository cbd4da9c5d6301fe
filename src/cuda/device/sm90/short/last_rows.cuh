// The rows of a sequence behind its last whole row tile, up to 16, by a warp of their own. A warpgroup would take as
// long for them as for 64; a warp multiplies them with the keys that the others wait for anyway, by mma.sync, beside
// them. Read persistent.cuh next.
#pragma once

#include "common/passes.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "sm90/short/cta.cuh"
#include "sm90/short/output.cuh"
#include "sm90/short/softmax.cuh"
#include "tile/fragment.cuh"

namespace fovea::cuda::sm90::short_keys {

template <Sm90ShortSpec spec, class Mods>
struct LastRows {
  using T = Traits<spec>;
  using QTile = SharedTile<kShortLastRows, T::kAt.qk_row_bytes, T::kSwizzle>;
  using OTile = SharedTile<kShortLastRows, T::kAt.v_row_bytes, T::kSwizzle>;
  using KTile = typename T::KTile;
  using VTile = typename T::VTile;
  using Probabilities = std::uint32_t[spec.tile_kv / 16][4];
  static constexpr int kKeyBlocks = spec.tile_kv / 8;
  static constexpr int kColBlocks = spec.head_dim_v / 8;
  const Cta<spec>& cta;
  const int row_tile;  // as a group's would be

  float s[kKeyBlocks][4];
  float o[kColBlocks][4];
  Rows<spec> rows;

  FOVEA_DEVICE_MEMBER explicit LastRows(const Cta<spec>& of_cta)
      : cta(of_cta), row_tile(of_cta.num_whole_row_tiles()) {}

  /// Whether its sums are finite. CTAs that share a head's rows have whole row tiles, but for the last.
  FOVEA_DEVICE_MEMBER bool run(Pass pass) {
    if (row_tile * kShortRows >= spec.tile_q || !cta.warp_has_rows(row_tile)) return true;
    load_queries();
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, 0), 0);
    multiply_keys();
    Probabilities p;
    softmax(pass, p);
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.v_full, 0), parity_of(pass));
    multiply_values(p);
    const Work work = cta.work_of(row_tile);
    float factors[2];
    finish_rows(cta, work, rows, pass, factors);
    return finish_out(cta, work, OTile{place()}, in_one_row(o), factors, pass);
  }

 private:
  /// Of Q, and later of O.
  FOVEA_DEVICE_MEMBER SharedAddress place() const { return cta.smem + T::kAt.last_rows; }

  /// Rows that do not exist are zeros, and so are columns that pad the head dim.
  FOVEA_DEVICE_MEMBER void load_queries() const {
    constexpr int kChunks = spec.head_dim_qk / 8;
    static_assert(kShortLastRows * kChunks % 32 == 0);
    const ForwardParams& p = cta.p.common;
    const Work work = cta.work_of(row_tile);
#pragma unroll
    for (int i = 0; i < kShortLastRows * kChunks / 32; ++i) {
      const int row = (32 * i + cta.lane) / kChunks;
      const int chunk = (32 * i + cta.lane) % kChunks;
      const Row<spec> at(p, work, row);
      ptx::U32x4 elements{};
      if (at.exists && 8 * chunk < p.head_dim_qk) {
        const auto* const first =
            static_cast<const char*>(p.q.data) + at.query_at() * element_bytes(spec.element);
        elements = ptx::ld_global(reinterpret_cast<const ptx::U32x4*>(first) + chunk);
      }
      ptx::st_shared(QTile{place()}.chunk(row, chunk), elements);
    }
    ptx::sync_warp();
  }

  /// S = Q Kᵀ.
  FOVEA_DEVICE_MEMBER void multiply_keys() {
    const KTile keys{cta.k_at(0)};
    const SharedAddress q_row = QTile{place()}.chunk(cta.lane % 16, cta.lane / 16);
    const SharedAddress k_row = keys.chunk(cta.lane % 8 + cta.lane / 16 * 8, cta.lane / 8 % 2);
    clear(s);
#pragma unroll
    for (int step = 0; step < spec.head_dim_qk / 16; ++step) {
      const ptx::U32x4 q = ptx::ldmatrix_x4(QTile::chunk_ahead(q_row, 2 * step));
      const std::uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int j = 0; j < kKeyBlocks; j += 2) {
        const ptx::U32x4 b =
            ptx::ldmatrix_x4(KTile::chunk_ahead(k_row, 2 * step) + j * 8 * KTile::kRowPitch);
        ptx::mma_m16n8k16<spec.element>(s[j], a, b.x, b.y);
        ptx::mma_m16n8k16<spec.element>(s[j + 1], a, b.z, b.w);
      }
    }
  }

  FOVEA_DEVICE_MEMBER void softmax(Pass pass, Probabilities& p) {
    const TileSpan span = span_of<row_tile_spec<spec>()>(cta.work_of(row_tile));
    auto& scores = in_one_row(s);
    Spans<kLeavesOutSpans<Mods, spec.tile_kv / 2>> spans;
    if (visible_tiles<Mods>(cta, span).full == 0) spans = mask<Mods>(cta, row_tile, 0, scores);
    if (is_indicator(pass)) shrink(scores);
    rows.begin();
    rows.softmax(scores, spans, cta.p.common.softmax_scale_log2,
                 [&](int i, float lo, float hi) { p[i / 4][i % 4] = pack<spec.element>(lo, hi); });
  }

  /// O = P V.
  FOVEA_DEVICE_MEMBER void multiply_values(const Probabilities& p) {
    const SharedAddress v_row = VTile{cta.v_at(0)}.chunk(cta.lane % 16, cta.lane / 16);
    clear(o);
#pragma unroll
    for (int step = 0; step < spec.tile_kv / 16; ++step) {
#pragma unroll
      for (int j = 0; j < kColBlocks; j += 2) {
        const ptx::U32x4 b =
            ptx::ldmatrix_x4_trans(VTile::chunk_ahead(v_row, j) + step * 16 * VTile::kRowPitch);
        ptx::mma_m16n8k16<spec.element>(o[j], p[step], b.x, b.y);
        ptx::mma_m16n8k16<spec.element>(o[j + 1], p[step], b.z, b.w);
      }
    }
  }

  template <int n>
  FOVEA_DEVICE_MEMBER static void clear(float (&sums)[n][4]) {
#pragma unroll
    for (auto& block : sums) block[0] = block[1] = block[2] = block[3] = 0;
  }
};

}  // namespace fovea::cuda::sm90::short_keys
