#include "jobs.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "failure.hpp"
#include "files.hpp"

namespace fovea::tools {
namespace {

Job job_of_case(const Case& problem) {
  return {problem.name, problem.why, problem.options, [problem] { return make_inputs(problem); },
          problem.page_size};
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

void add_case_options(CLI::App& app, JobOptions& options, const std::string& group) {
  app.add_option_function<std::vector<std::string>>(
         "--case", [&](const std::vector<std::string>& names) { options.case_names = names; },
         "a named case; may be repeated")
      ->type_name("NAME")
      ->group(group)
      ->allow_extra_args(false)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option_function<std::string>(
         "--cases", [&](const std::string& path) { options.case_file = path; },
         "take named cases from this file instead of the built-in ones")
      ->type_name("FILE")
      ->group(group);
}

void add_problem_options(CLI::App& app, AttentionOptions& options) {
  add_shape_options(app, options);
  app.add_option_function<std::string>(
         "--dtype",
         [&](const std::string& text) { options.dtype = parse_float_dtype("--dtype", text); },
         "f32 (default), f16 or bf16")
      ->type_name("NAME")
      ->group("Input");
  add_score_options(app, options);
  add_mask_options(app, options);
  add_run_options(app, options);
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

}  // namespace fovea::tools
