// Ranks on the GPUs of a machine, over NCCL, against one of them: every scheme forward and backward, and decoding over
// caches whose pages are dealt. Without two GPUs and NCCL everything is skipped.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "fovea/context_parallel.hpp"

#include "core/scalar_io.hpp"
#include "core/shape.hpp"
#include "cuda/driver/context.hpp"
#include "cuda/driver/resources.hpp"
#include "parallel/communicator/nccl.hpp"

namespace fovea::parallel {
namespace {

using cuda::driver::DeviceMemory;
using cuda::driver::OwnedStream;
using cuda::driver::Stream;
using ::testing::Each;
using ::testing::IsEmpty;

using Shape = std::vector<std::int64_t>;

/// Row-major, on the host, with a copy on a GPU.
class RankTensor {
 public:
  RankTensor(Device device, Dtype dtype, const Shape& shape)
      : spec_(make_spec(dtype, shape)),
        host_(static_cast<std::size_t>(spec_.num_elements()) * size_bytes(dtype)),
        memory_(cuda::driver::process_context(device), std::max<std::size_t>(host_.size(), 1)) {
    spec_.device = device;
    memory_.fill(0xFF, Stream(nullptr));  // NaN
  }

  TensorView view() const { return {memory_.data(), spec_}; }
  std::int64_t size(int dim) const { return spec_.shape[static_cast<std::size_t>(dim)]; }
  float value(std::int64_t i) const { return load_scalar(host_.data(), spec_.dtype, i); }
  void set(std::int64_t i, float value) { store_scalar(host_.data(), spec_.dtype, i, value); }
  std::int32_t& index(std::int64_t i) { return reinterpret_cast<std::int32_t*>(host_.data())[i]; }
  const TensorSpec& spec() const { return spec_; }
  std::span<std::byte> bytes() { return host_; }

  RankTensor& copy_to_device() {
    memory_.copy_from(host_, Stream(nullptr));
    return *this;
  }
  void copy_back() { memory_.copy_to(host_, Stream(nullptr)); }

  /// These tokens of [batch, tokens, ...], or with dim 2 of [batch, heads, tokens]; on another GPU.
  RankTensor tokens(std::span<const TokenRange> ranges, int dim, Device device) const {
    Shape shape(shape_of(spec_).begin(), shape_of(spec_).end());
    shape[static_cast<std::size_t>(dim)] = num_tokens_of(ranges);
    RankTensor result(device, spec_.dtype, shape);
    std::int64_t outer = 1, inner = 1, to = 0;
    for (int i = 0; i < dim; ++i) outer *= size(i);
    for (int i = dim + 1; i < spec_.rank; ++i) inner *= size(i);
    for (std::int64_t i = 0; i < outer; ++i) {
      for (const TokenRange& range : ranges) {
        for (std::int64_t j = range.begin * inner; j < range.end * inner; ++j)
          result.set(to++, value(i * size(dim) * inner + j));
      }
    }
    result.copy_to_device();
    return result;
  }

 private:
  static std::int64_t num_tokens_of(std::span<const TokenRange> ranges) {
    std::int64_t sum = 0;
    for (const TokenRange& range : ranges) sum += range.size();
    return sum;
  }

  TensorSpec spec_;
  std::vector<std::byte> host_;
  DeviceMemory memory_;
};

RankTensor random_tensor(Device device, Dtype dtype, const Shape& shape, unsigned seed) {
  RankTensor result(device, dtype, shape);
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < result.spec().num_elements(); ++i) result.set(i, normal(generator));
  result.copy_to_device();
  return result;
}

/// The norm of the difference over that of what is expected; equal infinities are no difference.
double away(const RankTensor& got, const RankTensor& expected) {
  double difference = 0, norm = 0;
  for (std::int64_t i = 0; i < got.spec().num_elements(); ++i) {
    const double x = got.value(i), y = expected.value(i);
    if (x == y && std::isinf(x)) continue;
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  return std::sqrt(difference / std::max(norm, 1e-30));
}

class GpuRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto& driver = cuda::driver::process_driver();
    if (!driver.is_present()) GTEST_SKIP() << driver.why_absent();
    num_ranks_ = static_cast<int>(driver.devices().size());
    if (num_ranks_ < 2) GTEST_SKIP() << "fewer than two devices";
    num_ranks_ = num_ranks_ >= 4 ? 4 : 2;
    if (!process_nccl().is_present()) GTEST_SKIP() << process_nccl().why_absent();
  }

