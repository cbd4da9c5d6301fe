#include "support/cache_case.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

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

/// The view of the first columns of all rows.
TensorView first_columns(const TensorView& view, std::int64_t count) {
  TensorSpec spec = view.spec();
  spec.shape[static_cast<std::size_t>(spec.rank - 1)] = count;
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

}  // namespace

TensorView entry_of(const TensorView& view, std::int64_t index) {
  if (!view) return view;
  TensorSpec spec = view.spec();
  spec.shape[0] = 1;
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
  if (p.num_new > 0) {
    new_k = tokens(p, kCacheNewK, p.k_dtype, {p.batch(), p.num_new, p.num_heads_kv, p.head_dim_qk});
    new_v = tokens(p, kCacheNewV, p.v_dtype, {p.batch(), p.num_new, p.num_heads_kv, p.head_dim_v});
  }
  fill_cache(k, new_k, kK, p.head_dim_qk);
  fill_cache(v, new_v, kV, p.head_dim_v);
  q = tokens(p, kCacheQ, p.q_dtype, {p.batch(), p.seqlen_q, p.num_heads_q, p.head_dim_qk});
  q.fill([&](std::int64_t i) {
    const std::int64_t row = i / (p.head_dim_qk * p.num_heads_q);
    return value(kQ, row / p.seqlen_q, row % p.seqlen_q, i / p.head_dim_qk % p.num_heads_q,
                 i % p.head_dim_qk);
  });
  if (p.has_sinks) {
    sinks = drawn(p, kCacheSinks, Dtype::f32, {p.num_heads_q});
    sinks.fill([&](std::int64_t i) { return value(kSinks, 0, 0, i, 0); });
  }
  out = tokens(p, kCacheOut, p.q_dtype, {p.batch(), p.seqlen_q, p.num_heads_q, p.head_dim_v},
               Strides::of_output);
  lse = drawn(p, kCacheLse, Dtype::f32, {p.batch(), p.num_heads_q, p.seqlen_q}, Strides::of_output);
  dense_.resize(p.seqlens.size());
  for (GuardedTensor* tensor : {&q, &k, &v, &page_table, &page_indptr, &page_indices, &seqlens,
                                &batch_idx, &left_padding, &new_k, &new_v, &sinks, &out, &lse}) {
    tensor->seal();
  }
}

double CacheMemory::value(std::uint64_t stream, std::int64_t sequence, std::int64_t row,
                          std::int64_t head, std::int64_t dim) const {
  if (stream == kV && problem_.has_latent_values) stream = kK;
  if (stream == (problem_.has_latent_values ? kK : kV) && row == problem_.nan_key)
    return std::nan("");
  const Random random(problem_.seed * 1000 + static_cast<std::uint64_t>(sequence), stream);
  return random.normal((row * 64 + head) * 512 + dim);
}

std::int64_t CacheMemory::rows_before(std::int64_t sequence) const {
  return problem_.left_padding(sequence) + problem_.seqlens[static_cast<std::size_t>(sequence)] -
         problem_.num_new;
}

