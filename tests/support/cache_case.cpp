#include "support/cache_case.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "quant/row_codes.hpp"
#include "reference/element.hpp"
#include "support/compare.hpp"
#include "support/drawn_spec.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

constexpr std::uint64_t kQ = 1, kK = 2, kV = 3, kSinks = 4;
constexpr double kHuge = 2'000'000'000;  // fits i32
constexpr std::int64_t kSpareSlots = 2, kSpareRows = 5, kSpareEntries = 3;

/// A permutation of [0, count).
std::vector<std::int64_t> shuffled(std::int64_t count, std::uint64_t seed) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  const Random random(seed, 99);
  for (std::int64_t i = count - 1; i > 0; --i) {
    std::swap(order[static_cast<std::size_t>(i)],
              order[static_cast<std::size_t>(random.below(i + 1, i))]);
  }
  return order;
}

GuardedTensor cache_tensor(const CacheCase& p, Dtype dtype, std::int64_t slots, std::int64_t rows,
                           std::int64_t head_dim) {
  const std::array shape{slots, rows, p.num_heads_kv, head_dim};
  if (!p.has_heads_first) return GuardedTensor(make_spec(dtype, shape));
  const std::array strides{p.num_heads_kv * rows * head_dim, head_dim, rows * head_dim,
                           std::int64_t{1}};
  return GuardedTensor(make_spec(dtype, shape, strides));
}

/// Of new tokens beside a cache of this dtype.
Dtype new_dtype(const CacheCase& p, Dtype cached) {
  return quant::is_code(cached) ? p.q_dtype : cached;
}

/// The view of the first columns of all rows.
TensorView first_columns(const TensorView& view, std::int64_t count) {
  TensorSpec spec = view.spec();
  spec.shape[static_cast<std::size_t>(spec.rank - 1)] = count;
  if (view.is_mutable()) return {view.mutable_data(), spec};
  return {view.data(), spec};
}

enum CacheLayout : std::uint64_t {
  kCacheQ,
  kCacheNewK,
  kCacheNewV,
  kCacheSinks,
  kCacheOut,
  kCacheLse,
  kCacheTable,
  kCacheSeqlens,
  kCacheSlots,
  kCachePadding,
  kCachePageBegins,
  kCachePages,
  kCacheOffsetsQ,
  kCacheOffsetsNew,
  kCacheGroups,
};

GuardedTensor drawn(const CacheCase& p, CacheLayout stream, Dtype dtype,
                    const std::vector<std::int64_t>& shape, Strides strides = Strides::of_input) {
  if (p.layout_seed == 0) return GuardedTensor(make_spec(dtype, shape));
  return GuardedTensor(drawn_spec(dtype, shape, Random(p.layout_seed, 1000 + stream), strides));
}

/// Of q, out or new tokens.
GuardedTensor tokens(const CacheCase& p, CacheLayout stream, Dtype dtype,
                     const std::vector<std::int64_t>& shape, Strides strides = Strides::of_input) {
  if (!p.has_drawn_tokens) return GuardedTensor(make_spec(dtype, shape));
  return drawn(p, stream, dtype, shape, strides);
}

GuardedTensor indices(const CacheCase& p, CacheLayout stream,
                      const std::vector<std::int64_t>& values) {
  GuardedTensor tensor =
      drawn(p, stream, p.index_dtype, {static_cast<std::int64_t>(values.size())});
  tensor.fill(
      [&](std::int64_t i) { return static_cast<double>(values[static_cast<std::size_t>(i)]); });
  return tensor;
}

constexpr std::int64_t kRowsOfNobody = 3;  // behind the last sequence of packed tokens

/// Where sequences begin, and where the last one ends.
std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

/// A token by its number in a tensor of tokens.
struct Token {
  std::int64_t sequence = 0, index = 0;
  bool is_of_nobody = false;
};

