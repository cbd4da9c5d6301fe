// Runs the conformance cases on the GPU or on the emulator and says which do not give the bits expected.
//
//   conformance hardware|emulator|compiler [--only PART] [--skip PART]... [--every N] [--save FILE] [--against FILE]
//
// --only: cases whose name holds PART; --skip: all others. --every: each N-th case. --save: a line per case with its
// name and a digest of its output; --against: says where outputs differ from such a file, the GPU's on another machine.
// compiler: compiles the kernels for sm_90a and sm_100a, as far as these have their instructions, and runs none.
// Exits with 77 where there is no such backend.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iomanip>
#include <map>
#include <string>
#include <vector>

#include "fovea/error.hpp"

#include "conformance/backend.hpp"

namespace fovea::cuda::conformance {
namespace {

constexpr int kShownFailures = 40;
constexpr int kNoBackend = 77;

struct Options {
  std::string backend, only, save, against;
  std::vector<std::string> skip;
  std::size_t every = 1;
};

std::vector<Case> all_cases() {
  std::vector<Case> all = matrix_cases();
  for (auto family : {arithmetic_cases, copy_cases, recorded_cases, wgmma_cases, tcgen05_cases}) {
    for (Case& one : family()) all.push_back(std::move(one));
  }
  return all;
}

/// "wgmma_ss_bf16" of "wgmma_ss_bf16_bf16_64_k_mn": what the table counts by.
std::string family_of(const Case& one) {
  if (one.is_recorded) return "recorded: " + one.name.substr(0, one.name.find_first_of(", "));
  if (one.kernel.rfind("wgmma_", 0) != 0) return one.kernel;
  std::size_t end = 0;
  for (int i = 0; i < 4; ++i) end = one.kernel.find('_', end + 1);
  return one.kernel.substr(0, end);
}

std::uint64_t digest(const Bytes& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const std::byte byte : bytes)
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3ULL;
  return hash;
}

std::string difference(const Case& one, const Bytes& out) {
  if (one.check) return one.check(out);
  std::size_t num_wrong = 0, first = 0;
  for (std::size_t at = 0; at + 4 <= out.size(); at += 4) {
    if (std::memcmp(&out[at], &one.expected[at], 4) != 0 && num_wrong++ == 0) first = at;
  }
  if (num_wrong == 0) return {};
  std::uint32_t got, want;
  std::memcpy(&got, &out[first], 4);
  std::memcpy(&want, &one.expected[first], 4);
  char text[160];
  std::snprintf(text, sizeof text, "%zu of %zu words differ, first word %zu: %08x; expected %08x",
                num_wrong, out.size() / 4, first / 4, got, want);
  return text;
}

std::map<std::string, std::string> read_digests(const std::string& path) {
  std::map<std::string, std::string> digests;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t tab = line.find('\t'), end = line.find('\t', tab + 1);
    if (tab != std::string::npos)
      digests[line.substr(tab + 1, end - tab - 1)] = line.substr(0, tab);
  }
  return digests;
}

struct Count {
  int cases = 0, failed = 0, unlike = 0;
};

class Run {
 public:
  explicit Run(const Options& options) : others_(read_digests(options.against)) {
    if (!options.save.empty()) save_.open(options.save);
  }

  /// False where nothing more can be run: the GPU's context is lost.
  bool add(Backend& backend, const Case& one) {
    Count& count = counts_[family_of(one)];
    ++count.cases;
    std::string wrong;
    Bytes out;
    try {
      out = backend.run(one);
      wrong = difference(one, out);
    } catch (const DeviceError& error) {
      show("LOST", one.name, error.what());
      ++count.failed;
      return false;
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    char text[20];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(digest(out)));
    if (save_.is_open()) save(one, text, out);
    if (const auto other = others_.find(one.name);
        other != others_.end() && other->second != text) {
      ++count.unlike;
      if (wrong.empty())
        show("UNLIKE", one.name, "as expected, but not bit for bit what the file has");
    }
    if (!wrong.empty()) {
      ++count.failed;
      show("FAIL", one.name, wrong);
    }
    return true;
  }

