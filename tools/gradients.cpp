#include "gradients.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "command_line.hpp"
#include "core/shape.hpp"
#include "failure.hpp"

namespace fovea::tools {
namespace {

constexpr const char* kGroup = "Gradients";

void add_path(CommandLine& line, const std::string& option, const std::string& help,
              std::optional<std::string>& path) {
  line.add({option, "FILE", kGroup, help},
           [&path](const std::string&, const std::string& text) { path = text; });
}

void check_options(const GradientOptions& options) {
  if (options.is_wanted) {
    if (!options.dout) bad_input("--backward: needs --dout, the gradient of out");
    return;
  }
  for (const auto& [option, path] : {std::pair{"--dout", &options.dout},
                                     {"--dlse", &options.dlse},
                                     {"--dq", &options.dq},
                                     {"--dk", &options.dk},
                                     {"--dv", &options.dv}}) {
    if (*path) bad_input(fmt::format("{}: needs --backward", option));
  }
  if (!options.others.empty()) bad_input("--grad: needs --backward");
}

Array read(std::string_view option, const std::optional<std::string>& path,
           const AttentionOptions& attention, const TensorSpec& like, OutputFiles& files) {
  if (!path) return {};
  files.add_input(option, *path);
  Array array =
      read_npy(option, *path, attention.dtype == Dtype::bf16 ? Uint16::is_bf16 : Uint16::refused);
  if (!is_float(array.spec.dtype) || !std::ranges::equal(shape_of(array.spec), shape_of(like))) {
    bad_input(fmt::format("{}: {} holds {}; expected {} (or another float dtype)", option, *path,
                          to_string(array.spec), to_string(like)));
  }
  return array;
}

void add_output(const std::string& option, const std::optional<std::string>& path,
                OutputFiles& files) {
  if (!path) return;
  if (!path->ends_with(".npy"))
    bad_input(fmt::format("{}: got '{}'; expected a name that ends in .npy", option, *path));
  files.add(option, *path);
}

/// The file that was given to --bias, --alibi or --tensor NAME; an empty array where none was.
Array given_tensor(const std::string& name, const Inputs& inputs) {
  if (name == "bias" && inputs.bias) return inputs.bias;
  if (name == "alibi" && inputs.alibi) return inputs.alibi;
  for (const auto& [tensor_name, array] : inputs.tensors) {
    if (tensor_name == name) return array;
  }
  return {};
}

Gradients::Captured captured(const std::string& name, const std::string& path, const Inputs& inputs,
                             const ScoreMod& score) {
  const Captures& captures = score.captures();
  if (const Array given = given_tensor(name, inputs)) {
    // Programs in a pipe may rename what they capture: the data tells which it is.
    const auto found = std::ranges::find(captures.tensors, given.view(), &CapturedTensor::view);
    if (found != captures.tensors.end()) {
      if (!is_float(given.spec.dtype)) {
        bad_input(fmt::format("--grad {}: it holds {}; expected floats", name,
                              fovea::name(given.spec.dtype)));
      }
      return {name, found->name, path, make_array(given.spec.dtype, shape_of(given.spec))};
    }
  }
  for (const CapturedScalar& scalar : captures.scalars) {
    if (scalar.name == name && scalar.type == ExprType::floating)
      return {name, name, path, make_array(Dtype::f32, std::array{std::int64_t{1}})};
  }
  bad_input(
      fmt::format("--grad {}: no such input of the score; expected bias, sinks, alibi or what "
                  "--score-mod reads",
                  name));
}

}  // namespace

void add_gradient_options(CommandLine& line, GradientOptions& o) {
  line.add_flag(
      {"--backward", "", kGroup, "compute gradients too: of sum(dout * out) + sum(dlse * lse)"},
      o.is_wanted);
  add_path(line, "--dout", "the gradient of out, .npy in the shape of out", o.dout);
  add_path(line, "--dlse", "the gradient of lse, .npy (default 0)", o.dlse);
  add_path(line, "--dq", "write the gradient of q, .npy in its dtype", o.dq);
  add_path(line, "--dk", "the same of k", o.dk);
  add_path(line, "--dv", "the same of v", o.dv);
  line.add_repeated(
      {"--grad", "NAME=FILE", kGroup,
       "write the gradient of bias, sinks, alibi, or of a float that --score-mod reads; may be "
       "repeated"},
      [&o](const std::string& option, const std::string& text) {
        auto assignment = parse_assignment(option, text);
        const auto has_name = [&](const auto& other) { return other.first == assignment.first; };
        if (std::ranges::any_of(o.others, has_name))
          bad_input(fmt::format("{}: the name {} is given twice", option, assignment.first));
        o.others.push_back(std::move(assignment));
      });
}

Gradients load_gradients(const GradientOptions& options, const AttentionOptions& attention,
                         const Inputs& inputs, const ScoreMod& score, OutputFiles& files) {
  check_options(options);
  Gradients gradients;
  if (!options.is_wanted) return gradients;
  add_output("--dq", options.dq, files);
  add_output("--dk", options.dk, files);
  add_output("--dv", options.dv, files);
  for (const auto& [name, path] : options.others) add_output("--grad " + name, path, files);
  gradients.dout =
      read("--dout", options.dout, attention, out_spec(inputs, inputs.q.spec.dtype), files);
  gradients.dlse = read("--dlse", options.dlse, attention, lse_spec(attention, inputs), files);
  for (const auto& [gradient, input] : {std::pair{&gradients.dq, &inputs.q},
                                        {&gradients.dk, &inputs.k},
                                        {&gradients.dv, &inputs.v}}) {
    *gradient = make_array(input->spec.dtype, shape_of(input->spec));
  }
  for (const auto& [name, path] : options.others) {
    if (name == "sinks" && inputs.sinks) {
      gradients.dsinks = make_array(Dtype::f32, shape_of(inputs.sinks.spec));
      gradients.dsinks_path = path;
    } else {
      gradients.captured.push_back(captured(name, path, inputs, score));
    }
  }
  return gradients;
}

AttentionBackward make_backward(const Gradients& gradients, const AttentionForward& forward,
                                Layout layout) {
  AttentionBackward args{.dout = as_bshd(gradients.dout.view(), layout),
                         .dlse = gradients.dlse.view(),
                         .forward = forward,
                         .dq = as_bshd(gradients.dq.mutable_view(), layout),
                         .dk = as_bshd(gradients.dk.mutable_view(), layout),
                         .dv = as_bshd(gradients.dv.mutable_view(), layout)};
  if (gradients.dsinks) args.dsinks = gradients.dsinks.mutable_view();
  for (const Gradients::Captured& each : gradients.captured)
    args.dcaptured.push_back({each.slot, each.array.mutable_view()});
  return args;
}

std::vector<NamedGradient> named(const Gradients& gradients, const GradientOptions& options) {
  std::vector<NamedGradient> all;
  if (!options.is_wanted) return all;
  all.push_back({"dq", options.dq, gradients.dq});
  all.push_back({"dk", options.dk, gradients.dk});
  all.push_back({"dv", options.dv, gradients.dv});
  if (gradients.dsinks) all.push_back({"sinks", gradients.dsinks_path, gradients.dsinks});
  for (const Gradients::Captured& each : gradients.captured)
    all.push_back({each.name, each.path, each.array});
  return all;
}

}  // namespace fovea::tools
