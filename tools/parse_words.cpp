#include "parse_words.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "failure.hpp"

namespace fovea::tools {
namespace {

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

Parsed parse_words(CLI::App& app, const std::vector<std::string>& words) {
  // CLI11 takes the words from the back.
  std::vector<std::string> reversed(words.rbegin(), words.rend());
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    print_out(app.help());
    return Parsed::help_was_printed;
  } catch (const CLI::ExtrasError&) {
    const std::vector<std::string> rest = app.remaining();
    bad_input(one_line(fmt::format("unknown option '{}'; see {} --help",
                                   rest.empty() ? "" : rest.front(), app.get_name())));
  } catch (const CLI::ParseError& error) {
    bad_input(one_line(fmt::format("{}; see {} --help", error.what(), app.get_name())));
  }
  return Parsed::run;
}

void print_out(const std::string& text) {
  const bool is_written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!is_written || std::fflush(stdout) != 0) {
    throw Failure(kFailed, fmt::format("cannot write to stdout: {}", std::strerror(errno)));
  }
}

}  // namespace fovea::tools
