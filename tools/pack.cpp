// fovea pack: kernels compiled before they are needed, for machines that are not at hand.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>
#include <tuple>

#include "fovea/error.hpp"

#include "case_problems.hpp"
#include "command.hpp"
#include "command_line.hpp"
#include "core/num_threads.hpp"
#include "cuda/append/append_to_cache.hpp"
#include "cuda/backward/candidates.hpp"
#include "cuda/backward/choices.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/choices.hpp"
#include "cuda/forward/tuning.hpp"
#include "cuda/jit/kernel_pack.hpp"
#include "cuda/jit/loader.hpp"
#include "cuda/merge/merge_states.hpp"
#include "cuda/pages/rank_pages.hpp"
#include "cuda/prefix/prefix_places.hpp"
#include "cuda/rotary/rotary.hpp"
#include "cuda/sum/sum_parts.hpp"
#include "failure.hpp"
#include "files.hpp"
#include "progress.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;
using cuda::jit::Architecture;
using cuda::jit::KernelText;
using cuda::jit::Sha256;

constexpr const char* kAbout =
    "Compiles the GPU kernels that named cases need, for named architectures, into one file. Needs "
    "the "
    "kernel compiler and no GPU. A library that finds the file (FOVEA_PACK, or fovea.pack beside "
    "it) "
    "runs these kernels without a compiler.";

constexpr const char* kExamples =
    R"(Examples
  The built-in cases, for Hopper and Blackwell:
    fovea pack --arch sm_90a,sm_100a --out fovea.pack
  Cases of your own:
    fovea pack --cases my_cases.json --arch sm_80 --out fovea.pack
  With what was measured on a GPU:
    fovea pack --arch sm_90a --tuning fovea.tuning --out fovea.pack
  Does every kernel fit its registers? (what CI asks; writes nothing)
    fovea pack --arch sm_80,sm_86,sm_89,sm_90a,sm_100a,sm_103a,sm_120a --strict
  Kernels that no GPU has measured yet, and their machine code for a disassembler:
    fovea pack --arch sm_100a --first cuda/sm100/attention_forward --cubins build/cubins

Each case is compiled with and without lse; of one of backward its gradients and, into a file, forward with lse. Text
alone makes a kernel: cases that differ in lengths alone share one.

Exit codes: 0 done; 1 a kernel did not compile, or --strict found one that spills; 2 bad input; 3 no kernel compiler here.
)";

struct PackOptions {
  std::vector<std::string> case_files;
  std::optional<std::string> out;
  std::optional<std::string> cubins;   // a folder
  std::set<std::string> known_spills;  // "sm_80 common/combine"
  bool is_strict = false, wants_json = false;
};

/// A kernel to compile, and the cases that need it.
struct Job {
  KernelText text;
  Architecture architecture;
  std::set<std::string> cases;
  cuda::jit::Cubin cubin{};
  std::string failure{};  // why there is no cubin
};

/// What no kernel of ours takes.
struct LeftOut {
  std::string problem, architecture, reason;
};

struct Work {
  std::map<Sha256, Job> jobs;
  std::vector<LeftOut> left_out;
  cuda::TuningFile tuning{};                   // --tuning
  cuda::Tuning packed{};                       // its winners whose kernels are packed
  std::set<std::string> classes{};             // that a case has
  std::set<std::string, std::less<>> first{};  // candidates, before the table's order
  bool is_written = false;                     // to a file, for machines without a compiler
};

std::vector<Case> cases_of(const PackOptions& options) {
  if (options.case_files.empty()) return built_in_cases();
  std::vector<Case> cases;
  for (const std::string& path : options.case_files) {
    const auto file = read_file("--cases", path);
    const std::string_view json(reinterpret_cast<const char*>(file->bytes().data()),
                                file->bytes().size());
    for (Case& problem : parse_cases(json, path)) cases.push_back(std::move(problem));
  }
  return cases;
}

void add_texts(cuda::PlannedKernels kernels, std::vector<KernelText>& texts) {
  for (cuda::PlannedKernel& kernel : kernels) texts.push_back(std::move(kernel.text));
}

