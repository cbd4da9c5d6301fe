// Fill params, launch.
#include "cuda/append/append_to_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "fovea/error.hpp"

#include "cuda/kernel_unit.hpp"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Eight heads of 128 elements of 16 bits are written in one step.
constexpr unsigned kThreads = 128;

enum class Target : std::uint8_t { cache, tensor };

/// `batch` sequences, packed where cu_seqlens are given.
TokenRows token_rows(const TensorView& from, const TensorView& to, const SequenceRows& layout,
                     std::int64_t batch, Target target, bool is_turned) {
  const Codes codes = codes_of(to.dtype());
  const int last = from.rank() - 1;
  const std::int64_t rows = layout.is_packed() ? from.size(0) : batch * layout.each;
  if (rows > std::numeric_limits<std::int32_t>::max()) {
    throw Unsupported(
        fmt::format("append_to_cache: {} new tokens in one call; expected fewer than 2^31", rows));
  }
  return {
      .from = bshd(from),
      .to = bshd(to),
      .from_element = element_of(from.dtype()),
      .to_element = codes == Codes::none ? element_of(to.dtype()) : Element::f32,
      .codes = codes,
      .scale = {},
      .cu_seqlens = index_param(layout.cu_seqlens),
      .num_rows = static_cast<std::int32_t>(rows),
      .num_tokens = static_cast<std::int32_t>(layout.each),
      .num_heads = static_cast<std::int32_t>(from.size(last - 1)),
      .head_dim = static_cast<std::int32_t>(from.size(last)),
      .is_cached = target == Target::cache,
      .is_turned = is_turned,
      .is_copied = !is_turned && from.dtype() == to.dtype() && is_aligned(from) && is_aligned(to),
      .positions = {},
      .positions_row_stride = 0};
}

void fill_places(const KvCache& cache, AppendParams& p) {
  p.capacity = capacity_param(cache);
  p.num_slots = count_param(cache.k.size(0));
  p.seqlens = index_param(cache.seqlens);
  p.left_padding = index_param(cache.left_padding);
  p.slots = index_param(cache.batch_idx);
  fill_pages(cache, p);
}

BshdParam angles(const TensorView& table) {
  return {.data = table.data(),
          .batch_stride = 0,
          .row_stride = table.stride(0),
          .head_stride = 0,
          .col_stride = table.stride(1)};
}

void fill_rotary(const Rotary& rotary, AppendParams& p) {
  p.cos = angles(rotary.cos);
  p.sin = angles(rotary.sin);
  p.max_positions = count_param(std::min(rotary.cos.size(0), rotary.sin.size(0)));
  p.cos_element = element_of(rotary.cos.dtype());
  p.sin_element = element_of(rotary.sin.dtype());
  p.num_pairs = static_cast<std::int32_t>(rotary.cos.size(1));
  p.is_interleaved = rotary.is_interleaved;
}

void fill_positions(const TensorView& positions, TokenRows& rows) {
  rows.positions = index_param(positions);
  rows.positions_row_stride = positions.rank() > 1 ? positions.stride(0) : 0;
}

}  // namespace

jit::KernelText append_text() { return common_kernel("append_to_cache", "AppendParams", kThreads); }

AppendPlan plan_append(Device device) {
  return {load_alone(append_text(), device, "append_to_cache")};
}

AppendLaunch append_launch(const NewTokens& tokens) {
  AppendLaunch launch{};
  AppendParams& p = launch.params;
  const GrownCache grown = grown_cache(tokens.cache, tokens.append);
  p.batch = static_cast<std::int32_t>(tokens.batch);
  p.num_new = static_cast<std::int32_t>(grown.new_tokens.each);
  p.cu_seqlens_new = index_param(grown.new_tokens.cu_seqlens);
  p.total_new = grown.total_new;
  fill_places(tokens.cache, p);
  const bool is_turned = tokens.rotary != nullptr;
  if (is_turned) fill_rotary(*tokens.rotary, p);
  launch.grid = {.x = 0, .y = 0};
  const auto add = [&](const TensorView& from, const TensorView& to, const SequenceRows& layout,
                       Target target, bool turns) {
    TokenRows& rows = p.rows[launch.grid.y++];
    rows = token_rows(from, to, layout, tokens.batch, target, turns);
    launch.grid.x = std::max(launch.grid.x, static_cast<unsigned>(rows.num_rows));
  };
  if (tokens.append.k) {
    add(tokens.append.k, tokens.cache.k, grown.new_tokens, Target::cache, is_turned);
    p.rows[0].scale = scale_param(tokens.cache.k_scale);
    if (is_turned) fill_positions(tokens.rotary->positions, p.rows[0]);
  }
  if (tokens.append.v) {
    add(tokens.append.v, tokens.cache.v, grown.new_tokens, Target::cache, false);
    p.rows[launch.grid.y - 1].scale = scale_param(tokens.cache.v_scale);
  }
  if (is_turned && tokens.q) {
    add(tokens.q, tokens.rotated_q, sequence_rows(tokens.q, tokens.cu_seqlens_q), Target::tensor,
        true);
    fill_positions(rotary_of_queries(*tokens.rotary).positions, p.rows[launch.grid.y - 1]);
  }
  launch.block.x = kThreads;
  return launch;
}

KernelLaunches AppendLaunch::launches() const { return launch_alone(params, grid, block.x); }

void append_tokens(const AppendPlan& plan, const NewTokens& tokens, void* stream) {
  const AppendLaunch launch = append_launch(tokens);
  enqueue(*plan.kernels, launch.launches(), driver::Stream(stream));
}

}  // namespace fovea::cuda
