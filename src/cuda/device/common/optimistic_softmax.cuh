// The softmax of full tiles without a maximum: the numerical choices of sm90/attention_forward.
// common/online_softmax.cuh has the plain one.
//
//   p = 2^(s c - m),  l = Σ p,  O = Σ p v      for any m at all: lse = (m + log2 l) ln 2, and m cancels in O / l
//
// So m need not be a maximum, only near one. It is a reference, set `kHeadroom` octaves above the row's maximum when
// the row begins; then a full tile computes p from the old m at once, and looks at the sums of p, which it needs
// anyway. They bound every p:
//
//   sums ≤ 2^kSoft      nothing to do (nearly always)
//   sums ≤ 2^kHard      nothing overflowed: m rises by whole octaves, O, l and P are scaled down exactly ("soften")
//   else                the scores are still in their registers: maximum, new m, p again ("redo")
//
// That takes the maximum, its shuffles and their latency out of the loop, 465 cycles of some 1000 beside a busy tensor
// core. Tiles with a mask, and the first of each row, take the maximum first ("careful"). Both ways apply the same two
// rules to each row by itself: m moves when the row's maximum is above m + kJump, and when its sum exceeds 2^kSoft. So
// they give the same bits, and a row's bits do not depend on the rows beside it.
//
// A step of m by more than 120 octaves would flush the factor to 0 though what it scales may be as large as 2^kSoft a
// step; longer steps are taken only as far as the maximum asks, which may stand `kRoom` above m, and then what is
// flushed is below 2^-90 of the row. What underflows in p is below 2^-46 of the row's maximum. P in f16 has no such
// range: no headroom, no room, and sums up to 2^15.
//
// Where a program's last fma makes the logarithms, it can subtract m too (is_relative): scores come less m as it was
// before the step, `base`. A step that leaves m where it is has the arguments of ex2 at once; one that moves it by J
// adds the difference, for both kinds of step alike, and rounds at 2^-24 J.
//
// Where a program makes natural scores (can_be_huge), a row may see nothing but scores that times log2 e are no floats.
// Its reference is then its maximum in another unit (kHugeUnit), without headroom: p is 1 for the greatest and 0 for
// all else. A row that later sees an ordinary score, or one that is as far above, starts anew; one that sees such
// scores below gives them 0, as any unit does.
//
// Scores that are products of codes (are_codes) come as floats kIntegerOrigin above an integer, and whoever brings them
// sets `unit` for each tile: a row's, and of a tile the keys' that the lane holds. So a maximum is of products with it,
// and the fma that makes arguments takes the origin off too. That loses nothing: units have 21 bits (code_unit), so
// their product with the origin is exact, and references are whole octaves, so its sum with one is as well.
//
// Lab book: docs/kernels/attention_forward_sm90.md. The idea is our own; conditional rescaling is of Dao et al. 2026.
#pragma once

#include "common/code_units.cuh"
#include "common/float_constants.cuh"
#include "common/online_softmax.cuh"
#include "common/quad_reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/ordered.cuh"
#include "ptx/warp.cuh"
#include "shared/element.h"

