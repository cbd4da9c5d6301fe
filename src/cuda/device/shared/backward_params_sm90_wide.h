// What sm90/attention_backward_wide and the kernel ahead of it take at the launch.
#pragma once

#include "shared/backward_params.h"
#include "shared/forward_params_sm90.h"
#include "shared/types.h"

namespace fovea::cuda {

struct Sm90WideBackwardParams {
  // Dimensions (head_dim, seqlen, head, batch), packed (head_dim, total, head, 1), 128-byte swizzle; boxes of 64
  // elements x kSm90WideRows.
  TensorMapParam q, k, v, dout;
  BackwardParams common;
  // 0, which the compiler does not know: it keeps programs of scores behind each other
  std::uint32_t zero;
};

/// Of sm90/backward/wide/clear_words: `count` words, which become 0.
struct ClearWordsParams {
  std::int32_t* words;
  std::int64_t count;
};

/// Threads of clear_words, and words of each.
inline constexpr std::int32_t kClearThreads = 256;
inline constexpr std::int32_t kClearedWords = 16;

}  // namespace fovea::cuda
