#include "expr/print_cuda.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "expr/cuda_body.hpp"
#include "expr/cuda_slots.hpp"
#include "expr/interval.hpp"
#include "expr/kv_limits.hpp"
#include "expr/passes.hpp"
#include "expr/print.hpp"

namespace fovea::expr {

namespace {

// A formula of more parts than this, written out, is left out of the comment.
constexpr double kMaxComment = 60;

bool is_true(const Node& node) {
  return node.op == Op::constant && node.type == ExprType::boolean && node.int_value != 0;
}
bool is_score(const Node& node) {
  return node.op == Op::variable && node.variable == Variable::score;
}

class Printer {
 public:
  Printer(const NodePtr& score, const NodePtr& mask, SlotNames names)
      : score_(score), mask_(mask), limits_(kv_limits(mask)), names_(names), slots_(program_) {
    slots_.add_all(score_.nodes(), ProgramRole::score);
    slots_.add_all(mask_.nodes(), ProgramRole::mask);
  }

  CudaProgram print() {
    const bool has_score = !is_score(root(score_));
    const bool has_mask = !is_true(root(mask_));
    const bool mask_reads_tensors =
        std::ranges::any_of(mask_.nodes(), [](const Node* node) { return node->op == Op::load; });
    program_.include = mask_reads_tensors ? "common/captured_range.cuh"
                       : has_mask         ? "common/range.cuh"
                                          : "common/program.cuh";
    program_.mods = fmt::format(
        "namespace program {{\n\n"
        "struct Mods {{\n"
        "  static constexpr bool has_score = {};\n"
        "  static constexpr bool has_mask = {};\n"
        "  static constexpr bool mask_reads_tensors = {};\n"
        "  static constexpr bool has_kv_limits = {};\n\n"
        "{}\n{}\n{}{}"
        "}};\n\n"
        "}}  // namespace program\n"
        "using program::Mods;\n",
        has_score, has_mask, mask_reads_tensors, limits_.has_value(), score_function(),
        mask_function(), limit_functions(), tile_function());
    return std::move(program_);
  }

 private:
  static const Node& root(const IntervalProgram& program) { return *program.nodes().back(); }

  std::string score_function() {
    const CudaBody body = print_body({score_, ProgramRole::score, Domain::value, names_}, slots_);
    return fmt::format(
        "{}  FOVEA_DEVICE float score(float{}, {}, {}) {{\n{}    return {};\n  }}\n",
        comment(score_, ProgramRole::score), reads(root(score_), Variable::score) ? " score" : "",
        parameter("const Position&", "at", body.reads_variables),
        parameter("const Captures&", "captures", body.reads_captures), body.lines, body.result);
  }

  std::string mask_function() {
    const CudaBody body = print_body({mask_, ProgramRole::mask, Domain::value, names_}, slots_);
    return fmt::format(
        "{}  FOVEA_DEVICE bool mask({}, {}) {{\n{}    return {};\n  }}\n",
        comment(mask_, ProgramRole::mask), parameter("const Position&", "at", body.reads_variables),
        parameter("const Captures&", "captures", body.reads_captures), body.lines, body.result);
  }

  /// The mask as two limits of a row, where it has that form.
  std::string limit_functions() {
    if (!limits_) return "";
    return "  // The same by limits: kv_first <= kv_idx && kv_idx <= kv_last, positions below "
           "2^28.\n" +
           limit_function("kv_first", limits_->first, "0") +
           limit_function("kv_last", limits_->last, "kGreatestInt") + "\n";
  }

  std::string limit_function(std::string_view name, const NodePtr& limit, std::string_view open) {
    constexpr std::string_view kText = "  FOVEA_DEVICE Int {}({}, {}) {{\n{}    return {};\n  }}\n";
    if (limit == nullptr) {
      return fmt::format(fmt::runtime(kText), name, "const Position&", "const Captures&", "", open);
    }
    const IntervalProgram program(limit);
    const CudaBody body = print_body({program, ProgramRole::mask, Domain::value, names_}, slots_);
    return fmt::format(
        fmt::runtime(kText), name, parameter("const Position&", "at", body.reads_variables),
        parameter("const Captures&", "captures", body.reads_captures), body.lines, body.result);
  }

  std::string tile_function() {
    const CudaBody body = print_body({mask_, ProgramRole::mask, Domain::range, names_}, slots_);
    return fmt::format(
        "  FOVEA_DEVICE TileKind tile_kind({}, {}) {{\n{}    return {};\n  }}\n",
        parameter("const TileSpan&", "tile", body.reads_variables),
        parameter("const Captures&", "captures", body.reads_captures), body.lines,
        is_true(root(mask_)) ? "TileKind::full" : fmt::format("kind_of({})", body.result));
  }

  static std::string parameter(std::string_view type, std::string_view name, bool is_read) {
    return is_read ? fmt::format("{} {}", type, name) : std::string(type);
  }

  /// The formula as people write it, unless it is long.
  std::string comment(const IntervalProgram& program, ProgramRole role) const {
    std::vector<double> size;
    for (std::size_t i = 0; i < program.nodes().size(); ++i) {
      double total = 1;
      for (const int operand : program.operands(i))
        total += size[static_cast<std::size_t>(operand)];
      size.push_back(total);
    }
    if (size.back() > kMaxComment) return "";
    return fmt::format("  // {}\n", expr::print(*numbered(program, role)));
  }

  NodePtr numbered(const IntervalProgram& program, ProgramRole role) const {
    NodePtr root = std::make_shared<const Node>(Printer::root(program));
    if (names_ == SlotNames::written) return root;
    std::unordered_map<std::string, std::string> numbers;
    for (const Node* node : program.nodes()) {
      if (node->op != Op::load && node->op != Op::scalar) continue;
      const std::string_view stem = node->op == Op::load ? "tensor" : "scalar";
      numbers.emplace(node->name, fmt::format("{}_{}", stem, slots_.of(*node, role)));
    }
    return rename_slots(root, [&](const std::string& name) { return numbers.at(name); });
  }

  CudaProgram program_;
  IntervalProgram score_, mask_;
  std::optional<KvLimits> limits_;
  SlotNames names_;
  CudaSlots slots_;
};

}  // namespace

CudaProgram print_cuda(const ScoreMod& score, const MaskMod& mask, SlotNames names) {
  return Printer(simplify(score.expr().shared()), simplify(mask.expr().shared()), names).print();
}

}  // namespace fovea::expr
