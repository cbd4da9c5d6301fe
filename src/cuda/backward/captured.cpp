#include "cuda/backward/captured.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "core/ceil_div.hpp"
#include "core/check.hpp"
#include "cuda/backward/candidates.hpp"
#include "cuda/backward/launch.hpp"
#include "cuda/device/shared/backward_spec_sm90.h"
#include "cuda/kernel_unit.hpp"
#include "cuda/params/tensor_params.hpp"
#include "expr/differentiate.hpp"
#include "expr/passes.hpp"

namespace fovea::cuda {
namespace {

using expr::CapturedDerivative;
using expr::Variable;

constexpr std::size_t kPartAlignment = 256;
/// dS of all pairs, for a bias that learns: 8 sequences of 2,048 tokens and 32 heads.
constexpr std::int64_t kMostPairBytes = std::int64_t{1} << 31U;

struct Tile {
  std::int32_t queries, keys;
};
/// The first that fits: heads of 128 take 98 KB with the first, two CTAs on an SM of Hopper; of 256 the second, 73 KB.
/// Without products in shared memory 65 KB and three.
constexpr std::array kMmaTiles = {Tile{64, 64}, Tile{32, 32}};
/// Of captured_tiles on an SM: what they leave of the registers, 168 a thread, is enough for products and sums, but not
/// for the words of dropout too.
int most_dense_ctas(const CapturedSpec& spec) { return spec.has_dropout ? 2 : 3; }
/// As those of sm80/attention_backward_f32, whose rows they are.
constexpr std::array kPlainTiles = {Tile{32, 32}, Tile{32, 16}, Tile{16, 16}, Tile{16, 8},
                                    Tile{8, 8}};

bool is_one(const expr::Node& node) {
  return node.op == expr::Op::constant && node.float_value == 1;
}

/// Of the formula that is printed.
std::vector<CapturedDerivative> derivatives_of(const GradientProblem& g) {
  return expr::captured_derivatives(expr::simplify(g.forward.problem.score.expr().shared()));
}

/// The axis that an index runs along; empty where it is none that has an element for each of its values.
std::optional<Variable> axis_of(const GradientProblem& g, const expr::Node& index,
                                std::int64_t extent) {
  if (index.op != expr::Op::variable) return std::nullopt;
  const ForwardProblem& f = g.forward;
  const auto has_elements = [&](std::int64_t count) {
    return extent >= count ? std::optional(index.variable) : std::nullopt;
  };
  switch (index.variable) {
    case Variable::batch:
      return has_elements(f.num_sequences);
    case Variable::q_head:
      return has_elements(f.num_heads_q);
    case Variable::kv_head:
      return has_elements(f.num_heads_kv);
    case Variable::q_idx:
      return has_elements(f.seqlen_q);
    case Variable::kv_idx:
      return has_elements(f.seqlen_kv);
    default:
      return std::nullopt;
  }
}

/// Whether the only place that reads a captured tensor reads another element for each pair (q_idx, kv_idx).
std::optional<DenseBias> as_dense(const GradientProblem& g, std::size_t gradient,
                                  const std::vector<CapturedDerivative>& derivatives) {
  const CapturedGradient& captured = g.captured[gradient];
  const auto is_of_it = [&](const CapturedDerivative& each) { return each.slot == captured.name; };
  if (std::ranges::count_if(derivatives, is_of_it) != 1) return std::nullopt;
  const expr::Node& load = *std::ranges::find_if(derivatives, is_of_it)->leaf;
  std::optional<std::size_t> batch, q_head, kv_head, q, kv;
  for (std::size_t dim = 0; dim < load.operands.size(); ++dim) {
    const std::int64_t extent = captured.spec.shape[dim];
    if (extent == 1) continue;
    const std::optional<Variable> axis = axis_of(g, *load.operands[dim], extent);
    if (!axis) return std::nullopt;
    std::optional<std::size_t>& place = *axis == Variable::batch     ? batch
                                        : *axis == Variable::q_head  ? q_head
                                        : *axis == Variable::kv_head ? kv_head
                                        : *axis == Variable::q_idx   ? q
                                                                     : kv;
    if (place) return std::nullopt;  // a diagonal
    place = dim;
  }
  if (!q || !kv || (q_head && kv_head)) return std::nullopt;
  return DenseBias{.gradient = gradient,
                   .batch = batch,
                   .head = q_head ? q_head : kv_head,
                   .q = *q,
                   .kv = *kv,
                   .is_of_kv_heads = kv_head.has_value()};
}

/// The largest of them, as each takes a walk of its own.
std::optional<DenseBias> largest_dense(const GradientProblem& g,
                                       const std::vector<CapturedDerivative>& derivatives) {
  std::optional<DenseBias> largest;
  for (std::size_t i = 0; i < g.captured.size(); ++i) {
    const auto dense = as_dense(g, i, derivatives);
    if (!dense) continue;
    const auto size = [&](const DenseBias& each) {
      return g.captured[each.gradient].spec.num_elements();
    };
    if (!largest || size(*dense) > size(*largest)) largest = dense;
  }
  return largest;
}

/// As on CPUs: an error of delta is as small in what is added to scores as it is in dq.
bool sums_deltas(const GradientProblem& g, const std::vector<CapturedDerivative>& derivatives) {
  const Problem& p = g.forward.problem;
  if (p.q.dtype == Dtype::f32 && p.out.dtype == Dtype::f32) return false;
  return std::ranges::any_of(derivatives, [&](const CapturedDerivative& each) {
    return !is_one(*each.derivative) &&
           std::ranges::find(g.captured, each.slot, &CapturedGradient::name) != g.captured.end();
  });
}

/// keeps_products: for walks along lines of a tile, which plain products are made for in any case.
CapturedSpec choose_spec(const GradientProblem& g, const DeviceTraits& device,
                         bool keeps_products) {
  CapturedSpec spec{{common_spec(g)}};
  spec.instructions = device.instructions();
  spec.owns_keys = false;
  spec.has_origins = true;  // there is a program
  spec.multiplies_by_mma =
      !refuses_16_bit(g, device) && !refuses_head_dims(g.forward, kMaxTensorCoreHeadDim);
  spec.keeps_products = keeps_products;
  const auto has_room = [&](const auto& tiles, std::int32_t rows_per_warp) {
    return std::ranges::any_of(tiles, [&](const Tile& tile) {
      spec.tile_owned = tile.queries;
      spec.tile_walked = tile.keys;
      spec.num_warps = tile.queries / rows_per_warp;
      return captured_shared_bytes(spec) <= device.shared_bytes_per_cta;
    });
  };
  // Turing has no room for heads above 224.
  spec.multiplies_by_mma = spec.multiplies_by_mma && has_room(kMmaTiles, 16);
  if (!spec.multiplies_by_mma) {
    spec.keeps_products = true;
    has_room(kPlainTiles, 8);
  }
  if (!spec.keeps_products) {
    const int that_fit =
        device.shared_bytes_per_sm / (captured_shared_bytes(spec) + kReservedSharedBytes);
    spec.ctas_per_sm = std::clamp(that_fit, 1, most_dense_ctas(spec));
  }
  return spec;
}

std::shared_ptr<const expr::CudaProgram> print_program(
    const GradientProblem& g, const std::vector<std::size_t>& gradients,
    const std::vector<CapturedDerivative>& derivatives) {
  std::vector<std::string> names;
  for (const std::size_t i : gradients) names.push_back(g.captured[i].name);
  const bool is_read = std::ranges::any_of(derivatives, [&](const CapturedDerivative& each) {
    return std::ranges::find(names, each.slot) != names.end();
  });
  if (!is_read) return nullptr;
  const Problem& p = g.forward.problem;
  return std::make_shared<const expr::CudaProgram>(
      expr::print_cuda_captured(p.score, p.mask, names));
}

std::size_t aligned(std::size_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

constexpr std::size_t kPairTileBytes = std::size_t{16} * kPairPieces;

CapturedMemory place_parts(const GradientProblem& g, const CapturedPlan& plan) {
  CapturedMemory memory;
  memory.sums_at = plan.sums_deltas ? aligned(statistics_floats(g) * sizeof(float)) : 0;
  memory.pairs_at =
      memory.sums_at + aligned(static_cast<std::size_t>(plan.num_sums) * sizeof(ExactSum));
  memory.bytes = memory.pairs_at;
  if (plan.sums_pairs) memory.bytes += static_cast<std::size_t>(num_pair_tiles(g)) * kPairTileBytes;
  return memory;
}

jit::KernelText text_of(const CapturedSpec& spec, std::string_view name,
                        const expr::CudaProgram& program) {
  const auto bounds = fmt::format("{}, {}", spec.num_warps * 32, spec.ctas_per_sm);
  return {kernel_unit(program, {.header = "sm80/captured_gradients.cuh",
                                .spec = print_captured_spec(spec),
                                .bounds = bounds,
                                .params = "CapturedParams",
                                .call = fmt::format(
                                    "sm80::{}<fovea::cuda::spec, fovea::cuda::Mods>", name)}),
          fmt::format("sm80/{} {}", name, describe(spec))};
}

jit::KernelText sums_text(std::string_view name) {
  return {fmt::format("#include \"common/exact_sum.cuh\"\n"
                      "extern \"C\" __global__ void __launch_bounds__({}) {}("
                      "const __grid_constant__ fovea::cuda::SumsParams p) {{\n"
                      "  fovea::cuda::{}(p);\n}}\n",
                      kExactSumThreads, jit::kEntryName, name),
          fmt::format("common/{}", name)};
}

DenseGradient dense_gradient(const GradientProblem& g, const DenseBias& bias,
                             const TensorView& to) {
  const ForwardProblem& f = g.forward;
  const auto extent = [&](std::size_t dim) {
    return static_cast<std::int32_t>(to.size(static_cast<int>(dim)));
  };
  const auto stride = [&](std::size_t dim) { return to.stride(static_cast<int>(dim)); };
  return {.data = to.mutable_data(),
          .element = element_of(to.dtype()),
          .batch_stride = bias.batch ? stride(*bias.batch) : 0,
          .head_stride = bias.head ? stride(*bias.head) : 0,
          .q_stride = stride(bias.q),
          .kv_stride = stride(bias.kv),
          .num_batches = bias.batch ? extent(*bias.batch) : 1,
          .num_heads = bias.head ? extent(*bias.head) : 1,
          .num_q = extent(bias.q),
          .num_kv = extent(bias.kv),
          .sequences_per_place = bias.batch ? 1 : static_cast<std::int32_t>(f.num_sequences),
          .q_heads_per_place = static_cast<std::int32_t>(!bias.head            ? f.num_heads_q
                                                         : bias.is_of_kv_heads ? f.group
                                                                               : 1)};
}

SummedGradient summed_gradient(const CapturedGradient& captured, const TensorView& to) {
  SummedGradient gradient{};
  gradient.data = to.mutable_data();
  gradient.element = element_of(to.dtype());
  if (captured.is_scalar) return gradient;
  gradient.rank = to.rank();
  for (int dim = 0; dim < to.rank(); ++dim) {
    gradient.strides[dim] = to.stride(dim);
    gradient.shape[dim] = static_cast<std::int32_t>(to.size(dim));
  }
  return gradient;
}

std::uint32_t num_tiles(std::int64_t length, std::int32_t tile) {
  return static_cast<std::uint32_t>((length + tile - 1) / tile);
}

}  // namespace

int CapturedPlan::num_walks() const {
  return (sums_deltas ? 1 : 0) + (sums_program ? 1 : 0) + (dense_program && !sums_pairs ? 1 : 0);
}

std::optional<std::string> captured_refusal(const GradientProblem& g) {
  if (g.captured.size() > static_cast<std::size_t>(kMaxCapturedGradients)) {
    return fmt::format(
        "gradients of {} captured tensors and scalars are wanted; expected at most {}",
        g.captured.size(), kMaxCapturedGradients);
  }
  for (const CapturedGradient& captured : g.captured) {
    if (captured.is_scalar || captured.spec.rank <= kMaxCapturedRank) continue;
    return fmt::format("the gradient of captured '{}' has rank {}; kernels take at most {}",
                       captured.name, captured.spec.rank, kMaxCapturedRank);
  }
  return std::nullopt;
}

std::int64_t num_pair_tiles(const GradientProblem& g) {
  const ForwardProblem& f = g.forward;
  return f.num_sequences * f.num_heads_q * ceil_div(f.seqlen_q, std::int64_t{kPairQueries}) *
         ceil_div(f.seqlen_kv, std::int64_t{kSm90BackwardKeys});
}

std::int64_t num_pair_sum_tiles(const GradientProblem& g) {
  const std::optional<DenseBias> bias = bias_of_pairs(g);
  FOVEA_ASSERT(bias.has_value());
  const TensorSpec& spec = g.captured[bias->gradient].spec;
  const std::int64_t num_q = spec.shape[bias->q], num_kv = spec.shape[bias->kv];
  return spec.num_elements() / (num_q * num_kv) * ceil_div(num_q, kMmaTiles[0].queries) *
         ceil_div(num_kv, kMmaTiles[0].keys);
}

std::optional<DenseBias> bias_of_pairs(const GradientProblem& g) {
  if (g.captured.empty() || g.forward.is_varlen) return std::nullopt;
  const std::int64_t bytes = num_pair_tiles(g) * static_cast<std::int64_t>(kPairTileBytes);
  if (bytes > kMostPairBytes) return std::nullopt;
  const expr::NodePtr program = expr::simplify(g.forward.problem.score.expr().shared());
  if (!is_one(*expr::derivative_by_score(program))) return std::nullopt;
  const std::vector<CapturedDerivative> derivatives = expr::captured_derivatives(program);
  const std::optional<DenseBias> dense = largest_dense(g, derivatives);
  if (!dense) return std::nullopt;
  const CapturedGradient& captured = g.captured[dense->gradient];
  // In f16 small dS loses its digits, and only a gradient of f16 would lose them anyhow.
  if (g.forward.problem.q.dtype == Dtype::f16 && captured.spec.dtype != Dtype::f16)
    return std::nullopt;
  const auto load = std::ranges::find(derivatives, captured.name, &CapturedDerivative::slot);
  return is_one(*load->derivative) ? dense : std::nullopt;
}

CapturedPlan plan_captured(const GradientProblem& g, const DeviceTraits& device, bool sums_pairs) {
  CapturedPlan plan;
  if (g.captured.empty()) return plan;
  const std::vector<CapturedDerivative> derivatives = derivatives_of(g);
  plan.spec = choose_spec(g, device, true);
  plan.dense_spec = choose_spec(g, device, false);
  plan.sums_deltas = sums_deltas(g, derivatives);
  plan.dense = largest_dense(g, derivatives);
  plan.sums_pairs = sums_pairs;
  FOVEA_ASSERT(!sums_pairs || (plan.dense && plan.dense_spec.tile_owned == kPairQueries &&
                               2 * plan.dense_spec.tile_walked == kSm90BackwardKeys));
  if (plan.dense) plan.dense_program = print_program(g, {plan.dense->gradient}, derivatives);
  for (std::size_t i = 0; i < g.captured.size(); ++i) {
    if (plan.dense && plan.dense->gradient == i) continue;
    plan.summed.push_back(i);
    plan.first_sum.push_back(plan.num_sums);
    plan.num_sums += g.captured[i].spec.num_elements();
  }
  plan.sums_program = print_program(g, plan.summed, derivatives);
  plan.memory = place_parts(g, plan);
  return plan;
}

std::string describe(const GradientProblem& g, const CapturedPlan& plan) {
  std::vector<std::string> steps;
  if (plan.sums_deltas)
    steps.push_back(fmt::format("sm80/captured_deltas in {} bytes", plan.memory.sums_at));
  if (!plan.summed.empty()) {
    std::vector<std::string> names;
    for (const std::size_t i : plan.summed) names.push_back("'" + g.captured[i].name + "'");
    steps.push_back(fmt::format("sm80/captured_sums of {} in {} bytes", fmt::join(names, ", "),
                                plan.memory.pairs_at - plan.memory.sums_at));
  }
  if (plan.dense) {
    const std::string_view name = g.captured[plan.dense->gradient].name;
    steps.push_back(plan.sums_pairs ? fmt::format("sm90/sum_pairs of '{}' in {} bytes", name,
                                                  plan.memory.bytes - plan.memory.pairs_at)
                                    : fmt::format("sm80/captured_tiles of '{}'", name));
  }
  return fmt::format("{}", fmt::join(steps, ", "));
}

void add_captured_kernels(const CapturedPlan& plan, PlannedKernels& kernels) {
  const auto& any_program = plan.sums_program ? plan.sums_program : plan.dense_program;
  if (plan.sums_deltas)
    kernels.push_back(
        {KernelRole::captured_deltas, text_of(plan.spec, "captured_deltas", *any_program)});
  if (!plan.summed.empty()) {
    kernels.push_back({KernelRole::clear_sums, sums_text("clear_sums")});
    kernels.push_back({KernelRole::write_sums, sums_text("write_sums")});
  }
  if (plan.sums_program)
    kernels.push_back(
        {KernelRole::captured_sums, text_of(plan.spec, "captured_sums", *plan.sums_program)});
  if (plan.dense)
    kernels.push_back({KernelRole::captured_tiles,
                       text_of(plan.dense_spec, "captured_tiles", *plan.dense_program)});
}

CapturedLaunch captured_launch(const GradientProblem& g, const CapturedPlan& plan,
                               const AttentionBackward& args, const BackwardParams& call,
                               void* workspace) {
  CapturedLaunch launch{};
  if (plan.is_empty()) return launch;
  std::byte* const bytes = static_cast<std::byte*>(workspace);
  CapturedParams& p = launch.params;
  p.call = call;
  if (plan.sums_deltas) p.call.rows.delta = reinterpret_cast<float*>(bytes + plan.memory.deltas_at);
  p.sums = launch.sums.sums = reinterpret_cast<ExactSum*>(bytes + plan.memory.sums_at);
  launch.sums.num_sums = plan.num_sums;
  launch.sums.num_gradients = static_cast<std::int32_t>(plan.summed.size());
  for (std::size_t i = 0; i < plan.summed.size(); ++i) {
    p.first_sum[i] = launch.sums.first_sum[i] = plan.first_sum[i];
    launch.sums.gradients[i] =
        summed_gradient(g.captured[plan.summed[i]], args.dcaptured[plan.summed[i]].view);
  }
  launch.walk = CtaShape::of(plan.spec);
  launch.dense = CtaShape::of(plan.dense_spec);
  const auto num_ctas = static_cast<std::uint32_t>(num_owned_tiles(plan.spec, g, args));
  if (plan.sums_deltas) launch.num_delta_ctas = num_ctas;
  if (plan.sums_program) launch.num_sum_ctas = num_ctas;
  launch.num_element_ctas = num_tiles(plan.num_sums, kExactSumThreads);
  if (plan.dense) {
    p.dense = dense_gradient(g, *plan.dense, args.dcaptured[plan.dense->gradient].view);
    launch.num_dense_tiles = num_tiles(p.dense.num_q, plan.dense_spec.tile_owned) *
                             num_tiles(p.dense.num_kv, plan.dense_spec.tile_walked) *
                             static_cast<std::uint32_t>(p.dense.num_batches * p.dense.num_heads);
    launch.num_dense_ctas = launch.num_dense_tiles;
  }
  return launch;
}

CtaShape CtaShape::of(const CapturedSpec& spec) {
  return {static_cast<std::uint32_t>(spec.num_warps) * 32,
          static_cast<std::uint32_t>(captured_shared_bytes(spec))};
}

void CapturedLaunch::add(KernelLaunches& all) const {
  const auto add_one = [&all](KernelRole role, const auto& of, std::uint32_t num_ctas,
                              const CtaShape& cta) {
    if (num_ctas == 0) return;
    KernelLaunch launch = kernel_launch(role, of);
    launch.grid.x = num_ctas;
    launch.num_threads = cta.num_threads;
    launch.shared_bytes = cta.shared_bytes;
    all.add(launch);
  };
  constexpr CtaShape kElements{kExactSumThreads, 0};
  add_one(KernelRole::captured_deltas, params, num_delta_ctas, walk);
  add_one(KernelRole::clear_sums, sums, num_element_ctas, kElements);
  add_one(KernelRole::captured_sums, params, num_sum_ctas, walk);
  add_one(KernelRole::write_sums, sums, num_element_ctas, kElements);
  add_one(KernelRole::captured_tiles, params, num_dense_ctas, dense);
}

}  // namespace fovea::cuda