Token token_at(const std::vector<std::int64_t>& lengths, std::int64_t each, std::int64_t row) {
  if (lengths.empty()) return {row / each, row % each};
  for (std::int64_t sequence = 0; const std::int64_t length : lengths) {
    if (row < length) return {sequence, row};
    row -= length;
    ++sequence;
  }
  return {.is_of_nobody = true};
}

/// [batch, each, heads, head_dim], or packed [total, heads, head_dim].
std::vector<std::int64_t> token_shape(const CacheCase& p, const std::vector<std::int64_t>& lengths,
                                      std::int64_t each, std::int64_t heads,
                                      std::int64_t head_dim) {
  if (lengths.empty()) return {p.batch(), each, heads, head_dim};
  return {offsets_of(lengths).back() + kRowsOfNobody, heads, head_dim};
}

/// Rows [begin, begin + count) of dimension `dim`, with a dimension of one element before all.
TensorView slice(const TensorView& view, int dim, std::int64_t begin, std::int64_t count) {
  TensorSpec spec = view.spec();
  for (int i = spec.rank; i > 0; --i) {
    spec.shape[static_cast<std::size_t>(i)] = spec.shape[static_cast<std::size_t>(i - 1)];
    spec.strides[static_cast<std::size_t>(i)] = spec.strides[static_cast<std::size_t>(i - 1)];
  }
  ++spec.rank;
  spec.shape[0] = 1;
  spec.strides[0] = 0;
  spec.shape[static_cast<std::size_t>(dim + 1)] = count;
  const std::int64_t bytes =
      begin * view.stride(dim) * static_cast<std::int64_t>(size_bytes(view.dtype()));
  if (view.is_mutable())
    return {static_cast<void*>(static_cast<std::byte*>(view.mutable_data()) + bytes), spec};
  return {static_cast<const void*>(static_cast<const std::byte*>(view.data()) + bytes), spec};
}

}  // namespace

std::int64_t CacheCase::owner(std::int64_t sequence, std::int64_t kv_idx) const {
  if (kv_idx >= shared_prefix) return sequence;
  std::int64_t first = 0;
  for (const std::int64_t begin : groups) {
    if (begin <= sequence) first = begin;
  }
  return first;
}

AttentionDecode alone(const AttentionDecode& together, std::int64_t sequence) {
  AttentionDecode args = together;
  KvCache& cache = args.cache;
  args.append.cu_seqlens = entry_of(args.append.cu_seqlens, sequence, 2);
  if (args.cu_seqlens_q) {
    args.cu_seqlens_q = entry_of(args.cu_seqlens_q, sequence, 2);
  } else {
    for (TensorView* view : std::initializer_list<TensorView*>{&args.q, &args.out, &args.lse})
      *view = entry_of(*view, sequence);
  }
  for (TensorView* view :
       {&cache.page_table, &cache.seqlens, &cache.left_padding, &cache.batch_idx})
    *view = entry_of(*view, sequence);
  if (cache.page_indptr) cache.page_indptr = entry_of(cache.page_indptr, sequence, 2);
  const bool has_own_slot = !cache.batch_idx && !cache.page_table && !cache.page_indptr;
  if (has_own_slot) {
    cache.k = entry_of(cache.k, sequence);
    cache.v = entry_of(cache.v, sequence);
  }
  for (TensorView* scale : std::initializer_list<TensorView*>{&cache.k_scale, &cache.v_scale}) {
    if (scale->rank() == 2 || has_own_slot) *scale = entry_of(*scale, sequence);
  }
  return args;
}

TensorView entry_of(const TensorView& view, std::int64_t index, std::int64_t count) {
  if (!view) return view;
  TensorSpec spec = view.spec();
  spec.shape[0] = count;
  const std::int64_t bytes =
      index * view.stride(0) * static_cast<std::int64_t>(size_bytes(view.dtype()));
  if (view.is_mutable())
    return {static_cast<void*>(static_cast<std::byte*>(view.mutable_data()) + bytes), spec};
  return {static_cast<const void*>(static_cast<const std::byte*>(view.data()) + bytes), spec};
}

