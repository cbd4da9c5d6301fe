// The softmax whose probabilities are codes of e4m3, made without an exponential: of sm90/attention_forward and
// sm80/attention_quantized where they sum codes. Last comes what is different where codes are exponentials, rounded.
// common/optimistic_softmax.cuh is the other one of Hopper, and has the same functions.
//
//   code = round(8 (x + 7)),  x = log2 p + headroom         the bits of e4m3, of x rounded to an eighth of an octave
//
// The bits of a float are a logarithm, exact at powers of two and linear between them: an eighth of an octave is the
// last place of e4m3. So a code is an fma of the score and a conversion that saturates at 0: a quarter of the
// instructions of an exponential, and none of the unit that has those. Between powers of two codes are up to 6 % too
// large, by 1.0407 on average; sums of codes are their own denominator, so that only lse is divided by it.
//
// The row sums come with the product, of the same codes and ones (sm90/forward/value_sums.cuh, team/coded_sums.cuh), so
// they are relative to the reference of the P that was multiplied: `sum` and O are scaled together, by scale().
//
// References are whole octaves: a step scales exactly, and codes but the smallest are the same whenever it is made. One
// is set kHeadroom octaves below the row's maximum, to the nearest: 2^-14 of a p of that much is 0, below 2^-13 it is
// coarse. A row's first reference leaves four octaves more room, for what its first tile has not seen: few keys, where
// a mask cuts it. Not where the codes of average keys, whose scores are 0, would no longer be normal numbers: there the
// greatest lies far above all others, and those that are small weigh as much together. Unless the scores are sharp, so
// that it does not: each lane's greatest is more than kSharp of the row's. Then their spread says how much room there
// is: what is kSpreads of it above the average, as one key in 70,000 is of normal scores, has codes yet, and so has the
// greatest of the first tile. A cap keeps scores about their average, and that of what the row sees of its first tile
// stands for it, a quarter of the keys. Other programs may give keys that come later weights of another size, whose
// codes would be 0: they have no room.
//
// A reference of codes that has been outgrown rises by kRise octaves, or as often as it takes. That loses less of what
// was there before than one that is kHeadroom below the new maximum, as those of programs are.
//
// Full tiles make codes from the old reference at once and look for any that is kLeastHigh or more, while scores are
// still in their registers: then maximum, new reference, codes again, those of one of a thread's two rows where only
// such ask (repair). Both ways move a reference where the maximum is above kJump, which is above what is looked for:
// they give the same bits, and a row's do not depend on the rows beside it.
//
// Scores of programs are no codes: they come as logarithms less `base`, what all keys of a row have in common, or as
// natural ones, from which it is taken here. References are counted from it either way, as those of codes are, whose
// common part is no part of them. Where the fma that makes logarithms may do more, they are codes but for the rounding
// (arguments): 8 (log2 - base) + 56, and `base` holds the reference too, as it was before the step; a step that moves
// it adds by how much. Natural ones may be so large that they have no logarithm: common/online_softmax.cuh and
// optimistic_softmax.cuh say what becomes of such rows. Here the reference of one is its maximum, whose code is 1, and
// all below it has code 0; it takes careful steps alone.
//
// Exponentials, rounded (rounds_exponentials): code = e4m3(2^x), x = log2 p + headroom, that is log2 of the greatest
// code of a p. A row's reference is that far below its greatest score so far, exactly, and moves whenever that grows: a
// code depends on all keys of its tile, and of those before. The sum is of exponentials before they are rounded, of
// what each thread has of the row.
//
// What is not finite: a NaN would be code 0. Among codes there are such scores where rows or keys are not finite only,
// and whoever brings them asks for a look (look_for_nan). Programs make them anywhere: every careful tile of theirs has
// one, and what others look at are not codes, four at a time, but the bits that these are rounded from, as integers,
// two at a time: NaN is the greatest of all.
#pragma once

#include "common/float_constants.cuh"
#include "common/optimistic_softmax.cuh"
#include "common/quad_reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda {

