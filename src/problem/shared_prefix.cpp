#include "problem/shared_prefix.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "expr/passes.hpp"
#include "problem/decode.hpp"

namespace fovea {
namespace {

using expr::NodePtr;
using expr::Op;
using expr::Variable;

constexpr std::size_t kAlignment = 256;

// ---- programs ----

/// A name that neither program captures.
std::string free_name(std::string name, const ScoreMod& score, const MaskMod& mask) {
  std::unordered_set<std::string> taken;
  for (const Captures* captures : {&score.captures(), &mask.captures()}) {
    for (const CapturedTensor& tensor : captures->tensors) taken.insert(tensor.name);
    for (const CapturedScalar& scalar : captures->scalars) taken.insert(scalar.name);
  }
  while (taken.contains(name)) name += '_';
  return name;
}

NodePtr load(const std::string& name, int rank, std::vector<NodePtr> indices) {
  return expr::make_load(
      std::make_shared<const CapturedTensor>(tensor_slot(name, Dtype::i32, rank)),
      std::move(indices));
}

/// What a row's number stands for in the prefix's call: `names` of the tables.
NodePtr of_rows(const NodePtr& formula, const PrefixPrograms& names, bool has_groups) {
  NodePtr row = expr::make_variable(Variable::q_idx);
  if (has_groups)
    row = expr::make(Op::add,
                     {load(names.group_begins, 1, {expr::make_variable(Variable::batch)}), row});
  const auto column = [&](Variable variable) -> std::optional<std::int64_t> {
    constexpr std::array kColumns{Variable::batch, Variable::q_idx, Variable::seqlen_q,
                                  Variable::seqlen_kv};
    const auto* found = std::ranges::find(kColumns, variable);
    if (found == kColumns.end()) return std::nullopt;
    return found - kColumns.begin();
  };
  return expr::rewrite(formula, [&](const NodePtr& node) -> NodePtr {
    if (node->op == Op::load) return expr::without_axes(node);
    if (node->op != Op::variable) return nullptr;
    const auto at = column(node->variable);
    return at ? load(names.rows, 2, {row, expr::make_constant(*at)}) : nullptr;
  });
}

NodePtr behind(const NodePtr& formula, const std::string& num_keys) {
  return expr::shift_keys(formula, expr::make_scalar(std::make_shared<const CapturedScalar>(
                                       CapturedScalar::of(num_keys, std::int64_t{0}))));
}

bool reads(const Program& program, const std::string& name) {
  return std::ranges::find(program.captures().tensors, name, &CapturedTensor::name) !=
         program.captures().tensors.end();
}

template <typename Mod>
Mod bound(const Mod& formula, const Program& of_call, const PrefixCalls& calls,
          const PrefixPrograms& names) {
  Captures captures = of_call.captures();
  if (calls.places.rows) captures.tensors.push_back({names.rows, calls.places.rows});
  if (calls.places.cu_seqlens)
    captures.tensors.push_back({names.group_begins, calls.places.cu_seqlens});
  captures.scalars.push_back(CapturedScalar::of(names.num_keys, calls.source.num_keys));
  return formula.with_captures(std::move(captures));
}

// ---- views ----

/// Elements of dimension `dim` from `begin` on.
TensorView behind(const TensorView& view, int dim, std::int64_t begin) {
  TensorSpec spec = view.spec();
  spec.shape[static_cast<std::size_t>(dim)] -= begin;
  // Modulo 2^64: a plan is made of tensors that nobody reads, whose strides may be anything.
  const std::uint64_t bytes = static_cast<std::uint64_t>(begin) *
                              static_cast<std::uint64_t>(view.stride(dim)) *
                              size_bytes(view.dtype());
  const auto at = std::bit_cast<std::uintptr_t>(view.data());
  return {std::bit_cast<const void*>(at == 0 ? at : at + bytes), spec};
}

/// All queries as rows of one sequence, or packed.
TensorView query_rows(const TensorView& q, bool is_packed) {
  if (q.rank() == 3) return q;
  const std::int64_t num_rows = q.size(0) * q.size(1);
  const std::int64_t row_stride = q.size(1) == 1 ? q.stride(0) : q.stride(1);
  TensorSpec spec =
      is_packed
          ? make_spec(q.dtype(), std::array{num_rows, q.size(2), q.size(3)},
                      std::array{row_stride, q.stride(2), q.stride(3)})
          : make_spec(q.dtype(), std::array{std::int64_t{1}, num_rows, q.size(2), q.size(3)},
                      std::array{num_rows * row_stride, row_stride, q.stride(2), q.stride(3)});
  spec.device = q.spec().device;
  return {q.data(), spec};
}

/// Hands out memory, or counts it.
class Memory {
 public:
  Memory(std::byte* data, Device device) : data_(data), device_(device) {}

