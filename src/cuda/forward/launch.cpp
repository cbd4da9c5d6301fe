#include "cuda/forward/launch.hpp"

#include <algorithm>
#include <bit>
#include <numbers>

#include "core/philox.hpp"
#include "cuda/device/shared/split.h"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Keys and values of heads that run side by side may fill so much of the L2 cache; queries and outputs pass through
/// the rest.
constexpr double kSectionOfL2 = 0.6;

/// What a call's arguments say, whatever its plan.
class CallFiller {
 public:
  CallFiller(const ForwardProblem& problem, const AttentionForward& args, const GrownCache* cache)
      : f_(problem), args_(args), cache_(cache), tensors_(args, cache) {}

  void fill(ForwardParams& params) const {
    fill_tensors(params);
    fill_rows(params);
    fill_lengths(params);
    if (cache_ != nullptr) fill_cache(params);
    fill_scalars(params);
  }

 private:
  void fill_tensors(ForwardParams& p) const {
    p.q = bshd(tensors_.q);
    p.k = bshd(tensors_.k);
    p.v = bshd(tensors_.v);
    p.out = bshd(tensors_.out);
    p.is_q_aligned = is_aligned(tensors_.q);
    p.is_kv_aligned = is_aligned(tensors_.k) && is_aligned(tensors_.v);
    p.is_out_aligned = is_aligned(tensors_.out);
  }

  void fill_rows(ForwardParams& p) const {
    p.lse = static_cast<float*>(args_.lse.mutable_data());
    p.row_max = static_cast<float*>(args_.row_max.mutable_data());
    const RowStrides lse = row_strides(args_.lse);
    p.lse_batch_stride = lse.batch;
    p.lse_head_stride = lse.head;
    p.lse_row_stride = lse.row;
    const RowStrides row_max = row_strides(args_.row_max);
    p.row_max_batch_stride = row_max.batch;
    p.row_max_head_stride = row_max.head;
    p.row_max_row_stride = row_max.row;
    p.sinks = static_cast<const float*>(args_.sinks.data());
    p.sinks_stride = args_.sinks ? args_.sinks.stride(0) : 0;
  }

  void fill_lengths(ForwardParams& p) const {
    p.num_sequences = static_cast<std::int32_t>(f_.num_sequences);
    p.num_heads_q = static_cast<std::int32_t>(f_.num_heads_q);
    p.num_heads_kv = static_cast<std::int32_t>(f_.num_heads_kv);
    p.group = static_cast<std::int32_t>(f_.group);
    p.head_dim_qk = static_cast<std::int32_t>(f_.head_dim_qk);
    p.head_dim_v = static_cast<std::int32_t>(f_.head_dim_v);
    if (f_.is_varlen) {
      p.cu_seqlens_q = index_param(args_.cu_seqlens_q);
      p.total_q = args_.q.size(0);
      p.seqlen_q = static_cast<std::int32_t>(f_.seqlen_q);
      p.seqlen_kv = static_cast<std::int32_t>(f_.seqlen_kv);
      p.fewest_queries = static_cast<std::int32_t>(f_.fewest_queries);
      if (cache_ != nullptr) return;
      p.cu_seqlens_kv = index_param(args_.cu_seqlens_kv);
      p.total_kv = args_.k.size(0);
      return;
    }
    p.seqlen_q = static_cast<std::int32_t>(args_.q.size(1));
    p.seqlen_kv = static_cast<std::int32_t>(cache_ != nullptr ? f_.seqlen_kv : args_.k.size(1));
  }

  void fill_cache(ForwardParams& p) const {
    const KvCache& cache = cache_->cache;
    p.seqlens_kv = index_param(cache.seqlens);
    p.left_padding = index_param(cache.left_padding);
    p.slots = index_param(cache.batch_idx);
    p.num_new = static_cast<std::int32_t>(cache_->new_tokens.each);
    p.cu_seqlens_new = index_param(cache_->new_tokens.cu_seqlens);
    p.total_new = cache_->total_new;
    p.capacity = capacity_param(cache);
    p.num_slots = count_param(cache.k.size(0));
    if (!is_paged(cache)) return;
    fill_pages(cache, p);
    const auto page_size = static_cast<std::uint32_t>(p.page_size);
    p.page_shift = std::has_single_bit(page_size) ? std::countr_zero(page_size) : -1;
  }

