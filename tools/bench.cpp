// fovea bench: how fast attention is here, as a fraction of what this machine can do.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <tuple>

#include "fovea/backward.hpp"
#include "fovea/kv_cache.hpp"

#include "bench_row.hpp"
#include "bound.hpp"
#include "command.hpp"
#include "command_line.hpp"
#include "core/shape.hpp"
#include "cpu/features.hpp"
#include "failure.hpp"
#include "files.hpp"
#include "gpu.hpp"
#include "gpu_bound.hpp"
#include "gradient_call.hpp"
#include "jobs.hpp"
#include "paged_call.hpp"
#include "progress.hpp"
#include "visible_work.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAbout =
    "Times attention: named cases, or one problem given by its shapes. Without --case and shapes, "
    "all named cases.";

constexpr const char* kExamples =
    R"(Examples
  What is there to run?
    fovea bench --list
  Two named cases, on one thread and on all:
    fovea bench --case gpt2_prefill --case llama_decode --threads 1,0
  Training: gradients alone; forward and backward together
    fovea bench --case backward_causal
    fovea bench --case gpt2_prefill --backward
  Eight bits beside sixteen
    fovea bench --seqlen-q 4096 --num-heads-q 8 --head-dim 128 --dtype bf16 --quant int8
  A problem of your own:
    fovea bench --batch 1 --seqlen-q 4096 --num-heads-q 8 --head-dim 128 --dtype bf16 --causal
  On a GPU:
    fovea bench --device cuda --case encoder_2k_bf16 --case paged_decode --case backward_causal
  Is it slower than it was?
    fovea bench --json before.json
    fovea bench --against before.json

What the columns mean
  median, min   of --runs runs, after one that warms up; spread: the middle half of the runs, relative to the median.
  GFLOP/s       2 * batch * num_heads_q * seqlen_q * seqlen_kv * (head_dim + head_dim_v) * visible share, as peers count,
                divided by the median. Cases of backward time gradients alone: five products where forward has two.
                --backward: forward and backward are timed together, seven products.
  bound         the larger of work / fp32 multiply-add rate and bytes / read bandwidth, both measured in this run with the
                same number of threads; the fraction is bound / median. bf16 products may pass 100 % of the fp32 rate.
  --device cuda times kernels by CUDA events, the L2 cache flushed before each run. The bound there: the rate of tensor cores
                whose operands are in place (fp32 multiply-adds for f32 inputs), and the bandwidth of a copy on the device.
  --device rocm does the same on AMD's, whose bounds are not measured.

Exit codes: 0 done; 1 --against found a loss beyond noise; 2 bad input; 3 not supported here.
)";

struct BenchOptions {
  JobOptions jobs;
  std::optional<std::string> against, json_file;
  std::vector<int> threads{0};
  std::int64_t runs = 10;
  bool wants_list = false, wants_json = false, wants_backward = false;

  bool prints_json() const { return wants_json && !json_file; }
};

void add_bench_options(CommandLine& line, BenchOptions& o) {
  constexpr const char* kGroup = "Benchmark";
  add_case_options(line, o.jobs, kGroup);
  line.add_flag({"--list", "", kGroup, "print the named cases and why they are there, run nothing"},
                o.wants_list);
  line.add_flag({"--backward", "", kGroup,
                 "time forward and backward together, as a step of training takes them"},
                o.wants_backward);
  line.add({"--threads", "N,N", kGroup, "numbers of threads to measure; 0: automatic (default 0)"},
           [&](const std::string& option, const std::string& text) {
             o.threads = parse_thread_counts(option, text);
           });
  line.add({"--runs", "N", kGroup,
            "timed runs of each (default 10; fewer where they take more than ten seconds)"},
           [&](const std::string& option, const std::string& text) {
             o.runs = parse_integer(option, text, {.least = 1, .most = 1'000'000});
           });
  line.add_with_optional_value(
      {"--json", "[FILE]", kGroup,
       "write one JSON object to this file, or print it where no file is named"},
      [&](const std::string&, const std::string& path) {
        o.wants_json = true;
        if (!path.empty()) o.json_file = path;
      });
  line.add({"--against", "FILE", kGroup,
            "compare with a run that --json kept; exit code 1 on a loss beyond noise"},
           [&](const std::string&, const std::string& path) { o.against = path; });
}

