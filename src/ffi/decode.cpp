// The functions of fovea.h over a KV cache.
#include "ffi/decode.hpp"

#include <cstddef>
#include <optional>
#include <string>

#include "core/check.hpp"
#include "ffi/error.hpp"
#include "ffi/plan.hpp"
#include "ffi/sized_struct.hpp"
#include "ffi/tensor.hpp"

namespace {

using fovea::ffi::Access;
using fovea::ffi::DecodeCall;
using fovea::ffi::guarded;
using fovea::ffi::to_decode;
using fovea::ffi::to_view;

/// cache and lengths: what every caller has.
constexpr std::size_t kLeastSize = offsetof(fovea_attention_decode_args, page_table);

/// A cache has no room for what these mean.
void refuse_other_features(const fovea::AttentionForward& args, const std::string& where) {
  const auto refuse = [&](const char* name) {
    fovea::invalid(where, std::string(name) + " is given; expected none over a cache");
  };
  if (args.row_max) refuse("row_max");
  if (args.dropout.p != 0) refuse("dropout");
  if (args.dropout_seed || args.dropout_offset) refuse("dropout_seed");
  if (args.dropout_places) refuse("dropout_places");
  if (args.cu_seqlens_kv) refuse("cu_seqlens_kv");
  if (args.q_scale || args.k_scale || args.v_scale) refuse("q_scale, k_scale or v_scale");
}

fovea::KvCache to_cache(const fovea_attention_decode_args& c, const std::string& where) {
  const Access access = c.append_k != nullptr ? Access::write : Access::read;
  return {.k = to_view(c.forward->k, access, where + ": forward: k"),
          .v = to_view(c.forward->v, access, where + ": forward: v"),
          .page_table = to_view(c.page_table, Access::read, where + ": page_table"),
          .seqlens = to_view(c.seqlens, Access::read, where + ": seqlens"),
          .batch_idx = to_view(c.batch_idx, Access::read, where + ": batch_idx"),
          .left_padding = to_view(c.left_padding, Access::read, where + ": left_padding"),
          .page_indptr = to_view(c.page_indptr, Access::read, where + ": page_indptr"),
          .page_indices = to_view(c.page_indices, Access::read, where + ": page_indices"),
          .k_scale = to_view(c.k_scale, access, where + ": k_scale"),
          .v_scale = to_view(c.v_scale, access, where + ": v_scale")};
}

fovea::Append to_append_tokens(const fovea_attention_decode_args& c, const std::string& where) {
  return {.k = to_view(c.append_k, Access::read, where + ": append_k"),
          .v = to_view(c.append_v, Access::read, where + ": append_v"),
          .cu_seqlens = to_view(c.append_cu_seqlens, Access::read, where + ": append_cu_seqlens")};
}

bool to_bool(std::int32_t value, const std::string& label) {
  if (value < 0 || value > 1)
    fovea::invalid(label, "is " + std::to_string(value) + "; expected 0 to 1");
  return value == 1;
}

std::optional<fovea::Rotary> to_rotary(const fovea_attention_decode_args& c,
                                       const std::string& where) {
  const bool is_interleaved = to_bool(c.is_interleaved, where + ": is_interleaved");
  if (c.rotary_cos == nullptr && c.rotary_sin == nullptr && c.rotary_positions == nullptr &&
      c.rotary_positions_q == nullptr)
    return std::nullopt;
  return fovea::Rotary{
      .cos = to_view(c.rotary_cos, Access::read, where + ": rotary_cos"),
      .sin = to_view(c.rotary_sin, Access::read, where + ": rotary_sin"),
      .is_interleaved = is_interleaved,
      .positions = to_view(c.rotary_positions, Access::read, where + ": rotary_positions"),
      .positions_q = to_view(c.rotary_positions_q, Access::read, where + ": rotary_positions_q")};
}

struct AppendCall {
  fovea::ffi::Threads threads;
  fovea::AppendToCache args;
};

/// Of forward, only the cache and where the call runs are looked at.
AppendCall to_append(const fovea_attention_decode_args* source, const std::string& where) {
  auto c = fovea::ffi::read_struct(source, kLeastSize, where);
  const auto forward = fovea::ffi::read_struct(
      c.forward, offsetof(fovea_attention_forward_args, out), where + ": forward");
  c.forward = &forward;
  AppendCall call;
  call.threads = fovea::ffi::to_threads(forward.runtime, forward.executor, where + ": forward");
  call.args = {.cache = to_cache(c, where),
               .append = to_append_tokens(c, where),
               .rotary = to_rotary(c, where),
               .executor = call.threads.executor,
               .stream = forward.stream};
  return call;
}

}  // namespace

