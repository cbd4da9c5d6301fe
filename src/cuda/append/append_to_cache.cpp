// Fill params, launch.
#include "cuda/append/append_to_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "fovea/error.hpp"

#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Eight heads of 128 elements of 16 bits are written in one step.
constexpr unsigned kThreads = 128;

enum class Target : std::uint8_t { cache, tensor };

TokenRows token_rows(const TensorView& from, const TensorView& to, Target target, bool is_turned) {
  return {
      .from = bshd(from),
      .to = bshd(to),
      .from_element = element_of(from.dtype()),
      .to_element = element_of(to.dtype()),
      .num_tokens = static_cast<std::int32_t>(from.size(1)),
      .num_heads = static_cast<std::int32_t>(from.size(2)),
      .head_dim = static_cast<std::int32_t>(from.size(3)),
      .is_cached = target == Target::cache,
      .is_turned = is_turned,
      .is_copied = !is_turned && from.dtype() == to.dtype() && is_aligned(from) && is_aligned(to)};
}

void fill_places(const KvCache& cache, AppendParams& p) {
  p.capacity = capacity_param(cache);
  p.num_slots = count_param(cache.k.size(0));
  p.seqlens = index_param(cache.seqlens);
  p.left_padding = index_param(cache.left_padding);
  p.slots = index_param(cache.batch_idx);
  if (!cache.page_table) return;
  p.page_table = index_param(cache.page_table);
  p.page_table_row_stride = cache.page_table.stride(0);
  p.page_size = static_cast<std::int32_t>(cache.k.size(1));
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
  if (!rotary.positions) return;
  p.positions = index_param(rotary.positions);
  p.positions_row_stride = rotary.positions.stride(0);
}

}  // namespace

jit::KernelText append_text() {
  return {.unit = fmt::format("#include \"common/append_to_cache.cuh\"\n"
                              "extern \"C\" __global__ void __launch_bounds__({})\n"
                              "{}(const __grid_constant__ fovea::cuda::AppendParams p) {{\n"
                              "  fovea::cuda::append_to_cache(p);\n"
                              "}}\n",
                              kThreads, jit::kEntryName),
          .label = "common/append_to_cache"};
}

AppendPlan plan_append(Device device) {
  return {load_alone(append_text(), device, "append_to_cache")};
}

AppendLaunch append_launch(const NewTokens& tokens) {
  AppendLaunch launch{};
  AppendParams& p = launch.params;
  p.num_new = static_cast<std::int32_t>(new_tokens(tokens.append).each);
  fill_places(tokens.cache, p);
  const bool is_turned = tokens.rotary != nullptr;
  if (is_turned) fill_rotary(*tokens.rotary, p);
  std::int64_t batch = 0;
  const auto add = [&](const TensorView& from, const TensorView& to, Target target, bool turns) {
    p.rows[launch.grid.y] = token_rows(from, to, target, turns);
    p.most_tokens = std::max(p.most_tokens, p.rows[launch.grid.y].num_tokens);
    ++launch.grid.y;
    batch = from.size(0);
  };
  launch.grid.y = 0;
  if (p.num_new > 0) {
    add(tokens.append.k, tokens.cache.k, Target::cache, is_turned);
    add(tokens.append.v, tokens.cache.v, Target::cache, false);
  }
  if (is_turned && tokens.q) add(tokens.q, tokens.rotated_q, Target::tensor, true);
  const std::int64_t num_ctas = batch * p.most_tokens;
  if (num_ctas > std::numeric_limits<std::int32_t>::max()) {
    throw Unsupported(fmt::format(
        "append_to_cache: {} new tokens in one call; expected fewer than 2^31", num_ctas));
  }
  launch.grid.x = static_cast<unsigned>(num_ctas);
  launch.block.x = kThreads;
  return launch;
}

KernelLaunches AppendLaunch::launches() const {
  KernelLaunch launch = kernel_launch(KernelRole::main, params);
  launch.grid = grid;
  launch.num_threads = block.x;
  KernelLaunches all;
  all.add(launch);
  return all;
}

void append_tokens(const AppendPlan& plan, const NewTokens& tokens, void* stream) {
  const AppendLaunch launch = append_launch(tokens);
  enqueue(*plan.kernels, launch.launches(), driver::Stream(stream));
}

}  // namespace fovea::cuda
