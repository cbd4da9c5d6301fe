#include "ffi/sized_struct.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fovea::ffi {
namespace {

using ::testing::HasSubstr;

// A struct of ours as a newer release will know it: one field more at the end.
struct Newer {
  fovea_plan_options known;
  std::int64_t added;
};

fovea_plan_options options() {
  fovea_plan_options result{};
  result.struct_size = sizeof(result);
  result.version = FOVEA_ABI_VERSION;
  result.max_seqlen_q = 11;
  result.max_seqlen_kv = 22;
  result.num_threads = 3;
  return result;
}

constexpr std::size_t kLeast = offsetof(fovea_plan_options, max_seqlen_kv);

std::string refusal(const fovea_plan_options* source) {
  try {
    read_struct(source, kLeast, "options");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(SizedStruct, EqualSizesAreCopied) {
  const fovea_plan_options given = options();
  const auto read = read_struct(&given, kLeast, "options");
  EXPECT_EQ(read.max_seqlen_q, 11);
  EXPECT_EQ(read.num_threads, 3);
}

TEST(SizedStruct, OlderCallersGetDefaultsForWhatTheyDoNotKnow) {
  fovea_plan_options given = options();  // what lies beyond the older caller's struct is not ours
  given.struct_size = offsetof(fovea_plan_options, max_seqlen_kv);
  const auto read = read_struct(&given, kLeast, "options");
  EXPECT_EQ(read.max_seqlen_q, 11);
  EXPECT_EQ(read.max_seqlen_kv, 0);
  EXPECT_EQ(read.num_threads, 0);
}

TEST(SizedStruct, NewerCallersWorkUnlessTheySetWhatWeDoNotKnow) {
  Newer given{.known = options(), .added = 0};
  given.known.struct_size = sizeof(Newer);
  EXPECT_EQ(refusal(&given.known), "accepted");
  given.added = 1;
  EXPECT_THAT(refusal(&given.known), HasSubstr("this library does not know it"));
}

TEST(SizedStruct, ForgottenSizesAndVersionsAreRefused) {
  fovea_plan_options given = options();
  given.struct_size = 0;
  EXPECT_THAT(refusal(&given), HasSubstr("options: struct_size is 0; expected 40"));
  given = options();
  given.version = 0;
  EXPECT_THAT(refusal(&given), HasSubstr("options: version is 0; expected 1"));
  given.version = FOVEA_ABI_VERSION + 1;
  EXPECT_THAT(refusal(&given), HasSubstr("options: version is 2; expected 1"));
  EXPECT_THAT(refusal(nullptr), HasSubstr("options: the struct is NULL"));
}

}  // namespace
}  // namespace fovea::ffi
