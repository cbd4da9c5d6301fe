// Writes the kernels of backward_cases.hpp as text for the host compiler:
// print_backward_units HALF OTHER_HALF CAPTURED HOPPER WIDE ONE_WALK BLACKWELL
#include <fmt/format.h>

#include <fstream>
#include <string>

#include "cuda/backward/attention_backward.hpp"
#include "cuda/backward/candidates.hpp"
#include "cuda/backward/sm100.hpp"
#include "cuda/backward/sm80_one_walk.hpp"
#include "cuda/backward/sm90.hpp"
#include "cuda/backward/sm90_wide.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "kernels/renamed.hpp"
#include "problem/backward.hpp"

namespace {

using namespace fovea;
using testing::renamed;

/// Kernels of gradients of captured data, as members of a row of the table.
std::string print_captured(const std::string& label, const cuda::CapturedPlan& plan,
                           std::ofstream& out) {
  if (plan.is_empty()) return "{}";
  out << cuda::print_captured_spec(plan.spec, "walk_" + label)
      << cuda::print_captured_spec(plan.dense_spec, "dense_" + label);
  const auto kernel = [&](const std::string& entry, const auto& program, bool is_there,
                          const std::string& spec = "walk") {
    if (!is_there) return std::string("nullptr");
    const std::string mods = entry + "_" + label;
    out << renamed(program->mods, "Mods", mods);
    return fmt::format("[](const CapturedParams& p) {{ sm80::{}<{}_{}, {}>(p); }}", entry, spec,
                       label, mods);
  };
  const auto& any = plan.sums_program ? plan.sums_program : plan.dense_program;
  return "{" + kernel("captured_deltas", any, plan.sums_deltas) + ",\n    " +
         kernel("captured_sums", plan.sums_program, plan.sums_program != nullptr) + ",\n    " +
         kernel("captured_tiles", plan.dense_program, plan.dense_program != nullptr, "dense") + "}";
}

/// Steps of a row of Hopper, or of Blackwell: not every plan has the third, nor those behind it.
constexpr std::size_t kFinishStep = 2, kNumKeyWalkSteps = 6;

/// Of a candidate, or where it is empty of the first of sm_80.
cuda::BackwardPlan plan_by(std::string_view candidate, const std::string& label,
                           const GradientProblem& problem) {
  if (candidate.empty()) return testing::plan_of_owners(problem, testing::device_of(label));
  if (candidate == cuda::Sm100Backward::kName)
    return testing::blackwell_backward_plan(label, problem);
  const cuda::DeviceTraits device =
      cuda::typical_device(candidate == cuda::Sm80OneWalk::kName ? 8 : 9, 0);
  return cuda::choose_backward_by(candidate, problem, device);
}

/// The kernels of a case without their entries, of a candidate as in plan_by; their row of a table of functions.
void print(const testing::GradientCase& each, std::string_view candidate, std::ofstream& out,
           std::string& table) {
  testing::GradientMemory memory(each);
  const std::string& label = each.forward.label;
  AttentionBackward args = memory.args();
  args.forward.is_deterministic = !testing::is_in_any_order(each);
  const GradientProblem problem = validate(problem_of(args), "print_backward_units");
  const bool is_named = !candidate.empty();
  const cuda::BackwardPlan plan = plan_by(candidate, label, problem);
  const cuda::BackwardCandidate& kernel = cuda::backward_candidate_named(plan.candidate);
  const std::string mods = "Mods_" + label;
  out << fmt::format(
      "#include \"{}\"\nnamespace fovea::cuda {{\n{}\n{}", plan.program->include,
      renamed(plan.program->mods, "Mods", mods),
      renamed(cuda::print_delta_spec(plan.delta), "spec =", "delta_" + label + " ="));
  table += fmt::format(
      "  {{\"{0}\", [](const BackwardParams& p) {{ backward_delta<delta_{0}, {1}>(p); "
      "}},\n   {2}",
      label, mods, is_named ? "" : "{");
  const bool is_key_walk = !plan.steps.empty() && plan.steps.front().spec.key_walk() != nullptr;
  std::size_t num_members = plan.steps.size();
  const auto add_null = [&] {
    table += "nullptr,\n    ";
    ++num_members;
  };
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const cuda::BackwardStep& step = plan.steps[i];
    if (is_key_walk && i == kFinishStep && step.role != cuda::KernelRole::convert) add_null();
    const std::string name = fmt::format("spec_{}_{}", label, i);
    out << step.spec.print(name);
    table += fmt::format("[](const {}& p) {{ {}<{}, {}>(p); }},\n    ",
                         step.params.empty() ? kernel.params : step.params,
                         step.entry.empty() ? kernel.entry : step.entry, name, mods);
  }
  while (is_key_walk && num_members < kNumKeyWalkSteps) add_null();
  if (!is_named) table += "},\n    ";
  if (!is_named || is_key_walk) table += print_captured(label, plan.captured, out);
  table += "},\n";
  out << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  std::ofstream parts[] = {std::ofstream(argv[1]), std::ofstream(argv[2]), std::ofstream(argv[3])};
  std::string tables[3];
  const std::vector<testing::GradientCase> cases = testing::backward_cases();
  const std::size_t first_captured = cases.size() - testing::captured_cases().size();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::size_t part = i < first_captured ? i % 2 : 2;
    print(cases[i], "", parts[part], tables[part]);
  }
  for (int part = 0; part < 3; ++part) {
    parts[part] << fmt::format(
        "namespace fovea::cuda {{\nconstexpr EmulatedBackward kBackwards[] = {{\n{}}};\n}}\n",
        tables[part]);
  }
  const auto print_all = [](const std::vector<testing::GradientCase>& all,
                            std::string_view candidate, std::string_view type, const char* path,
                            std::string_view table_name = "") {
    std::ofstream out(path);
    std::string table;
    for (const auto& each : all) print(each, candidate, out, table);
    out << fmt::format("namespace fovea::cuda {{\nconstexpr Emulated{} k{}s[] = {{\n{}}};\n}}\n",
                       type, table_name.empty() ? type : table_name, table);
    return static_cast<bool>(out);
  };
  const bool has_hopper = print_all(testing::hopper_backward_cases(), cuda::Sm90Backward::kName,
                                    "HopperBackward", argv[4]);
  const bool has_wide = print_all(testing::wide_backward_cases(), cuda::Sm90WideBackward::kName,
                                  "WideBackward", argv[5]);
  const bool has_one_walk =
      print_all(testing::one_walk_cases(), cuda::Sm80OneWalk::kName, "OneWalk", argv[6]);
  const bool has_blackwell =
      print_all(testing::blackwell_backward_cases(), cuda::Sm100Backward::kName, "HopperBackward",
                argv[7], "BlackwellBackward");
  return parts[0] && parts[1] && parts[2] && has_hopper && has_wide && has_one_walk && has_blackwell
             ? 0
             : 1;
}
