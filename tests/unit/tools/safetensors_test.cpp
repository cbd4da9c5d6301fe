#include "tools/safetensors.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tools/failure.hpp"

namespace fovea::tools {
namespace {

Safetensors parse(const std::string& bytes) {
  auto file = std::make_shared<const Buffer>(Buffer::uninitialized(bytes.size()));
  if (!bytes.empty()) std::memcpy(file->data(), bytes.data(), bytes.size());
  return {file, "x.safetensors"};
}

std::string with_header(const std::string& header, std::size_t payload = 0) {
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i) & 0xffU);
  return file + header + std::string(payload, '\1');
}

std::string refusal(const std::string& bytes) {
  try {
    parse(bytes);
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.exit_code(), kBadInput);
    return failure.what();
  }
  return "no refusal";
}

TEST(Safetensors, WhatIsWrittenIsReadBack) {
  const std::int64_t shape[] = {2, 3};
  const TensorSpec out = make_spec(Dtype::bf16, shape), lse = make_spec(Dtype::f32, {shape, 1});
  const std::string header = safetensors_header({{"out", out}, {"lse", lse}});
  EXPECT_EQ(header.size() % 8, 0U);
  const Safetensors tensors = parse(header + std::string(12, '\1') + std::string(8, '\2'));
  EXPECT_EQ(tensors.tensor("out").spec, out);
  EXPECT_EQ(tensors.tensor("lse").spec, lse);
  EXPECT_EQ(static_cast<int>(tensors.tensor("lse").data[0]), 2);
  EXPECT_FALSE(tensors.contains("q"));
}

TEST(Safetensors, MetadataAndOtherTensorsDoNoHarm) {
  const Safetensors tensors = parse(with_header(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F64","shape":[],"data_offsets":[0,8]},)"
      R"("b":{"data_offsets":[8,8],"shape":[0,7],"dtype":"F32"}}  )",
      8));
  EXPECT_EQ(tensors.tensor("b").spec.num_elements(), 0);
  EXPECT_THROW(tensors.tensor("a"), Failure);
  EXPECT_THROW(tensors.tensor("c"), Failure);
}

TEST(Safetensors, AMisalignedTensorIsCopiedToAnAlignedPlace) {
  const Safetensors tensors = parse(with_header(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
      5));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensors.tensor("b").data) % 4, 0U);
}

struct Fault {
  std::string bytes;
  std::string reason;
};

TEST(Safetensors, EveryFaultIsRefusedByName) {
  const auto tensor = [](const std::string& fields, std::size_t payload = 0) {
    return with_header("{\"a\":{" + fields + "}}", payload);
  };
  const auto fields = [&](const std::string& dtype, const std::string& shape,
                          const std::string& offsets, std::size_t payload) {
    return tensor("\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets,
                  payload);
  };
  const std::string deep(100000, '[');
  const Fault faults[] = {
      {"", "shorter than"},
      {std::string(8, '\xff'), "at most 100000000"},
      {std::string("\x10\0\0\0\0\0\0\0{}", 10), "header is truncated"},
      {with_header(""), "not a JSON object"},
      {with_header("[]"), "not a JSON object"},
      {with_header("{"), "not JSON"},
      {with_header("{} x"), "not JSON"},
      {with_header("{\"a\":" + deep), "an array stands"},
      {with_header("{\"a\":3}"), "a number stands"},
      {with_header("{\"a\":null}"), "null stands"},
      {with_header("{\"a\":\"x\"}"), "a string stands"},
      {with_header("{\"a\":true}"), "a bool stands"},
      {with_header("{\"__metadata__\":{\"k\":\"v\",\"k\":\"v\"}}"), "metadata 'k' stands twice"},
      {with_header("{\"__metadata__\":{\"k\":3}}"), "a number stands"},
      {tensor(""), "lacks dtype, shape or data_offsets"},
      {tensor("\"dtype\":\"F32\",\"dtype\":\"F32\""), "'dtype' stands twice"},
      {tensor("\"x\":1"), "unknown key 'x'"},
      {tensor("\"shape\":{}"), "an object stands"},
      {tensor("\"shape\":[[1]]"), "an array stands"},
      {tensor("\"shape\":[\"1\"]"), "a string stands"},
      {fields("U8", "[-1]", "[0,0]", 0), "negative"},
      {fields("U8", "[1.5]", "[0,1]", 1), "not an integer"},
      {fields("U8", "[99999999999999999999]", "[0,1]", 1), "not an integer"},
      {fields("U8", "[9223372036854775807]", "[0,1]", 1), "leaves 62 bits"},
      {fields("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]", 1), "rank 9"},
      {fields("F32", "[4294967296,4294967296]", "[0,4]", 4), "overflows"},
      {fields("U8", "[1]", "[0]", 1), "not two numbers"},
      {fields("U8", "[1]", "[1,0]", 1), "run backwards"},
      {fields("U8", "[1]", "[1,2]", 2), "belong to none"},
      {fields("U8", "[1]", "[0,1]", 2), "trailing"},
      {fields("U8", "[2]", "[0,2]", 1), "truncated"},
      {fields("F32", "[1]", "[0,1]", 1), "needs 4"},
      {fields("F99", "[1]", "[0,1]", 1), "unknown dtype 'F99'"},
      {with_header(
           R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
           3),
       "overlaps"},
      {with_header(
           R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"),
       "'a' stands twice"},
  };
  for (const Fault& fault : faults) {
    const std::string message = refusal(fault.bytes);
    EXPECT_THAT(message, testing::StartsWith("x.safetensors: "));
    EXPECT_THAT(message, testing::HasSubstr(fault.reason));
    EXPECT_THAT(message, testing::Not(testing::HasSubstr("\n")));
  }
}

}  // namespace
}  // namespace fovea::tools
