#include "expr/print_cuda.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "expr/cuda_body.hpp"
#include "expr/cuda_slots.hpp"
#include "expr/differentiate.hpp"
#include "expr/interval.hpp"
#include "expr/kv_affine.hpp"
#include "expr/kv_limits.hpp"
#include "expr/passes.hpp"
#include "expr/print.hpp"
#include "expr/softcap.hpp"
#include "expr/split_loads.hpp"
#include "expr/visible_score.hpp"

namespace fovea::expr {

namespace {

// A formula of more parts than this, written out, is left out of the comment.
constexpr double kMaxComment = 60;

bool is_true(const Node& node) {
  return node.op == Op::constant && node.type == ExprType::boolean && node.int_value != 0;
}
/// Of the loads of one place.
enum class PairOrder : std::uint8_t { rows, keys, diagonals };

std::string_view name(PairOrder order) {
  constexpr std::array<std::string_view, 3> kNames = {"rows", "keys", "diagonals"};
  return kNames[static_cast<std::size_t>(order)];
}

/// Along what an element stays the same: a row of one query, or of all; the queries of a key; and where both decide,
/// most formulas are of their distance.
PairOrder pair_order(const Node& leaf) {
  const auto depends_on = [&](Variable variable) {
    return std::ranges::any_of(
        leaf.operands, [variable](const NodePtr& index) { return reads(*index, variable); });
  };
  if (depends_on(Variable::score)) return PairOrder::diagonals;
  if (!depends_on(Variable::kv_idx)) return PairOrder::rows;
  return depends_on(Variable::q_idx) ? PairOrder::diagonals : PairOrder::keys;
}

bool is_score(const Node& node) {
  return node.op == Op::variable && node.variable == Variable::score;
}

class Printer {
 public:
  struct Derivatives {
    NodePtr by_score = nullptr;                        // null where nobody asks for it
    std::optional<NodePtr> by_tangents = {};           // of captured data; null: they add nothing
    std::vector<CapturedDerivative> by_captured = {};  // those that somebody asks for
    std::vector<std::string> gradients = {};           // of these slots
  };

  Printer(const NodePtr& score, const NodePtr& mask, Derivatives derivatives, SlotNames names)
      : score_(score),
        mask_(mask),
        derivative_(std::move(derivatives.by_score)),
        tangent_(std::move(derivatives.by_tangents)),
        sites_(std::move(derivatives.by_captured)),
        gradients_(std::move(derivatives.gradients)),
        limits_(kv_limits(mask)),
        names_(names),
        slots_(program_) {
    slots_.add_all(score_.nodes(), ProgramRole::score);
    slots_.add_all(mask_.nodes(), ProgramRole::mask);
    // Tangents are read beside what they are tangents of.
    if (tangent_ && *tangent_ != nullptr)
      slots_.add_all(IntervalProgram(*tangent_).nodes(), ProgramRole::score);
    // A line along the keys and limits of a row ask for less than parts do.
    if (!is_score(*score)) line_ = score_line(score);
    cap_ = cap_of(score);
    if (!has_slope() && cap_ == nullptr) split_score_ = split_loads(score);
    if (!limits_) split_mask_ = split_loads(mask);
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
        "  static constexpr bool has_score_slope = {};\n"
        "  static constexpr bool has_score_bend = {};\n"
        "  static constexpr bool has_softcap = {};\n"
        "  static constexpr bool has_score_parts = {};\n"
        "  static constexpr bool has_mask = {};\n"
        "  static constexpr bool mask_reads_tensors = {};\n"
        "  static constexpr bool has_kv_limits = {};\n"
        "  static constexpr bool has_mask_parts = {};\n\n"
        "{}\n{}{}{}{}{}{}\n{}{}{}{}"
        "}};\n\n"
        "}}  // namespace program\n"
        "using program::Mods;\n",
        has_score, has_slope(), has_bend(), cap_ != nullptr, split_score_.has_value(), has_mask,
        mask_reads_tensors, limits_.has_value(), split_mask_.has_value(), score_function(),
        derivative_function(), tangent_function(), line_functions(), cap_function(),
        part_functions(split_score_, ProgramRole::score), mask_function(), limit_functions(),
        part_functions(split_mask_, ProgramRole::mask), tile_function(), site_functions());
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

  std::string derivative_function() {
    if (derivative_ == nullptr) return "";
    const bool is_one = derivative_->op == Op::constant && derivative_->float_value == 1;
    return flagged_function("score_derivative", "By the score before it.",
                            is_one ? nullptr : derivative_);
  }

  std::string tangent_function() {
    if (!tangent_) return "";
    return flagged_function("score_tangent", "What tangents of captured data add to its own.",
                            *tangent_);
  }

