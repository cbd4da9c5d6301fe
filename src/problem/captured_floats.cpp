#include "problem/captured_floats.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "core/shape.hpp"

namespace fovea {
namespace {

/// For the text of a refusal.
std::string names_of_floats(const Captures& captures) {
  std::string names;
  const auto add = [&](const std::string& name) {
    names += (names.empty() ? "'" : ", '") + name + "'";
  };
  for (const CapturedTensor& tensor : captures.tensors) {
    if (is_float(tensor.view.dtype())) add(tensor.name);
  }
  for (const CapturedScalar& scalar : captures.scalars) {
    if (scalar.type == ExprType::floating) add(scalar.name);
  }
  return names.empty() ? "none, since the score program captures no floats" : "one of " + names;
}

std::string got(const TensorSpec& spec) { return spec.rank == 0 ? "missing" : to_string(spec); }

}  // namespace

bool check_captured_float(const TensorChecks& checks, const Captures& captures,
                          const CapturedFloat& given) {
  const auto& [argument, name, spec] = given;
  const auto tensor = std::ranges::find(captures.tensors, name, &CapturedTensor::name);
  const auto scalar = std::ranges::find(captures.scalars, name, &CapturedScalar::name);
  const bool is_tensor = tensor != captures.tensors.end();
  const bool is_one_element = !is_tensor || tensor->view.rank() == 0;
  if (!is_tensor && scalar == captures.scalars.end()) {
    checks.refuse(
        fmt::format("{} names '{}'; expected {}", argument, name, names_of_floats(captures)));
  }
  if (is_tensor ? !is_float(tensor->view.dtype()) : scalar->type != ExprType::floating) {
    checks.refuse(fmt::format("{} names '{}', which is {}; expected a float", argument, name,
                              is_tensor ? fovea::name(tensor->view.dtype()) : "an int scalar"));
  }
  if (!is_float(spec.dtype)) {
    checks.refuse(fmt::format("{} '{}' is {}; expected f32, f16 or bf16", argument, name,
                              fovea::name(spec.dtype)));
  }
  if (!is_one_element && !std::ranges::equal(shape_of(spec), shape_of(tensor->view.spec()))) {
    checks.refuse(fmt::format("{} '{}' is {}; expected {}", argument, name, got(spec),
                              to_string(make_spec(spec.dtype, shape_of(tensor->view.spec())))));
  }
  if (is_one_element && (spec.rank < 1 || spec.rank > kMaxRank || spec.num_elements() != 1)) {
    checks.refuse(fmt::format("{} '{}' is {}; expected one element of f32, f16 or bf16", argument,
                              name, got(spec)));
  }
  return is_one_element;
}

}  // namespace fovea