void CacheMemory::place_sequences() {
  const CacheCase& p = problem_;
  std::int64_t longest = 0;
  std::int64_t num_pages = kSpareSlots;
  std::vector<std::int64_t> before, padding;
  for (std::int64_t i = 0; i < p.batch(); ++i) {
    before.push_back(rows_before(i));
    padding.push_back(p.left_padding(i));
    longest = std::max(longest, before.back() + p.num_new);
    if (p.page_size > 0) num_pages += (before.back() + p.num_new + p.page_size - 1) / p.page_size;
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
    const std::int64_t rows = rows_before(i) + p.num_new;
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

void CacheMemory::fill_cache(GuardedTensor& cache, GuardedTensor& appended, std::uint64_t stream,
                             std::int64_t head_dim) const {
  const CacheCase& p = problem_;
  cache.fill([](std::int64_t i) {
    return i % 3 == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
  });
  for (std::int64_t i = 0; i < p.batch(); ++i) {
    for (std::int64_t row = p.left_padding(i); row < rows_before(i); ++row) {
      for (std::int64_t head = 0; head < p.num_heads_kv; ++head) {
        const std::int64_t at = offset(cache.view(), i, row, head);
        for (std::int64_t d = 0; d < head_dim; ++d)
          cache.set(at + d, value(stream, i, row - p.left_padding(i), head, d));
      }
    }
  }
  if (p.num_new == 0) return;
  appended.fill([&](std::int64_t index) {
    const std::int64_t row = index / (head_dim * p.num_heads_kv);
    const std::int64_t i = row / p.num_new;
    return value(stream, i, rows_before(i) - p.left_padding(i) + row % p.num_new,
                 index / head_dim % p.num_heads_kv, index % head_dim);
  });
}

AttentionDecode CacheMemory::args(CpuTarget target) {
  const bool appends = problem_.num_new > 0;
  AttentionDecode args{.q = q.view(), .out = out.mutable_view(), .lse = lse.mutable_view()};
  args.cache = {.k = appends ? k.mutable_view() : k.view(),
                .v = problem_.has_latent_values ? first_columns(k.view(), problem_.head_dim_v)
                     : appends                  ? v.mutable_view()
                                                : v.view(),
                .page_table = page_table.view(),
                .seqlens = seqlens.view(),
                .batch_idx = batch_idx.view(),
                .left_padding = left_padding.view(),
                .page_indptr = page_indptr.view(),
                .page_indices = page_indices.view()};
  args.append = {.k = new_k.view(), .v = new_v.view()};
  args.score = problem_.score;
  args.mask = problem_.mask;
  args.sinks = sinks.view();
  args.cpu_target = target;
  return args;
}

AttentionForward CacheMemory::dense(std::int64_t sequence, CpuTarget target) {
  const CacheCase& p = problem_;
  Dense& d = dense_[static_cast<std::size_t>(sequence)];
  const std::int64_t seqlen_kv = p.seqlens[static_cast<std::size_t>(sequence)];
  const auto keys = [&](Dtype dtype, std::uint64_t stream, std::int64_t head_dim) {
    GuardedTensor tensor(
        make_spec(dtype, std::array{std::int64_t{1}, seqlen_kv, p.num_heads_kv, head_dim}));
    tensor.fill([&](std::int64_t i) {
      return value(stream, sequence, i / (head_dim * p.num_heads_kv), i / head_dim % p.num_heads_kv,
                   i % head_dim);
    });
    return tensor;
  };
  d.k = keys(p.k_dtype, kK, p.head_dim_qk);
  d.v = keys(p.v_dtype, kV, p.head_dim_v);
  d.out = GuardedTensor(entry_of(out.view(), sequence).spec());
  d.lse = GuardedTensor(entry_of(lse.view(), sequence).spec());
  return {.q = entry_of(q.view(), sequence),
          .k = d.k.view(),
          .v = d.v.view(),
          .out = d.out.mutable_view(),
          .lse = d.lse.mutable_view(),
          .score = p.score,
          .mask = p.mask,
          .sinks = sinks.view(),
          .cpu_target = target};
}

std::vector<std::uint64_t> CacheMemory::out_bits(std::int64_t sequence) {
  return bits_of(entry_of(out.view(), sequence));
}

std::vector<std::uint64_t> CacheMemory::lse_bits(std::int64_t sequence) {
  return bits_of(entry_of(lse.view(), sequence));
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
      {"sinks", &sinks}};
  for (const auto& [name, tensor] : inputs) {
    if (tensor->view() && !tensor->is_unchanged()) return std::string(name) + " was written";
  }
  const std::pair<const char*, const GuardedTensor*> outputs[] = {
      {"cache.k", &k}, {"cache.v", &v}, {"out", &out}, {"lse", &lse}};
  for (const auto& [name, tensor] : outputs) {
    if (!tensor->has_intact_guards()) return std::string("wrote outside of ") + name;
  }
  if (problem_.num_new == 0 && !(k.is_unchanged() && v.is_unchanged()))
    return "the cache was written";
  return "";
}

}  // namespace fovea::testing
