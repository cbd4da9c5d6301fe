// A problem posed by its shape, for tests of what is chosen.
#pragma once

#include <array>

#include "problem/forward.hpp"

namespace fovea::cuda {

struct Posed {
  Dtype dtype = Dtype::bf16;
  std::int64_t batch = 2, seqlen_q = 1024, seqlen_kv = 1024, num_heads_q = 8, num_heads_kv = 8;
  std::int64_t head_dim_qk = 128, head_dim_v = 128;
  ScoreMod score{};
  MaskMod mask{};
};

inline ForwardProblem pose(const Posed& s) {
  const auto spec = [&](std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
    return make_spec(s.dtype, std::array{s.batch, rows, heads, head_dim});
  };
  Problem p;
  p.q = spec(s.seqlen_q, s.num_heads_q, s.head_dim_qk);
  p.k = spec(s.seqlen_kv, s.num_heads_kv, s.head_dim_qk);
  p.v = spec(s.seqlen_kv, s.num_heads_kv, s.head_dim_v);
  p.score = s.score;
  p.mask = s.mask;
  return validate(p, "test");
}

/// Few rows over many keys, as decoding has them.
inline Posed decoding() {
  return {.seqlen_q = 1, .seqlen_kv = 32768, .num_heads_q = 32, .num_heads_kv = 8};
}

}  // namespace fovea::cuda
