#include "tools/npy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tools/failure.hpp"

namespace fovea::tools {
namespace {

std::shared_ptr<const Buffer> file_of(const std::string& bytes) {
  auto file = std::make_shared<const Buffer>(Buffer::uninitialized(bytes.size()));
  if (!bytes.empty()) std::memcpy(file->data(), bytes.data(), bytes.size());
  return file;
}

std::string with_dictionary(const std::string& dictionary, std::size_t payload, char version = 1) {
  std::string file("\x93NUMPY");
  file += {version, 0, static_cast<char>(dictionary.size() & 0xffU),
           static_cast<char>(dictionary.size() >> 8U)};
  if (version > 1) file.append(2, '\0');
  return file + dictionary + std::string(payload, '\1');
}

Array parse(const std::string& bytes, Uint16 uint16 = Uint16::refused) {
  return parse_npy(file_of(bytes), "x.npy", uint16);
}

std::string refusal(const std::string& bytes, Uint16 uint16 = Uint16::refused) {
  try {
    parse(bytes, uint16);
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.exit_code(), kBadInput);
    return failure.what();
  }
  return "no refusal";
}

TEST(Npy, WhatIsWrittenIsReadBack) {
  const std::int64_t shape[] = {2, 3};
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::boolean, Dtype::u8,
                            Dtype::i8, Dtype::i32, Dtype::i64}) {
    const TensorSpec spec = make_spec(dtype, shape);
    const std::string header = npy_header(spec);
    EXPECT_EQ(header.size() % 64, 0U);
    const Array array = parse(header + std::string(6 * size_bytes(dtype), '\1'), Uint16::is_bf16);
    EXPECT_EQ(array.spec, spec);
    EXPECT_EQ(static_cast<int>(array.data[0]), 1);
  }
}

TEST(Npy, AnyRankUpToTheLargestIsWritten) {
  const std::vector<std::int64_t> shape(kMaxRank, 1);
  for (std::size_t rank = 1; rank <= shape.size(); ++rank) {
    const TensorSpec spec = make_spec(Dtype::f32, {shape.data(), rank});
    EXPECT_EQ(parse(npy_header(spec) + "1234").spec, spec);
  }
}

TEST(Npy, FortranOrderGivesStrides) {
  const Array array =
      parse(with_dictionary("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3, 4)}", 96));
  EXPECT_THAT(std::vector(array.spec.strides.begin(), array.spec.strides.begin() + 3),
              testing::ElementsAre(1, 2, 6));
}

TEST(Npy, LaterVersionsAndOldSpellingsAreRead) {
  for (const char version : {'\2', '\3'}) {
    EXPECT_EQ(parse(with_dictionary("{'descr': '=f2', 'fortran_order': False, 'shape': (2,), }", 4,
                                    version))
                  .spec.rank,
              1);
  }
  EXPECT_EQ(
      parse(with_dictionary("{\"shape\":(2L,1L),\"fortran_order\":False,\"descr\":\"|u1\"}\n", 2))
          .spec.shape[0],
      2);
}

TEST(Npy, AxesOfSizeZeroAreRead) {
  EXPECT_EQ(parse(with_dictionary("{'descr': '<f4', 'fortran_order': True, 'shape': (3, 0, 5)}", 0))
                .spec.num_elements(),
            0);
}

TEST(Npy, AMisalignedPayloadIsCopiedToAnAlignedPlace) {
  // A dictionary of odd length puts the elements on an odd offset.
  for (const char* pad : {"", " ", "  ", "   "}) {
    const Array array = parse(with_dictionary(
        std::string("{'descr': '<i8', 'fortran_order': False, 'shape': (1,)}") + pad, 8));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(array.data) % 8, 0U);
  }
}

TEST(Npy, BoolsBecomeZeroOrOne) {
  const Array array =
      parse(with_dictionary("{'descr': '|b1', 'fortran_order': False, 'shape': (2,)}", 0) +
            std::string("\x02\0", 2));
  EXPECT_EQ(static_cast<int>(array.data[0]), 1);
  EXPECT_EQ(static_cast<int>(array.data[1]), 0);
}

struct Fault {
  std::string bytes;
  std::string reason;
};

TEST(Npy, EveryFaultIsRefusedByName) {
  const auto dtype = [](const std::string& descr) {
    return with_dictionary("{'descr': " + descr + ", 'fortran_order': False, 'shape': (1,)}", 8);
  };
  const auto shape = [](const std::string& text, std::size_t payload = 4) {
    return with_dictionary("{'descr': '<f4', 'fortran_order': False, 'shape': " + text + "}",
                           payload);
  };
  const Fault faults[] = {
      {"", "not a .npy file"},
      {std::string("\x93NUMPY"), "header is cut off"},
      {std::string("\x93NUMPY\1\0\xff\xff", 10), "header is cut off"},
      {std::string("\x93NUMPY\2\0\xff\xff\xff\xff", 12), "at most 65536"},
      {std::string("\x93NUMPY\1\1\0\0", 10), "version 1.1 is unknown"},
      {with_dictionary("", 0), "expected '{'"},
      {with_dictionary("{'descr': '<f4'}", 0), "expected the keys"},
      {with_dictionary("{'descr': '<f4', 'descr': '<f4'}", 0), "'descr' stands twice"},
      {with_dictionary("{'descr': '<f4', 'x': 3}", 0), "unknown key 'x'"},
      {with_dictionary("{'descr': '<f4', 'fortran_order': 0}", 0), "neither True nor False"},
      {with_dictionary("{'descr': '<f4", 0), "a string has no end"},
      {shape("(1,)} x"), "after the dictionary"},
      {shape("()"), "holds one number"},
      {shape("(-1,)"), "not a non-negative integer"},
      {shape("(1"), "expected ')'"},
      {shape("(99999999999999999999,)"), "too large"},
      {shape("(4611686018427387904, 4)"), "too large"},
      {shape("(100000000000, 100000000000)"), "overflows"},
      {shape("(0, 100000000000, 100000000000)", 0), "overflows"},
      {shape("(1,1,1,1,1,1,1,1,1)"), "rank 9"},
      {shape("(2,)"), "is truncated"},
      {shape("(1,)", 5), "has trailing bytes"},
      {dtype("'<f8'"), "float64 is not supported"},
      {dtype("'>f4'"), "big-endian"},
      {dtype("'|O'"), "Python objects"},
      {dtype("[('a', '<f4')]"), "structured"},
      {dtype("'<u2'"), "--dtype bf16"},
      {dtype("'<c8'"), "'<c8' is not supported"},
      {dtype("'<U5'"), "'<U5' is not supported"},
      {dtype("''"), "unknown dtype"},
      {dtype("'xf4'"), "unknown dtype"},
  };
  for (const Fault& fault : faults) {
    const std::string message = refusal(fault.bytes);
    EXPECT_THAT(message, testing::StartsWith("x.npy: "));
    EXPECT_THAT(message, testing::HasSubstr(fault.reason));
    EXPECT_THAT(message, testing::Not(testing::HasSubstr("\n")));
  }
}

}  // namespace
}  // namespace fovea::tools
