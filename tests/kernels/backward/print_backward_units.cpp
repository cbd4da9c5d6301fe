// Writes the kernels of backward_cases.hpp as text for the host compiler: print_backward_units HALF OTHER_HALF
#include <fmt/format.h>

#include <fstream>
#include <string>

#include "cuda/backward/attention_backward.hpp"
#include "cuda/backward/candidates.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "problem/backward.hpp"

namespace {

using namespace fovea;

/// The programs of every case stand in one namespace.
std::string renamed(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

/// The kernels of a case without their entries; their row of a table of functions.
void print(const testing::GradientCase& each, std::ofstream& out, std::string& table) {
  testing::GradientMemory memory(each);
  const std::string& label = each.forward.label;
  const GradientProblem problem = validate(problem_of(memory.args()), "print_backward_units");
  const cuda::BackwardPlan plan = cuda::choose_backward(problem, cuda::typical_device(8, 0));
  const cuda::BackwardCandidate& kernel = cuda::backward_candidate_named(plan.candidate);
  const std::string mods = "Mods_" + label;
  out << fmt::format(
      "#include \"{}\"\nnamespace fovea::cuda {{\n{}\n{}", plan.program->include,
      renamed(plan.program->mods, "Mods", mods),
      renamed(cuda::print_delta_spec(plan.delta), "spec =", "delta_" + label + " ="));
  table += fmt::format(
      "  {{\"{0}\", [](const BackwardParams& p) {{ backward_delta<delta_{0}, {1}>(p); "
      "}},\n   {{",
      label, mods);
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const std::string name = fmt::format("spec_{}_{}", label, i);
    out << plan.steps[i].spec.print(name);
    table += fmt::format("[](const BackwardParams& p) {{ {}<{}, {}>(p); }},\n    ", kernel.entry,
                         name, mods);
  }
  table += "}},\n";
  out << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::ofstream halves[] = {std::ofstream(argv[1]), std::ofstream(argv[2])};
  std::string tables[2];
  std::size_t i = 0;
  for (const auto& each : testing::backward_cases()) {
    print(each, halves[i % 2], tables[i % 2]);
    ++i;
  }
  for (int half = 0; half < 2; ++half) {
    halves[half] << fmt::format(
        "namespace fovea::cuda {{\nconstexpr EmulatedBackward kBackwards[] = {{\n{}}};\n}}\n",
        tables[half]);
  }
  return halves[0] && halves[1] ? 0 : 1;
}
