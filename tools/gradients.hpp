// fovea attend --backward: which gradients are wanted, their files and their memory.
//
// Call path: add_gradient_options (command line to GradientOptions) -> load_gradients -> make_backward.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/backward.hpp"

#include "array.hpp"
#include "attention_options.hpp"
#include "files.hpp"

namespace fovea::tools {

class CommandLine;

struct GradientOptions {
  bool is_wanted = false;
  std::optional<std::string> dout, dlse;                    // read
  std::optional<std::string> dq, dk, dv;                    // written
  std::vector<std::pair<std::string, std::string>> others;  // name, file written
};

void add_gradient_options(CommandLine& line, GradientOptions& options);

/// Arrays in the user's layout.
struct Gradients {
  struct Captured {
    std::string name;  // as the user says it
    std::string slot;  // as the score program does
    std::string path;
    Array array;
  };

  Array dout, dlse;
  Array dq, dk, dv, dsinks;
  std::string dsinks_path;
  std::vector<Captured> captured;
};

/// Refuses options that need --backward, reads dout and dlse, makes room for what will be written. Without --backward:
/// nothing.
Gradients load_gradients(const GradientOptions& options, const AttentionOptions& attention,
                         const Inputs& inputs, const ScoreMod& score, OutputFiles& files);

/// With --backward; `forward` has out and lse as it has written them. Views point into `gradients`.
AttentionBackward make_backward(const Gradients& gradients, const AttentionForward& forward,
                                Layout layout);

struct NamedGradient {
  std::string name;  // "dq", or that of --grad
  std::optional<std::string> path;
  const Array& array;
};
std::vector<NamedGradient> named(const Gradients& gradients, const GradientOptions& options);

}  // namespace fovea::tools