  TensorView take(Dtype dtype, std::span<const std::int64_t> shape) {
    TensorSpec spec = make_spec(dtype, shape);
    spec.device = device_;
    std::byte* const at = data_ == nullptr ? nullptr : data_ + used_;
    const std::size_t bytes = static_cast<std::size_t>(spec.num_elements()) * size_bytes(dtype);
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return {static_cast<void*>(at), spec};
  }
  TensorView take(Dtype dtype, std::initializer_list<std::int64_t> shape) {
    return take(dtype, std::span(shape.begin(), shape.size()));
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* const data_;
  const Device device_;
  std::size_t used_ = 0;
};

/// The same memory seen in another shape, or with other strides.
TensorView seen_as(const TensorView& view, std::span<const std::int64_t> shape,
                   std::span<const std::int64_t> strides = {}) {
  TensorSpec spec = make_spec(view.dtype(), shape, strides);
  spec.device = view.spec().device;
  return {view.mutable_data(), spec};
}

class Split {
 public:
  Split(const AttentionDecode& args, const TensorView& q, const PrefixPrograms& programs,
        std::byte* memory)
      : args_(args),
        programs_(programs),
        memory_(memory, q.spec().device),
        calls_{.prefix = args,
               .suffix = args,
               .places = {},
               .source = source_of(args, q),
               .merge = {}},
        is_packed_(args.cu_seqlens_q || args.shared_prefix.cu_sequences) {
    calls_.prefix.q = query_rows(q, is_packed_);
    calls_.suffix.q = q;
  }

  PrefixCalls measured() && {
    take_places();
    take_states();
    calls_.bytes = memory_.used();
    return std::move(calls_);
  }

  PrefixCalls run() && {
    take_places();
    take_states();
    split_cache();
    split_programs();
    finish_calls();
    calls_.bytes = memory_.used();
    return std::move(calls_);
  }

 private:
  static PrefixSource source_of(const AttentionDecode& args, const TensorView& q) {
    const KvCache& cache = args.cache;
    const std::int64_t num_keys = args.shared_prefix.seqlen;
    const GrownCache grown = grown_cache(cache, args.append);
    const TensorView& groups = args.shared_prefix.cu_sequences;
    const std::int64_t unit = is_paged(cache) ? cache.k.size(1) : 1;
    return {.cache = cache,
            .queries = sequence_rows(q, args.cu_seqlens_q),
            .new_tokens = grown.new_tokens,
            .total_new = grown.total_new,
            .cu_sequences = groups,
            .batch = args.cu_seqlens_q ? args.cu_seqlens_q.size(0) - 1 : q.size(0),
            .num_groups = groups ? groups.size(0) - 1 : 1,
            .num_rows = q.rank() == 3 ? q.size(0) : q.size(0) * q.size(1),
            .num_keys = num_keys,
            .skipped_rows = cache.left_padding ? 0 : num_keys / unit * unit};
  }

  bool has_suffix_padding() const {
    return args_.cache.left_padding || calls_.source.skipped_rows != calls_.source.num_keys;
  }

