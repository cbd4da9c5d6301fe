// Specs of kernels as C++, printed into generated units: every member by its name, from one list of each spec. A member
// that is in no list does not compile.
//
//   template <>
//   struct SpecText<TeamSpec> {
//     static constexpr std::string_view kName = "TeamSpec";
//     using Base = ForwardSpec;  // void: none
//     static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(TeamSpec, keeps_queries), ...};
//   };
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda/device/shared/element.h"
#include "cuda/device/shared/instructions.h"
#include "cuda/device/shared/rounding.h"

namespace fovea::cuda {

template <typename Spec, typename Value>
struct SpecMember {
  std::string_view name;
  Value Spec::*value;
};
template <typename Spec, typename Value>  // Clang before 17 deduces no aggregates
SpecMember(const char*, Value Spec::*)->SpecMember<Spec, Value>;
#define FOVEA_SPEC_MEMBER(spec, member) \
  ::fovea::cuda::SpecMember { #member, &spec::member }

/// What a spec is called, the spec that it adds to, and the members that it adds.
template <typename Spec>
struct SpecText;

namespace spec_text {

struct Anything {
  template <typename T>
  constexpr operator T() const;
};

template <typename Spec, std::size_t... i>
consteval bool is_made_of(std::index_sequence<i...>) {
  return requires { Spec{(static_cast<void>(i), Anything{})...}; };
}

/// Members of an aggregate, its base one of them.
template <typename Spec, std::size_t n = 1>
consteval std::size_t num_fields() {
  if constexpr (is_made_of<Spec>(std::make_index_sequence<n>()))
    return num_fields<Spec, n + 1>();
  else
    return n - 1;
}

template <typename Spec>
consteval bool lists_all_members() {
  using Text = SpecText<Spec>;
  constexpr std::size_t kBases = std::is_void_v<typename Text::Base> ? 0 : 1;
  return std::tuple_size_v<decltype(Text::kMembers)> + kBases == num_fields<Spec>();
}

std::string print_value(Element value);
std::string print_value(Codes value);
std::string print_value(Instructions value);
std::string print_value(Rounding value);
std::string print_value(KeyMean value);
std::string print_value(std::int32_t value);
std::string print_value(bool value);

template <typename Spec>
std::string print_members(const Spec& spec) {
  using Text = SpecText<Spec>;
  static_assert(lists_all_members<Spec>(), "SpecText<Spec>::kMembers names every member once");
  std::string text;
  if constexpr (!std::is_void_v<typename Text::Base>)
    text += print_members<typename Text::Base>(spec);
  std::apply(
      [&](const auto&... member) {
        ((text +=
          "  s." + std::string(member.name) + " = " + print_value(spec.*member.value) + ";\n"),
         ...);
      },
      Text::kMembers);
  return text;
}

}  // namespace spec_text

/// "bf16".
std::string_view name(Element element);
/// "int8".
std::string_view name(Codes codes);

/// "inline constexpr TeamSpec NAME = [] { ... }();"
template <typename Spec>
std::string print_spec(const Spec& spec, std::string_view name = "spec") {
  const std::string type(SpecText<Spec>::kName);
  return "inline constexpr " + type + " " + std::string(name) + " = [] {\n  " + type + " s;\n" +
         spec_text::print_members(spec) + "  return s;\n}();\n";
}

}  // namespace fovea::cuda
