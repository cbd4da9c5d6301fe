// Fill params, launch.
#include "cuda/pages/rank_pages.hpp"

#include "cuda/kernel_unit.hpp"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

constexpr unsigned kThreads = 128;  // four sequences

std::int32_t* written(const TensorView& view) {
  return view ? static_cast<std::int32_t*>(view.mutable_data()) : nullptr;
}

RankPagesPlaces places_param(const RankPages& p) {
  return {
      .seqlens = written(p.seqlens),
      .own_seqlens = written(p.own_seqlens),
      .append_seqlens = written(p.append_seqlens),
      .append_pages = written(p.append_pages),
      .positions_new = written(p.positions_new),
      .positions_q = written(p.positions_q),
      .num_append_pages = p.append_pages ? static_cast<std::int32_t>(p.append_pages.size(1)) : 0};
}

}  // namespace

jit::KernelText rank_pages_text() {
  return common_kernel("rank_pages", "RankPagesParams", kThreads);
}

RankPagesPlan plan_rank_pages(Device device) {
  return {load_alone(rank_pages_text(), device, "context_parallel_decode")};
}

std::int64_t num_append_pages(const RankPagesSource& source) {
  // The first of them may be full but for one row.
  return (2 * (source.page_size - 1) + source.num_new) / source.page_size;
}

RankPagesLaunch rank_pages_launch(const RankPagesSource& source, const RankPages& pages) {
  RankPagesLaunch launch{};
  RankPagesParams& p = launch.params;
  p.places = places_param(pages);
  p.seqlens = index_param(source.seqlens);
  p.page_table = index_param(source.page_table);
  p.page_table_row_stride = source.page_table.stride(0);
  p.table_width = count_param(source.page_table.size(1));
  p.page_size = count_param(source.page_size);
  p.rank = source.rank;
  p.num_ranks = source.num_ranks;
  p.batch = count_param(source.seqlens.size(0));
  p.num_new = count_param(source.num_new);
  p.seqlen_q = count_param(source.seqlen_q);
  constexpr unsigned kSequences = kThreads / 32;
  launch.grid.x = (static_cast<unsigned>(p.batch) + kSequences - 1) / kSequences;
  launch.num_threads = kThreads;
  return launch;
}

KernelLaunches RankPagesLaunch::launches() const { return launch_alone(params, grid, num_threads); }

void write_rank_pages(const RankPagesPlan& plan, const RankPagesSource& source,
                      const RankPages& pages, driver::Stream stream) {
  enqueue(*plan.kernels, rank_pages_launch(source, pages).launches(), stream);
}

}  // namespace fovea::cuda
