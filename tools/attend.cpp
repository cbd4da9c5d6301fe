// fovea attend: attention of tensors in files.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "attention_options.hpp"
#include "check.hpp"
#include "command.hpp"
#include "command_line.hpp"
#include "core/shape.hpp"
#include "failure.hpp"
#include "files.hpp"
#include "gpu.hpp"
#include "gradients.hpp"
#include "problem/forward.hpp"
#include "problem/input_codes.hpp"
#include "progress.hpp"
#include "safetensors.hpp"
#include "visible_work.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAbout =
    "Computes softmax(scale * q k^T) v for tensors in files, with any score and mask program.";

constexpr const char* kExamples =
    R"(Examples
  Causal attention of three NumPy files, and the log of each row's denominator:
    fovea attend --q q.npy --k k.npy --v v.npy --causal --out out.npy --lse lse.npy
  One .safetensors file in, one out; is the result right?
    fovea attend --input qkv.safetensors --out out.safetensors --check
  A formula of your own, with a table that it reads:
    fovea attend --q q.npy --k k.npy --v v.npy --out out.npy \
      --score-mod 'score - slopes[q_head] * abs(q_idx - kv_idx)' --tensor slopes=slopes.npy
  Two packed sequences that see 256 keys to the left:
    fovea attend --q q.npy --k k.npy --v v.npy --layout thd \
      --cu-seqlens-q c.npy --cu-seqlens-kv c.npy --causal --window 256,0 --out out.npy
  Codes of e4m3, whose file holds q_scale, k_scale and v_scale too:
    fovea attend --input codes.safetensors --quant fp8_static --out out.safetensors --check
  The same on a GPU:
    fovea attend --input qkv.safetensors --device cuda --out out.safetensors --check
  Gradients, that of a learnable bias among them:
    fovea attend --q q.npy --k k.npy --v v.npy --bias bias.npy --backward --dout dout.npy \
      --dq dq.npy --dk dk.npy --dv dv.npy --grad bias=dbias.npy

Shapes: q [batch, seqlen_q, num_heads_q, head_dim]; k, v [batch, seqlen_kv, num_heads_kv, head_dim]; the number of
query heads is a multiple of the number of key heads. Programs may read score, batch, q_head, kv_head, q_idx, kv_idx,
seqlen_q, seqlen_kv, and what --tensor and --scalar name.

Exit codes: 0 done; 1 ran, but --check failed or writing did; 2 bad input; 3 not supported here.
)";

struct AttendOptions {
  AttentionOptions attention;
  GradientOptions gradients;
  std::optional<std::string> out, lse;
  std::optional<Dtype> out_dtype;
  bool wants_check = false, wants_json = false;
};

void add_output_options(CommandLine& line, AttendOptions& options) {
  constexpr const char* kGroup = "Output";
  line.add({"--out", "FILE", kGroup,
            "write the result: .npy, or .safetensors with tensors out and lse. Without it nothing "
            "is written"},
           [&](const std::string&, const std::string& path) { options.out = path; });
  line.add({"--lse", "FILE", kGroup,
            "write log(sum(exp(score))) of each row, f32, .npy; -inf where a row sees no key"},
           [&](const std::string&, const std::string& path) { options.lse = path; });
  line.add({"--out-dtype", "NAME", kGroup,
            "f32, f16 or bf16 (default: that of q; bf16 where it is e4m3)"},
           [&](const std::string& option, const std::string& text) {
             options.out_dtype = parse_float_dtype(option, text);
           });
  add_threads_option(line, options.attention.threads);
  line.add_flag({"--check", "", kGroup,
                 "compare with attention in fp64 (slow: every score one by one); exit code 1 "
                 "beyond the tolerance"},
                options.wants_check);
  line.add_flag({"--json", "", kGroup, "print one JSON object"}, options.wants_json);
}

bool is_safetensors(const std::string& path) { return path.ends_with(".safetensors"); }

