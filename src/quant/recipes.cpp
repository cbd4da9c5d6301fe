// Recipes with a name, and recipes as text.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <optional>

#include "fovea/error.hpp"

#include "quant/check.hpp"
#include "quant/fields.hpp"

namespace fovea {
namespace {

using enum QuantFormat;

/// Q by row, K as a thread of Hopper's products holds it, K's mean from a sample: one pass over K.
constexpr Quantization kAccurate{.qk = int8,
                                 .q_scales = ScaleGranularity::token,
                                 .k_scales = ScaleGranularity::thread,
                                 .smooth_k = Smoothing::sample};

/// As accurate, with V in e4m3 by tiles. The maximum of a row is coded as 2^6.5 to 2^7.5, 15 octaves above the least
/// code and more than 1 below the greatest, so that a reference may stay while scores grow. Whole octaves leave linear
/// codes as they are.
constexpr Quantization kFast{.qk = int8,
                             .pv = e4m3,
                             .q_scales = ScaleGranularity::token,
                             .k_scales = ScaleGranularity::thread,
                             .v_scales = ScaleGranularity::block,
                             .smooth_k = Smoothing::sample,
                             .p_codes = ProbabilityCodes::linear,
                             .row_sums = RowSums::codes,
                             .p_max = 128,
                             .p_step = 1};

/// Zhang et al. 2024 (arXiv 2410.02367).
constexpr Quantization kSage1{.qk = int8,
                              .pv = f16,
                              .q_scales = ScaleGranularity::block,
                              .k_scales = ScaleGranularity::block,
                              .smooth_k = Smoothing::sequence,
                              .row_sums = RowSums::codes,
                              .accumulation = Accumulation::one_level,
                              .block_kv = 64,
                              .p_max = 1};

/// Zhang et al. 2024 (arXiv 2411.10958), with 8-bit Q and K and the tiles of Hopper.
constexpr Quantization kSage2{.qk = int8,
                              .pv = e4m3,
                              .q_scales = ScaleGranularity::thread,
                              .k_scales = ScaleGranularity::thread,
                              .v_scales = ScaleGranularity::channel,
                              .smooth_k = Smoothing::sequence,
                              .block_q = 64,
                              .warp_q = 16};

/// All products exact: 255 · 127 · 64 is far from the end of 32 bits, and of 24.
constexpr Quantization kInt8{.qk = int8,
                             .pv = int8,
                             .q_scales = ScaleGranularity::token,
                             .k_scales = ScaleGranularity::token,
                             .v_scales = ScaleGranularity::tile_channel,
                             .smooth_k = Smoothing::sequence,
                             .smooth_v = Smoothing::sequence,
                             .block_kv = 64,
                             .p_max = 255};

/// What FlashAttention-3 and serving engines call fp8: a scale for each sequence and kv head, known before.
constexpr Quantization kFp8Static{.qk = e4m3,
                                  .pv = e4m3,
                                  .q_scales = ScaleGranularity::tensor,
                                  .k_scales = ScaleGranularity::tensor,
                                  .v_scales = ScaleGranularity::tensor,
                                  .scales = ScaleSource::given,
                                  .p_max = 256};

/// Zhang et al. 2025 (arXiv 2505.11594), SageAttention3: all products of four bits in NVIDIA's FP4. Probabilities are
/// rounded in two levels: of their row, whose greatest becomes 6 · 448, then of groups, whose scales so use all e4m3.
constexpr Quantization kNvfp4{.qk = e2m1,
                              .pv = e2m1,
                              .q_scales = ScaleGranularity::group_16,
                              .k_scales = ScaleGranularity::group_16,
                              .v_scales = ScaleGranularity::group_16,
                              .smooth_q = Smoothing::block,
                              .smooth_k = Smoothing::sequence,
                              .p_max = 6 * 448};

/// The same in OCP's MXFP4. Powers of two want no first level.
constexpr Quantization kMxfp4 = [] {
  Quantization quant = kNvfp4;
  quant.q_scales = quant.k_scales = quant.v_scales = ScaleGranularity::group_32;
  quant.p_max = 6;
  return quant;
}();

constexpr std::array<NamedQuantization, 9> kQuantizations{{
    {"none", "no rounding beyond that of the inputs", {}},
    {"accurate", "int8 q k, error about 1 %", kAccurate, .0115F},
    {"fast", "int8 q k, e4m3 p v without exp2, error about 4 %", kFast, .045F},
    {"int8", "int8 q k and p v, exact integer sums, error about 1.3 %", kInt8, .013F},
    {"sage1", "SageAttention: int8 q k by blocks, f16 p v", kSage1},
    {"sage2", "SageAttention2: int8 q k by threads, e4m3 p v by channels", kSage2},
    {"fp8_static", "e4m3 q k and p v by scales that the call gives", kFp8Static},
    {"nvfp4", "SageAttention3: e2m1 q k and p v, e4m3 scales of 16, error about 20 %", kNvfp4},
    {"mxfp4", "e2m1 q k and p v, power-of-two scales of 32, error about 26 %", kMxfp4},
}};

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
}

[[noreturn]] void refuse(std::string_view text, const std::string& message) {
  throw InvalidArgument(fmt::format("quant '{}': {}", text, message));
}

const Quantization& named(std::string_view text, std::string_view name) {
  const auto* const found = std::ranges::find(kQuantizations, name, &NamedQuantization::name);
  if (found != kQuantizations.end()) return found->quant;
  std::array<std::string_view, kQuantizations.size()> names;
  std::ranges::transform(kQuantizations, names.begin(), &NamedQuantization::name);
  refuse(text, fmt::format("no recipe is called '{}'; expected {}, or fields such as qk=int8", name,
                           fmt::join(names, ", ")));
}

void set_field(std::string_view text, std::string_view item, Quantization& quant) {
  const std::size_t equals = item.find('=');
  const std::string_view name = trimmed(item.substr(0, equals));
  if (equals == std::string_view::npos)
    refuse(text,
           fmt::format("'{}' is no field; expected a recipe's name first, then name=value", item));
  const std::string_view value = trimmed(item.substr(equals + 1));
  const auto found = std::ranges::find(quant::fields(), name, &quant::Field::name);
  if (found == quant::fields().end()) {
    std::string names;
    for (const quant::Field& each : quant::fields())
      names += fmt::format("{}{}", names.empty() ? "" : ", ", each.name);
    refuse(text, fmt::format("no field is called '{}'; expected {}", name, names));
  }
  if (!found->parse(value, quant))
    refuse(text, fmt::format("{} is '{}'; expected {}", name, value, found->expected()));
}

std::string differences(const Quantization& from, const Quantization& to) {
  std::string text;
  for (const quant::Field& field : quant::fields()) {
    const std::string value = field.print(to);
    if (value != field.print(from)) text += fmt::format(",{}={}", field.name, value);
  }
  return text;
}

std::string describe_product(QuantFormat format, ScaleSource scales, std::string_view measured) {
  if (format == none) return "as without a recipe";
  if (format == f16) return "f16";
  return fmt::format("{} by {}", quant::name(format),
                     scales == ScaleSource::given ? "given scales" : measured);
}

}  // namespace

