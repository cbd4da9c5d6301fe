#include "quant/fields.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>

namespace fovea::quant {
namespace {

/// The words of an enumeration, in its order.
template <typename Enum>
struct Words;
template <>
struct Words<QuantFormat> {
  static constexpr std::array<std::string_view, 5> kNames{"none", "int8", "e4m3", "f16", "e2m1"};
};
template <>
struct Words<ScaleGranularity> {
  static constexpr std::array<std::string_view, 9> kNames{"tensor",       "block",    "warp",
                                                          "thread",       "token",    "channel",
                                                          "tile_channel", "group_16", "group_32"};
};
template <>
struct Words<Smoothing> {
  static constexpr std::array<std::string_view, 4> kNames{"none", "sample", "sequence", "block"};
};
template <>
struct Words<ScaleSource> {
  static constexpr std::array<std::string_view, 2> kNames{"measured", "given"};
};
template <>
struct Words<ProbabilityCodes> {
  static constexpr std::array<std::string_view, 2> kNames{"exp2", "linear"};
};
template <>
struct Words<RowSums> {
  static constexpr std::array<std::string_view, 2> kNames{"exact", "codes"};
};
template <>
struct Words<Accumulation> {
  static constexpr std::array<std::string_view, 2> kNames{"one_level", "two_level"};
};
template <>
struct Words<bool> {
  static constexpr std::array<std::string_view, 2> kNames{"no", "yes"};
};

template <typename Enum>
std::string_view word(Enum value) {
  return Words<Enum>::kNames[static_cast<std::size_t>(value)];
}

template <typename Enum>
bool parse_value(std::string_view text, Enum& value) {
  const auto& names = Words<Enum>::kNames;
  const auto found = std::ranges::find(names, text);
  if (found == names.end()) return false;
  value = static_cast<Enum>(found - names.begin());
  return true;
}
template <typename Number>
bool parse_number(std::string_view text, Number& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}
bool parse_value(std::string_view text, int& value) { return parse_number(text, value); }
bool parse_value(std::string_view text, float& value) { return parse_number(text, value); }

template <typename Enum>
std::string print_value(Enum value) {
  return std::string(word(value));
}
std::string print_value(int value) { return fmt::format("{}", value); }
std::string print_value(float value) { return fmt::format("{}", value); }

template <typename Enum>
std::string expected_values(Enum /*of*/) {
  return fmt::format("{}", fmt::join(Words<Enum>::kNames, ", "));
}
std::string expected_values(int /*of*/) { return "a whole number"; }
std::string expected_values(float /*of*/) { return "a number"; }

template <auto kMember>
constexpr Field field(std::string_view name) {
  return {
      name, [](const Quantization& quant) { return print_value(quant.*kMember); },
      [](std::string_view text, Quantization& quant) { return parse_value(text, quant.*kMember); },
      [] { return expected_values(Quantization{}.*kMember); }};
}

constexpr Field kFields[] = {
    field<&Quantization::qk>("qk"),
    field<&Quantization::pv>("pv"),
    field<&Quantization::q_scales>("q_scales"),
    field<&Quantization::k_scales>("k_scales"),
    field<&Quantization::v_scales>("v_scales"),
    field<&Quantization::scales>("scales"),
    field<&Quantization::smooth_q>("smooth_q"),
    field<&Quantization::smooth_k>("smooth_k"),
    field<&Quantization::smooth_v>("smooth_v"),
    field<&Quantization::hadamard>("hadamard"),
    field<&Quantization::p_codes>("p_codes"),
    field<&Quantization::row_sums>("row_sums"),
    field<&Quantization::accumulation>("accumulation"),
    field<&Quantization::block_q>("block_q"),
    field<&Quantization::warp_q>("warp_q"),
    field<&Quantization::block_kv>("block_kv"),
    field<&Quantization::p_max>("p_max"),
    field<&Quantization::v_max>("v_max"),
    field<&Quantization::p_step>("p_step"),
    field<&Quantization::accuracy>("accuracy"),
};

}  // namespace

std::span<const Field> fields() { return kFields; }

std::string_view name(QuantFormat format) { return word(format); }
std::string_view name(ScaleGranularity granularity) { return word(granularity); }
std::string_view name(Smoothing smoothing) { return word(smoothing); }
std::string_view name(Accumulation accumulation) { return word(accumulation); }

}  // namespace fovea::quant
