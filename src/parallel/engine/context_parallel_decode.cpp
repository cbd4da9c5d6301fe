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
#include "parallel/engine/memory.hpp"
#include "parallel/engine/places.hpp"
#include "parallel/engine/ranks.hpp"
#include "problem/forward.hpp"

namespace fovea {
namespace {

using parallel::Facts;
using parallel::Memory;
using parallel::OwnedTensor;
using parallel::PagesOfRank;
using parallel::part_of;
using parallel::Pending;
using parallel::Ranks;

constexpr std::string_view kWhere = "context_parallel_decode";

void refuse(bool condition, const std::string& message) {
  if (condition) invalid("", message);
}

void check(const AttentionDecode& args, const Communicator& ranks) {
  const KvCache& cache = args.cache;
  const int world_size = ranks.world_size();
  refuse(ranks.device() != Device::cpu(),
         fmt::format("the communicator exchanges on {}; expected one of the cpu",
                     to_string(ranks.device())));
  refuse(!cache.page_table,
         "cache.page_table is missing; expected pages, dealt over ranks in turn");
  refuse(
      cache.batch_idx || cache.left_padding || cache.page_indptr || cache.page_indices,
      "cache has slots, left padding or pages by offsets; expected page_table and seqlens alone");
  refuse(!!args.cu_seqlens_q || !!args.append.cu_seqlens,
         "q or append is packed; expected as many tokens of every sequence");
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
    refuse(tensor->spec().device != Device::cpu(),
           fmt::format("{} lives on {}; expected the cpu", name, to_string(tensor->spec().device)));
  }
  refuse(!cache.seqlens || cache.seqlens.rank() != 1,
         "cache.seqlens is missing, or has another rank than 1; expected [batch], lengths of whole "
         "sequences");
  const std::int64_t batch = cache.seqlens.size(0), own = args.q.size(0);
  refuse(own != batch && own * world_size != batch,
         fmt::format("q has {} sequences; expected {}, all of cache.seqlens, or a {}th of them",
                     own, batch, world_size));
  if (!args.append.k) return;
  refuse(args.append.k.rank() != 4 || args.append.k.size(0) != own,
         fmt::format("append.k is {}; expected four dimensions, {} sequences as q",
                     to_string(args.append.k.spec()), own));
}

std::int64_t index_at(const TensorView& ids, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * ids.stride(0) + column * ids.stride(1);
  return ids.dtype() == Dtype::i32 ? static_cast<const std::int32_t*>(ids.data())[at]
                                   : static_cast<const std::int64_t*>(ids.data())[at];
}

std::int32_t as_int(std::int64_t value) { return static_cast<std::int32_t>(value); }

/// One call on one rank.
class Decoding {
 public:
  Decoding(const AttentionDecode& args, Communicator& communicator)
      : args_(args),
        memory_(Device::cpu(), args.stream),
        ranks_(communicator, memory_),
        batch_(args.cache.seqlens.size(0)),
        is_shared_out_(args.q.size(0) != batch_),
        num_new_(args.append.k ? args.append.k.size(1) : 0) {
    std::vector<std::int32_t> before, whole, after;
    pages_ = {
        .rank = ranks_.rank(), .world_size = ranks_.size(), .page_size = args.cache.k.size(1)};
    for (std::int64_t b = 0; b < batch_; ++b) {
      seqlens_.push_back(cu_seqlen(args.cache.seqlens, b));
      before.push_back(as_int(pages_.own(seqlens_.back())));
      whole.push_back(as_int(seqlens_.back() + num_new_));
      after.push_back(as_int(pages_.own(seqlens_.back() + num_new_)));
    }
    before_ = memory_.of_values(before);
    whole_ = memory_.of_values(whole);
    after_ = memory_.of_values(after);
    pages_.seqlens = whole_.view;
  }

  void run() {
    if (args_.append.k) append();
    const OwnedTensor q = of_all(args_.q);
    std::vector<std::int64_t> shape = parallel::shape_with_tokens(q.view, batch_);
    shape[3] = args_.cache.v.size(3);
    const OwnedTensor out = memory_.make(Dtype::f32, shape);
    const OwnedTensor lse = memory_.make(Dtype::f32, std::array{batch_, shape[2], shape[1]});
    attend(q.view, out.view, lse.view);
    merge(out.view, lse.view);
  }

 private:
  /// Of all sequences, in their order.
  OwnedTensor of_all(const TensorView& own) const {
    if (!is_shared_out_) return {.view = own};
    return ranks_.gather(own).wait()[0];
  }

  /// Positions that the caller gives for a rank's sequences, or for all.
  OwnedTensor positions_of_all(const TensorView& given) const {
    return given ? of_all(given) : OwnedTensor{};
  }