namespace fovea::ffi {

DecodeCall to_decode(const fovea_attention_decode_args* source, const std::string& where,
                     ProgramCache* cache) {
  const auto c = read_struct(source, kLeastSize, where);
  DecodeCall call;
  call.forward = to_call(c.forward, where + ": forward", cache);
  const AttentionForward& forward = call.forward.args;
  refuse_other_features(forward, where + ": forward");
  const bool sees_all_keys = to_bool(c.sees_all_keys, where + ": sees_all_keys");
  const bool is_causal = forward.mask.is_all_visible() && !sees_all_keys;
  call.args = {.q = forward.q,
               .cache = to_cache(c, where),
               .append = to_append_tokens(c, where),
               .rotary = to_rotary(c, where),
               .out = forward.out,
               .lse = forward.lse,
               .score = forward.score,
               .mask = is_causal ? causal() : forward.mask,
               .softmax_scale = forward.softmax_scale,
               .sinks = forward.sinks,
               .cu_seqlens_q = forward.cu_seqlens_q,
               .max_seqlen_q = c.max_seqlen_q == 0 ? std::nullopt : std::optional(c.max_seqlen_q),
               .shared_prefix = {.seqlen = c.shared_prefix,
                                 .cu_sequences = to_view(c.shared_cu_sequences, Access::read,
                                                         where + ": shared_cu_sequences")},
               .quant = forward.quant,
               .cpu_target = forward.cpu_target,
               .compute_dtype = forward.compute_dtype,
               .sm_margin = forward.sm_margin,
               .workspace = forward.workspace,
               .executor = forward.executor,
               .stream = forward.stream};
  return call;
}

}  // namespace fovea::ffi

extern "C" {

int fovea_attention_decode(const fovea_attention_decode_args* args, fovea_error** error) {
  return guarded(error, [&] {
    const DecodeCall call = to_decode(args, "fovea_attention_decode");
    fovea::attention_decode(call.args, fovea::ffi::runtime_of(call.forward.threads));
  });
}

int fovea_append_to_cache(const fovea_attention_decode_args* args, fovea_error** error) {
  return guarded(error, [&] {
    const AppendCall call = to_append(args, "fovea_append_to_cache");
    fovea::append_to_cache(call.args, fovea::ffi::runtime_of(call.threads));
  });
}

int fovea_plan_create_decode(const fovea_attention_decode_args* args, int64_t max_seqlen_kv,
                             fovea_plan** plan, fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_create_decode";
    fovea::ffi::create_plan(plan, kWhere, [&] {
      return fovea::plan_decode(to_decode(args, kWhere).args, max_seqlen_kv);
    });
  });
}

int fovea_plan_run_decode(const fovea_plan* plan, const fovea_attention_decode_args* args,
                          fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_run_decode";
    const auto& of_decode = fovea::ffi::plan_of<fovea::DecodePlan>(plan, kWhere);
    of_decode.run(to_decode(args, kWhere, &plan->programs).args);
  });
}

int fovea_plan_create_append(const fovea_attention_decode_args* args, fovea_plan** plan,
                             fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_create_append";
    fovea::ffi::create_plan(plan, kWhere,
                            [&] { return fovea::plan_append(to_append(args, kWhere).args); });
  });
}

int fovea_plan_run_append(const fovea_plan* plan, const fovea_attention_decode_args* args,
                          fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_run_append";
    fovea::ffi::plan_of<fovea::AppendPlan>(plan, kWhere).run(to_append(args, kWhere).args);
  });
}

int fovea_decode_workspace_bytes(const fovea_attention_decode_args* args, int64_t max_seqlen_kv,
                                 size_t* bytes, fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_decode_workspace_bytes";
    if (bytes == nullptr) fovea::invalid(kWhere, "bytes is NULL; expected an address");
    *bytes = 0;
    const DecodeCall call = to_decode(args, kWhere);
    *bytes = fovea::decode_workspace_bytes(call.args, max_seqlen_kv);
  });
}

}  // extern "C"
