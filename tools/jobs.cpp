#include "jobs.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "command_line.hpp"
#include "failure.hpp"
#include "files.hpp"

namespace fovea::tools {
namespace {

Job job_of_case(const Case& problem) {
  if (problem.shared_prefix > 0 || problem.is_cached || problem.codes) {
    bad_input(fmt::format("case '{}' has {}, which fovea pack alone takes; expected none",
                          problem.name,
                          problem.codes       ? "a cache of codes"
                          : problem.is_cached ? "a contiguous cache"
                                              : "a shared_prefix"));
  }
  return {problem.name,      problem.why,
          problem.options,   [problem] { return make_inputs(problem); },
          problem.page_size, problem.is_backward};
}

Job job_of_shapes(const AttentionOptions& options) {
  return {"given shapes", "", options,
          [options] {
            OutputFiles files;
            Inputs inputs = inputs_of_shapes(options, files);
            fill_random(inputs);
            return inputs;
          },
          0};
}

/// Options that a case has itself; target, compute dtype and threads may be said beside any case.
bool describes_problem(const AttentionOptions& o) {
  return o.names_shapes() || o.dtype || o.softmax_scale || o.softcap || o.bias || o.alibi ||
         o.score_mod || o.sinks || o.is_causal || o.window || o.segments_q || o.segments_kv ||
         o.mask || o.mask_mod || o.dropout.p > 0;
}

}  // namespace

void add_case_options(CommandLine& line, JobOptions& options, const std::string& group) {
  line.add_repeated(
      {"--case", "NAME", group, "a named case; may be repeated"},
      [&](const std::string&, const std::string& name) { options.case_names.push_back(name); });
  line.add(
      {"--cases", "FILE", group, "take named cases from this file instead of the built-in ones"},
      [&](const std::string&, const std::string& path) { options.case_file = path; });
}

void add_problem_options(CommandLine& line, AttentionOptions& options) {
  add_shape_options(line, options);
  line.add({"--dtype", "NAME", "Input", "f32 (default), f16 or bf16"},
           [&](const std::string& option, const std::string& text) {
             options.dtype = parse_float_dtype(option, text);
           });
  add_score_options(line, options);
  add_mask_options(line, options);
  add_run_options(line, options);
}

std::vector<Case> read_cases(const JobOptions& options) {
  if (!options.case_file) return built_in_cases();
  const auto file = read_file("--cases", *options.case_file);
  return parse_cases({reinterpret_cast<const char*>(file->data()), file->size()},
                     *options.case_file);
}

std::vector<Job> choose_jobs(const JobOptions& options, const std::vector<Case>& cases) {
  if (describes_problem(options.attention)) {
    if (!options.case_names.empty() || options.case_file) {
      bad_input("--case: stands beside shapes or features; expected one or the other");
    }
    return {job_of_shapes(options.attention)};
  }
  std::vector<Job> jobs;
  const auto add = [&](const Case& problem) {
    Job job = job_of_case(problem);
    job.options.target = options.attention.target;
    job.options.compute_dtype = options.attention.compute_dtype;
    job.options.sm_margin = options.attention.sm_margin;
    if (options.attention.is_deterministic)
      job.options.is_deterministic = options.attention.is_deterministic;
    jobs.push_back(std::move(job));
  };
  for (const std::string& name : options.case_names) {
    const auto found =
        std::find_if(cases.begin(), cases.end(), [&](const Case& c) { return c.name == name; });
    if (found == cases.end())
      bad_input(fmt::format("--case: unknown case '{}'; see fovea bench --list", name));
    add(*found);
  }
  if (options.case_names.empty()) {
    for (const Case& problem : cases) add(problem);
  }
  return jobs;
}

std::vector<Job> choose_gradient_jobs(const JobOptions& options, const std::vector<Case>& cases) {
  std::vector<Job> jobs = choose_jobs(options, cases);
  const auto reads_cache = [](const Job& job) { return job.page_size > 0; };
  const auto found = std::ranges::find_if(jobs, reads_cache);
  if (!options.case_names.empty() && found != jobs.end()) {
    bad_input(
        fmt::format("--backward: case '{}' reads a cache, which has no gradients", found->name));
  }
  std::erase_if(jobs, reads_cache);
  return jobs;
}

}  // namespace fovea::tools