/// All that calls of this problem load; into a file, for tensors that start anywhere too.
std::vector<KernelText> texts_of(const Case& named, const ForwardProblem& problem,
                                 const cuda::ForwardPlan& plan, bool is_written) {
  std::vector<KernelText> texts;
  add_texts(planned_kernels(plan), texts);
  if (is_written) add_texts(planned_unaligned_kernels(plan), texts);
  if (problem.is_cached) texts.push_back(cuda::append_text());
  if (problem.problem.wants_lse)
    texts.push_back(cuda::merge_text());  // its out and lse are a state
  texts.push_back(cuda::sum_text());      // of ranks that share the problem
  if (named.page_size > 0) texts.push_back(cuda::rank_pages_text());  // or its pages
  if (named.shared_prefix > 0) texts.push_back(cuda::prefix_text());
  texts.push_back(cuda::rotary_text());  // of queries and keys before any call
  return texts;
}

void add_jobs(const Case& named, std::vector<KernelText> texts, const Architecture& architecture,
              Work& work) {
  for (KernelText& text : texts) {
    const Sha256 key = text_key(text, device_text_of(architecture), architecture);
    Job& job = work.jobs.try_emplace(key, Job{std::move(text), architecture, {}}).first->second;
    job.cases.insert(named.name);
  }
}

void add_plan(const Case& named, const ForwardProblem& problem, const cuda::ForwardPlan& plan,
              const Architecture& architecture, Work& work) {
  add_jobs(named, texts_of(named, problem, plan, work.is_written), architecture, work);
}

void add_plan(const Case& named, const GradientProblem&, const cuda::BackwardPlan& plan,
              const Architecture& architecture, Work& work) {
  std::vector<KernelText> texts;
  add_texts(planned_kernels(plan), texts);
  add_texts(planned_forward_kernels(plan), texts);
  add_jobs(named, std::move(texts), architecture, work);
}

template <typename Plan>
bool is_left_out(const Case& named, const Plan& plan, const Architecture& architecture,
                 Work& work) {
  if (!plan.candidate.empty()) return false;
  work.left_out.push_back(
      {named.name, architecture.name(), plan.refused.empty() ? "" : plan.refused.back().reason});
  return true;
}

/// What the tuning has for this problem, on each of its devices of the architecture.
template <typename Problem>
void add_tuned(const Case& named, const Problem& problem, const Architecture& architecture,
               Work& work) {
  if (!work.tuning.tuning) return;
  const std::string problem_class = cuda::problem_class(problem);
  work.classes.insert(problem_class);
  for (const auto& [device, winners] : work.tuning.tuning->winners()) {
    if (Architecture{device.major, device.minor}.name() != architecture.name()) continue;
    cuda::DeviceTraits traits = cuda::typical_device(device.major, device.minor);
    traits.num_sms = device.num_sms;
    const auto tuned = tuned_choice(problem, traits, work.tuning);
    if (tuned.choice) {
      add_plan(named, problem, plan_choice(problem, traits, *tuned.choice), architecture, work);
      work.packed.set(traits, problem_class, *work.tuning.tuning->find(traits, problem_class));
    } else if (!tuned.words.empty()) {
      work.left_out.push_back({named.name, architecture.name(), tuned.words});
    }
  }
}

/// Winners whose kernels no case asks for: without them, the table's choice is what a machine without a compiler can
/// load.
void list_unposed(Work& work) {
  if (!work.tuning.tuning) return;
  for (const auto& [device, winners] : work.tuning.tuning->winners()) {
    for (const auto& [problem_class, winner] : winners) {
      if (work.classes.contains(problem_class)) continue;
      work.left_out.push_back({problem_class, Architecture{device.major, device.minor}.name(),
                               "no case is of this class; what was measured for it is not packed"});
    }
  }
}

cuda::ForwardPlan choice_of_table(const ForwardProblem& problem, const cuda::DeviceTraits& device) {
  return choose_forward(problem, device);
}
cuda::BackwardPlan choice_of_table(const GradientProblem& problem,
                                   const cuda::DeviceTraits& device) {
  return choose_backward(problem, device);
}

/// By the table, unless a kernel that is to come first takes the problem.
template <typename Problem>
auto plan_of(const Problem& problem, const cuda::DeviceTraits& device, const Work& work) {
  if (!work.first.empty()) {
    for (const auto& choice : choices_of(problem, device)) {
      if (work.first.contains(choice.candidate->name)) return plan_choice(problem, device, choice);
    }
  }
  return choice_of_table(problem, device);
}

