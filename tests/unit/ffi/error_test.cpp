#include "ffi/error.hpp"

#include <gtest/gtest.h>

#include <stdexcept>

namespace fovea::ffi {
namespace {

struct Caught {
  int kind;
  std::string message;
};

template <typename Body>
Caught run(Body body) {
  fovea_error* error = nullptr;
  const int kind = guarded(&error, body);
  Caught caught{kind, fovea_error_message(error)};
  EXPECT_EQ(fovea_error_kind(error), kind);
  fovea_error_free(error);
  return caught;
}

TEST(Error, SuccessClearsTheCallersPointer) {
  auto* error = reinterpret_cast<fovea_error*>(1);  // whatever stood there before
  EXPECT_EQ(guarded(&error, [] {}), FOVEA_OK);
  EXPECT_EQ(error, nullptr);
}

TEST(Error, KindsOfTheLibraryKeepTheirNumbers) {
  EXPECT_EQ(run([] { throw InvalidArgument("q is bad"); }).kind, FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(run([] { throw Unsupported("no"); }).kind, FOVEA_UNSUPPORTED);
  EXPECT_EQ(run([] { throw Error(ErrorKind::device_error, "no"); }).kind, FOVEA_DEVICE_ERROR);
  EXPECT_EQ(run([] { throw InvalidArgument("q is bad"); }).message, "q is bad");
}

TEST(Error, KnowsTheColumnOfAText) {
  fovea_error* error = nullptr;
  guarded(&error, [] { throw ParseError("score_mod: column 9: no", 9); });
  EXPECT_EQ(fovea_error_kind(error), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_error_column(error), 9U);
  fovea_error_free(error);
  guarded(&error, [] { throw InvalidArgument("q is bad"); });
  EXPECT_EQ(fovea_error_column(error), 0U);
  fovea_error_free(error);
  EXPECT_EQ(fovea_error_column(nullptr), 0U);
}

TEST(Error, NothingIsThrownAcrossWhateverTheBodyThrows) {
  EXPECT_EQ(run([] { throw std::bad_alloc(); }).message, "out of memory");
  EXPECT_EQ(run([] { throw std::out_of_range("index"); }).kind, FOVEA_INTERNAL);
  EXPECT_EQ(run([] { throw 42; }).kind, FOVEA_INTERNAL);
}

TEST(Error, CallersMayDeclineTheObject) {
  EXPECT_EQ(guarded(nullptr, [] { throw Unsupported("no"); }), FOVEA_UNSUPPORTED);
}

TEST(Error, NullErrorReadsAsSuccess) {
  EXPECT_EQ(fovea_error_kind(nullptr), FOVEA_OK);
  EXPECT_STREQ(fovea_error_message(nullptr), "");
  fovea_error_free(nullptr);
}

}  // namespace
}  // namespace fovea::ffi
