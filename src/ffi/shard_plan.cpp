// The functions of fovea.h that shard a problem over ranks.
#include "ffi/shard_plan.hpp"

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/parallel.hpp"

#include "core/check.hpp"
#include "ffi/arguments.hpp"
#include "ffi/error.hpp"
#include "ffi/explanation.hpp"
#include "ffi/sized_struct.hpp"
#include "ffi/tensor.hpp"

namespace {

using fovea::ParallelScheme;
using fovea::ShardPlan;
using fovea::TokenRange;
using fovea::Transfer;
using fovea::ffi::guarded;

static_assert(static_cast<int>(ParallelScheme::all_gather) == FOVEA_ALL_GATHER);
static_assert(static_cast<int>(ParallelScheme::head_group_all_gather) ==
              FOVEA_HEAD_GROUP_ALL_GATHER);
static_assert(static_cast<int>(ParallelScheme::ring) == FOVEA_RING);
static_assert(static_cast<int>(ParallelScheme::ulysses) == FOVEA_ULYSSES);
static_assert(static_cast<int>(ParallelScheme::hybrid) == FOVEA_HYBRID);
static_assert(static_cast<int>(ParallelScheme::needed_only) == FOVEA_NEEDED_ONLY);
static_assert(static_cast<int>(Transfer::Tensor::q) == FOVEA_TRANSFER_Q);
static_assert(static_cast<int>(Transfer::Tensor::kv) == FOVEA_TRANSFER_KV);
static_assert(static_cast<int>(Transfer::Tensor::out) == FOVEA_TRANSFER_OUT);

/// What fovea_shard_args says.
struct ShardCall {
  fovea::Problem problem{};
  int world_size = 0;
  ParallelScheme scheme = ParallelScheme::all_gather;
  fovea::ShardOptions options{};
};

fovea::TensorView values_of(const fovea_attention_forward_args* source, const std::string& where) {
  const auto c = fovea::ffi::read_struct(source, offsetof(fovea_attention_forward_args, v), where);
  return fovea::ffi::to_view(c.v, fovea::ffi::Access::read, where + ": v");
}

ShardCall to_shard_call(const fovea_shard_args* source, const std::string& where) {
  const auto c = fovea::ffi::read_struct(source, offsetof(fovea_shard_args, tile_q), where);
  const fovea::ffi::MaskCall call = fovea::ffi::to_mask_call(c.forward, where + ": forward");
  const fovea::TensorView v = values_of(c.forward, where + ": forward");
  ShardCall result{.world_size = c.world_size};
  result.problem.q = call.q.spec();
  result.problem.k = call.k.spec();
  result.problem.v = v ? v.spec() : call.k.spec();
  result.problem.mask = call.mask;
  if (call.cu_seqlens_q) result.problem.num_sequences = call.cu_seqlens_q.size(0) - 1;
  if (c.scheme < 0 || c.scheme >= fovea::kNumParallelSchemes) {
    fovea::invalid(
        where, "scheme is " + std::to_string(c.scheme) + "; expected one of fovea_parallel_scheme");
  }
  result.scheme = static_cast<ParallelScheme>(c.scheme);
  if (c.tile_q != 0) result.options.tile_q = c.tile_q;
  if (c.tile_kv != 0) result.options.tile_kv = c.tile_kv;
  result.options.chunk = c.chunk;
  result.options.head_parts = c.head_parts;
  result.options.head_ranks = c.head_ranks;
  return result;
}

const ShardPlan& plan_of(const fovea_shard_plan* plan, const std::string& where) {
  if (plan == nullptr) fovea::invalid(where, "plan is NULL; expected an address");
  return plan->plan;
}

/// The number of elements where there is no array, else the elements: write(i) of each.
template <typename T, typename Write>
void write_list(T* list, std::size_t room, std::size_t size, std::size_t* count,
                const std::string& where, const Write& write) {
  if (count == nullptr) fovea::invalid(where, "count is NULL; expected an address");
  if (list != nullptr) {
    if (room != size) {
      fovea::invalid(where, "there is room for " + std::to_string(room) + "; expected " +
                                std::to_string(size) + ", as *count says where there is no array");
    }
    for (std::size_t i = 0; i < size; ++i) write(i);
  }
  *count = size;
}

std::span<const TokenRange> ranges_of(const ShardPlan& plan, int rank, std::int32_t kind,
                                      const std::string& where) {
  switch (kind) {
    case FOVEA_SHARD_TOKENS:
      return plan.tokens(rank);
    case FOVEA_SHARD_ROWS:
      return plan.rows(rank);
    case FOVEA_SHARD_NEEDED:
      return plan.needed_kv(rank);
    default:
      fovea::invalid(
          where, "kind is " + std::to_string(kind) + "; expected one of fovea_shard_ranges_kind");
  }
}

fovea_transfer to_c(const Transfer& transfer) {
  return {.step = transfer.step,
          .from = transfer.from,
          .tensor = static_cast<std::int64_t>(transfer.tensor),
          .token_begin = transfer.tokens.begin,
          .token_end = transfer.tokens.end,
          .head_begin = transfer.heads.begin,
          .head_end = transfer.heads.end};
}

/// page() or json(), as the format asks.
template <typename Page, typename Json>
char* render(std::int32_t format, const std::string& where, const Page& page, const Json& json) {
  if (format == FOVEA_TEXT) return fovea::ffi::copy_text(page());
  if (format == FOVEA_JSON) return fovea::ffi::copy_text(json());
  fovea::invalid(where,
                 "format is " + std::to_string(format) + "; expected FOVEA_TEXT or FOVEA_JSON");
}

/// 0 is the default; less is refused.
int size_or(std::int32_t value, int otherwise, const std::string& label) {
  if (value < 0) fovea::invalid(label, "is " + std::to_string(value) + "; expected >= 0");
  return value == 0 ? otherwise : value;
}

}  // namespace

