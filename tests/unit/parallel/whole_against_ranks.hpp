// Ranks that are threads, and a problem of theirs against one call of the whole: what tests of communicators and of
// engines share.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "fovea/context_parallel.hpp"

namespace fovea {

// 24 heads and 96 tokens go into 1, 2, 3, 4 and 8 ranks. A rank of eight has 12 rows: with as few as 8 the CPU would
// read them in another order than the whole's.
inline constexpr std::int64_t kBatch = 2, kSeqlen = 96, kHeads = 24, kDimQk = 8, kDimV = 4;
inline constexpr int kRanks[] = {1, 2, 3, 4, 8};

/// Row-major f32.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::vector<std::int64_t> shape, unsigned seed = 0)
      : shape_(std::move(shape)), values_(static_cast<std::size_t>(spec().num_elements())) {
    if (seed == 0) return;
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (float& value : values_) value = normal(generator);
  }

  TensorSpec spec() const { return make_spec(Dtype::f32, shape_); }
  TensorView view() { return {static_cast<void*>(values_.data()), spec()}; }
  const std::vector<float>& values() const { return values_; }
  std::vector<float>& values() { return values_; }
  std::int64_t size(int dim) const { return shape_[static_cast<std::size_t>(dim)]; }

  /// These tokens of [batch, tokens, ...], or of [batch, heads, tokens].
  Tensor tokens(std::span<const TokenRange> ranges, int dim) const {
    std::int64_t count = 0, outer = 1, inner = 1;
    for (const TokenRange& range : ranges) count += range.size();
    for (int i = 0; i < dim; ++i) outer *= size(i);
    for (int i = dim + 1; i < static_cast<int>(shape_.size()); ++i) inner *= size(i);
    std::vector<std::int64_t> shape = shape_;
    shape[static_cast<std::size_t>(dim)] = count;
    Tensor result(shape);
    float* to = result.values_.data();
    for (std::int64_t i = 0; i < outer; ++i) {
      for (const TokenRange& range : ranges) {
        const float* const from = values_.data() + (i * size(dim) + range.begin) * inner;
        to = std::copy(from, from + range.size() * inner, to);
      }
    }
    return result;
  }

 private:
  std::vector<std::int64_t> shape_;
  std::vector<float> values_;
};

/// A call's tensors, of the whole or of a rank.
struct Tensors {
  Tensor q, k, v, out, lse, row_max, dout, dlse, dq, dk, dv, dsinks, dtable;

  explicit Tensors(std::int64_t num_heads_kv)
      : q({kBatch, kSeqlen, kHeads, kDimQk}, 1),
        k({kBatch, kSeqlen, num_heads_kv, kDimQk}, 2),
        v({kBatch, kSeqlen, num_heads_kv, kDimV}, 3),
        dout({kBatch, kSeqlen, kHeads, kDimV}, 4),
        dlse({kBatch, kHeads, kSeqlen}, 5) {
    make_outputs();
  }
  Tensors(const Tensors& whole, std::span<const TokenRange> ranges)
      : q(whole.q.tokens(ranges, 1)),
        k(whole.k.tokens(ranges, 1)),
        v(whole.v.tokens(ranges, 1)),
        dout(whole.dout.tokens(ranges, 1)),
        dlse(whole.dlse.tokens(ranges, 2)) {
    make_outputs();
  }

  void make_outputs() {
    const std::int64_t num_tokens = q.size(1);
    out = Tensor({kBatch, num_tokens, kHeads, kDimV});
    lse = Tensor({kBatch, kHeads, num_tokens});
    row_max = Tensor({kBatch, kHeads, num_tokens});
    dq = Tensor({kBatch, num_tokens, kHeads, kDimQk});
    dk = Tensor({kBatch, num_tokens, k.size(2), kDimQk});
    dv = Tensor({kBatch, num_tokens, k.size(2), kDimV});
    dsinks = Tensor({kHeads});
    dtable = Tensor({kHeads, 7});
  }
};

struct Case {
  MaskMod mask{};
  std::int64_t num_heads_kv = kHeads;
  bool is_deterministic = true;
  ScoreMod score{};  // reads "table" where it is not the identity
  Tensor* sinks = nullptr;
  Dropout dropout{};
  std::int64_t chunk = 0;  // of the plan; 0: as it likes
  Quantization quant{};
  Tensor* scales =
      nullptr;  // [batch, num_heads_kv] of q, k and v, where the recipe takes given ones
  // lse is so large that its rounding shows in gradients by parts of the keys; one call sums its rows again.
  bool has_large_lse = false;

