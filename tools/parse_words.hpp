// Words through CLI11, with our messages: one line, the name of the command, what was expected.
#pragma once

#include <string>
#include <vector>

namespace CLI {  // NOLINT(readability-identifier-naming): theirs
class App;
}

namespace fovea::tools {

enum class Parsed : bool { run, help_was_printed };

/// Throws Failure(kBadInput) for unknown options and missing or surplus values.
Parsed parse_words(CLI::App& app, const std::vector<std::string>& words);

/// Prints to stdout; throws Failure(kFailed) where stdout cannot take it.
void print_out(const std::string& text);

}  // namespace fovea::tools
