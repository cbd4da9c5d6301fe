// What the threads of a caller round to, flush or trap changes no bit, and is as before after the call.
#include "core/float_environment.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cfenv>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fovea/error.hpp"
#include "fovea/mask.hpp"
#include "fovea/state.hpp"

#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/gradient_case.hpp"

#if defined(__SSE2__)
#include <pmmintrin.h>
#endif

namespace fovea::testing {
namespace {

using Bits = std::vector<std::uint64_t>;

void append(Bits& bits, const TensorView& view) {
  if (!view) return;
  const FloatEnvironment environment;  // the conversion to fp64 would flush denormals
  const Bits more = bits_of(view);
  bits.insert(bits.end(), more.begin(), more.end());
}

struct Mode {
  std::string name;
  std::function<void()> set;
};

std::vector<Mode> modes() {
  std::vector<Mode> modes = {{"upward", [] { std::fesetround(FE_UPWARD); }},
                             {"downward", [] { std::fesetround(FE_DOWNWARD); }},
                             {"towards zero", [] { std::fesetround(FE_TOWARDZERO); }},
                             {"traps", [] { feenableexcept(FE_INVALID | FE_DIVBYZERO); }}};
#if defined(__SSE2__)
  modes.push_back({"flush to zero", [] { _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON); }});
  modes.push_back(
      {"denormals are zero", [] { _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON); }});
#endif
  return modes;
}

/// What of the environment is not a record of what happened.
std::vector<unsigned> controls() {
  std::vector<unsigned> controls = {static_cast<unsigned>(std::fegetround()),
                                    static_cast<unsigned>(fegetexcept())};
#if defined(__SSE2__)
  controls.push_back(_mm_getcsr() & ~0x3fU);
#endif
  return controls;
}

/// The calling thread in a mode for as long as this lives.
class Caller {
 public:
  explicit Caller(const Mode& mode) {
    std::fegetenv(&previous_);
    mode.set();
  }
  ~Caller() { std::fesetenv(&previous_); }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

 private:
  std::fenv_t previous_{};
};

