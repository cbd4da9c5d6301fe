#include "problem/decode.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "problem/captured_tensors.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

TensorSpec row_major(const TensorSpec& spec, std::int64_t batch, std::int64_t seqlen) {
  TensorSpec result =
      make_spec(spec.dtype, std::array{batch, seqlen, spec.shape[2], spec.shape[3]});
  result.device = spec.device;
  return result;
}

bool has_aligned_rows(const TensorView& t) {
  constexpr std::int64_t kBytes = 16;
  const auto size = static_cast<std::int64_t>(size_bytes(t.dtype()));
  for (int dim = 0; dim + 1 < t.rank(); ++dim) {
    if (t.size(dim) > 1 && (t.stride(dim) <= 0 || t.stride(dim) % (kBytes / size) != 0))
      return false;
  }
  return t.stride(t.rank() - 1) == 1 && reinterpret_cast<std::uintptr_t>(t.data()) % kBytes == 0;
}

// ---- memory that overlaps ----

void add_cache_indices(OverlapCheck& check, const KvCache& cache) {
  check.add_input("cache.page_table", cache.page_table);
  check.add_input("cache.page_indptr", cache.page_indptr);
  check.add_input("cache.page_indices", cache.page_indices);
  check.add_input("cache.seqlens", cache.seqlens);
  check.add_input("cache.batch_idx", cache.batch_idx);
  check.add_input("cache.left_padding", cache.left_padding);
}

void add_new_tokens(OverlapCheck& check, const Append& append,
                    const std::optional<Rotary>& rotary) {
  check.add_input("append.k", append.k);
  check.add_input("append.v", append.v);
  if (!rotary) return;
  check.add_input("rotary.cos", rotary->cos);
  check.add_input("rotary.sin", rotary->sin);
  check.add_input("rotary.positions", rotary->positions);
}

void add_operands(OverlapCheck& check, const AttentionDecode& args) {
  check.add_input("q", args.q);
  check.add_input("sinks", args.sinks);
  check.add_captured(args.score, args.mask);
}

/// Positions of queries. Those of appended keys are checked with the cache.
void check_query_positions(const ForwardProblem& f, const AttentionDecode& args,
                           const TensorChecks& checks) {
  const Rotary& r = *args.rotary;
  if (r.positions && r.positions.size(1) != f.seqlen_q) {
    checks.refuse(
        fmt::format("rotary.positions is {}; expected i32 or i64 [{}, {}], one for every "
                    "query",
                    to_string(r.positions.spec()), f.num_sequences, f.seqlen_q));
  }
  if (r.positions || f.seqlen_q == 0 || !checks.is_host()) return;
  for (std::int64_t i = 0; i < f.num_sequences; ++i) {
    const CachedSequence s = cached_sequence(args.cache, i);
    refuse_short_rotary(r, i, s.end - s.begin + num_new(args.append), checks);
  }
}

/// A cache that is appended to beside what the call reads.
void refuse_overlap_of_cache(OverlapCheck& written, const KvCache& cache,
                             const TensorChecks& checks) {
  written.add_output("cache.k", cache.k);
  written.add_output("cache.v", cache.v);
  written.refuse_overlap(checks);
}

void refuse_overlap(const AttentionDecode& args, const TensorChecks& checks) {
  OverlapCheck outputs;
  add_operands(outputs, args);
  add_new_tokens(outputs, args.append, args.rotary);
  add_cache_indices(outputs, args.cache);
  outputs.add_input("cache.k", args.cache.k);
  outputs.add_input("cache.v", args.cache.v);
  outputs.add_output("out", args.out);
  outputs.add_output("lse", args.lse);
  outputs.add_output("workspace", args.workspace);
  outputs.refuse_overlap(checks);
}

}  // namespace

std::int64_t decode_batch(const AttentionDecode& args, std::string_view where) {
  const TensorChecks checks(where);
  if (args.q.rank() != 4) {
    checks.refuse(
        fmt::format("q is {}; expected rank 4: [batch, seqlen_q, num_heads_q, head_dim_qk]",
                    args.q ? to_string(args.q.spec()) : "missing"));
  }
  check_cache_ranks(args.cache, checks);
  return args.q.size(0);
}

