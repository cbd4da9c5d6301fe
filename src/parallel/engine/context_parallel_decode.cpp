// Decoding over caches whose pages are dealt over ranks: queries travel, partial results are merged.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fovea/context_parallel.hpp"
#include "fovea/state.hpp"

#include "core/check.hpp"
#include "core/shape.hpp"
#include "parallel/engine/agreement.hpp"
#include "parallel/engine/decode_step.hpp"
#include "parallel/engine/memory.hpp"
#include "parallel/engine/places.hpp"
#include "parallel/engine/ranks.hpp"
#include "problem/captured_tensors.hpp"

namespace fovea {
namespace {

using parallel::DecodeStep;
using parallel::Facts;
using parallel::Incoming;
using parallel::Memory;
using parallel::Outgoing;
using parallel::OwnedTensor;
using parallel::PagesOfRank;
using parallel::part_of;
using parallel::Ranks;

constexpr std::string_view kWhere = "context_parallel_decode";

void refuse(bool condition, const std::string& message) {
  if (condition) invalid("", message);
}

void check_devices(const AttentionDecode& args, Device expected) {
  const auto check = [&](std::string_view name, const TensorView& tensor) {
    if (!tensor) return;
    refuse(tensor.spec().device != expected,
           fmt::format("{} lives on {}; expected {}, where the communicator exchanges", name,
                       to_string(tensor.spec().device), to_string(expected)));
  };
  check("q", args.q);
  check("cache.k", args.cache.k);
  check("cache.v", args.cache.v);
  check("cache.page_table", args.cache.page_table);
  check("cache.seqlens", args.cache.seqlens);
  check("append.k", args.append.k);
  check("append.v", args.append.v);
  check("out", args.out);
  check("lse", args.lse);
}

void check(const AttentionDecode& args, const Communicator& ranks) {
  const KvCache& cache = args.cache;
  const int world_size = ranks.world_size();
  refuse(!cache.page_table,
         "cache.page_table is missing; expected pages, dealt over ranks in turn");
  refuse(
      cache.batch_idx || cache.left_padding || cache.page_indptr || cache.page_indices,
      "cache has slots, left padding or pages by offsets; expected page_table and seqlens alone");
  refuse(!!args.cu_seqlens_q || !!args.append.cu_seqlens,
         "q or append is packed; expected as many tokens of every sequence");
  refuse(!args.quant.is_none(), "quant is given; expected none where keys are dealt over ranks");
  refuse(static_cast<bool>(args.shared_prefix),
         "shared_prefix is given; its pages lie on all ranks");
  refuse(cache.k_scale || cache.v_scale,
         "cache has scales; expected rows of f32, f16 or bf16 numbers on every rank");
  for (const auto& [name, tensor] :
       std::initializer_list<std::pair<const char*, const TensorView*>>{
           {"q", &args.q}, {"cache.k", &cache.k}, {"cache.v", &cache.v}, {"out", &args.out}}) {
    refuse(!*tensor, fmt::format("{} is missing", name));
    refuse(tensor->rank() != 4,
           fmt::format("{} is {}; expected four dimensions", name, to_string(tensor->spec())));
  }
  refuse(!cache.seqlens || cache.seqlens.rank() != 1,
         "cache.seqlens is missing, or has another rank than 1; expected [batch], lengths of whole "
         "sequences");
  check_devices(args, ranks.device());
  const std::int64_t batch = cache.seqlens.size(0), own = args.q.size(0);
  refuse(own != batch && own * world_size != batch,
         fmt::format("q has {} sequences; expected {}, all of cache.seqlens, or a {}th of them",
                     own, batch, world_size));
  check_extents(args.score, args.mask,
                {.batch = batch, .num_heads_q = args.q.size(2), .seqlen_q = args.q.size(1)},
                TensorChecks(""));
  if (!args.append.k) return;
  refuse(args.append.k.rank() != 4 || args.append.k.size(0) != own,
         fmt::format("append.k is {}; expected four dimensions, {} sequences as q",
                     to_string(args.append.k.spec()), own));
}

/// Partial results: of each sequence out, then lse, so that those of some sequences are one message.
class States {
 public:
  States(const Memory& memory, std::int64_t num_sequences, const TensorView& q,
         std::int64_t head_dim_v)
      : seqlen_q_(q.size(1)),
        num_heads_(q.size(2)),
        head_dim_(head_dim_v),
        rows_(memory.make(Dtype::f32, std::array{num_sequences, width()})) {}

