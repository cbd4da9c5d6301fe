// Decode over 32,768 keys: contiguous, in shuffled pages of 16, and a plain read of the same memory, taking turns on
// the same bytes. Bars: pages within 10 % of contiguous and at least 75 % of the read bandwidth, for one row per key
// head.
//
//   decode_bench --benchmark_filter='bf16/group:1/heads_first:1'
//
// Counters: GB/s of keys and values (median over the turns), and their fractions of the read's.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <vector>

#include "fovea/kv_cache.hpp"

namespace fovea {
namespace {

constexpr std::int64_t kKeys = 32768, kPage = 16, kPages = kKeys / kPage, kHeads = 8,
                       kHeadDim = 128;
constexpr std::int64_t kBytesToCycle = std::int64_t{1}
                                       << 30;  // read before a byte is read again: beyond any cache
constexpr std::int64_t kReadChunk = std::int64_t{1} << 20;

std::atomic<std::uint64_t> g_sink;  // keeps reads alive

/// Memory in huge pages where the system grants them. In pages of 4 KB much of the time goes into finding them: with
/// rows before heads each holds one or two rows of a head.
class Memory {
 public:
  Memory(std::int64_t bytes, bool wants_huge_pages)
      : data_(static_cast<std::byte*>(
            std::aligned_alloc(kHugePage, static_cast<std::size_t>(bytes)))) {
    if (data_ == nullptr) throw std::bad_alloc();
    madvise(data_, static_cast<std::size_t>(bytes),
            wants_huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data_); }
  std::byte* data() const { return data_; }

 private:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20U;
  std::byte* data_;
};

/// Slots of keys and of values, seen as slots or as pages in random order.
class Caches {
 public:
  Caches(Dtype dtype, bool has_heads_first, bool wants_huge_pages)
      : dtype_(dtype),
        has_heads_first_(has_heads_first),
        slot_bytes_(kKeys * kHeads * kHeadDim * static_cast<std::int64_t>(size_bytes(dtype))),
        num_slots_(kBytesToCycle / (2 * slot_bytes_)),
        k_(num_slots_ * slot_bytes_, wants_huge_pages),
        v_(num_slots_ * slot_bytes_, wants_huge_pages) {
    const auto element = static_cast<std::int64_t>(size_bytes(dtype));
    for (const Memory* memory : {&k_, &v_}) {
      // Small normal numbers in every dtype.
      for (std::int64_t i = 0; i < num_slots_ * slot_bytes_; ++i)
        memory->data()[i] = i % element == element - 1 ? std::byte{0x3C} : std::byte{0x11};
    }
    std::mt19937 random(1);
    tables_.resize(static_cast<std::size_t>(num_slots_ * kPages));
    std::iota(tables_.begin(), tables_.end(), 0);
    std::shuffle(tables_.begin(), tables_.end(), random);
  }

  std::int64_t num_slots() const { return num_slots_; }
  std::int64_t bytes_of_a_step() const { return 2 * slot_bytes_; }

  KvCache contiguous(std::int64_t slot) const {
    return {.k = rows(k_, 1, kKeys, slot * slot_bytes_),
            .v = rows(v_, 1, kKeys, slot * slot_bytes_),
            .seqlens = view(&length_, {1})};
  }
  KvCache paged(std::int64_t slot) const {
    return {.k = rows(k_, num_slots_ * kPages, kPage, 0),
            .v = rows(v_, num_slots_ * kPages, kPage, 0),
            .page_table = view(tables_.data() + slot * kPages, {1, kPages}),
            .seqlens = view(&length_, {1})};
  }

  void read(std::int64_t slot, Executor& executor) const {
    struct Read {
      const std::byte* k;
      const std::byte* v;
      std::int64_t chunks;
    } read{k_.data() + slot * slot_bytes_, v_.data() + slot * slot_bytes_,
           slot_bytes_ / kReadChunk};
    const auto body = [](void* self, int /*worker*/, std::int64_t index) {
      const auto& r = *static_cast<const Read*>(self);
      sum_chunk(index < r.chunks ? r.k + index * kReadChunk
                                 : r.v + (index - r.chunks) * kReadChunk);
    };
    executor.run(2 * read.chunks, {body, &read});
  }