  void fill_scalars(ForwardParams& p) const {
    p.softmax_scale = f_.softmax_scale;
    p.softmax_scale_log2 = static_cast<float>(f_.softmax_scale * std::numbers::log2e);
    const Dropout& dropout = args_.dropout;
    p.dropout_keep_scale =
        dropout.p < 1 ? static_cast<float>(1 / (1 - static_cast<double>(dropout.p))) : 0;
    // p = 1 drops every word, 2^32 - 1 too; what would be kept of it is scaled by 0.
    p.dropout_threshold = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(philox::drop_threshold(dropout.p), 0xffffffffU));
    const philox::Key key = philox::dropout_key(dropout.seed, dropout.offset);
    p.dropout_key[0] = key[0];
    p.dropout_key[1] = key[1];
    p.dropout_seed_at = static_cast<const std::uint64_t*>(args_.dropout_seed.data());
    p.dropout_offset_at = static_cast<const std::uint64_t*>(args_.dropout_offset.data());
    p.dropout_seed = dropout.seed;
    p.dropout_offset = dropout.offset;
    p.dropout_places = static_cast<const std::int32_t*>(args_.dropout_places.data());
  }

  const ForwardProblem& f_;
  const AttentionForward& args_;
  const GrownCache* cache_;
  const Operands tensors_;
};

/// Pairs (batch, head unit) whose keys and values share the L2 cache.
std::int64_t pairs_per_section(const ForwardSpec& spec, const ForwardProblem& f,
                               const DeviceTraits& device) {
  const double bytes = static_cast<double>(f.seqlen_kv) *
                       static_cast<double>(f.head_dim_qk + f.head_dim_v) *
                       static_cast<double>(size_bytes(f.problem.k.dtype));
  const double heads = kSectionOfL2 * static_cast<double>(device.l2_bytes) / std::max(1.0, bytes);
  const std::int64_t units_per_kv_head = f.group / spec.heads_per_tile;
  const double units = heads * static_cast<double>(units_per_kv_head);
  const std::int64_t num_pairs = f.num_sequences * f.num_heads_q / spec.heads_per_tile;
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::min(units, 1e9)), 1,
                                  std::max<std::int64_t>(1, num_pairs));
}

class Filler {
 public:
  Filler(const ForwardProblem& problem, const ForwardPlan& plan, const AttentionForward& args,
         const GrownCache* cache)
      : f_(problem), plan_(plan), spec_(*plan.spec), args_(args), cache_(cache) {}

  ForwardLaunch fill(void* workspace) {
    ForwardLaunch launch{};
    launch.params = call_params(f_, args_, cache_);
    launch.params.captures = plan_.capture_slots.bind(args_.score, args_.mask);
    launch.num_threads = static_cast<std::uint32_t>(spec_.num_warps * plan_.device.warp_lanes);
    launch.grid.x = fill_row_tiles(spec_, f_, plan_.device, launch.params);
    if (spec_.is_split) fill_split(launch, workspace);
    launch.clears_rows = clears_rows(spec_, f_);
    if (launch.clears_rows) fill_clear(launch, f_);
    return launch;
  }

 private:
  void fill_split(ForwardLaunch& launch, void* workspace) const {
    ForwardParams& p = launch.params;
    const std::int64_t rows = f_.num_sequences * f_.num_heads_q * p.seqlen_q;
    p.max_splits = max_splits(spec_, f_);
    launch.grid.y = static_cast<std::uint32_t>(p.max_splits);
    p.partial_out = static_cast<float*>(workspace);
    p.partial_lse = p.partial_out + rows * p.max_splits * spec_.head_dim_v;
    p.partial_max = p.partial_lse + rows * p.max_splits;
    CombineParams& c = launch.combine_params;
    c = {.out = p.out,
         .lse = p.lse,
         .row_max = p.row_max,
         .lse_batch_stride = p.lse_batch_stride,
         .lse_head_stride = p.lse_head_stride,
         .lse_row_stride = p.lse_row_stride,
         .row_max_batch_stride = p.row_max_batch_stride,
         .row_max_head_stride = p.row_max_head_stride,
         .row_max_row_stride = p.row_max_row_stride,
         .sinks = p.sinks,
         .sinks_stride = p.sinks_stride,
         .seqlens_kv = p.seqlens_kv,
         .left_padding = p.left_padding,
         .page_indptr = p.page_indptr,
         .cu_seqlens_q = p.cu_seqlens_q,
         .cu_seqlens_new = p.cu_seqlens_new,
         .total_q = p.total_q,
         .total_new = p.total_new,
         .num_listed = p.num_listed,
         .page_size = p.page_size,
         .capacity = p.capacity,
         .num_new = p.num_new,
         .partial_out = p.partial_out,
         .partial_lse = p.partial_lse,
         .partial_max = p.partial_max,
         .max_splits = p.max_splits,
         .partial_width = spec_.head_dim_v,
         .seqlen_q = p.seqlen_q,
         .seqlen_kv = p.seqlen_kv,
         .num_heads_q = p.num_heads_q,
         .head_dim_v = p.head_dim_v,
         .num_rows = rows,
         .num_sequences = p.num_sequences,
         .tiles_of_cta = 0};
  }

