// The softmax of a group's rows, a thread each, from scores in tensor memory to P there in four bits, and their scales.
// Read output.cuh next.
//
//   p_j = p_max 2^(s_j c - m c)       m: the row's greatest score so far
//   code_j = e2m1(p_j / scale_g),  scale_g = greatest p_j of group g / 6         two levels: rows, then groups of keys
//   O += Σ_g scale_g code · V,  l += Σ p_j                                       of p before they are rounded
//
// A row is one thread's, so maxima and sums of groups need no shuffle, and eight neighbouring keys are a word of P.
// What divides by a scale is in the exponent: x_j = 2^(s_j c - m c - log2 scale_g) is what codes are made of, and the
// group's part of l is scale_g Σ x_j. That is one lg2 a group of 16, and none a group of 32, for a product each key.
//
// A reference is the row's maximum, as the recipe has it: where it rises O is scaled in tensor memory by the warp whose
// rows it is, as seldom as maxima of a row rise. Between scores that have come and P that has not gone, nobody else
// touches O.
//
// What smoothing of Q takes out of scores, a number for each key and 128 queries, is beside the keys: all threads of a
// group read the same ones.
#pragma once

#include "common/float_constants.cuh"
#include "common/four_bit_groups.cuh"
#include "common/given_product.cuh"
#include "common/online_softmax.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/ordered.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/row_tiles.cuh"
#include "sm100/forward/scores.cuh"
#include "sm100/fp4/cta.cuh"
#include "sm100/fp4/output.cuh"
#include "sm90/forward/score_unit.cuh"

namespace fovea::cuda::sm100 {

template <Sm100Fp4Spec spec, class Mods>
struct Fp4Softmax : RowTiles<spec, Fp4Softmax<spec, Mods>> {
  using T = Traits<spec>;
  using Tiles = RowTiles<spec, Fp4Softmax<spec, Mods>>;
  using Unit = sm90::ScoreUnit<spec, Mods>;
  using Tiles::cta;
  using Tiles::thread;
  static constexpr int kGroup = spec.scale_group;
  static constexpr int kScales = spec.tile_kv / kGroup;  // of a row's P
  static constexpr float kPMax = fp4_p_max(kGroup);

  Scores<spec, Mods> scores;
  Fp4Row row;
  // Of the row tile: some row of the warp has no codes; some key that it has met has values that are not finite.
  bool has_unrounded = false, has_marked_values = false;

  FOVEA_DEVICE_MEMBER Fp4Softmax(const Cta<spec>& of_cta, const TensorMemory<spec>& memory)
      : Tiles(of_cta, memory), scores(thread) {}

  FOVEA_DEVICE_MEMBER void begin(const RowTile& tile) {
    row = {-infinity(), 0.0F};
    const QuantizedRow beside = given_beside_row(tile);
    ptx::st_shared(beside_row(), ptx::bit_cast<std::uint64_t>(beside));
    has_unrounded = ptx::vote_any(beside.scale == 0.0F);
    has_marked_values = false;
  }

  FOVEA_DEVICE_MEMBER void step(const RowTile& tile, bool is_first) {
    scores.look_ahead(tile, this->take_kv_tile());
    const int stage = this->keys().stage;
    this->await_scores();
    restore_unrounded(tile, stage);
    this->take_scores(scores.s);
    ptx::tcgen05_fence_before_thread_sync();
    cta.release(cta.barrier(T::kAt.s_read, 0));
    complete_scores(stage);
    cta.release(cta.barrier(T::kAt.k_empty, stage));
    scores.modify(tile, 0.0F);
    if (!scores.kv_tile.is_full()) {
      scores.mask(tile);
      if (is_indicator(scores.kv_tile.pass())) shrink();
    }
    exponentiate(is_first);
    ptx::fence_proxy_async_shared_cta();  // for the copy of scales
    this->give_probabilities();
  }

  FOVEA_DEVICE_MEMBER void end(const RowTile& tile) {
    Fp4Output<spec, Mods>{{thread}}.finish(cta.posted(tile), row, of_mean(), cta.pass());
    if (has_marked_values && cta.pass() == Pass::all && cta.lane == 0)
      Fp4Output<spec, Mods>{{thread}}.add_to_redo_list(this->num_row_tiles);
  }

 private:
  FOVEA_DEVICE_MEMBER const ForwardParams& common() const { return cta.p.common; }
  FOVEA_DEVICE_MEMBER int row_of_group() const { return 32 * thread.quarter + cta.lane; }

  // ---- scores ----------------------------------------------------------------------------------

  /// What is known of this thread's row beside its codes: in shared memory, for registers are few beside scores.
  FOVEA_DEVICE_MEMBER SharedAddress beside_row() const {
    return Fp4Places<spec>{cta}.beside_row(thread.group, row_of_group());
  }
  FOVEA_DEVICE_MEMBER float of_mean() const { return ptx::ld_shared<float>(beside_row() + 4); }
  FOVEA_DEVICE_MEMBER bool is_unrounded() const {
    return ptx::ld_shared<float>(beside_row()) == 0.0F;
  }

