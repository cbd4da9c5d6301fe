#include "problem/decode.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/shape.hpp"
#include "problem/captured_tensors.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

/// Keys or values of a batch. Beside packed queries those of one sequence: that there are more is in num_sequences.
TensorSpec row_major(const TensorSpec& spec, std::int64_t batch, std::int64_t seqlen,
                     bool is_packed) {
  TensorSpec result =
      is_packed ? make_spec(spec.dtype, std::array{seqlen, spec.shape[2], spec.shape[3]})
                : make_spec(spec.dtype, std::array{batch, seqlen, spec.shape[2], spec.shape[3]});
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

/// Those of rows are written by whoever appends.
void add_scales_as_inputs(OverlapCheck& check, const KvCache& cache) {
  check.add_input("cache.k_scale", cache.k_scale);
  check.add_input("cache.v_scale", cache.v_scale);
}
void add_scales_as_outputs(OverlapCheck& check, const KvCache& cache) {
  for (const auto& [label, view] :
       {std::pair{"cache.k_scale", &cache.k_scale}, std::pair{"cache.v_scale", &cache.v_scale}}) {
    if (row_scales(*view).are_of_rows) {
      check.add_output(label, *view);
    } else {
      check.add_input(label, *view);
    }
  }
}

void add_new_tokens(OverlapCheck& check, const Append& append,
                    const std::optional<Rotary>& rotary) {
  check.add_input("append.k", append.k);
  check.add_input("append.v", append.v);
  check.add_input("append.cu_seqlens", append.cu_seqlens);
  if (!rotary) return;
  check.add_input("rotary.cos", rotary->cos);
  check.add_input("rotary.sin", rotary->sin);
  check.add_input("rotary.positions", rotary->positions);
  check.add_input("rotary.positions_q", rotary->positions_q);
}

void add_operands(OverlapCheck& check, const AttentionDecode& args) {
  check.add_input("q", args.q);
  check.add_input("cu_seqlens_q", args.cu_seqlens_q);
  check.add_input("shared_prefix.cu_sequences", args.shared_prefix.cu_sequences);
  check.add_input("sinks", args.sinks);
  check.add_captured(args.score, args.mask);
}

std::vector<std::int64_t> positions_shape(const AttentionDecode& args) {
  if (args.cu_seqlens_q) return {args.q.size(0)};
  return {args.q.size(0), args.q.size(1)};
}

/// One position serves a query and the new token in its place: they must be packed alike.
void refuse_other_packing(const ForwardProblem& f, const AttentionDecode& args,
                          const TensorChecks& checks) {
  if (!args.append.cu_seqlens || !args.cu_seqlens_q) return;
  for (std::int64_t i = 0; i <= f.num_sequences; ++i) {
    const std::int64_t of_new = index_at(args.append.cu_seqlens, i);
    const std::int64_t of_q = index_at(args.cu_seqlens_q, i);
    if (of_new == of_q) continue;
    checks.refuse(
        fmt::format("rotary.positions is given, and append.cu_seqlens[{}] is {} where cu_seqlens_q "
                    "has {}; expected equal offsets: a position serves a query and a new token",
                    i, of_new, of_q));
  }
}

/// Positions of queries. Those of appended keys are checked with the cache.
void check_query_positions(const ForwardProblem& f, const AttentionDecode& args,
                           const TensorChecks& checks) {
  const Rotary r = rotary_of_queries(*args.rotary);
  const bool is_apart = static_cast<bool>(args.rotary->positions_q);
  const std::string_view name = is_apart ? "rotary.positions_q" : "rotary.positions";
  if (r.positions) {
    const std::vector<std::int64_t> shape = positions_shape(args);
    if (!is_index(r.positions.dtype()) ||
        !std::ranges::equal(shape_of(r.positions.spec()), shape)) {
      checks.refuse(fmt::format("{} is {}; expected i32 or i64 [{}], one for every query", name,
                                to_string(r.positions.spec()), fmt::join(shape, ", ")));
    }
    if (is_apart) checks.check_memory({name, args.rotary->positions_q});
  }
  if (!checks.is_host()) return;
  const SequenceRows queries = sequence_rows(args.q, args.cu_seqlens_q);
  if (r.positions) {
    if (!is_apart) refuse_other_packing(f, args, checks);
    return refuse_far_positions(r, queries, f.num_sequences, checks, name);
  }
  const SequenceRows added = new_tokens(args.append);
  for (std::int64_t i = 0; i < f.num_sequences; ++i) {
    if (queries.count(i) == 0) continue;
    const CachedSequence s = cached_sequence(args.cache, i);
    refuse_short_rotary(r, i, s.end - s.begin + added.count(i), checks);
  }
}

/// A cache that is appended to beside what the call reads.
void refuse_overlap_of_cache(OverlapCheck& written, const KvCache& cache,
                             const TensorChecks& checks) {
  written.add_output("cache.k", cache.k);
  if (!has_latent_values(cache)) written.add_output("cache.v", cache.v);
  add_scales_as_outputs(written, cache);
  written.refuse_overlap(checks);
}

void refuse_overlap(const AttentionDecode& args, const TensorChecks& checks) {
  OverlapCheck outputs;
  add_operands(outputs, args);
  add_new_tokens(outputs, args.append, args.rotary);
  add_cache_indices(outputs, args.cache);
  outputs.add_input("cache.k", args.cache.k);
  outputs.add_input("cache.v", args.cache.v);
  add_scales_as_inputs(outputs, args.cache);
  outputs.add_output("out", args.out);
  outputs.add_output("lse", args.lse);
  outputs.add_output("workspace", args.workspace);
  outputs.refuse_overlap(checks);
}

void check_max_seqlen_q(const AttentionDecode& args, const TensorChecks& checks) {
  if (!args.max_seqlen_q) return;
  if (!args.cu_seqlens_q)
    checks.refuse("max_seqlen_q is given without cu_seqlens_q; expected packed queries");
  if (*args.max_seqlen_q < 0)
    checks.refuse(fmt::format("max_seqlen_q is {}; expected 0 or more", *args.max_seqlen_q));
}

std::vector<std::int64_t> out_shape(const ForwardProblem& f) {
  if (f.is_varlen) return {f.total_q, f.num_heads_q, f.head_dim_v};
  return {f.num_sequences, f.seqlen_q, f.num_heads_q, f.head_dim_v};
}

}  // namespace