void add_problem(const Case& named, const ForwardProblem& problem, const Architecture& architecture,
                 Work& work) {
  const cuda::ForwardPlan plan = plan_of(problem, cuda::typical_device(architecture), work);
  if (is_left_out(named, plan, architecture, work)) return;
  add_plan(named, problem, plan, architecture, work);
  add_tuned(named, problem, architecture, work);
}

void add_problem(const Case& named, const GradientProblem& problem,
                 const Architecture& architecture, Work& work) {
  const cuda::BackwardPlan plan = plan_of(problem, cuda::typical_device(architecture), work);
  if (is_left_out(named, plan, architecture, work)) return;
  add_plan(named, problem, plan, architecture, work);
  add_tuned(named, problem, architecture, work);
}

void add_case(const Case& named, const std::vector<Architecture>& architectures, Work& work) {
  const Inputs inputs = make_shapes(named);
  for (const bool wants_lse : {false, true}) {
    const CaseProblems problems = problems_of_case(named, inputs, wants_lse);
    for (const Architecture& architecture : architectures) {
      // Of a case of backward, forward is what a step of training runs before.
      if (!named.is_backward || work.is_written) {
        for (const ForwardProblem& problem : problems.forward)
          add_problem(named, problem, architecture, work);
      }
      for (const GradientProblem& problem : problems.backward)
        add_problem(named, problem, architecture, work);
    }
  }
}

