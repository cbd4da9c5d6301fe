// NVRTC, the compiler as a library, opened at run time: where it is searched, and its functions. Read
// compiler.hpp next.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace fovea::cuda::jit {

/// The functions of NVRTC that we call. All return 0 for success.
struct NvrtcApi {
  using Program = struct NvrtcProgramTag*;
  int (*version)(int* major, int* minor) = nullptr;
  const char* (*error_string)(int result) = nullptr;
  int (*num_supported_architectures)(int* count) = nullptr;
  int (*supported_architectures)(int* numbers) = nullptr;
  int (*create_program)(Program* program, const char* text, const char* name, int num_headers,
                        const char* const* headers, const char* const* include_names) = nullptr;
  int (*destroy_program)(Program* program) = nullptr;
  int (*compile_program)(Program program, int num_options, const char* const* options) = nullptr;
  int (*ptx_size)(Program program, std::size_t* bytes) = nullptr;
  int (*ptx)(Program program, char* text) = nullptr;
  int (*cubin_size)(Program program, std::size_t* bytes) = nullptr;
  int (*cubin)(Program program, char* image) = nullptr;
  int (*log_size)(Program program, std::size_t* bytes) = nullptr;
  int (*log)(Program program, char* text) = nullptr;
};

/// Where NVRTC may be, best first.
struct NvrtcSearch {
  std::optional<std::string>
      named;  // FOVEA_NVRTC: a library, or a folder that holds one; no other is tried
  bool wants_loader = true;          // what the dynamic loader finds, or the process already has
  std::vector<std::string> folders;  // toolkits, PyPI wheels
};

/// FOVEA_NVRTC, the loader, the toolkit's usual places, the wheels nvidia-cuda-nvrtc of the running
/// Python, of VIRTUAL_ENV and of scripts/dev setup.
NvrtcSearch default_nvrtc_search();

/// The file that would be opened, without opening it; empty where only the loader may know one.
std::optional<std::string> find_nvrtc_file(const NvrtcSearch& search);

class Nvrtc {
 public:
  explicit Nvrtc(const NvrtcSearch& search);
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
  std::string start(const NvrtcSearch& search);

  NvrtcApi api_{};
  std::string why_absent_;
  std::string path_;
  int major_ = 0, minor_ = 0;
};

}  // namespace fovea::cuda::jit