  AttentionForward forward(Tensors& t) const {
    AttentionForward args{.q = t.q.view(),
                          .k = t.k.view(),
                          .v = t.v.view(),
                          .out = t.out.view(),
                          .lse = t.lse.view(),
                          .score = score,
                          .mask = mask,
                          .dropout = dropout,
                          .is_deterministic = is_deterministic};
    if (sinks != nullptr) args.sinks = sinks->view();
    args.quant = quant;
    if (scales != nullptr) args.q_scale = args.k_scale = args.v_scale = scales->view();
    return args;
  }
  AttentionForward forward_with_row_max(Tensors& t) const {
    AttentionForward args = forward(t);
    args.row_max = t.row_max.view();
    return args;
  }
  AttentionBackward backward(Tensors& t) const {
    AttentionBackward args{.dout = t.dout.view(),
                           .dlse = t.dlse.view(),
                           .forward = forward(t),
                           .dq = t.dq.view(),
                           .dk = t.dk.view(),
                           .dv = t.dv.view()};
    if (sinks != nullptr) args.dsinks = t.dsinks.view();
    if (!score.is_identity()) args.dcaptured = {{"table", t.dtable.view()}};
    return args;
  }
  Problem problem() const {
    Tensors t(num_heads_kv);
    return {.q = t.q.spec(), .k = t.k.spec(), .v = t.v.spec(), .mask = mask};
  }
};

/// One thread for each rank; what each was told, "" where nothing failed.
inline std::vector<std::string> on_ranks(
    std::vector<std::unique_ptr<Communicator>> communicators,
    const std::function<void(std::shared_ptr<Communicator>)>& body) {
  std::vector<std::string> errors(communicators.size());
  std::vector<std::jthread> threads;
  for (std::size_t rank = 0; rank < communicators.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(std::move(communicators[rank]));
      } catch (const Error& error) {
        errors[rank] = error.what();
      }
    });
  }
  threads.clear();  // joins
  return errors;
}

/// A communicator that passes everything on to another.
class Forwarding : public Communicator {
 public:
  explicit Forwarding(std::unique_ptr<Communicator> real) : real_(std::move(real)) {}
  int rank() const override { return real_->rank(); }
  int world_size() const override { return real_->world_size(); }
  Exchange begin_all_gather(const void* sent, void* received, std::size_t bytes,
                            void* stream) override {
    return real_->begin_all_gather(sent, received, bytes, stream);
  }
  Exchange begin_reduce_scatter(const float* sent, float* received, std::size_t count,
                                void* stream) override {
    return real_->begin_reduce_scatter(sent, received, count, stream);
  }
  Exchange begin_messages(std::span<const OutgoingMessage> sent,
                          std::span<const IncomingMessage> received, void* stream) override {
    return real_->begin_messages(sent, received, stream);
  }
  void wait(Exchange exchange, void* stream) override { real_->wait(exchange, stream); }

 private:
  std::unique_ptr<Communicator> real_;
};

using MakeCommunicators = std::function<std::vector<std::unique_ptr<Communicator>>(int)>;

template <typename Kind>
std::vector<std::unique_ptr<Communicator>> communicators_of(int world_size) {
  std::vector<std::unique_ptr<Communicator>> result;
  for (auto& real : make_thread_communicators(world_size))
    result.push_back(std::make_unique<Kind>(std::move(real)));
  return result;
}

inline bool have_equal_bits(const Tensor& a, const Tensor& b) {
  return std::ranges::equal(a.values(), b.values(), [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  });
}

/// The largest difference, beyond what f32 sums in another order explain; -inf equals -inf.
inline double excess(const Tensor& got, const Tensor& expected, double rounding = 2e-5) {
  double worst = 0;
  for (std::size_t i = 0; i < got.values().size(); ++i) {
    const float x = got.values()[i], y = expected.values()[i];
    if (x == y) continue;
    const double difference = std::abs(static_cast<double>(x) - y);
    if (!(difference <= rounding * (1 + std::abs(static_cast<double>(y)))))
      worst = std::max(worst, std::isnan(difference) ? INFINITY : difference);
  }
  return worst;
}

class WholeAgainstRanks {
 public:
  explicit WholeAgainstRanks(const Case& problem) : case_(problem), whole_(problem.num_heads_kv) {
    attention_forward(case_.forward_with_row_max(whole_));
    attention_backward(case_.backward(whole_));
    by_keys_ = whole_;
    AttentionBackward by_keys = case_.backward(by_keys_);
    by_keys.dq = {};
    by_keys.dsinks = {};
    by_keys.dcaptured = {};
    attention_backward(by_keys);
  }