/// On all cores.
void compile_all(Work& work, cuda::jit::Loader& loader) {
  std::vector<Job*> jobs;
  for (auto& [key, job] : work.jobs) jobs.push_back(&job);
  Progress progress("fovea pack: compiling");
  std::mutex progress_mutex;
  std::atomic<std::size_t> next = 0;
  const auto compile = [&] {
    for (std::size_t i = next++; i < jobs.size(); i = next++) {
      Job& job = *jobs[i];
      try {
        job.cubin = loader.cubin(job.text, job.architecture);
      } catch (const Error& error) {
        job.failure = error.what();
      }
      const std::lock_guard lock(progress_mutex);
      progress.set(fmt::format("fovea pack: {} of {} kernels", i + 1, jobs.size()));
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 0; i < default_num_threads(); ++i) threads.emplace_back(compile);
}

bool is_clean(const cuda::jit::CompileReport& report) {
  return report.spill_bytes == 0 && report.local_bytes == 0 && report.num_wgmma_notes == 0;
}

/// Of its files, without the ending: cases with different programs have one label.
std::string file_stem(const Sha256& key) { return cuda::jit::to_hex(key).substr(0, 16); }

Json kernel_report(const Job& job) {
  Json row = {
      {"kernel", job.text.label}, {"architecture", job.architecture.name()}, {"cases", job.cases}};
  if (!job.failure.empty()) {
    row["failure"] = job.failure;
    return row;
  }
  const cuda::jit::CompileReport& report = job.cubin.report;
  row["bytes"] = job.cubin.image.size();
  row["registers"] = report.registers;
  row["spill_bytes"] = report.spill_bytes;
  row["local_bytes"] = report.local_bytes;
  row["wgmma_notes"] = report.num_wgmma_notes;
  row["compile_ms"] = report.compile_ms;
  row["is_clean"] = is_clean(report);
  return row;
}

Json report_of(const Work& work, const PackOptions& options) {
  std::vector<const std::pair<const Sha256, Job>*> jobs;
  for (const auto& entry : work.jobs) jobs.push_back(&entry);
  std::ranges::sort(jobs, {}, [](const auto* entry) {
    const Job& job = entry->second;
    return std::tie(job.architecture, job.text.label, job.text.unit);
  });
  Json kernels = Json::array(), left_out = Json::array();
  for (const auto* entry : jobs) {
    kernels.push_back(kernel_report(entry->second));
    if (options.cubins) kernels.back()["stem"] = file_stem(entry->first);
  }
  for (const LeftOut& row : work.left_out) {
    left_out.push_back(
        {{"case", row.problem}, {"architecture", row.architecture}, {"reason", row.reason}});
  }
  return {{"command", "pack"},
          {"kernels", kernels},
          {"left_out", left_out},
          {"out", options.out ? Json(*options.out) : Json()}};
}

std::string print_kernel(const Json& kernel) {
  const auto number = [&](const char* key) { return kernel[key].get<std::int64_t>(); };
  std::string text = fmt::format("{:<8} ", kernel["architecture"].get<std::string>());
  if (kernel.contains("failure")) return text + kernel["failure"].get<std::string>() + "\n";
  text += fmt::format("{:>3} registers, {:>6} bytes, {:>4} ms  {} ({}{})", number("registers"),
                      number("bytes"), number("compile_ms"), kernel["kernel"].get<std::string>(),
                      kernel["cases"][0].get<std::string>(),
                      kernel["cases"].size() > 1 ? " and others" : "");
  if (!kernel["is_clean"].get<bool>()) {
    text += fmt::format("; SPILLS {} bytes, {} of local memory, {} wgmma notes",
                        number("spill_bytes"), number("local_bytes"), number("wgmma_notes"));
  }
  return text + "\n";
}

std::string print(const Json& report) {
  std::string text;
  std::int64_t num_failed = 0, num_unclean = 0, slowest_ms = 0;
  for (const Json& kernel : report["kernels"]) {
    text += print_kernel(kernel);
    if (kernel.contains("failure")) {
      ++num_failed;
      continue;
    }
    num_unclean += kernel["is_clean"].get<bool>() ? 0 : 1;
    slowest_ms = std::max(slowest_ms, kernel["compile_ms"].get<std::int64_t>());
  }
  for (const Json& row : report["left_out"]) {
    text += fmt::format("{:<8} left out: {}: {}\n", row["architecture"].get<std::string>(),
                        row["case"].get<std::string>(), row["reason"].get<std::string>());
  }
  text += fmt::format(
      "{} kernels, {} failed, {} with spills, local memory or wgmma notes; the slowest took {} ms "
      "of a core",
      report["kernels"].size(), num_failed, num_unclean, slowest_ms);
  if (!report["out"].is_null()) text += "; in " + report["out"].get<std::string>();
  return text + "\n";
}

void write(const std::string& path, const Work& work, cuda::jit::Loader& loader) {
  std::vector<cuda::jit::PackItem> items;
  for (const auto& [key, job] : work.jobs) {
    items.push_back({key,
                     {.cubin = job.cubin,
                      .label = job.text.label,
                      .architecture = job.architecture.name(),
                      .compiler = loader.compiler(kind_of(job.architecture)).version()}});
  }
  write_pack(path, items, work.packed.winners().empty() ? "" : work.packed.print());
}

/// Each kernel's unit and its machine code.
void write_cubins(const std::string& folder, const Work& work) {
  std::vector<OutputFiles::Content> files;
  for (const auto& [key, job] : work.jobs) {
    const std::string stem = folder + "/" + file_stem(key);
    files.push_back({stem + ".cu", "", {as_part(job.text.unit)}});
    files.push_back({stem + ".cubin", "", {job.cubin.image}});
  }
  OutputFiles::write(files);
}

void make_folder(const std::string& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed) bad_input(fmt::format("--cubins: cannot make {}: {}", folder, failed.message()));
}

cuda::TuningFile read_tuning(const std::string& path) {
  const auto file = read_file("--tuning", path);
  const std::string_view text(reinterpret_cast<const char*>(file->data()), file->size());
  cuda::TuningFile tuning{path, cuda::Tuning::parse(text, "--tuning: " + path), ""};
  if (tuning.tuning->is_stale())
    bad_input(fmt::format("--tuning: {} was measured with the kernels of another version", path));
  return tuning;
}

std::set<std::string> lines_of(std::string_view option, const std::string& path) {
  const auto file = read_file(option, path);
  std::istringstream text(std::string(reinterpret_cast<const char*>(file->data()), file->size()));
  std::set<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.insert(line);
  return lines;
}

