// Writes the kernels of jvp_cases.hpp as text for the host compiler: print_jvp_units HALF OTHER_HALF
#include <fmt/format.h>

#include <cstddef>
#include <fstream>
#include <string>
#include <vector>

#include "cuda/jvp/attention_jvp.hpp"
#include "cuda/jvp/candidates.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "kernels/jvp/jvp_cases.hpp"
#include "kernels/renamed.hpp"
#include "problem/jvp.hpp"

namespace {

using namespace fovea;
using testing::renamed;

/// The kernel of a case without its entry; its row of a table of functions.
std::string print(const testing::GradientCase& each, std::ofstream& out) {
  const std::string& label = each.forward.label;
  testing::GradientMemory memory(each);
  const cuda::JvpPlan plan = cuda::choose_jvp(
      validate(problem_of(memory.jvp_args()), "print_jvp_units"), testing::device_of(label));
  out << fmt::format("#include \"{}\"\nnamespace fovea::cuda {{\n{}\n{}}}\n", plan.program->include,
                     renamed(plan.program->mods, "Mods", "Mods_" + label),
                     cuda::print_jvp_spec(plan.spec, "spec_" + label));
  return fmt::format("  {{\"{0}\", [](const JvpParams& p) {{ {1}<spec_{0}, Mods_{0}>(p); }}}},\n",
                     label, cuda::jvp_candidate_named(plan.candidate).entry);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::ofstream halves[] = {std::ofstream(argv[1]), std::ofstream(argv[2])};
  std::string tables[2];
  const std::vector<testing::GradientCase> cases = testing::jvp_cases();
  for (std::size_t i = 0; i < cases.size(); ++i) tables[i % 2] += print(cases[i], halves[i % 2]);
  for (int half = 0; half < 2; ++half) {
    halves[half] << fmt::format(
        "namespace fovea::cuda {{\nconstexpr EmulatedJvp kJvps[] = {{\n{}}};\n}}\n", tables[half]);
  }
  return halves[0] && halves[1] ? 0 : 1;
}
