#include <fmt/format.h>

#include <cstdio>
#include <new>

#include "fovea/error.hpp"
#include "fovea/runtime.hpp"

#include "command.hpp"
#include "command_line.hpp"
#include "failure.hpp"

namespace fovea::tools {
namespace {

struct Command {
  std::string_view name;
  int (*run)(const std::vector<std::string>& words);
  std::string_view about;
};

constexpr Command kCommands[] = {
    {"attend", run_attend, "attention of tensors in files"},
    {"decode", run_decode, "captured layers served from a growing cache, token by token"},
    {"bench", run_bench, "how fast it is here: named cases or given shapes"},
    {"tune", run_tune, "which kernel and tile this GPU runs fastest, kept in a file"},
    {"explain", run_explain, "what would run, and why"},
    {"calibrate", run_calibrate,
     "what eight or four bits cost a layer, and the recipe that it bears"},
    {"draw-mask", run_draw_mask, "a picture of what a mask shows, and what it costs"},
    {"pack", run_pack, "GPU kernels compiled before they are needed"},
    {"cache", run_cache, "GPU kernels that were compiled here: list, verify, clear"},
    {"doctor", run_doctor, "what this machine offers"},
};

std::string overview() {
  std::string page =
      "fovea: exact attention, softmax(scale * q k^T) v, with any score and mask program.\n\n"
      "usage: fovea COMMAND [options]\n\n";
  for (const Command& command : kCommands)
    page += fmt::format("  {:<10} {}\n", command.name, command.about);
  page +=
      "\nEach command has a page: fovea COMMAND --help. fovea --version prints the version.\n\n"
      "  fovea attend --q q.npy --k k.npy --v v.npy --causal --out out.npy\n"
      "  fovea draw-mask --seqlen-q 64 --causal --window 16,0\n"
      "  fovea bench --case gpt2_prefill\n\n"
      "Exit codes: 0 done; 1 ran, but the check or the writing failed; 2 bad input; 3 not "
      "supported here.\n";
  return page;
}

int run_named(const std::vector<std::string>& words) {
  if (words.empty()) {
    bad_input(
        "which command? expected attend, decode, bench, tune, explain, calibrate, draw-mask, pack, "
        "cache or doctor; see fovea --help");
  }
  const std::string& word = words.front();
  if (word == "--help" || word == "-h" || word == "help") {
    print_out(overview());
    return kSuccess;
  }
  if (word == "--version") {
    print_out(fmt::format("fovea {}\n", version()));
    return kSuccess;
  }
  for (const Command& command : kCommands) {
    if (command.name == word) return command.run({words.begin() + 1, words.end()});
  }
  bad_input(fmt::format(
      "unknown command '{}'; expected attend, decode, bench, tune, explain, calibrate, draw-mask, "
      "pack, cache or doctor",
      word));
}

/// A refusal with a reason per line becomes one line.
std::string one_line(std::string text) {
  const auto replace_all = [&](std::string_view from, std::string_view to) {
    for (std::size_t at = text.find(from); at != std::string::npos;
         at = text.find(from, at + to.size())) {
      text.replace(at, from.size(), to);
    }
  };
  replace_all(":\n  ", ": ");
  replace_all("\n  ", "; ");
  while (text.ends_with('\n')) text.pop_back();
  replace_all("\n", "; ");
  return text;
}

int complain(const std::vector<std::string>& words, const std::string& message,
             ExitCode exit_code) {
  const bool is_named = !words.empty() && !words.front().starts_with('-');
  fmt::print(stderr, "fovea{}{}: {}\n", is_named ? " " : "", is_named ? words.front() : "",
             one_line(message));
  return exit_code;
}

}  // namespace

int run_fovea(const std::vector<std::string>& words) {
  try {
    return run_named(words);
  } catch (const Failure& failure) {
    return complain(words, failure.what(), failure.exit_code());
  } catch (const Error& error) {
    const bool is_callers = error.kind() == ErrorKind::invalid_argument;
    const bool is_unsupported = error.kind() == ErrorKind::unsupported;
    return complain(words, error.what(),
                    is_callers       ? kBadInput
                    : is_unsupported ? kUnsupported
                                     : kFailed);
  } catch (const std::bad_alloc&) {
    return complain(words, "out of memory", kUnsupported);
  } catch (const std::exception& error) {
    return complain(words, fmt::format("internal error: {}", error.what()), kFailed);
  }
}

}  // namespace fovea::tools