  /// has_<name>, and where there is a formula the function.
  std::string flagged_function(std::string_view name, std::string_view meaning,
                               const NodePtr& formula) {
    std::string text =
        fmt::format("  static constexpr bool has_{} = {};\n", name, formula != nullptr);
    if (formula == nullptr) return text + "\n";
    const IntervalProgram program(formula);
    const CudaBody body = print_body({program, ProgramRole::score, Domain::value, names_}, slots_);
    return text + fmt::format(
                      "  // {}\n"
                      "  FOVEA_DEVICE float {}(float{}, {}, {}) {{\n{}    return {};\n  }}\n\n",
                      meaning, name, reads(*formula, Variable::score) ? " score" : "",
                      parameter("const Position&", "at", body.reads_variables),
                      parameter("const Captures&", "captures", body.reads_captures), body.lines,
                      body.result);
  }

  std::string mask_function() {
    const CudaBody body = print_body({mask_, ProgramRole::mask, Domain::value, names_}, slots_);
    return fmt::format(
        "{}  FOVEA_DEVICE bool mask({}, {}) {{\n{}    return {};\n  }}\n",
        comment(mask_, ProgramRole::mask), parameter("const Position&", "at", body.reads_variables),
        parameter("const Captures&", "captures", body.reads_captures), body.lines, body.result);
  }

  /// Lines are straight, or bent at a key.
  bool has_slope() const { return line_ && !line_->is_bent(); }
  bool has_bend() const { return line_ && line_->is_bent(); }

  std::string line_functions() {
    if (!line_) return "";
    const std::string slope =
        "  // The same as a line along the keys: score + score(0, at a first key) + score_slope * "
        "(kv_idx - first).\n" +
        line_function("float", "score_slope", line_->slope);
    if (!has_bend()) return slope + "\n";
    return slope + "  // So it is up to this key; and behind it with the other slope.\n" +
           line_function("Int", "score_bend", line_->bend) +
           line_function("float", "score_slope_behind", line_->slope_behind) + "\n";
  }

  std::string line_function(std::string_view type, std::string_view name, const NodePtr& formula) {
    const IntervalProgram program(formula);
    const CudaBody body = print_body({program, ProgramRole::score, Domain::value, names_}, slots_);
    return fmt::format("  FOVEA_DEVICE {} {}({}, {}) {{\n{}    return {};\n  }}\n", type, name,
                       parameter("const Position&", "at", body.reads_variables),
                       parameter("const Captures&", "captures", body.reads_captures), body.lines,
                       body.result);
  }

  std::string cap_function() {
    if (cap_ == nullptr) return "";
    const IntervalProgram program(cap_);
    const CudaBody body = print_body({program, ProgramRole::score, Domain::value, names_}, slots_);
    return fmt::format(
        "  // The score is softcap * tanh(score / softcap).\n"
        "  FOVEA_DEVICE float softcap({}) {{\n{}    return {};\n  }}\n\n",
        parameter("const Captures&", "captures", body.reads_captures), body.lines, body.result);
  }

  /// The same function over what was loaded ahead of it.
  std::string part_functions(const std::optional<SplitLoads>& split, ProgramRole role) {
    if (!split) return "";
    const bool is_score = role == ProgramRole::score;
    const std::string_view name = is_score ? "score" : "mask";
    const std::string_view stem = is_score ? "Score" : "Mask";
    const IntervalProgram program(split->formula);
    const CudaBody body = print_body({program, role, Domain::value, names_}, slots_);
    return fmt::format(
        "  // The same from what is loaded once for each key and each row.\n{}{}"
        "  FOVEA_DEVICE {} {}_by_parts({}{}, {}, {}, {}) {{\n{}    return {};\n  }}\n\n",
        part_struct(fmt::format("{}Key", stem), fmt::format("{}_key", name), split->keys, role),
        part_struct(fmt::format("{}Row", stem), fmt::format("{}_row", name), split->rows, role),
        is_score ? "float" : "bool", name,
        !is_score                                 ? ""
        : reads(*split->formula, Variable::score) ? "float score, "
                                                  : "float, ",
        parameter("const Position&", "at", body.reads_variables),
        parameter(fmt::format("const {}Key&", stem), "key", !split->keys.empty()),
        parameter(fmt::format("const {}Row&", stem), "row", !split->rows.empty()),
        parameter("const Captures&", "captures", body.reads_captures), body.lines, body.result);
  }

  /// Parts of one key or one row, and the function that computes them.
  std::string part_struct(const std::string& type, const std::string& function,
                          const std::vector<NodePtr>& parts, ProgramRole role) {
    std::string members, functions, values;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const IntervalProgram program(parts[i]);
      const CudaBody body = print_body({program, role, Domain::value, names_}, slots_);
      const std::string_view value = parts[i]->type == ExprType::integer ? "Int" : "float";
      members += fmt::format(" {} part_{};", value, i);
      functions += fmt::format(
          "  FOVEA_DEVICE {} {}_{}({}, {}) {{\n{}    return {};\n  }}\n", value, function, i,
          parameter("const Position&", "at", body.reads_variables),
          parameter("const Captures&", "captures", body.reads_captures), body.lines, body.result);
      values += fmt::format("{}{}_{}(at, captures)", i == 0 ? "" : ", ", function, i);
    }
    return fmt::format(
        "  struct {} {{{} }};\n{}  FOVEA_DEVICE {} {}({}, {}) {{\n    return {{{}}};\n  }}\n", type,
        members, functions, type, function, parameter("const Position&", "at", !parts.empty()),
        parameter("const Captures&", "captures", !parts.empty()), values);
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