  std::int64_t num_sequences() const { return rows_.view.size(0); }
  const OwnedTensor& rows() const { return rows_; }
  States sequences(std::int64_t begin, std::int64_t end) const {
    return with({part_of(rows_.view, 0, begin, end), rows_.memory});
  }
  /// Of as many sequences as there are rows.
  States with(const OwnedTensor& rows) const {
    States result = *this;
    result.rows_ = rows;
    return result;
  }

  TensorView out() const {
    return strided(0, {num_sequences(), seqlen_q_, num_heads_, head_dim_},
                   {width(), num_heads_ * head_dim_, head_dim_, 1});
  }
  TensorView lse() const {
    return strided(seqlen_q_ * num_heads_ * head_dim_, {num_sequences(), num_heads_, seqlen_q_},
                   {width(), seqlen_q_, 1});
  }

 private:
  /// Elements of a sequence, whole pieces of 16 bytes.
  std::int64_t width() const { return (seqlen_q_ * num_heads_ * (head_dim_ + 1) + 3) / 4 * 4; }

  TensorView strided(std::int64_t offset, std::initializer_list<std::int64_t> shape,
                     std::initializer_list<std::int64_t> strides) const {
    TensorSpec spec = make_spec(Dtype::f32, std::span(shape.begin(), shape.size()),
                                std::span(strides.begin(), strides.size()));
    spec.device = rows_.view.spec().device;
    return {static_cast<float*>(rows_.view.mutable_data()) + offset, spec};
  }

  std::int64_t seqlen_q_, num_heads_, head_dim_;
  OwnedTensor rows_;
};

/// One call on one rank.
class Decoding {
 public:
  Decoding(const AttentionDecode& args, Communicator& communicator)
      : args_(args),
        memory_(communicator.device(), args.stream),
        ranks_(communicator, memory_),
        batch_(args.cache.seqlens.size(0)),
        is_shared_out_(args.q.size(0) != batch_) {}

  void run() {
    const OwnedTensor q = of_all(args_.q);
    const OwnedTensor k = of_all(args_.append.k), v = of_all(args_.append.v);
    OwnedTensor positions, positions_q;
    if (args_.rotary) {
      positions = of_all(args_.rotary->positions);
      positions_q = args_.rotary->positions_q ? of_all(args_.rotary->positions_q) : positions;
    }
    const DecodeStep step =
        parallel::make_decode_step({.rank = ranks_.rank(),
                                    .world_size = ranks_.size(),
                                    .seqlen_q = q.view.size(1),
                                    .cache = args_.cache,
                                    .append = {.k = k.view, .v = v.view},
                                    .rotary = args_.rotary ? &*args_.rotary : nullptr,
                                    .positions_new = positions.view,
                                    .positions_q = positions_q.view,
                                    .executor = args_.executor},
                                   memory_);
    if (step.append) append_to_cache(*step.append);
    merge(from_all(attend(q.view, step)));
  }

 private:
  /// Of all sequences, in their order.
  OwnedTensor of_all(const TensorView& own) const {
    if (!own || !is_shared_out_) return {.view = own};
    return ranks_.gather({own}).wait()[0];
  }

  /// Over the keys that this rank has.
  States attend(const TensorView& q, const DecodeStep& step) const {
    const States partial(memory_, batch_, q, args_.cache.v.size(3));
    const PagesOfRank pages{.rank = ranks_.rank(),
                            .world_size = ranks_.size(),
                            .page_size = args_.cache.k.size(1),
                            .seqlens = step.seqlens.view};
    AttentionDecode local{.q = q, .cache = args_.cache, .out = partial.out(), .lse = partial.lse()};
    local.cache.seqlens = step.own_seqlens.view;
    if (args_.rotary) local.rotary = parallel::rotary_at(*args_.rotary, step.positions_q);
    local.score = placed(args_.score, pages);
    local.mask = placed(args_.mask, pages);
    local.softmax_scale = args_.softmax_scale;
    if (pages.rank == 0) local.sinks = args_.sinks;  // joins one state, and with it the whole
    local.cpu_target = args_.cpu_target;
    local.compute_dtype = args_.compute_dtype;
    local.sm_margin = args_.sm_margin;
    local.executor = args_.executor;
    local.stream = args_.stream;
    attention_decode(local);
    return partial;
  }

