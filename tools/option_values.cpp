#include "option_values.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "fovea/error.hpp"

#include "failure.hpp"

namespace fovea::tools {
namespace {

constexpr std::int64_t kMaxThreads = 4096;

[[noreturn]] void refuse(std::string_view option, std::string_view text,
                         std::string_view expected) {
  bad_input(fmt::format("{}: got '{}'; expected {}", option, text, expected));
}

template <typename T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

bool is_identifier(std::string_view text) {
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  const auto is_part = [&](char c) { return is_letter(c) || (c >= '0' && c <= '9'); };
  return !text.empty() && is_letter(text.front()) && std::all_of(text.begin(), text.end(), is_part);
}

}  // namespace

std::int64_t parse_integer(std::string_view option, std::string_view text,
                           const IntegerRange& range) {
  const std::optional<std::int64_t> value = parse_number<std::int64_t>(text);
  if (value && *value >= range.least && *value <= range.most) return *value;
  if (range.most == std::numeric_limits<std::int64_t>::max()) {
    refuse(option, text, fmt::format("an integer >= {}", range.least));
  }
  refuse(option, text, fmt::format("an integer from {} to {}", range.least, range.most));
}

std::uint64_t parse_counter(std::string_view option, std::string_view text) {
  const std::optional<std::uint64_t> value = parse_number<std::uint64_t>(text);
  if (!value) refuse(option, text, "an integer from 0 to 18446744073709551615");
  return *value;
}

float parse_real(std::string_view option, std::string_view text) {
  const std::optional<float> value = parse_number<float>(text);
  if (!value || !std::isfinite(*value)) refuse(option, text, "a finite number");
  return *value;
}

float parse_accuracy(std::string_view option, std::string_view text) {
  const std::optional<float> value = parse_number<float>(text);
  if (!value || !std::isfinite(*value) || *value <= 0)
    refuse(option, text, "a relative error above 0, as in 0.02");
  return *value;
}

Quantization parse_recipe(std::string_view option, std::string_view text) {
  try {
    return parse_quantization(text);
  } catch (const InvalidArgument& error) {
    bad_input(fmt::format("{}: {}", option, error.what()));
  }
}

Window parse_window(std::string_view option, std::string_view text) {
  constexpr std::string_view kExpected =
      "LEFT,RIGHT, each a count >= 0 or - for an unbounded side (as in 1024,0 or -,0)";
  const std::vector<std::string_view> sides = split(text, ',');
  if (sides.size() != 2) refuse(option, text, kExpected);
  const auto side = [&](std::string_view part) -> std::optional<std::int64_t> {
    if (part == "-") return std::nullopt;
    const std::optional<std::int64_t> value = parse_number<std::int64_t>(part);
    if (!value || *value < 0) refuse(option, text, kExpected);
    return value;
  };
  return {.left = side(sides[0]), .right = side(sides[1])};
}

Align parse_align(std::string_view option, std::string_view text) {
  if (text == "bottom_right") return Align::bottom_right;
  if (text == "top_left") return Align::top_left;
  refuse(option, text, "bottom_right or top_left");
}

Dtype parse_float_dtype(std::string_view option, std::string_view text) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    if (text == fovea::name(dtype)) return dtype;
  }
  refuse(option, text, "f32, f16 or bf16");
}

std::string_view name(ComputeDtype compute_dtype) {
  switch (compute_dtype) {
    case ComputeDtype::automatic:
      return "auto";
    case ComputeDtype::f32:
      return "f32";
    case ComputeDtype::bf16:
      return "bf16";
  }
  return "";
}

ComputeDtype parse_compute_dtype(std::string_view option, std::string_view text) {
  for (const ComputeDtype dtype :
       {ComputeDtype::automatic, ComputeDtype::f32, ComputeDtype::bf16}) {
    if (text == name(dtype)) return dtype;
  }
  refuse(option, text, "auto, f32 or bf16");
}

CpuTarget parse_target(std::string_view option, std::string_view text) {
  if (text == "auto") return CpuTarget::automatic;
  const std::optional<CpuTarget> target = parse_cpu_target(text);
  if (!target)
    refuse(option, text,
           "auto, scalar, avx2, avx512, avx512_bf16, amx_bf16, neon, avx512_vnni or avx_vnni");
  return *target;
}

Device parse_device(std::string_view option, std::string_view text) {
  if (text == "cpu") return Device::cpu();
  constexpr std::string_view kExpected = "cpu, cuda or rocm, or cuda:N with the number of a GPU";
  constexpr std::size_t kKindLength = 4;  // of either
  const std::string_view kind = text.substr(0, kKindLength);
  if (kind != "cuda" && kind != "rocm") refuse(option, text, kExpected);
  Device device = kind == "cuda" ? Device::cuda(0) : Device::rocm(0);
  const std::string_view rest = text.substr(kKindLength);
  if (rest.empty()) return device;
  const std::optional<int> index =
      rest.front() == ':' ? parse_number<int>(rest.substr(1)) : std::nullopt;
  if (!index || *index < 0) refuse(option, text, kExpected);
  device.index = *index;
  return device;
}

int parse_thread_count(std::string_view option, std::string_view text) {
  return static_cast<int>(parse_integer(option, text, {.least = 0, .most = kMaxThreads}));
}

std::vector<int> parse_thread_counts(std::string_view option, std::string_view text) {
  std::vector<int> counts;
  for (const std::string_view part : split(text, ','))
    counts.push_back(parse_thread_count(option, part));
  return counts;
}

std::pair<std::string, std::string> parse_assignment(std::string_view option,
                                                     std::string_view text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals + 1 == text.size())
    refuse(option, text, "NAME=VALUE");
  const std::string_view key = text.substr(0, equals);
  if (!is_identifier(key)) {
    refuse(option, text, "NAME=VALUE with a name of letters, digits and underscores");
  }
  return {std::string(key), std::string(text.substr(equals + 1))};
}

CapturedScalar parse_scalar(std::string_view option, std::string_view text) {
  auto [key, value] = parse_assignment(option, text);
  const std::optional<std::int64_t> integer = parse_number<std::int64_t>(value);
  if (integer) {
    if (*integer != static_cast<std::int32_t>(*integer)) {
      refuse(option, text, "an int of 32 bits, or a float such as 3.0");
    }
    return CapturedScalar::of(std::move(key), *integer);
  }
  const std::optional<double> real = parse_number<double>(value);
  if (!real) refuse(option, text, "NAME=NUMBER; 3 is an int, 3.0 a float");
  return CapturedScalar::of(std::move(key), *real);
}

}  // namespace fovea::tools
