// fovea doctor: what this machine offers, and what the environment asks for.
#include <fmt/format.h>
#include <sched.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fovea/error.hpp"
#include "fovea/problem.hpp"
#include "fovea/runtime.hpp"

#include "command.hpp"
#include "core/env.hpp"
#include "core/num_threads.hpp"
#include "cpu/features.hpp"
#include "failure.hpp"
#include "parse_words.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAbout =
    "Prints what this machine offers: processor, instruction sets and why others are missing, "
    "threads, versions, and the "
    "environment variables that Fovea reads.";

constexpr const char* kExamples =
    R"(Examples
  fovea doctor
  fovea doctor --json
Paste the output into a bug report.
)";

constexpr CpuTarget kTargets[] = {CpuTarget::scalar,      CpuTarget::avx2,     CpuTarget::avx512,
                                  CpuTarget::avx512_bf16, CpuTarget::amx_bf16, CpuTarget::neon};

int affinity_count() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
}

/// Version 2 of control groups; "none" where there is no limit or no such file.
std::string cgroup_quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return "none";
  return fmt::format("{:.2f} cores", std::strtod(quota.c_str(), nullptr) / period);
}

Json targets() {
  Json list = Json::array();
  for (const CpuTarget target : kTargets) {
    const std::string_view missing = cpu::missing_for(target);
    Json entry = {{"name", name(target)}, {"runs_here", missing.empty()}};
    if (!missing.empty()) entry["reason"] = missing;
    list.push_back(entry);
  }
  return list;
}

Json environment() {
  Json result = Json::object();
  const auto text = [](const auto& value) {
    return value ? fmt::format("{}", *value) : std::string("not set");
  };
  try {
    const Environment environment = read_environment();
    result["FOVEA_NUM_THREADS"] = text(environment.num_threads);
    result["OMP_NUM_THREADS"] = text(environment.omp_num_threads);
    result["FOVEA_CPU_TARGET"] = text(environment.cpu_target);
    if (environment.cpu_target && !parse_cpu_target(*environment.cpu_target)) {
      result["problem"] = fmt::format("FOVEA_CPU_TARGET is '{}'; expected a target's name",
                                      *environment.cpu_target);
    }
  } catch (const InvalidArgument& error) {
    result["problem"] = error.what();
  }
  return result;
}

Json threads() {
  Json result = {{"affinity", affinity_count()}, {"cgroup_quota", cgroup_quota()}};
  try {
    result["automatic"] = default_num_threads();
  } catch (const InvalidArgument& error) {
    result["automatic"] = 0;
    result["problem"] = error.what();
  }
  return result;
}

Json examine() {
  return {{"command", "doctor"},
          {"fovea", version()},
          {"compiler", __VERSION__},
          {"processor", cpu::processor_name()},
          {"targets", targets()},
          {"best_f32_target", name(cpu::best_f32_target())},
          {"best_bf16_target", cpu::best_bf16_target() == CpuTarget::automatic
                                   ? std::string("none: f32 products are faster")
                                   : std::string(name(cpu::best_bf16_target()))},
          {"threads", threads()},
          {"environment", environment()}};
}

std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string print(const Json& report) {
  std::string text =
      fmt::format("fovea       {}, compiler {}\nprocessor   {}\n", text_of(report["fovea"]),
                  text_of(report["compiler"]), text_of(report["processor"]));
  for (const Json& target : report["targets"]) {
    text += fmt::format(
        "target      {:<12} {}\n", text_of(target["name"]),
        target["runs_here"].get<bool>() ? "runs here" : "missing: " + text_of(target["reason"]));
  }
  text += fmt::format("products    f32 on {}, bf16 on {}\n", text_of(report["best_f32_target"]),
                      text_of(report["best_bf16_target"]));
  const Json& threads = report["threads"];
  text += fmt::format("threads     {} automatic; affinity {}, cgroup quota {}\n",
                      text_of(threads["automatic"]), text_of(threads["affinity"]),
                      text_of(threads["cgroup_quota"]));
  for (const auto& [key, value] : report["environment"].items()) {
    text += fmt::format("environment {}: {}\n", key, text_of(value));
  }
  return text;
}

}  // namespace

int run_doctor(const std::vector<std::string>& words) {
  bool wants_json = false;
  CLI::App app(kAbout, "fovea doctor");
  app.add_flag("--json", wants_json, "print one JSON object");
  app.footer(kExamples);
  if (parse_words(app, words) == Parsed::help_was_printed) return kSuccess;
  const Json report = examine();
  print_out(wants_json ? report.dump() + "\n" : print(report));
  return kSuccess;
}

}  // namespace fovea::tools
