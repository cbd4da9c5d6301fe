// The pool: every index once, nested runs, many small runs, and life after fork.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "fovea/runtime.hpp"

#include "core/num_threads.hpp"

namespace fovea {
namespace {

template <typename Body>
void run(Executor& executor, std::int64_t count, Body& body) {
  executor.run(count, {[](void* context, int worker, std::int64_t index) {
                         (*static_cast<Body*>(context))(worker, index);
                       },
                       &body});
}

/// How often each index was run.
class Visits {
 public:
  explicit Visits(std::int64_t count) : counts_(static_cast<std::size_t>(count)) {}
  void operator()(int /*worker*/, std::int64_t index) {
    counts_.at(static_cast<std::size_t>(index)).fetch_add(1, std::memory_order_relaxed);
  }
  bool are_all(int expected) const {
    for (const auto& count : counts_) {
      if (count.load() != expected) return false;
    }
    return true;
  }

 private:
  std::vector<std::atomic<int>> counts_;
};

TEST(ThreadPool, RunsEveryIndexOnce) {
  // 1 thread runs inline; 3 is odd; 8 is more than most test machines have cores.
  for (const int threads : {1, 2, 3, 8}) {
    const auto pool = make_thread_pool(threads);
    // Fewer indices than threads, as many, and many more.
    for (const std::int64_t count : {1, 2, 3, 8, 1009}) {
      Visits visits(count);
      run(*pool, count, visits);
      EXPECT_TRUE(visits.are_all(1)) << threads << " threads, " << count << " indices";
    }
  }
}

TEST(ThreadPool, NothingIsRunForNoIndices) {
  const auto pool = make_thread_pool(3);
  auto fail = [](int, std::int64_t index) { ADD_FAILURE() << "ran index " << index; };
  run(*pool, 0, fail);
  run(*pool, -1, fail);
}

TEST(ThreadPool, WorkersAreUniqueAmongConcurrentCalls) {
  const auto pool = make_thread_pool(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<bool> was_shared{false};
  auto body = [&](int worker, std::int64_t) {
    std::atomic<int>& mine = inside.at(static_cast<std::size_t>(worker));  // throws above 3
    if (mine.fetch_add(1) != 0) was_shared = true;
    std::this_thread::yield();
    mine.fetch_sub(1);
  };
  for (int i = 0; i < 50; ++i) run(*pool, 40, body);
  EXPECT_FALSE(was_shared);
}

TEST(ThreadPool, OneThreadRunsInTheCallersThreadInOrder) {
  const auto pool = make_thread_pool(1);
  EXPECT_EQ(pool->concurrency(), 1);
  std::vector<std::int64_t> order;
  auto body = [&, caller = std::this_thread::get_id()](int worker, std::int64_t index) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(worker, 0);
    order.push_back(index);
  };
  run(*pool, 4, body);
  EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3}));
}

TEST(ThreadPool, NestedRunIsInlineAndComplete) {
  const auto pool = make_thread_pool(3);
  Visits inner(5);
  std::atomic<int> elsewhere{0};
  auto outer = [&](int, std::int64_t) {
    auto body = [&, here = std::this_thread::get_id()](int worker, std::int64_t index) {
      if (std::this_thread::get_id() != here || worker != 0) ++elsewhere;
      inner(worker, index);
    };
    run(*pool, 5, body);
  };
  run(*pool, 7, outer);
  EXPECT_TRUE(inner.are_all(7));
  EXPECT_EQ(elsewhere, 0);
}

TEST(ThreadPool, RunAfterNestedRunStillUsesThePool) {
  const auto pool = make_thread_pool(2);
  Visits ignored(2);
  auto nest = [&](int, std::int64_t) { run(*pool, 2, ignored); };
  run(*pool, 2, nest);
  // Both workers must be inside at once, or neither leaves.
  std::atomic<int> arrived{0};
  auto meet = [&](int, std::int64_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  };
  run(*pool, 2, meet);
  EXPECT_EQ(arrived, 2);
}