Times summarize(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const auto quantile = [&](double q) {
    return seconds[static_cast<std::size_t>(
        std::lround(q * static_cast<double>(seconds.size() - 1)))];
  };
  Times times{.median = quantile(0.5),
              .min = seconds.front(),
              .runs = static_cast<std::int64_t>(seconds.size())};
  times.spread = (quantile(0.75) - quantile(0.25)) / times.median;
  return times;
}

constexpr double kMaxSeconds = 10;
constexpr std::size_t kMinRuns = 3;

double seconds_of(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// All gradients; of training forward too, with lse.
Times time_gradients(const AttentionForward& forward, Timed timed, Row& row, std::int64_t runs) {
  GradientCall call(forward, nullptr);
  AttentionBackward& args = call.args;
  Problem problem = problem_of(forward);
  BackwardProblem backward_problem = problem_of(args);
  problem.num_threads = backward_problem.forward.num_threads = forward.executor->concurrency();
  const Plan plan = fovea::plan(problem);
  const BackwardPlan backward = plan_backward(backward_problem);
  const Buffer workspace = Buffer::uninitialized(plan.workspace_bytes());
  const Buffer backward_workspace = Buffer::uninitialized(backward.workspace_bytes());
  args.forward.workspace = workspace.bytes();
  args.workspace = backward_workspace.bytes();
  row.explanation = backward.explain();
  plan.run(args.forward);
  return time_runs(
      [&] {
        return seconds_of([&] {
          if (timed == Timed::training) plan.run(args.forward);
          backward.run(args);
        });
      },
      runs);
}

Times time_decode(const AttentionForward& forward, std::int64_t page_size, std::int64_t runs) {
  PagedCall call(forward, page_size, nullptr);
  AttentionDecode& args = call.args;
  const Buffer workspace = Buffer::uninitialized(decode_workspace_bytes(args, forward.k.size(1)));
  args.workspace = workspace.bytes();
  return time_runs([&] { return seconds_of([&] { attention_decode(args); }); }, runs);
}

Times time_forward(AttentionForward args, const Plan& plan, std::int64_t runs) {
  const Buffer workspace = Buffer::uninitialized(plan.workspace_bytes());
  args.workspace = workspace.bytes();
  return time_runs([&] { return seconds_of([&] { plan.run(args); }); }, runs);
}

Row run_job(const Job& job, Timed timed, Executor& executor, const Bounds& bounds,
            std::int64_t runs) {
  const Inputs inputs = job.make();
  AttentionForward args = make_call(job.options, inputs);
  const TensorSpec spec = out_spec(inputs, inputs.q.spec.dtype);
  const Array out = make_array(spec.dtype, shape_of(spec));
  args.out = as_bshd(out.mutable_view(), job.options.layout);
  args.executor = &executor;
  Problem problem = problem_of(args);
  problem.num_threads = executor.concurrency();
  const Plan plan = fovea::plan(problem);
  Row row{.name = row_name(job, timed),
          .why = job.why,
          .device = to_string(Device::cpu()),
          .threads = 0,
          .num_threads = executor.concurrency(),
          .explanation = plan.explain(),
          .work = {},
          .times = {},
          .bounds = bounds};
  const Array lse = make_array(Dtype::f32, shape_of(lse_spec(job.options, inputs)));
  if (timed != Timed::forward) args.lse = lse.mutable_view();
  row.work = work_of(timed, visible_work(args, row.explanation.tile_q, row.explanation.tile_kv));
  if (timed != Timed::forward) {
    row.times = time_gradients(args, timed, row, runs);
  } else if (job.page_size > 0) {
    row.times = time_decode(args, job.page_size, runs);
  } else {
    row.times = time_forward(args, plan, runs);
  }
  return row;
}

std::string_view bound_of(const Row& row) {
  if (!row.bounds.are_known()) return "unknown";
  return row.is_compute_bound() ? "compute" : "memory";
}

Json json_of(const Row& row) {
  const Explanation& e = row.explanation;
  Json json = {{"name", row.name},
               {"why", row.why},
               {"problem", e.problem},
               {"kernel", e.kernel},
               {"target", e.target},
               {"device", row.device},
               {"compute_dtype", e.compute_dtype},
               {"threads", row.threads},
               {"num_threads", row.num_threads},
               {"runs", row.times.runs},
               {"median_ms", row.times.median * 1e3},
               {"min_ms", row.times.min * 1e3},
               {"spread", row.times.spread},
               {"flops", row.work.flops},
               {"bytes", row.work.bytes},
               {"visible_share", row.work.share},
               {"gflops_per_second", row.gflops_per_second()},
               {"bound", bound_of(row)}};
  if (!row.bounds.are_known()) return json;
  json[fmt::format("bound_{}_gflops_per_second", row.bounds.compute)] = row.bounds.compute_gflops;
  json[fmt::format("bound_{}_gigabytes_per_second", row.bounds.memory)] =
      row.bounds.memory_gigabytes;
  json["fraction_of_bound"] = row.fraction();
  return json;
}

constexpr std::string_view kHeader =
    "case                         threads target         median ms      min ms  spread   GFLOP/s  "
    "bound    fraction\n";

std::string print(const Row& row) {
  const std::string fraction =
      row.bounds.are_known() ? fmt::format("{:.1f}%", row.fraction() * 100) : "-";
  return fmt::format("{:<28} {:>7} {:<12} {:>11.3f} {:>11.3f} {:>6.1f}% {:>9.1f}  {:<8} {:>7}\n",
                     row.name, row.num_threads > 0 ? fmt::to_string(row.num_threads) : "-",
                     row.explanation.target, row.times.median * 1e3, row.times.min * 1e3,
                     row.times.spread * 100, row.gflops_per_second(), bound_of(row), fraction);
}

/// What a kept run says of one row.
struct Kept {
  double fraction = 0, spread = 0;
  std::string problem;  // "" where it does not say
};
/// By case, device and threads.
using KeptRun = std::map<std::tuple<std::string, std::string, int>, Kept>;

KeptRun read_kept(const std::string& path) {
  const auto file = read_file("--against", path);
  const char* text = reinterpret_cast<const char*>(file->data());
  const nlohmann::json root = nlohmann::json::parse(text, text + file->size(), nullptr, false);
  const auto malformed = [&] {
    bad_input(fmt::format("--against: {} is not a run that --json kept", path));
  };
  if (!root.is_object() || !root.contains("rows") || !root["rows"].is_array()) malformed();
  KeptRun run;
  for (const auto& row : root["rows"]) {
    const auto is_number = [&](const char* key) {
      return row.contains(key) && row[key].is_number();
    };
    const auto text_of = [&](const char* key, const std::string& otherwise) {
      if (!row.contains(key)) return otherwise;
      if (!row[key].is_string()) malformed();
      return row[key].get<std::string>();
    };
    if (!row.is_object() || !row.contains("name") || !is_number("threads") ||
        !is_number("fraction_of_bound") || !is_number("spread")) {
      malformed();
    }
    run[{text_of("name", ""), text_of("device", "cpu"), row["threads"].get<int>()}] = {
        .fraction = row["fraction_of_bound"].get<double>(),
        .spread = row["spread"].get<double>(),
        .problem = text_of("problem", "")};
  }
  return run;
}

/// A fraction of the bound, not a time: both runs are measured beside their own machine's bound, so its mood cancels.
struct Comparison {
  std::string name;
  int threads = 0;
  double before = 0, after = 0, noise = 0;
  bool is_loss() const { return after < before * (1 - noise); }
};

constexpr double kLeastNoise = 0.05;

std::vector<Comparison> compare(const std::vector<Row>& rows, const KeptRun& kept) {
  std::vector<Comparison> comparisons;
  for (const Row& row : rows) {
    const auto found = kept.find({row.name, row.device, row.threads});
    if (found == kept.end()) continue;
    const std::string& problem = found->second.problem;
    if (!problem.empty() && problem != row.explanation.problem) {
      bad_input(fmt::format("--against: '{}' is kept of another problem, {}; expected {}", row.name,
                            problem, row.explanation.problem));
    }
    comparisons.push_back(
        {.name = row.name,
         .threads = row.threads,
         .before = found->second.fraction,
         .after = row.fraction(),
         .noise = std::max(kLeastNoise, row.times.spread + found->second.spread)});
  }
  return comparisons;
}

std::string print(const Comparison& c) {
  return fmt::format(
      "{:<28} {:>7}: {:.1f} % of the bound, was {:.1f} % ({:+.1f} %, noise {:.1f} %){}\n", c.name,
      c.threads, c.after * 100, c.before * 100, (c.after / c.before - 1) * 100, c.noise * 100,
      c.is_loss() ? "  LOSS" : "");
}

void refuse_disjoint(const KeptRun& kept, const std::vector<Job>& jobs,
                     const BenchOptions& options) {
  for (const Job& job : jobs) {
    for (const int threads : options.threads) {
      if (kept.contains({row_name(job, timed_of(job, options.wants_backward)),
                         to_string(options.jobs.attention.device), threads})) {
        return;
      }
    }
  }
  bad_input("--against: holds none of these cases with these --threads");
}

std::vector<Row> run_jobs_on_gpu(const std::vector<Job>& jobs, const BenchOptions& options) {
  const Gpu gpu(options.jobs.attention.device);
  Progress progress("fovea bench: measuring the GPU");
  std::vector<Row> rows;
  if (!options.prints_json()) print_out(std::string(kHeader));
  const GpuBounds bounds = measure_bounds(gpu);
  for (const Job& job : jobs) {
    progress.set(fmt::format("fovea bench: {} on {}", job.name, gpu.describe()));
    rows.push_back(
        run_on_gpu(job, timed_of(job, options.wants_backward), gpu, bounds, options.runs));
    if (!options.prints_json()) print_out(print(rows.back()));
  }
  return rows;
}

std::vector<Row> run_jobs(const std::vector<Job>& jobs, const BenchOptions& options) {
  if (options.jobs.attention.is_on_gpu()) return run_jobs_on_gpu(jobs, options);
  Progress progress("fovea bench: measuring the machine");
  std::vector<Row> rows;
  if (!options.prints_json()) print_out(std::string(kHeader));
  for (const int threads : options.threads) {
    const std::unique_ptr<Executor> executor = make_thread_pool(threads);
    const Bounds bounds = measure_bounds(*executor);
    for (const Job& job : jobs) {
      progress.set(fmt::format("fovea bench: {} on {} threads", job.name, executor->concurrency()));
      rows.push_back(
          run_job(job, timed_of(job, options.wants_backward), *executor, bounds, options.runs));
      rows.back().threads = threads;
      if (!options.prints_json()) print_out(print(rows.back()));
    }
  }
  return rows;
}

/// Behind each call over tensors the same by a recipe.
std::vector<Job> with_recipe(const std::vector<Job>& jobs, const BenchOptions& options) {
  const Quantization& quant = options.jobs.attention.quant;
  if (quant.is_none()) return jobs;
  if (quant.scales == ScaleSource::given)
    bad_input("--quant: has scales=given, and these calls give none; expected scales=measured");
  std::vector<Job> both;
  for (const Job& job : jobs) {
    both.push_back(job);
    both.back().options.quant = {};
    if (job.page_size > 0) continue;
    both.push_back(job);
    both.back().options.quant = quant;
  }
  if (both.size() == jobs.size())
    bad_input("--quant: these cases read a cache, which is not rounded; expected tensors");
  return both;
}

int list_cases(const std::vector<Case>& cases) {
  std::string text;
  for (const Case& problem : cases) text += fmt::format("{:<28} {}\n", problem.name, problem.why);
  print_out(text);
  return kSuccess;
}

void refuse_on_gpu(const BenchOptions& options) {
  refuse_options_of_other_devices(options.jobs.attention);
  if (!options.jobs.attention.is_on_gpu()) return;
  if (options.threads != std::vector{0})
    bad_input("--threads: is for the cpu; expected none with --device cuda");
  if (options.against && options.jobs.attention.device.kind == Device::Kind::rocm) {
    bad_input(
        "--against: compares fractions of a bound, and none is known of GPUs of AMD; expected "
        "a run on the cpu or on cuda");
  }
}

int bench(const BenchOptions& options) {
  refuse_on_gpu(options);
  const std::vector<Case> cases = read_cases(options.jobs);
  if (options.wants_list) return list_cases(cases);
  OutputFiles files;
  if (options.json_file) files.add("--json", *options.json_file);
  const std::vector<Job> jobs =
      with_recipe(options.wants_backward ? choose_gradient_jobs(options.jobs, cases)
                                         : choose_jobs(options.jobs, cases),
                  options);
  KeptRun kept;
  if (options.against) {
    kept = read_kept(*options.against);
    refuse_disjoint(kept, jobs, options);
  }
  const std::vector<Row> rows = run_jobs(jobs, options);
  const std::vector<Comparison> comparisons = compare(rows, kept);
  const auto losses = std::count_if(comparisons.begin(), comparisons.end(),
                                    [](const Comparison& c) { return c.is_loss(); });

  Json json = {{"command", "bench"},
               {"fovea", version()},
               {"processor", cpu::processor_name()},
               {"rows", Json::array()}};
  for (const Row& row : rows) json["rows"].push_back(json_of(row));
  for (const Comparison& c : comparisons) {
    json["against"].push_back({{"name", c.name},
                               {"threads", c.threads},
                               {"before", c.before},
                               {"after", c.after},
                               {"noise", c.noise},
                               {"is_loss", c.is_loss()}});
    if (!options.prints_json()) print_out(print(c));
  }
  const std::string text = json.dump(options.json_file ? 1 : -1) + "\n";
  if (options.json_file) OutputFiles::write({{*options.json_file, text, {}}});
  if (options.prints_json()) print_out(text);
  if (losses > 0)
    throw Failure(kFailed, fmt::format("--against: {} of {} cases lost beyond noise", losses,
                                       comparisons.size()));
  return kSuccess;
}

}  // namespace