std::int64_t decode_batch(const AttentionDecode& args, std::string_view where) {
  const TensorChecks checks(where);
  const bool is_packed = static_cast<bool>(args.cu_seqlens_q);
  const int rank = is_packed ? 3 : 4;
  if (args.q.rank() != rank) {
    checks.refuse(fmt::format("q is {}; expected rank {}: {}",
                              args.q ? to_string(args.q.spec()) : "missing", rank,
                              is_packed ? "[total_q, num_heads_q, head_dim_qk] (packed: "
                                          "cu_seqlens_q is given)"
                                        : "[batch, seqlen_q, num_heads_q, head_dim_qk]"));
  }
  check_max_seqlen_q(args, checks);
  check_cache_ranks(args.cache, checks);
  if (!is_packed) return args.q.size(0);
  const TensorSpec& offsets = args.cu_seqlens_q.spec();
  if (!is_index(offsets.dtype) || offsets.rank != 1 || offsets.shape[0] < 1) {
    checks.refuse(
        fmt::format("cu_seqlens_q is {}; expected i32 or i64 [batch + 1]", to_string(offsets)));
  }
  return offsets.shape[0] - 1;
}

void validate_query_offsets(const AttentionDecode& args, std::string_view where) {
  if (!args.cu_seqlens_q) return;
  const bool is_bounded = args.max_seqlen_q.has_value();
  check_packed_offsets({.name = "cu_seqlens_q",
                        .cu_seqlens = args.cu_seqlens_q,
                        .batch = decode_batch(args, where),
                        .total = args.q.size(0),
                        .longest = is_bounded ? *args.max_seqlen_q : args.q.size(0),
                        .longest_name = is_bounded ? "max_seqlen_q" : "total_q"},
                       TensorChecks(where, args.q.spec().device));
}

