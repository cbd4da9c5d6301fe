// NVRTC, the compiler as a library, opened at run time: where it is searched, and its functions. Read
// compiler.hpp next.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace fovea::cuda::jit {

/// One row for each function: member, exported symbol, result, arguments. An int result is 0 for success.
// clang-format off
#define FOVEA_NVRTC_FUNCTIONS(X)                                                                  \
  X(version, "nvrtcVersion", int, (int* major, int* minor))                                       \
  X(error_string, "nvrtcGetErrorString", const char*, (int result))                               \
  X(num_architectures, "nvrtcGetNumSupportedArchs", int, (int* count))                            \
  X(architectures, "nvrtcGetSupportedArchs", int, (int* numbers))                                 \
  X(create_program, "nvrtcCreateProgram", int,                                                    \
    (Program* program, const char* text, const char* name, int num_headers,                       \
     const char* const* headers, const char* const* include_names))                               \
  X(destroy_program, "nvrtcDestroyProgram", int, (Program* program))                              \
  X(compile_program, "nvrtcCompileProgram", int,                                                  \
    (Program program, int num_options, const char* const* options))                               \
  X(ptx_size, "nvrtcGetPTXSize", int, (Program program, std::size_t* bytes))                      \
  X(ptx, "nvrtcGetPTX", int, (Program program, char* text))                                       \
  X(cubin_size, "nvrtcGetCUBINSize", int, (Program program, std::size_t* bytes))                  \
  X(cubin, "nvrtcGetCUBIN", int, (Program program, char* image))                                  \
  X(log_size, "nvrtcGetProgramLogSize", int, (Program program, std::size_t* bytes))               \
  X(log, "nvrtcGetProgramLog", int, (Program program, char* text))
// clang-format on

struct NvrtcApi {
  using Program = struct NvrtcProgramTag*;
#define FOVEA_NVRTC_MEMBER(member, symbol, result, arguments) result(*member) arguments = nullptr;
  FOVEA_NVRTC_FUNCTIONS(FOVEA_NVRTC_MEMBER)
#undef FOVEA_NVRTC_MEMBER
};

/// Where NVRTC may be, best first.
struct NvrtcSearch {
  // FOVEA_NVRTC: a library, or a folder that holds one; no other is tried
  std::optional<std::string> named;
  bool wants_loader = true;          // what the dynamic loader finds, or the process already has
  std::vector<std::string> folders;  // toolkits, PyPI wheels
  // Of CUDA: a driver loads cubins of its own major version and older ones.
  int max_major = std::numeric_limits<int>::max();
};

/// FOVEA_NVRTC, the loader, the toolkit's usual places, the wheels nvidia-cuda-nvrtc of the running
/// Python, of VIRTUAL_ENV and of scripts/dev setup.
NvrtcSearch default_nvrtc_search();

/// The file that would be opened, without opening it; empty where only the loader may know one.
std::optional<std::string> find_nvrtc_file(const NvrtcSearch& search);

class Nvrtc {
 public:
  explicit Nvrtc(const NvrtcSearch& search) : Nvrtc(search, find_nvrtc_file(search)) {}
  /// With the file that find_nvrtc_file has found.
  Nvrtc(const NvrtcSearch& search, const std::optional<std::string>& file);
  Nvrtc(const Nvrtc&) = delete;
  Nvrtc& operator=(const Nvrtc&) = delete;

  bool is_present() const { return why_absent_.empty(); }
  /// One line: where it was searched, or why what was found does not serve.
  const std::string& why_absent() const { return why_absent_; }
  /// Throws Unsupported with why_absent().
  const NvrtcApi& api() const;
  const std::string& path() const { return path_; }
  int major() const { return major_; }
  int minor() const { return minor_; }

 private:
  std::string start(const NvrtcSearch& search, const std::optional<std::string>& file);

  NvrtcApi api_{};
  std::string why_absent_;
  std::string path_;
  int major_ = 0, minor_ = 0;
};

}  // namespace fovea::cuda::jit
