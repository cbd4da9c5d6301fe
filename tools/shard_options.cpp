#include "shard_options.hpp"

#include <fmt/format.h>

#include "command_line.hpp"
#include "failure.hpp"
#include "option_values.hpp"

namespace fovea::tools {
namespace {

constexpr const char* kGroup = "Context parallelism";

ParallelScheme parse_scheme(const std::string& option, const std::string& text) {
  if (const auto scheme = parse_parallel_scheme(text)) return *scheme;
  std::string names;
  for (int i = 0; i < kNumParallelSchemes; ++i)
    names += fmt::format("{}{}", i == 0 ? "" : ", ", name(static_cast<ParallelScheme>(i)));
  bad_input(fmt::format("{}: got '{}'; expected one of {}", option, text, names));
}

}  // namespace

void add_rank_options(CommandLine& line, ShardingOptions& options) {
  line.add({"--ranks", "N", kGroup, "the tokens of each sequence over so many ranks"},
           [&](const std::string& option, const std::string& text) {
             options.num_ranks =
                 static_cast<int>(parse_integer(option, text, {.least = 1, .most = 1 << 16}));
           });
  line.add({"--scheme", "NAME", kGroup,
            "all_gather (default), head_group_all_gather, ring, ulysses, hybrid, needed_only"},
           [&](const std::string& option, const std::string& text) {
             options.scheme = parse_scheme(option, text);
             options.given = option;
           });
}

void add_speed_options(CommandLine& line, ShardingOptions& options) {
  const auto add = [&](const std::string& name, const std::string& help, double unit,
                       double& field) {
    line.add({name, "X", kGroup, help},
             [&field, &options, unit](const std::string& option, const std::string& text) {
               const float value = parse_real(option, text);
               if (!(value > 0))
                 bad_input(fmt::format("{}: got '{}'; expected above 0", option, text));
               field = unit * static_cast<double>(value);
               options.given = option;
             });
  };
  add("--rank-tflops", "what a rank computes, for predicted times (default 650)", 1e12,
      options.speed.flops);
  add("--rank-gbps", "what a rank receives in GB/s, for predicted times (default 250)", 1e9,
      options.speed.bytes);
}

void refuse_without_ranks(const ShardingOptions& options) {
  if (options.num_ranks || options.given.empty()) return;
  bad_input(fmt::format("{}: needs --ranks, the number of ranks", options.given));
}

}  // namespace fovea::tools
