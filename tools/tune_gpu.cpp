#include "tune_gpu.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fovea/error.hpp"
#include "fovea/kv_cache.hpp"

#include "bench_row.hpp"
#include "check.hpp"
#include "core/num_threads.hpp"
#include "core/shape.hpp"
#include "cuda/backward/choices.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/jit/loader.hpp"
#include "gradient_call.hpp"
#include "kernel_difference.hpp"
#include "paged_call.hpp"
#include "problem/decode.hpp"
#include "reference/element.hpp"

namespace fovea::tools {
namespace {

using cuda::driver::DeviceMemory;

constexpr std::string_view kWhere = "tune";
/// The oracle takes a second or two for so many scores; its gradients, for a third.
constexpr double kMostOracleScores = 4e6;
constexpr unsigned char kPoison = 0xff;  // NaN in every dtype

ForwardProblem problem_of_cache(const AttentionDecode& args) {
  const std::int64_t keys_of_each = args.cache.page_table.size(1) * args.cache.k.size(1);
  const std::int64_t planned = std::max(kLeastPlannedKeys, keys_of_each);
  return validate_decode_problem(decode_problem(args, planned, 0, kWhere), cache_layout(args),
                                 kWhere);
}

double largest_of(const TensorView& view) {
  double largest = 0;
  for (const double value : reference::elements(view)) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

reference::Products products_of(Dtype dtype) {
  return dtype == Dtype::bf16 ? ComputeDtype::bf16 : ComputeDtype::f32;
}

std::span<std::byte> bytes_of(const DeviceMemory& memory) {
  return {static_cast<std::byte*>(memory.data()), memory.bytes()};
}

/// On all cores, into the cache on the disk: what fails is reported when the kernel is asked for.
template <typename Plan>
void compile_all(const std::vector<Plan>& plans, const Gpu& gpu,
                 const std::function<bool()>& is_over) {
  const auto architecture = cuda::jit::architecture_of(gpu.context().info());
  std::atomic<std::size_t> next = 0;
  const auto compile = [&] {
    for (std::size_t i = next++; i < plans.size() && !is_over(); i = next++) {
      try {
        for (const auto& kernel : planned_kernels(plans[i]))
          cuda::jit::process_loader().cubin(kernel.text, architecture);
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): why_out meets it again
      }
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 0; i < default_num_threads(); ++i) threads.emplace_back(compile);
}

/// Enough for each of them.
template <typename Plan>
DeviceMemory workspace_of(const std::vector<Plan>& plans, const Gpu& gpu) {
  std::size_t bytes = 1;
  for (const Plan& plan : plans) bytes = std::max(bytes, plan.workspace_bytes);
  return {gpu.context(), bytes};
}

/// A job's tensors on the host and on a GPU.
struct PosedCall {
  Inputs host, inputs;
  Array host_out, host_lse, out, lse;
  AttentionForward on_host, args;

  PosedCall(const Job& job, const Gpu& gpu) : host(job.make()), inputs(gpu.copy(host)) {
    const TensorSpec spec = out_spec(host, host.q.spec.dtype);
    host_out = make_array(spec.dtype, shape_of(spec));
    host_lse = make_array(Dtype::f32, shape_of(lse_spec(job.options, host)));
    out = gpu.copy(host_out);
    lse = gpu.copy(host_lse);
    on_host = call(job.options, host, host_out, host_lse);
    args = call(job.options, inputs, out, lse);
    args.stream = gpu.stream_handle();
  }

  static AttentionForward call(const AttentionOptions& options, const Inputs& inputs,
                               const Array& out, const Array& lse) {
    AttentionForward args = make_call(options, inputs);
    args.out = as_bshd(out.mutable_view(), options.layout);
    args.lse = lse.mutable_view();
    return args;
  }
};

class ForwardTrack final : public GpuTrack {
 public:
  ForwardTrack(const Job& job, const Gpu& a_gpu, FlushedClock& clock, std::function<bool()> is_over)
      : GpuTrack(a_gpu, clock, std::move(is_over)),
        call_(job, a_gpu),
        largest_value_(largest_of(call_.host.v.view())) {
    if (job.page_size > 0) paged_ = std::make_unique<PagedCall>(call_.args, job.page_size, &a_gpu);
    problem_ = paged_ ? problem_of_cache(paged_->args) : validate(problem_of(call_.args), kWhere);
    const cuda::DeviceTraits device = cuda::traits_of(a_gpu.context().info());
    tuned() = {.name = job.name,
               .problem_class = cuda::problem_class(problem_),
               .device = device,
               .choices = {}};
    if (!choose_forward(problem_, device).candidate.empty()) {
      for (const cuda::Choice& choice : choices_of(problem_, device)) {
        tuned().choices.push_back(winner_of(choice));
        plans_.push_back(plan_choice(problem_, device, choice));
      }
    }
    workspace_.emplace(workspace_of(plans_, a_gpu));
    compile_all(plans_, a_gpu, [this] { return this->is_over(); });
  }

 private:
  void enqueue(std::size_t contender) override {
    const cuda::ForwardPlan& plan = plans_[contender];
    if (!paged_) {
      attention_forward(problem_, plan, call_.args, workspace_->data(), gpu().stream_handle());
      return;
    }
    const GrownCache cache{paged_->args.cache};
    attention_forward(problem_, plan, forward_of(paged_->args), workspace_->data(),
                      gpu().stream_handle(), &cache);
  }

  void try_out(std::size_t contender) override {
    cuda::ForwardLadder::load(cuda::jit::process_loader(), gpu().context(), plans_[contender]);
    for (const Array* array : {&call_.out, &call_.lse}) gpu().fill(*array, kPoison);
    enqueue(contender);
    gpu().copy_back(call_.out, call_.host_out);
    gpu().copy_back(call_.lse, call_.host_lse);
  }

  std::string why_wrong(std::size_t contender) override {
    const KernelResults results{reference::elements(call_.on_host.out),
                                reference::elements(call_.on_host.lse)};
    const Dtype dtype = call_.args.q.dtype();
    if (contender > 0) return why_differs(results, expected_, dtype, largest_value_);
    expected_ = results;
    const double scores =
        static_cast<double>(results.lse.size()) * static_cast<double>(problem_.seqlen_kv);
    if (paged_ || scores > kMostOracleScores) return "";
    return check_forward(call_.on_host, products_of(dtype)).passes()
               ? ""
               : "differs from fp64 attention by more than allowed";
  }

  PosedCall call_;
  std::unique_ptr<PagedCall> paged_;  // null: tensors of keys
  ForwardProblem problem_;
  std::vector<cuda::ForwardPlan> plans_;  // of the choices; kernels are loaded when asked for
  std::optional<DeviceMemory> workspace_;
  KernelResults expected_;
  double largest_value_ = 0;
};

class BackwardTrack final : public GpuTrack {
 public:
  BackwardTrack(const Job& job, const Gpu& a_gpu, FlushedClock& clock,
                std::function<bool()> is_over)
      : GpuTrack(a_gpu, clock, std::move(is_over)),
        call_(job, a_gpu),
        on_host_(call_.on_host, nullptr),
        gradients_(call_.args, &a_gpu),
        problem_(validate(problem_of(gradients_.args), kWhere)) {
    run_forward();
    const cuda::DeviceTraits device = cuda::traits_of(a_gpu.context().info());
    tuned() = {.name = job.name,
               .problem_class = cuda::problem_class(problem_),
               .device = device,
               .choices = {}};
    if (!choose_backward(problem_, device).candidate.empty()) {
      for (const cuda::BackwardChoice& choice : choices_of(problem_, device)) {
        tuned().choices.push_back(winner_of(choice));
        plans_.push_back(plan_choice(problem_, device, choice));
      }
    }
    workspace_.emplace(workspace_of(plans_, a_gpu));
    compile_all(plans_, a_gpu, [this] { return this->is_over(); });
  }

 private:
  /// out and lse, on both sides.
  void run_forward() {
    const Plan plan = fovea::plan(problem_of(call_.args));
    const DeviceMemory workspace(gpu().context(), plan.workspace_bytes());
    AttentionForward args = call_.args;
    args.workspace = bytes_of(workspace);
    plan.run(args);
    gpu().copy_back(call_.out, call_.host_out);
    gpu().copy_back(call_.lse, call_.host_lse);
  }

  std::vector<std::pair<const Array*, const Array*>> outputs() const {
    std::vector<std::pair<const Array*, const Array*>> arrays = {{&gradients_.dq, &on_host_.dq},
                                                                 {&gradients_.dk, &on_host_.dk},
                                                                 {&gradients_.dv, &on_host_.dv}};
    if (gradients_.dsinks) arrays.emplace_back(&gradients_.dsinks, &on_host_.dsinks);
    return arrays;
  }

  void enqueue(std::size_t contender) override {
    attention_backward(problem_, plans_[contender], gradients_.args, workspace_->data(),
                       gpu().stream_handle());
  }

  void try_out(std::size_t contender) override {
    cuda::load(cuda::jit::process_loader(), gpu().context(), plans_[contender]);
    for (const auto& [there, here] : outputs()) gpu().fill(*there, kPoison);
    enqueue(contender);
    for (const auto& [there, here] : outputs()) gpu().copy_back(*there, *here);
  }

  std::string why_wrong(std::size_t contender) override {
    std::vector<std::vector<double>> results;
    for (const auto& [there, here] : outputs())
      results.push_back(reference::elements(here->view()));
    const Dtype dtype = call_.args.q.dtype();
    if (contender > 0) return why_gradients_differ(results, expected_, dtype);
    expected_ = std::move(results);
    const double scores = static_cast<double>(call_.host_lse.spec.num_elements()) *
                          static_cast<double>(problem_.forward.seqlen_kv);
    if (3 * scores > kMostOracleScores) return "";
    for (const auto& [name, difference] : check_backward(on_host_.args, products_of(dtype))) {
      if (!difference.passes()) return name + " differs from fp64 gradients by more than allowed";
    }
    return "";
  }

  PosedCall call_;
  GradientCall on_host_, gradients_;
  GradientProblem problem_;
  std::vector<cuda::BackwardPlan> plans_;  // as those of forward
  std::optional<DeviceMemory> workspace_;
  std::vector<std::vector<double>> expected_;
};

}  // namespace

std::unique_ptr<GpuTrack> GpuTrack::make(const Job& job, bool is_of_gradients, const Gpu& gpu,
                                         FlushedClock& clock, std::function<bool()> is_over) {
  if (is_of_gradients) return std::make_unique<BackwardTrack>(job, gpu, clock, std::move(is_over));
  return std::make_unique<ForwardTrack>(job, gpu, clock, std::move(is_over));
}

std::string GpuTrack::why_out(std::size_t contender) {
  try {
    try_out(contender);
  } catch (const Error& error) {
    return error.what();
  }
  return why_wrong(contender);
}

double GpuTrack::seconds(std::size_t contender) {
  return clock_.seconds([&] { enqueue(contender); });
}

}  // namespace fovea::tools
