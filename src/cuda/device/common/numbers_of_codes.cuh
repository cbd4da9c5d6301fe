// Keys and values of a cache of codes as numbers of 16 bits in memory of the call, before attention multiplies those:
// code times scale, rounded to q's dtype, as sm80/attention_coded does on its way. Rows of a sequence lie one behind
// the other there, whatever pages they came from; rows that a sequence does not have are neither read nor written, nor
// are those of a sequence without queries.
//
// A CTA has 32 rows of a sequence, of all heads. A thread takes 16 codes at a time, and asks for four times as many
// before it makes numbers of the first.
//
// Bound: memory, one byte read and two written for each code.
#pragma once

#include "common/scaled_codes.cuh"
#include "common/sequence.cuh"
#include "ptx/base.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/memory.cuh"
#include "shared/numbers_of_codes.h"

namespace fovea::cuda {

/// K or V of a CTA's rows.
template <auto spec, Codes codes>
struct NumbersOfRows {
  static constexpr int kCodes = 16, kAtOnce = 4;

  const ForwardParams& c;
  const BshdParam& from;
  const ScaleParam& scales;
  const Sequence& sequence;
  std::uint16_t* const to;  // of the sequence
  const std::int32_t head_dim;

  FOVEA_DEVICE_MEMBER void run(std::int32_t first_row, std::int32_t num_rows) const {
    const std::int32_t of_head = head_dim / kCodes, of_row = of_head * c.num_heads_kv;
    const std::int32_t num_units = num_rows * of_row;
#pragma unroll 1
    for (std::int32_t begin = ptx::thread_idx().x; begin < num_units;
         begin += kAtOnce * kNumbersThreads) {
      ptx::U32x4 words[kAtOnce];
      float scale[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::int32_t unit = begin + i * kNumbersThreads;
        if (unit >= num_units) break;
        const std::int32_t row = unit / of_row, rest = unit - row * of_row;
        const std::int32_t head = rest / of_head, at = rest - head * of_head;
        const KvPlace place = place_of_key<spec>(c, sequence, first_row + row);
        words[i] = ptx::ld_global_nc(reinterpret_cast<const ptx::U32x4*>(
            static_cast<const char*>(from.data) + place.in(from, head) + kCodes * at));
        scale[i] = ptx::ld_global(scale_at(scales, sequence.idx, place.batch, place.row, head));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::int32_t unit = begin + i * kNumbersThreads;
        if (unit >= num_units) break;
        auto* const at =
            reinterpret_cast<ptx::U32x4*>(to + kCodes * (std::int64_t{first_row} * of_row + unit));
        if constexpr (codes == Codes::int8) {
          if (Int8TimesScale::takes(scale[i])) {
            write(at, words[i], Int8TimesScale(scale[i]));
            continue;
          }
        }
        write(at, words[i], CodesTimesScale<codes>(scale[i]));
      }
    }
  }

 private:
  template <class Numbers>
  FOVEA_DEVICE void write(ptx::U32x4* at, const ptx::U32x4& words, const Numbers& numbers) {
    ptx::st_global(at, eight_numbers<spec.element>(numbers, words.x, words.y));
    ptx::st_global(at + 1, eight_numbers<spec.element>(numbers, words.z, words.w));
  }
};

/// num_tiles CTAs for each sequence.
template <auto spec>
FOVEA_DEVICE void numbers_of_codes(const NumbersOfCodesParams& p) {
  ptx::griddepcontrol_wait();  // for whoever appended
  const ForwardParams& c = p.common;
  const auto id = static_cast<std::int32_t>(ptx::block_idx().x);
  Sequence sequence{};
  sequence.idx = id / p.num_tiles;
  sequence.kv_batch = sequence.idx;
  if constexpr (spec.has_packed_q) {
    const std::int32_t queries = packed_rows(c.cu_seqlens_q, sequence.idx, c.total_q).count;
    if (queries == 0 || queries < c.fewest_queries) return;  // nobody's, or another plan's
  }
  find_keys<spec>(c, sequence);
  const std::int32_t first_row = (id - sequence.idx * p.num_tiles) * kRowsOfNumbers;
  const std::int32_t num_rows = least(kRowsOfNumbers, sequence.seqlen_kv - first_row);
  if (num_rows <= 0) return;
  const std::int64_t rows_before = sequence.idx * p.rows * c.num_heads_kv;
  NumbersOfRows<spec, spec.k_codes>{
      c, c.k, p.k_scale, sequence, p.k + rows_before * c.head_dim_qk, c.head_dim_qk}
      .run(first_row, num_rows);
  NumbersOfRows<spec, spec.v_codes>{
      c, c.v, p.v_scale, sequence, p.v + rows_before * c.head_dim_v, c.head_dim_v}
      .run(first_row, num_rows);
}

}  // namespace fovea::cuda
