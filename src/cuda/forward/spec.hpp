// The spec of whichever kernel a forward plan has chosen, and specs as text.
#pragma once

#include <string>
#include <variant>

#include "cuda/device/shared/forward_spec.h"

namespace fovea::cuda {

/// One of the specs of device/shared/forward_spec.h. What all of them have is read as of a pointer: spec->tile_q.
class AnyForwardSpec {
 public:
  AnyForwardSpec() = default;
  template <typename Spec>
  requires std::is_base_of_v<ForwardSpec, Spec> AnyForwardSpec(const Spec& spec) : spec_(spec) {}

  const ForwardSpec* operator->() const { return &**this; }
  const ForwardSpec& operator*() const {
    return std::visit([](const auto& spec) -> const ForwardSpec& { return spec; }, spec_);
  }
  ForwardSpec* operator->() {
    return std::visit([](auto& spec) -> ForwardSpec* { return &spec; }, spec_);
  }

  /// Of the kernel that was chosen.
  template <typename Spec>
  const Spec& as() const {
    return std::get<Spec>(spec_);
  }
  /// Null where another kernel was chosen.
  template <typename Spec>
  const Spec* get_if() const {
    return std::get_if<Spec>(&spec_);
  }
  template <typename Spec>
  Spec* get_if() {
    return std::get_if<Spec>(&spec_);
  }

  bool operator==(const AnyForwardSpec&) const = default;

  /// The definition of a constant of this name, for a generated unit.
  std::string print(std::string_view name = "spec") const;
  /// "bf16 d128 tile 128x64": for labels and explain.
  std::string describe() const;

 private:
  std::variant<TeamSpec, PlainSpec, Sm90DecodeSpec, Sm90LatentSpec, Sm90ForwardSpec> spec_;
};

}  // namespace fovea::cuda