/// What the softmax gets: products of codes, kIntegerOrigin above an integer or, of e4m3, as they are; logarithms to
/// base 2 less what a row's keys have in common; what is rounded to codes; or natural scores.
enum class ScoreKind { codes, float_codes, logarithms, arguments, natural };
constexpr bool are_codes(ScoreKind kind) {
  return kind == ScoreKind::codes || kind == ScoreKind::float_codes;
}

/// Codes from one octave to the next, and that of 1.
inline constexpr float kCodesOfOctave = 8.0F;
inline constexpr float kCodeOfOne = 56.0F;

/// What a row's keys have in common, log2.
template <ScoreKind kind>
struct CommonPart {
  float base[2] = {};
};
template <ScoreKind kind>
requires(are_codes(kind)) struct CommonPart<kind> {
  static constexpr float base[2] = {};
};
/// Arguments: and the reference, 0 before there is one; as it was before the last step that asked for a maximum.
template <>
struct CommonPart<ScoreKind::arguments> {
  float base[2] = {};
  float before[2];
};

/// Two rows of a thread's fragments, as OptimisticRows has them. keeps_greatest: every tile is careful. has_average: a
/// row's scores are about one number.
template <int columns, int width, bool keeps_greatest, ScoreKind kind = ScoreKind::codes,
          bool rounds_exponentials = false, bool has_average = are_codes(kind)>
struct CodedRows : CommonPart<kind> {
  static constexpr int kScores = columns / 2;
  static constexpr int kSums = width / 2;
  using Scores = float[kScores];
  using Sums = float[kSums];
  using Probabilities = std::uint32_t[columns / 32][4];

  static constexpr bool kHasWholeSums = !rounds_exponentials;  // in all lanes of a row
  static constexpr bool kAreCodes = are_codes(kind);
  static constexpr float kOrigin = kind == ScoreKind::codes ? kIntegerOrigin : 0.0F;
  static constexpr bool kAreNatural = kind == ScoreKind::natural;
  static constexpr bool kAreArguments = kind == ScoreKind::arguments;
  static constexpr bool kMayBeNan = !kAreCodes;
  /// Whether a step that does not stand has a way of its own (repair), which costs little.
  static constexpr bool kRepairsCodes = kind == ScoreKind::codes && !keeps_greatest;
  static constexpr int kHeadroom = 7;
  static constexpr int kFirstHeadroom = 3;
  static constexpr float kFarthestFirst = 6.0F + kFirstHeadroom;  // 2^-6 is the least normal number
  static constexpr float kSharp = 0.4F;
  static constexpr float kSpreads = 4.2F;  // of scores, above their average, come without a repair
  static constexpr float kRise = 2.0F;
  static constexpr float kFarthestRise = 128.0F;  // beside a maximum above that, nothing counts
  /// The first code that asks for a new reference, the last but one that is a number; its scores begin at 8.6875. So
  /// rows above kJump are always asked, and up to it codes are numbers.
  static constexpr float kJump = 8.7F;
  static constexpr std::uint32_t kLeastHigh = 0x7e;
  static constexpr float kLeastHighArgument = 125.5F;  // rounds to it
  /// log2 of what codes are too large by, on average.
  static constexpr float kLog2Excess = rounds_exponentials ? 0.0F : 0x1.d74eeap-5F;
  static constexpr float kLeastSum = 0.0F;
  static constexpr float kIndicatorFactor = 1.0F;

  float reference[2];  // log2 of what has code 1
  float sum[2];        // of codes
  float factor[2];     // what the last step scales O and sum by
  float greatest[2];   // score so far, where it is kept; of codes and logarithms log2
  float unit[2];       // what makes scores logarithms
  using CommonPart<kind>::base;

  FOVEA_DEVICE_MEMBER void begin() {
    reference[0] = reference[1] = -infinity();
    sum[0] = sum[1] = 0.0F;
  }
  /// Before scores are made; `common`: what those of each row have in common, as far as they hold it.
  FOVEA_DEVICE_MEMBER void rebase(const float (&common)[2]) {
    if constexpr (!kAreCodes) {
#pragma unroll
      for (int r = 0; r < 2; ++r) base[r] = kAreArguments ? common[r] + taken_off(r) : common[r];
    }
  }