  void take_places() {
    const PrefixSource& s = calls_.source;
    PrefixPlaces& p = calls_.places;
    const auto ints = [&](std::int64_t count) { return memory_.take(Dtype::i32, {count}); };
    p.prefix_seqlens = ints(s.num_groups);
    if (args_.cache.left_padding) p.prefix_left_padding = ints(s.num_groups);
    if (is_paged(args_.cache)) {
      // The first of its rows may lie behind padding, anywhere in a page.
      const std::int64_t page_size = args_.cache.k.size(1);
      const std::int64_t pages = (s.num_keys + 2 * page_size - 2) / page_size;
      p.page_table = memory_.take(Dtype::i32, {s.num_groups, pages});
    } else {
      p.slots = ints(s.num_groups);
    }
    if (is_packed_) p.cu_seqlens = ints(s.num_groups + 1);
    p.suffix_seqlens = ints(s.batch);
    if (has_suffix_padding()) p.suffix_left_padding = ints(s.batch);
    if (programs_.read_rows()) p.rows = memory_.take(Dtype::i32, {s.num_rows, kPrefixRowColumns});
  }

  void split_cache() {
    const PrefixSource& s = calls_.source;
    const PrefixPlaces& p = calls_.places;
    const KvCache& cache = args_.cache;
    calls_.prefix.cache = {.k = cache.k,
                           .v = cache.v,
                           .page_table = p.page_table,
                           .seqlens = p.prefix_seqlens,
                           .batch_idx = p.slots,
                           .left_padding = p.prefix_left_padding,
                           .k_scale = cache.k_scale,
                           .v_scale = cache.v_scale};
    KvCache& rest = calls_.suffix.cache;
    rest.seqlens = p.suffix_seqlens;
    rest.left_padding = p.suffix_left_padding;
    if (s.skipped_rows == 0) return;
    if (!is_paged(cache)) {
      rest.k = behind(cache.k, 1, s.skipped_rows);
      rest.v = behind(cache.v, 1, s.skipped_rows);
      if (row_scales(cache.k_scale).are_of_rows)
        rest.k_scale = behind(cache.k_scale, 1, s.skipped_rows);
      if (row_scales(cache.v_scale).are_of_rows)
        rest.v_scale = behind(cache.v_scale, 1, s.skipped_rows);
      return;
    }
    const std::int64_t pages = s.skipped_rows / cache.k.size(1);
    if (cache.page_table) {
      rest.page_table = behind(cache.page_table, 1, pages);
    } else {
      rest.page_indices = behind(cache.page_indices, 0, pages);
    }
  }

  void split_programs() {
    calls_.prefix.score = bound(programs_.prefix_score, args_.score, calls_, programs_);
    calls_.prefix.mask = bound(programs_.prefix_mask, args_.mask, calls_, programs_);
    calls_.suffix.score = bound(programs_.suffix_score, args_.score, calls_, programs_);
    calls_.suffix.mask = bound(programs_.suffix_mask, args_.mask, calls_, programs_);
  }

  /// The prefix's are written in the shapes of its queries and merged in those of the call's.
  void take_states() {
    const TensorSpec& q = args_.q.spec();
    std::vector<std::int64_t> shape(q.shape.begin(), q.shape.begin() + q.rank);
    shape.back() = args_.cache.v.size(3);
    const auto rank = shape.size();
    const std::int64_t heads = shape[rank - 2];
    const std::int64_t rows = calls_.source.num_rows;
    const TensorView of_prefix = memory_.take(Dtype::f32, shape);
    calls_.suffix.out = memory_.take(Dtype::f32, shape);
    const TensorView lse = memory_.take(Dtype::f32, {heads, rows});
    const TensorView prefix_rows = query_rows(of_prefix, is_packed_);
    calls_.prefix.out = TensorView(of_prefix.mutable_data(), prefix_rows.spec());
    std::vector<std::int64_t> lse_of_call{heads, rows};
    TensorView lse_seen = lse;
    if (rank == 4) {
      lse_of_call = {shape[0], heads, shape[1]};
      lse_seen = seen_as(lse, lse_of_call, std::array{shape[1], rows, std::int64_t{1}});
    }
    calls_.prefix.lse = is_packed_ ? lse : seen_as(lse, std::array{std::int64_t{1}, heads, rows});
    calls_.suffix.lse = memory_.take(Dtype::f32, lse_of_call);
    calls_.merge = {.outs = {of_prefix, calls_.suffix.out},
                    .lses = {lse_seen, calls_.suffix.lse},
                    .out = args_.out,
                    .lse = args_.lse,
                    .executor = args_.executor,
                    .stream = args_.stream};
  }