  /// New tokens whose pages are this rank's, packed.
  void append() {
    const OwnedTensor k = of_all(args_.append.k);
    const OwnedTensor v = args_.append.v ? of_all(args_.append.v) : OwnedTensor{};
    OwnedTensor given;
    if (args_.rotary) given = positions_of_all(args_.rotary->positions);
    std::vector<std::array<std::int64_t, 2>> own;  // sequence, token
    std::vector<std::int32_t> begins{0}, positions;
    for (std::int64_t b = 0; b < batch_; ++b) {
      for (std::int64_t i = 0; i < num_new_; ++i) {
        const std::int64_t kv_idx = seqlens_[static_cast<std::size_t>(b)] + i;
        if (pages_.rank_of(kv_idx) != pages_.rank) continue;
        own.push_back({b, i});
        positions.push_back(as_int(given.view ? index_at(given.view, b, i) : kv_idx));
      }
      begins.push_back(as_int(static_cast<std::int64_t>(own.size())));
    }
    if (own.empty()) return;
    const OwnedTensor own_k = packed(k.view, own), own_v = packed(v.view, own);
    const OwnedTensor cu_seqlens = memory_.of_values(begins), places = memory_.of_values(positions);
    AppendToCache call{.cache = own_cache(before_.view),
                       .append = {.k = own_k.view, .v = own_v.view, .cu_seqlens = cu_seqlens.view},
                       .executor = args_.executor,
                       .stream = args_.stream};
    if (args_.rotary) call.rotary = turning(places.view);
    append_to_cache(call);
  }

  OwnedTensor packed(const TensorView& x,
                     std::span<const std::array<std::int64_t, 2>> tokens) const {
    if (!x) return {};
    OwnedTensor result = memory_.make(
        x.dtype(), std::array{static_cast<std::int64_t>(tokens.size()), x.size(2), x.size(3)});
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      const auto [sequence, token] = tokens[row];
      const auto at = static_cast<std::int64_t>(row);
      const TensorView from = part_of(part_of(x, 0, sequence, sequence + 1), 1, token, token + 1);
      TensorSpec spec = from.spec();  // [1, 1, heads, head_dim], of one row of the result
      spec = make_spec(x.dtype(), shape_of(spec));
      memory_.copy({part_of(result.view, 0, at, at + 1).mutable_data(), spec}, from);
    }
    return result;
  }

  KvCache own_cache(const TensorView& seqlens) const {
    KvCache cache = args_.cache;
    cache.seqlens = seqlens;
    return cache;
  }
  Rotary turning(const TensorView& positions) const {
    return {.cos = args_.rotary->cos,
            .sin = args_.rotary->sin,
            .is_interleaved = args_.rotary->is_interleaved,
            .positions = positions};
  }

  /// [batch, seqlen_q]: where queries stand in whole sequences.
  OwnedTensor positions_of_queries(std::int64_t seqlen_q) const {
    const Rotary& rotary = *args_.rotary;
    const OwnedTensor given =
        positions_of_all(rotary.positions_q ? rotary.positions_q : rotary.positions);
    std::vector<std::int32_t> positions;
    for (std::int64_t b = 0; b < batch_; ++b) {
      const std::int64_t first = seqlens_[static_cast<std::size_t>(b)] + num_new_ - seqlen_q;
      for (std::int64_t i = 0; i < seqlen_q; ++i)
        positions.push_back(as_int(given.view ? index_at(given.view, b, i) : first + i));
    }
    OwnedTensor result = memory_.of_values(positions);
    result.view = {result.view.data(), make_spec(Dtype::i32, std::array{batch_, seqlen_q})};
    return result;
  }

  void attend(const TensorView& q, const TensorView& out, const TensorView& lse) {
    AttentionDecode local{.q = q, .cache = own_cache(after_.view), .out = out, .lse = lse};
    OwnedTensor positions;
    if (args_.rotary) {
      positions = positions_of_queries(q.size(1));
      local.rotary = turning(positions.view);
    }
    local.score = placed(args_.score, pages_);
    local.mask = placed(args_.mask, pages_);
    local.softmax_scale = args_.softmax_scale;
    if (pages_.rank == 0) local.sinks = args_.sinks;  // joins one state, and with it the whole
    local.cpu_target = args_.cpu_target;
    local.compute_dtype = args_.compute_dtype;
    local.executor = args_.executor;
    local.stream = args_.stream;
    attention_decode(local);
  }

  void merge(const TensorView& out, const TensorView& lse) const {
    MergeStates merge{
        .out = args_.out, .lse = args_.lse, .executor = args_.executor, .stream = args_.stream};
    std::vector<OwnedTensor> kept;
    for (const auto& [partial, states] : {std::pair{&out, &merge.outs}, {&lse, &merge.lses}}) {
      const std::vector<OwnedTensor> arrived = from_all(*partial);
      for (const OwnedTensor& state : arrived) states->push_back(state.view);
      kept.insert(kept.end(), arrived.begin(), arrived.end());
    }
    merge_states(merge);
  }

  /// What every rank has of this rank's sequences, or of all.
  std::vector<OwnedTensor> from_all(const TensorView& partial) const {
    const std::int64_t own = args_.q.size(0);
    std::vector<parallel::Outgoing> outgoing;
    std::vector<parallel::Incoming> incoming;
    for (int peer = 0; peer < ranks_.size(); ++peer) {
      const std::int64_t first = is_shared_out_ ? peer * own : 0;
      outgoing.push_back({peer, part_of(partial, 0, first, first + own)});
      incoming.push_back({peer, parallel::shape_with_tokens(partial, own)});
    }
    return ranks_.swap(outgoing, incoming, Dtype::f32).wait();
  }

  const AttentionDecode& args_;
  Memory memory_;
  Ranks ranks_;
  std::int64_t batch_;
  bool is_shared_out_;  // over ranks: each has queries of some sequences
  std::int64_t num_new_;
  PagesOfRank pages_{};
  std::vector<std::int64_t> seqlens_;  // of whole sequences, before new tokens
  OwnedTensor before_, whole_, after_;
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