  /// body(communicator, stream) on a thread for each GPU; what each was told.
  std::vector<std::string> on_gpus(
      const std::function<void(std::shared_ptr<Communicator>, const OwnedStream&)>& body) const {
    const NcclId id = make_nccl_id();
    std::vector<std::string> errors(static_cast<std::size_t>(num_ranks_));
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          const Device device = Device::cuda(rank);
          const OwnedStream stream(cuda::driver::process_context(device));
          body(join_nccl_ranks(id, rank, num_ranks_, device), stream);
        } catch (const Error& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    }
    threads.clear();  // joins
    return errors;
  }

  int num_ranks_ = 0;
};

// ---- Attention ----

constexpr std::int64_t kBatch = 2, kSeqlen = 2048, kHeads = 8, kHeadsKv = 4, kDim = 64;

/// A call's tensors, of the whole or of a rank.
struct Tensors {
  std::map<std::string, RankTensor> by_name;

  RankTensor& operator[](const std::string& name) { return by_name.at(name); }
  void add(const std::string& name, RankTensor tensor) { by_name.emplace(name, std::move(tensor)); }

  static Tensors whole(Device device) {
    Tensors result;
    unsigned seed = 1;
    for (const auto& [name, heads] :
         {std::pair{"q", kHeads}, {"k", kHeadsKv}, {"v", kHeadsKv}, {"dout", kHeads}})
      result.add(name, random_tensor(device, Dtype::bf16, {kBatch, kSeqlen, heads, kDim}, seed++));
    result.add_outputs(device);
    return result;
  }
  Tensors shard(std::span<const TokenRange> ranges, Device device) const {
    Tensors result;
    for (const char* const name : {"q", "k", "v", "dout"})
      result.add(name, by_name.at(name).tokens(ranges, 1, device));
    result.add_outputs(device);
    return result;
  }
  void add_outputs(Device device) {
    const std::int64_t tokens = by_name.at("q").size(1);
    for (const char* const name : {"lse", "row_max"})
      add(name, {device, Dtype::f32, {kBatch, kHeads, tokens}});
    for (const auto& [name, heads] :
         {std::pair{"out", kHeads}, {"dq", kHeads}, {"dk", kHeadsKv}, {"dv", kHeadsKv}})
      add(name, {device, Dtype::bf16, {kBatch, tokens, heads, kDim}});
  }
  void copy_back() {
    for (const char* const name : {"out", "lse", "row_max", "dq", "dk", "dv"})
      by_name.at(name).copy_back();
  }

  AttentionForward forward(const MaskMod& mask, bool is_deterministic, void* stream) {
    Tensors& t = *this;
    AttentionForward args{.q = t["q"].view(),
                          .k = t["k"].view(),
                          .v = t["v"].view(),
                          .out = t["out"].view(),
                          .lse = t["lse"].view(),
                          .mask = mask,
                          .is_deterministic = is_deterministic};
    args.stream = stream;
    return args;
  }
  AttentionForward forward_with_row_max(const MaskMod& mask, bool is_deterministic, void* stream) {
    AttentionForward args = forward(mask, is_deterministic, stream);
    args.row_max = by_name.at("row_max").view();
    return args;
  }
  AttentionBackward backward(const MaskMod& mask, bool is_deterministic, void* stream) {
    Tensors& t = *this;
    return {.dout = t["dout"].view(),
            .forward = forward(mask, is_deterministic, stream),
            .dq = t["dq"].view(),
            .dk = t["dk"].view(),
            .dv = t["dv"].view(),
            .stream = stream};
  }
};

