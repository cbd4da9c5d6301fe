// Score and mask programs: one small expression language, built from C++ lambdas or parsed from text.
//
//   auto alibi = score_mod([&](auto x) { return x.score - slopes[x.q_head] * abs(x.q_idx - x.kv_idx); });
//   auto same  = parse_score_mod("score - slopes[q_head] * abs(q_idx - kv_idx)", {.tensors = {{"slopes", view}}});
//
// An Expr is an immutable node of a DAG; equal formulas have equal 128-bit digests, so `identical` is one comparison.
// The text form prints and parses back to the same node. Library words (causal, alibi, ...) are in mask.hpp.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fovea/dtype.hpp"
#include "fovea/export.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// bool; 32-bit wrapping int; fp32. i64 tensors hold ints of 32 bits (as_words32 reads 64); load offsets are computed
/// in 64 bits.
enum class ExprType : std::uint8_t { boolean, integer, floating };

namespace expr {
struct Node;
using NodePtr = std::shared_ptr<const Node>;
}  // namespace expr

class FOVEA_EXPORT Expr {
 public:
  template <typename T>
  requires std::is_arithmetic_v<T> Expr(
      T value)  // NOLINT(google-explicit-constructor): literals in formulas
      : Expr(from_literal(value)) {}
  explicit Expr(expr::NodePtr node) : node_(std::move(node)) {}

  const expr::Node& node() const { return *node_; }
  const expr::NodePtr& shared() const { return node_; }
  ExprType type() const;

 private:
  static Expr from_literal(bool value);
  static Expr from_literal(double value);
  static Expr from_literal(std::int64_t value);  // throws InvalidArgument beyond 32 bits
  static Expr from_literal(std::uint64_t value);
  template <typename T>
  static Expr from_literal(T value) {
    if constexpr (std::is_floating_point_v<T>) {
      return from_literal(static_cast<double>(value));
    } else if constexpr (std::is_unsigned_v<T>) {
      return from_literal(static_cast<std::uint64_t>(value));
    } else {
      return from_literal(static_cast<std::int64_t>(value));
    }
  }

  expr::NodePtr node_;
};

/// Same formula? (operator== on two Expr builds the formula a == b.)
FOVEA_EXPORT bool identical(const Expr& a, const Expr& b);

/// The formula as a person would write it; parse gives the same node back.
FOVEA_EXPORT std::string to_string(const Expr& expr);