void add_outputs(const AttendOptions& options, OutputFiles& files) {
  if (options.out) {
    if (!options.out->ends_with(".npy") && !is_safetensors(*options.out)) {
      bad_input(fmt::format("--out: got '{}'; expected a name that ends in .npy or .safetensors",
                            *options.out));
    }
    files.add("--out", *options.out);
  }
  if (options.lse) {
    if (!options.lse->ends_with(".npy")) {
      bad_input(fmt::format("--lse: got '{}'; expected a name that ends in .npy", *options.lse));
    }
    files.add("--lse", *options.lse);
  }
}

void write_outputs(const AttendOptions& options, const Array& out, const Array& lse,
                   const Gradients& gradients) {
  std::vector<OutputFiles::Content> contents;
  if (options.out && is_safetensors(*options.out)) {
    contents.push_back({*options.out,
                        safetensors_header({{"out", out.spec}, {"lse", lse.spec}}),
                        {bytes_of(out), bytes_of(lse)}});
  } else if (options.out) {
    contents.push_back({*options.out, npy_header(out.spec), {bytes_of(out)}});
  }
  if (options.lse) contents.push_back({*options.lse, npy_header(lse.spec), {bytes_of(lse)}});
  for (const NamedGradient& each : named(gradients, options.gradients)) {
    if (each.path)
      contents.push_back({*each.path, npy_header(each.array.spec), {bytes_of(each.array)}});
  }
  OutputFiles::write(contents);
}

struct BackwardReport {
  Explanation explanation;
  double milliseconds = 0;
};

/// All that a run reports.
struct Report {
  Explanation explanation;
  VisibleWork work;
  int num_threads = 0;  // on the cpu
  std::string gpu;      // else its name
  double milliseconds = 0;
  std::optional<BackwardReport> backward;
  std::optional<CheckResult> check;

  double gflops_per_second() const { return work.flops / (milliseconds * 1e6); }
  double backward_gflops_per_second() const {
    return work.backward_flops / (backward->milliseconds * 1e6);
  }
  double skipped_share() const {
    return work.tiles.total() == 0
               ? 0
               : static_cast<double>(work.tiles.empty) / static_cast<double>(work.tiles.total());
  }
};

std::string print(const Difference& difference, std::string_view name) {
  std::string text = fmt::format(
      "check      {}: max error {:.3g} (allowed {:.3g}), relative L2 {:.3g} (allowed {:.3g}): {}\n",
      name, difference.max_error, difference.allowed, difference.relative_l2,
      difference.allowed_relative_l2,
      difference.passes() ? "right" : fmt::format("WRONG, {} elements", difference.num_wrong));
  if (difference.num_beyond_f32 > 0) {
    text += fmt::format(
        "beyond f32 {}: {} elements are finite in fp64, but their scores or sums leave the range "
        "of f32\n",
        name, difference.num_beyond_f32);
  }
  return text;
}

std::string print(const Report& report, const AttendOptions& options, const Array& out,
                  const Gradients& gradients) {
  const Explanation& e = report.explanation;
  std::string text =
      fmt::format("ran        {} on {}, {} products, {}\n", e.kernel, e.target, e.compute_dtype,
                  report.gpu.empty() ? fmt::format("{} threads", report.num_threads) : report.gpu);
  for (const auto& refused : e.refused)
    text += fmt::format("not        {}: {}\n", refused.candidate, refused.reason);
  text += fmt::format("problem    {}\nscore      {}\nmask       {}\n", e.problem, e.score, e.mask);
  text += fmt::format("time       {:.3f} ms, {:.1f} GFLOP/s of visible work\n", report.milliseconds,
                      report.gflops_per_second());
  text +=
      fmt::format("tiles      {} of {} skipped ({:.1f} %), {} partial, {} full, each {} x {}\n",
                  report.work.tiles.empty, report.work.tiles.total(), 100 * report.skipped_share(),
                  report.work.tiles.partial, report.work.tiles.full, e.tile_q, e.tile_kv);
  text += fmt::format("workspace  {} bytes\n", e.workspace_bytes);
  if (report.backward) {
    text += fmt::format("backward   {} on {}: {:.3f} ms, {:.1f} GFLOP/s\n",
                        report.backward->explanation.kernel, report.backward->explanation.target,
                        report.backward->milliseconds, report.backward_gflops_per_second());
  }
  if (report.check) {
    text += print(report.check->out, "out") + print(report.check->lse, "lse");
    for (const auto& [name, difference] : report.check->gradients) text += print(difference, name);
  }
  if (options.out) text += fmt::format("wrote      {}: {}\n", *options.out, to_string(out.spec));
  if (options.lse) text += fmt::format("wrote      {}: lse\n", *options.lse);
  for (const NamedGradient& each : named(gradients, options.gradients)) {
    if (each.path)
      text += fmt::format("wrote      {}: {}\n", *each.path, to_string(each.array.spec));
  }
  return text;
}

