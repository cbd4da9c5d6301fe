#include "parse_words.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "failure.hpp"

namespace fovea::tools {
namespace {

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

constexpr std::size_t kNameColumns = 30, kHelpColumns = 70;

/// Breaks descriptions into lines; CLI11 indents what follows a line break.
class WrappingFormatter : public CLI::Formatter {
 public:
  WrappingFormatter() { column_width(kNameColumns); }

  std::string make_option_desc(const CLI::Option* option) const override {
    std::string text = CLI::Formatter::make_option_desc(option);
    std::size_t begin = 0;
    while (text.size() - begin > kHelpColumns) {
      const std::size_t space = text.rfind(' ', begin + kHelpColumns);
      if (space == std::string::npos || space <= begin) break;
      text[space] = '\n';
      begin = space + 1;
    }
    return text;
  }
};

}  // namespace

Parsed parse_words(CLI::App& app, const std::vector<std::string>& words) {
  app.formatter(std::make_shared<WrappingFormatter>());
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