Problem decode_problem(const AttentionDecode& args, std::int64_t max_seqlen_kv, int num_threads,
                       std::string_view where) {
  const std::int64_t batch = decode_batch(args, where);
  return {.q = args.q.spec(),
          .k = row_major(args.cache.k.spec(), batch, max_seqlen_kv),
          .v = row_major(args.cache.v.spec(), batch, max_seqlen_kv),
          .out = args.out.spec(),
          .score = args.score,
          .mask = args.mask,
          .softmax_scale = args.softmax_scale,
          .has_sinks = static_cast<bool>(args.sinks),
          .wants_lse = static_cast<bool>(args.lse),
          .seqlen_kv = up_to(max_seqlen_kv),
          .compute_dtype = args.compute_dtype,
          .cpu_target = args.cpu_target,
          .sm_margin = args.sm_margin,
          .num_threads = num_threads};
}

CacheLayout cache_layout(const AttentionDecode& args) {
  const KvCache& cache = args.cache;
  return {.page_size = is_paged(cache) ? cache.k.size(1) : 0,
          .has_left_padding = static_cast<bool>(cache.left_padding),
          .has_aligned_rows = has_aligned_rows(args.q) && has_aligned_rows(args.out) &&
                              has_aligned_rows(cache.k) && has_aligned_rows(cache.v),
          .has_latent_values = are_first_columns(cache.v, cache.k)};
}

AttentionForward forward_of(const AttentionDecode& args) {
  return {.q = args.q,
          .out = args.out,
          .lse = args.lse,
          .score = args.score,
          .mask = args.mask,
          .sinks = args.sinks};
}

expr::Digest decode_key(const Problem& problem, const CacheLayout& cache) {
  constexpr std::uint64_t kCached = 0x6b76636163686564U;  // apart from any forward call's
  const expr::Digest key = problem_key(problem);
  const std::uint64_t layout = static_cast<std::uint64_t>(cache.page_size) << 3U |
                               std::uint64_t{cache.has_latent_values} << 2U |
                               std::uint64_t{cache.has_left_padding} << 1U |
                               std::uint64_t{cache.has_aligned_rows};
  return {key.lo ^ kCached, key.hi + layout};
}

ForwardProblem validate_decode_problem(const Problem& problem, const CacheLayout& cache,
                                       std::string_view where) {
  ForwardProblem f = validate(problem, where, KvDtypes::any_float);
  f.is_cached = true;
  f.is_paged = cache.page_size > 0;
  f.cache = cache;
  return f;
}

void validate_decode(const ForwardProblem& f, const AttentionDecode& args, std::string_view where) {
  const TensorChecks checks(where, f.device());
  checks.check_memory({"q", args.q});
  checks.check({"out", args.out, true}, f.problem.out.dtype,
               std::array{f.num_sequences, f.seqlen_q, f.num_heads_q, f.head_dim_v});
  if (args.lse) {
    checks.check({"lse", args.lse, true}, Dtype::f32,
                 std::array{f.num_sequences, f.num_heads_q, f.seqlen_q});
  }
  if (args.sinks) checks.check({"sinks", args.sinks}, Dtype::f32, std::array{f.num_heads_q});
  check_captured_tensors(f, args.score, args.mask, checks);
  if (args.rotary) check_query_positions(f, args, checks);
  refuse_overlap(args, checks);
  if (!args.append.k) return;
  OverlapCheck written;
  add_operands(written, args);
  add_new_tokens(written, args.append, args.rotary);
  add_cache_indices(written, args.cache);
  refuse_overlap_of_cache(written, args.cache, checks);
}

void validate_append(const KvCache& cache, const Append& append,
                     const std::optional<Rotary>& rotary, std::string_view where) {
  const TensorChecks checks(where, cache.k.spec().device);
  OverlapCheck written;
  add_new_tokens(written, append, rotary);
  add_cache_indices(written, cache);
  refuse_overlap_of_cache(written, cache, checks);
}

}  // namespace fovea
