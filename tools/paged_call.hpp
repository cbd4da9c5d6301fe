// A call's keys and values as a cache in pages: what bench and tune run where a case has pages.
#pragma once

#include <cstdint>

#include "fovea/kv_cache.hpp"

#include "array.hpp"
#include "gpu.hpp"

namespace fovea::tools {

/// The same attention over pages that lie in no order; k and v lie row-major and are the cache's memory. The rest is
/// the call's.
struct PagedCall {
  Array page_table, seqlens;
  AttentionDecode args;

  /// `gpu`: where the call's tensors lie; null: on the host.
  PagedCall(const AttentionForward& forward, std::int64_t page_size, const Gpu* gpu);
  PagedCall(const PagedCall&) = delete;
  PagedCall& operator=(const PagedCall&) = delete;
};

}  // namespace fovea::tools
