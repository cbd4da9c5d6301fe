#include "support/gradient_case.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <limits>

#include "expr/node.hpp"
#include "reference/query_rows.hpp"
#include "reference/softmax.hpp"
#include "support/random.hpp"

namespace fovea::testing {

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// In the first head of the first sequence.
void set_nan(GuardedTensor& tensor, std::int64_t row, std::int64_t col) {
  const TensorSpec spec = tensor.view().spec();
  tensor.set(row * spec.strides[1] + col * spec.strides[3], kNaN);
}

/// lse is an input of backward, and row_max is none of its business.
Case as_backward(Case problem) {
  problem.wants_lse = true;
  problem.wants_row_max = false;
  return problem;
}

/// Tensors beside those of the case, each in a layout of its own.
class DrawnTensors {
 public:
  DrawnTensors(const Case& problem, std::uint64_t first_stream)
      : problem_(problem), stream_(first_stream) {}

  GuardedTensor like(const TensorSpec& spec, Dtype dtype, Strides strides) {
    const std::span shape(spec.shape.data(), static_cast<std::size_t>(spec.rank));
    return GuardedTensor(problem_.drawn(dtype, shape, stream_++, strides));
  }

  /// Of a scalar: one element.
  GuardedTensor like_captured(const TensorView& captured, Dtype dtype, Strides strides) {
    const auto one = make_spec(dtype, std::array<std::int64_t, 1>{1});
    return like(captured ? captured.spec() : one, dtype, strides);
  }

 private:
  const Case& problem_;
  std::uint64_t stream_;
};

bool shares_memory(Layout layout) {
  return layout == Layout::shared_batch || layout == Layout::shared_head;
}

std::vector<CapturedTensor> views(std::vector<NamedTensor>& tensors) {
  std::vector<CapturedTensor> result;
  for (NamedTensor& each : tensors) result.push_back({each.name, each.tensor.mutable_view()});
  return result;
}

}  // namespace

std::string GradientCase::describe() const {
  std::string text = forward.describe();
  if (dout_dtype) text += fmt::format("; dout {}", fovea::name(*dout_dtype));
  if (gradient_dtype) text += fmt::format("; gradients {}", fovea::name(*gradient_dtype));
  if (tangent_dtype) text += fmt::format("; tangents {}", fovea::name(*tangent_dtype));
  if (!moves_q) text += "; q stays";
  if (!moves_k) text += "; k stays";
  if (!moves_v) text += "; v stays";
  if (!has_dlse) text += "; no dlse";
  return text;
}

GradientMemory::GradientMemory(const GradientCase& problem)
    : forward(as_backward(problem.forward)), problem_(problem) {
  const Case& of = problem.forward;
  const Dtype out_dtype = of.out_dtype.value_or(of.dtype);
  const Dtype gradient_dtype = problem.gradient_dtype.value_or(of.dtype);
  const TensorSpec out = forward.out.view().spec();
  const TensorSpec lse = forward.lse.view().spec();
  dout = tensor_like(out, problem.dout_dtype.value_or(out_dtype), of.layout);
  DrawnTensors drawn(of, kGradientLayout);
  if (problem.has_dlse) dlse = drawn.like(lse, Dtype::f32, Strides::of_input);
  dq = tensor_like(forward.q.view().spec(), gradient_dtype, of.out_layout);
  dk = tensor_like(forward.k.view().spec(), gradient_dtype, of.out_layout);
  dv = tensor_like(forward.v.view().spec(), gradient_dtype, of.out_layout);
  const Dtype tangent_dtype = problem.tangent_dtype.value_or(of.dtype);
  q_tangent = tensor_like(forward.q.view().spec(), tangent_dtype, of.layout);
  k_tangent = tensor_like(forward.k.view().spec(), tangent_dtype, of.layout);
  v_tangent = tensor_like(forward.v.view().spec(), tangent_dtype, of.layout);
  out_tangent = tensor_like(out, out_dtype, of.out_layout);
  lse_tangent = drawn.like(lse, Dtype::f32, Strides::of_output);
  if (of.has_sinks) {
    const TensorSpec sinks = forward.sinks.view().spec();
    dsinks = drawn.like(sinks, Dtype::f32, Strides::of_output);
    sinks_tangent = drawn.like(sinks, Dtype::f32, Strides::of_any_values);
  }
  if (problem.wants_captured) make_captured();
  fill_inputs();
  poison_blind_rows();
  poison_hidden_tangents();
}

void GradientMemory::make_captured() {
  const Dtype dtype = problem_.gradient_dtype.value_or(Dtype::f32);
  DrawnTensors drawn(problem_.forward, kCapturedGradientLayout);
  const auto add = [&](const std::string& name, const TensorView& like) {
    dcaptured.push_back({name, drawn.like_captured(like, dtype, Strides::of_output)});
    captured_tangents.push_back(
        {name, drawn.like_captured(like, Dtype::f32, Strides::of_any_values)});
  };
  const Captures& captures = problem_.forward.score.captures();
  for (const CapturedTensor& each : captures.tensors) {
    if (expr::type_of(each.view.dtype()) == ExprType::floating) add(each.name, each.view);
  }
  for (const CapturedScalar& each : captures.scalars) {
    if (each.type == ExprType::floating) add(each.name, {});
  }
}

void GradientMemory::fill_inputs() {
  std::uint64_t stream = 100;
  const auto fill = [&](GuardedTensor& tensor) {
    const Random random(problem_.forward.seed, stream++);
    if (tensor.view()) tensor.fill([&](std::int64_t i) { return random.normal(i); });
  };
  for (GuardedTensor* each : {&dout, &dlse, &q_tangent, &k_tangent, &v_tangent, &sinks_tangent})
    fill(*each);
  for (NamedTensor& each : captured_tangents) fill(each.tensor);
  if (problem_.has_nan_rows) set_nan_rows();
  if (problem_.nan_key) set_nan_key(*problem_.nan_key);
}