/// Ids of documents, on the host and on a GPU.
class Documents {
 public:
  explicit Documents(Device device) : ids_(device, Dtype::i32, {kBatch, kSeqlen}) {
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t i = 0; i < kSeqlen; ++i)
        ids_.index(b * kSeqlen + i) = static_cast<std::int32_t>((i + 77 * b) / 411);
    }
    ids_.copy_to_device();
  }
  MaskMod mask() const { return causal() && documents(ids_.view()); }
  MaskMod mask_on_host() {
    return causal() &&
           documents(TensorView(ids_.bytes().data(), make_spec(Dtype::i32, shape_of(ids_.spec()))));
  }

 private:
  RankTensor ids_;
};

class RanksAgainstOneGpu : public GpuRanks {
 protected:
  /// What is wrong, in words.
  std::string compare(ParallelScheme scheme, bool has_documents, bool is_deterministic) {
    const Device first = Device::cuda(0);
    Documents documents(first);
    Tensors whole = Tensors::whole(first);
    const MaskMod mask = has_documents ? documents.mask() : causal();
    attention_forward(whole.forward_with_row_max(mask, is_deterministic, nullptr));
    attention_backward(whole.backward(mask, is_deterministic, nullptr));
    whole.copy_back();
    const auto spec = [](std::int64_t heads) {
      return make_spec(Dtype::bf16, std::array{kBatch, kSeqlen, heads, kDim});
    };
    const Problem problem{.q = spec(kHeads),
                          .k = spec(kHeadsKv),
                          .v = spec(kHeadsKv),
                          .mask = has_documents ? documents.mask_on_host() : causal()};
    const ShardPlan plan = context_parallel_plan(problem, num_ranks_, scheme);
    std::vector<std::string> wrong(static_cast<std::size_t>(num_ranks_));
    const auto errors = on_gpus([&](std::shared_ptr<Communicator> end, const OwnedStream& stream) {
      const int rank = end->rank();
      const Device device = Device::cuda(rank);
      const Documents here(device);
      const MaskMod own_mask = has_documents ? here.mask() : causal();
      Tensors own = whole.shard(plan.tokens(rank), device);
      ContextParallel attention(plan, std::move(end));
      for (int i = 0; i < 2; ++i) {  // memory that is used again, too
        attention.forward(
            own.forward_with_row_max(own_mask, is_deterministic, stream.get().handle()));
        attention.backward(own.backward(own_mask, is_deterministic, stream.get().handle()));
      }
      stream.synchronize();
      own.copy_back();
      wrong[static_cast<std::size_t>(rank)] = differences(plan, rank, whole, own, is_deterministic);
    });
    return std::accumulate(errors.begin(), errors.end(),
                           std::accumulate(wrong.begin(), wrong.end(), std::string()));
  }

 private:
  static std::string differences(const ShardPlan& plan, int rank, const Tensors& whole,
                                 const Tensors& own, bool is_deterministic) {
    const bool is_invariant = plan.scheme() == ParallelScheme::all_gather ||
                              plan.scheme() == ParallelScheme::head_group_all_gather ||
                              plan.scheme() == ParallelScheme::ulysses;
    std::string wrong;
    for (const auto& [name, dim] :
         {std::pair{"out", 1}, {"lse", 2}, {"row_max", 2}, {"dq", 1}, {"dk", 1}, {"dv", 1}}) {
      const RankTensor& got = own.by_name.at(name);
      const RankTensor expected =
          whole.by_name.at(name).tokens(plan.tokens(rank), dim, Device::cuda(rank));
      const bool is_gradient = name[0] == 'd';
      const bool is_exact = is_invariant && (is_deterministic || !is_gradient);
      const double distance = away(got, expected);
      if (!(distance <= (is_exact ? 0 : 0.01)))
        wrong += fmt::format("rank {}: {} is {:.2e} away; ", rank, name, distance);
    }
    return wrong;
  }
};

