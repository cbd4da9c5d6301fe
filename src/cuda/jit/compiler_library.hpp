// A compiler as a library, opened at run time: NVRTC for GPUs of NVIDIA, hipRTC for those of AMD. Where it is searched,
// and its functions, which both have by names of their own. Read compiler.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "cuda/jit/architecture.hpp"

namespace fovea::cuda::jit {

enum class CompilerKind : std::uint8_t { nvrtc, hiprtc };

/// Which of them compiles for an architecture.
inline CompilerKind kind_of(Architecture architecture) {
  return architecture.is_amd() ? CompilerKind::hiprtc : CompilerKind::nvrtc;
}

/// One row for each function: member, its symbol in NVRTC, in hipRTC ("": there is none, and the member is null),
/// result, arguments. An int result is 0 for success.
// clang-format off
#define FOVEA_COMPILER_FUNCTIONS(X)                                                               \
  X(version, "nvrtcVersion", "hiprtcVersion", int, (int* major, int* minor))                      \
  X(error_string, "nvrtcGetErrorString", "hiprtcGetErrorString", const char*, (int result))       \
  X(num_architectures, "nvrtcGetNumSupportedArchs", "", int, (int* count))                        \
  X(architectures, "nvrtcGetSupportedArchs", "", int, (int* numbers))                             \
  X(create_program, "nvrtcCreateProgram", "hiprtcCreateProgram", int,                             \
    (Program* program, const char* text, const char* name, int num_headers,                       \
     const char* const* headers, const char* const* include_names))                               \
  X(destroy_program, "nvrtcDestroyProgram", "hiprtcDestroyProgram", int, (Program* program))      \
  X(compile_program, "nvrtcCompileProgram", "hiprtcCompileProgram", int,                          \
    (Program program, int num_options, const char* const* options))                               \
  X(ptx_size, "nvrtcGetPTXSize", "", int, (Program program, std::size_t* bytes))                  \
  X(ptx, "nvrtcGetPTX", "", int, (Program program, char* text))                                   \
  X(image_size, "nvrtcGetCUBINSize", "hiprtcGetCodeSize", int,                                    \
    (Program program, std::size_t* bytes))                                                        \
  X(image, "nvrtcGetCUBIN", "hiprtcGetCode", int, (Program program, char* image))                 \
  X(log_size, "nvrtcGetProgramLogSize", "hiprtcGetProgramLogSize", int,                           \
    (Program program, std::size_t* bytes))                                                        \
  X(log, "nvrtcGetProgramLog", "hiprtcGetProgramLog", int, (Program program, char* text))
// clang-format on

struct CompilerApi {
  using Program = struct CompilerProgramTag*;
#define FOVEA_COMPILER_MEMBER(member, nvrtc, hiprtc, result, arguments) \
  result(*member) arguments = nullptr;
  FOVEA_COMPILER_FUNCTIONS(FOVEA_COMPILER_MEMBER)
#undef FOVEA_COMPILER_MEMBER
  /// Has `callback` asked, with `payload` and null, at points of a compilation, which ends early once it returns 1.
  /// Null where the compiler has no such function: hipRTC, and older NVRTCs.
  int (*set_flow_callback)(Program program, int (*callback)(void*, void*), void* payload) = nullptr;
};

/// Where a compiler may be, best first.
struct CompilerSearch {
  CompilerKind kind = CompilerKind::nvrtc;
  // FOVEA_NVRTC or FOVEA_HIPRTC: a library, or a folder that holds one; no other is tried
  std::optional<std::string> named;
  bool wants_loader = true;          // what the dynamic loader finds, or the process already has
  std::vector<std::string> folders;  // toolkits, PyPI wheels
  // Of CUDA: a driver loads cubins of its own major version and older ones.
  int max_major = std::numeric_limits<int>::max();
};

/// The variable that names it, the loader, the toolkit's usual places (CUDA_HOME, ROCM_PATH), and for NVRTC the wheels
/// nvidia-cuda-nvrtc of the running Python, of VIRTUAL_ENV and of scripts/dev setup.
CompilerSearch default_search(CompilerKind kind);

/// "NVRTC", "hipRTC".
const char* name_of(CompilerKind kind);

/// The file that would be opened, without opening it; empty where only the loader may know one.
std::optional<std::string> find_compiler_file(const CompilerSearch& search);

class CompilerLibrary {
 public:
  explicit CompilerLibrary(const CompilerSearch& search)
      : CompilerLibrary(search, find_compiler_file(search)) {}
  /// With the file that find_compiler_file has found.
  CompilerLibrary(const CompilerSearch& search, const std::optional<std::string>& file);
  CompilerLibrary(const CompilerLibrary&) = delete;
  CompilerLibrary& operator=(const CompilerLibrary&) = delete;

  bool is_present() const { return why_absent_.empty(); }
  /// One line: where it was searched, or why what was found does not serve.
  const std::string& why_absent() const { return why_absent_; }
  /// Throws Unsupported with why_absent().
  const CompilerApi& api() const;
  const std::string& path() const { return path_; }
  /// Of NVRTC; hipRTC says 9.0, whatever it is.
  int major() const { return major_; }
  int minor() const { return minor_; }

 private:
  std::string start(const CompilerSearch& search, const std::optional<std::string>& file);

  CompilerApi api_{};
  std::string why_absent_;
  std::string path_;
  int major_ = 0, minor_ = 0;
};

}  // namespace fovea::cuda::jit