void GradientMemory::set_nan_rows() {
  const std::int64_t rows = dout.view().size(1);
  set_nan(dout, rows / 2, 3);
  set_nan(dout, rows - 1, 0);
  set_nan(forward.q, rows / 3, 1);
}

void GradientMemory::set_nan_key(std::int64_t key) {
  set_nan(forward.k, key, 5);
  forward.k.seal();
}

void GradientMemory::poison_blind_rows() {
  const AttentionForward args = forward.args();
  const reference::HeadRows q(args.q);
  const reference::HeadRows k(args.k);
  reference::Softmax softmax(args);
  const bool is_packed = args.q.rank() == 3;
  for (const reference::QueryRow& row : reference::query_rows(args)) {
    if (!softmax(row, q[row.query], k).keys.empty()) continue;
    blind_rows_.push_back({row.query.batch, row.query.row, row.query.head});
    if (dlse.view() && !args.sinks) {  // with a sink, lse is the sink: dlse counts
      const TensorSpec spec = dlse.view().spec();
      const auto heads = static_cast<std::size_t>(spec.rank) - 2;
      dlse.set((is_packed ? 0 : row.query.batch * spec.strides[0]) +
                   row.query.head * spec.strides[heads] + row.query.row * spec.strides[heads + 1],
               kNaN);
    }
  }
  for (std::int64_t i = 1; i <= (is_packed ? problem_.forward.trailing_rows : 0); ++i) {
    for (std::int64_t head = 0; head < args.q.size(1); ++head) {
      blind_rows_.push_back({.batch = 0, .row = args.q.size(0) - i, .head = head});
      if (dlse.view())
        dlse.set(head * dlse.view().stride(0) + (args.q.size(0) - i) * dlse.view().stride(1), kNaN);
    }
  }
  if (!shares_memory(problem_.forward.layout)) {
    for (GuardedTensor* input : {&forward.q, &dout, &q_tangent}) {
      for (const RowOfHead& row : blind_rows_) set_row(*input, row, kNaN);
    }
  }
  for (GuardedTensor* input : {&forward.q, &dout, &dlse, &q_tangent}) input->seal();
}

/// What the case poisons in k and v, because no row sees it, has tangents of poison.
void GradientMemory::poison_hidden_tangents() {
  const reference::HeadRows k(forward.k.view());
  const TensorSpec spec = forward.k.view().spec();
  const bool is_packed = spec.rank == 3;
  const auto size = [&](std::size_t dim) { return spec.shape[dim - (is_packed ? 1 : 0)]; };
  RowOfHead at;
  for (at.batch = 0; at.batch < (is_packed ? 1 : size(0)); ++at.batch) {
    for (at.row = 0; at.row < size(1); ++at.row) {
      for (at.head = 0; at.head < size(2); ++at.head) {
        if (std::isfinite(k[{at.batch, at.row, at.head}][0])) continue;
        set_row(k_tangent, at, kNaN);
        set_row(v_tangent, at, kNaN);
      }
    }
  }
  k_tangent.seal();
  v_tangent.seal();
}

void GradientMemory::seal_forward() {
  for (const RowOfHead& row : blind_rows_) set_row(forward.out, row, kNaN);
  forward.out.seal();
  forward.lse.seal();
}

void GradientMemory::poison_outputs() {
  for (GuardedTensor* output : {&dq, &dk, &dv, &dsinks, &out_tangent, &lse_tangent})
    output->poison();
  for (NamedTensor& each : dcaptured) each.tensor.poison();
}

AttentionBackward GradientMemory::args(CpuTarget target) {
  AttentionBackward args{.dout = dout.view(), .dlse = dlse.view(), .forward = forward.args(target)};
  args.dq = dq.mutable_view();
  args.dk = dk.mutable_view();
  args.dv = dv.mutable_view();
  args.dsinks = dsinks.mutable_view();
  args.dcaptured = views(dcaptured);
  return args;
}

AttentionJvp GradientMemory::jvp_args(CpuTarget target) {
  AttentionJvp args{.forward = forward.args(target), .sinks_tangent = sinks_tangent.view()};
  if (problem_.moves_q) args.q_tangent = q_tangent.view();
  if (problem_.moves_k) args.k_tangent = k_tangent.view();
  if (problem_.moves_v) args.v_tangent = v_tangent.view();
  args.captured_tangents = views(captured_tangents);
  args.out_tangent = out_tangent.mutable_view();
  args.lse_tangent = lse_tangent.mutable_view();
  return args;
}

std::string GradientMemory::damage() const {
  std::string found = forward.damage();
  const auto check_input = [&](const GuardedTensor& tensor, std::string_view name) {
    if (!tensor.is_unchanged()) found += fmt::format("input {} was written\n", name);
  };
  const auto check_output = [&](const GuardedTensor& tensor, std::string_view name) {
    if (!tensor.has_intact_guards()) found += fmt::format("wrote outside of {}\n", name);
  };
  check_input(dout, "dout");
  check_input(dlse, "dlse");
  check_input(q_tangent, "q_tangent");
  check_input(k_tangent, "k_tangent");
  check_input(v_tangent, "v_tangent");
  check_output(dq, "dq");
  check_output(dk, "dk");
  check_output(dv, "dv");
  check_output(dsinks, "dsinks");
  check_output(out_tangent, "out_tangent");
  check_output(lse_tangent, "lse_tangent");
  for (const NamedTensor& each : dcaptured) check_output(each.tensor, each.name);
  return found;
}

}  // namespace fovea::testing
