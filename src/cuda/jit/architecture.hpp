// The architectures that cubins are made for.
#pragma once

#include <compare>
#include <string>
#include <string_view>

namespace fovea::cuda::jit {

/// A device's compute capability.
struct Architecture {
  int major = 0, minor = 0;

  /// "sm_86", "sm_90a": from 9.0 on with the features of that very device, which wgmma and tcgen05
  /// need; such a cubin runs on no other.
  std::string name() const;
  auto operator<=>(const Architecture&) const = default;
};

/// Turing: the first whose tensor cores multiply as kernels of mma.sync do, f16 alone.
inline constexpr Architecture kOldestArchitecture{7, 5};

/// "sm_90a", "sm_90", "90a" and "90" are all 9.0. Throws InvalidArgument, naming `where`.
Architecture parse_architecture(std::string_view text, const std::string& where);

}  // namespace fovea::cuda::jit
