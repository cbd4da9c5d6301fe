// The spec of whichever kernel a forward plan has chosen, and specs as text.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>

#include "core/check.hpp"
#include "cuda/device/shared/forward_spec.h"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<ForwardSpec> {
  static constexpr std::string_view kName = "ForwardSpec";
  using Base = void;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(ForwardSpec, element),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, out_element),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, head_dim_qk),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, head_dim_v),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, tile_q),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, tile_kv),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, num_warps),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, stages),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, ctas_per_sm),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, heads_per_tile),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, is_varlen),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, has_packed_q),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, is_paged),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, is_split),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, has_padded_head_dim),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, is_prescaled),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, has_dropout),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, reads_dropout_seed),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, has_dropout_places),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, wants_row_max),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, most_splits)};
};

/// The spec of any kernel, one that adds to ForwardSpec and has a SpecText: a new one is named nowhere else. What all
/// of them have is read as of a pointer: spec->tile_q.
class AnyForwardSpec {
 public:
  AnyForwardSpec() : AnyForwardSpec(ForwardSpec{}) {}
  template <typename Spec>
  requires std::is_base_of_v<ForwardSpec, Spec> AnyForwardSpec(const Spec& spec)
      : held_(std::make_unique<Held<Spec>>(spec)) {}
  AnyForwardSpec(const AnyForwardSpec& other) : held_(other.held_->clone()) {}
  AnyForwardSpec& operator=(const AnyForwardSpec& other) {
    held_ = other.held_->clone();
    return *this;
  }

  const ForwardSpec* operator->() const { return &held_->common(); }
  const ForwardSpec& operator*() const { return held_->common(); }
  ForwardSpec* operator->() { return &held_->common(); }

  /// Null where another kernel was chosen.
  template <typename Spec>
  const Spec* get_if() const {
    return held_->kind() == typeid(Spec) ? &static_cast<const Spec&>(held_->common()) : nullptr;
  }
  template <typename Spec>
  Spec* get_if() {
    return held_->kind() == typeid(Spec) ? &static_cast<Spec&>(held_->common()) : nullptr;
  }
  /// Of the kernel that was chosen.
  template <typename Spec>
  const Spec& as() const {
    const Spec* const spec = get_if<Spec>();
    FOVEA_ASSERT(spec != nullptr);
    return *spec;
  }

  bool operator==(const AnyForwardSpec& other) const { return held_->equals(*other.held_); }

  /// The definition of a constant of this name, for a generated unit.
  std::string print(std::string_view name = "spec") const { return held_->print(name); }
  /// "bf16 d128 tile 128x64": for labels and explain.
  std::string describe() const;

 private:
  struct HeldSpec {
    virtual ~HeldSpec() = default;
    virtual std::unique_ptr<HeldSpec> clone() const = 0;
    virtual const std::type_info& kind() const = 0;
    virtual const ForwardSpec& common() const = 0;
    virtual ForwardSpec& common() = 0;
    virtual bool equals(const HeldSpec& other) const = 0;
    virtual std::string print(std::string_view name) const = 0;
  };

  template <typename Spec>
  struct Held final : HeldSpec {
    explicit Held(const Spec& of_kernel) : spec(of_kernel) {}
    std::unique_ptr<HeldSpec> clone() const override { return std::make_unique<Held>(spec); }
    const std::type_info& kind() const override { return typeid(Spec); }
    const ForwardSpec& common() const override { return spec; }
    ForwardSpec& common() override { return spec; }
    bool equals(const HeldSpec& other) const override {
      return other.kind() == kind() && static_cast<const Held&>(other).spec == spec;
    }
    std::string print(std::string_view name) const override { return print_spec(spec, name); }
    Spec spec;
  };

  std::unique_ptr<HeldSpec> held_;
};

}  // namespace fovea::cuda
