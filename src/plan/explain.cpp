// A plan in words and numbers.
#include <fmt/format.h>

#include <string>

#include "fovea/attention.hpp"

#include "core/float_environment.hpp"
#include "core/num_threads.hpp"
#include "cpu/features.hpp"
#include "cpu/quantized/attention_quantized.hpp"
#include "cuda/backward/rounded.hpp"
#include "cuda/forward/staged.hpp"
#include "cuda/jit/architecture.hpp"
#include "expr/passes.hpp"
#include "expr/print.hpp"
#include "mask/block_map.hpp"
#include "plan/json.hpp"
#include "plan/plan.hpp"

namespace fovea {
namespace {

/// Above this a problem is limited by arithmetic on every processor we know (flops per byte of memory traffic).
constexpr double kComputeBoundIntensity = 16;

constexpr std::size_t kMostShown = 4096;  // bytes of a formula

/// Rows of tiles that are counted: a second at most where the mask is a union of bands.
constexpr double kMostCountedRows = 1 << 20;

/// Whether the host can read what the mask reads.
bool has_data(const MaskMod& mask, MaskData data) {
  if (data == MaskData::gone) return mask.captures().tensors.empty();
  for (const CapturedTensor& tensor : mask.captures().tensors) {
    if (!is_cpu(tensor.view.spec().device)) return false;
    if (tensor.view.data() == nullptr && tensor.view.spec().num_elements() > 0) return false;
  }
  return true;
}

void add(TileCount& sum, const TileCount& part, std::int64_t times) {
  sum.empty += part.empty * times;
  sum.partial += part.partial * times;
  sum.full += part.full * times;
}

/// Tiles of every (sequence, q head); what a mask does not read is counted once and multiplied. Nothing where that
/// would take long.
std::optional<TileCount> count_tiles(const ForwardProblem& f, std::int64_t tile_q,
                                     std::int64_t tile_kv) {
  using expr::Variable;
  const expr::Node& mask = f.problem.mask.expr().node();
  const bool reads_batch = expr::reads(mask, Variable::batch);
  const bool reads_head =
      expr::reads(mask, Variable::q_head) || expr::reads(mask, Variable::kv_head);
  const std::int64_t batches =
      reads_batch ? f.num_sequences : std::min<std::int64_t>(1, f.num_sequences);
  const std::int64_t heads = reads_head ? f.num_heads_q : std::min<std::int64_t>(1, f.num_heads_q);
  const std::int64_t times = (reads_batch ? 1 : f.num_sequences) * (reads_head ? 1 : f.num_heads_q);
  const double rows = static_cast<double>(batches) * static_cast<double>(heads) *
                      (static_cast<double>(f.seqlen_q) / static_cast<double>(tile_q) + 1);
  if (rows > kMostCountedRows) return std::nullopt;
  TileCount sum;
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    for (std::int64_t head = 0; head < heads; ++head) {
      add(sum,
          mask::build_block_map(f.problem.mask, f.seqlen_q, f.seqlen_kv, tile_q, tile_kv, batch,
                                head, head / f.group)
              .count(),
          times);
    }
  }
  return sum;
}

double tensor_bytes(const TensorSpec& spec) {
  return static_cast<double>(spec.num_elements()) * static_cast<double>(size_bytes(spec.dtype));
}

/// Program text and, below, the values of its scalars.
std::string formula(const Program& program) {
  std::string text = expr::print_up_to(program.expr().node(), kMostShown);
  std::string values;
  for (const CapturedScalar& scalar : program.captures().scalars) {
    values += fmt::format("{}{} = {:.6g}", values.empty() ? "" : ", ", scalar.name, scalar.value);
  }
  return values.empty() ? text : text + "  where " + values;
}

/// Programs, and how much of the score matrix the mask leaves.
void describe_programs(const ForwardProblem& f, Explanation& e) {
  e.score = formula(f.problem.score);
  e.mask = formula(f.problem.mask);
}

/// Tiles where they are known; the part of all scores that is visible.
double describe_tiles(const ForwardProblem& f, std::int64_t tile_q, std::int64_t tile_kv,
                      MaskData data, Explanation& e) {
  e.tile_q = tile_q;
  e.tile_kv = tile_kv;
  const bool are_lengths_known = !f.is_varlen && !f.problem.seqlen_q && !f.problem.seqlen_kv;
  if (!are_lengths_known || !has_data(f.problem.mask, data)) return 1;
  e.tiles = count_tiles(f, tile_q, tile_kv);
  if (!e.tiles) return 1;
  const std::int64_t total = e.tiles->total();
  return total == 0
             ? 0
             : static_cast<double>(e.tiles->partial + e.tiles->full) / static_cast<double>(total);
}

/// `depth` is the sum of the depths or widths of all products: head_dim_qk + head_dim_v for the forward pass.
void describe_work(const ForwardProblem& f, std::int64_t depth, double visible, Explanation& e) {
  e.flops = 2.0 * static_cast<double>(f.total_q) * static_cast<double>(f.num_heads_q) *
            static_cast<double>(f.seqlen_kv) * static_cast<double>(depth) * visible;
  // Beside packed queries a problem has the keys of one sequence of a cache.
  const double sequences = f.is_cached && f.is_varlen ? static_cast<double>(f.num_sequences) : 1;
  e.bytes = tensor_bytes(f.problem.q) + tensor_bytes(f.problem.out) +
            sequences * (tensor_bytes(f.problem.k) + tensor_bytes(f.problem.v));
}

/// What a gradient reads and writes beside the forward call's tensors.
void add_gradient_bytes(const GradientProblem& g, Explanation& e) {
  for (const TensorSpec* spec : {&g.dout, &g.dq, &g.dk, &g.dv}) {
    if (spec->rank != 0) e.bytes += tensor_bytes(*spec);
  }
  for (const CapturedGradient& captured : g.captured) e.bytes += tensor_bytes(captured.spec);
}

void describe_bound(Explanation& e) {
  e.bound = e.flops > kComputeBoundIntensity * e.bytes ? "compute" : "memory";
}

/// The kernel of a plan that has one, on a GPU.
void describe_kernel(const ForwardProblem& f, const cuda::KernelPlan& plan, Explanation& e) {
  e.kernel = plan.candidate;
  const cuda::DeviceTraits& device = plan.device;
  const cuda::jit::Architecture architecture{device.major, device.minor, device.gfx};
  const bool is_known = !plan.tuning.empty() || architecture.is_measured();
  e.tuning = is_known ? plan.tuning : "not measured on hardware";
  e.kernel_source = plan.kernel_source;
  e.target = to_string(f.device());
  e.compute_dtype = name(f.problem.q.dtype);
  e.workspace_bytes = unaligned_workspace_bytes(plan.workspace_bytes, kDeviceWorkspaceAlignment);
}

}  // namespace

