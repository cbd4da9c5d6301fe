// The oracle's gradients, and gradients of gradients, against those that PyTorch's float64 autograd
// gave (scripts/capture_torch_gradients.py).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/backward.hpp"

#include "reference/attention_backward.hpp"

namespace fovea::reference {
namespace {

constexpr std::int64_t kBatch = 1, kHeadDimQk = 3, kHeadDimV = 2;  // of all problems

struct TorchCapture {
  std::string name;
  std::vector<std::int64_t> shape{};  // none: a scalar
  std::vector<float> values{};
  std::vector<double> expected{};  // gradient
};

struct TorchProblem {
  std::string name;
  std::int64_t seqlen_q = 0, seqlen_kv = 0, num_heads_q = 0, num_heads_kv = 0;
  std::optional<float> softmax_scale{};
  std::string score{}, mask{};
  std::vector<TorchCapture> captured{};
  std::map<std::string, std::vector<float>, std::less<>> inputs{};
  std::map<std::string, std::vector<double>, std::less<>> expected{};

  const float* input(std::string_view which) const { return inputs.find(which)->second.data(); }
};

template <typename T>
std::vector<T> rest_of(std::istringstream& line) {
  std::vector<T> values;
  for (T value; line >> value;) values.push_back(value);
  return values;
}

std::string text_of(std::istringstream& line) {
  std::string text;
  std::getline(line >> std::ws, text);
  return text;
}

void read_field(TorchProblem& problem, const std::string& field, std::istringstream& line) {
  if (field == "seqlens") {
    line >> problem.seqlen_q >> problem.seqlen_kv;
  } else if (field == "heads") {
    line >> problem.num_heads_q >> problem.num_heads_kv;
  } else if (field == "softmax_scale") {
    line >> problem.softmax_scale.emplace();
  } else if (field == "score" || field == "mask") {
    (field == "score" ? problem.score : problem.mask) = text_of(line);
  } else if (field == "captured") {
    line >> problem.captured.emplace_back().name;
    problem.captured.back().shape = rest_of<std::int64_t>(line);
  } else if (field == "values") {
    problem.captured.back().values = rest_of<float>(line);
  } else if (field == "expected") {
    problem.captured.back().expected = rest_of<double>(line);
  } else if (field.starts_with("expected_")) {
    problem.expected[field.substr(9)] = rest_of<double>(line);
  } else {
    problem.inputs[field] = rest_of<float>(line);
  }
}

std::vector<TorchProblem> torch_problems() {
  std::ifstream file(FOVEA_TORCH_GRADIENTS);
  std::vector<TorchProblem> problems;
  for (std::string text; std::getline(file, text);) {
    std::istringstream line(text);
    std::string field;
    line >> field;
    if (field.empty() || field[0] == '#') continue;
    if (field == "problem") {
      problems.push_back({.name = text_of(line)});
    } else {
      read_field(problems.back(), field, line);
    }
  }
  return problems;
}

/// Captured values have ten digits.
void expect_near(const std::vector<double>& got, const std::vector<double>& expected,
                 std::string_view name) {
  ASSERT_EQ(got.size(), expected.size()) << name;
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], expected[i], 1e-9 * (1 + std::fabs(expected[i]))) << name << " " << i;
}

/// Gradients by name; one that the problem does not have is empty on both sides.
void expect_all_near(
    const TorchProblem& problem,
    const std::vector<std::pair<std::string_view, const std::vector<double>*>>& got) {
  for (const auto& [name, values] : got) {
    const auto found = problem.expected.find(name);
    expect_near(*values, found == problem.expected.end() ? std::vector<double>() : found->second,
                name);
  }
}

Captures captures_of(const TorchProblem& problem) {
  Captures captures;
  for (const TorchCapture& each : problem.captured) {
    if (each.shape.empty()) {
      captures.scalars.push_back(CapturedScalar::of(each.name, each.values[0]));
    } else {
      const TensorSpec spec = make_spec(Dtype::f32, each.shape);
      captures.tensors.push_back({each.name, TensorView(each.values.data(), spec)});
    }
  }
  return captures;
}

AttentionDoubleBackward args_of(const TorchProblem& p) {
  const auto queries = [&](std::string_view name, std::int64_t dim) {
    return view(p.input(name), {kBatch, p.seqlen_q, p.num_heads_q, dim});
  };
  const auto keys = [&](std::string_view name, std::int64_t dim) {
    return view(p.input(name), {kBatch, p.seqlen_kv, p.num_heads_kv, dim});
  };
  AttentionDoubleBackward args;
  AttentionForward& forward = args.backward.forward;
  forward.q = queries("q", kHeadDimQk);
  forward.k = keys("k", kHeadDimQk);
  forward.v = keys("v", kHeadDimV);
  forward.softmax_scale = p.softmax_scale;
  if (p.inputs.contains("sinks")) forward.sinks = view(p.input("sinks"), {p.num_heads_q});
  forward.score = parse_score_mod(p.score, captures_of(p));
  forward.mask = parse_mask_mod(p.mask);
  args.backward.dout = queries("dout", kHeadDimV);
  args.backward.dlse = view(p.input("dlse"), {kBatch, p.num_heads_q, p.seqlen_q});
  args.ddq = queries("ddq", kHeadDimQk);
  args.ddk = keys("ddk", kHeadDimQk);
  args.ddv = keys("ddv", kHeadDimV);
  return args;
}

TEST(TorchGradients, AreThoseOfTheOracle) {
  const std::vector<TorchProblem> problems = torch_problems();
  EXPECT_EQ(problems.size(), 13U) << FOVEA_TORCH_GRADIENTS;
  for (const TorchProblem& problem : problems) {
    SCOPED_TRACE(problem.name);
    const BackwardResult got = reference::attention_backward(args_of(problem).backward);
    expect_all_near(problem,
                    {{"dq", &got.dq}, {"dk", &got.dk}, {"dv", &got.dv}, {"dsinks", &got.dsinks}});
    ASSERT_EQ(got.dcaptured.size(), problem.captured.size());
    for (const TorchCapture& each : problem.captured)
      expect_near(got.dcaptured.at(each.name), each.expected, each.name);
  }
}

TEST(TorchGradients, OfGradientsAreThoseOfTheOracle) {
  for (const TorchProblem& problem : torch_problems()) {
    SCOPED_TRACE(problem.name);
    const DoubleBackwardResult got = reference::attention_double_backward(args_of(problem));
    expect_all_near(problem, {{"grad_q", &got.grad_q},
                              {"grad_k", &got.grad_k},
                              {"grad_v", &got.grad_v},
                              {"grad_dout", &got.grad_dout},
                              {"grad_dlse", &got.grad_dlse}});
  }
}

}  // namespace
}  // namespace fovea::reference
