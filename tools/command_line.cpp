#include "command_line.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

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

/// "--scale,--softmax-scale" is reported as the name that stands first.
std::string first_name(const std::string& names) { return names.substr(0, names.find(',')); }

}  // namespace

struct CommandLine::Impl {
  CLI::App app;

  Impl(const std::string& name, const std::string& about) : app(about, name) {}

  static CLI::Option* show(CLI::Option* added, const Option& option) {
    if (!option.type.empty()) added->type_name(option.type);
    if (!option.group.empty()) added->group(option.group);
    return added;
  }

  CLI::Option* add_text(const Option& option, Set set) {
    const std::string name = first_name(option.names);
    return show(app.add_option_function<std::string>(
                    option.names,
                    [name, set = std::move(set)](const std::string& text) { set(name, text); },
                    option.help),
                option);
  }
};

CommandLine::CommandLine(const std::string& name, const std::string& about,
                         const std::string& examples)
    : impl_(std::make_unique<Impl>(name, about)) {
  impl_->app.formatter(std::make_shared<WrappingFormatter>());
  impl_->app.footer(examples);
}

CommandLine::~CommandLine() = default;

void CommandLine::add(const Option& option, Set set) { impl_->add_text(option, std::move(set)); }

void CommandLine::add_repeated(const Option& option, Set set) {
  const std::string name = first_name(option.names);
  const auto set_all = [name, set = std::move(set)](const std::vector<std::string>& values) {
    for (const std::string& value : values) set(name, value);
  };
  Impl::show(
      impl_->app.add_option_function<std::vector<std::string>>(option.names, set_all, option.help),
      option)
      ->allow_extra_args(false)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void CommandLine::add_with_optional_value(const Option& option, Set set) {
  // CLI11 says "true" where no value is given.
  impl_
      ->add_text(option,
                 [set = std::move(set)](const std::string& name, const std::string& text) {
                   set(name, text == "true" ? "" : text);
                 })
      ->expected(0, 1);
}

void CommandLine::add_list(const Option& option, std::vector<std::string>& values) {
  Impl::show(impl_->app.add_option(option.names, values, option.help), option);
}

void CommandLine::add_flag(const Option& option, std::function<void()> set) {
  Impl::show(impl_->app.add_flag_function(
                 option.names, [set = std::move(set)](std::int64_t) { set(); }, option.help),
             option)
      ->disable_flag_override();
}

void CommandLine::add_flag(const Option& option, bool& field) {
  Impl::show(impl_->app.add_flag(option.names, field, option.help), option);
}

void CommandLine::add_word(const std::string& name, const std::string& help, std::string& word) {
  impl_->app.add_option(name, word, help)->required();
}

void CommandLine::require(const std::string& name) { impl_->app.get_option(name)->required(); }

Parsed CommandLine::parse(const std::vector<std::string>& words) {
  CLI::App& app = impl_->app;
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