  /// What every rank has of this rank's sequences, or of all.
  std::vector<States> from_all(const States& partial) const {
    std::vector<States> result;
    if (!is_shared_out_) {
      const States all = partial.with(ranks_.gather(partial.rows()).wait()[0]);
      for (int rank = 0; rank < ranks_.size(); ++rank)
        result.push_back(all.sequences(rank * batch_, (rank + 1) * batch_));
      return result;
    }
    std::vector<Outgoing> outgoing;
    std::vector<Incoming> incoming;
    const std::int64_t own = args_.q.size(0);
    for (int peer = 0; peer < ranks_.size(); ++peer) {
      const States of_peer = partial.sequences(peer * own, (peer + 1) * own);
      if (peer == ranks_.rank()) {
        result.push_back(of_peer);
        continue;
      }
      result.push_back(
          partial.with(memory_.make_like(of_peer.rows().view, of_peer.rows().view.dtype())));
      outgoing.push_back({peer, of_peer.rows()});
      incoming.push_back({peer, result.back().rows()});
    }
    ranks_.swap(outgoing, incoming).wait();
    return result;
  }

  void merge(std::vector<States> states) const {
    // What a call cannot take at once becomes the first state of those that follow.
    while (states.size() > kMostStates) {
      const States some =
          states[0].with(memory_.make_like(states[0].rows().view, states[0].rows().view.dtype()));
      merge(std::span(states).first(kMostStates), some.out(), some.lse());
      states.erase(states.begin() + 1, states.begin() + kMostStates);
      states.front() = some;
    }
    merge(states, args_.out, args_.lse);
  }

  void merge(std::span<const States> states, const TensorView& out, const TensorView& lse) const {
    MergeStates call{.out = out, .lse = lse, .executor = args_.executor, .stream = args_.stream};
    for (const States& each : states) {
      call.outs.push_back(each.out());
      call.lses.push_back(each.lse());
    }
    merge_states(call);
  }

  static constexpr std::size_t kMostStates = 32;  // of a call of merge_states on a GPU

  const AttentionDecode& args_;
  Memory memory_;
  Ranks ranks_;
  std::int64_t batch_;
  bool is_shared_out_;  // over ranks: each has queries of some sequences
};

Facts facts_of(const AttentionDecode& args) {
  const auto said = [](const TensorView& tensor) {
    return tensor ? to_string(make_spec(tensor.dtype(), shape_of(tensor))) : "missing";
  };
  Facts facts{
      {"q", said(args.q)},
      {"out", said(args.out)},
      {"append.k", said(args.append.k)},
      {"cache.seqlens", said(args.cache.seqlens)},
      {"page_size", args.cache.k.rank() == 4 ? fmt::format("{}", args.cache.k.size(1)) : "missing"},
      {"mask", args.mask.to_string()},
      {"score", args.score.to_string()},
      {"rotary", args.rotary ? "given" : "missing"}};
  return facts;
}

}  // namespace

struct ContextParallelDecode::Impl {
  std::shared_ptr<Communicator> communicator;
  parallel::Agreement agreement{};
};

ContextParallelDecode::ContextParallelDecode(std::shared_ptr<Communicator> ranks)
    : impl_(std::make_unique<Impl>(Impl{.communicator = std::move(ranks)})) {}
ContextParallelDecode::~ContextParallelDecode() = default;
ContextParallelDecode::ContextParallelDecode(ContextParallelDecode&&) noexcept = default;
ContextParallelDecode& ContextParallelDecode::operator=(ContextParallelDecode&&) noexcept = default;

void ContextParallelDecode::run(const AttentionDecode& args) {
  std::string problem;
  try {
    check(args, *impl_->communicator);
  } catch (const Error& error) {
    problem = error.what();
  }
  impl_->agreement.reach(*impl_->communicator, kWhere, facts_of(args), problem);
  Decoding(args, *impl_->communicator).run();
}

}  // namespace fovea