namespace fovea::cuda {

/// For sums of up to 256 keys. In bf16, where they are at most kHard = 2^kJump no power is above that, so both ways
/// move m alike; 256 powers of 2^kJump are still a float; and 256 that are `kRoom` above m are small. In f16 what
/// exceeds kSoft is looked at anew.
template <Element element>
struct Headroom {
  static constexpr bool kCanSoften = element == Element::bf16;
  static constexpr int kHeadroom = kCanSoften ? 80 : 0;
  static constexpr float kSoft = kCanSoften ? 0x1p100F : 0x1p15F;
  static constexpr float kHard = 0x1p118F;
  static constexpr float kJump = kCanSoften ? 118.0F : 15.0F;
  static constexpr int kLongestStep = 120;
  static constexpr float kRoom = kCanSoften ? 90.0F : 0.0F;
};

/// m + log2 l; -inf where a row has seen nothing. The exponent of l is added to m first: where both are some 80 with
/// opposite signs, that is exact, while their sum with a fraction would be rounded at 80.
FOVEA_DEVICE float log2_sum(float m, float l) {
  if (l == 0.0F) return -infinity();
  if (!(l < infinity())) return l;
  const auto bits = ptx::bit_cast<std::uint32_t>(l);
  const auto exponent = static_cast<float>(static_cast<std::int32_t>(bits >> 23U) - 127);
  const auto fraction = ptx::bit_cast<float>((bits & 0x7fffffU) | 0x3f800000U);
  return (m + exponent) + ptx::lg2_approx_ftz(fraction);
}

/// Of the two rows of a fragment of scores; of_lane(row, this thread's greatest) is what is compared with other lanes'.
template <int n, class OfLane>
FOVEA_DEVICE void fragment_maxima(const float (&s)[n], float (&top)[2], OfLane&& of_lane) {
  float other[2] = {s[1], s[3]};
  top[0] = s[0], top[1] = s[2];
#pragma unroll
  for (int i = 4; i < n; i += 4) {
    top[0] = ptx::max_ftz(top[0], s[i]);
    other[0] = ptx::max_ftz(other[0], s[i + 1]);
    top[1] = ptx::max_ftz(top[1], s[i + 2]);
    other[1] = ptx::max_ftz(other[1], s[i + 3]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = quad_max(of_lane(r, ptx::max_ftz(top[r], other[r])));
  }
}

/// Two rows of a thread's fragments, lane / 4 and 8 further on: element i of a fragment belongs to row i / 2 % 2.
/// `columns` scores of each, `width` sums. Of one row of a thread that has all of it, rows is 1, and the fragments are
/// whoever's who asks (sm100/forward/row.cuh). keeps_greatest: every tile must be careful. is_relative: scores come in
/// logarithms to base 2 and less `base`.
template <Element element, int columns, int width, bool keeps_greatest, bool is_relative,
          bool can_be_huge, bool are_codes = false, int rows = 2>
struct OptimisticRows {
  static_assert(!are_codes || !(is_relative || can_be_huge), "codes are no program's scores");
  static_assert(!is_relative || !can_be_huge, "such a program makes logarithms itself");
  static_assert(!keeps_greatest || !is_relative, "what is less a reference has lost bits");
  using H = Headroom<element>;
  static constexpr int kScores = columns / 2;
  static constexpr int kSums = width / 2;
  using Scores = float[kScores];
  using Sums = float[kSums];
  using Probabilities = std::uint32_t[columns / 16][4];
  static constexpr bool kHasWholeSums = false;  // a lane's, until the end
  static constexpr bool kRepairsCodes = false;
  /// Rows are computed again, with references that are maxima, where a thread's sums of p v (64 at most) come to less
  /// than this in all: a row whose sums are all below 2^-110 is. Above, a sum of 2^20 products, each cut at the last
  /// place of denormals, 2^-149, is right to 2^-19; powers of 2^-80 times values from 2^-24 on are.
  static constexpr float kLeastSum = H::kCanSoften ? 0x1p-104F : 0.0F;
  /// What is 0 or at least 1 in sums of indicators has this unit, or a larger one.
  static constexpr float kIndicatorFactor = H::kCanSoften ? 0x1p80F : 1.0F;

  float reference[rows];  // m, log2
  float sum[rows];        // l, this thread's part
  float factor[rows];     // what the last step of m scales O by
  float greatest[rows];   // score so far, where it is kept; of codes in logarithms
  float base[rows] = {};  // what scores come less of
  float unit[rows];       // what makes scores logarithms, where that differs from row to row

  FOVEA_DEVICE_MEMBER void begin() {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      reference[r] = -infinity();
      sum[r] = 0.0F;
    }
  }

  /// Before scores are made: the reference as it is, so that a step which leaves it there has arguments of ex2 already.
  /// Rows that have seen no key count from 0.
  FOVEA_DEVICE_MEMBER void rebase() {
    if constexpr (!is_relative) return;
#pragma unroll
    for (int r = 0; r < rows; ++r) base[r] = reference[r] == -infinity() ? 0.0F : reference[r];
  }

  /// Careful: rows whose maximum is too far above their reference get a new one. Whether any row of the warp did, so
  /// that O must be scaled by `factor` before it is added to. is_low: references are maxima, so that no power exceeds
  /// 1.
  template <bool is_first>
  FOVEA_DEVICE_MEMBER bool raise(const Scores& s, float c, bool is_low = false) {
    float top[rows];
    row_maxima(s, top, c);
    return raise_to<is_first>(top, c, is_low);
  }

  /// Given these maxima of the tile.
  template <bool is_first>
  FOVEA_DEVICE_MEMBER bool raise_to(float (&top)[rows], float c, bool is_low) {
    is_low = is_low && H::kCanSoften;
    bool is_raised[rows];
    bool starts_anew[rows] = {};
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      if constexpr (keeps_greatest)
        greatest[r] = is_first ? top[r] : ptx::max_ftz(greatest[r], top[r]);
      if constexpr (can_be_huge) {
        if (is_first || reference[r] == -infinity()) {
          unit[r] = unit_of(top[r], c);
        } else if (unit_of(top[r], c) != unit[r]) {
          starts_anew[r] =
              is_huge_row(r) ? reference[r] < 0.0F && top[r] != -infinity() : top[r] > 0.0F;
          if (starts_anew[r]) unit[r] = unit_of(top[r], c);
        }
      }
      if constexpr (!are_codes) top[r] = is_relative ? top[r] + base[r] : top[r] * factor_of(r, c);
      // Written so that NaN (-inf minus -inf: a row that has seen no key) raises.
      is_raised[r] = is_first || starts_anew[r] ||
                     !(top[r] - reference[r] <= (is_low || is_huge_row(r) ? 0.0F : H::kJump));
    }
    const bool is_any = is_first || ptx::vote_any(is_raised[0] || is_raised[rows - 1]);
    if (is_any) {
      move(is_first || starts_anew[0], is_low, 0, top[0], is_raised[0]);
      if constexpr (rows == 2) move(is_first || starts_anew[1], is_low, 1, top[1], is_raised[1]);
    }
    return is_any;
  }

