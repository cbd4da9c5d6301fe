// Writes the kernels of blackwell_cases.hpp as text for the host compiler: print_blackwell_units OUT
#include <fmt/format.h>

#include <fstream>
#include <string>

#include "kernels/blackwell/blackwell_cases.hpp"
#include "kernels/renamed.hpp"
#include "problem/forward.hpp"

int main(int argc, char** argv) {
  using namespace fovea;
  if (argc != 2) return 2;
  std::ofstream out(argv[1]);
  std::string table;
  for (const testing::Case& each : testing::blackwell_cases()) {
    testing::CaseMemory memory(each);
    const cuda::ForwardPlan plan = testing::blackwell_plan(
        each.label, validate(problem_of(memory.args()), "print_blackwell_units"));
    const std::string mods = "Mods_" + each.label;
    out << fmt::format("#include \"{}\"\nnamespace fovea::cuda {{\n{}\n{}}}\n",
                       plan.program->include, testing::renamed(plan.program->mods, "Mods", mods),
                       plan.spec.print("spec_" + each.label));
    table += fmt::format(
        "  {{\"{0}\", [](const Sm90ForwardParams& p) {{ sm100::attention_forward<spec_{0}, "
        "{1}>(p); "
        "}}}},\n",
        each.label, mods);
  }
  out << fmt::format(
      "namespace fovea::cuda {{\ninline constexpr EmulatedBlackwell kBlackwells[] = "
      "{{\n{}}};\n}}\n",
      table);
  return out ? 0 : 1;
}