TEST_F(RanksAgainstOneGpu, EverySchemeEqualsOneGpu) {
  for (int scheme = 0; scheme < kNumParallelSchemes; ++scheme) {
    const auto which = static_cast<ParallelScheme>(scheme);
    if (which == ParallelScheme::hybrid && num_ranks_ < 4) continue;  // wants two groups of two
    for (const bool has_documents : {false, true}) {
      for (const bool is_deterministic : {true, false}) {
        EXPECT_THAT(compare(which, has_documents, is_deterministic), IsEmpty())
            << name(which) << (has_documents ? ", documents" : ", causal")
            << (is_deterministic ? ", deterministic" : "");
      }
    }
  }
}

// ---- Decoding ----

constexpr std::int64_t kSequences = 8, kPageSize = 16, kMaxPages = 24, kNew = 3;

class RanksDecodeAsOneGpu : public GpuRanks {
 protected:
  /// Pages of whole sequences that a rank has, and its table of them.
  struct Pages {
    RankTensor k, v, table;

    Pages(const RankTensor& whole_k, const RankTensor& whole_v, int rank, int num_ranks,
          Device device)
        : k(device, Dtype::bf16, {kSequences * columns(num_ranks), kPageSize, kHeadsKv, kDim}),
          v(device, Dtype::bf16, {kSequences * columns(num_ranks), kPageSize, kHeadsKv, kDim}),
          table(device, Dtype::i32, {kSequences, columns(num_ranks)}) {
      const std::int64_t count = kSequences * columns(num_ranks);
      constexpr std::int64_t kElements = kPageSize * kHeadsKv * kDim;
      for (std::int64_t b = 0; b < kSequences; ++b) {
        for (std::int64_t column = 0; column < columns(num_ranks); ++column) {
          const std::int64_t page = count - 1 - (b * columns(num_ranks) + column);
          table.index(b * columns(num_ranks) + column) = static_cast<std::int32_t>(page);
          const std::int64_t from = b * kMaxPages + column * num_ranks + rank;
          for (std::int64_t i = 0; i < kElements; ++i) {
            k.set(page * kElements + i, whole_k.value(from * kElements + i));
            v.set(page * kElements + i, whole_v.value(from * kElements + i));
          }
        }
      }
      for (RankTensor* tensor : {&k, &v, &table}) tensor->copy_to_device();
    }
    static std::int64_t columns(int num_ranks) { return kMaxPages / num_ranks; }
    /// Pages in the order of sequences again, where this has them all.
    static RankTensor in_order(const RankTensor& pages) {
      RankTensor result(pages.spec().device, Dtype::bf16,
                        {pages.size(0), kPageSize, kHeadsKv, kDim});
      constexpr std::int64_t kElements = kPageSize * kHeadsKv * kDim;
      for (std::int64_t i = 0; i < result.spec().num_elements(); ++i) {
        const std::int64_t page = pages.size(0) - 1 - i / kElements;
        result.set(i, pages.value(page * kElements + i % kElements));
      }
      return result;
    }
  };

  struct Step {
    RankTensor q, k_new, v_new, cos, sin, seqlens, out, lse;

    /// Of `count` sequences from `first` on.
    Step(Device device, std::int64_t first, std::int64_t count)
        : q(part(device, kHeads, 11, first, count)),
          k_new(part(device, kHeadsKv, 12, first, count)),
          v_new(part(device, kHeadsKv, 13, first, count)),
          cos(random_tensor(device, Dtype::f32, {512, kDim / 2}, 14)),
          sin(random_tensor(device, Dtype::f32, {512, kDim / 2}, 15)),
          seqlens(device, Dtype::i32, {kSequences}),
          out(device, Dtype::bf16, {count, kNew, kHeads, kDim}),
          lse(device, Dtype::f32, {count, kHeads, kNew}) {
      // Around the ends of pages, and from none on.
      constexpr std::array<std::int32_t, kSequences> kLengths{0, 1, 15, 16, 17, 47, 200, 381};
      for (std::int64_t b = 0; b < kSequences; ++b)
        seqlens.index(b) = kLengths[static_cast<std::size_t>(b)];
      seqlens.copy_to_device();
    }
    static RankTensor part(Device device, std::int64_t heads, unsigned seed, std::int64_t first,
                           std::int64_t count) {
      const RankTensor whole =
          random_tensor(device, Dtype::bf16, {kSequences, kNew, heads, kDim}, seed);
      RankTensor result(device, Dtype::bf16, {count, kNew, heads, kDim});
      for (std::int64_t i = 0; i < result.spec().num_elements(); ++i)
        result.set(i, whole.value(first * kNew * heads * kDim + i));
      result.copy_to_device();
      return result;
    }

