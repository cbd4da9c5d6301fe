// Any numbers as a Problem: validated with every name resolved and every size positive, or one refusal. Extents come from
// a short list of likely and evil values, so that bytes are spent on combinations.
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "fovea/error.hpp"

#include "problem/forward.hpp"

namespace {

using namespace fovea;

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint8_t next() { return position_ < size_ ? data_[position_++] : std::uint8_t{0}; }
  bool flag() { return next() % 2 == 1; }

  /// Zero and one, tile edges, the limits of head_dim, and what overflows a product or a sum.
  std::int64_t extent() {
    constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
    constexpr std::array<std::int64_t, 16> kExtents{0,
                                                    1,
                                                    2,
                                                    3,
                                                    4,
                                                    8,
                                                    64,
                                                    128,
                                                    512,
                                                    513,
                                                    -1,
                                                    std::int64_t{1} << 31,
                                                    std::int64_t{1} << 62,
                                                    kMax,
                                                    kMax / 2 + 1,
                                                    std::numeric_limits<std::int64_t>::min()};
    return kExtents[next() % kExtents.size()];
  }

  float number() {
    std::uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits = bits << 8U | next();
    return std::bit_cast<float>(bits);
  }

  TensorSpec spec() {
    TensorSpec result;
    result.dtype = static_cast<Dtype>(next() % 8);
    result.rank = next() % (kMaxRank + 1);
    for (std::size_t dim = 0; dim < static_cast<std::size_t>(result.rank); ++dim) {
      result.shape[dim] = extent();
      result.strides[dim] = extent();
    }
    return result;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t position_ = 0;
};

/// k, v and out mostly follow q, or hardly any problem would come past the first rule.
TensorSpec like(const TensorSpec& q, Bytes& bytes) {
  if (bytes.next() % 8 == 0) return bytes.spec();
  TensorSpec result = q;
  if (q.rank > 0 && bytes.flag()) {
    result.shape[bytes.next() % static_cast<std::size_t>(q.rank)] = bytes.extent();
  }
  return result;
}

Problem problem_from(Bytes& bytes) {
  Problem problem;
  problem.q = bytes.spec();
  problem.k = like(problem.q, bytes);
  problem.v = like(problem.k, bytes);
  if (bytes.flag()) problem.out = like(problem.q, bytes);
  if (bytes.flag()) problem.softmax_scale = bytes.number();
  if (bytes.flag()) problem.dropout = {.p = bytes.number(), .seed = bytes.next()};
  if (bytes.flag()) problem.num_sequences = bytes.extent();
  if (bytes.flag()) problem.seqlen_q = up_to(bytes.extent());
  if (bytes.flag()) problem.seqlen_kv = up_to(bytes.extent());
  if (bytes.flag()) problem.mask = causal();
  problem.has_sinks = bytes.flag();
  problem.wants_lse = bytes.flag();
  problem.wants_row_max = bytes.flag();
  problem.num_threads = static_cast<int>(bytes.extent());
  return problem;
}

void require(bool condition) {
  if (!condition) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  const Problem problem = problem_from(bytes);
  try {
    const ForwardProblem valid = validate(problem, "fuzz");
    require(valid.head_dim_qk >= 1 && valid.head_dim_v >= 1);
    require(valid.num_heads_q == 0 || valid.group * valid.num_heads_kv == valid.num_heads_q);
    require(valid.seqlen_q >= 0 && valid.seqlen_kv >= 0 && valid.num_sequences >= 0);
    require(valid.problem.out.rank == valid.problem.q.rank);
    require(!describe(valid).empty());
    require(problem_key(valid.problem) == problem_key(Problem(valid.problem)));
  } catch (const InvalidArgument&) {
  } catch (const Unsupported&) {
  }
  return 0;
}