  /// P from S, which stays as it is, and the sums of P in `part`; not yet added to sum. Whether these may stand, unless
  /// a thread knows better (is_wrong). is_careful: rows may have seen no key. `zero`: see Sm90ForwardParams.
  template <bool is_careful, int chunk>
  FOVEA_DEVICE_MEMBER bool exponentiate(const Scores& s, Probabilities& p, float (&part)[2],
                                        float c, float zero, bool is_wrong = false) const {
    constexpr bool kAreArguments = is_relative && !is_careful;
    float shift[2] = {-reference[0], -reference[1]};
    if constexpr (is_relative) shift[0] += base[0], shift[1] += base[1];
    if constexpr (is_careful) {
      if (reference[0] == -infinity()) shift[0] = 0.0F;
      if (reference[1] == -infinity()) shift[1] = 0.0F;
    }
    if constexpr (are_codes) {
      shift[0] = ptx::fma_rn_ftz(-kIntegerOrigin, unit[0], shift[0]);
      shift[1] = ptx::fma_rn_ftz(-kIntegerOrigin, unit[1], shift[1]);
    }
    float argument[kScores], power[kScores], parts[4];
    constexpr int kAhead = 4;                    // from the fma to its ex2
    constexpr int kBehind = are_codes ? 16 : 8;  // from the ex2 to its sum and conversion
    static_assert(chunk == 0 || chunk > kAhead + 2, "a chunk waits for powers made before");
#pragma unroll
    for (int i = -kAhead; i < kScores + kBehind; ++i) {
      if (i + kAhead < kScores) {
        const int x = i + kAhead;
        // A chunk's arguments wait for a power of the chunk before, or ptxas hoists all fmas to the front, where ex2
        // starves.
        if constexpr (chunk > 0 && !kAreArguments) {
          if (x >= chunk && x % (chunk > 0 ? chunk : 1) == 0) {
            shift[0] = ptx::ordered_fma_rn_ftz(power[x - chunk], zero, shift[0]);
            shift[1] = ptx::ordered_fma_rn_ftz(power[x - chunk + 2], zero, shift[1]);
          }
        }
        argument[x] = kAreArguments ? s[x]
                                    : ptx::ordered_fma_rn_ftz(s[x], factor_of(x / 2 % 2, c),
                                                              shift[x / 2 % 2]);
      }
      if (i >= 0 && i < kScores) power[i] = ptx::ordered_ex2_approx_ftz(argument[i]);
      if (i >= kBehind) {
        const int x = i - kBehind;
        parts[x % 4] = x < 4 ? power[x] : ptx::ordered_add_rn_ftz(parts[x % 4], power[x]);
        if (x % 2 == 1) p[x / 8][x / 2 % 4] = pack_ordered(power[x - 1], power[x]);
      }
    }
    part[0] = parts[0] + parts[1];
    part[1] = parts[2] + parts[3];
    if constexpr (kAreArguments) {
      // A row that has seen no key has no reference, and its powers are relative to no maximum.
      if (reference[0] == -infinity()) part[0] = infinity();
      if (reference[1] == -infinity()) part[1] = infinity();
    }
    return !ptx::vote_any(!(part[0] <= H::kSoft && part[1] <= H::kSoft) || is_wrong);
  }

  /// Exponentials of NaN are NaN, and so is their sum: nobody need look for them.
  static constexpr bool kMayBeNan = false;
  FOVEA_DEVICE_MEMBER void look_for_nan(const Scores&) const {}