Explanation explain_forward(const ForwardProblem& f, const cpu::ForwardPlan& cpu, MaskData data) {
  Explanation e;
  e.problem = describe(f);
  describe_programs(f, e);
  e.refused = cpu.refused;
  if (cpu.candidate.empty()) return e;
  e.kernel = cpu::kernel_name(cpu);
  e.target = name(cpu.spec.target);
  const Quantization& quant = f.problem.quant;
  e.compute_dtype = quant.is_none() ? std::string(name(cpu::forward_kernels(cpu.spec).product))
                                    : cpu::quantized_products(cpu, quant);
  e.workspace_bytes = unaligned_workspace_bytes(cpu.workspace_bytes);
  const double visible = describe_tiles(f, cpu.spec.lanes, cpu.spec.tile_kv, data, e);
  describe_work(f, f.head_dim_qk + f.head_dim_v, visible, e);
  describe_bound(e);
  return e;
}

namespace {

/// What runs calls now, and why better candidates do not; a stage that cannot be had is one of these.
const cuda::ForwardPlan& explained_stage(const cuda::ForwardPlan& plan,
                                         std::vector<Explanation::Refused>& refused) {
  try {
    const cuda::ForwardPlan& stage = cuda::current_stage(plan);
    refused = stage.refused;
    return stage;
  } catch (const Error& error) {
    refused = plan.refused;
    refused.back().reason = error.what();
    return plan;
  }
}

}  // namespace

