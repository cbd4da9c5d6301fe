// fovea doctor: what this machine offers, and what the environment asks for.
#include <fmt/format.h>
#include <sched.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fovea/error.hpp"
#include "fovea/problem.hpp"
#include "fovea/runtime.hpp"

#include "command.hpp"
#include "command_line.hpp"
#include "core/env.hpp"
#include "core/num_threads.hpp"
#include "cpu/features.hpp"
#include "cuda/availability.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/forward/tuning.hpp"
#include "cuda/jit/loader.hpp"
#include "failure.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAbout =
    "Prints what this machine offers: processor, instruction sets and why others are missing, "
    "threads, versions, GPUs with what is needed to run on them, and the environment variables "
    "that "
    "Fovea reads.";

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
    result["FOVEA_NVRTC"] = text(environment.nvrtc);
    result["FOVEA_PACK"] = text(environment.pack);
    result["FOVEA_TUNING"] = text(environment.tuning);
    result["FOVEA_CACHE_DIR"] = text(environment.cache_dir);
    result["FOVEA_CACHE_MAX_MIB"] = text(environment.cache_max_mib);
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

Json driver_report(const cuda::driver::Driver& driver) {
  if (!driver.is_present()) return {{"is_present", false}, {"reason", driver.why_absent()}};
  return {{"is_present", true},
          {"cuda", fmt::format("{}.{}", driver.version() / 1000, driver.version() % 1000 / 10)}};
}

Json compiler_report(cuda::jit::Compiler& compiler) {
  const cuda::jit::Nvrtc& nvrtc = compiler.nvrtc();
  if (!nvrtc.is_present()) return {{"is_present", false}, {"reason", nvrtc.why_absent()}};
  Json names = Json::array();
  for (const cuda::jit::Architecture& architecture : compiler.architectures())
    names.push_back(architecture.name());
  return {{"is_present", true},
          {"version", compiler.version()},
          {"path", nvrtc.path()},
          {"architectures", names}};
}

Json pack_report(const cuda::jit::Loader& loader) {
  const cuda::jit::KernelPack* pack = loader.pack();
  if (pack == nullptr) return {{"is_present", false}, {"reason", loader.why_no_pack()}};
  return {{"is_present", true}, {"path", pack->path()}, {"kernels", pack->list().size()}};
}

Json tuning_report(const cuda::TuningFile& file) {
  if (file.where.empty())
    return {{"is_present", false}, {"reason", "none is named by FOVEA_TUNING or in the pack"}};
  if (!file.tuning) return {{"is_present", false}, {"reason", file.why_not}};
  Json devices = Json::array();
  for (const auto& [device, winners] : file.tuning->winners()) {
    devices.push_back({{"compute_capability", fmt::format("{}.{}", device.major, device.minor)},
                       {"num_sms", device.num_sms},
                       {"choices", winners.size()}});
  }
  return {{"is_present", true}, {"path", file.where}, {"devices", devices}};
}

Json cache_report(const cuda::jit::DiskCache& cache) {
  if (cache.options().folder.empty())
    return {{"is_present", false},
            {"reason", "neither FOVEA_CACHE_DIR nor HOME is set, or FOVEA_CACHE_MAX_MIB is 0"}};
  if (const std::string reason = cache.why_unused(); !reason.empty())
    return {{"is_present", false}, {"reason", reason}};
  std::int64_t bytes = 0;
  const auto rows = cache.list();
  for (const auto& row : rows) bytes += row.bytes;
  return {{"is_present", true},
          {"folder", cache.options().folder},
          {"kernels", rows.size()},
          {"bytes", bytes},
          {"max_bytes", cache.options().max_bytes}};
}

Json devices_report(const cuda::driver::Driver& driver, cuda::jit::Loader& loader) {
  Json list = Json::array();
  for (const cuda::driver::DeviceInfo& device : driver.devices()) {
    const std::string reason = cuda::why_unavailable(driver, loader, device.index);
    Json entry = {{"name", fmt::format("cuda:{}", device.index)},
                  {"model", device.name},
                  {"architecture", cuda::jit::architecture_of(device).name()},
                  {"num_sms", device.num_sms},
                  {"shared_bytes_per_cta", device.shared_bytes_per_cta},
                  {"l2_bytes", device.l2_bytes},
                  {"memory_bytes", device.memory_bytes},
                  {"runs_here", reason.empty()}};
    if (!reason.empty()) entry["reason"] = reason;
    list.push_back(entry);
  }
  return list;
}

/// What stands between a problem on a GPU and its kernel, piece by piece.
Json cuda_report() {
  try {
    const cuda::driver::Driver& driver = cuda::driver::process_driver();
    cuda::jit::Loader& loader = cuda::jit::process_loader();
    return {{"driver", driver_report(driver)},
            {"devices", devices_report(driver, loader)},
            {"compiler", compiler_report(loader.compiler())},
            {"pack", pack_report(loader)},
            {"kernel_text", cuda::jit::to_hex(cuda::jit::embedded_device_text().digest)},
            {"tuning", tuning_report(cuda::process_tuning())},
            {"cache", cache_report(loader.disk())}};
  } catch (const InvalidArgument& error) {
    return {{"problem", error.what()}};
  }
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
          {"cuda", cuda_report()},
          {"environment", environment()}};
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

std::string print_cuda(const Json& report) {
  if (report.contains("problem"))
    return fmt::format("cuda        {}\n", text_of(report["problem"]));
  const auto field = [&](const char* part, const char* key) {
    return report[part].contains(key) ? text_of(report[part][key]) : std::string();
  };
  std::string text = piece("driver", report["driver"], "CUDA " + field("driver", "cuda"));
  for (const Json& device : report["devices"]) {
    text +=
        fmt::format("{:<11} {}, {}, {} SMs, {} GiB: {}\n", text_of(device["name"]),
                    text_of(device["model"]), text_of(device["architecture"]),
                    text_of(device["num_sms"]), device["memory_bytes"].get<std::int64_t>() >> 30U,
                    device["runs_here"].get<bool>() ? "runs here"
                                                    : "does not run: " + text_of(device["reason"]));
  }
  const Json& compiler = report["compiler"];
  const std::string architectures =
      compiler.contains("architectures") ? joined(compiler["architectures"]) : "";
  text += piece("compiler", compiler,
                fmt::format("NVRTC {} for {}, {}", field("compiler", "version"), architectures,
                            field("compiler", "path")));
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
  text += print_cuda(report["cuda"]);
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
