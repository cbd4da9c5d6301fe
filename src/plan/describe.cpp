// What this machine and this library offer, collected from the modules that know it.
#include "fovea/describe.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <cstdlib>
#include <fstream>
#include <limits>

#include "fovea/error.hpp"
#include "fovea/runtime.hpp"

#include "core/env.hpp"
#include "core/num_threads.hpp"
#include "cpu/features.hpp"
#include "cuda/availability.hpp"
#include "cuda/device/shared/captures.h"
#include "cuda/driver/driver.hpp"
#include "cuda/forward/tuning.hpp"
#include "cuda/jit/loader.hpp"
#include "expr/parse.hpp"
#include "plan/json.hpp"
#include "plan/runtime.hpp"

namespace fovea {
namespace {

constexpr CpuTarget kTargets[] = {
    CpuTarget::scalar,      CpuTarget::avx2,        CpuTarget::avx_vnni, CpuTarget::avx512,
    CpuTarget::avx512_vnni, CpuTarget::avx512_bf16, CpuTarget::amx_bf16, CpuTarget::neon};

std::vector<Description::Target> describe_targets() {
  std::vector<Description::Target> targets;
  for (const CpuTarget target : kTargets) {
    const std::string_view missing = cpu::missing_for(target);
    targets.push_back({target, missing.empty(), std::string(missing)});
  }
  return targets;
}

// ---- threads ----

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

Description::Threads describe_threads() {
  Description::Threads threads{.affinity = affinity_count(), .cgroup_quota = cgroup_quota()};
  try {
    threads.automatic = default_num_threads();
  } catch (const InvalidArgument& error) {
    threads.reason = error.what();
  }
  return threads;
}

// ---- GPUs ----

Description::Piece absent(std::string reason) { return {.reason = std::move(reason)}; }

Description::Piece describe_driver(const cuda::driver::Driver& driver) {
  if (!driver.is_present()) return absent(driver.why_absent());
  return {.is_present = true,
          .version = fmt::format("{}.{}", driver.version() / 1000, driver.version() % 1000 / 10),
          .path = driver.path()};
}

/// Of Description::Cuda or ::Rocm.
template <typename Gpus>
void describe_compiler(cuda::jit::Compiler& compiler, Gpus& gpus) {
  const cuda::jit::CompilerLibrary& library = compiler.library();
  if (!library.is_present()) {
    gpus.compiler = absent(library.why_absent());
    return;
  }
  gpus.compiler = {.is_present = true, .version = compiler.version(), .path = library.path()};
  for (const cuda::jit::Architecture& architecture : compiler.architectures())
    gpus.architectures.push_back(architecture.name());
}

Description::Piece describe_pack(const cuda::jit::Loader& loader) {
  const cuda::jit::KernelPack* pack = loader.pack();
  if (pack == nullptr) return absent(loader.why_no_pack());
  return {.is_present = true,
          .path = pack->path(),
          .num_kernels = static_cast<std::int64_t>(pack->list().size())};
}

void describe_tuning(const cuda::TuningFile& file, Description::Cuda& cuda) {
  if (file.where.empty()) {
    cuda.tuning = absent("none is named by FOVEA_TUNING or in the pack");
  } else if (!file.tuning) {
    cuda.tuning = absent(file.why_not);
  } else {
    cuda.tuning = {.is_present = true, .path = file.where};
    for (const auto& [device, winners] : file.tuning->winners()) {
      cuda.tuned_devices.push_back(
          {device.major, device.minor, device.num_sms, static_cast<std::int64_t>(winners.size())});
    }
  }
}

Description::Piece describe_cache(const cuda::jit::DiskCache& cache) {
  if (cache.options().folder.empty())
    return absent("neither FOVEA_CACHE_DIR nor HOME is set, or FOVEA_CACHE_MAX_MIB is 0");
  if (std::string reason = cache.why_unused(); !reason.empty()) return absent(std::move(reason));
  Description::Piece piece{.is_present = true,
                           .path = cache.options().folder,
                           .max_bytes = static_cast<std::int64_t>(cache.options().max_bytes)};
  for (const auto& row : cache.list()) {
    ++piece.num_kernels;
    piece.num_bytes += static_cast<std::int64_t>(row.bytes);
  }
  return piece;
}

Description::Gpu describe_gpu(const cuda::driver::DeviceInfo& device,
                              const cuda::driver::Driver& driver, cuda::jit::Loader& loader) {
  std::string reason = cuda::why_unavailable(driver, loader, device.index);
  const bool runs_here = reason.empty();
  return {.device = device.device(),
          .model = device.name,
          .architecture = cuda::jit::architecture_of(device).name(),
          .compute_capability_major = device.compute_capability_major,
          .compute_capability_minor = device.compute_capability_minor,
          .num_sms = device.num_sms,
          .shared_bytes_per_cta = device.shared_bytes_per_cta,
          .l2_bytes = device.l2_bytes,
          .memory_bytes = device.memory_bytes,
          .runs_here = runs_here,
          .reason = std::move(reason)};
}

/// What stands between a problem on a GPU and its kernel, piece by piece.
Description::Cuda describe_cuda() {
  Description::Cuda cuda;
  try {
    const cuda::driver::Driver& driver = cuda::driver::process_driver();
    cuda::jit::Loader& loader = cuda::jit::process_loader();
    cuda.driver = describe_driver(driver);
    for (const auto& device : driver.devices())
      cuda.gpus.push_back(describe_gpu(device, driver, loader));
    describe_compiler(loader.compiler(), cuda);
    cuda.pack = describe_pack(loader);
    cuda.kernel_text = cuda::jit::to_hex(cuda::jit::embedded_device_text().digest);
    describe_tuning(cuda::process_tuning(), cuda);
    cuda.cache = describe_cache(loader.disk());
  } catch (const InvalidArgument& error) {
    cuda = {};
    cuda.problem = error.what();
  }
  return cuda;
}

Description::Rocm describe_rocm() {
  Description::Rocm rocm;
  try {
    const auto& driver = cuda::driver::process_driver(Device::Kind::rocm);
    cuda::jit::Loader& loader = cuda::jit::process_loader();
    rocm.driver = describe_driver(driver);
    for (const auto& device : driver.devices())
      rocm.gpus.push_back(describe_gpu(device, driver, loader));
    describe_compiler(loader.compiler(cuda::jit::CompilerKind::hiprtc), rocm);
  } catch (const InvalidArgument& error) {
    rocm = {};
    rocm.problem = error.what();
  }
  return rocm;
}

// ---- operations, limits, environment ----

std::vector<Description::Operation> describe_operations() {
  const std::vector<Dtype> floats{Dtype::f32, Dtype::f16, Dtype::bf16};
  const std::vector<std::string> cpu{"cpu"}, both{"cpu", "cuda"}, all{"cpu", "cuda", "rocm"};
  const std::vector<std::string> formulas{"packed", "score_mod", "mask_mod", "sinks", "dropout"};
  std::vector<std::string> forward = formulas;
  for (const char* feature : {"lse", "row_max", "plan", "lengths_up_to"})
    forward.emplace_back(feature);
  std::vector<std::string> backward = formulas;
  for (const char* feature : {"dlse", "dsinks", "dcaptured", "plan"})
    backward.emplace_back(feature);
  std::vector<std::string> jvp = formulas;
  for (const char* feature : {"lse", "plan"}) jvp.emplace_back(feature);
  return {
      {"attention_forward", floats, all, forward},
      {"attention_backward", floats, both, backward},
      {"attention_jvp", floats, both, jvp},
      {"attention_double_backward", floats, cpu, formulas},
      {"attention_probabilities", floats, cpu, formulas},
      {"attention_decode",
       floats,
       both,
       {"score_mod", "mask_mod", "sinks", "lse", "paged", "append", "rotary", "left_padding"}},
      {"append_to_cache", floats, both, {"paged", "rotary", "left_padding"}},
      {"merge_states", floats, both, {"packed", "lse"}},
      {"rotary", floats, both, {"packed", "positions", "offsets", "in_place"}},
  };
}

std::vector<std::pair<std::string, std::int64_t>> describe_limits() {
  return {{"max_plans", Runtime::Impl::kMaxPlans},
          {"max_rank", kMaxRank},
          {"max_seqlen", std::numeric_limits<std::int32_t>::max()},
          {"max_formula_nesting", expr::kMaxNesting},
          {"max_formula_parts", expr::kMaxParts},
          {"cuda_max_captured_tensors", cuda::kMaxCapturedTensors},
          {"cuda_max_captured_scalars", cuda::kMaxCapturedScalars},
          {"cuda_max_captured_rank", cuda::kMaxCapturedRank}};
}

void describe_environment(Description& description) {
  const auto add = [&](const char* name, const auto& value) {
    description.environment.emplace_back(
        name, value ? fmt::format("{}", *value) : std::string("not set"));
  };
  try {
    const Environment environment = read_environment();
    add("FOVEA_NUM_THREADS", environment.num_threads);
    add("OMP_NUM_THREADS", environment.omp_num_threads);
    add("FOVEA_CPU_TARGET", environment.cpu_target);
    add("FOVEA_COMPILE", environment.compile);
    add("FOVEA_VERBOSE", environment.verbose);
    add("FOVEA_NVRTC", environment.nvrtc);
    add("FOVEA_HIP", environment.hip);
    add("FOVEA_HIPRTC", environment.hiprtc);
    add("FOVEA_PACK", environment.pack);
    add("FOVEA_TUNING", environment.tuning);
    add("FOVEA_CACHE_DIR", environment.cache_dir);
    add("FOVEA_CACHE_MAX_MIB", environment.cache_max_mib);
    if (environment.cpu_target && !parse_cpu_target(*environment.cpu_target)) {
      description.environment_problem = fmt::format(
          "FOVEA_CPU_TARGET is '{}'; expected a target's name", *environment.cpu_target);
    }
    if (environment.compile && !parse_compile_mode(*environment.compile)) {
      description.environment_problem =
          fmt::format("FOVEA_COMPILE is '{}'; expected complete or staged", *environment.compile);
    }
  } catch (const InvalidArgument& error) {
    description.environment_problem = error.what();
  }
}

// ---- JSON ----

std::string json_of_texts(const std::vector<std::string>& texts) {
  return json_list(texts, [](const std::string& text) { return quoted_json(text); });
}

std::string json_of(const Description::Target& target) {
  JsonObject json;
  json.text("name", name(target.target)).flag("runs_here", target.runs_here);
  if (!target.reason.empty()) json.text("reason", target.reason);
  return json.done();
}

std::string json_of(const Description::Threads& threads) {
  JsonObject json;
  json.number("affinity", threads.affinity)
      .text("cgroup_quota", threads.cgroup_quota)
      .number("automatic", threads.automatic);
  if (!threads.reason.empty()) json.text("problem", threads.reason);
  return json.done();
}

std::string json_of(const Description::Gpu& gpu) {
  JsonObject json;
  json.text("name", to_string(gpu.device))
      .text("model", gpu.model)
      .text("architecture", gpu.architecture);
  if (gpu.compute_capability_major > 0) {
    json.text("compute_capability",
              fmt::format("{}.{}", gpu.compute_capability_major, gpu.compute_capability_minor));
  }
  json.number("num_sms", gpu.num_sms)
      .number("shared_bytes_per_cta", gpu.shared_bytes_per_cta)
      .number("l2_bytes", gpu.l2_bytes)
      .number("memory_bytes", gpu.memory_bytes)
      .flag("runs_here", gpu.runs_here);
  if (!gpu.reason.empty()) json.text("reason", gpu.reason);
  return json.done();
}

/// Fields that a piece has when it is there; why not, where it is not.
template <typename Write>
std::string json_of(const Description::Piece& piece, const Write& write) {
  JsonObject json;
  json.flag("is_present", piece.is_present);
  if (piece.is_present) {
    write(json);
  } else {
    json.text("reason", piece.reason);
  }
  return json.done();
}

std::string json_of(const Description::TunedDevice& device) {
  JsonObject json;
  json.text("compute_capability",
            fmt::format("{}.{}", device.compute_capability_major, device.compute_capability_minor))
      .number("num_sms", device.num_sms)
      .number("choices", device.num_choices);
  return json.done();
}

std::string json_of(const Description::Cuda& cuda) {
  JsonObject json;
  if (!cuda.problem.empty()) return json.text("problem", cuda.problem).done();
  const auto any = [](const auto& element) { return json_of(element); };
  json.json("driver",
            json_of(cuda.driver, [&](JsonObject& o) { o.text("cuda", cuda.driver.version); }))
      .json("devices", json_list(cuda.gpus, any))
      .json("compiler", json_of(cuda.compiler,
                                [&](JsonObject& o) {
                                  o.text("version", cuda.compiler.version)
                                      .text("path", cuda.compiler.path)
                                      .json("architectures", json_of_texts(cuda.architectures));
                                }))
      .json("pack",
            json_of(cuda.pack,
                    [&](JsonObject& o) {
                      o.text("path", cuda.pack.path).number("kernels", cuda.pack.num_kernels);
                    }))
      .text("kernel_text", cuda.kernel_text)
      .json("tuning", json_of(cuda.tuning,
                              [&](JsonObject& o) {
                                o.text("path", cuda.tuning.path)
                                    .json("devices", json_list(cuda.tuned_devices, any));
                              }))
      .json("cache", json_of(cuda.cache, [&](JsonObject& o) {
              o.text("folder", cuda.cache.path)
                  .number("kernels", cuda.cache.num_kernels)
                  .number("bytes", cuda.cache.num_bytes)
                  .number("max_bytes", cuda.cache.max_bytes);
            }));
  return json.done();
}

std::string json_of(const Description::Rocm& rocm) {
  JsonObject json;
  if (!rocm.problem.empty()) return json.text("problem", rocm.problem).done();
  json.json("driver", json_of(rocm.driver,
                              [&](JsonObject& o) {
                                o.text("hip", rocm.driver.version).text("path", rocm.driver.path);
                              }))
      .json("devices", json_list(rocm.gpus, [](const auto& gpu) { return json_of(gpu); }))
      .json("compiler", json_of(rocm.compiler,
                                [&](JsonObject& o) {
                                  o.text("version", rocm.compiler.version)
                                      .text("path", rocm.compiler.path)
                                      .json("architectures", json_of_texts(rocm.architectures));
                                }))
      .text("measured", "not on hardware");
  return json.done();
}

std::string json_of(const Description::Operation& operation) {
  JsonObject json;
  json.text("name", operation.name)
      .json("dtypes",
            json_list(operation.dtypes, [](Dtype dtype) { return quoted_json(name(dtype)); }))
      .json("devices", json_of_texts(operation.devices))
      .json("features", json_of_texts(operation.features));
  return json.done();
}

std::string json_of_environment(const Description& description) {
  JsonObject json;
  for (const auto& [variable, value] : description.environment) json.text(variable, value);
  if (!description.environment_problem.empty())
    json.text("problem", description.environment_problem);
  return json.done();
}

}  // namespace

Description describe() {
  Description description{.version = std::string(version()),
                          .compiler = __VERSION__,
                          .processor = cpu::processor_name(),
                          .targets = describe_targets(),
                          .best_f32_target = cpu::best_f32_target(),
                          .threads = describe_threads(),
                          .cuda = describe_cuda(),
                          .rocm = describe_rocm(),
                          .operations = describe_operations(),
                          .limits = describe_limits()};
  const CpuTarget best_bf16 = cpu::best_bf16_target();
  if (best_bf16 != CpuTarget::automatic) description.best_bf16_target = best_bf16;
  describe_environment(description);
  return description;
}

std::string Description::json() const {
  const auto any = [](const auto& element) { return json_of(element); };
  JsonObject of_limits;
  for (const auto& [limit, value] : limits) of_limits.number(limit, value);
  JsonObject object;
  object.text("fovea", version)
      .text("compiler", compiler)
      .text("processor", processor)
      .json("targets", json_list(targets, any))
      .text("best_f32_target", name(best_f32_target))
      .text("best_bf16_target",
            best_bf16_target ? name(*best_bf16_target) : "none: f32 products are faster")
      .json("threads", json_of(threads))
      .json("cuda", json_of(cuda))
      .json("rocm", json_of(rocm))
      .json("operations", json_list(operations, any))
      .json("limits", of_limits.done())
      .json("environment", json_of_environment(*this));
  return object.done();
}

}  // namespace fovea
