// Masks in closed form: unions of bands, each the (q, kv) that satisfy a few inequalities a * q + b * kv <= c with b in
// {-1, 0, 1}. Causal, window, streaming, prefix-LM and their combinations by && || ! are such; a row of tiles then costs a
// handful of integer operations, whatever the length.
//
// Coefficients come from uniform values (scalars, lengths, loads that no position enters), so they are found per row; where
// they do not fit the form, or where 32-bit arithmetic might wrap, the row is refused and interval analysis takes over.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "expr/interval.hpp"
#include "expr/node.hpp"

namespace fovea::mask {

/// Half-open range of positions.
struct Span {
  std::int64_t begin = 0, end = 0;
  bool is_empty() const { return begin >= end; }
  std::int64_t size() const { return end - begin; }
  bool operator==(const Span&) const = default;
};

/// What some rows see through one band.
struct BandExtent {
  Span touched;          // every visible key of any row lies here
  Span full;             // every row sees all of these
  bool is_exact = true;  // every key touched is seen by some row
};

inline constexpr int kMaxBands = 8;

struct BandExtents {
  std::array<BandExtent, kMaxBands> bands;
  int num_bands = 0;  // those that touch anything
};

class Bands {
 public:
  /// `nodes` in topological order, the mask last. Empty when the formula is no union of bands.
  static std::optional<Bands> compile(const std::vector<const expr::Node*>& nodes);

  /// `values`: the interval of every node for this row. Empty when the coefficients do not fit the form.
  std::optional<BandExtents> extents(const std::vector<expr::Interval>& values, Span q,
                                     std::int64_t seqlen_kv) const;

 private:
  /// coefficient of q_idx, coefficient of kv_idx, constant.
  struct Affine {
    std::int64_t q = 0, kv = 0, constant = 0;
  };
  struct Operand {
    bool is_uniform = true;
    int idx = 0;  // uniform: of the node; else of the step
  };
  struct Step {
    expr::Op op = expr::Op::variable;
    expr::Variable variable = expr::Variable::q_idx;
    Operand a, b;
  };
  /// a - b <= bound, or a uniform bool that must have the value `bound`.
  struct Literal {
    enum class Kind : std::uint8_t { inequality, uniform };
    Kind kind = Kind::inequality;
    Operand a, b;
    std::int64_t bound = 0;
  };
  using Band = std::vector<Literal>;

  static constexpr int kMaxSteps = 32;
  using Steps = std::array<Affine, kMaxSteps>;

  class Compiler;
  class Row;

  std::vector<Step> steps_;
  std::vector<Band> bands_;
};

}  // namespace fovea::mask
