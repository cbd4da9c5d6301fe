// How the command ends when something is wrong: one line on stderr and an exit code.
#pragma once

#include <stdexcept>
#include <string>

namespace fovea::tools {

enum ExitCode : int {
  kSuccess = 0,
  kFailed = 1,       // ran, but the check, the comparison or the writing failed
  kBadInput = 2,     // options or files are wrong; nothing ran
  kUnsupported = 3,  // a right problem that nothing here can run
};

class Failure : public std::runtime_error {
 public:
  Failure(ExitCode exit_code, const std::string& message)
      : std::runtime_error(message), exit_code_(exit_code) {}
  ExitCode exit_code() const { return exit_code_; }

 private:
  ExitCode exit_code_;
};

[[noreturn]] inline void bad_input(const std::string& message) {
  throw Failure(kBadInput, message);
}

}  // namespace fovea::tools
