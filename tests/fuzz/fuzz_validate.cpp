// Any numbers as a Problem: validated with every name resolved and every size positive, or one refusal. Extents come
// from a short list of likely and evil values, so that bytes are spent on combinations.
#include <cstddef>
#include <cstdint>

#include "fovea/error.hpp"

#include "problem/forward.hpp"
#include "tests/fuzz/bytes.hpp"

namespace {

using namespace fovea;
using fuzz::Bytes;

TensorSpec any_spec(Bytes& bytes) {
  TensorSpec result;
  result.dtype = static_cast<Dtype>(bytes.next() % 9);
  result.rank = bytes.next() % (kMaxRank + 1);
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(result.rank); ++dim) {
    result.shape[dim] = bytes.extent();
    result.strides[dim] = bytes.extent();
  }
  return result;
}

/// k, v and out mostly follow q, or hardly any problem would come past the first rule.
TensorSpec like(const TensorSpec& q, Bytes& bytes) {
  if (bytes.next() % 8 == 0) return any_spec(bytes);
  TensorSpec result = q;
  if (q.rank > 0 && bytes.flag()) {
    result.shape[bytes.next() % static_cast<std::size_t>(q.rank)] = bytes.extent();
  }
  return result;
}

Problem problem_from(Bytes& bytes) {
  Problem problem;
  problem.q = any_spec(bytes);
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
