// Problems that commands time: named cases, or one given by its shapes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attention_options.hpp"
#include "cases.hpp"

namespace fovea::tools {

class CommandLine;

/// A named problem with its tensors.
struct Job {
  std::string name, why;
  AttentionOptions options;
  std::function<Inputs()> make;
  std::int64_t page_size = 0;  // attention over a paged cache; 0: over tensors
  bool is_backward = false;    // its gradients
};

struct JobOptions {
  AttentionOptions attention;
  std::vector<std::string> case_names;
  std::optional<std::string> case_file;
};

/// --case and --cases, in this group of the page.
void add_case_options(CommandLine& line, JobOptions& options, const std::string& group);
/// Shapes, --dtype, scores, masks, and what may be said beside a case.
void add_problem_options(CommandLine& line, AttentionOptions& options);

/// The built-in ones, or those of --cases.
std::vector<Case> read_cases(const JobOptions& options);

/// Those of choose_jobs that have gradients: not those that read a cache, which `--case` may not name.
std::vector<Job> choose_gradient_jobs(const JobOptions& options, const std::vector<Case>& cases);

/// Those that --case names, all where it names none, or the problem of the shapes.
std::vector<Job> choose_jobs(const JobOptions& options, const std::vector<Case>& cases);

}  // namespace fovea::tools