CacheMemory::CacheMemory(const CacheCase& problem) : problem_(problem) {
  const CacheCase& p = problem_;
  place_sequences();
  k = cache_tensor(p, p.k_dtype, num_slots_, rows_per_slot_, p.head_dim_qk);
  v = cache_tensor(p, p.v_dtype, num_slots_, rows_per_slot_, p.head_dim_v);
  k_scale = make_scales(kK);
  v_scale = make_scales(kV);
  make_tokens();
  pack_tokens();
  fill_cache(k, k_scale, new_k, kK, p.head_dim_qk);
  fill_cache(v, v_scale, new_v, kV, p.head_dim_v);
  if (p.has_sinks) {
    sinks = drawn(p, kCacheSinks, Dtype::f32, {p.num_heads_q});
    sinks.fill([&](std::int64_t i) { return value(kSinks, 0, 0, i, 0); });
  }
  if (!p.groups.empty()) {
    std::vector<std::int64_t> begins = p.groups;
    begins.push_back(p.batch());
    cu_sequences = indices(p, kCacheGroups, begins);
  }
  dense_.resize(p.seqlens.size());
  for (GuardedTensor* tensor :
       {&q, &k, &v, &k_scale, &v_scale, &page_table, &page_indptr, &page_indices, &seqlens,
        &batch_idx, &left_padding, &new_k, &new_v, &sinks, &cu_seqlens_q, &cu_seqlens_new,
        &cu_sequences, &out, &lse}) {
    tensor->seal();
  }
}

void CacheMemory::make_tokens() {
  const CacheCase& p = problem_;
  const auto of_new = [&](std::int64_t head_dim) {
    return token_shape(p, p.packed_new, p.num_new, p.num_heads_kv, head_dim);
  };
  const auto of_q = [&](std::int64_t head_dim) {
    return token_shape(p, p.packed_q, p.seqlen_q, p.num_heads_q, head_dim);
  };
  if (p.appends()) {
    new_k = tokens(p, kCacheNewK, new_dtype(p, p.k_dtype), of_new(p.head_dim_qk));
    new_v = tokens(p, kCacheNewV, new_dtype(p, p.v_dtype), of_new(p.head_dim_v));
  }
  q = tokens(p, kCacheQ, p.q_dtype, of_q(p.head_dim_qk));
  q.fill([&](std::int64_t i) {
    const Token token = token_at(p.packed_q, p.seqlen_q, i / (p.head_dim_qk * p.num_heads_q));
    if (token.is_of_nobody) return std::nan("");
    return value(kQ, token.sequence, token.index, i / p.head_dim_qk % p.num_heads_q,
                 i % p.head_dim_qk);
  });
  out = tokens(p, kCacheOut, p.q_dtype, of_q(p.head_dim_v), Strides::of_output);
  std::vector<std::int64_t> rows{p.batch(), p.num_heads_q, p.seqlen_q};
  if (!p.packed_q.empty()) rows = {p.num_heads_q, q.view().size(0)};
  lse = drawn(p, kCacheLse, Dtype::f32, rows, Strides::of_output);
}

void CacheMemory::pack_tokens() {
  const CacheCase& p = problem_;
  if (!p.packed_q.empty()) cu_seqlens_q = indices(p, kCacheOffsetsQ, offsets_of(p.packed_q));
  if (!p.packed_new.empty() && p.packed_new != p.packed_q)
    cu_seqlens_new = indices(p, kCacheOffsetsNew, offsets_of(p.packed_new));
}

TensorView CacheMemory::rows_of(const TensorView& tokens, std::int64_t sequence) const {
  if (problem_.packed_q.empty()) return entry_of(tokens, sequence);
  const auto i = static_cast<std::size_t>(sequence);
  return slice(tokens, 0, offsets_of(problem_.packed_q)[i], problem_.packed_q[i]);
}

