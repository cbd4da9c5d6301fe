// The options of a command, with our messages: one line, the name of the command, what was expected. CLI11 stands
// behind it, in command_line.cpp alone: its templates took 5 s of every file that named an option.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fovea::tools {

/// One option as the page of help shows it.
struct Option {
  std::string names;  // "--scale,--softmax-scale": in messages, the name that stands first
  std::string type;   // "FILE"; of a flag, empty
  std::string group;  // the heading that it stands under
  std::string help;
};

enum class Parsed : bool { run, help_was_printed };

class CommandLine {
 public:
  /// Takes the name of the option and the text of its value; throws Failure(kBadInput) for what it cannot take.
  using Set = std::function<void(const std::string& option, const std::string& text)>;

  /// `about` stands above the options on the page of help, `examples` below them.
  CommandLine(const std::string& name, const std::string& about, const std::string& examples);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  /// Exactly one value, whatever it begins with.
  void add(const Option& option, Set set);
  /// One value each time that it is given.
  void add_repeated(const Option& option, Set set);
  /// `--name=value`, or no value: an empty text.
  void add_with_optional_value(const Option& option, Set set);
  /// As many values as follow it.
  void add_list(const Option& option, std::vector<std::string>& values);
  void add_flag(const Option& option, std::function<void()> set);
  void add_flag(const Option& option, bool& field);
  /// A word without a dash in front of it, which must be there.
  void add_word(const std::string& name, const std::string& help, std::string& word);
  /// The command runs with this option alone.
  void require(const std::string& name);

  /// Throws Failure(kBadInput) for unknown options and missing or surplus values.
  Parsed parse(const std::vector<std::string>& words);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Prints to stdout; throws Failure(kFailed) where stdout cannot take it.
void print_out(const std::string& text);

}  // namespace fovea::tools
