#include "cuda/jit/compiler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <string_view>

#include "fovea/error.hpp"

namespace fovea::cuda::jit {
namespace {

// What the compiler calls the unit in its messages.
constexpr std::string_view kUnitName = "fovea_kernel.cu";

/// A program of NVRTC, destroyed with its scope.
class Program {
 public:
  Program(const NvrtcApi& api, const std::string& text, std::span<const SourceFile> headers)
      : api_(api) {
    std::vector<const char*> texts, names;
    for (const SourceFile& header : headers) {
      texts.push_back(header.text);
      names.push_back(header.name);
    }
    check(api.create_program(&program_, text.c_str(), kUnitName.data(),
                             static_cast<int>(headers.size()), texts.data(), names.data()),
          "nvrtcCreateProgram");
  }
  ~Program() { api_.destroy_program(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  int compile(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    pointers.reserve(options.size());
    for (const std::string& option : options) pointers.push_back(option.c_str());
    return api_.compile_program(program_, static_cast<int>(pointers.size()), pointers.data());
  }

  std::string log() { return read(api_.log_size, api_.log, "nvrtcGetProgramLog"); }
  std::string ptx() { return read(api_.ptx_size, api_.ptx, "nvrtcGetPTX"); }
  std::vector<std::byte> cubin() {
    std::size_t bytes = 0;
    check(api_.cubin_size(program_, &bytes), "nvrtcGetCUBINSize");
    std::vector<std::byte> image(bytes);
    check(api_.cubin(program_, reinterpret_cast<char*>(image.data())), "nvrtcGetCUBIN");
    return image;
  }

 private:
  void check(int result, const char* call) {
    if (result != 0) throw CompileError(fmt::format("{}: {}", call, api_.error_string(result)));
  }

  using Size = int (*)(NvrtcApi::Program, std::size_t*);
  using Text = int (*)(NvrtcApi::Program, char*);
  std::string read(Size size, Text text, const char* call) {
    std::size_t bytes = 0;
    check(size(program_, &bytes), call);
    std::string result(bytes, '\0');
    check(text(program_, result.data()), call);
    result.resize(bytes == 0 ? 0 : bytes - 1);  // the size counts the closing zero
    return result;
  }

  const NvrtcApi& api_;
  NvrtcApi::Program program_ = nullptr;
};

/// The first error of a log, and the line of text that it points to.
struct FirstError {
  std::string file;
  int line = 0;
  std::string words;  // "identifier "x" is undefined"
};

/// From a line as "ptx/mma.cuh(17): error: identifier ...".
std::optional<FirstError> first_error(const std::string& log) {
  constexpr std::string_view kMark = "): error: ";
  const std::size_t mark = log.find(kMark);
  if (mark == std::string::npos) return std::nullopt;
  const std::size_t open = log.rfind('(', mark);
  const std::size_t begin = log.rfind('\n', mark) + 1;  // npos + 1 is the log's begin
  if (open == std::string::npos || open < begin) return std::nullopt;
  FirstError error;
  error.file = log.substr(begin, open - begin);
  std::from_chars(log.data() + open + 1, log.data() + mark, error.line);
  const std::size_t words = mark + kMark.size();
  error.words = log.substr(words, log.find('\n', words) - words);
  return error;
}

std::string_view line_of(std::string_view text, int number) {
  for (int line = 1; line < number; ++line) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) return {};
    text.remove_prefix(end + 1);
  }
  return text.substr(0, text.find('\n'));
}

/// What, where and the line there in the message's first line, for readers who show no more; then the log.
std::string describe_failure(const std::string& log, const char* result, const KernelText& text,
                             const DeviceText& device_text) {
  const std::optional<FirstError> error = first_error(log);
  if (!error) return fmt::format("{}\n{}", result, log);
  std::string_view source = error->file == kUnitName ? std::string_view(text.unit) : "";
  for (const SourceFile& file : device_text.files) {
    if (error->file == file.name) source = file.text;
  }
  return fmt::format("{}:{}: {}, in '{}'\n{}", error->file, error->line, error->words,
                     line_of(source, error->line), log);
}

/// Of this thread: what others do on the machine does not count.
std::int64_t thread_cpu_ms() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1000 + time.tv_nsec / 1'000'000;
}

/// The number that ends right before `words` in a line, or 0.
int number_before(std::string_view line, std::string_view words) {
  const std::size_t at = line.find(words);
  if (at == std::string_view::npos) return 0;
  std::size_t begin = at;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int number = 0;
  std::from_chars(line.data() + begin, line.data() + at, number);
  return number;
}

/// "release 13.0, V13.0.88" -> "13.0.88".
std::optional<std::string> version_in(std::string_view ptx) {
  constexpr std::string_view kMark = ", V";
  const std::size_t release = ptx.find("release ");
  if (release == std::string_view::npos) return std::nullopt;
  const std::size_t mark = ptx.find(kMark, release);
  if (mark == std::string_view::npos) return std::nullopt;
  const std::string_view rest = ptx.substr(mark + kMark.size());
  return std::string(rest.substr(0, rest.find_first_not_of("0123456789.")));
}

}  // namespace