TensorView CacheMemory::lse_of(const TensorView& statistics, std::int64_t sequence) const {
  if (problem_.packed_q.empty()) return entry_of(statistics, sequence);
  const auto i = static_cast<std::size_t>(sequence);
  return slice(statistics, 1, offsets_of(problem_.packed_q)[i], problem_.packed_q[i]);
}

double CacheMemory::value(std::uint64_t stream, std::int64_t sequence, std::int64_t row,
                          std::int64_t head, std::int64_t dim) const {
  if (stream == kV && problem_.has_latent_values) stream = kK;
  if (stream == kK || stream == kV) sequence = problem_.owner(sequence, row);
  if (stream == (problem_.has_latent_values ? kK : kV) && row == problem_.nan_key)
    return std::nan("");
  const Random random(problem_.seed * 1000 + static_cast<std::uint64_t>(sequence), stream);
  const double normal = random.normal((row * 64 + head) * 512 + dim);
  if (stream == kQ) return normal * problem_.q_magnitude;
  if (stream != kV || problem_.value_growth == 0) return normal;
  return normal * std::exp2(problem_.value_growth * static_cast<double>(row));
}

std::optional<float> CacheMemory::softmax_scale() const {
  if (problem_.q_magnitude == 1) return std::nullopt;
  return static_cast<float>(
      1 / (problem_.q_magnitude * std::sqrt(static_cast<double>(problem_.head_dim_qk))));
}

std::int64_t CacheMemory::rows_before(std::int64_t sequence) const {
  return problem_.left_padding(sequence) + problem_.seqlens[static_cast<std::size_t>(sequence)] -
         problem_.new_tokens(sequence);
}

void CacheMemory::place_sequences() {
  const CacheCase& p = problem_;
  std::int64_t longest = 0;
  std::int64_t num_pages = kSpareSlots;
  std::vector<std::int64_t> before, padding;
  for (std::int64_t i = 0; i < p.batch(); ++i) {
    before.push_back(rows_before(i));
    padding.push_back(p.left_padding(i));
    const std::int64_t rows = before.back() + p.new_tokens(i);
    longest = std::max(longest, rows);
    if (p.page_size > 0) num_pages += (rows + p.page_size - 1) / p.page_size;
  }
  seqlens = indices(p, kCacheSeqlens, before);
  if (p.has_left_padding) left_padding = indices(p, kCachePadding, padding);
  if (p.page_size == 0) {
    num_slots_ = p.batch() + kSpareSlots;
    rows_per_slot_ = longest + kSpareRows;
    std::vector<std::int64_t> slots = shuffled(num_slots_, p.page_seed);
    if (!p.has_batch_idx) std::iota(slots.begin(), slots.end(), 0);
    slots.resize(p.seqlens.size());
    for (const std::int64_t slot : slots) places_.push_back({slot});
    if (p.has_batch_idx) batch_idx = indices(p, kCacheSlots, slots);
    return;
  }
  num_slots_ = num_pages;
  rows_per_slot_ = p.page_size;
  const std::vector<std::int64_t> order = shuffled(num_pages, p.page_seed);
  const std::int64_t width = (longest + p.page_size - 1) / p.page_size + kSpareEntries;
  page_table = drawn(p, kCacheTable, p.index_dtype, {p.batch(), width});
  page_table.fill([](std::int64_t i) { return i % 2 == 0 ? -1 : kHuge; });
  const TensorView table = page_table.view();
  std::size_t next = 0;
  for (std::int64_t i = 0; i < p.batch(); ++i) {
    places_.emplace_back();
    const std::int64_t rows = rows_before(i) + p.new_tokens(i);
    for (std::int64_t page = 0; page * p.page_size < rows; ++page) {
      // Pages that hold nothing but left padding are nowhere.
      const bool is_padding = (page + 1) * p.page_size <= p.left_padding(i);
      const std::int64_t place = is_padding ? -1 : order[next++];
      places_.back().push_back(place);
      page_table.set(i * table.stride(0) + page * table.stride(1),
                     is_padding ? kHuge : static_cast<double>(place));
    }
  }
  if (p.has_page_list) list_pages();
}

