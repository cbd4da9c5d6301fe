#include "cuda/jit/compiler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <ctime>
#include <string_view>

#include "fovea/error.hpp"

#include "cuda/jit/code_object.hpp"

namespace fovea::cuda::jit {
namespace {

// What the compiler calls the unit in its messages.
constexpr std::string_view kUnitName = "fovea_kernel.cu";

/// A program of the library, destroyed with its scope.
class Program {
 public:
  /// It sees those of the headers that it includes.
  Program(const CompilerApi& api, const std::string& text, const DeviceText& headers) : api_(api) {
    std::vector<const char*> texts, names;
    for (const std::size_t i : included_files(headers, text)) {
      texts.push_back(headers.files[i].text);
      names.push_back(headers.files[i].name);
    }
    check(api.create_program(&program_, text.c_str(), kUnitName.data(),
                             static_cast<int>(names.size()), texts.data(), names.data()),
          "creating a program");
  }
  ~Program() { api_.destroy_program(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// Has a compilation end early once `is_stopped`, where the compiler can.
  void end_once(std::atomic<bool>& is_stopped) {
    if (api_.set_flow_callback == nullptr) return;
    const auto ask = [](void* flag, void*) {
      return static_cast<const std::atomic<bool>*>(flag)->load() ? 1 : 0;
    };
    check(api_.set_flow_callback(program_, ask, &is_stopped), "asking to be asked");
  }

  int compile(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    pointers.reserve(options.size());
    for (const std::string& option : options) pointers.push_back(option.c_str());
    return api_.compile_program(program_, static_cast<int>(pointers.size()), pointers.data());
  }

  std::string log() { return read(api_.log_size, api_.log, "reading the log"); }
  std::string ptx() { return read(api_.ptx_size, api_.ptx, "reading PTX"); }
  std::vector<std::byte> image() {
    std::size_t bytes = 0;
    check(api_.image_size(program_, &bytes), "sizing the image");
    std::vector<std::byte> image(bytes);
    check(api_.image(program_, reinterpret_cast<char*>(image.data())), "reading the image");
    return image;
  }

 private:
  void check(int result, const char* call) {
    if (result != 0) throw CompileError(fmt::format("{}: {}", call, api_.error_string(result)));
  }

  using Size = int (*)(CompilerApi::Program, std::size_t*);
  using Text = int (*)(CompilerApi::Program, char*);
  std::string read(Size size, Text text, const char* call) {
    std::size_t bytes = 0;
    check(size(program_, &bytes), call);
    std::string result(bytes, '\0');
    check(text(program_, result.data()), call);
    result.resize(bytes == 0 ? 0 : bytes - 1);  // the size counts the closing zero
    return result;
  }

  const CompilerApi& api_;
  CompilerApi::Program program_ = nullptr;
};

/// The first error of a log, and the line of text that it points to.
struct FirstError {
  std::string file;
  int line = 0;
  std::string words;  // "identifier "x" is undefined"
};

/// What stands around the line's number in the words of a compiler: "ptx/mma.cuh(17): error: identifier ..." of NVRTC,
/// "ptx/mma.cuh:17:5: error: use of ..." of clang, which is in hipRTC.
struct ErrorStyle {
  std::string_view mark;
  char before_number;
};

std::optional<FirstError> first_error(std::string_view log, const ErrorStyle& style) {
  const std::size_t mark = log.find(style.mark);
  if (mark == std::string_view::npos) return std::nullopt;
  const std::size_t begin = log.rfind('\n', mark) + 1;  // npos + 1 is the log's begin
  std::string_view place = log.substr(begin, mark - begin);
  if (style.before_number == ':') place = place.substr(0, place.rfind(':'));  // without the column
  const std::size_t open = place.rfind(style.before_number);
  if (open == std::string_view::npos) return std::nullopt;
  FirstError error;
  error.file = place.substr(0, open);
  std::from_chars(place.data() + open + 1, place.data() + place.size(), error.line);
  const std::size_t words = mark + style.mark.size();
  error.words = log.substr(words, log.find('\n', words) - words);
  return error;
}

std::optional<FirstError> first_error(const std::string& log) {
  if (auto error = first_error(log, {.mark = "): error: ", .before_number = '('})) return error;
  return first_error(log, {.mark = ": error: ", .before_number = ':'});
}

/// hipRTC names files by the folder that it has written them to.
bool is_named(const FirstError& error, std::string_view file) {
  return error.file == file || error.file.ends_with("/" + std::string(file));
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
  std::string_view name = error->file, source;
  const auto compare = [&](std::string_view file, std::string_view content) {
    if (!is_named(*error, file)) return;
    name = file;
    source = content;
  };
  compare(kUnitName, text.unit);
  compare("CompileSource", text.unit);  // of ROCm 5, whatever name it was given
  for (const SourceFile& file : device_text.files) compare(file.name, file.text);
  return fmt::format("{}:{}: {}, in '{}'\n{}", name, error->line, error->words,
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

/// "release 13.0, V13.0.88" -> "13.0.88"; empty where it is not there.
std::string version_in(std::string_view ptx) {
  constexpr std::string_view kMark = ", V";
  const std::size_t release = ptx.find("release ");
  if (release == std::string_view::npos) return {};
  const std::size_t mark = ptx.find(kMark, release);
  if (mark == std::string_view::npos) return {};
  const std::string_view rest = ptx.substr(mark + kMark.size());
  return std::string(rest.substr(0, rest.find_first_not_of("0123456789.")));
}

/// Makes hipRTC write what its clang calls itself, and fail: words of what succeeds may be kept from the log.
constexpr std::string_view kVersionMark = "fovea: clang ";
constexpr const char* kVersionUnit =
    "#pragma message(\"fovea: clang \" __clang_version__)\n#error nothing to compile\n";

/// "18.0.0git" of such words; empty where it is not there.
std::string clang_version_in(const std::string& log) {
  const std::size_t mark = log.find(kVersionMark);
  if (mark == std::string::npos) return {};
  const std::string_view rest = std::string_view(log).substr(mark + kVersionMark.size());
  return std::string(rest.substr(0, rest.find_first_of(" \n")));
}

}  // namespace

Compiler::Compiler(CompilerSearch search, DeviceText device_text)
    : search_(std::move(search)), device_text_(std::move(device_text)) {}

const std::optional<std::string>& Compiler::file() {
  std::call_once(search_once_, [&] { file_ = find_compiler_file(search_); });
  return file_;
}

const CompilerLibrary& Compiler::library() {
  std::call_once(open_once_,
                 [&] { library_ = std::make_unique<CompilerLibrary>(search_, file()); });
  return *library_;
}

const std::string& Compiler::version() {
  std::call_once(version_once_, [&] {
    const CompilerApi& api = library().api();
    if (search_.kind == CompilerKind::nvrtc) {
      Program program(api, "", {});
      if (program.compile({"--gpu-architecture=compute_80"}) == 0)
        version_ = version_in(program.ptx());
    } else {
      Program program(api, kVersionUnit, {});
      const Architecture oldest{.major = 0, .minor = 0, .gfx = amd_targets().front().gfx};
      program.compile({"--offload-arch=" + oldest.name()});
      version_ = clang_version_in(program.log());
    }
    if (version_.empty()) version_ = fmt::format("{}.{}", library().major(), library().minor());
  });
  return version_;
}

std::vector<Architecture> Compiler::nvidia_architectures() {
  const CompilerApi& api = library().api();
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

std::vector<Architecture> Compiler::architectures() {
  if (search_.kind == CompilerKind::nvrtc) return nvidia_architectures();
  int clang = 0;
  std::from_chars(version().data(), version().data() + version().size(), clang);
  std::vector<Architecture> result;
  for (const AmdTarget& target : amd_targets()) {
    if (target.first_clang <= clang) result.push_back({.major = 0, .minor = 0, .gfx = target.gfx});
  }
  return result;
}

std::string Compiler::why_not(Architecture architecture) {
  if (!library().is_present()) return library().why_absent();
  const std::vector<Architecture> known = architectures();
  if (std::find(known.begin(), known.end(), architecture) != known.end()) return "";
  return fmt::format("{} {} does not know {}; {} may be older than the device", name(), version(),
                     architecture.name(), library().path());
}

Cubin Compiler::compile(const KernelText& text, Architecture architecture) {
  const CompilerApi& api = library().api();
  if (const std::string why = why_not(architecture); !why.empty()) throw Unsupported(why);
  if (is_stopped_)
    throw CompileError(fmt::format("kernel {} is not compiled: the process ends", text.label));
  ++num_compiles_;
  const std::int64_t start_ms = thread_cpu_ms();
  Program program(api, text.unit, device_text_);
  program.end_once(is_stopped_);
  const int result = program.compile(compile_options(architecture));
  const std::string log = program.log();
  if (result != 0) {
    throw CompileError(
        fmt::format("kernel {} for {} does not compile: {}", text.label, architecture.name(),
                    describe_failure(log, api.error_string(result), text, device_text_)));
  }
  Cubin cubin;
  cubin.image = program.image();
  // hipRTC's words tell no registers.
  cubin.report =
      architecture.is_amd() ? report_of(read_code_object(cubin.image)) : parse_report(log);
  cubin.report.log = log;
  cubin.report.compile_ms = static_cast<int>(thread_cpu_ms() - start_ms);
  return cubin;
}

std::vector<std::string> compile_options(Architecture architecture) {
  if (architecture.is_amd()) return {"--offload-arch=" + architecture.name(), "-std=c++20", "-O3"};
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
