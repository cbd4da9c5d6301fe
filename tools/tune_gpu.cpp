#include "tune_gpu.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <thread>

#include "fovea/error.hpp"
#include "fovea/kv_cache.hpp"

#include "bench_row.hpp"
#include "check.hpp"
#include "core/num_threads.hpp"
#include "core/shape.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/jit/loader.hpp"
#include "paged_call.hpp"
#include "problem/decode.hpp"
#include "reference/element.hpp"

namespace fovea::tools {
namespace {

using cuda::ForwardPlan;
using cuda::driver::DeviceMemory;

constexpr std::string_view kWhere = "tune";
/// The oracle takes a second or two for so many scores.
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

}  // namespace

struct GpuTrack::Impl {
  const Gpu& gpu;
  FlushedClock& clock;
  std::function<bool()> is_over;
  Inputs host, inputs;
  Array host_out, host_lse, out, lse;
  AttentionForward on_host, args;
  std::unique_ptr<PagedCall> paged;  // null: tensors of keys
  TunedProblem tuned;
  std::vector<ForwardPlan> plans;  // of the choices; kernels are loaded when they are asked for
  std::optional<DeviceMemory> workspace;
  KernelResults expected;
  double largest_value = 0;

  Impl(const Job& job, const Gpu& a_gpu, FlushedClock& a_clock, std::function<bool()> an_is_over)
      : gpu(a_gpu),
        clock(a_clock),
        is_over(std::move(an_is_over)),
        host(job.make()),
        inputs(gpu.copy(host)),
        largest_value(largest_of(host.v.view())) {
    const TensorSpec spec = out_spec(host, host.q.spec.dtype);
    host_out = make_array(spec.dtype, shape_of(spec));
    host_lse = make_array(Dtype::f32, shape_of(lse_spec(job.options, host)));
    out = gpu.copy(host_out);
    lse = gpu.copy(host_lse);
    on_host = call(job.options, host, host_out, host_lse);
    args = call(job.options, inputs, out, lse);
    if (job.page_size > 0) paged = std::make_unique<PagedCall>(args, job.page_size, &gpu);
    tuned.name = job.name;
    tuned.problem = paged ? problem_of_cache(paged->args) : validate(problem_of(args), kWhere);
    tuned.device = cuda::traits_of(gpu.context().info());
    if (!choose_forward(tuned.problem, tuned.device).candidate.empty())
      tuned.choices = choices_of(tuned.problem, tuned.device);
    make_plans();
  }

  static AttentionForward call(const AttentionOptions& options, const Inputs& inputs,
                               const Array& out, const Array& lse) {
    AttentionForward args = make_call(options, inputs);
    args.out = as_bshd(out.mutable_view(), options.layout);
    args.lse = lse.mutable_view();
    return args;
  }

  void make_plans() {
    std::size_t bytes = 0;
    for (const cuda::Choice& choice : tuned.choices) {
      plans.push_back(plan_choice(tuned.problem, tuned.device, choice));
      bytes = std::max(bytes, plans.back().workspace_bytes);
    }
    workspace.emplace(gpu.context(), std::max<std::size_t>(1, bytes));
    compile_all();
  }

  /// On all cores, into the cache on the disk: what fails is reported when the kernel is asked for.
  void compile_all() const {
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

  void enqueue(const ForwardPlan& plan) const {
    if (!paged) {
      attention_forward(tuned.problem, plan, args, workspace->data(), gpu.stream_handle());
      return;
    }
    const GrownCache cache{paged->args.cache};
    attention_forward(tuned.problem, plan, forward_of(paged->args), workspace->data(),
                      gpu.stream_handle(), &cache);
  }

  /// The table's kernel is compared with the oracle where that is quick, the others with it.
  std::string why_wrong(std::size_t contender) {
    const KernelResults results{reference::elements(on_host.out), reference::elements(on_host.lse)};
    if (contender > 0) return why_differs(results, expected, args.q.dtype(), largest_value);
    expected = results;
    const double scores =
        static_cast<double>(results.lse.size()) * static_cast<double>(tuned.problem.seqlen_kv);
    if (paged || scores > kMostOracleScores) return "";
    const bool is_bf16 = args.q.dtype() == Dtype::bf16;
    const CheckResult check =
        check_forward(on_host, is_bf16 ? ComputeDtype::bf16 : ComputeDtype::f32);
    return check.passes() ? "" : "differs from fp64 attention by more than allowed";
  }

  std::string why_out(std::size_t contender) {
    ForwardPlan& plan = plans[contender];
    try {
      cuda::ForwardLadder::load(cuda::jit::process_loader(), gpu.context(), plan);
      for (const Array* array : {&out, &lse}) gpu.fill(*array, kPoison);
      enqueue(plan);
      gpu.copy_back(out, host_out);
      gpu.copy_back(lse, host_lse);
    } catch (const Error& error) {
      return error.what();
    }
    return why_wrong(contender);
  }
};

GpuTrack::GpuTrack(const Job& job, const Gpu& gpu, FlushedClock& clock,
                   std::function<bool()> is_over)
    : impl_(std::make_unique<Impl>(job, gpu, clock, std::move(is_over))) {}

GpuTrack::~GpuTrack() = default;

const TunedProblem& GpuTrack::tuned() const { return impl_->tuned; }

std::string GpuTrack::why_out(std::size_t contender) { return impl_->why_out(contender); }

double GpuTrack::seconds(std::size_t contender) {
  return impl_->clock.seconds([&] { impl_->enqueue(impl_->plans[contender]); });
}

bool GpuTrack::is_over() { return impl_->is_over(); }

}  // namespace fovea::tools