/// Every second sequence has room for a page more, which is nowhere.
void CacheMemory::list_pages() {
  std::vector<std::int64_t> begins{0}, entries;
  for (const std::vector<std::int64_t>& pages : places_) {
    for (const std::int64_t page : pages)
      entries.push_back(page < 0 ? static_cast<std::int64_t>(kHuge) : page);
    if (begins.size() % 2 == 0) entries.push_back(-1);
    begins.push_back(static_cast<std::int64_t>(entries.size()));
  }
  entries.push_back(-1);  // of nobody
  page_table = GuardedTensor();
  page_indptr = indices(problem_, kCachePageBegins, begins);
  page_indices = indices(problem_, kCachePages, entries);
}

std::int64_t CacheMemory::offset(const TensorView& cache, std::int64_t sequence, std::int64_t row,
                                 std::int64_t head) const {
  const auto& places = places_[static_cast<std::size_t>(sequence)];
  const bool is_paged = problem_.page_size > 0;
  const std::int64_t slot =
      places[is_paged ? static_cast<std::size_t>(row / problem_.page_size) : 0];
  const std::int64_t row_in_slot = is_paged ? row % problem_.page_size : row;
  return slot * cache.stride(0) + row_in_slot * cache.stride(1) + head * cache.stride(2);
}

/// NaN and infinity where no row is. Heads lie before rows where those of the cache do not.
GuardedTensor CacheMemory::make_scales(std::uint64_t stream) const {
  const CacheCase& p = problem_;
  if (!quant::is_code(stream == kK ? p.k_dtype : p.v_dtype)) return {};
  if (p.has_given_scales) {
    GuardedTensor scales(make_spec(Dtype::f32, std::array{p.batch(), p.num_heads_kv}));
    scales.fill([&](std::int64_t i) {
      return given_scale(stream, i / p.num_heads_kv, i % p.num_heads_kv);
    });
    return scales;
  }
  const std::array shape{num_slots_, rows_per_slot_, p.num_heads_kv};
  const std::array heads_first{p.num_heads_kv * rows_per_slot_, std::int64_t{1}, rows_per_slot_};
  GuardedTensor scales(p.has_heads_first ? make_spec(Dtype::f32, shape)
                                         : make_spec(Dtype::f32, shape, heads_first));
  scales.fill([](std::int64_t i) {
    return i % 3 == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
  });
  return scales;
}

float CacheMemory::given_scale(std::uint64_t stream, std::int64_t sequence,
                               std::int64_t head) const {
  return 0.01F * static_cast<float>(stream + static_cast<std::uint64_t>(3 * sequence + head));
}

CacheMemory::HeldRow CacheMemory::held_row(std::uint64_t stream, std::int64_t sequence,
                                           std::int64_t row, std::int64_t head,
                                           std::int64_t head_dim) const {
  const CacheCase& p = problem_;
  const Dtype dtype = stream == kK ? p.k_dtype : p.v_dtype;
  HeldRow held;
  for (std::int64_t d = 0; d < head_dim; ++d)
    held.elements.push_back(value(stream, sequence, row, head, d));
  if (!quant::is_code(dtype)) return held;
  std::vector<float> numbers;  // as the call that appended them had them
  for (const double x : held.elements) {
    const auto single = static_cast<float>(x);
    numbers.push_back(p.q_dtype == Dtype::bf16  ? static_cast<float>(bfloat16(single))
                      : p.q_dtype == Dtype::f16 ? static_cast<float>(float16(single))
                                                : single);
  }
  held.scale =
      p.has_given_scales ? given_scale(stream, sequence, head) : quant::row_scale(numbers, dtype);
  const float reciprocal = 1 / held.scale;
  for (std::size_t d = 0; d < numbers.size(); ++d) {
    held.elements[d] = quant::code_value(quant::code_bits(numbers[d] * reciprocal, dtype), dtype);
  }
  return held;
}

