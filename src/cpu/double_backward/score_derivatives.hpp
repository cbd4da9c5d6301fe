// The score program of one panel of rows and what double backward needs of it. With z the score before the program, c
// what it captures, z' and c' their tangents:
//   f = F(z, c)      f' = F_z z' + G(z, c, c')      G: what captured tangents add (expr::captured_tangent)
// F_z, F_zz and G_z are formulas as F and G are, and so are the derivatives of F, F_z and G by each captured float: a
// loss with slopes a by f and b by f' has
//   a F_c + b (F_zc z' + G_c)      by c.
// Formulas run in fp32, as everywhere; what they are multiplied by is fp64.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fovea/backward.hpp"

#include "cpu/bound_program.hpp"
#include "cpu/double_backward/parameter_sums.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/plain_panel.hpp"
#include "cpu/tasks.hpp"

namespace fovea::cpu {

/// slope · x; what does not move adds exactly 0, whatever the slope.
inline double chained(double slope, double x) { return x == 0 ? 0 : slope * x; }

/// Scores of a panel and what is made of them; arrays of numbers are [keys][lanes].
struct ScorePanel : PlainPanel {
  float* raw = nullptr;                                  // z
  float* scores = nullptr;                               // F, -inf where hidden
  float *first = nullptr, *second = nullptr;             // F_z, F_zz
  float *captured = nullptr, *captured_first = nullptr;  // G, G_z
  float* work = nullptr;
  std::byte* program = nullptr;  // scratch
  AlignedBytes memory{};
};

/// What a loss moves by, for each score of a panel; 0 at hidden ones.
struct ScoreSlopes {
  std::vector<double> by_score;           // a
  std::vector<double> by_tangent;         // b
  std::vector<double> by_tangent_motion;  // b z'
};

class ScoreDerivatives {
 public:
  ScoreDerivatives(const AttentionDoubleBackward& args, const PanelKernels& kernels);

  /// Is f = z, exactly?
  bool is_identity() const { return score_.empty(); }
  bool wants_captured() const { return !sites_.empty(); }

  /// Memory for a panel whose places are known; the caller fills `raw`.
  void allocate(ScorePanel& panel) const;
  /// Everything else of the panel, from raw.
  void evaluate(ScorePanel& panel) const;
  /// Gradients of captured floats, to the sums of a task.
  void add_captured(const ScorePanel& panel, const ScoreSlopes& slopes, std::int64_t task,
                    ParameterSums& sums) const;

 private:
  /// A place where F, F_z or G reads a captured float whose gradient is wanted.
  struct Site {
    std::size_t gradient = 0;                    // index into args.grad_captured
    std::vector<double> ScoreSlopes::*slopes{};  // that weigh it
    BoundProgram derivative;                     // by what was read
    std::vector<BoundProgram> indices;           // of the load; none for a scalar
  };

  void add_sites(const expr::NodePtr& formula, std::vector<double> ScoreSlopes::*slopes);
  std::vector<const BoundProgram*> programs() const;
  std::size_t count(const ScorePanel& panel) const;
  void run_on_raw(const BoundProgram& program, const ScorePanel& panel, float* result) const;
  std::vector<std::int64_t> elements_of(const Site& site, const ScorePanel& panel) const;

  const AttentionDoubleBackward& args_;
  const PanelKernels& kernels_;
  const BoundProgram score_, first_, second_, captured_, captured_first_, mask_;
  std::vector<Site> sites_;
  std::size_t program_bytes_ = 0;
};

}  // namespace fovea::cpu