  int finish() const {
    Count all;
    for (const auto& [family, count] : counts_) {
      std::printf("%-28s %5d cases  %5d wrong", family.c_str(), count.cases, count.failed);
      if (!others_.empty()) std::printf("  %5d unlike the file", count.unlike);
      std::printf("\n");
      all.cases += count.cases;
      all.failed += count.failed;
      all.unlike += count.unlike;
    }
    std::printf("%d of %d cases as expected\n", all.cases - all.failed, all.cases);
    return all.failed == 0 && all.unlike == 0 && all.cases > 0 ? 0 : 1;
  }

 private:
  /// digest, name and, of recorded cases, every byte.
  void save(const Case& one, const char* digest, const Bytes& out) {
    save_ << digest << '\t' << one.name;
    if (one.is_recorded) {
      save_ << '\t' << std::hex << std::setfill('0');
      for (const std::byte byte : out) save_ << std::setw(2) << static_cast<int>(byte);
    }
    save_ << '\n';
  }

  void show(const char* what, const std::string& name, const std::string& text) {
    if (num_shown_++ < kShownFailures) std::printf("%s %s: %s\n", what, name.c_str(), text.c_str());
  }

  std::map<std::string, std::string> others_;
  std::ofstream save_;
  std::map<std::string, Count> counts_;
  int num_shown_ = 0;
};

std::vector<Case> chosen_cases(const Options& options, const Backend* backend) {
  std::vector<Case> chosen;
  std::size_t num_products = 0;
  for (Case& one : all_cases()) {
    const auto has = [&](const std::string& part) {
      return one.name.find(part) != std::string::npos;
    };
    // Few cases that are not wgmma: all of them, always.
    const bool is_product = one.kernel.rfind("wgmma_", 0) == 0 && !one.is_recorded;
    const bool is_there = backend == nullptr || backend->has_instructions_of(one);
    const bool is_wanted = is_there && has(options.only) &&
                           std::none_of(options.skip.begin(), options.skip.end(), has);
    if (is_wanted && (!is_product || num_products++ % options.every == 0))
      chosen.push_back(std::move(one));
  }
  return chosen;
}

int compile(const Options& options) {
  const std::vector<Case> cases = chosen_cases(options, nullptr);
  try {
    for (const jit::Architecture architecture : {jit::Architecture{9, 0}, {10, 0}, {12, 0}}) {
      std::printf("%s: %zu kernels\n", architecture.name().c_str(),
                  compile_for(cases, architecture));
    }
  } catch (const Unsupported& error) {
    std::printf("skipped: %s\n", error.what());
    return kNoBackend;
  } catch (const CompileError& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  return 0;
}

int run(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_ptr<Backend> backend;
  try {
    backend = options.backend == "hardware" ? hardware() : emulator();
  } catch (const Unsupported& error) {
    std::printf("skipped: %s\n", error.what());
    return kNoBackend;
  }
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const std::vector<Case> cases = chosen_cases(options, backend.get());
  backend->prepare(cases);
  std::printf("%s, ready after %.1f s\n", backend->name().c_str(), seconds());
  Run run(options);
  for (const Case& one : cases) {
    if (!run.add(*backend, one)) break;
  }
  const int status = run.finish();
  std::printf("%.1f s\n", seconds());
  return status;
}

bool parse(int argc, char** argv, Options& options) {
  if (argc < 2) return false;
  options.backend = argv[1];
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--only")
      options.only = value;
    else if (name == "--skip")
      options.skip.push_back(value);
    else if (name == "--save")
      options.save = value;
    else if (name == "--against")
      options.against = value;
    else if (name == "--every")
      std::from_chars(value.data(), value.data() + value.size(), options.every);
    else
      return false;
  }
  return (options.backend == "hardware" || options.backend == "emulator" ||
          options.backend == "compiler") &&
         options.every > 0 && argc % 2 == 0;
}

}  // namespace
}  // namespace fovea::cuda::conformance

int main(int argc, char** argv) {
  fovea::cuda::conformance::Options options;
  if (!fovea::cuda::conformance::parse(argc, argv, options)) {
    std::printf(
        "usage: conformance hardware|emulator|compiler [--only PART] [--skip PART]... [--every N] "
        "[--save "
        "FILE] [--against "
        "FILE]\n");
    return 2;
  }
  return options.backend == "compiler" ? fovea::cuda::conformance::compile(options)
                                       : fovea::cuda::conformance::run(options);
}
