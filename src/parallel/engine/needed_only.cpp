// needed_only: the tiles of keys that a rank's rows see; sums of their gradients go back to those who have them.
#include <array>
#include <cstddef>
#include <functional>
#include <span>

#include "parallel/engine/engine.hpp"

namespace fovea::parallel {
namespace {

/// Where these ranges of the sequence stand in a list of ranges that holds them: both ascending.
std::vector<TokenRange> places_within(std::span<const TokenRange> list,
                                      std::span<const TokenRange> ranges) {
  std::vector<TokenRange> result;
  std::int64_t at = 0;
  std::size_t next = 0;
  for (const TokenRange& whole : list) {
    for (; next < ranges.size() && ranges[next].end <= whole.end; ++next) {
      result.push_back(
          {at + ranges[next].begin - whole.begin, at + ranges[next].end - whole.begin});
    }
    at += whole.size();
  }
  return result;
}

class NeededOnlyEngine : public Engine {
 public:
  NeededOnlyEngine(const ShardPlan::Impl& plan, int rank, const Memory& memory)
      : plan_(plan),
        rank_(rank),
        needs_(plan.group_needs[static_cast<std::size_t>(rank)]),
        own_(places_of(tokens(rank), memory)),
        needed_(places_of(needs_, memory)) {}

  void forward(const EngineCall& call) override {
    const Fetched fetched = fetch(call);
    attend(call, call.rows, {fetched.k.view, fetched.v.view}, part());
  }

  void backward(const EngineCall& call, const EngineGradients& made) override {
    const Fetched fetched = fetch(call);
    const OwnedTensor dk = call.memory.make_like(fetched.k.view, Dtype::f32);
    const OwnedTensor dv = call.memory.make_like(fetched.v.view, Dtype::f32);
    CapturedSums captured(call.memory, made.dcaptured);
    differentiate(call, call.rows, {fetched.k.view, fetched.v.view}, part(),
                  {.dq = made.dq,
                   .dk = dk.view,
                   .dv = dv.view,
                   .dsinks = made.dsinks,
                   .dcaptured = captured.next()});
    captured.write();
    Pending dk_home = returned(call, dk.view), dv_home = returned(call, dv.view);
    write(call, dk_home.wait(), made.dk);
    write(call, dv_home.wait(), made.dv);
  }

 private:
  struct Fetched {
    OwnedTensor k{}, v{};  // in the order of the sequence
  };

  std::span<const TokenRange> tokens(int rank) const {
    return plan_.rank_tokens[static_cast<std::size_t>(rank)];
  }
  std::span<const TokenRange> needs(int rank) const {
    return plan_.group_needs[static_cast<std::size_t>(rank)];
  }

  LocalPart part() const {
    return {.q = own_.places,
            .kv = needed_.places,
            .heads = {{0, plan_.shape.num_heads_q}, {0, plan_.shape.num_heads_kv}}};
  }

  Fetched fetch(const EngineCall& call) const {
    Pending k = asked(call, call.keys.k), v = asked(call, call.keys.v);
    return {in_order(call, k.wait(), call.keys.k), in_order(call, v.wait(), call.keys.v)};
  }

  /// What of this tensor's tokens, in the order of `list`, stands in `ranges`, row-major.
  static OwnedTensor gathered(const Memory& memory, const TensorView& x,
                              std::span<const TokenRange> list,
                              std::span<const TokenRange> ranges) {
    OwnedTensor result = memory.make(x.dtype(), shape_with_tokens(x, num_tokens(ranges)));
    std::int64_t at = 0;
    for (const TokenRange& range : places_within(list, ranges)) {
      memory.copy(tokens_of(result.view, {at, at + range.size()}), tokens_of(x, range));
      at += range.size();
    }
    return result;
  }

  /// The way back: what `gathered` made stands in `to` again.
  static void put(const Memory& memory, const TensorView& to, std::span<const TokenRange> list,
                  std::span<const TokenRange> ranges, const OwnedTensor& from) {
    std::int64_t at = 0;
    for (const TokenRange& range : places_within(list, ranges)) {
      memory.copy(tokens_of(to, range), tokens_of(from.view, {at, at + range.size()}));
      at += range.size();
    }
  }

  using RangesOfPeer = std::function<std::vector<TokenRange>(int peer)>;

  /// Of x, whose tokens are those of `list`: to each rank what it is to have, from each what this one is.
  Pending exchanged(const EngineCall& call, const TensorView& x, std::span<const TokenRange> list,
                    const RangesOfPeer& sent, const RangesOfPeer& received) const {
    std::vector<OwnedTensor> kept;
    std::vector<Outgoing> outgoing;
    std::vector<Incoming> incoming;
    for (int peer = 0; peer < plan_.world_size; ++peer) {
      kept.push_back(gathered(call.memory, x, list, sent(peer)));
      outgoing.push_back({peer, kept.back().view});
      incoming.push_back({peer, shape_with_tokens(x, num_tokens(received(peer)))});
    }
    return call.ranks.swap(outgoing, incoming, x.dtype());
  }

  std::vector<TokenRange> from_peer(int peer) const { return intersection(needs_, tokens(peer)); }
  std::vector<TokenRange> to_peer(int peer) const {
    return intersection(needs(peer), tokens(rank_));
  }

  Pending asked(const EngineCall& call, const TensorView& own) const {
    return exchanged(
        call, own, tokens(rank_), [&](int peer) { return to_peer(peer); },
        [&](int peer) { return from_peer(peer); });
  }

  /// Sends every rank what this one has for its tokens.
  Pending returned(const EngineCall& call, const TensorView& sums) const {
    return exchanged(
        call, sums, needs_, [&](int peer) { return from_peer(peer); },
        [&](int peer) { return to_peer(peer); });
  }

  OwnedTensor in_order(const EngineCall& call, const std::vector<OwnedTensor>& by_rank,
                       const TensorView& like) const {
    OwnedTensor result =
        call.memory.make(like.dtype(), shape_with_tokens(like, num_tokens(needs_)));
    for (int peer = 0; peer < plan_.world_size; ++peer)
      put(call.memory, result.view, needs_, from_peer(peer),
          by_rank[static_cast<std::size_t>(peer)]);
    return result;
  }

  /// The sum of what every rank has for this rank's tokens, in the order of ranks.
  void write(const EngineCall& call, const std::vector<OwnedTensor>& by_rank,
             const TensorView& written) const {
    if (!written) return;
    std::vector<OwnedTensor> spread;
    std::vector<TensorView> parts;
    for (int peer = 0; peer < plan_.world_size; ++peer) {
      spread.push_back(call.memory.make_like(written, Dtype::f32));
      call.memory.sum(spread.back().view, {});
      put(call.memory, spread.back().view, tokens(rank_), to_peer(peer),
          by_rank[static_cast<std::size_t>(peer)]);
      parts.push_back(spread.back().view);
    }
    call.memory.sum(written, parts);
  }

  const ShardPlan::Impl& plan_;
  int rank_;
  std::span<const TokenRange> needs_;
  OwnedPlaces own_, needed_;
};

}  // namespace

std::unique_ptr<Engine> make_needed_only_engine(const ShardPlan::Impl& plan, int rank,
                                                const Memory& memory) {
  return std::make_unique<NeededOnlyEngine>(plan, rank, memory);
}

}  // namespace fovea::parallel
