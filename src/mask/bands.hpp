// Masks in closed form: unions of bands, each the (q, kv) that satisfy a few inequalities a * q + b * kv <= c with b in
// {-1, 0, 1}. Causal, window, streaming, prefix-LM and their combinations by && || ! are such; a row of tiles then
// costs a handful of integer operations, whatever the length.
//
// Coefficients come from uniform values (scalars, lengths, loads that no position enters), so they are found per row;
// where they do not fit the form, or where 32-bit arithmetic might wrap, the row is refused and interval analysis takes
// over.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
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

/// slope * q + offset
struct Line {
  std::int64_t slope = 0, offset = 0;
  std::int64_t at(std::int64_t q) const { return slope * q + offset; }
};

inline constexpr std::size_t kMaxLiterals = 16;  // of one band

/// The greatest of a few lines: convex in q.
class Envelope {
 public:
  Envelope() = default;
  explicit Envelope(Line first) { add(first); }
  void add(Line line) { lines_[num_lines_++] = line; }
  const Line* begin() const { return lines_.data(); }
  const Line* end() const { return lines_.data() + num_lines_; }

  std::int64_t at(std::int64_t q) const {
    std::int64_t greatest = lines_[0].at(q);
    for (const Line& line : *this) greatest = std::max(greatest, line.at(q));
    return greatest;
  }
  std::int64_t greatest(Span rows) const { return std::max(at(rows.begin), at(rows.end - 1)); }
  std::int64_t least(Span rows) const {
    std::int64_t first = rows.begin;
    std::int64_t last = rows.end - 1;
    while (first < last) {  // convex: once it does not fall, it never falls again
      const std::int64_t middle = first + (last - first) / 2;
      if (at(middle + 1) >= at(middle)) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    return at(first);
  }

 private:
  std::array<Line, kMaxLiterals + 1> lines_;
  std::size_t num_lines_ = 0;
};

/// What each row sees through one band: one range of keys.
struct BandEdges {
  Span rows;  // the others see nothing
  Envelope lower, minus_upper;

  Span keys_of(std::int64_t q_idx) const {
    if (q_idx < rows.begin || q_idx >= rows.end) return {};
    return {.begin = lower.at(q_idx), .end = -minus_upper.at(q_idx)};
  }
};

inline constexpr int kMaxBands = 8;

struct BandExtents {
  std::array<BandExtent, kMaxBands> bands;
  int num_bands = 0;  // those that touch anything
  BandEdges last;     // of the last of them
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