  /// Every place that reads what gets a gradient.
  std::string site_functions() {
    if (gradients_.empty()) return "";
    std::string of, orders, functions;
    for (std::size_t i = 0; i < sites_.size(); ++i) {
      const CapturedDerivative& site = sites_[i];
      const auto gradient = std::ranges::find(gradients_, site.slot) - gradients_.begin();
      of += fmt::format("{}{}", i == 0 ? "" : ", ", gradient);
      orders += fmt::format("{}PairOrder::{}", i == 0 ? "" : ", ", name(pair_order(*site.leaf)));
      functions += element_function(i) + site_function(i, "site_slope", "float", site.derivative);
    }
    return fmt::format(
        "\n  // Places that read what gets a gradient.\n"
        "  static constexpr int num_sites = {};\n"
        "  static constexpr std::int32_t site_gradient[] = {{{}}};\n"
        "  static constexpr PairOrder site_order[] = {{{}}};\n{}",
        sites_.size(), of, orders, functions);
  }

  std::string element_function(std::size_t i) {
    const Node& leaf = *sites_[i].leaf;
    std::string functions, indices;
    for (std::size_t dim = 0; dim < leaf.operands.size(); ++dim) {
      const std::string index = fmt::format("site_index_{}", dim);
      functions += site_function(i, index, "Int", leaf.operands[dim]);
      indices += fmt::format(", {}(SiteIdx<{}>(), score, at, captures)", index, i);
    }
    const std::string element = leaf.op == Op::load
                                    ? fmt::format("element_of<{}>(captures{})",
                                                  slots_.of(leaf, ProgramRole::score), indices)
                                    : "0";
    return functions + fmt::format(
                           "  FOVEA_DEVICE std::int64_t site_element(SiteIdx<{}>, {}, {}, {}) {{\n "
                           "   return {};\n  }}\n",
                           i, parameter("float", "score", !indices.empty()),
                           parameter("const Position&", "at", !indices.empty()),
                           parameter("const Captures&", "captures", leaf.op == Op::load), element);
  }

  std::string site_function(std::size_t i, std::string_view function, std::string_view type,
                            const NodePtr& formula) {
    const IntervalProgram program(formula);
    const CudaBody body = print_body({program, ProgramRole::score, Domain::value, names_}, slots_);
    return fmt::format(
        "  FOVEA_DEVICE {} {}(SiteIdx<{}>, float{}, {}, {}) {{\n{}    return {};\n  }}\n", type,
        function, i, reads(*formula, Variable::score) ? " score" : "",
        parameter("const Position&", "at", body.reads_variables),
        parameter("const Captures&", "captures", body.reads_captures), body.lines, body.result);
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
    constexpr std::size_t kMostShown = 4096;  // bytes: below, every part is named once
    return fmt::format("  // {}\n", print_up_to(*numbered(program, role), kMostShown));
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
  NodePtr derivative_;
  std::optional<NodePtr> tangent_;
  std::optional<ScoreLine> line_;
  NodePtr cap_;
  std::vector<CapturedDerivative> sites_;
  std::vector<std::string> gradients_;
  std::optional<SplitLoads> split_score_, split_mask_;
  std::optional<KvLimits> limits_;
  SlotNames names_;
  CudaSlots slots_;
};

/// As kernels need it: they hide what the mask does, whatever its score is.
NodePtr printed_score(const ScoreMod& score, const MaskMod& mask) {
  return score_where_visible(simplify(score.expr().shared()), simplify(mask.expr().shared()));
}

}  // namespace

CudaProgram print_cuda(const ScoreMod& score, const MaskMod& mask, SlotNames names) {
  return Printer(printed_score(score, mask), simplify(mask.expr().shared()), {}, names).print();
}

CudaProgram print_cuda_gradient(const ScoreMod& score, const MaskMod& mask, SlotNames names) {
  const NodePtr formula = printed_score(score, mask);
  return Printer(formula, simplify(mask.expr().shared()),
                 {.by_score = derivative_by_score(formula)}, names)
      .print();
}

CudaProgram print_cuda_tangent(const ScoreMod& score, const MaskMod& mask,
                               const std::vector<CapturedTensor>& tangents, SlotNames names) {
  const NodePtr formula = printed_score(score, mask);
  return Printer(formula, simplify(mask.expr().shared()),
                 {.by_score = derivative_by_score(formula),
                  .by_tangents = captured_tangent(score.expr().shared(), tangents)},
                 names)
      .print();
}

CudaProgram print_cuda_captured(const ScoreMod& score, const MaskMod& mask,
                                const std::vector<std::string>& gradients, SlotNames names) {
  const NodePtr formula = printed_score(score, mask);
  std::vector<CapturedDerivative> sites = captured_derivatives(formula);
  std::erase_if(sites, [&](const CapturedDerivative& site) {
    return std::ranges::find(gradients, site.slot) == gradients.end();
  });
  return Printer(formula, simplify(mask.expr().shared()),
                 {.by_captured = std::move(sites), .gradients = gradients}, names)
      .print();
}

}  // namespace fovea::expr
