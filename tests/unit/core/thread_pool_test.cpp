// The pool: every index once, nested runs, many small runs, threads that cannot be started, and life after fork.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
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

TEST(ThreadPool, CallersAtOnceLoseNothing) {
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

TEST(ThreadPool, ACallerThatFindsThePoolTakenRunsInItsOwnThread) {
  const auto pool = make_thread_pool(2);
  std::atomic<bool> is_other_done{false};
  std::atomic<int> elsewhere{0};
  Visits visits(5);
  auto wait_for_other = [&](int, std::int64_t index) {
    if (index != 0) return;
    std::thread other([&] {
      auto body = [&, here = std::this_thread::get_id()](int worker, std::int64_t i) {
        if (std::this_thread::get_id() != here || worker != 0) ++elsewhere;
        visits(worker, i);
      };
      run(*pool, 5, body);
      is_other_done = true;
    });
    for (int i = 0; i < 10000 && !is_other_done; ++i) usleep(1000);
    EXPECT_TRUE(is_other_done) << "it waits for the threads of a run that waits for it";
    other.detach();
  };
  run(*pool, 2, wait_for_other);
  ASSERT_TRUE(is_other_done);
  EXPECT_TRUE(visits.are_all(1));
  EXPECT_EQ(elsewhere, 0);
}

std::ptrdiff_t num_threads_of_this_process() {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  return std::distance(begin(threads), end(threads));
}

TEST(ThreadPool, StartsAsManyThreadsAsARunHasUseFor) {
  const auto pool = make_thread_pool(8);
  const std::ptrdiff_t before = num_threads_of_this_process();
  Visits two(2);
  run(*pool, 2, two);
  EXPECT_EQ(num_threads_of_this_process(), before + 1);
  Visits many(100);
  run(*pool, 100, many);
  EXPECT_EQ(num_threads_of_this_process(), before + 7);
  EXPECT_TRUE(two.are_all(1));
  EXPECT_TRUE(many.are_all(1));
}

/// While it lives, no thread can be started: stacks are larger than what a process can address.
class NoMeansForThreads {
 public:
  NoMeansForThreads() {
    pthread_attr_init(&old_);
    pthread_getattr_default_np(&old_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, std::size_t{1} << 60U);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  ~NoMeansForThreads() {
    pthread_setattr_default_np(&old_);
    pthread_attr_destroy(&old_);
  }
  NoMeansForThreads(const NoMeansForThreads&) = delete;
  NoMeansForThreads& operator=(const NoMeansForThreads&) = delete;

 private:
  pthread_attr_t old_{};
};

/// Have `count` tasks been inside at once? Given up after 10 s.
bool meet(Executor& pool, int count) {
  std::atomic<int> arrived{0};
  auto wait_for_others = [&](int, std::int64_t) {
    ++arrived;
    for (int i = 0; i < 10000 && arrived < count; ++i) usleep(1000);
  };
  run(pool, count, wait_for_others);
  return arrived == count;
}

TEST(ThreadPool, RunsInTheCallersThreadWhereNoThreadCanBeStarted) {
  const auto pool = make_thread_pool(4);
  {
    const NoMeansForThreads scarcity;
    Visits visits(10);
    for (int i = 1; i <= 3; ++i) {
      run(*pool, 10, visits);
      EXPECT_TRUE(visits.are_all(i)) << "run " << i;
    }
  }
  EXPECT_TRUE(meet(*pool, 4)) << "threads are not asked for again";
}

TEST(ThreadPool, MakesDoWithTheThreadsThatCouldBeStarted) {
  const auto pool = make_thread_pool(4);
  EXPECT_TRUE(meet(*pool, 2));
  {
    const NoMeansForThreads scarcity;
    Visits visits(10);
    for (int i = 1; i <= 3; ++i) {
      run(*pool, 10, visits);
      EXPECT_TRUE(visits.are_all(i)) << "run " << i;
    }
    EXPECT_TRUE(meet(*pool, 2)) << "the thread that is there is not used";
  }
  EXPECT_TRUE(meet(*pool, 4)) << "threads are not asked for again";
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
