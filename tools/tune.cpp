// fovea tune: which kernel and tile this GPU runs fastest, for given problems, kept in a file.
#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "fovea/error.hpp"
#include "fovea/runtime.hpp"

#include "command.hpp"
#include "command_line.hpp"
#include "failure.hpp"
#include "files.hpp"
#include "jobs.hpp"
#include "progress.hpp"
#include "tune_gpu.hpp"
#include "tuner.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr const char* kAbout =
    "Measures, on the GPU present, every kernel and tile that can run given problems, and keeps "
    "those "
    "that are faster than the built-in choice. A library that finds the file (FOVEA_TUNING, or "
    "packed "
    "by fovea pack --tuning) takes them for problems of the same class.";

constexpr const char* kExamples =
    R"(Examples
  The named cases, for a minute; what was measured goes to a file:
    fovea tune --out fovea.tuning
  Problems of your own, for five minutes; the file's other entries stay:
    fovea tune --cases my_cases.json --seconds 300 --out fovea.tuning
    fovea tune --seqlen-q 4096 --num-heads-q 32 --num-heads-kv 8 --head-dim 128 --dtype bf16 --causal --out fovea.tuning
  Their gradients:
    fovea tune --seqlen-q 4096 --num-heads-q 32 --num-heads-kv 8 --head-dim 128 --dtype bf16 --causal --backward --out fovea.tuning
  Use it, ship it:
    FOVEA_TUNING=fovea.tuning fovea explain --seqlen-q 4096 --head-dim 128 --dtype bf16 --causal --device cuda
    fovea pack --arch sm_90a --tuning fovea.tuning --out fovea.pack

The built-in choice is checked first, against fp64 attention where the problem is small, then every other against it. Those
that are left run in rounds of random order, the L2 cache flushed before each run; the best of five rounds meets the
built-in choice in 21 more. It wins if its median there is 2 % lower and it was faster in 15 of them. docs/guides/tuning.md
says what a class is, and why another choice may change the last bits of a result.

Exit codes: 0 done, also when time was up; 1 a kernel was wrong, or the run was interrupted; 2 bad input; 3 no GPU here.
)";

struct TuneOptions {
  JobOptions jobs;
  float seconds = 60;
  std::optional<std::string> out;
  bool wants_json = false, wants_backward = false;
};

/// Ctrl-C ends the measuring, not the program: what was measured is kept.
volatile std::sig_atomic_t is_interrupted = 0;

class Interruptible {
 public:
  Interruptible() : before_(std::signal(SIGINT, [](int) { is_interrupted = 1; })) {
    is_interrupted = 0;
  }
  ~Interruptible() { std::signal(SIGINT, before_); }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  void (*before_)(int);
};

/// The file of an earlier run, whose other entries stay; `words` where it is of no use.
cuda::Tuning read_earlier(const TuneOptions& options, std::string& words) {
  if (!options.out || !std::filesystem::exists(*options.out)) return {};
  const auto file = read_file("--out", *options.out);
  const std::string_view text(reinterpret_cast<const char*>(file->data()), file->size());
  cuda::Tuning tuning = cuda::Tuning::parse(text, "--out: " + *options.out);
  if (!tuning.is_stale()) return tuning;
  words = fmt::format("{} was measured with the kernels of another version; it starts anew",
                      *options.out);
  return {};
}

/// All that a run reports.
struct Report {
  std::string gpu;
  std::vector<TuneRow> rows;
  std::string note;     // what became of an earlier file
  std::string failure;  // why the GPU could go on no longer
};

Report run_jobs(const std::vector<Job>& jobs, const TuneOptions& options, cuda::Tuning& tuning) {
  const Gpu gpu(options.jobs.attention.device);
  FlushedClock clock(gpu);
  Report report{.gpu = gpu.describe(), .rows = {}, .note = {}, .failure = {}};
  const Interruptible interruptible;
  Progress progress("fovea tune");
  const auto seconds_until = [](Clock::time_point end) {
    return std::chrono::duration<double>(end - Clock::now()).count();
  };
  const auto in = [](double seconds) {
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  };
  const Clock::time_point end = in(options.seconds);
  try {
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      progress.set(fmt::format("fovea tune: {} {}", bar(i, jobs.size()), jobs[i].name));
      const Clock::time_point share = in(share_of_time(seconds_until(end), jobs.size() - i));
      const auto is_over = [&] { return is_interrupted != 0 || seconds_until(share) <= 0; };
      if (is_over()) break;
      const bool is_of_gradients = jobs[i].is_backward || options.wants_backward;
      const auto track = GpuTrack::make(jobs[i], is_of_gradients, gpu, clock, is_over);
      const TunedProblem& tuned = std::as_const(*track).tuned();
      report.rows.push_back(tune(tuned, *track, static_cast<std::uint32_t>(i + 1), tuning));
    }
  } catch (const Error& error) {
    report.failure = error.what();
  }
  return report;
}

std::string_view verdict_of(const TuneRow& row) {
  if (row.choices.empty()) return "refused";
  if (!row.verdict.is_decided) return "undecided";
  return row.verdict.winner == 0 ? "table" : "tuned";
}

