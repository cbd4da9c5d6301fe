#include "cpu/double_backward/score_derivatives.hpp"

#include <algorithm>
#include <bit>

#include "cpu/carver.hpp"
#include "expr/differentiate.hpp"

namespace fovea::cpu {
namespace {

expr::NodePtr by_score(const expr::NodePtr& formula) {
  return formula == nullptr ? nullptr : expr::derivative_by_score(formula);
}

expr::NodePtr tangent_of(const AttentionDoubleBackward& args) {
  const expr::NodePtr formula = formula_of(args.backward.forward.score);
  return formula == nullptr ? nullptr : expr::captured_tangent(formula, args.ddcaptured);
}

}  // namespace

ScoreDerivatives::ScoreDerivatives(const AttentionDoubleBackward& args, const PanelKernels& kernels)
    : args_(args),
      kernels_(kernels),
      score_(formula_of(args.backward.forward.score)),
      first_(by_score(formula_of(args.backward.forward.score))),
      second_(by_score(by_score(formula_of(args.backward.forward.score)))),
      captured_(tangent_of(args)),
      captured_first_(by_score(tangent_of(args))),
      mask_(formula_of(args.backward.forward.mask)) {
  const expr::NodePtr score = formula_of(args.backward.forward.score);
  add_sites(score, &ScoreSlopes::by_score);
  add_sites(by_score(score), &ScoreSlopes::by_tangent_motion);
  add_sites(tangent_of(args), &ScoreSlopes::by_tangent);
  for (const BoundProgram* program : programs())
    program_bytes_ = std::max(program_bytes_, plain_scratch_bytes(*program, kernels_));
}

void ScoreDerivatives::add_sites(const expr::NodePtr& formula,
                                 std::vector<double> ScoreSlopes::*slopes) {
  if (formula == nullptr) return;
  for (const expr::CapturedDerivative& each : expr::captured_derivatives(formula)) {
    const auto wanted = std::ranges::find(args_.grad_captured, each.slot, &CapturedTensor::name);
    if (wanted == args_.grad_captured.end()) continue;
    Site site{.gradient = static_cast<std::size_t>(wanted - args_.grad_captured.begin()),
              .slopes = slopes,
              .derivative = BoundProgram(each.derivative),
              .indices = {}};
    for (const expr::NodePtr& index : each.leaf->operands) site.indices.emplace_back(index);
    sites_.push_back(std::move(site));
  }
}

std::vector<const BoundProgram*> ScoreDerivatives::programs() const {
  std::vector<const BoundProgram*> all = {&score_,    &first_,          &second_,
                                          &captured_, &captured_first_, &mask_};
  for (const Site& site : sites_) {
    all.push_back(&site.derivative);
    for (const BoundProgram& index : site.indices) all.push_back(&index);
  }
  return all;
}

std::size_t ScoreDerivatives::count(const ScorePanel& panel) const {
  return static_cast<std::size_t>(panel.sequence.seqlen_kv * kernels_.lanes);
}

void ScoreDerivatives::allocate(ScorePanel& panel) const {
  const auto carve = [&](Carver carver) {
    for (float** piece : {&panel.raw, &panel.scores, &panel.first, &panel.second, &panel.captured,
                          &panel.captured_first, &panel.work})
      *piece = carver.take<float>(count(panel));
    panel.program = carver.take<std::byte>(program_bytes_);
    return carver.used();
  };
  panel.memory = AlignedBytes(carve(Carver(nullptr)));
  carve(Carver(panel.memory.data()));
}

void ScoreDerivatives::evaluate(ScorePanel& panel) const {
  std::copy_n(panel.raw, count(panel), panel.scores);
  run_score(score_, kernels_, panel, panel.scores, panel.program);
  if (!first_.empty()) run_on_raw(first_, panel, panel.first);
  if (!second_.empty()) run_on_raw(second_, panel, panel.second);
  if (!captured_.empty()) run_on_raw(captured_, panel, panel.captured);
  if (!captured_first_.empty()) run_on_raw(captured_first_, panel, panel.captured_first);
  run_mask(mask_, kernels_, panel, panel.scores, panel.program);
}

void ScoreDerivatives::run_on_raw(const BoundProgram& program, const ScorePanel& panel,
                                  float* result) const {
  std::copy_n(panel.raw, count(panel), result);
  run_score(program, kernels_, panel, result, panel.program);
}

// ---- captured floats ----

/// The element that a site reads at each score, row-major; an index out of range reads the nearest one.
std::vector<std::int64_t> ScoreDerivatives::elements_of(const Site& site,
                                                        const ScorePanel& panel) const {
  const TensorView& view = args_.grad_captured[site.gradient].view;
  std::vector<std::int64_t> elements(count(panel));
  for (std::size_t dim = 0; dim < site.indices.size(); ++dim) {
    const std::int64_t extent = view.size(static_cast<int>(dim));
    run_on_raw(site.indices[dim], panel, panel.work);
    for (std::size_t i = 0; i < elements.size(); ++i) {
      const std::int64_t index = std::bit_cast<std::int32_t>(panel.work[i]);
      elements[i] = elements[i] * extent + std::clamp<std::int64_t>(index, 0, extent - 1);
    }
  }
  return elements;
}

void ScoreDerivatives::add_captured(const ScorePanel& panel, const ScoreSlopes& slopes,
                                    std::int64_t task, ParameterSums& sums) const {
  for (const Site& site : sites_) {
    const std::span<double> to = sums.captured(task, site.gradient);
    if (to.empty()) continue;
    const std::vector<std::int64_t> elements = elements_of(site, panel);
    const std::vector<double>& weights = slopes.*site.slopes;
    run_on_raw(site.derivative, panel, panel.work);
    for (std::size_t i = 0; i < elements.size(); ++i)
      to[static_cast<std::size_t>(elements[i])] += chained(panel.work[i], weights[i]);
  }
}

}  // namespace fovea::cpu
