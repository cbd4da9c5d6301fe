// attention_decode on a GPU through the public function, against the oracle on each sequence's keys laid out densely.
// Without a driver or a device everything is skipped.
#include "problem/decode.hpp"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fovea/kv_cache.hpp"
#include "fovea/mask.hpp"

#include "gpu/device_copy.hpp"
#include "support/cache_case.hpp"
#include "support/kernel_compare.hpp"

namespace fovea::testing {
namespace {

class GpuDecode : public Gpu {};

/// A call on the device, over copies of everything that it reads and writes.
struct DeviceCall {
  explicit DeviceCall(const AttentionDecode& host) {
    copies.add(tensors_of_call(forward_of(host)));
    std::vector<TensorBytes> written = tensors_of_tokens(
        {.cache = host.cache, .append = host.append, .cu_seqlens_q = host.append.cu_seqlens});
    for (TensorBytes& tensor : written)
      tensor.is_output = host.append.k && tensor.name.starts_with("cache.");
    copies.add(written);
    if (const TensorView& groups = host.shared_prefix.cu_sequences)
      copies.add({tensor_bytes("shared_prefix.cu_sequences", groups)});
    args = copies.call(host);
  }

  DeviceCopies copies;
  AttentionDecode args;
};

void expect_call_equals_oracle(const CacheCase& problem) {
  CacheMemory memory(problem);
  DeviceCall call(memory.args());
  attention_decode(call.args);
  call.copies.copy_back();
  expect_sequences_equal_oracle(problem, memory, memory.args());
}

CacheCase decode_case(Dtype dtype) {
  CacheCase problem;
  // 600: three splits; 17: one page and a row; 256: a split, exactly; 2: appended ones alone.
  problem.seqlens = {600, 17, 256, 2};
  problem.num_new = problem.seqlen_q = 2;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.q_dtype = problem.k_dtype = problem.v_dtype = dtype;
  problem.head_dim_qk = 64;
  problem.head_dim_v = 40;
  return problem;
}

TEST_F(GpuDecode, EveryLayoutEqualsTheOracle) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
    for (const std::int64_t page_size : {0, 1, 5, 16}) {
      for (const bool is_plain : {true, false}) {
        CacheCase problem = decode_case(dtype);
        problem.page_size = page_size;
        problem.has_left_padding = problem.has_heads_first = problem.has_sinks = !is_plain;
        problem.has_batch_idx = !is_plain && page_size == 0;
        problem.index_dtype = is_plain ? Dtype::i32 : Dtype::i64;
        SCOPED_TRACE(std::string(name(dtype)) + ", page_size " + std::to_string(page_size) +
                     (is_plain ? "" : ", padded"));
        expect_call_equals_oracle(problem);
      }
    }
  }
}

TEST_F(GpuDecode, ChunksOfAPromptEqualTheOracle) {
  CacheCase problem = decode_case(Dtype::bf16);
  problem.seqlens = {200, 70};
  problem.num_new = problem.seqlen_q = 70;  // more rows than a tile that streams keys
  for (const std::int64_t page_size : {0, 16}) {
    problem.page_size = page_size;
    expect_call_equals_oracle(problem);
  }
}

/// Of codes, of a page, of a head.
using CodedChunk = std::tuple<Dtype, std::int64_t, std::int64_t>;

class GpuCodedChunks : public GpuDecode, public ::testing::WithParamInterface<CodedChunk> {};

CacheCase chunk_over_codes(const CodedChunk& chunk) {
  const auto& [codes, page_size, head_dim] = chunk;
  CacheCase problem = decode_case(head_dim == 96 ? Dtype::f16 : Dtype::bf16);
  problem.k_dtype = problem.v_dtype = codes;
  problem.head_dim_qk = head_dim;
  problem.head_dim_v = head_dim == 96 ? 80 : head_dim;
  problem.seqlens = {700, 90, 90, 300};
  problem.seqlen_q = problem.num_new = 90;
  problem.page_size = page_size;
  problem.has_page_list = page_size == 16 && head_dim == 64;
  problem.has_given_scales = codes == Dtype::e4m3 && head_dim == 96;
  problem.has_sinks = true;
  return problem;
}