// Arithmetic. int with float gives float, bool counts 0/1. `/` is float division; floor_div and `%` round to -inf.
FOVEA_EXPORT Expr operator+(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator-(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator*(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator/(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator%(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr floor_div(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator-(const Expr& a);
FOVEA_EXPORT Expr min(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr max(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr abs(const Expr& a);
FOVEA_EXPORT Expr floor(const Expr& a);
FOVEA_EXPORT Expr exp(const Expr& a);
FOVEA_EXPORT Expr exp2(const Expr& a);
FOVEA_EXPORT Expr log(const Expr& a);
FOVEA_EXPORT Expr log2(const Expr& a);
FOVEA_EXPORT Expr tanh(const Expr& a);
FOVEA_EXPORT Expr sqrt(const Expr& a);
FOVEA_EXPORT Expr rsqrt(const Expr& a);
FOVEA_EXPORT Expr sigmoid(const Expr& a);
FOVEA_EXPORT Expr sin(const Expr& a);
FOVEA_EXPORT Expr cos(const Expr& a);
FOVEA_EXPORT Expr tan(const Expr& a);
FOVEA_EXPORT Expr erf(const Expr& a);
FOVEA_EXPORT Expr ceil(const Expr& a);
FOVEA_EXPORT Expr trunc(const Expr& a);
FOVEA_EXPORT Expr log1p(const Expr& a);
FOVEA_EXPORT Expr expm1(const Expr& a);
FOVEA_EXPORT Expr round(const Expr& a);                // halves to even
FOVEA_EXPORT Expr fmod(const Expr& a, const Expr& b);  // the remainder with the sign of a, as in C
FOVEA_EXPORT Expr pow(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr to_int(const Expr& a);    // text: int(a); truncates, saturates, NaN gives 0
FOVEA_EXPORT Expr to_float(const Expr& a);  // text: float(a)
FOVEA_EXPORT Expr select(const Expr& condition, const Expr& a, const Expr& b);

FOVEA_EXPORT Expr operator<(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator<=(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator>(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator>=(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator==(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator!=(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator&&(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator||(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator!(const Expr& a);
// Bitwise on ints, logic on bools. Shift amounts are taken modulo 32; >> keeps the sign.
FOVEA_EXPORT Expr operator&(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator|(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator^(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator~(const Expr& a);
FOVEA_EXPORT Expr operator<<(const Expr& a, const Expr& b);
FOVEA_EXPORT Expr operator>>(const Expr& a, const Expr& b);

/// What indexes a dimension of a captured tensor. It has an element for each such index of a call: of heads exactly as
/// many, else as many or more; or, of batch, heads and positions, one that all share.
enum class Axis : std::uint8_t {
  any,    // a formula; an index beyond the end reads the nearest element
  one,    // the constant 0: one element, which all share
  batch,  // also of packed sequences
  q_head,
  q_idx,
  kv_idx,
  q_or_kv_idx,
  bits_of_keys,   // 32 draft tokens to an element, as many tokens as queries
  seqlen_offset,  // of packed sequences, one more than there are
  packed_q,       // rows of all sequences
  packed_kv,
  packed_q_or_kv
};

/// A tensor that a program reads, by name. Contents and address are a slot: changing them recompiles nothing. The view
/// may have rank 0: view(&n, {}).
struct CapturedTensor {
  std::string name;
  TensorView view;
  /// Of a library word (mask.hpp): its name, and what indexes each dimension. A call for which the tensor is too small
  /// is refused.
  std::string_view word{};
  std::array<Axis, kMaxRank> axes{};
};

/// A run-time number that a program reads, by name: an int or a float.
struct CapturedScalar {
  std::string name;
  ExprType type = ExprType::floating;
  double value = 0;

  static CapturedScalar of(std::string name, std::integral auto value) {
    return {std::move(name), ExprType::integer, static_cast<double>(value)};
  }
  static CapturedScalar of(std::string name, std::floating_point auto value) {
    return {std::move(name), ExprType::floating, static_cast<double>(value)};
  }
};

/// A captured tensor before there is one: what a program is parsed with that with_captures gives tensors later.
/// It has no data and no extents of its own. Throws InvalidArgument for a rank beyond kMaxRank.
FOVEA_EXPORT CapturedTensor tensor_slot(std::string name, Dtype dtype, int rank);

struct Captures {
  std::vector<CapturedTensor> tensors{};
  std::vector<CapturedScalar> scalars{};
};

/// A captured tensor inside a lambda: table[i] for rank 1, table(i, j, ...) for any rank. n() for rank 0, whose text is
/// `n`: one number, read where and when the call runs, so that a captured graph sees what it is at the replay.
class FOVEA_EXPORT Captured {
 public:
  Captured(std::string name, const TensorView& view);
  explicit Captured(CapturedTensor captured);
  Expr load(std::vector<Expr> indices) const;
  Expr operator[](const Expr& index) const { return load({index}); }
  template <typename... Index>
  Expr operator()(const Index&... index) const {
    return load({Expr(index)...});
  }

 private:
  std::shared_ptr<const CapturedTensor> captured_;
};

inline Captured capture(std::string name, const TensorView& view) {
  return {std::move(name), view};
}

/// A run-time scalar inside a lambda.
FOVEA_EXPORT Expr scalar(const CapturedScalar& scalar);

/// What a program may read. Positions are positions inside one sequence, in every layout.
struct Arguments {
  Expr score, batch, q_head, kv_head, q_idx, kv_idx, seqlen_q, seqlen_kv;
};
FOVEA_EXPORT Arguments arguments();

/// A formula with everything that it captures. ScoreMod yields a float, MaskMod a bool (true: visible). Immutable.
class FOVEA_EXPORT Program {
 public:
  /// The formula, its slots bound to captures().
  const Expr& expr() const;
  /// The same formula, whose slots may still be bound to what they were before with_captures. Costs nothing: for its
  /// structure, type and text.
  const Expr& formula() const { return formula_; }
  const Captures& captures() const { return captures_; }
  std::string to_string() const { return fovea::to_string(formula_); }

 protected:
  Program(Expr formula, Captures captures)
      : formula_(std::move(formula)), captures_(std::move(captures)) {}
  void capture(Captures captures, std::string_view where);

 private:
  struct Rebound;
  Expr formula_;
  Captures captures_;
  // made when expr() is asked for; null: formula_ is bound to captures_
  std::shared_ptr<Rebound> rebound_;
};

/// The identity (score unchanged) when default-constructed.
class FOVEA_EXPORT ScoreMod : public Program {
 public:
  ScoreMod();
  /// Collects what the formula captures; an int formula is converted. Throws InvalidArgument for a bool.
  explicit ScoreMod(const Expr& expr);
  bool is_identity() const;
  /// The same program over other tensors and numbers, found by name: as if its text were parsed again, without the
  /// cost. What the formula does not read is passed over. Throws InvalidArgument where a capture is missing, or has
  /// another dtype, rank or type.
  ScoreMod with_captures(Captures captures) const;
};

/// Everything visible when default-constructed.
class FOVEA_EXPORT MaskMod : public Program {
 public:
  MaskMod();
  /// Throws InvalidArgument unless the formula is a bool that does not read `score`.
  explicit MaskMod(const Expr& expr);
  bool is_all_visible() const;
  MaskMod with_captures(Captures captures) const;  // as ScoreMod's
};

template <std::invocable<Arguments> F>
[[nodiscard]] ScoreMod score_mod(F&& formula) {
  return ScoreMod(Expr(formula(arguments())));
}
template <std::invocable<Arguments> F>
[[nodiscard]] MaskMod mask_mod(F&& formula) {
  return MaskMod(Expr(formula(arguments())));
}

/// Text to program; names are resolved in `captures`. Throws ParseError, an InvalidArgument that knows the 1-based
/// column of the offending token. Texts nest at most 200 deep and have at most 10,000 parts: names, numbers, operators;
/// to_string writes at most 1 MiB (docs/guides/programs.md). A text that many calls use is parsed once, with slots for
/// what it captures:
///   const ScoreMod alibi = parse_score_mod("score - slopes[q_head] * abs(q_idx - kv_idx)",
///                                          {.tensors = {tensor_slot("slopes", Dtype::f32, 1)}});
///   args.score = alibi.with_captures({.tensors = {{"slopes", slopes}}});  // at each call
[[nodiscard]] FOVEA_EXPORT ScoreMod parse_score_mod(std::string_view text,
                                                    const Captures& captures = {});
[[nodiscard]] FOVEA_EXPORT MaskMod parse_mask_mod(std::string_view text,
                                                  const Captures& captures = {});

/// Left to right, as in a pipe: the second program sees the first one's score. Captured names that clash but are bound
/// to different data are renamed (`bias`, `bias_2`).
[[nodiscard]] FOVEA_EXPORT ScoreMod operator|(const ScoreMod& first, const ScoreMod& second);
[[nodiscard]] FOVEA_EXPORT MaskMod operator&&(const MaskMod& a, const MaskMod& b);
[[nodiscard]] FOVEA_EXPORT MaskMod operator||(const MaskMod& a, const MaskMod& b);
[[nodiscard]] FOVEA_EXPORT MaskMod operator!(const MaskMod& a);

/// Same formula over slots of the same names (contents do not matter).
FOVEA_EXPORT bool operator==(const ScoreMod& a, const ScoreMod& b);
FOVEA_EXPORT bool operator==(const MaskMod& a, const MaskMod& b);

}  // namespace fovea
