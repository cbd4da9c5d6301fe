// Rows whose sums were not finite: which row tiles have such, and what their passes (common/passes.cuh) make of values
// and of output. They go the same way as all others, behind them, a round for each pass. Read load.cuh next.
#pragma once

#include "common/passes.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/cta.cuh"

namespace fovea::cuda::sm90 {

/// What the CTA computes again, by the scheduling warp. Numbers of row tiles to be computed again are in two lists:
/// shared memory holds the one found last (Cta::redo_list_at), `next_redo` behind each the one before, or -1.
template <Sm90ForwardSpec spec>
struct RedoList {
  using T = Traits<spec>;
  const Cta<spec>& cta;
  Pass pass = Pass::all;  // of the round that is over
  std::int32_t id = -1;
  int parity = 0;

  FOVEA_DEVICE_MEMBER explicit RedoList(const Cta<spec>& of_cta) : cta(of_cta) {}

  /// The row tile of the next round, whose pass is posted; num_tiles where there is none any more.
  FOVEA_DEVICE_MEMBER std::int32_t next() {
    if (pass == Pass::all) {
      take(head(0));
    } else if (pass == Pass::negative) {
      take(ptx::ld_global(cta.p.next_redo + id));
    } else if (pass == Pass::positive) {
      pass = Pass::negative;
    } else {
      pass = pass == Pass::finite && needs_low() ? Pass::low : Pass::positive;
    }
    if (cta.lane == 0) ptx::st_shared(cta.smem + T::kAt.pass, static_cast<std::uint32_t>(pass));
    ptx::sync_warp();
    return id;
  }

 private:
  FOVEA_DEVICE_MEMBER std::int32_t head(int of_parity) const {
    return static_cast<std::int32_t>(cta.word_at(cta.redo_list_at(of_parity)));
  }

  FOVEA_DEVICE_MEMBER bool needs_low() const {
    return cta.word_at(cta.smem + T::kAt.needs_low) != 0;
  }

  FOVEA_DEVICE_MEMBER void take(std::int32_t found) {
    if (found < 0 && parity == 0) {
      parity = 1;
      found = head(1);
    }
    id = found < 0 ? cta.p.num_tiles : found;
    pass = Pass::finite;
    if (cta.lane == 0) ptx::st_shared(cta.smem + T::kAt.needs_low, 0U);
  }
};

/// Is there a NaN or infinity among 8 elements? An exponent of ones and one more carries into the place of the sign.
template <Element element>
FOVEA_DEVICE bool has_redo(const ptx::U32x4& chunk) {
  constexpr std::uint32_t kExponents = kInfinityBits<element> * 0x10001U;
  constexpr std::uint32_t kLastBits = (kInfinityBits<element> & -kInfinityBits<element>)*0x10001U;
  const auto carries = [](std::uint32_t pair) { return (pair & kExponents) + kLastBits; };
  const std::uint32_t all =
      carries(chunk.x) | carries(chunk.y) | carries(chunk.z) | carries(chunk.w);
  return (all & 0x80008000U) != 0;
}

/// Values as a pass wants them, wherever in `bytes` of a tile they lie: four chunks of 8 a lane at once, which nearly
/// always are finite.
template <Element element, int bytes>
FOVEA_DEVICE void rewrite_values(SharedAddress begin, int lane, Pass pass) {
  constexpr int kStep = 16 * 32;
  static_assert(bytes % (4 * kStep) == 0);
  if (pass == Pass::low) pass = Pass::finite;
#pragma unroll 1
  for (SharedAddress at = begin + 16 * lane; at < begin + bytes; at += 4 * kStep) {
    bool is_redo = false;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      is_redo |= has_redo<element>(ptx::ld_shared<ptx::U32x4>(at + i * kStep));
    if (is_redo) {
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const SharedAddress pair = at + i / 4 * kStep + i % 4 * 4;
        ptx::st_shared(pair, values_of_pass<element>(ptx::ld_shared<std::uint32_t>(pair), pass));
      }
    } else if (is_indicator(pass)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::st_shared(at + i * kStep, ptx::U32x4{});
    }
  }
}

/// An element of O, and the infinity that reaches it where the indicators' sum is not 0: their sum. Bits.
template <Element element>
FOVEA_DEVICE std::uint32_t with_infinity(std::uint32_t bits, std::uint32_t indicator, Pass pass) {
  const std::uint32_t reached = kInfinityBits<element> | (pass == Pass::positive ? 0 : 0x8000U);
  if (indicator == 0) return bits;
  const bool is_finite = (bits & 0x7fffU) < kInfinityBits<element>;
  return is_finite || bits == reached ? reached : 0x7fffU;
}

/// Of 8. Each round handles the pair that is in front, and puts it behind the others: short code.
template <Element element>
FOVEA_DEVICE ptx::U32x4 with_infinities(ptx::U32x4 sums, ptx::U32x4 indicators, Pass pass) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t pair =
        with_infinity<element>(sums.x & 0xffffU, indicators.x & 0xffffU, pass) |
        with_infinity<element>(sums.x >> 16U, indicators.x >> 16U, pass) << 16U;
    sums = {sums.y, sums.z, sums.w, pair};
    indicators = {indicators.y, indicators.z, indicators.w, 0};
  }
  return sums;
}

}  // namespace fovea::cuda::sm90
