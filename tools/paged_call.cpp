#include "paged_call.hpp"

#include <algorithm>
#include <array>
#include <random>

namespace fovea::tools {
namespace {

/// The rows of a tensor that lies row-major, or of the first columns of one, a page after the other.
TensorView pages_of(const TensorView& view, std::int64_t page_size) {
  TensorSpec spec = make_spec(
      view.dtype(),
      std::array{view.size(0) * view.size(1) / page_size, page_size, view.size(2), view.size(3)},
      std::array{page_size * view.stride(1), view.stride(1), view.stride(2), view.stride(3)});
  spec.device = view.spec().device;
  return {view.data(), spec};
}

/// Every page, in no order.
Array shuffled_pages(std::int64_t batch, std::int64_t pages) {
  Array page_table = make_array(Dtype::i32, std::array{batch, pages});
  auto* const table = static_cast<std::int32_t*>(page_table.mutable_view().mutable_data());
  for (std::int64_t i = 0; i < batch * pages; ++i) table[i] = static_cast<std::int32_t>(i);
  std::shuffle(table, table + batch * pages, std::minstd_rand(1));
  return page_table;
}

Array equal_lengths(std::int64_t batch, std::int64_t seqlen_kv) {
  Array seqlens = make_array(Dtype::i32, std::array{batch});
  std::fill_n(static_cast<std::int32_t*>(seqlens.mutable_view().mutable_data()), batch,
              static_cast<std::int32_t>(seqlen_kv));
  return seqlens;
}

}  // namespace

PagedCall::PagedCall(const AttentionForward& forward, std::int64_t page_size, const Gpu* gpu)
    : page_table(shuffled_pages(forward.k.size(0), forward.k.size(1) / page_size)),
      seqlens(equal_lengths(forward.k.size(0), forward.k.size(1))) {
  if (gpu != nullptr) {
    page_table = gpu->copy(page_table);
    seqlens = gpu->copy(seqlens);
  }
  args = {.q = forward.q,
          .cache = {.k = pages_of(forward.k, page_size),
                    .v = pages_of(forward.v, page_size),
                    .page_table = page_table.view(),
                    .seqlens = seqlens.view()},
          .out = forward.out,
          .lse = forward.lse,
          .score = forward.score,
          .mask = forward.mask,
          .softmax_scale = forward.softmax_scale,
          .sinks = forward.sinks,
          .cpu_target = forward.cpu_target,
          .compute_dtype = forward.compute_dtype,
          .sm_margin = forward.sm_margin,
          .executor = forward.executor,
          .stream = forward.stream};
}

}  // namespace fovea::tools
