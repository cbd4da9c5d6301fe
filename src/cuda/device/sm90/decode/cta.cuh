// What all warps of the decoding kernel know: where things lie in shared memory, and what the first loading warp posts.
// ../decode.cuh has the picture; read load.cuh next.
#pragma once

#include "common/ring.cuh"
#include "common/sequence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/cache_policy.h"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "shared/split.h"
#include "sm90/role_warp.cuh"
#include "team/join.cuh"
#include "team/team.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm90::decoding {

/// All that follows from the spec.
template <Sm90DecodeSpec spec>
struct Layout {
  static constexpr TeamSpec kWarpSpec = spec_of_decoding_warps(spec);
  using T = team::Traits<kWarpSpec>;
  static constexpr int kReaders = sm90_decode_readers(spec);
  static constexpr int kBlocks = kWarpSpec.num_warps;  // of rows, each a warp's
  static constexpr int kParts = sm90_decode_parts(spec);
  static constexpr int kLoaders = sm90_decode_loaders(spec);
  static constexpr int kQueryLoaders = sm90_decode_query_loaders(spec);
  /// Of a thread, where a warpgroup gives registers to two others; else all have as many.
  static constexpr bool kTradesRegisters =
      (spec.has_codes() && kReaders == 8) || multiplies_by_wgmma(spec);
  static constexpr int kReaderRegisters = 208, kHelperRegisters = 88;
  static constexpr int kStages = spec.stages;  // boxes under way or being computed
  static constexpr int kSlices = spec.slices_of_box;
  static constexpr int kReadersOfBox = kBlocks * (kSlices < kParts ? kSlices : kParts);
  /// Of all slices.
  template <int head_dim>
  using BoxTile = SharedTile<sm90_decode_keys_of_box(spec), sm90_decode_key_bytes(spec) * head_dim>;
  using KTile = BoxTile<spec.head_dim_qk>;
  using VTile = BoxTile<spec.head_dim_v>;
  using QTile = SharedTile<spec.tile_q, element_bytes(spec.element) * spec.head_dim_qk>;
  static constexpr int kRecords = kDecodeRecords;
  static constexpr Sm90DecodeLayout kAt = sm90_decode_layout(spec);
  using Parts = team::Parts<sm90_decode_kept_parts(spec), spec.tile_q, spec.head_dim_v>;
  static_assert(Parts::kPartBytes == kAt.part_bytes, "host and device count the same bytes");
  static_assert(spec.is_split, "results are partial states, which the combine kernel finishes");
  static_assert((has_few_rows(spec) ? spec.has_codes() : spec.tile_q == kBlocks * kDecodeRows) &&
                    kReaders == kBlocks * kParts,
                "each part of the keys has a warp for each block of rows");
  static_assert(!multiplies_by_wgmma(spec) || (kBlocks == 4 && kParts == 2 && kSlices == 1),
                "a warpgroup has all rows, and computes every other box");
  // A warp that is ahead of the others would wait for its slice in a slot whose last one has not come yet: parities
  // alias.
  static_assert(kStages * kSlices % kParts == 0, "a slot is always the same warps'");
  static_assert(kStages % kLoaders == 0, "a box is one loading warp's");
  static_assert(kParts % kSlices == 0, "of a box a warp has one slice at most");
  static_assert(spec.tile_kv * KTile::kRowPitch % 1024 == 0 &&
                    spec.tile_kv * VTile::kRowPitch % 1024 == 0,
                "TMA's swizzle repeats after 1024 bytes");
  static_assert(spec.has_codes() == (spec.v_codes != Codes::none), "both are codes or neither");
  /// The loading warp's lane that asks for a box; of codes each lane copies scales.
  static constexpr int kArrivals = spec.has_codes() ? 1 + 32 : 1;
};

/// Barriers of the CTA: of all warps that compute; of those of a part of the slices; of those of two warpgroups that
/// have the same rows.
inline constexpr int kMeeting = 1, kFirstOfParts = 2, kFirstOfPairs = 10;

/// A split as the loading warp posts it.
struct Posted {
  Work work;
  Unit unit;  // that it is a part of
};

