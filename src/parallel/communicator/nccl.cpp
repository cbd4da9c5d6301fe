#include "parallel/communicator/nccl.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>

#include "fovea/error.hpp"

#include "core/env.hpp"
#include "cuda/jit/places.hpp"

namespace fovea::parallel {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWheelFolder = "nvidia/nccl/lib";  // of nvidia-nccl-cu12 and -cu13

void* open(const std::string& library) { return dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL); }

/// By its soname first, which finds what the process has already: a caller's ncclComm_t belongs to that copy.
void* find_and_open() {
  if (void* const handle = open(std::string(Nccl::kLibrary))) return handle;
  for (const fs::path& site : cuda::jit::python_sites()) {
    if (void* const handle = open(site / kWheelFolder / Nccl::kLibrary)) return handle;
  }
  return nullptr;
}

void* open_named(const std::string& named) {
  std::error_code error;
  const bool is_folder = fs::is_directory(named, error);
  return open(is_folder ? (fs::path(named) / Nccl::kLibrary).string() : named);
}

/// Finds each function by its name; the first that is missing, or nothing.
const char* fill(NcclApi& api, void* library) {
#define FOVEA_NCCL_FIND(member, symbol, arguments)                             \
  api.member = reinterpret_cast<decltype(api.member)>(dlsym(library, symbol)); \
  if (api.member == nullptr) return symbol;
  FOVEA_NCCL_FUNCTIONS(FOVEA_NCCL_FIND)
#undef FOVEA_NCCL_FIND
  constexpr const char* kWords = "ncclGetErrorString";
  api.error_string = reinterpret_cast<decltype(api.error_string)>(dlsym(library, kWords));
  return api.error_string == nullptr ? kWords : nullptr;
}

}  // namespace

Nccl::Nccl(const std::optional<std::string>& named) : why_absent_(start(named)) {}

std::string Nccl::start(const std::optional<std::string>& named) {
  void* const handle = named ? open_named(*named) : find_and_open();
  if (handle == nullptr && named) {
    return fmt::format("no NCCL: FOVEA_NCCL is '{}'; expected {} or the folder that holds it",
                       *named, kLibrary);
  }
  if (handle == nullptr) {
    return fmt::format(
        "no NCCL: {} is neither where the dynamic loader looks nor among the running Python's "
        "packages; install the wheel nvidia-nccl-cu13 (or -cu12), or name it by FOVEA_NCCL",
        kLibrary);
  }
  if (const char* const missing = fill(api_, handle); missing != nullptr) {
    return fmt::format("{} lacks {}; expected NCCL 2.7 or newer",
                       named ? *named : std::string(kLibrary), missing);
  }
  return {};
}

const NcclApi& Nccl::api() const {
  if (!is_present()) throw Unsupported(why_absent_);
  return api_;
}

std::string Nccl::words(int result) const {
  const char* const text = api_.error_string(result);
  return fmt::format("{} ({})", text == nullptr ? "no words for it" : text, result);
}

const Nccl& process_nccl() {
  // Never destroyed: NCCL's threads outlive everything of ours.
  static const Nccl* const nccl = new Nccl(read_environment().nccl);
  return *nccl;
}

}  // namespace fovea::parallel