    AttentionDecode call(const Pages& pages, void* stream) {
      AttentionDecode args{.q = q.view(),
                           .cache = {.k = pages.k.view(),
                                     .v = pages.v.view(),
                                     .page_table = pages.table.view(),
                                     .seqlens = seqlens.view()},
                           .append = {.k = k_new.view(), .v = v_new.view()},
                           .rotary = Rotary{.cos = cos.view(), .sin = sin.view()},
                           .out = out.view(),
                           .lse = lse.view(),
                           .mask = window(100, 0)};
      args.stream = stream;
      return args;
    }
  };
};

TEST_F(RanksDecodeAsOneGpu, WithNewTokensRotaryAndAWindow) {
  const Device first = Device::cuda(0);
  const Shape shape{kSequences * kMaxPages, kPageSize, kHeadsKv, kDim};
  const RankTensor k = random_tensor(first, Dtype::bf16, shape, 16);
  const RankTensor v = random_tensor(first, Dtype::bf16, shape, 17);
  Step whole(first, 0, kSequences);
  Pages all(k, v, 0, 1, first);
  attention_decode(whole.call(all, nullptr));
  for (RankTensor* tensor : {&whole.out, &whole.lse, &all.k, &all.v}) tensor->copy_back();
  for (const bool is_shared_out : {false, true}) {
    std::vector<std::string> wrong(static_cast<std::size_t>(num_ranks_));
    const auto errors = on_gpus([&](std::shared_ptr<Communicator> end, const OwnedStream& stream) {
      const int rank = end->rank();
      const Device device = Device::cuda(rank);
      const std::int64_t count = is_shared_out ? kSequences / num_ranks_ : kSequences;
      const std::int64_t begin = is_shared_out ? rank * count : 0;
      Step own(device, begin, count);
      Pages pages(k, v, rank, num_ranks_, device);
      ContextParallelDecode decoding(std::move(end));
      for (int i = 0; i < 2; ++i) decoding.run(own.call(pages, stream.get().handle()));
      stream.synchronize();
      for (RankTensor* tensor : {&own.out, &own.lse, &pages.k, &pages.v}) tensor->copy_back();
      double of_out = 0, of_lse = 0;
      const std::int64_t out_begin = begin * kNew * kHeads * kDim,
                         lse_begin = begin * kNew * kHeads;
      for (std::int64_t i = 0; i < own.out.spec().num_elements(); ++i)
        of_out =
            std::max<double>(of_out, std::abs(own.out.value(i) - whole.out.value(out_begin + i)));
      for (std::int64_t i = 0; i < own.lse.spec().num_elements(); ++i)
        of_lse =
            std::max<double>(of_lse, std::abs(own.lse.value(i) - whole.lse.value(lse_begin + i)));
      std::string& told = wrong[static_cast<std::size_t>(rank)];
      if (!(of_out < 0.03)) told += fmt::format("out is {:.2e} away; ", of_out);
      if (!(of_lse < 1e-3)) told += fmt::format("lse is {:.2e} away; ", of_lse);
      // New tokens are where one cache has them.
      const Pages grown(all.in_order(all.k), all.in_order(all.v), rank, num_ranks_, device);
      if (!(away(pages.k, grown.k) == 0)) told += "k of the cache differs; ";
      if (!(away(pages.v, grown.v) == 0)) told += "v of the cache differs; ";
    });
    EXPECT_THAT(errors, Each(IsEmpty())) << is_shared_out;
    EXPECT_THAT(wrong, Each(IsEmpty())) << is_shared_out;
  }
}

}  // namespace
}  // namespace fovea::parallel
