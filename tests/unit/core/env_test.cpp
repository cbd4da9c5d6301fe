#include "core/env.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "fovea/error.hpp"

namespace fovea {
namespace {

std::map<std::string, std::string>& variables() {
  static std::map<std::string, std::string> values;
  return values;
}

const char* look_up(const char* name) {
  const auto found = variables().find(name);
  return found == variables().end() ? nullptr : found->second.c_str();
}

Environment read_with(std::map<std::string, std::string> values) {
  variables() = std::move(values);
  return read_environment(look_up);
}

TEST(Environment, IsEmptyWhereNothingIsSet) {
  const Environment environment = read_with({});
  EXPECT_EQ(environment.num_threads, std::nullopt);
  EXPECT_EQ(environment.omp_num_threads, std::nullopt);
  EXPECT_EQ(environment.cpu_target, std::nullopt);
}

TEST(Environment, EmptyValueCountsAsUnset) {
  const Environment environment = read_with({{"FOVEA_NUM_THREADS", ""}, {"FOVEA_CPU_TARGET", ""}});
  EXPECT_EQ(environment.num_threads, std::nullopt);
  EXPECT_EQ(environment.cpu_target, std::nullopt);
}

TEST(Environment, ReadsThreadsAndTarget) {
  const Environment environment = read_with(
      {{"FOVEA_NUM_THREADS", "3"}, {"OMP_NUM_THREADS", "5"}, {"FOVEA_CPU_TARGET", "avx2"}});
  EXPECT_EQ(environment.num_threads, 3);
  EXPECT_EQ(environment.omp_num_threads, 5);
  EXPECT_EQ(environment.cpu_target, "avx2");
}

TEST(Environment, ZeroThreadsMeansAutomatic) {
  EXPECT_EQ(read_with({{"FOVEA_NUM_THREADS", "0"}}).num_threads, std::nullopt);
}

TEST(Environment, OmpListGivesItsFirstLevel) {
  EXPECT_EQ(read_with({{"OMP_NUM_THREADS", "4,2"}}).omp_num_threads, 4);
}

TEST(Environment, UnreadableOmpHintIsIgnored) {
  EXPECT_EQ(read_with({{"OMP_NUM_THREADS", "dynamic"}}).omp_num_threads, std::nullopt);
}

// A word, a sign, trailing text, a fraction, one above the limit, and a number beyond int.
TEST(Environment, UnreadableThreadCountIsRefusedByName) {
  for (const char* text : {"many", "-1", "4x", "1.5", "4097", "99999999999999999999"}) {
    try {
      read_with({{"FOVEA_NUM_THREADS", text}});
      FAIL() << "accepted '" << text << "'";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("FOVEA_NUM_THREADS"),
                                               testing::HasSubstr(text)));
    }
  }
}

TEST(Environment, ReadsWhereKernelsAreFoundAndKept) {
  const Environment environment = read_with({{"FOVEA_NVRTC", "/a/libnvrtc.so"},
                                             {"FOVEA_PACK", "b.pack"},
                                             {"FOVEA_CACHE_DIR", "c"},
                                             {"FOVEA_CACHE_MAX_MIB", "0"},
                                             {"CUDA_PATH", "/d"}});
  EXPECT_EQ(environment.nvrtc, "/a/libnvrtc.so");
  EXPECT_EQ(environment.pack, "b.pack");
  EXPECT_EQ(environment.cache_dir, "c");
  EXPECT_EQ(environment.cache_max_mib, 0);
  EXPECT_EQ(environment.cuda_home, "/d");
  const Environment amds =
      read_with({{"FOVEA_HIP", "/f/libamdhip64.so"}, {"FOVEA_HIPRTC", "/g"}, {"ROCM_PATH", "/h"}});
  EXPECT_EQ(amds.hip, "/f/libamdhip64.so");
  EXPECT_EQ(amds.hiprtc, "/g");
  EXPECT_EQ(amds.rocm_path, "/h");
  EXPECT_EQ(read_with({{"CUDA_PATH", "/d"}, {"CUDA_HOME", "/e"}}).cuda_home, "/e");
}

TEST(Environment, VerboseIsOneOrZero) {
  EXPECT_EQ(read_with({}).verbose, std::nullopt);
  EXPECT_EQ(read_with({{"FOVEA_VERBOSE", "0"}}).verbose, 0);
  EXPECT_EQ(read_with({{"FOVEA_VERBOSE", "1"}}).verbose, 1);
  for (const char* text : {"2", "yes", "-1", "1 "})
    EXPECT_THROW(read_with({{"FOVEA_VERBOSE", text}}), InvalidArgument) << text;
}

// A word, a sign, a unit, and one above the limit.
TEST(Environment, UnreadableCacheSizeIsRefusedByName) {
  for (const char* text : {"many", "-1", "5GiB", "1048577"}) {
    try {
      read_with({{"FOVEA_CACHE_MAX_MIB", text}});
      FAIL() << "accepted '" << text << "'";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("FOVEA_CACHE_MAX_MIB"),
                                               testing::HasSubstr(text)));
    }
  }
}

}  // namespace
}  // namespace fovea
