#include "quant/check.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "quant/fields.hpp"
#include "quant/formats.hpp"
#include "quant/hadamard.hpp"

namespace fovea::quant {
namespace {

constexpr int kMaxBlock = 1024;

template <typename Enum>
std::string refuse_other(std::string_view field, Enum got, std::initializer_list<Enum> expected) {
  if (std::ranges::find(expected, got) != expected.end()) return "";
  std::vector<std::string_view> words;
  for (const Enum each : expected) words.push_back(name(each));
  return fmt::format("quant.{} is {}; expected {}", field, name(got), fmt::join(words, ", "));
}

std::string check_accuracy(const Quantization& q) {
  if (!(q.accuracy >= 0 && std::isfinite(q.accuracy)))
    return fmt::format("quant.accuracy is {}; expected a relative error above 0, or 0 for none",
                       q.accuracy);
  Quantization rest = q;
  rest.accuracy = 0;
  if (q.accuracy > 0 && rest != Quantization{})
    return fmt::format("quant.accuracy is {} beside {}; expected one of them: it chooses a recipe",
                       q.accuracy, print(rest));
  return "";
}

std::string check_formats(const Quantization& q) {
  using enum QuantFormat;
  return refuse_other("qk", q.qk, {none, int8, e4m3, e2m1});
}

std::string check_v_scales(const Quantization& q) {
  using enum ScaleGranularity;
  if (q.pv == QuantFormat::e2m1) return "";  // check_groups
  return refuse_other("v_scales", q.v_scales, {tensor, block, channel, tile_channel});
}

/// Numbers of four bits have scales by groups, all of one kind, and no others have.
std::string check_groups(const Quantization& q) {
  using enum ScaleGranularity;
  const bool is_qk = q.qk == QuantFormat::e2m1;
  if (is_qk) {
    if (std::string reason = refuse_other("q_scales", q.q_scales, {group_16, group_32});
        !reason.empty())
      return reason + ", for quant.qk e2m1";
    if (q.k_scales != q.q_scales)
      return fmt::format(
          "quant.k_scales is {} and quant.q_scales is {}; expected the same, for "
          "quant.qk e2m1",
          name(q.k_scales), name(q.q_scales));
  }
  if (q.pv != QuantFormat::e2m1) return "";
  std::string reason = refuse_other("v_scales", q.v_scales, {group_16, group_32});
  return reason.empty() ? "" : reason + ", for quant.pv e2m1";
}

std::string check_granularities(const Quantization& q) {
  using enum ScaleGranularity;
  if (std::string reason = check_groups(q); !reason.empty()) return reason;
  if (q.qk == QuantFormat::e2m1) return check_v_scales(q);
  if (std::string reason =
          refuse_other("q_scales", q.q_scales, {tensor, block, warp, thread, token});
      !reason.empty())
    return reason;
  if (std::string reason = refuse_other("k_scales", q.k_scales, {tensor, block, thread, token});
      !reason.empty())
    return reason;
  return check_v_scales(q);
}

std::string check_smoothing(const Quantization& q) {
  using enum Smoothing;
  if (std::string reason = refuse_other("smooth_q", q.smooth_q, {none, block}); !reason.empty())
    return reason;
  if (std::string reason = refuse_other("smooth_k", q.smooth_k, {none, sample, sequence});
      !reason.empty())
    return reason;
  if (std::string reason = refuse_other("smooth_v", q.smooth_v, {none, sequence}); !reason.empty())
    return reason;
  const bool has_qk_steps = q.smooth_q != none || q.smooth_k != none || q.hadamard;
  if (q.qk == QuantFormat::none && has_qk_steps) {
    return fmt::format(
        "quant.{} is set and quant.qk is none; expected int8, e4m3 or e2m1, for q and k to be "
        "rounded after it",
        q.hadamard           ? "hadamard"
        : q.smooth_q != none ? "smooth_q"
                             : "smooth_k");
  }
  if (q.pv == QuantFormat::none && q.smooth_v != none)
    return "quant.smooth_v is set and quant.pv is none; expected int8, e4m3, f16 or e2m1";
  return "";
}

std::string check_given(const Quantization& q) {
  if (q.scales == ScaleSource::measured) return "";
  if (q.pv == QuantFormat::f16)
    return "quant.scales is given and quant.pv is f16, which has none; expected measured";
  if (q.qk == QuantFormat::e2m1 || q.pv == QuantFormat::e2m1)
    return fmt::format(
        "quant.scales is given and quant.{} is e2m1; expected measured: each group "
        "has a scale of its own",
        q.qk == QuantFormat::e2m1 ? "qk" : "pv");
  const auto refuse = [](std::string_view field, ScaleGranularity got) {
    return fmt::format(
        "quant.scales is given and quant.{} is {}; expected tensor: a scale for each "
        "sequence and kv head",
        field, name(got));
  };
  if (q.qk != QuantFormat::none) {
    if (q.q_scales != ScaleGranularity::tensor) return refuse("q_scales", q.q_scales);
    if (q.k_scales != ScaleGranularity::tensor) return refuse("k_scales", q.k_scales);
  }
  if (q.pv != QuantFormat::none && q.v_scales != ScaleGranularity::tensor)
    return refuse("v_scales", q.v_scales);
  return "";
}

std::string check_blocks(const Quantization& q) {
  if (q.block_q < 16 || q.block_q > kMaxBlock || q.block_q % 16 != 0)
    return fmt::format("quant.block_q is {}; expected a multiple of 16 up to {}", q.block_q,
                       kMaxBlock);
  if (q.warp_q < 8 || q.warp_q % 8 != 0 || q.block_q % q.warp_q != 0)
    return fmt::format("quant.warp_q is {}; expected a multiple of 8 that divides block_q, {}",
                       q.warp_q, q.block_q);
  if (q.block_kv < 32 || q.block_kv > 256 || q.block_kv % 32 != 0)
    return fmt::format("quant.block_kv is {}; expected a multiple of 32 up to 256", q.block_kv);
  return "";
}

/// The greatest code of a probability.
float most_p(QuantFormat pv) {
  switch (pv) {
    case QuantFormat::int8:
      return 255;
    case QuantFormat::e4m3:
      return kE4m3Max;
    case QuantFormat::e2m1:
      return kE2m1Max * kE4m3Max;
    default:
      return 65504;
  }
}

std::string check_probabilities(const Quantization& q) {
  const float most = most_p(q.pv);
  const bool is_int8 = q.pv == QuantFormat::int8;
  if (is_int8 ? q.p_max != most : !(q.p_max > 0 && q.p_max <= most))
    return fmt::format("quant.p_max is {}; expected {}{}, for quant.pv {}", q.p_max,
                       is_int8 ? "" : "above 0, at most ", most, name(q.pv));
  if (q.p_codes == ProbabilityCodes::linear && q.pv != QuantFormat::e4m3)
    return fmt::format(
        "quant.p_codes is linear and quant.pv is {}; expected e4m3, whose bits they are",
        name(q.pv));
  if (!(q.p_step >= 0 && q.p_step <= 16))
    return fmt::format("quant.p_step is {}; expected octaves, 0 to 16", q.p_step);
  if (is_int8 && q.p_step != 0)
    return fmt::format(
        "quant.p_step is {} and quant.pv is int8; expected 0: the reference is the row's "
        "maximum in each tile",
        q.p_step);
  if (q.p_max * std::exp2(q.p_step / 2) > most)
    return fmt::format(
        "quant.p_step is {} and quant.p_max is {}; expected a greatest probability, half a step "
        "above "
        "its reference, of at most {}",
        q.p_step, q.p_max, most);
  if (is_int8 && q.row_sums == RowSums::codes)
    return "quant.row_sums is codes and quant.pv is int8; expected exact";
  if (q.pv == QuantFormat::e4m3 && !(q.v_max > 0 && q.v_max <= kE4m3Max))
    return fmt::format("quant.v_max is {}; expected above 0, at most {}", q.v_max, kE4m3Max);
  return "";
}

std::string check_accumulation(const Quantization& q) {
  if (q.accumulation == Accumulation::two_level) return "";
  const bool has_tiles =
      q.v_scales == ScaleGranularity::block || q.v_scales == ScaleGranularity::tile_channel;
  if (q.pv == QuantFormat::int8)
    return "quant.pv is int8 with accumulation one_level; expected two_level: each tile has its "
           "own "
           "scale of probabilities";
  if (q.pv == QuantFormat::e4m3 && has_tiles)
    return fmt::format(
        "quant.v_scales is {} with accumulation one_level; expected two_level: each tile "
        "has its own scale",
        name(q.v_scales));
  return "";
}

}  // namespace

std::string obstacle(const Quantization& quant) {
  for (const auto check : {check_accuracy, check_formats, check_granularities, check_smoothing,
                           check_given, check_blocks}) {
    if (std::string reason = check(quant); !reason.empty()) return reason;
  }
  if (quant.pv == QuantFormat::none) return "";
  std::string reason = check_probabilities(quant);
  return reason.empty() ? check_accumulation(quant) : reason;
}

std::string obstacle(const Quantization& quant, std::int64_t head_dim_qk) {
  if (quant.hadamard && hadamard_block(head_dim_qk) == 1)
    return fmt::format(
        "quant.hadamard is yes and head_dim_qk is {}; expected an even head_dim, whose "
        "channels can be paired",
        head_dim_qk);
  return obstacle(quant);
}

}  // namespace fovea::quant
