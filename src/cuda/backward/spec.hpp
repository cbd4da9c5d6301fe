// The specs of whichever kernels a backward plan has chosen, and specs as text.
#pragma once

#include <string>
#include <type_traits>
#include <variant>

#include "cuda/device/shared/backward_spec.h"
#include "cuda/device/shared/backward_spec_sm100.h"
#include "cuda/device/shared/backward_spec_sm90.h"
#include "cuda/device/shared/backward_spec_sm90_wide.h"
#include "cuda/device/shared/captured_params.h"

namespace fovea::cuda {

/// One of the specs of device/shared/backward_spec.h and of backward_spec_sm90.h, backward_spec_sm90_wide.h and
/// backward_spec_sm100.h beside it. What all of them have is read as of a pointer: spec->num_warps.
class AnyBackwardSpec {
 public:
  AnyBackwardSpec() = default;
  template <typename Spec>
  requires std::is_base_of_v<BackwardSpec, Spec> AnyBackwardSpec(const Spec& spec) : spec_(spec) {}

  const BackwardSpec* operator->() const { return &**this; }
  const BackwardSpec& operator*() const {
    return std::visit([](const auto& spec) -> const BackwardSpec& { return spec; }, spec_);
  }

  /// Of the kernel that was chosen.
  template <typename Spec>
  const Spec& as() const {
    return std::get<Spec>(spec_);
  }

  /// Of a kernel that owns rows; null where another was chosen.
  const OwnerSpec* owner() const;

  /// Of Hopper's kernel or of Blackwell's, whose CTAs own keys; null where another was chosen.
  const Sm90BackwardSpec* key_walk() const;

  /// Of a walk that sums dq too, in memory; and in the order of keys.
  bool adds_queries() const;
  bool takes_turns() const;
  /// Of a walk that leaves dS, for the gradient of a dense bias.
  bool stores_pairs() const;

  bool operator==(const AnyBackwardSpec&) const = default;

  /// The definition of a constant of this name, for a generated unit.
  std::string print(std::string_view name = "spec") const;
  /// "bf16 d128 keys 128x64": for labels and explain.
  std::string describe() const;

 private:
  std::variant<Sm80BackwardSpec, PlainBackwardSpec, Sm90BackwardSpec, Sm90WideBackwardSpec,
               Sm100BackwardSpec>
      spec_;
};

/// As AnyBackwardSpec::print.
std::string print_delta_spec(const DeltaSpec& spec);
std::string print_captured_spec(const CapturedSpec& spec, std::string_view name = "spec");

/// "bf16 d128 tile 64x64": for labels.
std::string describe(const CapturedSpec& spec);

}  // namespace fovea::cuda