  /// The same as it is given; of a row without a record that it is rounded, to nothing.
  FOVEA_DEVICE_MEMBER QuantizedRow given_beside_row(const RowTile& tile) const {
    const Fp4Operands& operands = operands_of(cta);
    const QueryRecord record =
        query_record(cta, operands, cta.posted(tile), cta.place_of(tile), thread.group);
    if (!record.exists) return {1.0F, 0.0F};
    const char* const rows = operands.queries +
                             record.number * fp4_query_record_bytes(spec.head_dim_qk) +
                             fp4_rows_at(spec.head_dim_qk);
    return ptx::ld_global(reinterpret_cast<const QuantizedRow*>(rows) + row_of_group());
  }

  FOVEA_DEVICE_MEMBER ptx::U32x4 key_marks(int stage) const {
    return ptx::ld_shared<ptx::U32x4>(Fp4Places<spec>{cta}.keys(stage) +
                                      fp4_marks_at(spec.head_dim_qk));
  }

  FOVEA_DEVICE bool is_any(const ptx::U32x4& marks) {
    return (marks.x | marks.y | marks.z | marks.w) != 0;
  }
  FOVEA_DEVICE std::uint32_t word_of(const ptx::U32x4& marks, int key) {
    return key < 32 ? marks.x : key < 64 ? marks.y : key < 96 ? marks.z : marks.w;
  }

  FOVEA_DEVICE_MEMBER SharedAddress block_scores(int stage) const {
    return Fp4Places<spec>{cta}.block_scores(stage, thread.group);
  }
  /// With what the score of a key lacks: that of the block's mean and, where a program reads scores, of the keys' mean.
  FOVEA_DEVICE float whole(float score, float of_block, float of_mean) {
    return score + (spec.is_prescaled ? of_block + of_mean : of_block);
  }

  /// Scores of rows and keys that are not rounded: they are infinite or NaN. Where such keys are, those of the others
  /// become whole here, too, for theirs must not. Where scores lie, so that it takes no registers beside those of a
  /// row; it is rare, and may take long.
  FOVEA_DEVICE_MEMBER void restore_unrounded(const RowTile& tile, int stage) const {
    const ptx::U32x4 marks = key_marks(stage);
    if (!is_any(marks) && !has_unrounded) return;
    const RowTile posted = cta.posted(tile);
    Work work = cta.work_of(posted);
    work.sequence.kv_batch = cta.map_batch(posted);
    work.sequence.kv_row = cta.place_of(posted).kv_row;
    const RowView<spec> view(common(), work, thread.row());
#pragma unroll 1
    for (int key = 0; key < spec.tile_kv; ++key) {
      const bool is_marked =
          (word_of(marks, key) >> static_cast<std::uint32_t>(key % 32) & 1U) != 0;
      float score[1];
      ptx::tcgen05_ld_32x32b(score, thread.s().plus_columns(key));
      ptx::tcgen05_wait_ld(score);
      if (is_any(marks) && !is_marked)
        score[0] = whole(score[0], ptx::ld_shared<float>(block_scores(stage) + 4 * key), of_mean());
      const bool is_given = is_marked || is_unrounded();
      if (ptx::vote_any(is_given)) {
        const float product = given_product(view, scores.kv_tile.idx() * spec.tile_kv + key,
                                            common().q, common().k, common().head_dim_qk);
        if (is_given) score[0] = product;
      }
      ptx::tcgen05_st_32x32b(thread.s().plus_columns(key), score);
    }
    ptx::tcgen05_wait_st();
  }

  FOVEA_DEVICE_MEMBER void complete_scores(int stage) {
    const auto value_marks =
        ptx::ld_shared<ptx::U32x4>(Fp4Places<spec>{cta}.keys(stage) + T::kAt.value_marks);
    has_marked_values = has_marked_values || is_any(value_marks);
    if (is_any(key_marks(stage))) return;  // they are
    const float of_row = spec.is_prescaled ? of_mean() : 0.0F;
    SharedAddress of_block = block_scores(stage);
#pragma unroll
    for (int i = 0; i < spec.tile_kv; i += 4) {
      // 16 keys wait for those before them: else ptxas loads for all at once, and has too few registers.
      if (i > 0 && i % 16 == 0) {
        of_block = ptx::ordered_and_or(ptx::bit_cast<std::uint32_t>(scores.s[i - 1]),
                                       ptx::bit_cast<std::uint32_t>(cta.p.zero), of_block);
      }
      const auto of_keys = ptx::ld_shared<ptx::F32x4>(of_block + 4 * i);
      scores.s[i] = whole(scores.s[i], of_keys.x, of_row);
      scores.s[i + 1] = whole(scores.s[i + 1], of_keys.y, of_row);
      scores.s[i + 2] = whole(scores.s[i + 2], of_keys.z, of_row);
      scores.s[i + 3] = whole(scores.s[i + 3], of_keys.w, of_row);
    }
  }

