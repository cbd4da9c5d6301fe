// The architectures that kernels are compiled for.
#pragma once

#include <compare>
#include <span>
#include <string>
#include <string_view>

namespace fovea::cuda::jit {

/// A device's compute capability, or the instruction set of one of AMD's.
struct Architecture {
  int major = 0, minor = 0;
  int gfx = 0;  // 0x942 of gfx942; 0: it is NVIDIA's

  bool is_amd() const { return gfx != 0; }
  /// Did kernels that such a GPU runs ever run on hardware? Those of 8.x did on a GPU of 9.0.
  bool is_measured() const { return !is_amd() && (major == 8 || major == 9); }
  /// "sm_86", "sm_90a": from 9.0 on with the features of that very device, which wgmma and tcgen05
  /// need; such a cubin runs on no other. Of AMD "gfx942".
  std::string name() const;
  auto operator<=>(const Architecture&) const = default;
};

/// Turing: the first whose tensor cores multiply as kernels of mma.sync do, f16 alone.
inline constexpr Architecture kOldestArchitecture{.major = 7, .minor = 5};

/// "sm_90a", "sm_90", "90a", "90" are 9.0; "gfx942" is one of amd_targets(). Throws InvalidArgument, naming `where`.
Architecture parse_architecture(std::string_view text, const std::string& where);

/// An instruction set of AMD's, and the first compiler that knows it: older ones end the process when they are asked
/// for it.
struct AmdTarget {
  int gfx = 0;
  int first_clang = 0;  // major version of the clang in hipRTC
};

/// Those that kernels are compiled for.
std::span<const AmdTarget> amd_targets();

/// "gfx90a, gfx942 or gfx950".
std::string amd_target_names();

}  // namespace fovea::cuda::jit