Json json_of(const Difference& difference) {
  return {{"max_error", difference.max_error},
          {"allowed", difference.allowed},
          {"relative_l2", difference.relative_l2},
          {"allowed_relative_l2", difference.allowed_relative_l2},
          {"num_wrong", difference.num_wrong},
          {"num_beyond_f32", difference.num_beyond_f32},
          {"passes", difference.passes()}};
}

Json json_of(const Report& report, const AttendOptions& options) {
  Json json = {{"command", "attend"},
               {"explanation", Json::parse(report.explanation.json())},
               {"num_threads", report.num_threads},
               {"gpu", report.gpu.empty() ? Json() : Json(report.gpu)},
               {"time_ms", report.milliseconds},
               {"flops", report.work.flops},
               {"gflops_per_second", report.gflops_per_second()},
               {"visible_share", report.work.share},
               {"tiles",
                {{"empty", report.work.tiles.empty},
                 {"partial", report.work.tiles.partial},
                 {"full", report.work.tiles.full}}},
               {"tiles_skipped_share", report.skipped_share()}};
  if (report.check) {
    json["check"] = {{"passes", report.check->passes()},
                     {"out", json_of(report.check->out)},
                     {"lse", json_of(report.check->lse)}};
    for (const auto& [name, difference] : report.check->gradients)
      json["check"][name] = json_of(difference);
  }
  if (report.backward) {
    json["backward"] = {{"explanation", Json::parse(report.backward->explanation.json())},
                        {"time_ms", report.backward->milliseconds},
                        {"flops", report.work.backward_flops},
                        {"gflops_per_second", report.backward_gflops_per_second()}};
  }
  if (options.out) json["out"] = *options.out;
  if (options.lse) json["lse"] = *options.lse;
  for (const auto& [name, path] : {std::pair{"dq", &options.gradients.dq},
                                   {"dk", &options.gradients.dk},
                                   {"dv", &options.gradients.dv}}) {
    if (*path) json[name] = **path;
  }
  for (const auto& [name, path] : options.gradients.others) json["grad"][name] = path;
  return json;
}

/// Plans and runs; the time is that of the run alone.
Report run(AttentionForward& args, int num_threads) {
  const std::unique_ptr<Executor> executor = make_thread_pool(num_threads);
  args.executor = executor.get();
  Problem problem = problem_of(args);
  problem.num_threads = executor->concurrency();
  const Plan plan = fovea::plan(problem);
  const Buffer workspace = Buffer::uninitialized(plan.workspace_bytes());
  args.workspace = workspace.bytes();
  // The pool starts its threads at its first task: that is no part of attention.
  executor->run(executor->concurrency(), {[](void*, int, std::int64_t) {}, nullptr});
  const auto begin = std::chrono::steady_clock::now();
  plan.run(args);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  args.executor = nullptr;
  args.workspace = {};
  Report report{.explanation = plan.explain(),
                .work = {},
                .num_threads = problem.num_threads,
                .gpu = {},
                .milliseconds = time.count(),
                .backward = {},
                .check = {}};
  report.work = visible_work(args, report.explanation.tile_q, report.explanation.tile_kv);
  return report;
}

/// What a call reads and writes, on the host.
struct HostCall {
  const AttentionOptions& options;
  const Inputs& inputs;
  const AttentionForward& args;
  const Array& out;
  const Array& lse;
};