Explanation explain_forward(const ForwardProblem& f, const cuda::ForwardPlan& plan, MaskData data) {
  Explanation e;
  e.problem = describe(f);
  describe_programs(f, e);
  const cuda::ForwardPlan& stage = explained_stage(plan, e.refused);
  if (stage.candidate.empty()) return e;
  describe_kernel(f, stage, e);
  e.workspace_bytes = unaligned_workspace_bytes(plan.workspace_bytes, kDeviceWorkspaceAlignment);
  if (plan.few != nullptr) {
    std::vector<Explanation::Refused> others;
    e.problem += fmt::format("; sequences of up to {} queries by {}", plan.few->problem.seqlen_q,
                             explained_stage(plan.few->plan, others).candidate);
  }
  const double visible = describe_tiles(f, stage.spec->tile_q, stage.spec->tile_kv, data, e);
  describe_work(f, f.head_dim_qk + f.head_dim_v, visible, e);
  describe_bound(e);
  return e;
}

Explanation explain_backward(const GradientProblem& g, const cpu::BackwardPlan& cpu,
                             MaskData data) {
  const ForwardProblem& f = g.forward;
  Explanation e;
  e.problem = describe(g);
  describe_programs(f, e);
  e.refused = cpu.refused;
  if (cpu.candidate.empty()) return e;
  const bool is_rounded = cpu.rounded != nullptr;
  e.kernel = is_rounded ? "cpu/attention_quantized_backward" : "cpu/attention_backward";
  e.target = name(cpu.spec.target);
  e.compute_dtype = name(cpu::panel_kernels(cpu.spec.target)->product);
  e.workspace_bytes = unaligned_workspace_bytes(cpu.workspace_bytes);
  const double visible = describe_tiles(f, cpu.spec.lanes, cpu.spec.tile_kv, data, e);
  // S, dQ and dK; dP and dV; S and dP once more where they give delta, and S and O where a recipe has them anew.
  const int walks = (cpu.sums_delta ? 1 : 0) + (is_rounded ? 1 : 0);
  describe_work(f, (3 + walks) * f.head_dim_qk + (2 + walks) * f.head_dim_v, visible, e);
  add_gradient_bytes(g, e);
  describe_bound(e);
  return e;
}

Explanation explain_backward(const GradientProblem& g, const cuda::BackwardPlan& plan,
                             MaskData data) {
  const ForwardProblem& f = g.forward;
  Explanation e;
  e.problem = describe(g);
  describe_programs(f, e);
  e.refused = plan.refused;
  if (plan.candidate.empty()) return e;
  describe_kernel(f, plan, e);
  if (!plan.captured.is_empty()) e.kernel += ", " + cuda::describe(g, plan.captured);
  const bool is_rounded = plan.rounded != nullptr;
  if (is_rounded) {
    e.kernel =
        fmt::format("{}, {}, {}", cuda::kRoundingName, plan.rounded->forward.candidate, e.kernel);
  }
  e.sums = cuda::describe_sums(plan);
  const cuda::BackwardTile tile = cuda::tile_of(plan);
  const double visible = tile.q == 0 ? 1 : describe_tiles(f, tile.q, tile.kv, data, e);
  cuda::ProductDepths depths = cuda::product_depths(plan);
  if (is_rounded) ++depths.qk, ++depths.v;  // S and O anew
  describe_work(f, depths.qk * f.head_dim_qk + depths.v * f.head_dim_v, visible, e);
  add_gradient_bytes(g, e);
  describe_bound(e);
  return e;
}

