// fovea cache: the compiled kernels that are kept on disk.
#include <fmt/format.h>

#include <array>
#include <ctime>
#include <nlohmann/json.hpp>
#include <optional>

#include "command.hpp"
#include "command_line.hpp"
#include "cuda/jit/disk_cache.hpp"
#include "failure.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;
using cuda::jit::DiskCache;

constexpr const char* kAbout =
    "Lists, verifies or clears the GPU kernels that were compiled on this machine and kept on "
    "disk.";

constexpr const char* kExamples =
    R"(Examples
  What is there?
    fovea cache list
  Is all of it whole? What is not is removed; it would be compiled anew anyway.
    fovea cache verify
  Start afresh:
    fovea cache clear
Files of others in the folder are neither listed nor touched. docs/env.md tells how to move or bound the folder.

Exit codes: 0 done; 1 verify found and removed damaged kernels; 2 bad input.
)";

std::string time_of(std::int64_t seconds) {
  const std::time_t time = seconds;
  std::tm parts{};
  localtime_r(&time, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &parts);
  return text.data();
}

Json rows_of(const DiskCache& cache) {
  Json rows = Json::array();
  for (const DiskCache::Listed& row : cache.list()) {
    Json entry = {
        {"file", row.file},         {"kernel", row.label}, {"architecture", row.architecture},
        {"compiler", row.compiler}, {"bytes", row.bytes},  {"last_used", time_of(row.last_used)}};
    if (!row.why_bad.empty()) entry["problem"] = row.why_bad;
    rows.push_back(entry);
  }
  return rows;
}

std::string print_rows(const Json& report) {
  std::string text;
  std::int64_t bytes = 0;
  for (const Json& row : report["kernels"]) {
    bytes += row["bytes"].get<std::int64_t>();
    const auto word = [&](const char* key) { return row[key].get<std::string>(); };
    text +=
        row.contains("problem")
            ? fmt::format("{}  {}: {}\n", word("last_used"), word("file"), word("problem"))
            : fmt::format("{}  {:<8} {:>7}  {:<8}  {}\n", word("last_used"), word("architecture"),
                          row["bytes"].get<std::int64_t>(), word("compiler"), word("kernel"));
  }
  return text + fmt::format("{} kernels, {:.1f} of {} MiB in {}\n", report["kernels"].size(),
                            static_cast<double>(bytes) / 1048576,
                            report["max_bytes"].get<std::int64_t>() >> 20U,
                            report["folder"].get<std::string>());
}

std::string print_removed(const Json& report) {
  return fmt::format("removed {} files, {} bytes, from {}\n", report["removed_files"].get<int>(),
                     report["removed_bytes"].get<std::int64_t>(),
                     report["folder"].get<std::string>());
}

}  // namespace

int run_cache(const std::vector<std::string>& words) {
  std::string action;
  bool wants_json = false;
  CommandLine line("fovea cache", kAbout, kExamples);
  line.add_word("action", "list, verify or clear", action);
  line.add_flag({"--json", "", "", "print one JSON object"}, wants_json);
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;
  DiskCache cache(cuda::jit::default_disk_cache());
  const DiskCache::Options& options = cache.options();
  if (options.folder.empty()) {
    bad_input(
        "there is no cache folder: neither FOVEA_CACHE_DIR nor HOME is set, or FOVEA_CACHE_MAX_MIB "
        "is 0");
  }
  if (const std::string reason = cache.why_unused(); !reason.empty()) bad_input(reason);
  Json report = {{"command", "cache"}, {"action", action}, {"folder", options.folder}};
  std::optional<DiskCache::Removed> removed;
  if (action == "list") {
    report["max_bytes"] = options.max_bytes;
    report["kernels"] = rows_of(cache);
  } else if (action == "verify") {
    removed = cache.remove_bad();
  } else if (action == "clear") {
    removed = cache.clear();
  } else {
    bad_input(fmt::format("unknown action '{}'; expected list, verify or clear", action));
  }
  if (removed) {
    report["removed_files"] = removed->files;
    report["removed_bytes"] = removed->bytes;
  }
  print_out(wants_json ? report.dump() + "\n"
            : removed  ? print_removed(report)
                       : print_rows(report));
  return action == "verify" && removed->files > 0 ? kFailed : kSuccess;
}

}  // namespace fovea::tools