  static void fill_clear(ForwardLaunch& launch, const ForwardProblem& f) {
    const ForwardParams& p = launch.params;
    launch.clear_params = {.out = p.out,
                           .out_element = element_of(f.problem.out.dtype),
                           .lse = p.lse,
                           .lse_head_stride = p.lse_head_stride,
                           .lse_row_stride = p.lse_row_stride,
                           .cu_seqlens_q = p.cu_seqlens_q,
                           .num_sequences = p.num_sequences,
                           .num_heads_q = p.num_heads_q,
                           .head_dim_v = p.head_dim_v,
                           .total_q = p.total_q};
  }

  const ForwardProblem& f_;
  const ForwardPlan& plan_;
  const ForwardSpec& spec_;
  const AttentionForward& args_;
  const GrownCache* cache_;
};

}  // namespace

ForwardParams call_params(const ForwardProblem& problem, const AttentionForward& args,
                          const GrownCache* cache) {
  ForwardParams params{};
  CallFiller(problem, args, cache).fill(params);
  return params;
}

bool clears_rows(const ForwardSpec& spec, const ForwardProblem& problem) {
  return spec.has_packed_q && !spec.is_varlen && !problem.is_beside_longer;
}

std::int64_t num_row_tiles(const ForwardSpec& spec, const ForwardProblem& problem,
                           std::int64_t seqlen_q, std::int64_t total_q) {
  const std::int64_t rows = spec.tile_q / spec.heads_per_tile;
  const std::int64_t head_units = problem.num_heads_q / spec.heads_per_tile;
  if (!spec.is_varlen) return problem.num_sequences * head_units * ((seqlen_q + rows - 1) / rows);
  // Every sequence may waste a tile, and so may the rows behind the last one.
  return total_q == 0 ? 0 : (total_q / rows + problem.num_sequences + 1) * head_units;
}

std::uint32_t fill_row_tiles(const ForwardSpec& spec, const ForwardProblem& problem,
                             const DeviceTraits& device, ForwardParams& p) {
  if (problem.is_varlen && p.total_q == 0) return 0;  // no tiles, whatever sequences there are
  if (!spec.is_varlen) {
    const std::int64_t rows = spec.tile_q / spec.heads_per_tile;
    p.num_q_tiles = static_cast<std::int32_t>((p.seqlen_q + rows - 1) / rows);
    p.heads_per_section = static_cast<std::int32_t>(pairs_per_section(spec, problem, device));
  }
  return static_cast<std::uint32_t>(num_row_tiles(spec, problem, p.seqlen_q, p.total_q));
}

ForwardLaunch forward_launch(const ForwardProblem& problem, const ForwardPlan& plan,
                             const AttentionForward& args, void* workspace,
                             const GrownCache* cache) {
  return Filler(problem, plan, args, cache).fill(workspace);
}

void ForwardLaunch::add_tables(KernelLaunches& all) const {
  if (!range_tables.is_empty()) all.add(range_tables_launch(range_tables));
}

void ForwardLaunch::add_combine(const ForwardPlan& plan, KernelLaunches& all) const {
  if (plan.spec->is_split) {
    const CombineForm& form = combine_form(combine_params.num_rows, combine_params.max_splits,
                                           combine_params.tiles_of_cta > 0);
    all.add(combine_launch(combine_params, form, candidate_named(plan.candidate).is_chained,
                           plan.device));
  }
  add_clear(all);
}

void ForwardLaunch::add_clear(KernelLaunches& all) const {
  if (!clears_rows) return;
  KernelLaunch clear = kernel_launch(KernelRole::clear_rows, clear_params);
  clear.grid.x = static_cast<unsigned>(clear_params.total_q);
  clear.num_threads = kClearingThreads;
  all.add(clear);
}

KernelLaunches ForwardLaunch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  add_tables(all);
  all.add(main_launch(plan, params));
  add_combine(plan, all);
  return all;
}

void place_range_tables(const ForwardPlan& plan, void* workspace, ForwardLaunch& launch) {
  if (plan.range_tables.is_empty()) return;
  const std::span bytes(static_cast<std::byte*>(workspace), plan.workspace_bytes);
  launch.range_tables =
      plan.range_tables.place(launch.params.captures, bytes.subspan(plan.tables_at));
}

ForwardLaunch prepare_plain(const ForwardProblem& problem, const ForwardPlan& plan,
                            const AttentionForward& args, const GrownCache* cache, void* workspace,
                            const TensorMapEncoder&) {
  ForwardLaunch launch = forward_launch(problem, plan, args, workspace, cache);
  place_range_tables(plan, workspace, launch);
  return launch;
}

}  // namespace fovea::cuda
