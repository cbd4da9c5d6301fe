// The values of options, from text. Each function throws Failure(kBadInput): "--window: got 'x'; expected ...".
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/expr.hpp"
#include "fovea/mask.hpp"
#include "fovea/problem.hpp"

namespace fovea::tools {

struct IntegerRange {
  std::int64_t least = 0;
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
};
std::int64_t parse_integer(std::string_view option, std::string_view text,
                           const IntegerRange& range);

/// 0 to 2^64 - 1.
std::uint64_t parse_counter(std::string_view option, std::string_view text);

/// A finite number.
float parse_real(std::string_view option, std::string_view text);
/// A relative error that results may have: above 0.
float parse_accuracy(std::string_view option, std::string_view text);
/// A recipe of eight-bit attention.
Quantization parse_recipe(std::string_view option, std::string_view text);

struct Window {
  std::optional<std::int64_t> left, right;
};
/// "1024,0"; "-" leaves a side open.
Window parse_window(std::string_view option, std::string_view text);

Align parse_align(std::string_view option, std::string_view text);
/// One of f32, f16, bf16.
Dtype parse_float_dtype(std::string_view option, std::string_view text);
ComputeDtype parse_compute_dtype(std::string_view option, std::string_view text);
CpuTarget parse_target(std::string_view option, std::string_view text);
/// "cpu", "cuda" or "cuda:1".
Device parse_device(std::string_view option, std::string_view text);
int parse_thread_count(std::string_view option, std::string_view text);
/// "1,0"
std::vector<int> parse_thread_counts(std::string_view option, std::string_view text);

/// "name=value"; the name is one that a program can spell.
std::pair<std::string, std::string> parse_assignment(std::string_view option,
                                                     std::string_view text);
/// "n=3" is an int, "n=3.0" a float.
CapturedScalar parse_scalar(std::string_view option, std::string_view text);

std::string_view name(ComputeDtype compute_dtype);

}  // namespace fovea::tools
