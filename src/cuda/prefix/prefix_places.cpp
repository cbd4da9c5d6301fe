// Fill params, launch.
#include "cuda/prefix/prefix_places.hpp"

#include <algorithm>

#include "cuda/kernel_unit.hpp"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Four rows, or 128 sequences, or pages of a group at a time.
constexpr unsigned kThreads = 128;

std::int32_t* written(const TensorView& view) {
  return view ? static_cast<std::int32_t*>(view.mutable_data()) : nullptr;
}

PrefixPlacesParam places_param(const PrefixPlaces& p) {
  return {.prefix_seqlens = written(p.prefix_seqlens),
          .prefix_left_padding = written(p.prefix_left_padding),
          .slots = written(p.slots),
          .page_table = written(p.page_table),
          .cu_seqlens = written(p.cu_seqlens),
          .suffix_seqlens = written(p.suffix_seqlens),
          .suffix_left_padding = written(p.suffix_left_padding),
          .rows = written(p.rows),
          .num_pages = p.page_table ? static_cast<std::int32_t>(p.page_table.size(1)) : 0};
}

void fill_cache(const KvCache& cache, PrefixParams& p) {
  p.seqlens_kv = index_param(cache.seqlens);
  p.left_padding = index_param(cache.left_padding);
  p.slots = index_param(cache.batch_idx);
  p.capacity = capacity_param(cache);
  p.seqlen_kv = p.capacity;
  p.page_size = 1;
  fill_pages(cache, p);
  if (cache.page_table) p.table_width = count_param(cache.page_table.size(1));
}

}  // namespace

jit::KernelText prefix_text() { return common_kernel("prefix_places", "PrefixParams", kThreads); }

PrefixPlan plan_prefix(Device device) {
  return {load_alone(prefix_text(), device, "attention_decode")};
}

PrefixLaunch prefix_launch(const PrefixSource& source, const PrefixPlaces& places) {
  PrefixLaunch launch{};
  PrefixParams& p = launch.params;
  p.places = places_param(places);
  p.batch = static_cast<std::int32_t>(source.batch);
  p.num_groups = static_cast<std::int32_t>(source.num_groups);
  p.num_rows = static_cast<std::int32_t>(source.num_rows);
  p.num_keys = static_cast<std::int32_t>(source.num_keys);
  p.skipped_rows = static_cast<std::int32_t>(source.skipped_rows);
  p.cu_sequences = index_param(source.cu_sequences);
  p.cu_seqlens_q = index_param(source.queries.cu_seqlens);
  p.seqlen_q = static_cast<std::int32_t>(source.queries.each);
  p.num_new = static_cast<std::int32_t>(source.new_tokens.each);
  p.cu_seqlens_new = index_param(source.new_tokens.cu_seqlens);
  p.total_new = source.total_new;
  fill_cache(source.cache, p);
  const std::int64_t sequence_ctas = (source.batch + kThreads - 1) / kThreads;
  const std::int64_t row_ctas =
      places.rows ? (source.num_rows + kThreads / 32 - 1) / (kThreads / 32) : 0;
  launch.grid.x = static_cast<unsigned>(std::max({sequence_ctas, source.num_groups + 1, row_ctas}));
  launch.grid.y = places.rows ? 3 : 2;
  launch.num_threads = kThreads;
  return launch;
}

KernelLaunches PrefixLaunch::launches() const { return launch_alone(params, grid, num_threads); }

void write_prefix_places(const PrefixPlan& plan, const PrefixSource& source,
                         const PrefixPlaces& places, void* stream) {
  const PrefixLaunch launch = prefix_launch(source, places);
  enqueue(*plan.kernels, launch.launches(), driver::Stream(stream));
}

}  // namespace fovea::cuda