extern "C" {

int fovea_shard_plan_create(const fovea_shard_args* args, fovea_shard_plan** plan,
                            fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_shard_plan_create";
    if (plan == nullptr) fovea::invalid(where, "plan is NULL; expected an address");
    *plan = nullptr;
    const ShardCall call = to_shard_call(args, where);
    *plan = new fovea_shard_plan{
        fovea::context_parallel_plan(call.problem, call.world_size, call.scheme, call.options)};
  });
}

void fovea_shard_plan_destroy(fovea_shard_plan* plan) { delete plan; }

int fovea_shard_plan_ranges(const fovea_shard_plan* plan, int32_t rank, int32_t kind,
                            int64_t* ranges, size_t num_ranges, size_t* count,
                            fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_shard_plan_ranges";
    const auto found = ranges_of(plan_of(plan, where), rank, kind, where);
    write_list(ranges, num_ranges, found.size(), count, where, [&](std::size_t i) {
      ranges[2 * i] = found[i].begin;
      ranges[2 * i + 1] = found[i].end;
    });
  });
}

int fovea_shard_plan_transfers(const fovea_shard_plan* plan, int32_t rank,
                               fovea_transfer* transfers, size_t num_transfers, size_t* count,
                               fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_shard_plan_transfers";
    const std::vector<Transfer> found = plan_of(plan, where).transfers(rank);
    write_list(transfers, num_transfers, found.size(), count, where,
               [&](std::size_t i) { transfers[i] = to_c(found[i]); });
  });
}

int fovea_shard_plan_permutation(const fovea_shard_plan* plan, int64_t* tokens, size_t num_tokens,
                                 fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_shard_plan_permutation";
    const std::vector<std::int64_t> found = plan_of(plan, where).permutation();
    if (tokens == nullptr && !found.empty())
      fovea::invalid(where, "tokens is NULL; expected an address");
    std::size_t count = 0;
    write_list(tokens, num_tokens, found.size(), &count, where,
               [&](std::size_t i) { tokens[i] = found[i]; });
  });
}

int fovea_shard_plan_explain(const fovea_shard_plan* plan, int32_t format, char** text,
                             fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_shard_plan_explain";
    fovea::ffi::require_text(text, where);
    const ShardPlan& found = plan_of(plan, where);
    *text = render(
        format, where, [&] { return found.print(); }, [&] { return found.json(); });
  });
}

int fovea_shard_plan_print_ranks(const fovea_shard_plan* plan, int64_t sequence, int64_t q_head,
                                 int32_t max_width, int32_t max_height, char** text,
                                 fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_shard_plan_print_ranks";
    fovea::ffi::require_text(text, where);
    const int width = size_or(max_width, 96, where + ": max_width");
    const int height = size_or(max_height, 48, where + ": max_height");
    *text =
        fovea::ffi::copy_text(plan_of(plan, where).print_ranks(sequence, q_head, width, height));
  });
}

int fovea_forecast_context_parallel(const fovea_shard_args* args, double flops, double bytes,
                                    int32_t format, char** text, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_forecast_context_parallel";
    fovea::ffi::require_text(text, where);
    const ShardCall call = to_shard_call(args, where);
    fovea::RankSpeed speed;
    if (flops != 0) speed.flops = flops;
    if (bytes != 0) speed.bytes = bytes;
    const auto forecasts =
        fovea::forecast_context_parallel(call.problem, call.world_size, call.options, speed);
    *text = render(
        format, where, [&] { return fovea::print_forecasts(forecasts); },
        [&] { return fovea::json_forecasts(forecasts); });
  });
}

}  // extern "C"
