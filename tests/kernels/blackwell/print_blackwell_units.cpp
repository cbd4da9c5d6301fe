// Writes the kernels of blackwell_cases.hpp and of fp4_cases.hpp as text for the host compiler: print_blackwell_units
// OUT FP4_OUT
#include <fmt/format.h>

#include <fstream>
#include <map>
#include <string>

#include "cuda/forward/sm100_fp4.hpp"
#include "cuda/forward/sm120_fp4.hpp"
#include "kernels/blackwell/blackwell_cases.hpp"
#include "kernels/blackwell/fp4_cases.hpp"
#include "kernels/renamed.hpp"

namespace {

using namespace fovea;

void print_blackwells(std::ofstream& out) {
  std::string table;
  const auto print = [&](const std::string& label, const ForwardProblem& problem) {
    const cuda::ForwardPlan plan = testing::blackwell_plan(label, problem);
    const std::string mods = "Mods_" + label;
    out << fmt::format("#include \"{}\"\nnamespace fovea::cuda {{\n{}\n{}}}\n",
                       plan.program->include, testing::renamed(plan.program->mods, "Mods", mods),
                       plan.spec.print("spec_" + label));
    table += fmt::format(
        "  {{\"{0}\", [](const Sm90ForwardParams& p) {{ sm100::attention_forward<spec_{0}, "
        "{1}>(p); "
        "}}}},\n",
        label, mods);
  };
  for (const testing::Case& each : testing::blackwell_cases())
    print(each.label, testing::problem_of_case(each));
  for (const testing::NamedCacheCase& each : testing::blackwell_cache_cases())
    print(each.label, testing::problem_of_cache(each.problem));
  out << fmt::format(
      "namespace fovea::cuda {{\ninline constexpr EmulatedBlackwell kBlackwells[] = "
      "{{\n{}}};\n}}\n",
      table);
}

/// The table `name` of kernels of `Kernel`, an entry of `kind` each. Cases that differ in nothing that kernels are
/// compiled for share them.
template <typename Kernel, typename PlanOf>
void print_fp4s(std::ofstream& out, const char* kind, const char* name, PlanOf plan_of) {
  std::string table;
  std::map<std::string, std::string> first_of;
  const auto name_of = [&](const std::string& label) { return label + "_of_" + name; };
  for (const testing::Case& each : testing::fp4_cases()) {
    const cuda::ForwardPlan plan = plan_of(each.label, testing::problem_of_case(each));
    const auto& spec = plan.spec.as<typename Kernel::Spec>();
    const std::string& first =
        first_of.try_emplace(plan.spec.print() + plan.program->mods, each.label).first->second;
    if (first == each.label) {
      out << fmt::format(
          "#include \"{}\"\nnamespace fovea::cuda {{\n{}\n{}\n{}}}\n", plan.program->include,
          testing::renamed(plan.program->mods, "Mods", "Mods_" + name_of(first)),
          plan.spec.print("spec_" + name_of(first)),
          cuda::print_spec(Kernel::rounding_spec(spec), "rounding_" + name_of(first)));
    }
    table += fmt::format(
        "  {{\"{0}\", {2}<spec_{1}, Mods_{1}>, {{sm120::sum_tiles<rounding_{1}>, "
        "sm120::mean_of_keys<rounding_{1}>, sm120::round_to_fp4<rounding_{1}>, "
        "sm120::block_scores<rounding_{1}>}}}},\n",
        each.label, name_of(first), Kernel::kEntry);
  }
  out << fmt::format("namespace fovea::cuda {{\ninline constexpr {} {}[] = {{\n{}}};\n}}\n", kind,
                     name, table);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::ofstream blackwells(argv[1]), fp4s(argv[2]);
  print_blackwells(blackwells);
  print_fp4s<cuda::Sm120ForwardFp4>(fp4s, "EmulatedFp4", "kFp4s", testing::fp4_plan);
  print_fp4s<cuda::Sm100ForwardFp4>(fp4s, "EmulatedTensorMemoryFp4", "kTensorMemoryFp4s",
                                    testing::tensor_memory_fp4_plan);
  return blackwells && fp4s ? 0 : 1;
}