  /// Equal scores where a row sees the key, NaN too: sums of indicators.
  FOVEA_DEVICE_MEMBER void shrink() {
#pragma unroll
    for (float& x : scores.s) x = x == -infinity() ? -infinity() : 0.0F;
  }

  // ---- probabilities ---------------------------------------------------------------------------

  /// P as codes to tensor memory, their scales to shared memory.
  FOVEA_DEVICE_MEMBER void exponentiate(bool is_first) {
    float greatest[kScales];
    const float top = row_maxima(greatest);
    OriginStep step = row.template move_reference < kGroup,
               Mods::has_score && !Unit::kIsLog2 > (top, Unit::log2(common()));
    if (!is_first && ptx::vote_any(step.rescale != 1.0F)) this->scale_sums(step.rescale);
    std::uint32_t scale_words[T::kPvSteps] = {};
    float of_row = 0;
    float link = 0;  // of the chunk before
#pragma unroll
    for (int chunk = 0; chunk < spec.tile_kv / kChunk; ++chunk) {
      std::uint32_t codes[kChunk / 8];
      // A chunk waits for a power of the one before: else ptxas hoists all of them, and has too few registers.
      if (chunk > 0)
        step.minus_origin_c = ptx::ordered_fma_rn_ftz(link, cta.p.zero, step.minus_origin_c);
#pragma unroll
      for (int g = 0; g < kChunk / kGroup; ++g) {
        const int group = chunk * (kChunk / kGroup) + g;
        const float top_of_group = ptx::min_ftz(probability(greatest[group], step), kPMax);
        const ExponentScale scale = exponent_scale(top_of_group);
        scale_words[group * kGroup / kFp4Depth] |= scale.bits << 8 * (group % (kFp4Depth / kGroup));
        const float sum = exponentiate_group(group, step.c, step.minus_origin_c - scale.log2,
                                             codes + g * kGroup / 8, link);
        of_row = ptx::fma_rn(scale.unit, sum, of_row);
      }
      ptx::tcgen05_st_32x32b(thread.p().plus_columns(chunk * kChunk / 8), codes);
    }
    row.sum = ptx::fma_rn(row.sum, step.rescale, of_row);
    store_scales(scale_words);
  }
  static constexpr int kChunk = 32;  // keys, whose codes are stored at once

  /// Of the row in each group; the greatest of them all.
  FOVEA_DEVICE_MEMBER float row_maxima(float (&greatest)[kScales]) const {
    float of_row = -infinity();
#pragma unroll
    for (int g = 0; g < kScales; ++g) {
      float top = scores.s[g * kGroup];
#pragma unroll
      for (int i = 1; i < kGroup; ++i) top = ptx::max_ftz(top, scores.s[g * kGroup + i]);
      greatest[g] = top;
      of_row = ptx::max_ftz(of_row, top);
    }
    return of_row;
  }

  /// A scale as its bits, as a number and as a logarithm to base 2; where it is 0 numbers are not divided by it.
  struct ExponentScale {
    std::uint32_t bits;
    float unit, log2;
  };
  FOVEA_DEVICE ExponentScale exponent_scale(float greatest) {
    if constexpr (kGroup == 16) {
      const std::uint32_t bits = ptx::cvt_e4m3x2(greatest * kOneSixth, 0.0F);
      const float unit = bits == 0 ? 1.0F : value_of_scale(bits);
      return {bits, unit, ptx::lg2_approx_ftz(unit)};
    } else {
      const std::uint32_t bits = power_of_two_bits(greatest);
      return {bits, ptx::bit_cast<float>(bits << 23),
              static_cast<float>(static_cast<int>(bits) - 127)};
    }
  }

  /// Codes of a group's keys, and the sum of what they are made of. `link`: one of these.
  FOVEA_DEVICE_MEMBER float exponentiate_group(int group, float c, float shift,
                                               std::uint32_t* codes, float& link) const {
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < kGroup; i += 8) {
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = ptx::ex2_approx_ftz(ptx::fma_rn_ftz(scores.s[group * kGroup + i + j], c, shift));
        sums[j % 2] += x[j];
      }
      codes[i / 8] = ptx::cvt_e2m1x8(x);
      if (i == 0) link = x[0];
    }
    return sums[0] + sums[1];
  }

  /// Where Fp4Products copies them from: what it copied of the kv tile before has arrived, as scores have.
  FOVEA_DEVICE_MEMBER void store_scales(const std::uint32_t (&words)[T::kPvSteps]) const {
    static_assert(fp4_copied_scale_word(32 + 1, 1, T::kGroupRows) == kFp4CopyBytes / 4 + 4 + 1,
                  "words of a lane's rows are neighbours");
    const SharedAddress to =
        Fp4Places<spec>{cta}.p_scales(thread.group) + 4 * thread.quarter + 16 * cta.lane;
#pragma unroll
    for (int i = 0; i < T::kPvSteps; ++i) ptx::st_shared(to + kFp4CopyBytes * i, words[i]);
  }
};

}  // namespace fovea::cuda::sm100
