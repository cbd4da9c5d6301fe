// A decoding step on a GPU: one kernel finds what of it is this rank's.
#include <array>
#include <cstdint>
#include <initializer_list>

#include "parallel/engine/decode_step.hpp"
#include "plan/device_kernels.hpp"

namespace fovea::parallel {

DecodeStep make_decode_step_on_device(const DecodeStepSource& source, const Memory& memory) {
  const cuda::RankPagesSource where{.rank = source.rank,
                                    .num_ranks = source.world_size,
                                    .page_size = source.page_size(),
                                    .num_new = source.num_new(),
                                    .seqlen_q = source.seqlen_q,
                                    .seqlens = source.cache.seqlens,
                                    .page_table = source.cache.page_table};
  DecodeStep step;
  cuda::RankPages pages;
  const auto made = [&](std::initializer_list<std::int64_t> shape) {
    step.kept.push_back(memory.make(Dtype::i32, std::span(shape.begin(), shape.size())));
    return step.kept.back().view;
  };
  const std::int64_t batch = source.batch();
  step.seqlens = memory.make(Dtype::i32, std::array{batch});
  step.own_seqlens = memory.make(Dtype::i32, std::array{batch});
  pages.seqlens = step.seqlens.view;
  pages.own_seqlens = step.own_seqlens.view;
  const bool is_turned = source.rotary != nullptr;
  if (is_turned) {
    step.positions_q = source.positions_q;
    if (!step.positions_q) step.positions_q = pages.positions_q = made({batch, source.seqlen_q});
  }
  if (source.append.k) {
    pages.append_seqlens = made({batch});
    pages.append_pages = made({batch, cuda::num_append_pages(where)});
    AppendToCache& call = step.append.emplace(
        AppendToCache{.cache = source.cache, .append = source.append, .stream = memory.stream()});
    // Tokens of other ranks go to pages that there are not: nothing is written.
    call.cache.seqlens = pages.append_seqlens;
    call.cache.page_table = pages.append_pages;
    if (is_turned) {
      TensorView positions = source.positions_new;
      if (!positions) positions = pages.positions_new = made({batch, source.num_new()});
      call.rotary = rotary_at(*source.rotary, positions);
    }
  }
  const cuda::RankPagesPlan plan = find_rank_pages(memory.device(), Runtime::process_default());
  cuda::write_rank_pages(plan, where, pages, cuda::driver::Stream(memory.stream()));
  return step;
}

}  // namespace fovea::parallel