TEST(ThreadPool, ManySmallRunsLoseNothing) {
  // 10,000 runs of a few indices: workers wake, find nothing left and sleep in every order.
  const auto pool = make_thread_pool(3);
  std::atomic<std::int64_t> sum{0};
  auto body = [&](int, std::int64_t index) { sum += index + 1; };
  for (int i = 0; i < 10000; ++i) run(*pool, 2 + i % 3, body);
  // 1 + 2, 1 + 2 + 3, 1 + 2 + 3 + 4 in turn; 10,000 = 3333 turns and one run of two.
  EXPECT_EQ(sum, 3333 * (3 + 6 + 10) + 3);
}

TEST(ThreadPool, CallersTakeTurns) {
  const auto pool = make_thread_pool(2);
  constexpr int kCallers = 4, kRuns = 200;
  Visits visits(6);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < kRuns; ++i) run(*pool, 6, visits);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(visits.are_all(kCallers * kRuns));
}

TEST(ThreadPool, ResultsOfARunAreVisibleAfterIt) {
  const auto pool = make_thread_pool(4);
  std::vector<std::int64_t> plain(64);
  auto body = [&](int, std::int64_t index) {
    plain[static_cast<std::size_t>(index)] += index;  // no atomics: the run orders them
  };
  for (int i = 0; i < 100; ++i) run(*pool, 64, body);
  for (std::int64_t i = 0; i < 64; ++i) EXPECT_EQ(plain[static_cast<std::size_t>(i)], 100 * i);
}

TEST(ThreadPool, EndsWhetherOrNotItEverRan) {
  for (int i = 0; i < 20; ++i) {
    const auto never_ran = make_thread_pool(4);
    const auto ran = make_thread_pool(4);
    Visits visits(4);
    run(*ran, 4, visits);
  }
}

TEST(ThreadPool, ZeroThreadsMeansAutomatic) {
  EXPECT_EQ(make_thread_pool(0)->concurrency(), default_num_threads());
  EXPECT_GE(default_num_threads(), 1);
}

/// Exit code of a child that runs `body`, or -1 where it died or hung for 5 s.
template <typename Body>
int exit_code_of_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(5);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#if !defined(__SANITIZE_THREAD__)  // it does not follow threads that start after a fork
TEST(ThreadPool, ForkedChildRunsAndEndsThePool) {
  auto pool = make_thread_pool(3);
  Visits before(10);
  run(*pool, 10, before);
  const int code = exit_code_of_child([&] {
    // Several runs: sleepers that the child does not have must not be waited for.
    Visits visits(10);
    for (int i = 0; i < 20; ++i) {
      run(*pool, 10, visits);
      usleep(500);  // longer than the workers spin, so that they sleep
    }
    pool.reset();
    return visits.are_all(20) ? 0 : 1;
  });
  EXPECT_EQ(code, 0);
  Visits after(10);
  run(*pool, 10, after);
  EXPECT_TRUE(after.are_all(1));
}

TEST(ThreadPool, ForkedChildEndsAPoolThatItNeverUsed) {
  auto pool = make_thread_pool(3);
  Visits before(10);
  run(*pool, 10, before);
  EXPECT_EQ(exit_code_of_child([&] {
              pool.reset();
              return 0;
            }),
            0);
}

TEST(ThreadPool, ForkInTheMiddleOfOthersRunsIsHarmless) {
  const auto pool = make_thread_pool(2);
  std::atomic<bool> is_done{false};
  std::thread busy([&] {
    Visits visits(2);
    while (!is_done) run(*pool, 2, visits);
  });
  // Each fork copies the pool's locks in whatever state they are.
  for (int i = 0; i < 20; ++i) {
    const int code = exit_code_of_child([&] {
      Visits visits(8);
      run(*pool, 8, visits);
      return visits.are_all(1) ? 0 : 1;
    });
    EXPECT_EQ(code, 0) << "fork " << i;
    if (code != 0) break;
  }
  is_done = true;
  busy.join();
}
#endif

}  // namespace
}  // namespace fovea
