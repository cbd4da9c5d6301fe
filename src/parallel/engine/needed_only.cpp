// needed_only: the tiles of keys that a rank's rows see; sums of their gradients go back to those who have them.
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/shape.hpp"
#include "parallel/engine/engine.hpp"

namespace fovea::parallel {
namespace {

constexpr std::int32_t kNowhere = -1;

/// Keys and values of some tokens, or what is told of them, side by side: one message to each rank.
struct Joint {
  OwnedTensor rows{};  // [tokens, elements of a token]
  TensorView k{}, v{};
};

Joint make_joint(const Memory& memory, const TensorView& k, const TensorView& v,
                 std::int64_t num_tokens) {
  const auto elements_of = [](const TensorView& x) { return x.size(1) * x.size(2) * x.size(3); };
  const std::int64_t of_k = elements_of(k), width = of_k + elements_of(v);
  Joint joint{.rows = memory.make(k.dtype(), std::array{num_tokens, width})};
  const auto columns = [&](const TensorView& like, std::int64_t begin) {
    const TensorView all = part_of(joint.rows.view, 1, begin, begin + elements_of(like));
    TensorSpec spec = make_spec(like.dtype(), shape_with_tokens(like, num_tokens));
    spec.strides[0] = width;
    spec.device = memory.device();
    return TensorView(all.mutable_data(), spec);
  };
  joint.k = columns(k, 0);
  joint.v = columns(v, of_k);
  return joint;
}

/// Tokens that travel between this rank and others: of each peer some of a joint tensor's.
class Route {
 public:
  void add(int peer, std::int64_t num_tokens) {
    if (num_tokens == 0) return;
    stops_.push_back({peer, {num_tokens_, num_tokens_ + num_tokens}});
    num_tokens_ += num_tokens;
  }
  std::int64_t num_tokens() const { return num_tokens_; }

  std::vector<Outgoing> outgoing(const Joint& joint) const {
    std::vector<Outgoing> result;
    for (const Stop& stop : stops_) result.push_back({stop.peer, part(joint, stop)});
    return result;
  }
  std::vector<Incoming> incoming(const Joint& joint) const {
    std::vector<Incoming> result;
    for (const Stop& stop : stops_) result.push_back({stop.peer, part(joint, stop)});
    return result;
  }

 private:
  struct Stop {
    int peer = 0;
    TokenRange tokens{};
  };
  static OwnedTensor part(const Joint& joint, const Stop& stop) {
    return {tokens_of(joint.rows.view, stop.tokens), joint.rows.memory};
  }

  std::vector<Stop> stops_{};
  std::int64_t num_tokens_ = 0;
};

/// Tables that say where what a rank has, sends and receives stands: all copies and sums are a kernel with one.
class NeededOnlyEngine : public Engine {
 public:
  NeededOnlyEngine(const ShardPlan::Impl& plan, int rank, const Memory& memory)
      : plan_(plan),
        own_(places_of(tokens(rank), memory)),
        needed_(places_of(needs(rank), memory)) {
    const std::vector<std::int32_t> own = indices(tokens(rank)), needed = indices(needs(rank));
    num_needed_ = static_cast<std::int64_t>(needed.size());
    // For each key that is needed: its place among a rank's own, or among those that arrive.
    const std::vector<std::int32_t> in_own = index_in(own), in_needed = index_in(needed);
    std::vector<std::int32_t> kept, arrived(needed.size(), kNowhere), sent, returned;
    for (const std::int32_t token : needed) kept.push_back(in_own[at(token)]);
    for (int peer = 0; peer < plan.world_size; ++peer) {
      std::vector<std::int32_t> home(own.size(),
                                     kNowhere);  // where its sums of this rank's keys arrive
      const std::vector<std::int32_t> asked = indices(intersection(needs(peer), tokens(rank)));
      if (peer == rank) {
        for (const std::int32_t token : asked) home[at(in_own[at(token)])] = in_needed[at(token)];
      } else {
        for (const std::int32_t token : indices(intersection(needs(rank), tokens(peer)))) {
          arrived[at(in_needed[at(token)])] = static_cast<std::int32_t>(returned.size());
          returned.push_back(in_needed[at(token)]);
        }
        for (const std::int32_t token : asked) {
          home[at(in_own[at(token)])] = static_cast<std::int32_t>(sent.size());
          sent.push_back(in_own[at(token)]);
        }
        arriving_.add(peer, static_cast<std::int64_t>(returned.size()) - arriving_.num_tokens());
        leaving_.add(peer, static_cast<std::int64_t>(sent.size()) - leaving_.num_tokens());
      }
      if (!asked.empty()) homes_.push_back({peer == rank, memory.of_values(home)});
    }
    kept_ = memory.of_values(kept);
    arrived_ = memory.of_values(arrived);
    sent_ = memory.of_values(sent);
    returned_ = memory.of_values(returned);
  }

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
    const Joint sums = returned_sums(call, dk.view, dv.view);
    write(call, dk.view, sums.k, made.dk);
    write(call, dv.view, sums.v, made.dv);
  }