/// A host's pool: threads of its own, in a mode.
class ModeExecutor : public Executor {
 public:
  explicit ModeExecutor(Mode mode) : mode_(std::move(mode)) {}
  int concurrency() const override { return 2; }
  void run(std::int64_t count, const Task& task) override {
    std::atomic<std::int64_t> next = 0;
    std::vector<std::thread> threads;
    for (int worker = 0; worker < concurrency(); ++worker) {
      threads.emplace_back([&, worker] {
        mode_.set();
        const auto before = controls();
        for (std::int64_t i = next++; i < count; i = next++) task.body(task.context, worker, i);
        EXPECT_EQ(controls(), before) << mode_.name;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  const Mode mode_;
};

constexpr double kTiny = 1e-39;  // times a value of about 1: below the normal range of floats

void scale(GuardedTensor& tensor, double factor) {
  const std::vector<double> values = values_of(tensor.view());
  for (std::size_t i = 0; i < values.size(); ++i)
    tensor.set(static_cast<std::int64_t>(i), values[i] * factor);
  tensor.seal();
}

/// Two heads, two tiles, a score program, a mask with partial tiles, dropout and a sink; values and dout that are
/// denormal.
GradientCase denormal_case() {
  GradientCase problem{.forward = {.label = "denormal",
                                   .seqlen_q = 40,
                                   .seqlen_kv = 150,
                                   .num_heads_q = 2,
                                   .score = softcap(20),
                                   .mask = causal(),
                                   .has_sinks = true,
                                   .dropout = kSomeDropped}};
  return problem;
}

struct Calls {
  GradientMemory memory{denormal_case()};
  CacheMemory cache{{.seqlens = {100, 2500}, .num_new = 2, .page_size = 16}};
  GuardedTensor cos = tensor_of(Dtype::f32, {2500, 4}, std::vector<double>(10000, 0.3));
  GuardedTensor merged = tensor_of(Dtype::f32, {1, 40, 2, 8}, std::vector<double>(640));
  Executor* executor = nullptr;

  Calls() {
    scale(memory.forward.v, kTiny);
    scale(memory.dout, kTiny);
    scale(memory.v_tangent, kTiny);
    attention_forward(memory.forward.args());
  }

  Bits forward() {
    AttentionForward args = memory.forward.args();
    args.executor = executor;
    attention_forward(args);
    Bits bits;
    for (const TensorView* view :
         std::initializer_list<const TensorView*>{&args.out, &args.lse, &args.row_max})
      append(bits, *view);
    return bits;
  }

  Bits decode() {
    AttentionDecode args = cache.args();
    args.executor = executor;
    args.rotary = Rotary{.cos = cos.view(), .sin = cos.view()};
    attention_decode(args);
    Bits bits;
    for (const TensorView* view : std::initializer_list<const TensorView*>{
             &args.out, &args.lse, &args.cache.k, &args.cache.v})
      append(bits, *view);
    return bits;
  }

  Bits backward() {
    AttentionBackward args = memory.args();
    args.executor = executor;
    attention_backward(args);
    Bits bits;
    for (const TensorView* view :
         std::initializer_list<const TensorView*>{&args.dq, &args.dk, &args.dv, &args.dsinks})
      append(bits, *view);
    return bits;
  }

  Bits jvp() {
    AttentionJvp args = memory.jvp_args();
    args.forward.executor = executor;
    attention_jvp(args);
    Bits bits;
    for (const TensorView* view :
         std::initializer_list<const TensorView*>{&args.out_tangent, &args.lse_tangent})
      append(bits, *view);
    return bits;
  }

  Bits double_backward() {
    AttentionDoubleBackward args{.backward = memory.args(), .ddq = memory.q_tangent.view()};
    args.executor = executor;
    args.grad_q = std::exchange(args.backward.dq, {});
    args.grad_v = std::exchange(args.backward.dv, {});
    attention_double_backward(args);
    Bits bits;
    append(bits, args.grad_q);
    append(bits, args.grad_v);
    return bits;
  }

  Bits merge() {
    const TensorView out = memory.forward.out.view(), lse = memory.forward.lse.view();
    merge_states({.outs = {out, out, out},
                  .lses = {lse, lse, lse},
                  .out = merged.mutable_view(),
                  .executor = executor});
    Bits bits;
    append(bits, merged.view());
    return bits;
  }
};

using Operation = Bits (Calls::*)();
const std::pair<const char*, Operation> kOperations[] = {
    {"forward", &Calls::forward}, {"merge", &Calls::merge},
    {"decode", &Calls::decode},   {"backward", &Calls::backward},
    {"jvp", &Calls::jvp},         {"double backward", &Calls::double_backward},
};

TEST(CpuFloatEnvironment, OfTheCallerChangesNoBitAndIsLeftAsItWas) {
  Calls calls;
  // The caller alone; and with threads that started in the default environment.
  for (const int num_threads : {1, 3}) {
    const auto pool = make_thread_pool(num_threads);
    calls.executor = pool.get();
    for (const auto& [name, operation] : kOperations) {
      const Bits expected = (calls.*operation)();
      for (const Mode& mode : modes()) {
        SCOPED_TRACE(std::string(name) + ", " + mode.name + ", " + std::to_string(num_threads));
        const Caller caller(mode);
        const auto before = controls();
        const Bits bits = (calls.*operation)();
        EXPECT_EQ(controls(), before);
        EXPECT_TRUE(bits == expected);
      }
    }
  }
}

TEST(CpuFloatEnvironment, OfAHostsThreadsChangesNoBitAndIsLeftAsItWas) {
  Calls calls;
  for (const auto& [name, operation] : kOperations) {
    calls.executor = nullptr;
    const Bits expected = (calls.*operation)();
    for (const Mode& mode : modes()) {
      SCOPED_TRACE(std::string(name) + ", " + mode.name);
      ModeExecutor executor(mode);
      calls.executor = &executor;
      EXPECT_TRUE((calls.*operation)() == expected);
    }
  }
}

TEST(CpuFloatEnvironment, IsLeftAsItWasByACallThatIsRefused) {
  for (const Mode& mode : modes()) {
    const Caller caller(mode);
    const auto before = controls();
    EXPECT_THROW(attention_forward({}), InvalidArgument);
    EXPECT_THROW(attention_decode({}), InvalidArgument);
    EXPECT_THROW(attention_backward({}), InvalidArgument);
    EXPECT_EQ(controls(), before) << mode.name;
  }
}

/// 0.1 is no float: read upward it would be another number.
TEST(CpuFloatEnvironment, OfTheCallerDoesNotReachNumbersOfAFormula) {
  const std::string expected = parse_score_mod("score * 0.1").to_string();
  for (const Mode& mode : modes()) {
    const Caller caller(mode);
    EXPECT_EQ(parse_score_mod("score * 0.1").to_string(), expected) << mode.name;
  }
}

}  // namespace
}  // namespace fovea::testing
