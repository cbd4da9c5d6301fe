#include "ffi/sized_struct.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

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

/// What lies where in the first header, whose callers a library of any later one serves. Each struct ends in a field: a
/// field that is added lies behind what those callers pass, not in padding, which they leave as it was.
TEST(SizedStruct, FieldsLieWhereCallersOfTheFirstHeaderHaveThem) {
#define FOVEA_EXPECT_LAYOUT(Struct, first, at_first, last, size) \
  EXPECT_EQ(offsetof(Struct, first), at_first) << #Struct;       \
  EXPECT_EQ(offsetof(Struct, last) + sizeof(Struct::last), size) << #Struct
  FOVEA_EXPECT_LAYOUT(fovea_executor, context, 16U, run, 40U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_forward_args, q, 16U, stream, 304U);
  FOVEA_EXPECT_LAYOUT(fovea_plan_options, max_seqlen_q, 16U, reserved_1, 40U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_backward_args, forward, 16U, workspace_bytes, 104U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_double_backward_args, forward, 16U, num_grad_captured, 152U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_jvp_args, forward, 16U, lse_tangent, 88U);
  FOVEA_EXPECT_LAYOUT(fovea_merge_states_args, outs, 16U, executor, 72U);
  FOVEA_EXPECT_LAYOUT(fovea_rotary_args, x, 16U, stream, 104U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_decode_args, forward, 16U, sees_all_keys, 104U);
  // Later headers: what they add lies behind, and ends in a field too.
  FOVEA_EXPECT_LAYOUT(fovea_attention_decode_args, page_indptr, 104U, page_indices, 120U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_decode_args, append_cu_seqlens, 120U, max_seqlen_q, 136U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_decode_args, shared_prefix, 136U, shared_cu_sequences, 152U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_decode_args, rotary_positions_q, 152U, rotary_positions_q,
                      160U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_decode_args, k_scale, 160U, v_scale, 176U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_forward_args, score_program, 304U, dropout_offset, 408U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_forward_args, quant, 408U, dropout_places, 448U);
  FOVEA_EXPECT_LAYOUT(fovea_plan_options, compile_mode, 40U, reserved_2, 48U);
  FOVEA_EXPECT_LAYOUT(fovea_attention_jvp_args, workspace, 88U, workspace_bytes, 104U);
  FOVEA_EXPECT_LAYOUT(fovea_block_map_args, forward, 16U, q_head, 64U);
  FOVEA_EXPECT_LAYOUT(fovea_tile_lists_args, indptr, 16U, table, 40U);
  FOVEA_EXPECT_LAYOUT(fovea_shard_args, forward, 16U, reserved_1, 72U);
  FOVEA_EXPECT_LAYOUT(fovea_allocator, context, 16U, deallocate, 40U);
#undef FOVEA_EXPECT_LAYOUT
  EXPECT_EQ(offsetof(fovea_attention_forward_args, bias), 80U);
  EXPECT_EQ(offsetof(fovea_attention_forward_args, workspace), 264U);
  EXPECT_EQ(offsetof(fovea_plan_options, num_threads), 32U);
}

/// fovea_plan_options of the first header, whose padding has no names.
struct FirstPlanOptions {
  std::size_t struct_size;
  std::uint32_t version;
  std::int64_t max_seqlen_q, max_seqlen_kv;
  std::int32_t num_threads;
};

/// As a later header may have it: a field more, behind all that the first header's callers pass.
struct NextPlanOptions {
  std::size_t struct_size;
  std::uint32_t version, reserved_0;
  std::int64_t max_seqlen_q, max_seqlen_kv;
  std::int32_t num_threads;
  std::uint32_t reserved_1;
  std::int32_t added;
};
static_assert(sizeof(FirstPlanOptions) == offsetof(fovea_plan_options, compile_mode));
static_assert(offsetof(NextPlanOptions, added) == sizeof(FirstPlanOptions));

TEST(SizedStruct, PaddingOfACallerOfTheFirstHeaderIsNoField) {
  FirstPlanOptions given;
  std::memset(&given, 0xFF, sizeof(given));
  given.struct_size = sizeof(given);
  given.version = FOVEA_ABI_VERSION;
  given.max_seqlen_q = 11;
  given.max_seqlen_kv = 22;
  given.num_threads = 3;
  NextPlanOptions storage{};
  std::memcpy(&storage, &given, sizeof(given));
  const auto read = read_struct(&storage, kLeast, "options");
  EXPECT_EQ(read.max_seqlen_q, 11);
  EXPECT_EQ(read.max_seqlen_kv, 22);
  EXPECT_EQ(read.num_threads, 3);
  EXPECT_EQ(read.added, 0);
}

TEST(SizedStruct, SizesThatNoHeaderHadAreRefused) {
  fovea_plan_options given = options();
  for (const std::size_t size : {std::size_t{37}, std::size_t{1} << 40}) {
    given.struct_size = size;
    EXPECT_THAT(refusal(&given), HasSubstr("options: struct_size is " + std::to_string(size)));
  }
}

TEST(SizedStruct, ForgottenSizesAndVersionsAreRefused) {
  fovea_plan_options given = options();
  given.struct_size = 0;
  EXPECT_THAT(refusal(&given), HasSubstr("options: struct_size is 0; expected 48"));
  given = options();
  given.version = 0;
  EXPECT_THAT(refusal(&given), HasSubstr("options: version is 0; expected 1"));
  given.version = FOVEA_ABI_VERSION + 1;
  EXPECT_THAT(refusal(&given), HasSubstr("options: version is 2; expected 1"));
  EXPECT_THAT(refusal(nullptr), HasSubstr("options: the struct is NULL"));
}

}  // namespace
}  // namespace fovea::ffi