Compiler::Compiler(NvrtcSearch search, DeviceText device_text)
    : search_(std::move(search)), device_text_(device_text) {}

const std::optional<std::string>& Compiler::file() {
  std::call_once(search_once_, [&] { file_ = find_nvrtc_file(search_); });
  return file_;
}

const Nvrtc& Compiler::nvrtc() {
  std::call_once(open_once_, [&] { nvrtc_ = std::make_unique<Nvrtc>(search_, file()); });
  return *nvrtc_;
}

const std::string& Compiler::version() {
  std::call_once(version_once_, [&] {
    Program program(nvrtc().api(), "", {});
    if (program.compile({"--gpu-architecture=compute_80"}) == 0) {
      if (const auto found = version_in(program.ptx())) version_ = *found;
    }
    if (version_.empty()) version_ = fmt::format("{}.{}", nvrtc().major(), nvrtc().minor());
  });
  return version_;
}

std::vector<Architecture> Compiler::architectures() {
  const NvrtcApi& api = nvrtc().api();
  int count = 0;
  if (api.num_architectures(&count) != 0) return {};
  std::vector<int> numbers(static_cast<std::size_t>(count));
  if (api.architectures(numbers.data()) != 0) return {};
  std::sort(numbers.begin(), numbers.end());
  std::vector<Architecture> result;
  for (const int number : numbers) {
    const Architecture architecture{number / 10, number % 10};
    if (architecture >= kOldestArchitecture) result.push_back(architecture);
  }
  return result;
}

std::string Compiler::why_not(Architecture architecture) {
  if (!nvrtc().is_present()) return nvrtc().why_absent();
  const std::vector<Architecture> known = architectures();
  if (std::find(known.begin(), known.end(), architecture) != known.end()) return "";
  return fmt::format("NVRTC {}.{} does not know {}; {} may be older than the device",
                     nvrtc().major(), nvrtc().minor(), architecture.name(), nvrtc().path());
}

Cubin Compiler::compile(const KernelText& text, Architecture architecture) {
  const NvrtcApi& api = nvrtc().api();
  if (const std::string why = why_not(architecture); !why.empty()) throw Unsupported(why);
  ++num_compiles_;
  const std::int64_t start_ms = thread_cpu_ms();
  Program program(api, text.unit, device_text_.files);
  const int result = program.compile(compile_options(architecture));
  const std::string log = program.log();
  if (result != 0) {
    throw CompileError(
        fmt::format("kernel {} for {} does not compile: {}", text.label, architecture.name(),
                    describe_failure(log, api.error_string(result), text, device_text_)));
  }
  Cubin cubin{.image = program.cubin(), .report = parse_report(log)};
  cubin.report.compile_ms = static_cast<int>(thread_cpu_ms() - start_ms);
  return cubin;
}

std::vector<std::string> compile_options(Architecture architecture) {
  return {"--gpu-architecture=" + architecture.name(), "--std=c++20",
          "-default-device",      // functions without a mark are the device's
          "-no-source-include",   // nothing of the folder that the program was started in
          "--ptxas-options=-v"};  // registers and spills, for the report
}

CompileReport parse_report(const std::string& log, const std::string& entry) {
  CompileReport report{.log = log};
  bool is_entry = false;
  for (std::string_view rest = log; !rest.empty();) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.find("(C75") != std::string_view::npos) ++report.num_wgmma_notes;
    // "Compiling entry function 'f' for ..." and "Function properties for f" open a function's lines.
    if (line.find("Compiling entry function") != std::string_view::npos ||
        line.find("Function properties for") != std::string_view::npos) {
      is_entry = line.find(entry) != std::string_view::npos;
    }
    if (!is_entry) continue;
    report.spill_bytes +=
        number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
    report.local_bytes += number_before(line, " bytes stack frame");
    report.registers += number_before(line, " registers");
    report.shared_bytes += number_before(line, " bytes smem");
  }
  return report;
}

}  // namespace fovea::cuda::jit