namespace {

int given(const TensorSpec& spec) { return spec.rank != 0 ? 1 : 0; }

/// How many products there are of a score's worth: S and what q and k move it by; O, P S' against V and P against V'.
/// Those of head_dim_qk are taken so many times.
void describe_tangent_work(const TangentProblem& problem, int times, double visible,
                           Explanation& e) {
  const ForwardProblem& f = problem.forward;
  const JvpProblem& posed = problem.posed;
  describe_work(f,
                times * (1 + given(posed.q_tangent) + given(posed.k_tangent)) * f.head_dim_qk +
                    (2 + given(posed.v_tangent)) * f.head_dim_v,
                visible, e);
  for (const TensorSpec* spec :
       {&posed.q_tangent, &posed.k_tangent, &posed.v_tangent, &posed.out_tangent}) {
    if (given(*spec) != 0) e.bytes += tensor_bytes(*spec);
  }
  describe_bound(e);
}

}  // namespace

Explanation explain_jvp(const TangentProblem& problem, const cpu::JvpPlan& cpu, MaskData data) {
  const ForwardProblem& f = problem.forward;
  Explanation e;
  e.problem = describe(problem);
  describe_programs(f, e);
  e.refused = cpu.forward.refused;
  if (cpu.forward.candidate.empty()) return e;
  e.kernel = "cpu/attention_jvp";
  e.target = name(cpu.forward.spec.target);
  e.compute_dtype = name(cpu::jvp_product(cpu));
  e.workspace_bytes = unaligned_workspace_bytes(cpu.workspace_bytes);
  const double visible =
      describe_tiles(f, cpu.forward.spec.lanes, cpu.forward.spec.tile_kv, data, e);
  describe_tangent_work(problem, 1, visible, e);
  return e;
}

Explanation explain_jvp(const TangentProblem& problem, const cuda::JvpPlan& plan, MaskData data) {
  const ForwardProblem& f = problem.forward;
  Explanation e;
  e.problem = describe(problem);
  describe_programs(f, e);
  e.refused = plan.refused;
  if (plan.candidate.empty()) return e;
  describe_kernel(f, plan, e);
  const double visible = describe_tiles(f, plan.spec.tile_q, plan.spec.tile_kv, data, e);
  describe_tangent_work(problem, plan.num_launches, visible, e);
  return e;
}

Explanation explain_double_backward(const ForwardProblem& f, const std::string& obstacle) {
  Explanation e;
  e.problem = describe(f) + ", gradients of gradients";
  describe_programs(f, e);
  if (!obstacle.empty()) {
    e.refused.push_back({"cpu/attention_double_backward", obstacle});
    return e;
  }
  e.kernel = "cpu/attention_double_backward, the plain path";
  e.target = name(cpu::best_f32_target());
  e.compute_dtype = "f64";
  e.refused.push_back({"tiled kernels",
                       "none for gradients of gradients: every score one by one, a row at a time"});
  // z, t twice and four sums; w, n and three sums.
  describe_work(f, 7 * f.head_dim_qk + 5 * f.head_dim_v, 1, e);
  describe_bound(e);
  return e;
}

Explanation Plan::explain() const {
  const FloatEnvironment environment;
  Explanation explanation = std::visit(
      [&](const auto& plan) { return explain_forward(impl_->problem, plan, MaskData::gone); },
      impl_->backend);
  explain_choice(impl_->choice, explanation);
  return explanation;
}

Explanation explain(const Problem& problem, Device device) {
  return explain(on_device(problem, device));
}

namespace {

Explanation explain_validated(const ForwardProblem& f) {
  if (!is_cpu(f.device()))
    return explain_forward(f, cuda::try_plan_forward(f, f.device()), MaskData::lent);
  const int asked = f.problem.num_threads;
  return explain_forward(f, cpu::try_plan_forward(f, asked > 0 ? asked : default_num_threads()),
                         MaskData::lent);
}

}  // namespace

Explanation explain_for(const Problem& problem, std::string_view architecture) {
  const FloatEnvironment environment;
  const auto parsed = cuda::jit::parse_architecture(architecture, "explain");
  const ForwardProblem f = validate(problem, "explain");
  const auto plan = cuda::choose_forward(f, cuda::typical_device(parsed));
  Explanation explanation = explain_forward(f, plan, MaskData::lent);
  explanation.target = parsed.name();
  return explanation;
}

