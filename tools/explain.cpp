// fovea explain: what would run, and why.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "fovea/backward.hpp"

#include "attention_options.hpp"
#include "case_problems.hpp"
#include "command.hpp"
#include "command_line.hpp"
#include "cuda/jit/architecture.hpp"
#include "failure.hpp"
#include "files.hpp"
#include "plan/plan.hpp"
#include "problem/input_codes.hpp"
#include "shard_options.hpp"

namespace fovea::tools {
namespace {

constexpr const char* kAbout =
    "Shows the plan of a problem: kernel, tiles, work, workspace, and every kernel that was "
    "refused with its reason. Runs nothing.";

constexpr const char* kExamples =
    R"(Examples
  A problem given by its shapes:
    fovea explain --seqlen-q 4096 --num-heads-q 32 --num-heads-kv 8 --head-dim 128 --dtype bf16 --causal
  The problem that attend would run:
    fovea explain --q q.npy --k k.npy --v v.npy --mask-mod 'kv_idx % 4 == 0 || kv_idx <= q_idx'
  Why not that one?
    fovea explain --seqlen-q 1024 --target amx_bf16
  On a GPU; its gradients there:
    fovea explain --seqlen-q 4096 --head-dim 128 --dtype bf16 --causal --device cuda
    fovea explain --seqlen-q 4096 --head-dim 128 --dtype bf16 --causal --device cuda --backward
  On a GPU that is not here, by its architecture: neither GPU nor compiler is needed
    fovea explain --seqlen-q 4096 --head-dim 128 --causal --arch gfx942
  Over the ranks of a node: who holds and computes what, bytes and predicted times of each scheme
    fovea explain --seqlen-q 65536 --num-heads-q 64 --num-heads-kv 8 --head-dim 128 --dtype bf16 --causal --ranks 8

Exit codes: 0 something can run it; 2 bad input; 3 nothing here can (the reasons are printed).
)";

/// The plan over ranks, and what each scheme is predicted to cost.
struct Sharding {
  std::string text, json;
};

Sharding explain_ranks(const Problem& problem, const ShardingOptions& options) {
  const ShardPlan plan = context_parallel_plan(problem, *options.num_ranks, options.scheme);
  const auto forecasts = forecast_context_parallel(problem, *options.num_ranks, {}, options.speed);
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(plan.json());
  json["predicted"] = nlohmann::ordered_json::parse(json_forecasts(forecasts));
  return {"\n" + plan.print() + "\n" + print_forecasts(forecasts), json.dump()};
}

std::string joined_json(const Explanation& explanation, const Sharding& sharding) {
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(explanation.json());
  if (!sharding.json.empty())
    json["context_parallel"] = nlohmann::ordered_json::parse(sharding.json);
  return json.dump() + "\n";
}

Explanation explain_where(const Problem& problem, bool wants_backward,
                          const std::optional<std::string>& architecture) {
  if (!architecture) return wants_backward ? explain(gradients_of(problem)) : explain(problem);
  return wants_backward ? explain_for(gradients_of(problem), *architecture)
                        : explain_for(problem, *architecture);
}

/// Where --arch names a GPU, options are those of its kind.
void take_architecture(const std::optional<std::string>& architecture, AttentionOptions& options) {
  if (!architecture) return;
  const bool is_amd = cuda::jit::parse_architecture(*architecture, "--arch").is_amd();
  if (options.is_on_gpu())
    bad_input("--arch: names a GPU that is not here; expected none with --device");
  if (options.quant.accuracy > 0)
    bad_input(
        "--arch: beside --accuracy; expected --quant: which recipe is faster only the GPU knows");
  options.device = is_amd ? Device::rocm() : Device::cuda();
}

/// Refused where it would say nothing.
void refuse_compile_mode(const AttentionOptions& options,
                         const std::optional<std::string>& architecture) {
  if (architecture)
    bad_input(
        "--compile: beside --arch; expected one of them: who compiles is known where the GPU is");
  if (!options.is_on_gpu()) bad_input("--compile: is for GPUs; expected none with --device cpu");
}

}  // namespace

int run_explain(const std::vector<std::string>& words) {
  AttentionOptions options;
  ShardingOptions sharding;
  std::optional<std::string> architecture;
  bool wants_json = false, wants_backward = false;
  CompileMode compile_mode = CompileMode::automatic;
  CommandLine line("fovea explain", kAbout, kExamples);
  add_shape_options(line, options);
  add_file_options(line, options);
  add_score_options(line, options);
  add_mask_options(line, options);
  add_run_options(line, options);
  add_device_option(line, options.device);
  add_sm_margin_option(line, options.sm_margin);
  add_quant_option(line, options.quant);
  add_threads_option(line, options.threads);
  add_rank_options(line, sharding);
  add_speed_options(line, sharding);
  line.add(
      {"--arch", "NAME", "Run", "a typical GPU of this architecture instead: sm_90a, gfx942 ..."},
      [&](const std::string&, const std::string& text) { architecture = text; });
  line.add(
      {"--compile", "MODE", "Run",
       "complete: the plan is ready when its GPU kernels are compiled; staged: when one is that "
       "compiles sooner; default FOVEA_COMPILE, else complete"},
      [&](const std::string& option, const std::string& text) {
        const auto mode = parse_compile_mode(text);
        if (!mode)
          bad_input(fmt::format("{}: '{}'; expected auto, complete or staged", option, text));
        compile_mode = *mode;
      });
  line.add_flag({"--backward", "", "Gradients", "the plan of gradients of q, k, v and sinks"},
                wants_backward);
  line.add_flag({"--json", "", "Output", "print one JSON object"}, wants_json);
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;

  take_architecture(architecture, options);
  refuse_without_ranks(sharding);
  refuse_options_of_other_devices(options);
  if (compile_mode != CompileMode::automatic) refuse_compile_mode(options, architecture);
  OutputFiles files;
  const Inputs inputs = inputs_of(options, files);
  AttentionForward args = make_call(options, inputs);
  const TensorSpec out = out_spec(inputs, default_out_dtype(inputs.q.spec.dtype));
  args.out = as_bshd(TensorView(static_cast<void*>(nullptr), out), options.layout);
  Problem problem = problem_of(args);
  problem.num_threads = options.threads;
  problem.compile_mode = compile_mode;
  problem = on_device(problem, options.device);
  const Explanation explanation = explain_where(problem, wants_backward, architecture);
  const Sharding ranks = sharding.num_ranks ? explain_ranks(problem, sharding) : Sharding{};
  print_out(wants_json ? joined_json(explanation, ranks) : explanation.print() + ranks.text);
  if (explanation.kernel.empty()) throw Failure(kUnsupported, "nothing here can run this problem");
  return kSuccess;
}

}  // namespace fovea::tools
