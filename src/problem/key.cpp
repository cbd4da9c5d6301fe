// The key of a problem: every field that a plan depends on, mixed into 128 bits without building a string.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

#include "problem/backward.hpp"
#include "problem/jvp.hpp"

namespace fovea {
namespace {

/// Two independent 64-bit mixers (the finaliser of splitmix64 with different increments).
class Mixer {
 public:
  void add(std::uint64_t value) {
    lo_ = mix(lo_ + 0x9e3779b97f4a7c15U + value);
    hi_ = mix((hi_ ^ value) + 0xd1b54a32d192ed03U);
  }
  void add(const TensorSpec& spec) {
    add(static_cast<std::uint64_t>(spec.dtype) | static_cast<std::uint64_t>(spec.rank) << 8U |
        static_cast<std::uint64_t>(spec.device.kind) << 16U |
        static_cast<std::uint64_t>(spec.device.index) << 32U);
    const int rank = std::min(spec.rank, kMaxRank);  // a lookup comes before validation
    for (int i = 0; i < rank; ++i) {
      const auto axis = static_cast<std::size_t>(i);
      // The stride of an axis of one element is never walked, and libraries disagree about it. Of the last axis kernels
      // ask whether it is 1.
      const bool counts = spec.shape[axis] > 1 || i + 1 == rank;
      add(static_cast<std::uint64_t>(spec.shape[axis]));
      add(static_cast<std::uint64_t>(counts ? spec.strides[axis] : 0));
    }
  }
  void add(const Program& program) {
    add(program.formula().node().digest.lo);
    add(program.formula().node().digest.hi);
    for (const CapturedTensor& tensor : program.captures().tensors) add(tensor.view.spec());
  }
  /// Absent differs from every value, refused ones included: a lookup comes before validation.
  void add(const std::optional<std::int64_t>& value) {
    add(std::uint64_t{value.has_value()});
    add(static_cast<std::uint64_t>(value.value_or(0)));
  }
  void add(const std::optional<UpTo>& bound) {
    add(bound ? std::optional(bound->value) : std::nullopt);
  }
  void add(std::string_view text) {
    add(std::uint64_t{text.size()});
    for (const char c : text) add(std::uint64_t{static_cast<unsigned char>(c)});
  }
  void add(const Quantization& quant) {
    std::uint64_t choices = 0;
    const auto choose = [&choices](auto choice) {
      choices = choices << 4U | static_cast<std::uint64_t>(choice);
    };
    choose(quant.qk);
    choose(quant.pv);
    choose(quant.q_scales);
    choose(quant.k_scales);
    choose(quant.v_scales);
    choose(quant.scales);
    choose(quant.smooth_q);
    choose(quant.smooth_k);
    choose(quant.smooth_v);
    choose(quant.hadamard);
    choose(quant.p_codes);
    choose(quant.row_sums);
    choose(quant.accumulation);
    add(choices);
    for (const int size : {quant.block_q, quant.warp_q, quant.block_kv})
      add(static_cast<std::uint64_t>(size));
    for (const float number : {quant.p_max, quant.v_max, quant.p_step, quant.accuracy})
      add(std::uint64_t{std::bit_cast<std::uint32_t>(number)});
  }
  expr::Digest digest() const { return {lo_, hi_}; }

 private:
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31U);
  }
  std::uint64_t lo_ = 0, hi_ = 0;
};

}  // namespace

expr::Digest problem_key(const Problem& p) {
  Mixer mixer;
  for (const TensorSpec* spec : {&p.q, &p.k, &p.v, &p.out}) mixer.add(*spec);
  mixer.add(p.score);
  mixer.add(p.mask);
  mixer.add(p.softmax_scale ? std::bit_cast<std::uint32_t>(*p.softmax_scale) + (1ULL << 32U)
                            : 0ULL);
  mixer.add(std::uint64_t{std::bit_cast<std::uint32_t>(p.dropout.p)});
  mixer.add(p.num_sequences);
  mixer.add(p.seqlen_q);
  mixer.add(p.seqlen_kv);
  mixer.add(static_cast<std::uint64_t>(p.has_sinks) |
            static_cast<std::uint64_t>(p.wants_lse) << 1U |
            static_cast<std::uint64_t>(p.wants_row_max) << 2U |
            static_cast<std::uint64_t>(p.is_deterministic) << 3U |
            static_cast<std::uint64_t>(p.reads_dropout_seed) << 4U |
            static_cast<std::uint64_t>(p.has_dropout_places) << 5U |
            static_cast<std::uint64_t>(p.compute_dtype) << 8U |
            static_cast<std::uint64_t>(p.cpu_target) << 16U |
            static_cast<std::uint64_t>(p.compile_mode) << 24U |
            static_cast<std::uint64_t>(p.num_threads) << 32U);
  mixer.add(static_cast<std::uint64_t>(p.sm_margin));
  if (p.quant != Quantization{}) mixer.add(p.quant);
  return mixer.digest();
}

expr::Digest problem_key(const JvpProblem& p) {
  Mixer mixer;
  const expr::Digest forward = problem_key(p.forward);
  mixer.add(forward.lo);
  mixer.add(forward.hi);
  for (const TensorSpec* spec : {&p.q_tangent, &p.k_tangent, &p.v_tangent, &p.out_tangent})
    mixer.add(*spec);
  mixer.add(static_cast<std::uint64_t>(p.has_sinks_tangent) |
            static_cast<std::uint64_t>(p.wants_lse_tangent) << 1U);
  for (const JvpProblem::Captured& captured : p.captured_tangents) {
    mixer.add(std::string_view(captured.name));
    mixer.add(captured.spec);
  }
  return mixer.digest();
}

expr::Digest problem_key(const BackwardProblem& p) {
  Mixer mixer;
  const expr::Digest forward = problem_key(p.forward);
  mixer.add(forward.lo);
  mixer.add(forward.hi);
  for (const TensorSpec* spec : {&p.dout, &p.dq, &p.dk, &p.dv}) mixer.add(*spec);
  mixer.add(static_cast<std::uint64_t>(p.has_dlse) | static_cast<std::uint64_t>(p.wants_dsinks)
                                                         << 1U);
  for (const BackwardProblem::Captured& captured : p.dcaptured) {
    mixer.add(std::string_view(captured.name));
    mixer.add(captured.spec);
  }
  return mixer.digest();
}

}  // namespace fovea