template <Sm90DecodeSpec spec>
struct Cta : RoleWarp {
  using L = Layout<spec>;
  const Sm90DecodeParams& p;

  FOVEA_DEVICE_MEMBER typename L::KTile keys_at(int stage) const {
    return {smem + L::kAt.boxes + stage * L::kAt.box_bytes};
  }
  FOVEA_DEVICE_MEMBER typename L::VTile values_at(int stage) const {
    return {keys_at(stage).base + L::KTile::kBytes};
  }
  FOVEA_DEVICE_MEMBER typename L::QTile queries() const { return {smem + L::kAt.queries}; }
  /// From a slice's first row on.
  template <class Tile>
  FOVEA_DEVICE_MEMBER static Tile slice_of(const Tile& box, int slice) {
    return {box.base + slice * spec.tile_kv * Tile::kRowPitch};
  }
  /// Of codes: the scales of keys `key` and behind it of a box; of its values.
  FOVEA_DEVICE_MEMBER SharedAddress key_scales_at(int stage, int key) const {
    return smem + L::kAt.scales + stage * L::kAt.scale_bytes + 4 * key;
  }
  FOVEA_DEVICE_MEMBER SharedAddress value_scales_at(int stage, int key) const {
    return key_scales_at(stage, key) + L::kAt.scale_bytes / 2;
  }
  FOVEA_DEVICE_MEMBER typename L::Parts parts() const { return {smem + L::kAt.parts}; }

  // ---- what becomes of lines in L2 ---------------------------------------------------------------

  FOVEA_DEVICE_MEMBER ptx::CachePolicy policy_of_keys() const {
    return p.keys_go_first != 0 ? ptx::CachePolicy::evict_first : ptx::CachePolicy::evict_normal;
  }
  /// Amid many keys sums of groups would be written to memory before the combine kernel reads them, at ten times the
  /// cost of reading as many bytes.
  FOVEA_DEVICE_MEMBER ptx::CachePolicy policy_of_sums() const {
    return p.keys_go_first != 0 ? ptx::CachePolicy::evict_normal : ptx::CachePolicy::evict_last;
  }

  // ---- splits that the loading warp posts --------------------------------------------------------

  FOVEA_DEVICE_MEMBER void post(const Posted& split, Ring<L::kRecords>& records) const {
    static_assert(sizeof(Posted) <= kDecodeRecordBytes && sizeof(Posted) % 16 == 0 &&
                      L::kAt.records % 16 == 0,
                  "a record holds a split, stored by 16 bytes");
    await(barrier(L::kAt.read, records.stage), records.parity);
    if (lane == 0) {
      const SharedAddress to = smem + L::kAt.records + records.stage * kDecodeRecordBytes;
      const auto words = ptx::bit_cast<PostedWords>(split);
#pragma unroll
      for (int i = 0; i < kPostedWords; i += 4) {
        ptx::st_shared(to + 4 * i, ptx::U32x4{words.word[i], words.word[i + 1], words.word[i + 2],
                                              words.word[i + 3]});
      }
    }
    release(barrier(L::kAt.posted, records.stage));
    records.advance();
  }

  FOVEA_DEVICE_MEMBER Posted take(Ring<L::kRecords>& records) const {
    const Posted split = look(records);
    release(barrier(L::kAt.read, records.stage));
    records.advance();
    return split;
  }

  /// The next one, which stays.
  FOVEA_DEVICE_MEMBER Posted look(const Ring<L::kRecords>& records) const {
    ptx::mbarrier_wait_parity(barrier(L::kAt.posted, records.stage), records.parity);
    const SharedAddress from = smem + L::kAt.records + records.stage * kDecodeRecordBytes;
    PostedWords words;
#pragma unroll
    for (int i = 0; i < kPostedWords; ++i)
      words.word[i] = ptx::ld_shared<std::uint32_t>(from + 4 * i);
    return ptx::bit_cast<Posted>(words);
  }

 private:
  static constexpr int kPostedWords = sizeof(Posted) / 4;
  struct PostedWords {
    std::uint32_t word[kPostedWords];
  };
};

}  // namespace fovea::cuda::sm90::decoding
