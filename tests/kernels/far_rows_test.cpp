// Rows so far apart that their offsets have more than 32 bits, counted in elements or in bytes.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cuda/forward/attention_forward.hpp"
#include "kernels/emulation.hpp"
#include "kernels/forward_cases.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/guarded_tensor.hpp"

namespace fovea::testing {
namespace {

/// A copy of a tensor whose entries along one dimension lie far apart, in address space that has memory at those
/// entries alone.
class FarTensor {
 public:
  FarTensor(const TensorView& near, std::size_t far_dim, std::int64_t far_stride)
      : spec_(near.spec()) {
    std::int64_t stride = 1;
    for (auto dim = static_cast<std::size_t>(spec_.rank); dim-- > 0;) {
      spec_.strides[dim] = dim == far_dim ? far_stride : stride;
      if (dim != far_dim) stride *= spec_.shape[dim];
    }
    bytes_ = static_cast<std::size_t>(far_stride * spec_.shape[far_dim]) * size_bytes(spec_.dtype);
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    copy(near, view());
  }
  FarTensor(const FarTensor&) = delete;
  FarTensor& operator=(const FarTensor&) = delete;
  ~FarTensor() { munmap(data_, bytes_); }

  TensorView view() const { return TensorView(data_, spec_); }

 private:
  static void copy(const TensorView& from, const TensorView& to) {
    const std::size_t size = size_bytes(from.dtype());
    std::vector<std::int64_t> offsets;
    for_each_offset(from.spec(), [&](std::int64_t offset) { offsets.push_back(offset); });
    std::size_t i = 0;
    for_each_offset(to.spec(), [&](std::int64_t offset) {
      std::memcpy(static_cast<std::byte*>(const_cast<void*>(to.data())) +
                      static_cast<std::size_t>(offset) * size,
                  static_cast<const std::byte*>(from.data()) +
                      offsets[i++] * static_cast<std::int64_t>(size),
                  size);
    });
  }

  TensorSpec spec_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// The last of 128 rows has an offset that 32 bits do not hold; rows are whole pieces of 16 bytes.
constexpr std::int64_t kFar = (std::int64_t{1} << 25) + 64;

class FarRows : public ::testing::TestWithParam<const char*> {};

TEST_P(FarRows, HaveTheBitsOfNearOnes) {
  const std::vector<Case> cases = kernel_cases();
  const Case& problem = *std::ranges::find(cases, std::string(GetParam()), &Case::label);
  ASSERT_GT(problem.seqlen_kv, 128);
  CaseMemory memory(problem);
  memory.poison_outputs();
  AttentionForward args = memory.args();
  const auto run = [&] {
    Emulation emulation;
    const ForwardProblem plain = validate(problem_of(args), "test");
    run_emulated({.label = problem.label, .problem = plain, .args = args}, emulation);
    EXPECT_EQ(emulation.findings, "");
    return std::pair(bits_of(args.out), bits_of(args.lse));
  };
  const auto near = run();
  memory.poison_outputs();
  const FarTensor q(args.q, 1, kFar), k(args.k, 1, kFar), v(args.v, 1, kFar),
      out(args.out, 1, kFar);
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.out = out.view();
  EXPECT_EQ(run(), near);
}

INSTANTIATE_TEST_SUITE_P(All, FarRows,
                         ::testing::Values("several_tiles_d64", "infinite_values_d128", "split",
                                           "plain_f32"),
                         [](const auto& each) { return std::string(each.param); });

class FarPages : public ::testing::TestWithParam<const char*> {};

TEST_P(FarPages, HaveTheBitsOfNearOnes) {
  const std::vector<NamedCacheCase> cases = kernel_cache_cases();
  const NamedCacheCase& each =
      *std::ranges::find(cases, std::string(GetParam()), &NamedCacheCase::label);
  CacheMemory memory(each.problem);
  AttentionDecode decode = memory.args();
  const auto run = [&] {
    const CacheCall call(each.problem, decode);
    Emulation emulation;
    run_emulated(call.on(each.label, cuda::typical_device(8, 0)), emulation);
    EXPECT_EQ(emulation.findings, "");
    return std::pair(bits_of(decode.out), bits_of(decode.lse));
  };
  const auto near = run();
  const std::int64_t far = (std::int64_t{1} << 32) / decode.cache.k.size(0) / 64 * 64 + 64;
  const FarTensor k(decode.cache.k, 0, 2 * far), v(decode.cache.v, 0, 2 * far);
  decode.cache.k = k.view();
  decode.cache.v = v.view();
  EXPECT_EQ(run(), near);
}

INSTANTIATE_TEST_SUITE_P(All, FarPages,
                         ::testing::Values("paged_decode", "paged_prefill", "paged_decode_f32"),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace fovea::testing
