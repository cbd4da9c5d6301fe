// Writes the kernels of forward_cases.hpp as text for the host compiler: print_forward_units FORWARD_OUT HOPPER_OUT
// LATENT_OUT SHORT_OUT QUANTIZED_OUT CODED_OUT AMD_OUT
#include <fmt/format.h>

#include <cstdio>
#include <fstream>

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/lost_rows.hpp"
#include "cuda/forward/numbers_of_codes.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "kernels/choice_cases.hpp"
#include "kernels/forward_cases.hpp"
#include "kernels/renamed.hpp"
#include "problem/forward.hpp"

namespace {

using namespace fovea;
using testing::renamed;

/// The kernel's unit without its entry; its row of a table of functions.
void print(const std::string& label, const cuda::ForwardPlan& plan, std::ofstream& out,
           std::string& table) {
  const expr::CudaProgram& program = *plan.program;
  const cuda::Candidate& kernel = cuda::candidate_named(plan.candidate);
  const std::string mods = "Mods_" + label;
  out << fmt::format("#include \"{}\"\nnamespace fovea::cuda {{\n{}\n{}}}\n", program.include,
                     renamed(program.mods, "Mods", mods), plan.spec.print("spec_" + label));
  table += fmt::format("  {{\"{0}\", [](const {3}& p) {{ {1}<spec_{0}, {2}>(p); }}}},\n", label,
                       kernel.entry, mods, kernel.params);
}

void print_hopper(const std::string& label, const ForwardProblem& problem, std::ofstream& out,
                  std::string& table) {
  print(label, testing::plan_of(label, problem, cuda::typical_device(9, 0)), out, table);
}

void print_forwards(std::ofstream& out) {
  std::string table;
  const cuda::DeviceTraits ampere = cuda::typical_device(8, 0);
  const cuda::DeviceTraits hopper = cuda::typical_device(9, 0);
  for (const auto& each : testing::kernel_cases())
    print(each.label, testing::plan_of(each.label, testing::problem_of_case(each), ampere), out,
          table);
  for (const auto& each : testing::kernel_cache_cases())
    print(each.label, cuda::choose_forward(testing::problem_of_cache(each.problem), ampere), out,
          table);
  const cuda::DeviceTraits turing = cuda::typical_device(7, 5);
  for (const auto& each : testing::turing_cases())
    print(each.label, testing::plan_of(each.label, testing::problem_of_case(each), turing), out,
          table);
  for (const auto& each : testing::turing_cache_cases())
    print(each.label, cuda::choose_forward(testing::problem_of_cache(each.problem), turing), out,
          table);
  for (const auto& each : testing::short_cases()) {
    const ForwardProblem problem =
        testing::planned_for_short(testing::problem_of_case(each), testing::kMostPacked);
    print(each.label, testing::plan_of(each.label, problem, hopper), out, table);
  }
  std::string decodes;
  for (const auto& each : testing::decode_cases())
    print(each.label, testing::plan_of(each.label, testing::problem_of_case(each), hopper), out,
          decodes);
  for (const auto& each : testing::decode_cache_cases())
    print(each.label, testing::plan_of(each.label, testing::problem_of_cache(each.problem), hopper),
          out, decodes);
  out << fmt::format(
      "namespace fovea::cuda {{\ninline constexpr EmulatedForward kForwards[] = {{\n{}}};\n"
      "inline constexpr EmulatedDecode kDecodes[] = {{\n{}}};\n}}\n",
      table, decodes);
}

void print_hoppers(std::ofstream& out) {
  std::string table;
  for (const auto& cases :
       {testing::hopper_cases(), testing::hopper_cp_async_cases(), testing::hopper_f32_out_cases(),
        testing::hopper_selection_cases(), testing::hopper_few_rows_cases()}) {
    for (const auto& each : cases)
      print_hopper(each.label, testing::problem_of_case(each), out, table);
  }
  for (const auto& cases : {testing::hopper_cache_cases(), testing::hopper_copied_cache_cases(),
                            testing::hopper_few_rows_cache_cases()}) {
    for (const auto& each : cases)
      print_hopper(each.label, testing::problem_of_cache(each.problem), out, table);
  }
  out << fmt::format(
      "namespace fovea::cuda {{\ninline constexpr EmulatedHopper kHoppers[] = {{\n{}}};\n}}\n",
      table);
}

void print_latents(std::ofstream& out) {
  std::string table;
  for (const auto& each : testing::latent_cases()) {
    testing::CaseMemory memory(each);
    print_hopper(
        each.label,
        validate(problem_of(testing::with_latent_values(memory.args())), "print_forward_units"),
        out, table);
  }
  for (const auto& each : testing::latent_cache_cases())
    print_hopper(each.label, testing::problem_of_cache(each.problem), out, table);
  out << fmt::format(
      "namespace fovea::cuda {{\ninline constexpr EmulatedLatent kLatents[] = {{\n{}}};\n}}\n",
      table);
}

void print_hopper_shorts(std::ofstream& out) {
  std::string table;
  for (const auto& each : testing::hopper_short_cases()) {
    const ForwardProblem problem =
        testing::planned_for_short(testing::problem_of_case(each), testing::kMostHopperPacked);
    print(each.label, testing::plan_of(each.label, problem, testing::small_hopper()), out, table);
  }
  out << fmt::format(
      "namespace fovea::cuda {{\ninline constexpr EmulatedHopperShort kHopperShorts[] = "
      "{{\n{}}};\n}}\n",
      table);
}

void print_codeds(std::ofstream& out) {
  std::string table;
  const cuda::DeviceTraits ampere = cuda::typical_device(8, 0);
  for (const auto& cases : {testing::coded_cache_cases(), testing::coded_decode_cases()}) {
    for (const auto& each : cases)
      print(each.label, cuda::choose_forward(testing::problem_of_cache(each.problem), ampere), out,
            table);
  }
  std::string decodes;
  for (const auto& each : testing::hopper_coded_cases())
    print_hopper(each.label, testing::problem_of_cache(each.problem), out, decodes);
  std::string chunks;
  for (const auto& each : testing::hopper_chunk_cases())
    print_hopper(each.label, testing::problem_of_cache(each.problem), out, chunks);
  std::string numbers;
  for (const auto& each : testing::hopper_converted_cases()) {
    const ForwardProblem problem = testing::problem_of_cache(each.problem);
    print_hopper(each.label, problem, out, chunks);
    const std::string spec = "numbers_" + each.label;
    out << "namespace fovea::cuda {\n"
        << print_spec(cuda::numbers_of_codes_spec(problem), spec) << "}\n";
    numbers += fmt::format(
        "  {{\"{}\", [](const NumbersOfCodesParams& p) {{ numbers_of_codes<{}>(p); }}}},\n",
        each.label, spec);
  }
  out << fmt::format(
      "namespace fovea::cuda {{\ninline constexpr EmulatedCoded kCodeds[] = {{\n{}}};\n"
      "inline constexpr EmulatedDecode kDecodesOfCodes[] = {{\n{}}};\n"
      "inline constexpr EmulatedHopper kChunksOverCodes[] = {{\n{}}};\n"
      "inline constexpr EmulatedNumbers kNumbersOfCodes[] = {{\n{}}};\n}}\n",
      table, decodes, chunks, numbers);
}

/// Of GPUs whose warps have 64 lanes.
void print_amds(std::ofstream& out) {
  std::string table;
  const auto print_on_amd = [&](const std::string& label, const ForwardProblem& problem) {
    print(label, cuda::choose_forward(problem, testing::amd_device_of(label)), out, table);
  };
  for (const auto& cases : {testing::amd_cases(), testing::cdna_cases()})
    for (const auto& each : cases) print_on_amd(each.label, testing::problem_of_case(each));
  for (const auto& cases : {testing::amd_cache_cases(), testing::cdna_cache_cases()})
    for (const auto& each : cases)
      print_on_amd(each.label, testing::problem_of_cache(each.problem));
  out << fmt::format(
      "namespace fovea::cuda {{\ninline constexpr EmulatedForward kForwards[] = {{\n{}}};\n}}\n",
      table);
}

/// The kernel behind one that loses rows, of the same programs.
void print_lost_rows(const std::string& label, const cuda::ForwardPlan& plan, std::ofstream& out,
                     std::string& table) {
  const auto spec = cuda::lost_rows_spec(plan);
  if (!spec) return;
  out << "namespace fovea::cuda {\n" << print_spec(*spec, "lost_" + label) << "}\n";
  table += fmt::format(
      "  {{\"{0}\", [](const LostRowsParams& p) {{ lost_rows<lost_{0}, Mods_{0}>(p); }}}},\n",
      label);
}

void print_quantizeds(std::ofstream& out) {
  std::string table, lost;
  for (const auto& each : testing::hopper_quantized_cases()) {
    const cuda::ForwardPlan plan =
        testing::plan_of(each.label, testing::problem_of_case(each), cuda::typical_device(9, 0));
    print(each.label, plan, out, table);
    print_lost_rows(each.label, plan, out, lost);
  }
  std::string of_caches;
  for (const auto& each : testing::hopper_rounded_cache_cases()) {
    const ForwardProblem problem = testing::problem_of_cache(each.problem);
    const cuda::ForwardPlan plan =
        testing::plan_of(each.label, problem, cuda::typical_device(9, 0));
    print(each.label, plan, out, table);
    print_lost_rows(each.label, plan, out, lost);
    const std::string spec = "rounding_" + each.label;
    out << "namespace fovea::cuda {\n"
        << print_spec(cuda::quantize_kv_spec(plan.spec.as<cuda::Sm90ForwardSpec>()), spec) << "}\n";
    of_caches += fmt::format(
        "  {{\"{0}\", [](const QuantizeCacheParams& p) {{ mean_of_keys<{1}>(p); }}, "
        "[](const QuantizeCacheParams& p) {{ quantize_kv<{1}>(p); }}}},\n",
        each.label, spec);
  }
  std::string rounded;
  for (const auto& each : testing::sm80_quantized_cases()) {
    const cuda::DeviceTraits device = testing::rounding_device(each.quant);
    const cuda::ForwardPlan plan =
        testing::plan_of(each.label, testing::problem_of_case(each), device);
    print(each.label, plan, out, rounded);
    print_lost_rows(each.label, plan, out, lost);
  }
  out << fmt::format(
      "namespace fovea::cuda {{\ninline constexpr EmulatedHopper kQuantizeds[] = {{\n{}}};\n"
      "inline constexpr EmulatedSm80Quantized kSm80Quantizeds[] = {{\n{}}};\n"
      "inline constexpr EmulatedCacheRounding kCacheRoundings[] = {{\n{}}};\n"
      "inline constexpr EmulatedLostRows kLostRows[] = {{\n{}}};\n}}\n",
      table, rounded, of_caches, lost);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  std::ofstream forwards(argv[1]), hoppers(argv[2]), latents(argv[3]), shorts(argv[4]),
      quantizeds(argv[5]), codeds(argv[6]), amds(argv[7]);
  print_forwards(forwards);
  print_hoppers(hoppers);
  print_latents(latents);
  print_hopper_shorts(shorts);
  print_quantizeds(quantizeds);
  print_codeds(codeds);
  print_amds(amds);
  return forwards && hoppers && latents && shorts && quantizeds && codeds && amds ? 0 : 1;
}