Json json_of(const TuneRow& row) {
  const Verdict& verdict = row.verdict;
  Json json = {{"name", row.name},
               {"class", row.problem_class},
               {"num_choices", row.choices.size()},
               {"verdict", verdict_of(row)}};
  if (verdict.is_decided) {
    json["choice"] = row.choices[verdict.winner];
    json["table"] = row.choices[0];
    json["us"] = verdict.seconds * 1e6;
    json["table_us"] = verdict.default_seconds * 1e6;
  }
  json["out"] = Json::array();
  for (const auto& [contender, reason] : verdict.out)
    json["out"].push_back({{"choice", row.choices[contender]}, {"reason", reason}});
  return json;
}

std::string print(const TuneRow& row) {
  const Verdict& verdict = row.verdict;
  std::string text = fmt::format("{:<28} {:>2} choices  ", row.name, row.choices.size());
  const std::string_view words = verdict_of(row);
  if (words == "tuned") {
    text +=
        fmt::format("{:.1f} us -> {:.1f} us ({:+.1f} %): {}", verdict.default_seconds * 1e6,
                    verdict.seconds * 1e6, (verdict.seconds / verdict.default_seconds - 1) * 100,
                    row.choices[verdict.winner]);
  } else if (words == "table") {
    text += fmt::format("{:.1f} us: the built-in choice stands", verdict.seconds * 1e6);
  } else if (words == "refused") {
    text += "no kernel takes it";
  } else {
    const bool has_default = verdict.out.empty() || verdict.out[0].contender != 0;
    text += has_default ? "undecided: time was up" : "undecided: the built-in choice failed";
  }
  for (const auto& [contender, reason] : verdict.out)
    text += fmt::format("\n  OUT {}: {}", row.choices[contender], reason);
  return text + "\n";
}

std::string print(const Report& report, const TuneOptions& options, std::size_t num_jobs) {
  std::string text;
  std::size_t num_tuned = 0;
  for (const TuneRow& row : report.rows) {
    text += print(row);
    num_tuned += verdict_of(row) == "tuned" ? 1 : 0;
  }
  text += fmt::format("{} of {} problems measured on {}, {} tuned", report.rows.size(), num_jobs,
                      report.gpu, num_tuned);
  if (options.out) text += "; in " + *options.out;
  return text + "\n" + (report.note.empty() ? "" : report.note + "\n");
}

Json json_of(const Report& report, const TuneOptions& options, std::size_t num_jobs) {
  Json json = {{"command", "tune"},     {"fovea", version()},
               {"gpu", report.gpu},     {"num_problems", num_jobs},
               {"rows", Json::array()}, {"out", options.out ? Json(*options.out) : Json()},
               {"note", report.note},   {"is_interrupted", is_interrupted != 0}};
  for (const TuneRow& row : report.rows) json["rows"].push_back(json_of(row));
  return json;
}

void throw_what_went_wrong(const Report& report) {
  if (!report.failure.empty()) throw Failure(kFailed, report.failure);
  if (is_interrupted != 0)
    throw Failure(kFailed, "interrupted; what was measured until then is kept");
  std::size_t num_out = 0;
  for (const TuneRow& row : report.rows) num_out += row.verdict.out.size();
  if (num_out > 0) {
    throw Failure(kFailed, fmt::format("{} choices were wrong or did not run; none of them is kept",
                                       num_out));
  }
}

int tune_all(const TuneOptions& options) {
  const std::vector<Case> cases = read_cases(options.jobs);
  const std::vector<Job> jobs = options.wants_backward ? choose_gradient_jobs(options.jobs, cases)
                                                       : choose_jobs(options.jobs, cases);
  OutputFiles files;
  if (options.out) files.add("--out", *options.out);
  std::string note;
  cuda::Tuning tuning = read_earlier(options, note);
  Report report = run_jobs(jobs, options, tuning);
  report.note = note;
  const std::string text = tuning.print();
  if (options.out) OutputFiles::write({{*options.out, text, {}}});
  print_out(options.wants_json ? json_of(report, options, jobs.size()).dump() + "\n"
                               : print(report, options, jobs.size()));
  throw_what_went_wrong(report);
  return kSuccess;
}

}  // namespace

int run_tune(const std::vector<std::string>& words) {
  TuneOptions options;
  options.jobs.attention.device = Device::cuda(0);
  CommandLine line("fovea tune", kAbout, kExamples);
  constexpr const char* kGroup = "Tuning";
  add_case_options(line, options.jobs, kGroup);
  line.add({"--seconds", "N", kGroup, "time for all problems together (default 60)"},
           [&](const std::string& option, const std::string& text) {
             options.seconds = parse_real(option, text);
           });
  line.add({"--out", "FILE", kGroup,
            "the file; entries of an earlier run stay where nothing new is measured. Without it, "
            "nothing is written"},
           [&](const std::string&, const std::string& path) { options.out = path; });
  line.add_flag({"--backward", "", kGroup,
                 "kernels of the problems' gradients, which are those of cases of backward anyway"},
                options.wants_backward);
  line.add_flag({"--json", "", kGroup, "print one JSON object"}, options.wants_json);
  add_problem_options(line, options.jobs.attention);
  add_device_option(line, options.jobs.attention.device);
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;
  if (!options.jobs.attention.is_on_gpu())
    bad_input("--device: got 'cpu'; expected cuda or cuda:N, kernels of a GPU are what is tuned");
  if (!(options.seconds > 0))
    bad_input(fmt::format("--seconds: got {}; expected a positive number", options.seconds));
  refuse_options_of_other_devices(options.jobs.attention);
  return tune_all(options);
}

}  // namespace fovea::tools