Explanation explain(const Problem& problem) {
  const FloatEnvironment environment;
  const ForwardProblem f = validate(problem, "explain");
  if (problem.quant.accuracy == 0) return explain_validated(f);
  const Chosen chosen = with_chosen_recipe(problem);
  Explanation explanation = explain_validated(validate(chosen.problem, "explain"));
  explain_choice(chosen.choice, explanation);
  return explanation;
}

std::string Explanation::print() const {
  std::string text = fmt::format("problem    {}\n", problem);
  text += fmt::format("score      {}\n", score);
  text += fmt::format("mask       {}\n", mask);
  if (kernel.empty()) {
    text += "kernel     none\n";
  } else {
    text += fmt::format("kernel     {} on {}, {} products, {} sums\n", kernel, target,
                        compute_dtype, compute_dtype == "f64" ? "fp64" : "fp32");
    if (!kernel_source.empty()) text += fmt::format("from       {}\n", kernel_source);
    if (!tuning.empty()) text += fmt::format("tuning     {}\n", tuning);
    if (!sums.empty()) text += fmt::format("sums       {}\n", sums);
    if (!quant.empty()) text += fmt::format("quant      {}\n", quant);
    if (tile_q > 0) text += fmt::format("tile       {} queries x {} keys\n", tile_q, tile_kv);
    if (tiles) {
      const auto total = static_cast<double>(std::max<std::int64_t>(1, tiles->total()));
      text += fmt::format("tiles      {} empty (skipped, {:.1f} %), {} partial, {} full\n",
                          tiles->empty, 100.0 * static_cast<double>(tiles->empty) / total,
                          tiles->partial, tiles->full);
    } else if (tile_q > 0) {
      text += "tiles      not counted: too many, or decided by what a run reads; work is of all\n";
    }
    text += fmt::format("work       {:.4g} GFLOP, {:.4g} MB read and written; {}-bound\n",
                        flops * 1e-9, bytes * 1e-6, bound);
    text += fmt::format("workspace  {} bytes\n", workspace_bytes);
  }
  for (const Refused& r : refused)
    text += fmt::format("refused    {}: {}\n", r.candidate, r.reason);
  return text;
}

std::string Explanation::json() const {
  std::string text = fmt::format(
      R"({{"problem": {}, "kernel": {}, "target": {}, "compute_dtype": {}, "score": {}, "mask": {}, "tile_q": {}, "tile_kv": {}, )",
      quoted_json(problem), quoted_json(kernel), quoted_json(target), quoted_json(compute_dtype),
      quoted_json(score), quoted_json(mask), tile_q, tile_kv);
  if (!kernel_source.empty())
    text += fmt::format(R"("kernel_source": {}, )", quoted_json(kernel_source));
  if (!tuning.empty()) text += fmt::format(R"("tuning": {}, )", quoted_json(tuning));
  if (!sums.empty()) text += fmt::format(R"("sums": {}, )", quoted_json(sums));
  if (!quant.empty()) text += fmt::format(R"("quant": {}, )", quoted_json(quant));
  if (tiles) {
    text += fmt::format(R"("tiles": {{"empty": {}, "partial": {}, "full": {}}}, )", tiles->empty,
                        tiles->partial, tiles->full);
  }
  text +=
      fmt::format(R"("flops": {}, "bytes": {}, "bound": {}, "workspace_bytes": {}, "refused": [)",
                  flops, bytes, quoted_json(bound), workspace_bytes);
  for (std::size_t i = 0; i < refused.size(); ++i) {
    text += fmt::format(R"({}{{"candidate": {}, "reason": {}}})", i == 0 ? "" : ", ",
                        quoted_json(refused[i].candidate), quoted_json(refused[i].reason));
  }
  return text + "]}";
}

}  // namespace fovea
