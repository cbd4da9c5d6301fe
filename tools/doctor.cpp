// fovea doctor: what this machine offers, and what the environment asks for.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "fovea/describe.hpp"

#include "command.hpp"
#include "command_line.hpp"
#include "cuda/jit/architecture.hpp"
#include "failure.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAbout =
    "Prints what this machine offers: processor, instruction sets and why others are missing, "
    "threads, versions, GPUs with what is needed to run on them, what each operation takes and "
    "where it runs, and the environment variables that Fovea reads.";

constexpr const char* kExamples =
    R"(Examples
  fovea doctor
  fovea doctor --json
Paste the output into a bug report.
)";

Json examine() {
  Json report = {{"command", "doctor"}};
  report.update(Json::parse(describe().json()));
  return report;
}

std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

/// "driver      CUDA 13.0", or why there is none.
std::string piece(const char* name, const Json& report, const std::string& present) {
  return fmt::format(
      "{:<11} {}\n", name,
      report["is_present"].get<bool>() ? present : "none: " + text_of(report["reason"]));
}

std::string joined(const Json& names) {
  std::string text;
  for (const Json& name : names) text += (text.empty() ? "" : " ") + text_of(name);
  return text;
}

/// "7 choices for 9.0 with 132 SMs, fovea.tuning"
std::string print_tuning(const Json& report) {
  std::string text;
  if (!report.contains("devices")) return text;
  for (const Json& device : report["devices"]) {
    text += fmt::format("{} choices for {} with {} SMs, ", text_of(device["choices"]),
                        text_of(device["compute_capability"]), text_of(device["num_sms"]));
  }
  return (text.empty() ? "no choices, " : text) + text_of(report["path"]);
}

std::string runs_here(const std::string& architecture) {
  const bool is_measured = cuda::jit::parse_architecture(architecture, "doctor").is_measured();
  return is_measured ? "runs here" : "runs here; not measured on hardware";
}

/// "cuda:0      NVIDIA H200, sm_90a, 132 SMs, 140 GiB: runs here", a line for each.
std::string print_devices(const Json& devices) {
  std::string text;
  for (const Json& device : devices) {
    text +=
        fmt::format("{:<11} {}, {}, {} SMs, {} GiB: {}\n", text_of(device["name"]),
                    text_of(device["model"]), text_of(device["architecture"]),
                    text_of(device["num_sms"]), device["memory_bytes"].get<std::int64_t>() >> 30U,
                    device["runs_here"].get<bool>() ? runs_here(text_of(device["architecture"]))
                                                    : "does not run: " + text_of(device["reason"]));
  }
  return text;
}

/// "NVRTC 13.0.88 for sm_80 sm_90a, /usr/lib/libnvrtc.so.13"
std::string print_compiler(const Json& compiler, const char* name) {
  if (!compiler["is_present"].get<bool>()) return "";
  return fmt::format("{} {} for {}, {}", name, text_of(compiler["version"]),
                     joined(compiler["architectures"]), text_of(compiler["path"]));
}

std::string print_rocm(const Json& report) {
  if (report.contains("problem"))
    return fmt::format("rocm        {}\n", text_of(report["problem"]));
  const Json& driver = report["driver"];
  std::string text =
      piece("AMD driver", driver,
            driver.contains("hip")
                ? fmt::format("HIP {}, {}; kernels for AMD's GPUs are not measured on hardware",
                              text_of(driver["hip"]), text_of(driver["path"]))
                : "");
  text += print_devices(report["devices"]);
  return text + piece("compiler", report["compiler"], print_compiler(report["compiler"], "hipRTC"));
}

std::string print_cuda(const Json& report) {
  if (report.contains("problem"))
    return fmt::format("cuda        {}\n", text_of(report["problem"]));
  const auto field = [&](const char* part, const char* key) {
    return report[part].contains(key) ? text_of(report[part][key]) : std::string();
  };
  std::string text = piece("driver", report["driver"], "CUDA " + field("driver", "cuda"));
  text += print_devices(report["devices"]);
  text += piece("compiler", report["compiler"], print_compiler(report["compiler"], "NVRTC"));
  text += piece("kernel pack", report["pack"],
                fmt::format("{} kernels, {}", field("pack", "kernels"), field("pack", "path")));
  text += piece("tuning", report["tuning"], print_tuning(report["tuning"]));
  const auto mib = [&](const char* key) {
    return report["cache"].contains(key)
               ? static_cast<double>(report["cache"][key].get<std::int64_t>()) / 1048576
               : 0.0;
  };
  text += piece("cache", report["cache"],
                fmt::format("{} kernels, {:.1f} of {:.0f} MiB, {}", field("cache", "kernels"),
                            mib("bytes"), mib("max_bytes"), field("cache", "folder")));
  return text;
}

/// "operation   attention_backward: f32 f16 bf16 on cpu cuda; packed score_mod ..."
std::string print_operation(const Json& operation) {
  return fmt::format("operation   {}: {} on {}; {}\n", text_of(operation["name"]),
                     joined(operation["dtypes"]), joined(operation["devices"]),
                     joined(operation["features"]));
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
  text += print_cuda(report["cuda"]) + print_rocm(report["rocm"]);
  for (const Json& operation : report["operations"]) text += print_operation(operation);
  for (const auto& [key, value] : report["environment"].items()) {
    text += fmt::format("environment {}: {}\n", key, text_of(value));
  }
  return text;
}

}  // namespace

int run_doctor(const std::vector<std::string>& words) {
  bool wants_json = false;
  CommandLine line("fovea doctor", kAbout, kExamples);
  line.add_flag({"--json", "", "", "print one JSON object"}, wants_json);
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;
  const Json report = examine();
  print_out(wants_json ? report.dump() + "\n" : print(report));
  return kSuccess;
}

}  // namespace fovea::tools