 private:
  TensorView rows(const Memory& memory, std::int64_t slots, std::int64_t num_rows,
                  std::int64_t offset) const {
    const void* data = memory.data() + offset;
    if (!has_heads_first_)
      return {data, make_spec(dtype_, std::array{slots, num_rows, kHeads, kHeadDim})};
    return TensorView(data, make_spec(dtype_, std::array{slots, kHeads, num_rows, kHeadDim}))
        .permuted({0, 2, 1, 3});
  }

  static void sum_chunk(const std::byte* data) {
    using Vector [[gnu::vector_size(64)]] = std::uint64_t;
    Vector sums[4] = {};
    for (std::int64_t at = 0; at < kReadChunk; at += static_cast<std::int64_t>(sizeof(sums))) {
      Vector values[4];
      std::memcpy(values, data + at, sizeof(values));
      for (int i = 0; i < 4; ++i) sums[i] += values[i];
    }
    const Vector sum = sums[0] + sums[1] + sums[2] + sums[3];
    g_sink = sum[0] + sum[7];
  }

  const Dtype dtype_;
  const bool has_heads_first_;
  const std::int64_t slot_bytes_, num_slots_;
  const Memory k_, v_;
  std::vector<std::int32_t> tables_;
  const std::int64_t length_ = kKeys;
};

/// Queries of one step and its workspace.
struct Step {
  std::vector<float> q, out;
  std::vector<std::byte> workspace;
  Executor& executor;
  std::int64_t num_heads_q;

  Step(std::int64_t group, Executor& on)
      : q(static_cast<std::size_t>(group * kHeads * kHeadDim), 0.5F),
        out(q.size()),
        executor(on),
        num_heads_q(group * kHeads) {}

  void decode(const KvCache& cache) {
    AttentionDecode args{.q = view(q.data(), {1, 1, num_heads_q, kHeadDim}),
                         .cache = cache,
                         .out = view(out.data(), {1, 1, num_heads_q, kHeadDim}),
                         .executor = &executor};
    if (workspace.size() < decode_bytes(args)) workspace.resize(decode_bytes(args));
    args.workspace = workspace;
    attention_decode(args);
  }

 private:
  std::size_t decode_bytes(const AttentionDecode& args) {
    std::size_t& bytes = args.cache.page_table ? paged_bytes_ : contiguous_bytes_;
    if (bytes == 0) bytes = decode_workspace_bytes(args, kKeys);
    return bytes;
  }
  std::size_t paged_bytes_ = 0, contiguous_bytes_ = 0;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

template <typename Call>
double seconds_of(const Call& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void decode(benchmark::State& state, Dtype dtype) {
  const Caches caches(dtype, state.range(1) != 0, state.range(2) != 0);
  const auto executor = make_thread_pool(static_cast<int>(state.range(3)));
  Step step(state.range(0), *executor);
  step.decode(caches.contiguous(0));
  step.decode(caches.paged(0));
  std::vector<double> read, contiguous, paged;
  std::int64_t slot = 0;
  for (auto _ : state) {
    const auto next = [&] { return slot = (slot + 1) % caches.num_slots(); };
    read.push_back(seconds_of([&] { caches.read(next(), *executor); }));
    contiguous.push_back(seconds_of([&] { step.decode(caches.contiguous(next())); }));
    paged.push_back(seconds_of([&] { step.decode(caches.paged(next())); }));
  }
  const double gigabytes = static_cast<double>(caches.bytes_of_a_step()) * 1e-9;
  state.counters["threads"] = executor->concurrency();
  state.counters["read_GB/s"] = gigabytes / median(read);
  state.counters["contiguous_GB/s"] = gigabytes / median(contiguous);
  state.counters["paged_GB/s"] = gigabytes / median(paged);
  state.counters["contiguous/read"] = median(read) / median(contiguous);
  state.counters["paged/read"] = median(read) / median(paged);
  state.counters["paged/contiguous"] = median(contiguous) / median(paged);
}

// A turn of three steps walks three slots, and slots are not a multiple of three, so that every step meets every slot.
#define FOVEA_DECODE(dtype)                                         \
  BENCHMARK_CAPTURE(decode, dtype, Dtype::dtype)                    \
      ->ArgNames({"group", "heads_first", "huge_pages", "threads"}) \
      ->ArgsProduct({{1, 4, 8}, {0, 1}, {0, 1}, {1, 0}})            \
      ->Iterations(15)                                              \
      ->Unit(benchmark::kMillisecond)
FOVEA_DECODE(f32);
FOVEA_DECODE(bf16);
#undef FOVEA_DECODE

}  // namespace
}  // namespace fovea

BENCHMARK_MAIN();