Timed timed_of(const Job& job, bool wants_training) {
  if (wants_training) return Timed::training;
  return job.is_backward ? Timed::backward : Timed::forward;
}

std::string row_name(const Job& job, Timed timed) {
  const Quantization& quant = job.options.quant;
  return job.name + (timed == Timed::training ? "+backward" : "") +
         (quant.is_none() ? "" : " " + fovea::print(quant));
}

VisibleWork work_of(Timed timed, VisibleWork work) {
  if (timed == Timed::forward) return work;
  const bool has_forward = timed == Timed::training;
  work.flops = work.backward_flops + (has_forward ? work.flops : 0);
  work.bytes = work.backward_bytes + (has_forward ? work.bytes : 0);
  return work;
}

Times time_runs(const std::function<double()>& run, std::int64_t runs) {
  run();
  std::vector<double> seconds;
  double total = 0;
  while (static_cast<std::int64_t>(seconds.size()) < runs &&
         (total < kMaxSeconds || seconds.size() < kMinRuns)) {
    seconds.push_back(run());
    total += seconds.back();
  }
  return summarize(std::move(seconds));
}

int run_bench(const std::vector<std::string>& words) {
  BenchOptions options;
  CommandLine line("fovea bench", kAbout, kExamples);
  add_bench_options(line, options);
  add_problem_options(line, options.jobs.attention);
  add_quant_option(line, options.jobs.attention.quant);
  add_device_option(line, options.jobs.attention.device);
  add_sm_margin_option(line, options.jobs.attention.sm_margin);
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;
  return bench(options);
}

}  // namespace fovea::tools
