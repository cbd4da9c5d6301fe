// A host that has threads of its own lends them to Fovea: an Executor runs indexed tasks, and no result depends on it.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <fovea/attention.hpp>
#include <thread>
#include <vector>

namespace {

/// Starts its threads anew for each call: the shortest thing that is right, not the fastest.
class HostThreads : public fovea::Executor {
 public:
  int concurrency() const override { return 3; }

  void run(std::int64_t count, const Task& task) override {
    std::atomic<std::int64_t> next = 0;
    const auto work = [&](int worker) {
      for (std::int64_t i = next++; i < count; i = next++) task.body(task.context, worker, i);
    };
    std::vector<std::thread> threads;
    for (int worker = 1; worker < concurrency(); ++worker) threads.emplace_back(work, worker);
    work(0);
    for (std::thread& thread : threads) thread.join();
    num_tasks += count;
  }

  std::int64_t num_tasks = 0;
};

}  // namespace

int main() {
  std::vector<float> q(300 * 4 * 64), k = q, v = q, on_host_threads = q, on_pool = q;
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(i));
    k[i] = std::cos(static_cast<float>(i));
    v[i] = std::sin(static_cast<float>(5 * i));
  }
  const auto tensor = [](auto& x) { return fovea::view(x.data(), {1, 300, 4, 64}); };
  fovea::AttentionForward args{
      .q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(on_pool)};
  fovea::attention_forward(args);

  HostThreads host;
  args.out = tensor(on_host_threads);
  args.executor = &host;
  fovea::attention_forward(args);
  std::printf("%lld tasks ran on the host's threads\n", static_cast<long long>(host.num_tasks));
  return host.num_tasks > 0 && on_host_threads == on_pool ? 0 : 1;
}