  /// What is wrong, in words; nullopt where no plan can serve the problem.
  std::optional<std::string> run(ParallelScheme scheme, int world_size,
                                 const MakeCommunicators& make = make_thread_communicators) {
    std::optional<ShardPlan> plan;
    try {
      plan = context_parallel_plan(case_.problem(), world_size, scheme,
                                   {.tile_q = 4, .tile_kv = 4, .chunk = case_.chunk});
    } catch (const InvalidArgument&) {
      return std::nullopt;  // heads that do not divide
    }
    std::vector<Tensors> ranks;
    for (int rank = 0; rank < world_size; ++rank) ranks.emplace_back(whole_, plan->tokens(rank));
    const auto errors = on_ranks(make(world_size), [&](std::shared_ptr<Communicator> end) {
      Tensors& own = ranks[static_cast<std::size_t>(end->rank())];
      ContextParallel attention(*plan, std::move(end));
      attention.forward(case_.forward_with_row_max(own));
      attention.backward(case_.backward(own));
    });
    std::string wrong;
    for (const std::string& error : errors) wrong += error;
    if (!wrong.empty()) return wrong;
    for (int rank = 0; rank < world_size; ++rank) wrong += compared(*plan, rank, ranks);
    return wrong + compared_sums(ranks);
  }

 private:
  std::string compared(const ShardPlan& plan, int rank, const std::vector<Tensors>& ranks) const {
    const Tensors& own = ranks[static_cast<std::size_t>(rank)];
    const bool is_invariant = plan.scheme() == ParallelScheme::all_gather ||
                              plan.scheme() == ParallelScheme::head_group_all_gather ||
                              plan.scheme() == ParallelScheme::ulysses;
    const bool shares_kv_heads =
        plan.scheme() == ParallelScheme::ulysses && plan.world_size() > case_.num_heads_kv;
    const bool has_exact_kv =
        is_invariant && case_.is_deterministic && !shares_kv_heads && !case_.has_large_lse;
    std::string wrong;
    for (const auto& [name, member, dim, is_exact] :
         {std::tuple{"out", &Tensors::out, 1, is_invariant},
          {"lse", &Tensors::lse, 2, is_invariant},
          {"row_max", &Tensors::row_max, 2, true},
          {"dq", &Tensors::dq, 1, is_invariant},
          {"dk", &Tensors::dk, 1, has_exact_kv},
          {"dv", &Tensors::dv, 1, has_exact_kv}}) {
      const bool is_of_ulysses = plan.scheme() == ParallelScheme::ulysses;
      const Tensors& whole = is_of_ulysses ? whole_ : by_keys_;
      const Tensor expected = (whole.*member).tokens(plan.tokens(rank), dim);
      const double away = excess(own.*member, expected, case_.has_large_lse ? 1e-4 : 2e-5);
      if (away > 0) {
        wrong += "rank " + std::to_string(rank) + ": " + name + " is " + std::to_string(away) +
                 " away; ";
      } else if (is_exact && !have_equal_bits(own.*member, expected)) {
        wrong += "rank " + std::to_string(rank) + ": " + name + " has other bits; ";
      }
    }
    return wrong;
  }

  /// Gradients of weights: what ranks contribute.
  std::string compared_sums(const std::vector<Tensors>& ranks) const {
    std::string wrong;
    for (const auto& [name, member] :
         {std::pair{"dsinks", &Tensors::dsinks}, {"dtable", &Tensors::dtable}}) {
      Tensor sum = ranks[0].*member;
      for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
        for (std::size_t i = 0; i < sum.values().size(); ++i)
          sum.values()[i] += (ranks[rank].*member).values()[i];
      }
      if (excess(sum, whole_.*member) > 1e-3) wrong += std::string(name) + " is away; ";
    }
    return wrong;
  }

  Case case_;
  Tensors whole_;
  // Gradients by keys as a call of their own, which gathering schemes make: one that asks for captured ones rounds at
  // other places.
  Tensors by_keys_{1};
};

/// Documents of several lengths with padding at the end, other ones in each sequence.
inline std::vector<std::int32_t> document_ids() {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(kBatch * kSeqlen));
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t i = 0; i < kSeqlen; ++i) {
      const bool is_padding = i >= kSeqlen - 7;
      ids[static_cast<std::size_t>(b * kSeqlen + i)] =
          is_padding ? -1 : static_cast<std::int32_t>((i + 5 * b) / 29);
    }
  }
  return ids;
}

}  // namespace fovea