/// The same on a GPU, where tensors travel to and from; the time is that of its kernels in a second run, since the
/// first loads them. What files hold is refused as a call on the host would, before a device is asked for: there nobody
/// looks.
Report run_on_gpu(const HostCall& host) {
  constexpr std::string_view kWhere = "attention_forward";
  validate_arguments(validate(problem_of(host.args), kWhere), host.args, kWhere);
  const Gpu gpu(host.options.device);
  const Inputs inputs = gpu.copy(host.inputs);
  const Array out = gpu.copy(host.out);
  const Array lse = gpu.copy(host.lse);
  AttentionForward args = make_call(host.options, inputs);
  args.out = as_bshd(out.mutable_view(), host.options.layout);
  args.lse = lse.mutable_view();
  args.stream = gpu.stream_handle();
  const Plan plan = fovea::plan(problem_of(args));
  const cuda::driver::DeviceMemory workspace(gpu.context(), plan.workspace_bytes());
  args.workspace = {static_cast<std::byte*>(workspace.data()), workspace.bytes()};
  plan.run(args);
  const double milliseconds = gpu.milliseconds([&] { plan.run(args); });
  gpu.copy_back(out, host.out);
  gpu.copy_back(lse, host.lse);
  Report report{.explanation = plan.explain(),
                .work = {},
                .num_threads = 0,
                .gpu = gpu.context().info().name,
                .milliseconds = milliseconds,
                .backward = {},
                .check = {}};
  report.work = visible_work(host.args, report.explanation.tile_q, report.explanation.tile_kv);
  return report;
}

BackwardReport run_backward(AttentionBackward args, int num_threads) {
  const std::unique_ptr<Executor> executor = make_thread_pool(num_threads);
  args.executor = executor.get();
  BackwardProblem problem = problem_of(args);
  problem.forward.num_threads = executor->concurrency();
  const BackwardPlan plan = plan_backward(problem);
  const Buffer workspace = Buffer::uninitialized(plan.workspace_bytes());
  args.workspace = workspace.bytes();
  executor->run(executor->concurrency(), {[](void*, int, std::int64_t) {}, nullptr});
  const auto begin = std::chrono::steady_clock::now();
  plan.run(args);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  return {.explanation = plan.explain(), .milliseconds = time.count()};
}

/// The same on a GPU, after the forward call there; timed as that.
BackwardReport run_backward_on_gpu(const HostCall& host, const Gradients& gradients,
                                   const GradientOptions& options) {
  const Gpu gpu(host.options.device);
  const Inputs inputs = gpu.copy(host.inputs);
  const Array out = gpu.copy(host.out);
  const Array lse = gpu.copy(host.lse);
  Gradients there = gradients;
  Array* const arrays[] = {&there.dout, &there.dlse, &there.dq,
                           &there.dk,   &there.dv,   &there.dsinks};
  for (Array* array : arrays)
    if (*array) *array = gpu.copy(*array);
  for (Gradients::Captured& captured : there.captured) captured.array = gpu.copy(captured.array);
  AttentionForward forward = make_call(host.options, inputs);
  forward.out = as_bshd(out.mutable_view(), host.options.layout);
  forward.lse = lse.mutable_view();
  AttentionBackward args = make_backward(there, forward, host.options.layout);
  args.stream = gpu.stream_handle();
  const BackwardPlan plan = plan_backward(problem_of(args));
  const cuda::driver::DeviceMemory workspace(gpu.context(), plan.workspace_bytes());
  args.workspace = {static_cast<std::byte*>(workspace.data()), workspace.bytes()};
  plan.run(args);
  const double milliseconds = gpu.milliseconds([&] { plan.run(args); });
  const std::vector<NamedGradient> from = named(there, options), to = named(gradients, options);
  for (std::size_t i = 0; i < to.size(); ++i) gpu.copy_back(from[i].array, to[i].array);
  return {.explanation = plan.explain(), .milliseconds = milliseconds};
}