void CacheMemory::fill_cache(GuardedTensor& cache, GuardedTensor& scales, GuardedTensor& appended,
                             std::uint64_t stream, std::int64_t head_dim) const {
  const CacheCase& p = problem_;
  const bool is_i8 = cache.view().dtype() == Dtype::i8;
  cache.fill([is_i8](std::int64_t i) {
    if (is_i8) return i % 3 == 0 ? -128.0 : 127.0;  // it has no NaN: its scales do
    return i % 3 == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
  });
  for (std::int64_t i = 0; i < p.batch(); ++i) {
    for (std::int64_t row = p.left_padding(i); row < rows_before(i); ++row) {
      const std::int64_t kv_idx = row - p.left_padding(i);
      if (p.owner(i, kv_idx) != i) continue;  // NaN stays where nobody looks
      for (std::int64_t head = 0; head < p.num_heads_kv; ++head) {
        const HeldRow held = held_row(stream, i, kv_idx, head, head_dim);
        const std::int64_t at = offset(cache.view(), i, row, head);
        for (std::int64_t d = 0; d < head_dim; ++d)
          cache.set(at + d, held.elements[static_cast<std::size_t>(d)]);
        if (scales.view().rank() == 3) scales.set(offset(scales.view(), i, row, head), held.scale);
      }
    }
  }
  if (!p.appends()) return;
  appended.fill([&](std::int64_t index) {
    const Token token = token_at(p.packed_new, p.num_new, index / (head_dim * p.num_heads_kv));
    if (token.is_of_nobody) return std::nan("");
    const std::int64_t i = token.sequence;
    return value(stream, i, rows_before(i) - p.left_padding(i) + token.index,
                 index / head_dim % p.num_heads_kv, index % head_dim);
  });
}

AttentionDecode CacheMemory::args(CpuTarget target) {
  const bool appends = problem_.appends();
  AttentionDecode args{.q = q.view(), .out = out.mutable_view(), .lse = lse.mutable_view()};
  const TensorView keys = appends ? k.mutable_view() : k.view();
  args.cache = {.k = keys,
                .v = problem_.has_latent_values ? first_columns(keys, problem_.head_dim_v)
                     : appends                  ? v.mutable_view()
                                                : v.view(),
                .page_table = page_table.view(),
                .seqlens = seqlens.view(),
                .batch_idx = batch_idx.view(),
                .left_padding = left_padding.view(),
                .page_indptr = page_indptr.view(),
                .page_indices = page_indices.view(),
                .k_scale = appends ? k_scale.mutable_view() : k_scale.view(),
                .v_scale = appends ? v_scale.mutable_view() : v_scale.view()};
  args.append = {.k = new_k.view(), .cu_seqlens = cu_seqlens_new.view()};
  if (!problem_.has_latent_values) args.append.v = new_v.view();
  args.cu_seqlens_q = cu_seqlens_q.view();
  args.shared_prefix = {.seqlen = problem_.shared_prefix, .cu_sequences = cu_sequences.view()};
  if (problem_.has_max_seqlen_q) args.max_seqlen_q = std::ranges::max(problem_.packed_q);
  args.score = problem_.score;
  args.mask = problem_.mask;
  args.softmax_scale = softmax_scale();
  args.sinks = sinks.view();
  args.quant = problem_.quant;
  args.cpu_target = target;
  return args;
}