void refuse_unknown_spills(const Work& work, const PackOptions& options) {
  std::string found;
  for (const auto& [key, job] : work.jobs) {
    const std::string line = job.architecture.name() + " " + job.text.label;
    if (!is_clean(job.cubin.report) && !options.known_spills.contains(line)) found += "\n  " + line;
  }
  if (!found.empty())
    throw Failure(kFailed, "--strict: spills, local memory or wgmma notes in:" + found);
}

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

/// Names of kernels as the tables have them.
std::set<std::string, std::less<>> candidates_of(const std::string& words) {
  std::set<std::string, std::less<>> known, named;
  for (const auto& candidate : cuda::forward_candidates()) known.emplace(candidate.name);
  for (const auto& candidate : cuda::backward_candidates()) known.emplace(candidate.name);
  for (const std::string& word : split_at_commas(words)) {
    if (!known.contains(word)) {
      bad_input(
          fmt::format("--first: unknown kernel '{}'; expected {}", word, fmt::join(known, ", ")));
    }
    named.insert(word);
  }
  return named;
}

}  // namespace

int run_pack(const std::vector<std::string>& words) {
  PackOptions options;
  std::string architecture_words, out, known, tuning, first, cubins;
  CommandLine line("fovea pack", kAbout, kExamples);
  const auto text_of = [](std::string& field) {
    return [&field](const std::string&, const std::string& text) { field = text; };
  };
  line.add_list(
      {"--cases", "FILE", "", "files of cases (as cases/*.json); the built-in ones unless given"},
      options.case_files);
  line.add({"--arch", "NAMES", "", "sm_80,sm_90a,gfx942,..."}, text_of(architecture_words));
  line.require("--arch");
  line.add({"--out", "FILE", "", "the pack; without it nothing is written"}, text_of(out));
  line.add({"--tuning", "FILE", "",
            "what fovea tune measured: goes into the pack, with its kernels, for the problems of "
            "the cases"},
           text_of(tuning));
  line.add({"--first", "NAMES", "",
            "kernels that a case gets where they take it, before the table's order: "
            "cuda/sm100/attention_forward,..."},
           text_of(first));
  line.add({"--cubins", "FOLDER", "", "each kernel's unit and its cubin, as files of their own"},
           text_of(cubins));
  line.add_flag(
      {"--strict", "", "", "exit 1 where a kernel spills, uses local memory or has a wgmma note"},
      options.is_strict);
  line.add_flag({"--json", "", "", "print one JSON object"}, options.wants_json);
  line.add({"--known-spills", "FILE", "",
            "a file of kernels that --strict lets pass: architecture and kernel, one a line"},
           text_of(known));
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;
  if (!out.empty()) options.out = out;
  if (!cubins.empty()) options.cubins = cubins;
  if (!known.empty()) options.known_spills = lines_of("--known-spills", known);

  std::vector<Architecture> architectures;
  for (const std::string& word : split_at_commas(architecture_words))
    architectures.push_back(cuda::jit::parse_architecture(word, "--arch"));
  OutputFiles files;
  if (options.out) files.add("--out", *options.out);

  Work work;
  work.is_written = options.out.has_value();
  if (!tuning.empty()) work.tuning = read_tuning(tuning);
  if (!first.empty()) work.first = candidates_of(first);
  if (options.cubins) make_folder(*options.cubins);

  cuda::jit::LoaderOptions loader_options;
  loader_options.pack = std::nullopt;
  cuda::jit::Loader loader(loader_options);
  for (const Architecture& architecture : architectures) {
    const auto& library = loader.compiler(kind_of(architecture)).library();
    if (!library.is_present()) throw Failure(kUnsupported, library.why_absent());
  }
  for (const Case& named : cases_of(options)) add_case(named, architectures, work);
  list_unposed(work);
  compile_all(work, loader);
  const bool has_all = std::ranges::all_of(
      work.jobs, [](const auto& entry) { return entry.second.failure.empty(); });
  if (options.out && has_all) write(*options.out, work, loader);
  if (options.cubins && has_all) write_cubins(*options.cubins, work);
  const Json report = report_of(work, options);
  print_out(options.wants_json ? report.dump() + "\n" : print(report));
  if (!has_all) throw Failure(kFailed, "not every kernel compiled; nothing is written");
  if (options.is_strict) refuse_unknown_spills(work, options);
  return kSuccess;
}

}  // namespace fovea::tools