  void finish_calls() {
    for (AttentionDecode* call : {&calls_.prefix, &calls_.suffix}) {
      call->shared_prefix = {};
      call->append = {};  // lengths count new tokens
      call->rotary.reset();
    }
    AttentionDecode& prefix = calls_.prefix;
    prefix.sinks = {};
    prefix.cu_seqlens_q = calls_.places.cu_seqlens;
    prefix.max_seqlen_q.reset();
  }

  const AttentionDecode& args_;
  const PrefixPrograms& programs_;
  Memory memory_;
  PrefixCalls calls_;
  const bool is_packed_;
};

// ---- checks ----

void check_groups(const TensorView& groups, std::int64_t batch, const TensorChecks& checks) {
  if (!is_index(groups.dtype()) || groups.rank() != 1 || groups.size(0) < 2) {
    checks.refuse(
        fmt::format("shared_prefix.cu_sequences is {}; expected i32 or i64 [num_groups + 1], of "
                    "one group or more",
                    to_string(groups.spec())));
  }
  if (groups.size(0) - 1 > batch) {
    checks.refuse(fmt::format(
        "shared_prefix.cu_sequences names {} groups; expected at most {}, the sequences",
        groups.size(0) - 1, batch));
  }
}

/// Rows of all sequences at one stride.
void check_rows(const AttentionDecode& args, const TensorChecks& checks) {
  const TensorView& q = args.q;
  if (q.rank() == 3 || args.rotary) return;  // turned queries lie dense
  if (q.size(0) <= 1 || q.size(1) <= 1 || q.stride(0) == q.size(1) * q.stride(1)) return;
  checks.refuse(fmt::format(
      "q is {}; expected its stride of sequences to be seqlen_q times that of queries, {}, as a "
      "shared prefix reads all of them as rows of one sequence",
      to_string(q.spec()), q.size(1) * q.stride(1)));
}

}  // namespace

bool PrefixPrograms::read_rows() const {
  return reads(prefix_score, rows) || reads(prefix_mask, rows);
}

PrefixPrograms prefix_programs(const ScoreMod& score, const MaskMod& mask, bool has_groups) {
  PrefixPrograms p;
  p.rows = free_name("rows_of_prefix", score, mask);
  p.group_begins = free_name("begins_of_groups", score, mask);
  p.num_keys = free_name("seqlen_prefix", score, mask);
  const NodePtr& of_score = score.formula().shared();
  const NodePtr& of_mask = mask.formula().shared();
  p.prefix_score = ScoreMod(Expr(of_rows(of_score, p, has_groups)));
  p.suffix_score = ScoreMod(Expr(behind(of_score, p.num_keys)));
  if (!expr::sees_all_keys_before(of_mask))
    p.prefix_mask = MaskMod(Expr(of_rows(of_mask, p, has_groups)));
  p.suffix_mask = MaskMod(Expr(behind(of_mask, p.num_keys)));
  return p;
}

PrefixCalls split_at_prefix(const AttentionDecode& args, const TensorView& q,
                            const PrefixPrograms& programs, std::byte* memory) {
  return Split(args, q, programs, memory).run();
}

PrefixCalls measure_prefix(const AttentionDecode& args, const TensorView& q,
                           const PrefixPrograms& programs) {
  return Split(args, q, programs, nullptr).measured();
}

namespace {

/// Sequences that share keys would give them several scales.
void refuse_scales_of_sequences(const KvCache& cache, const TensorChecks& checks) {
  for (const auto& [label, scale] :
       {std::pair{"cache.k_scale", &cache.k_scale}, std::pair{"cache.v_scale", &cache.v_scale}}) {
    if (scale->rank() != 2) continue;
    checks.refuse(fmt::format(
        "shared_prefix is given and {} is {}, a scale for each sequence; expected one for each row "
        "or for all: [1]",
        label, to_string(scale->spec())));
  }
}

}  // namespace

void check_shared_prefix(const AttentionDecode& args, std::string_view where) {
  const SharedPrefix& prefix = args.shared_prefix;
  const TensorChecks checks(where, args.q.spec().device);
  const std::int64_t batch = decode_batch(args, where);
  const std::int64_t room = std::min(cache_capacity(args.cache), kMostKeysWithPrefix);
  if (prefix.seqlen < 0 || prefix.seqlen > room) {
    checks.refuse(
        fmt::format("shared_prefix.seqlen is {}; expected 0 to {}, the keys that a sequence has "
                    "room for",
                    prefix.seqlen, room));
  }
  if (prefix.cu_sequences) check_groups(prefix.cu_sequences, batch, checks);
  if (!args.quant.is_none()) {
    checks.refuse(
        fmt::format("quant is {} beside a shared prefix; expected none: means and references would "
                    "be those of parts of the keys",
                    print(args.quant)));
  }
  refuse_scales_of_sequences(args.cache, checks);
  check_rows(args, checks);
}

void check_prefix_lengths(const AttentionDecode& args, std::string_view where) {
  const SharedPrefix& prefix = args.shared_prefix;
  const TensorChecks checks(where, args.q.spec().device);
  const std::int64_t batch = decode_batch(args, where);
  if (prefix.cu_sequences) {
    check_packed_offsets({.name = "shared_prefix.cu_sequences",
                          .cu_seqlens = prefix.cu_sequences,
                          .batch = prefix.cu_sequences.size(0) - 1,
                          .total = batch,
                          .longest = batch,
                          .longest_name = "the batch"},
                         checks);
  }
  if (!checks.is_host()) return;
  const std::int64_t num_groups = prefix.cu_sequences ? prefix.cu_sequences.size(0) - 1 : 1;
  const auto begin = [&](std::int64_t group) {
    if (!prefix.cu_sequences) return group == 0 ? 0 : batch;
    return index_at(prefix.cu_sequences, group);
  };
  if (begin(num_groups) != batch) {
    checks.refuse(
        fmt::format("shared_prefix.cu_sequences ends at {}; expected {}, the batch: every sequence "
                    "is in a group",
                    begin(num_groups), batch));
  }
  const SequenceRows queries = sequence_rows(args.q, args.cu_seqlens_q);
  const SequenceRows added = new_tokens(args.append);
  for (std::int64_t group = 0; group < num_groups; ++group) {
    for (std::int64_t i = begin(group); i < begin(group + 1); ++i) {
      if (i != begin(group) && queries.count(i) == 0) continue;
      const CachedSequence s = cached_sequence(args.cache, i);
      const std::int64_t seqlen_kv = s.end - s.begin + added.count(i);
      if (seqlen_kv >= prefix.seqlen + queries.count(i)) continue;
      checks.refuse(fmt::format(
          "shared_prefix.seqlen is {} and sequence {} has {} keys and {} queries; "
          "expected at least {} keys: queries stand behind the prefix",
          prefix.seqlen, i, seqlen_kv, queries.count(i), prefix.seqlen + queries.count(i)));
    }
  }
}

}  // namespace fovea