/// What a pipe of programs has renamed.
void name_as_user_does(const Gradients& gradients, CheckResult& check) {
  for (auto& [name, difference] : check.gradients) {
    const auto found = std::ranges::find(gradients.captured, name, &Gradients::Captured::slot);
    if (found != gradients.captured.end()) name = found->name;
  }
}

/// Products of f16, which GPUs have, are held to what is allowed to those of bf16; AMX has f32 products as sums of bf16
/// parts.
reference::Products products_of(const Explanation& explanation) {
  if (explanation.compute_dtype.find("16") != std::string::npos) return ComputeDtype::bf16;
  return {ComputeDtype::f32, explanation.target == name(CpuTarget::amx_bf16)};
}

int attend(const AttendOptions& options) {
  refuse_options_of_other_devices(options.attention);
  OutputFiles files;
  add_outputs(options, files);
  const Inputs inputs = load_inputs(options.attention, files);
  AttentionForward args = make_call(options.attention, inputs);
  const Gradients gradients =
      load_gradients(options.gradients, options.attention, inputs, args.score, files);
  files.refuse_clashes();

  const bool wants_scales = args.quant.scales == ScaleSource::given;
  if (wants_scales && !(args.q_scale && args.k_scale && args.v_scale)) {
    bad_input(
        fmt::format("--quant: {} wants scales; expected q_scale, k_scale and v_scale in --input, "
                    "f32 [batch, num_heads_kv]",
                    fovea::print(args.quant)));
  }
  const Dtype out_dtype = options.out_dtype.value_or(default_out_dtype(inputs.q.spec.dtype));
  const TensorSpec out_shape = out_spec(inputs, out_dtype);
  const TensorSpec lse_shape = lse_spec(options.attention, inputs);
  args.out = as_bshd(TensorView(static_cast<void*>(nullptr), out_shape), options.attention.layout);
  static_cast<void>(
      explain(problem_of(args)));  // refuses wrong shapes before memory is taken for them
  const Array out = make_array(out_shape.dtype, shape_of(out_shape));
  const Array lse = make_array(Dtype::f32, shape_of(lse_shape));
  args.out = as_bshd(out.mutable_view(), options.attention.layout);
  args.lse = lse.mutable_view();

  Progress progress("fovea attend: computing");
  Report report = options.attention.is_on_gpu()
                      ? run_on_gpu({options.attention, inputs, args, out, lse})
                      : run(args, options.attention.threads);
  AttentionBackward backward;
  if (options.gradients.is_wanted) {
    backward = make_backward(gradients, args, options.attention.layout);
    report.backward = options.attention.is_on_gpu()
                          ? run_backward_on_gpu({options.attention, inputs, args, out, lse},
                                                gradients, options.gradients)
                          : run_backward(backward, options.attention.threads);
  }
  if (options.wants_check) {
    progress.set("fovea attend: comparing with fp64");
    report.check = check_forward(args, products_of(report.explanation));
    if (report.backward) {
      report.check->gradients = check_backward(backward, products_of(report.backward->explanation));
      name_as_user_does(gradients, *report.check);
    }
  }
  progress.set("fovea attend: writing");
  write_outputs(options, out, lse, gradients);
  print_out(options.wants_json ? json_of(report, options).dump() + "\n"
                               : print(report, options, out, gradients));
  if (!report.check || report.check->passes()) return kSuccess;
  throw Failure(
      kFailed, fmt::format("--check: the result differs from fp64 attention by more than allowed{}",
                           report.check->num_beyond_f32() > 0
                               ? "; scores or sums leave the range of f32, in which it is computed"
                               : ""));
}

}  // namespace

int run_attend(const std::vector<std::string>& words) {
  AttendOptions options;
  CommandLine line("fovea attend", kAbout, kExamples);
  add_file_options(line, options.attention);
  add_score_options(line, options.attention);
  add_mask_options(line, options.attention);
  add_gradient_options(line, options.gradients);
  add_run_options(line, options.attention);
  add_device_option(line, options.attention.device);
  add_sm_margin_option(line, options.attention.sm_margin);
  add_quant_option(line, options.attention.quant);
  add_output_options(line, options);
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;
  return attend(options);
}

}  // namespace fovea::tools