/// Numbers before attention; by its own warps where a mask may hide keys, or keys begin inside a page; and chunks
/// beside single tokens, which are another plan's.
TEST_P(GpuCodedChunks, EqualTheOracle) {
  const CacheCase causal_chunk = chunk_over_codes(GetParam());
  CacheCase windowed = causal_chunk, padded = causal_chunk, packed = causal_chunk,
            prefixed = causal_chunk;
  windowed.mask = window(100, 0);
  padded.has_left_padding = true;
  padded.nan_key = 20;
  packed.packed_q = packed.packed_new = {190, 1, 0, 90};
  packed.has_max_seqlen_q = true;
  if (!prefixed.has_given_scales) {
    prefixed.shared_prefix = 300;
    prefixed.seqlens = {700, 390, 400, 401};
  }
  for (const CacheCase& problem : {causal_chunk, windowed, padded, packed, prefixed}) {
    SCOPED_TRACE(problem.has_left_padding    ? "left padding"
                 : !problem.packed_q.empty() ? "packed"
                 : problem.mask != causal()  ? "window"
                 : problem.shared_prefix > 0 ? "shared prefix"
                                             : "causal");
    expect_call_equals_oracle(problem);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuCodedChunks,
                         ::testing::Combine(::testing::Values(Dtype::i8, Dtype::e4m3),
                                            ::testing::Values(0, 5, 16),
                                            ::testing::Values(64, 96, 128)));

/// Single tokens, short runs of them, and sequences that take no part; then chunks of prompts among them.
TEST_F(GpuDecode, PackedQueriesEqualTheOracle) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    for (const std::int64_t page_size : {0, 5, 16}) {
      for (const std::int64_t chunk : {3, 90}) {  // the longest: split, and counted over sequences
        CacheCase problem = decode_case(dtype);
        problem.num_new = 0;
        problem.seqlens = {600, 117, 256, 40, 1030};
        problem.packed_q = {1, chunk, 0, 2, 1};
        problem.packed_new = {1, chunk, 0, 1, 1};
        problem.head_dim_v = 64;
        problem.page_size = page_size;
        problem.has_page_list = page_size == 16;
        problem.has_left_padding = page_size == 5;
        problem.has_sinks = problem.has_max_seqlen_q = true;
        SCOPED_TRACE(std::string(name(dtype)) + ", page_size " + std::to_string(page_size) +
                     ", chunk " + std::to_string(chunk));
        expect_call_equals_oracle(problem);
      }
    }
  }
}

/// Of numbers, of a page, and whether queries are packed.
class GpuSharedPrefixes
    : public GpuDecode,
      public ::testing::WithParamInterface<std::tuple<Dtype, std::int64_t, bool>> {};

/// 300 keys in common, of all sequences and of two groups: single tokens and chunks, over slots and pages that end with
/// the prefix or not, with programs that read positions. NaN stands where a group's others have their own prefix.
TEST_P(GpuSharedPrefixes, EqualTheOracle) {
  const auto& [dtype, page_size, is_packed] = GetParam();
  for (const MaskMod& mask :
       {causal(), window(310, 0), parse_mask_mod("(kv_idx + q_idx) % 3 != 1")}) {
    CacheCase problem = decode_case(dtype);
    problem.seqlens = {600, 317, 556, 302, 1330};
    problem.shared_prefix = 300;
    if (page_size == 16) problem.groups = {0, 2};
    if (is_packed) {
      problem.num_new = 0;
      problem.packed_q = problem.packed_new = {1, 17, 0, 2, 90};
      problem.has_max_seqlen_q = true;
    }
    problem.head_dim_v = 64;
    problem.page_size = page_size;
    problem.has_page_list = page_size == 20;
    problem.has_sinks = true;
    problem.mask = mask;
    problem.score = parse_score_mod("score + 0.001 * float(kv_idx - q_idx + seqlen_kv)");
    SCOPED_TRACE(mask.to_string());
    expect_call_equals_oracle(problem);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuSharedPrefixes,
                         ::testing::Combine(::testing::Values(Dtype::bf16, Dtype::f32),
                                            ::testing::Values(0, 16, 20), ::testing::Bool()));

TEST_F(GpuDecode, ACapturedStepServesOtherLengths) {
  CacheCase problem = decode_case(Dtype::bf16);
  problem.page_size = 16;
  CacheMemory memory(problem);
  DeviceCall call(memory.args());
  attention_decode(call.args);  // loads the kernels, which a capture must not
  const cuda::driver::DeviceContext& context = cuda::driver::process_context(Device::cuda());
  const std::size_t bytes = decode_workspace_bytes(call.args, 0);
  DeviceMemory workspace(context, bytes);
  call.args.workspace = {static_cast<std::byte*>(workspace.data()), bytes};
  const cuda::driver::Graph graph(context, [&](Stream stream) {
    call.args.stream = stream.handle();
    attention_decode(call.args);
  });
  // Fewer keys in the same pages, in the captured call's memory and in that of a call made anew.
  CacheMemory fewer(problem);
  for (CacheMemory* each : {&memory, &fewer}) {
    for (const auto& [sequence, rows] : {std::pair{0, 298}, {1, 7}, {2, 29}})
      each->seqlens.set(sequence, rows);
  }
  DeviceCall again(fewer.args());
  attention_decode(again.args);
  again.copies.copy_back();
  call.copies.copy_to_device(memory.seqlens.view());
  graph.launch(Stream(nullptr));
  call.copies.copy_back();
  for (std::int64_t i = 0; i < problem.batch(); ++i) {
    EXPECT_EQ(memory.out_bits(i), fewer.out_bits(i)) << i;
    EXPECT_EQ(memory.lse_bits(i), fewer.lse_bits(i)) << i;
  }
}

}  // namespace
}  // namespace fovea::testing