 private:
  struct Fetched {
    OwnedTensor k{}, v{};  // in the order of the sequence
  };
  /// Where sums of a rank for each of this rank's keys are: in what arrives, or in this rank's own.
  struct Home {
    bool is_own = false;
    OwnedTensor places{};
  };

  static std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }
  static std::vector<std::int32_t> indices(std::span<const TokenRange> ranges) {
    std::vector<std::int32_t> result;
    append_tokens(result, ranges);
    return result;
  }
  /// Of every token of the sequence.
  std::vector<std::int32_t> index_in(std::span<const std::int32_t> tokens) const {
    std::vector<std::int32_t> result(static_cast<std::size_t>(plan_.shape.seqlen), kNowhere);
    for (std::size_t i = 0; i < tokens.size(); ++i)
      result[at(tokens[i])] = static_cast<std::int32_t>(i);
    return result;
  }

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
    const auto& [k, v] = call.keys;
    const Joint sent = make_joint(call.memory, k, v, leaving_.num_tokens());
    call.memory.sum(sent.k, std::array{PlacedPart{k, sent_.view}});
    call.memory.sum(sent.v, std::array{PlacedPart{v, sent_.view}});
    const Joint received = make_joint(call.memory, k, v, arriving_.num_tokens());
    call.ranks.swap(leaving_.outgoing(sent), arriving_.incoming(received)).wait();
    return {in_order(call, k, received.k), in_order(call, v, received.v)};
  }

  OwnedTensor in_order(const EngineCall& call, const TensorView& own,
                       const TensorView& received) const {
    OwnedTensor result = call.memory.make(own.dtype(), shape_with_tokens(own, num_needed_));
    call.memory.sum(result.view,
                    std::array{PlacedPart{own, kept_.view}, PlacedPart{received, arrived_.view}});
    return result;
  }

  /// Sends every rank what this one has for its tokens.
  Joint returned_sums(const EngineCall& call, const TensorView& dk, const TensorView& dv) const {
    const Joint sent = make_joint(call.memory, dk, dv, arriving_.num_tokens());
    call.memory.sum(sent.k, std::array{PlacedPart{dk, returned_.view}});
    call.memory.sum(sent.v, std::array{PlacedPart{dv, returned_.view}});
    Joint received = make_joint(call.memory, dk, dv, leaving_.num_tokens());
    call.ranks.swap(arriving_.outgoing(sent), leaving_.incoming(received)).wait();
    return received;
  }

  /// The sum of what every rank has for this rank's tokens, in the order of ranks.
  void write(const EngineCall& call, const TensorView& own, const TensorView& received,
             const TensorView& written) const {
    if (!written) return;
    std::vector<PlacedPart> parts;
    for (const Home& home : homes_)
      parts.push_back({home.is_own ? own : received, home.places.view});
    call.memory.sum(written, parts);
  }

  const ShardPlan::Impl& plan_;
  OwnedPlaces own_, needed_;
  std::int64_t num_needed_ = 0;
  Route leaving_{}, arriving_{};  // keys that others need of this rank's, and those that it needs
  OwnedTensor kept_{}, arrived_{};
  OwnedTensor sent_{}, returned_{};  // among this rank's own, and among those that it needs
  std::vector<Home> homes_{};        // of ranks that need some of its keys
};

}  // namespace

std::unique_ptr<Engine> make_needed_only_engine(const ShardPlan::Impl& plan, int rank,
                                                const Memory& memory) {
  return std::make_unique<NeededOnlyEngine>(plan, rank, memory);
}

}  // namespace fovea::parallel