  /// After exponentiate: could the scores be too far above a reference?
  FOVEA_DEVICE_MEMBER bool must_redo(const float (&part)[2]) const {
    if constexpr (!H::kCanSoften) return true;
    return ptx::vote_any(!(part[0] <= H::kHard && part[1] <= H::kHard));
  }

  /// Rows whose sums exceed 2^kSoft: m rises by whole octaves, and everything relative to it falls by as many.
  FOVEA_DEVICE_MEMBER void soften(Probabilities& p, Sums& o, float (&part)[2]) {
    if constexpr (!H::kCanSoften) return;
    std::uint32_t halves[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int octaves = octaves_above(quad_max(part[r]));
      factor[r] = ptx::bit_cast<float>(static_cast<std::uint32_t>(127 - octaves) << 23U);
      const auto half = static_cast<std::uint32_t>(127 - octaves) << 7U;  // the same power as bf16
      halves[r] = half | half << 16U;
      reference[r] += static_cast<float>(octaves);
      sum[r] *= factor[r];
      part[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < columns / 4; ++i)
      p[i / 4][i % 4] = ptx::mul_bf16x2(p[i / 4][i % 4], halves[i % 2]);
    scale(o);
  }

  /// By which m rises where powers of a row sum to `most` in a tile.
  FOVEA_DEVICE_MEMBER static int octaves_above(float most) {
    const int exponent = static_cast<int>(ptx::bit_cast<std::uint32_t>(most) >> 23U) - 127;
    int octaves =
        exponent + H::kHeadroom < H::kLongestStep ? exponent + H::kHeadroom : H::kLongestStep;
    if (!(most > H::kSoft)) octaves = 0;
    return octaves;
  }

  FOVEA_DEVICE_MEMBER void scale(Sums& o) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] *= factor[i / 2 % 2];
  }

  FOVEA_DEVICE_MEMBER void add(const float (&part)[rows]) {
#pragma unroll
    for (int r = 0; r < rows; ++r) sum[r] += part[r];
  }

  /// Whether row r has seen nothing but scores of which its `unit` is not log2 e.
  FOVEA_DEVICE_MEMBER bool is_huge_row(int r) const {
    if constexpr (!can_be_huge) return false;
    return unit[r] == kHugeUnit;
  }

  /// What makes its scores logarithms.
  FOVEA_DEVICE_MEMBER float factor_of(int r, float c) const {
    if constexpr (can_be_huge || are_codes) return unit[r];
    return c;
  }

  /// log Σ exp(score) for the whole sum l of row r; -inf where it has seen nothing. Beside a huge score, log l is
  /// nothing.
  FOVEA_DEVICE_MEMBER float lse(int r, float total) const {
    if (is_huge_row(r) && total > 0.0F && total < infinity())
      return reference[r] * (1.0F / kHugeUnit);
    return kLn2 * log2_sum(reference[r], total);
  }

 private:
  /// Of codes in logarithms.
  FOVEA_DEVICE_MEMBER void row_maxima(const Scores& s, float (&top)[2], float c) const {
    fragment_maxima(s, top, [&](int r, float x) {
      return are_codes ? (x - kIntegerOrigin) * factor_of(r, c) : x;
    });
  }

  /// starts_anew: nothing of the row so far counts beside `top`.
  FOVEA_DEVICE_MEMBER void move(bool starts_anew, bool is_low, int r, float top, bool is_raised) {
    is_low = is_low || is_huge_row(r);
    float next = top + (is_low ? 0.0F : static_cast<float>(H::kHeadroom));
    if (!starts_anew && reference[r] != -infinity()) {
      const float least = top - (is_low ? 0.0F : H::kRoom);
      const float longest = ptx::max_ftz(reference[r] + static_cast<float>(H::kLongestStep), least);
      next = ptx::max_ftz(reference[r], ptx::min_ftz(next, longest));
    }
    if constexpr (are_codes) next = whole_octave(ptx::add_rn(next, 0.5F));
    factor[r] = ptx::ex2_approx_ftz(reference[r] - next);
    if constexpr (can_be_huge) {
      if (starts_anew) factor[r] = 0.0F;
    }
    if (!is_raised || next == -infinity()) factor[r] = 1.0F;
    if (is_raised) reference[r] = next;
    sum[r] *= factor[r];
  }

  FOVEA_DEVICE std::uint32_t pack_ordered(float lo, float hi) {
    if constexpr (element == Element::bf16) return ptx::ordered_cvt_bf16x2(lo, hi);
    return ptx::ordered_cvt_f16x2(lo, hi);
  }
};

}  // namespace fovea::cuda