Problem decode_problem(const AttentionDecode& args, std::int64_t max_seqlen_kv, int num_threads,
                       std::string_view where) {
  const std::int64_t batch = decode_batch(args, where);
  const bool is_packed = static_cast<bool>(args.cu_seqlens_q);
  const auto seqlen_q = [&]() -> std::optional<UpTo> {
    if (!args.max_seqlen_q) return std::nullopt;
    return up_to(std::min(*args.max_seqlen_q, args.q.size(0)));
  };
  return {.q = args.q.spec(),
          .k = row_major(args.cache.k.spec(), batch, max_seqlen_kv, is_packed),
          .v = row_major(args.cache.v.spec(), batch, max_seqlen_kv, is_packed),
          .out = args.out.spec(),
          .score = args.score,
          .mask = args.mask,
          .softmax_scale = args.softmax_scale,
          .has_sinks = static_cast<bool>(args.sinks),
          .quant = args.quant,
          .num_sequences = is_packed ? std::optional(batch) : std::nullopt,
          .wants_lse = static_cast<bool>(args.lse),
          .seqlen_q = seqlen_q(),
          .seqlen_kv = up_to(max_seqlen_kv),
          .compute_dtype = args.compute_dtype,
          .cpu_target = args.cpu_target,
          .sm_margin = args.sm_margin,
          // Graphs capture what decodes, and keep what they have captured.
          .compile_mode = CompileMode::complete,
          .num_threads = num_threads};
}

CacheLayout cache_layout(const AttentionDecode& args) {
  const KvCache& cache = args.cache;
  return {.page_size = is_paged(cache) ? cache.k.size(1) : 0,
          .has_left_padding = static_cast<bool>(cache.left_padding),
          .has_aligned_rows = has_aligned_rows(args.q) && has_aligned_rows(args.out) &&
                              has_aligned_rows(cache.k) && has_aligned_rows(cache.v),
          .has_latent_values = fovea::has_latent_values(cache)};
}

AttentionForward forward_of(const AttentionDecode& args) {
  return {.q = args.q,
          .out = args.out,
          .lse = args.lse,
          .score = args.score,
          .mask = args.mask,
          .sinks = args.sinks,
          .cu_seqlens_q = args.cu_seqlens_q};
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
  if (problem.quant.scales == ScaleSource::given) {
    TensorChecks(where).refuse(
        fmt::format("quant is {}, whose scales the call gives; expected a recipe of measured "
                    "scales over a cache",
                    print(problem.quant)));
  }
  ForwardProblem f = validate(problem, where, KvDtypes::of_cache);
  f.is_cached = true;
  f.is_paged = cache.page_size > 0;
  f.cache = cache;
  return f;
}

void validate_decode(const ForwardProblem& f, const AttentionDecode& args, std::string_view where) {
  const TensorChecks checks(where, f.device());
  if (!checks.is_host() && args.append.cu_seqlens && !args.cu_seqlens_q) {
    throw Unsupported(fmt::format(
        "{}: append.cu_seqlens is given without cu_seqlens_q and tensors live on {}, whose kernels "
        "take packed new tokens beside packed queries; expected cu_seqlens_q too, or "
        "append_to_cache and then queries",
        where, to_string(f.device())));
  }
  checks.check_memory({"q", args.q});
  checks.check({"out", args.out, true}, f.problem.out.dtype, out_shape(f));
  if (args.lse) checks.check({"lse", args.lse, true}, Dtype::f32, lse_shape(args.out));
  if (args.sinks) checks.check({"sinks", args.sinks}, Dtype::f32, std::array{f.num_heads_q});
  check_captured_tensors(f, args.score, args.mask, index_counts(f), checks);
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
  if (rotary && rotary->positions_q)
    checks.refuse("rotary.positions_q is given without queries; expected rotary.positions alone");
  OverlapCheck written;
  add_new_tokens(written, append, rotary);
  add_cache_indices(written, cache);
  refuse_overlap_of_cache(written, cache, checks);
}

}  // namespace fovea
