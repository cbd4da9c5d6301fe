#include "core/env.hpp"

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "core/check.hpp"

namespace fovea {
namespace {

constexpr int kMaxThreads = 4096;
constexpr int kMaxCacheMib = 1 << 20;  // a tebibyte

const char* process_environment(const char* name) { return std::getenv(name); }

std::optional<std::string_view> find(EnvironmentLookup lookup, const char* name) {
  const char* value = lookup(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<std::string> text_of(std::optional<std::string_view> value) {
  return value ? std::optional<std::string>(*value) : std::nullopt;
}

std::optional<int> parse_count(std::string_view text, int max) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  const bool is_whole = end == text.data() + text.size();
  if (error != std::errc() || !is_whole || count < 0 || count > max) return std::nullopt;
  return count;
}

std::optional<int> parse_thread_count(std::string_view text) {
  return parse_count(text, kMaxThreads);
}

std::optional<int> unless_automatic(std::optional<int> count) {
  return count == 0 ? std::nullopt : count;
}

}  // namespace

Environment read_environment() { return read_environment(process_environment); }

bool read_verbose() { return find(process_environment, "FOVEA_VERBOSE") == "1"; }

Environment read_environment(EnvironmentLookup lookup) {
  Environment environment;
  if (const auto text = find(lookup, "FOVEA_NUM_THREADS")) {
    const std::optional<int> count = parse_thread_count(*text);
    if (!count) {
      invalid("environment", "FOVEA_NUM_THREADS is '" + std::string(*text) +
                                 "'; expected an integer from 0 (automatic) to " +
                                 std::to_string(kMaxThreads) + ".");
    }
    environment.num_threads = unless_automatic(count);
  }
  if (const auto text = find(lookup, "OMP_NUM_THREADS")) {
    // "4,2" gives a count for each level of nesting; ours is the outermost.
    environment.omp_num_threads =
        unless_automatic(parse_thread_count(text->substr(0, text->find(','))));
  }
  if (const auto text = find(lookup, "FOVEA_CPU_TARGET"))
    environment.cpu_target = std::string(*text);
  environment.compile = text_of(find(lookup, "FOVEA_COMPILE"));
  if (const auto text = find(lookup, "FOVEA_VERBOSE")) {
    environment.verbose = parse_count(*text, 1);
    if (!environment.verbose) {
      invalid("environment", "FOVEA_VERBOSE is '" + std::string(*text) +
                                 "'; expected 0, or 1 for a line on stderr for each call.");
    }
  }
  environment.nvrtc = text_of(find(lookup, "FOVEA_NVRTC"));
  environment.hiprtc = text_of(find(lookup, "FOVEA_HIPRTC"));
  environment.hip = text_of(find(lookup, "FOVEA_HIP"));
  environment.nccl = text_of(find(lookup, "FOVEA_NCCL"));
  environment.pack = text_of(find(lookup, "FOVEA_PACK"));
  environment.tuning = text_of(find(lookup, "FOVEA_TUNING"));
  environment.cache_dir = text_of(find(lookup, "FOVEA_CACHE_DIR"));
  if (const auto text = find(lookup, "FOVEA_CACHE_MAX_MIB")) {
    environment.cache_max_mib = parse_count(*text, kMaxCacheMib);
    if (!environment.cache_max_mib) {
      invalid("environment", "FOVEA_CACHE_MAX_MIB is '" + std::string(*text) +
                                 "'; expected an integer from 0 (nothing is kept) to " +
                                 std::to_string(kMaxCacheMib) + ".");
    }
  }
  environment.home = text_of(find(lookup, "HOME"));
  environment.user_cache_home = text_of(find(lookup, "XDG_CACHE_HOME"));
  environment.virtual_env = text_of(find(lookup, "VIRTUAL_ENV"));
  environment.cuda_home = text_of(find(lookup, "CUDA_HOME"));
  if (!environment.cuda_home) environment.cuda_home = text_of(find(lookup, "CUDA_PATH"));
  environment.rocm_path = text_of(find(lookup, "ROCM_PATH"));
  environment.library_path = text_of(find(lookup, "LD_LIBRARY_PATH"));
  return environment;
}

}  // namespace fovea