  /// Careful: whether any row of the warp got a new reference. `headroom`: where exponentials are rounded.
  template <bool is_first>
  FOVEA_DEVICE_MEMBER bool raise(const Scores& s, float headroom, bool = false) {
    const float jump = rounds_exponentials ? headroom : kJump;
    if constexpr (kAreArguments) this->before[0] = taken_off(0), this->before[1] = taken_off(1);
    float top[2], least[2] = {};  // of the row, and of what its four lanes have for greatest
    fragment_maxima(s, top, [&](int r, float x) { return least[r] = logarithm(r, x); });
    if constexpr (is_first && kAreCodes) {
#pragma unroll
      for (float& of_lanes : least) of_lanes = quad_min(of_lanes);
    }
    bool is_raised[2], starts_anew[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (keeps_greatest)
        greatest[r] = is_first ? top[r] : ptx::max_ftz(greatest[r], top[r]);
      if constexpr (kAreNatural) {
        starts_anew[r] = choose_unit<is_first>(r, top[r]);
        top[r] = ptx::fma_rn(top[r], unit[r], -common_part(r));
      }
      // Written so that NaN (-inf minus -inf: a row that has seen no key) raises.
      is_raised[r] = is_first || !(top[r] - reference[r] <= jump);
      if constexpr (kAreNatural) is_raised[r] = is_raised[r] || starts_anew[r];
    }
    const bool is_any = is_first || ptx::vote_any(is_raised[0] || is_raised[1]);
    factor[0] = factor[1] = 1.0F;  // or the compiler keeps those of the step before
    if (is_any) {
      float below[2] = {kHeadroom, kHeadroom};
      if constexpr (is_first && has_average) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (top[r] - average(s, r) <= kFarthestFirst) below[r] = kFirstHeadroom;
      }
      if constexpr (is_first && kAreCodes) leave_room_for_sharp(s, top, least, below);
#pragma unroll
      for (int r = 0; r < 2; ++r) move(r, top[r], headroom, is_raised[r], below[r]);
      if constexpr (kAreNatural) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (starts_anew[r]) factor[r] = 0.0F;
      }
    }
    return is_any;
  }

  /// Among scores that a row sees, where they may be NaN: then its sum is, from here on. As that of +inf is.
  FOVEA_DEVICE_MEMBER void look_for_nan(const Scores& s) {
    bool is_nan[2] = {false, false};
#pragma unroll
    for (int i = 0; i < kScores; ++i) is_nan[i / 2 % 2] |= !(s[i] < infinity());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t lanes = ptx::ballot(is_nan[r]);
      if ((lanes >> (ptx::lane_idx() & ~3) & 0xfU) != 0) sum[r] = quiet_nan();
    }
  }

  /// P from S, which stays as it is. Whether it may stand, unless a thread knows better (is_wrong).
  template <bool is_careful, int chunk>
  FOVEA_DEVICE_MEMBER bool exponentiate(const Scores& s, Probabilities& p, float (&)[2], float,
                                        float, bool is_wrong = false) const {
    float slope[2], offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is_empty = is_careful && reference[r] == -infinity();
      slope[r] = kCodesOfOctave * (kAreCodes || kAreNatural ? unit[r] : 1.0F);
      if constexpr (kAreArguments) {
        offset[r] = is_empty ? 0.0F : kCodesOfOctave * (this->before[r] - reference[r]);
        is_wrong = is_wrong || (!is_careful && reference[r] == -infinity());
      } else if constexpr (kAreNatural) {
        const float of_row = is_empty ? 0.0F : reference[r] + common_part(r);
        offset[r] = is_huge_row(r) ? -kCodesOfOctave * of_row
                                   : ptx::fma_rn(-kCodesOfOctave, of_row, kCodeOfOne);
        is_wrong = is_wrong || (!is_careful && is_huge_row(r));
      } else {
        const float shift = is_empty ? 0.0F : 7.0F - reference[r];
        // Exact: units have 21 bits, and reference is a whole octave.
        offset[r] = kAreCodes ? offset_of_codes(r, shift) : kCodesOfOctave * shift;
      }
    }
    // Beside the reference of a huge row 7 octaves are nothing: they are added behind it.
    const float behind[2] = {is_huge_row(0) ? kCodeOfOne : 0.0F,
                             is_huge_row(1) ? kCodeOfOne : 0.0F};
    const auto argument = [&](int i) {
      const int r = i / 2 % 2;
      if constexpr (kAreArguments) return is_careful ? s[i] + offset[r] : s[i];
      const float x = ptx::fma_rn_ftz(s[i], slope[r], offset[r]);
      return kAreNatural && is_careful ? x + behind[r] : x;
    };
    [[maybe_unused]] std::uint32_t high = 0;
    [[maybe_unused]] std::int32_t greatest_bits = 0;
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      std::uint32_t(&fragment)[4] = p[i / 16];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = i + 2 * r;
        const float x[4] = {argument(first), argument(first + 1), argument(first + 4),
                            argument(first + 5)};
        const std::uint32_t codes = ptx::cvt_u8x4(x[0], x[1], x[2], x[3]);
        fragment[i / 8 % 2 * 2 + r] = codes;
        if constexpr (is_careful) continue;
        if constexpr (kMayBeNan) {
          greatest_bits = greatest_of(greatest_bits, x[0], x[1]);
          greatest_bits = greatest_of(greatest_bits, x[2], x[3]);
        } else {
          high |= codes | (codes + (0x80U - kLeastHigh) * 0x01010101U);
        }
      }
    }
    if constexpr (is_careful) return true;
    is_wrong = is_wrong || (high & 0x80808080U) != 0 || is_high(greatest_bits);
    return !ptx::vote_any(is_wrong);
  }

  /// P from S, rounded, and its sums. Products of codes come from their origin first: a reference is no whole octave,
  /// so its sum with that times the unit would lose bits that decide codes.
  FOVEA_DEVICE_MEMBER void round_exponentials(const Scores& s, Probabilities& p) {
    static_assert(rounds_exponentials);
    float slope[2], offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      slope[r] = kAreCodes || kAreNatural ? unit[r] : 1.0F;
      const float of_row = kAreNatural ? reference[r] + common_part(r) : reference[r];
      offset[r] = reference[r] == -infinity() ? 0.0F : -of_row;
    }
    const auto exponential = [&](int i) {
      const int r = i / 2 % 2;
      const float x = ptx::ex2_approx_ftz(ptx::fma_rn_ftz(s[i] - kOrigin, slope[r], offset[r]));
      sum[r] += x;
      return x;
    };
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = i + 2 * r;
        const std::uint32_t low = ptx::cvt_e4m3x2(exponential(first), exponential(first + 1));
        const std::uint32_t high = ptx::cvt_e4m3x2(exponential(first + 4), exponential(first + 5));
        p[i / 16][i / 8 % 2 * 2 + r] = low | high << 16U;
      }
    }
  }

  /// Scores of a full tile whose codes do not stand: the same as raise, scale and exponentiate, but for rows 0 or 1 of
  /// the threads alone, where no others ask.
  FOVEA_DEVICE_MEMBER void repair(const Scores& s, Probabilities& p, Sums& o) {
    float top[2];
    greatest_of_thread(s, top);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!ptx::vote_any(!(top[r] - reference[r] <= kJump))) continue;
      top[r] = quad_max(top[r]);
      move(r, top[r], 0.0F, !(top[r] - reference[r] <= kJump), kHeadroom);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        if (i / 2 % 2 == r) o[i] *= factor[r];
      sum[r] *= factor[r];
      const float slope = kCodesOfOctave * unit[r],
                  offset = offset_of_codes(r, 7.0F - reference[r]);
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 8) {
        const auto argument = [&](int j) { return ptx::fma_rn_ftz(s[i + j], slope, offset); };
        p[i / 16][i / 8 % 2 * 2 + r] =
            ptx::cvt_u8x4(argument(0), argument(1), argument(4), argument(5));
      }
    }
  }

  /// Where scores do not stand there is one way to repair them.
  FOVEA_DEVICE_MEMBER bool must_redo(const float (&)[2]) const { return true; }
  FOVEA_DEVICE_MEMBER void soften(Probabilities&, Sums&, float (&)[2]) const {}
  FOVEA_DEVICE_MEMBER void add(const float (&)[2]) const {}

  FOVEA_DEVICE_MEMBER void scale(Sums& o) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] *= factor[i / 2 % 2];
    sum[0] *= factor[0];
    sum[1] *= factor[1];
  }

  /// log Σ exp(score), less what the row's keys have in common; -inf where the row has seen nothing.
  FOVEA_DEVICE_MEMBER float lse(int r, float total) const {
    if (is_huge_row(r) && total > 0.0F && total < infinity()) return origin(r);
    return kLn2 * (log2_sum(reference[r], total) - kLog2Excess);
  }

  /// Of exponentials, rounded: what their sum is multiplied by, and relative to then, in the units of origin() or, of
  /// codes, log2: the row's greatest score. Else lse would be a difference of logarithms, and lose digits.
  FOVEA_DEVICE_MEMBER float unit_of_sum(int r, float reciprocal_of_p_max) const {
    return is_huge_row(r) ? 1.0F : reciprocal_of_p_max;
  }
  FOVEA_DEVICE_MEMBER float greatest_origin(int r, float headroom) const {
    if (is_huge_row(r)) return origin(r);
    return (kAreCodes ? 1.0F : kLn2) * (reference[r] + headroom);
  }

  /// What a sum of row r is relative to, natural and likewise less. Codes of huge rows are exact.
  FOVEA_DEVICE_MEMBER float origin(int r) const {
    if (is_huge_row(r)) return reference[r] * (1.0F / kHugeUnit);
    return kLn2 * (reference[r] - kLog2Excess);
  }

 private:
  /// The reference that arguments are less of.
  FOVEA_DEVICE_MEMBER float taken_off(int r) const {
    return reference[r] == -infinity() ? 0.0F : reference[r];
  }

  /// To base 2, less what its row has in common; of natural scores the score.
  FOVEA_DEVICE_MEMBER float logarithm(int r, float score) const {
    if constexpr (kAreCodes) return (score - kOrigin) * unit[r];
    if constexpr (kAreArguments)
      return ptx::fma_rn(score - kCodeOfOne, 1.0F / kCodesOfOctave, this->before[r]);
    return score;
  }

  FOVEA_DEVICE bool is_high(std::int32_t bits) {
    return bits >= ptx::bit_cast<std::int32_t>(kLeastHighArgument);
  }

  /// Bits of positive floats are in their order, those of NaN above them; of negative ones they are negative.
  FOVEA_DEVICE std::int32_t greatest_of(std::int32_t bits, float a, float b) {
    const auto a_bits = ptx::bit_cast<std::int32_t>(a);
    const auto b_bits = ptx::bit_cast<std::int32_t>(b);
    const std::int32_t greater = bits > a_bits ? bits : a_bits;
    return greater > b_bits ? greater : b_bits;
  }

  /// Whether row r has seen nothing but scores that have no logarithm.
  FOVEA_DEVICE_MEMBER bool is_huge_row(int r) const {
    if constexpr (!kAreNatural) return false;
    return unit[r] == kHugeUnit;
  }
  FOVEA_DEVICE_MEMBER float common_part(int r) const { return is_huge_row(r) ? 0.0F : base[r]; }

  /// What makes natural scores of row r logarithms, given the greatest of a tile. Whether nothing of the row so far
  /// counts beside that.
  template <bool is_first>
  FOVEA_DEVICE_MEMBER bool choose_unit(int r, float top) {
    const float wanted = unit_of(top, kLog2E);
    if (is_first || reference[r] == -infinity()) {
      unit[r] = wanted;
      return false;
    }
    if (wanted == unit[r]) return false;
    const bool is_above = is_huge_row(r) ? reference[r] < 0.0F && top != -infinity() : top > 0.0F;
    if (is_above) unit[r] = wanted;
    return is_above;
  }

  FOVEA_DEVICE_MEMBER float offset_of_codes(int r, float shift) const {
    return kCodesOfOctave * ptx::fma_rn_ftz(-kOrigin, unit[r], shift);
  }

  /// Of what this thread has of each row, log2. Sums above an origin are in the order of their bits, which are compared
  /// three at a time.
  FOVEA_DEVICE_MEMBER void greatest_of_thread(const Scores& s, float (&top)[2]) const {
    static_assert(kind == ScoreKind::codes);
    std::int32_t bits[2] = {};
#pragma unroll
    for (int i = 0; i < kScores; i += 2)
      bits[i / 2 % 2] = greatest_of(bits[i / 2 % 2], s[i], s[i + 1]);
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = logarithm(r, ptx::bit_cast<float>(bits[r]));
  }

  /// How far below the greatest score of its first tile the reference of a sharp row stands: kSpreads of its scores
  /// come without a repair.
  FOVEA_DEVICE_MEMBER void leave_room_for_sharp(const Scores& s, const float (&top)[2],
                                                const float (&least)[2], float (&below)[2]) const {
    bool is_sharp[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) is_sharp[r] = top[r] > kFarthestFirst && least[r] > kSharp * top[r];
    if (!ptx::vote_any(is_sharp[0] || is_sharp[1])) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float to_come = kSpreads * spread(s, r);
      const float room =
          ptx::min_ftz(ptx::max_ftz(top[r] + kJump - to_come, 0.0F), static_cast<float>(kHeadroom));
      if (is_sharp[r]) below[r] = room;
    }
  }

  /// The root of the mean square of a row's scores, log2, of those that it sees.
  FOVEA_DEVICE_MEMBER float spread(const Scores& s, int r) const {
    float squares = 0.0F, count = 0.0F;
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool is_seen = s[i + j] > -infinity();
        const float x = is_seen ? s[i + j] - kOrigin : 0.0F;
        squares = ptx::fma_rn(x, x, squares);
        count += is_seen ? 1.0F : 0.0F;
      }
    }
    squares *= unit[r] * unit[r];
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      squares += ptx::shfl_bfly(squares, lanes);
      count += ptx::shfl_bfly(count, lanes);
    }
    return ptx::ex2_approx_ftz(0.5F * ptx::lg2_approx_ftz(squares * ptx::rcp_approx_ftz(count)));
  }

  /// Of the keys of a row, about, log2: those of codes have 0. NaN where a row has seen none of those asked.
  FOVEA_DEVICE_MEMBER float average(const Scores& s, int r) const {
    if constexpr (kAreCodes) return 0.0F;
    float total = 0.0F, count = 0.0F;
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      const bool is_seen = s[i + 2 * r] > -infinity();
      total += is_seen ? s[i + 2 * r] : 0.0F;
      count += is_seen ? 1.0F : 0.0F;
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      total += ptx::shfl_bfly(total, lanes);
      count += ptx::shfl_bfly(count, lanes);
    }
    const float mean = logarithm(r, total * ptx::rcp_approx_ftz(count));
    return kAreNatural ? ptx::fma_rn(mean, unit[r], -common_part(r)) : mean;
  }

  /// below: where a reference stands, under `top`, unless the row's has only to rise.
  FOVEA_DEVICE_MEMBER void move(int r, float top, float headroom, bool is_raised, float below) {
    float next = whole_octave(top - below);
    if constexpr (rounds_exponentials) {
      next = top - headroom;
    } else if constexpr (kAreCodes) {
      const float rises = whole_octave(ptx::fma_rn(top - reference[r] - kJump, 1.0F / kRise, 0.5F));
      if (reference[r] > top - kFarthestRise) next = reference[r] + kRise * rises;
    }
    if (is_huge_row(r)) next = top;
    factor[r] = ptx::ex2_approx_ftz(reference[r] - next);
    if (!is_raised || next == -infinity()) factor[r] = 1.0F;
    if (is_raised) reference[r] = next;
  }
};

}  // namespace fovea::cuda