AttentionForward CacheMemory::dense(std::int64_t sequence, CpuTarget target) {
  const CacheCase& p = problem_;
  Dense& d = dense_[static_cast<std::size_t>(sequence)];
  const std::int64_t seqlen_kv = p.seqlens[static_cast<std::size_t>(sequence)];
  const auto keys = [&](Dtype dtype, std::uint64_t stream, std::int64_t head_dim) {
    const Dtype of_numbers = p.quant.is_none() ? Dtype::f32 : p.q_dtype;
    GuardedTensor tensor(
        make_spec(quant::is_code(dtype) ? of_numbers : dtype,
                  std::array{std::int64_t{1}, seqlen_kv, p.num_heads_kv, head_dim}));
    HeldRow held;
    tensor.fill([&](std::int64_t i) {
      if (i % head_dim == 0) {
        held = held_row(stream, sequence, i / (head_dim * p.num_heads_kv),
                        i / head_dim % p.num_heads_kv, head_dim);
      }
      const double element = held.elements[static_cast<std::size_t>(i % head_dim)];
      return quant::is_code(dtype) ? static_cast<float>(element) * held.scale : element;
    });
    return tensor;
  };
  d.k = keys(p.k_dtype, kK, p.head_dim_qk);
  d.v = keys(p.v_dtype, kV, p.head_dim_v);
  d.out = GuardedTensor(rows_of(out.view(), sequence).spec());
  d.lse = GuardedTensor(lse_of(lse.view(), sequence).spec());
  return {.q = rows_of(q.view(), sequence),
          .k = d.k.view(),
          .v = d.v.view(),
          .out = d.out.mutable_view(),
          .lse = d.lse.mutable_view(),
          .score = p.score,
          .mask = p.mask,
          .softmax_scale = softmax_scale(),
          .sinks = sinks.view(),
          .quant = p.quant,
          .cpu_target = target};
}

std::vector<std::uint64_t> CacheMemory::out_bits(std::int64_t sequence) {
  return bits_of(rows_of(out.view(), sequence));
}

std::vector<std::uint64_t> CacheMemory::lse_bits(std::int64_t sequence) {
  return bits_of(lse_of(lse.view(), sequence));
}

std::string CacheMemory::damage() const {
  const std::pair<const char*, const GuardedTensor*> inputs[] = {
      {"q", &q},
      {"cache.page_table", &page_table},
      {"cache.page_indptr", &page_indptr},
      {"cache.page_indices", &page_indices},
      {"cache.seqlens", &seqlens},
      {"cache.batch_idx", &batch_idx},
      {"cache.left_padding", &left_padding},
      {"append.k", &new_k},
      {"append.v", &new_v},
      {"append.cu_seqlens", &cu_seqlens_new},
      {"cu_seqlens_q", &cu_seqlens_q},
      {"shared_prefix.cu_sequences", &cu_sequences},
      {"sinks", &sinks}};
  for (const auto& [name, tensor] : inputs) {
    if (tensor->view() && !tensor->is_unchanged()) return std::string(name) + " was written";
  }
  const std::pair<const char*, const GuardedTensor*> outputs[] = {
      {"cache.k", &k}, {"cache.v", &v}, {"cache.k_scale", &k_scale}, {"cache.v_scale", &v_scale},
      {"out", &out},   {"lse", &lse}};
  for (const auto& [name, tensor] : outputs) {
    if (!tensor->has_intact_guards()) return std::string("wrote outside of ") + name;
  }
  if (!problem_.appends() && !(k.is_unchanged() && v.is_unchanged()))
    return "the cache was written";
  const bool writes_scales = problem_.appends() && !problem_.has_given_scales;
  if (!writes_scales && !(k_scale.is_unchanged() && v_scale.is_unchanged()))
    return "scales were written";
  return "";
}

std::string CacheMemory::damage_of_nobody() const {
  if (problem_.packed_q.empty()) return "";
  const std::int64_t end = offsets_of(problem_.packed_q).back();
  for (const double value : reference::elements(slice(out.view(), 0, end, kRowsOfNobody)))
    if (value != 0) return "a row of out behind the last sequence is not 0";
  for (const double value : reference::elements(slice(lse.view(), 1, end, kRowsOfNobody))) {
    if (value != -std::numeric_limits<double>::infinity())
      return "a row of lse behind the last sequence is not -inf";
  }
  return "";
}

}  // namespace fovea::testing