std::span<const NamedQuantization> quantizations() { return kQuantizations; }

Quantization parse_quantization(std::string_view text) {
  Quantization quant;
  bool is_first = true;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = trimmed(rest.substr(0, comma));
    if (is_first && item.find('=') == std::string_view::npos) {
      quant = named(text, item);
    } else {
      set_field(text, item, quant);
    }
    is_first = false;
    if (comma == std::string_view::npos) break;
    rest = rest.substr(comma + 1);
  }
  if (const std::string reason = quant::obstacle(quant); !reason.empty()) refuse(text, reason);
  return quant;
}

std::string print(const Quantization& quant) {
  std::optional<std::string> shortest;
  for (const NamedQuantization& base : kQuantizations) {
    std::string text = std::string(base.name) + differences(base.quant, quant);
    if (!shortest || text.size() < shortest->size()) shortest = std::move(text);
  }
  return *shortest;
}

std::string describe(const Quantization& quant) {
  using quant::name;
  if (quant.is_none()) return "nothing is rounded beyond the dtype of the inputs";
  std::string text = fmt::format(
      "q k {}; p v {}",
      describe_product(quant.qk, quant.scales,
                       fmt::format("{} and {}", name(quant.q_scales), name(quant.k_scales))),
      describe_product(quant.pv, quant.scales, name(quant.v_scales)));
  if (quant.p_codes == ProbabilityCodes::linear && quant.pv != none) text += ", p without exp2";
  if (quant.smooth_k != Smoothing::none)
    text += fmt::format(", mean of k removed ({})", name(quant.smooth_k));
  if (quant.smooth_q != Smoothing::none) text += ", means of q removed";
  if (quant.smooth_v != Smoothing::none) text += ", mean of v removed";
  if (quant.hadamard) text += ", q and k rotated";
  return text;
}

}  // namespace fovea
