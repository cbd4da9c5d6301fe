// Jobs beside the calls: their order, how many at once, and how they end.
#include "cuda/jit/background.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda::jit {
namespace {

using testing::ElementsAre;

/// Jobs that wait for the test, and what they have told it.
struct Jobs {
  std::promise<void> go;
  std::shared_future<void> may_go = go.get_future().share();
  std::mutex mutex;
  std::vector<int> done;
  int under_way = 0, most_at_once = 0;

  Background::Job job(int number) {
    return [this, number] {
      {
        const std::lock_guard lock(mutex);
        most_at_once = std::max(most_at_once, ++under_way);
      }
      may_go.wait();
      const std::lock_guard lock(mutex);
      --under_way;
      done.push_back(number);
    };
  }
  /// Until so many have begun.
  void await_begun(int count) {
    for (bool have_begun = false; !have_begun; std::this_thread::yield()) {
      const std::lock_guard lock(mutex);
      have_begun = under_way >= count;
    }
  }
};

TEST(Background, RunsJobsInTheirOrder) {
  Jobs jobs;
  Background background(1);
  std::promise<void> last;
  for (const int number : {1, 2, 3}) background.start(jobs.job(number));
  background.start([&] { last.set_value(); });
  jobs.go.set_value();
  last.get_future().wait();
  EXPECT_THAT(jobs.done, ElementsAre(1, 2, 3));
  EXPECT_EQ(jobs.most_at_once, 1);
}

TEST(Background, RunsAsManyAtOnceAsItMay) {
  Jobs jobs;
  Background background(2);
  for (const int number : {1, 2, 3}) background.start(jobs.job(number));
  jobs.await_begun(2);
  EXPECT_EQ(jobs.most_at_once, 2);
  jobs.go.set_value();
}

TEST(Background, NoCoresAreOneThread) {
  std::promise<void> done;
  Background background(0);
  background.start([&] { done.set_value(); });
  done.get_future().wait();
}

TEST(Background, EndWaitsForWhatHasBegunAndDropsTheRest) {
  Jobs jobs;
  const auto held = std::make_shared<int>(0);
  Background background(1);
  background.start(jobs.job(1));
  background.start([held, job = jobs.job(2)] { job(); });
  jobs.await_begun(1);
  {
    const std::jthread ends([&] { background.stop(); });
    while (held.use_count() > 1)
      std::this_thread::yield();  // the second is destroyed while the first waits
    EXPECT_THAT(jobs.done, ElementsAre());
    jobs.go.set_value();
  }
  background.start(jobs.job(3));
  EXPECT_THAT(jobs.done, ElementsAre(1));
}

TEST(Background, EndsInAForkedChildWithoutThreads) {
  Jobs jobs;
  Background background(1);
  background.start(jobs.job(1));
  jobs.await_begun(1);
  EXPECT_TRUE(holds_in_child([&] {
    background.start(jobs.job(2));
    background.stop();
    return jobs.done.empty();
  }));
  jobs.go.set_value();
}

}  // namespace
}  // namespace fovea::cuda::jit
