// Rows of codes on their way into shared memory, where they are numbers of 16 bits: read by 16 codes into registers,
// and written once a stage is free, so that memory is waited for beside the products of the tile before. Read
// sm80/attention_coded.cuh for the walk.
#pragma once

#include "common/codes.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/memory.cuh"
#include "shared/forward_params_coded.h"
#include "shared/forward_spec.h"
#include "team/compute.cuh"
#include "team/team.cuh"

namespace fovea::cuda::team {

inline constexpr int kCodesOfUnit = 16;  // 16 bytes of a row, two chunks of shared memory

/// K or V of a tile, as one thread has them.
template <TeamSpec spec, Codes codes, class Tile>
class CodedRows {
  static constexpr int kUnits = Tile::kChunks / 2;  // of a row
  static constexpr int kThreads = Traits<spec>::kThreads;
  static constexpr int kNum = (spec.tile_kv * kUnits + kThreads - 1) / kThreads;
  static_assert(Tile::kChunks % 2 == 0, "head dims of a tile are multiples of 32");

 public:
  /// Asks for tile `idx`. What does not exist becomes zeros, whatever lies there, and whatever its scale.
  FOVEA_DEVICE_MEMBER void load(const Team<spec>& team, const CodedParams& p, const BshdParam& t,
                                const ScaleParam& scale, std::int32_t idx, int head_dim) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      const int at = (team.warp * 32 + team.lane) + i * kThreads;
      const int unit = at % kUnits;
      const std::int32_t key = idx * spec.tile_kv + at / kUnits;
      codes_[i] = {};
      scale_[i] = 0;
      if (at / kUnits >= spec.tile_kv || key >= team.work.kv_end || unit * kCodesOfUnit >= head_dim)
        continue;
      const KvPlace place = place_of_key<spec>(p.common, team.work.sequence, key);
      const char* const row = static_cast<const char*>(t.data) + place.in(t, team.work.kv_head);
      scale_[i] = ptx::ld_global(
          scale_at(scale, team.work.sequence.idx, place.batch, place.row, team.work.kv_head));
      codes_[i] = p.are_codes_aligned != 0
                      ? ptx::ld_global(reinterpret_cast<const U32x4*>(row + unit * kCodesOfUnit))
                      : gathered(row, t.col_stride, unit * kCodesOfUnit, head_dim);
    }
  }

  FOVEA_DEVICE_MEMBER void store(const Team<spec>& team, const Tile& to) const {
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      const int at = (team.warp * 32 + team.lane) + i * kThreads;
      if (spec.tile_kv * kUnits % kThreads != 0 && at / kUnits >= spec.tile_kv) break;
      const int row = at / kUnits;
      const int chunk = at % kUnits * 2;
      ptx::st_shared(to.chunk(row, chunk), eight_numbers(codes_[i].x, codes_[i].y, scale_[i]));
      ptx::st_shared(to.chunk(row, chunk + 1), eight_numbers(codes_[i].z, codes_[i].w, scale_[i]));
    }
  }

 private:
  FOVEA_DEVICE_MEMBER static U32x4 eight_numbers(std::uint32_t low, std::uint32_t high,
                                                 float scale) {
    const FourNumbers a = numbers_of<codes>(low, scale);
    const FourNumbers b = numbers_of<codes>(high, scale);
    return {pack<spec.element>(a.x[0], a.x[1]), pack<spec.element>(a.x[2], a.x[3]),
            pack<spec.element>(b.x[0], b.x[1]), pack<spec.element>(b.x[2], b.x[3])};
  }

  /// Byte by byte: rows of any alignment, stride and width.
  FOVEA_DEVICE_MEMBER static U32x4 gathered(const char* row, std::int64_t col_stride, int first,
                                            int head_dim) {
    std::uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < kCodesOfUnit; ++i) {
      const int col = first + i;
      std::uint32_t byte = 0;
      if (col < head_dim) {
        byte = ptx::ld_global(reinterpret_cast<const std::uint8_t*>(row) + col * col_stride);
      }
      words[i / 4] |= byte << (i % 4 * 8);
    }
    return {words[0], words[1], words[2], words[3]};
  }

  U32x4 codes_[kNum];
  float scale_[kNum];
};

}  // namespace fovea::cuda::team
