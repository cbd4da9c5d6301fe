// ulysses, ring and hybrid: ranks of a group exchange tokens for heads, keys travel from group to group.
//
// A ring has groups of one rank, ulysses one group. Keys of a group are those of its tokens, of this rank's heads.
#include <array>
#include <cstddef>
#include <optional>
#include <span>

#include "fovea/state.hpp"

#include "core/shape.hpp"
#include "parallel/engine/engine.hpp"

namespace fovea::parallel {
namespace {

enum class HeadsOf : std::uint8_t { q, kv };

class HeadsAndRingEngine : public Engine {
 public:
  HeadsAndRingEngine(const ShardPlan::Impl& plan, int rank, const Memory& memory)
      : plan_(plan), rank_(rank), heads_{q_heads_of(plan, rank), kv_heads_of(plan, rank)} {
    for (const std::vector<TokenRange>& rows : plan.group_rows)
      places_.push_back(places_of(rows, memory));
  }

  void forward(const EngineCall& call) override {
    const OwnedTensor q = to_heads(call, call.rows.q, HeadsOf::q);
    OwnedTensor k = to_heads(call, call.keys.k, HeadsOf::kv);
    OwnedTensor v = to_heads(call, call.keys.v, HeadsOf::kv);
    std::optional<State> state;
    for (int step = 0; step < num_groups(); ++step) {
      const bool is_last = step + 1 == num_groups();
      std::vector<Pending> arriving;
      if (!is_last) arriving = passed_on(call, std::array{k, v});
      State made = empty_state(call, q.view, num_groups() == 1);
      attend(
          call,
          {.q = q.view, .out = made.out.view, .lse = made.lse.view, .row_max = made.row_max.view},
          {k.view, v.view}, part(step));
      state = state ? merged(call, *state, made, is_last) : std::move(made);
      if (!is_last) {
        k = arriving[0].wait()[0];
        v = arriving[1].wait()[0];
      }
    }
    call.memory.copy(call.rows.out, to_tokens(call, state->out, HeadsOf::q).view);
    call.memory.copy(call.rows.lse, to_tokens(call, state->lse, HeadsOf::q).view);
    if (call.rows.row_max)
      call.memory.copy(call.rows.row_max, to_tokens(call, state->row_max, HeadsOf::q).view);
  }

  void backward(const EngineCall& call, const EngineGradients& made) override {
    const OwnedTensor q = to_heads(call, call.rows.q, HeadsOf::q);
    const OwnedTensor out = to_heads(call, call.rows.out, HeadsOf::q);
    const OwnedTensor lse = to_heads(call, call.rows.lse, HeadsOf::q);
    const OwnedTensor dout = to_heads(call, call.rows.dout, HeadsOf::q);
    Rows rows{.q = q.view, .out = out.view, .lse = lse.view, .dout = dout.view};
    OwnedTensor dlse;
    if (call.rows.dlse) {
      dlse = to_heads(call, call.rows.dlse, HeadsOf::q);
      rows.dlse = dlse.view;
    }
    OwnedTensor k = to_heads(call, call.keys.k, HeadsOf::kv);
    OwnedTensor v = to_heads(call, call.keys.v, HeadsOf::kv);
    CapturedSums captured(call.memory, made.dcaptured);
    if (made.dsinks)  // 0 of heads of other ranks
      call.memory.sum(made.dsinks, std::span<const TensorView>());
    OwnedTensor dq, dk, dv;
    for (int step = 0; step < num_groups(); ++step) {
      const bool is_last = step + 1 == num_groups();
      std::vector<Pending> arriving;
      if (!is_last) arriving = passed_on(call, std::array{k, v});
      const std::array own{sums_like(call, q), sums_like(call, k), sums_like(call, v)};
      differentiate(call, rows, {k.view, v.view}, part(step),
                    {.dq = own[0].view,
                     .dk = own[1].view,
                     .dv = own[2].view,
                     .dsinks = step == 0 ? made.dsinks : TensorView{},
                     .dcaptured = captured.next()});
      dq = added(call, dq, own[0]);
      dk = added(call, dk, own[1]);
      dv = added(call, dv, own[2]);
      if (num_groups() > 1) {  // sums travel with their keys and one step more, home
        std::vector<Pending> sums = passed_on(call, std::array{dk, dv});
        dk = sums[0].wait()[0];
        dv = sums[1].wait()[0];
      }
      if (!is_last) {
        k = arriving[0].wait()[0];
        v = arriving[1].wait()[0];
      }
    }
    captured.write();
    write(call, dq, HeadsOf::q, made.dq);
    write(call, dk, HeadsOf::kv, made.dk);
    write(call, dv, HeadsOf::kv, made.dv);
  }

 private:
  struct State {
    OwnedTensor out{}, lse{};
    OwnedTensor row_max{};  // where the call wants it
  };

  int num_groups() const { return plan_.num_groups(); }
  int first_partner() const { return plan_.group(rank_) * plan_.head_ranks; }
  HeadRange heads_of_rank(int rank, HeadsOf which) const {
    return which == HeadsOf::q ? q_heads_of(plan_, rank) : kv_heads_of(plan_, rank);
  }

  LocalPart part(int step) const {
    const auto group = static_cast<std::size_t>(plan_.group(rank_));
    const auto origin =
        static_cast<std::size_t>((plan_.group(rank_) - step + num_groups()) % num_groups());
    return {.q = places_[group].places,
            .kv = places_[origin].places,
            .heads = heads_,
            .has_sinks = step == 0};
  }

  // ---- Tokens for heads, and back ----

  /// [own tokens, batch, all heads, ...] to [tokens of the group, batch, this rank's heads, ...].
  OwnedTensor to_heads(const EngineCall& call, const TensorView& x, HeadsOf which) const {
    if (plan_.head_ranks == 1) return {.view = x};
    std::vector<Outgoing> outgoing;
    std::vector<Incoming> incoming;
    const OwnedTensor result = call.memory.make(
        x.dtype(), shape_of_heads(x, x.size(0) * plan_.head_ranks, heads_of_rank(rank_, which)));
    for (int i = 0; i < plan_.head_ranks; ++i) {
      const int peer = first_partner() + i;
      const TensorView sent = parallel::heads_of(x, heads_of_rank(peer, which));
      const TensorView place = tokens_of(result.view, {i * x.size(0), (i + 1) * x.size(0)});
      if (peer == rank_) {
        call.memory.copy(place, sent);
      } else {
        outgoing.push_back({peer, {sent}});
        incoming.push_back({peer, {place, result.memory}});
      }
    }
    call.ranks.swap(outgoing, incoming).wait();
    return result;
  }

  /// The way back of each partner's heads of this rank's tokens, in the order of partners.
  std::vector<OwnedTensor> from_heads(const EngineCall& call, const OwnedTensor& x,
                                      HeadsOf which) const {
    const std::int64_t num_own = x.view.size(0) / plan_.head_ranks;
    std::vector<Outgoing> outgoing;
    std::vector<Incoming> incoming;
    std::vector<OwnedTensor> parts;
    for (int i = 0; i < plan_.head_ranks; ++i) {
      const int peer = first_partner() + i;
      const OwnedTensor sent{tokens_of(x.view, {i * num_own, (i + 1) * num_own}), x.memory};
      if (peer == rank_) {
        parts.push_back(sent);
      } else {
        parts.push_back(call.memory.make(
            x.view.dtype(), shape_of_heads(x.view, num_own, heads_of_rank(peer, which))));
        outgoing.push_back({peer, sent});
        incoming.push_back({peer, parts.back()});
      }
    }
    call.ranks.swap(outgoing, incoming).wait();
    return parts;
  }

  /// Of query heads, each of which one rank has.
  OwnedTensor to_tokens(const EngineCall& call, const OwnedTensor& x, HeadsOf which) const {
    if (plan_.head_ranks == 1) return x;
    const std::vector<OwnedTensor> parts = from_heads(call, x, which);
    OwnedTensor result = call.memory.make(
        x.view.dtype(),
        shape_of_heads(x.view, x.view.size(0) / plan_.head_ranks, {0, plan_.shape.num_heads_q}));
    for (int i = 0; i < plan_.head_ranks; ++i) {
      const HeadRange heads = heads_of_rank(first_partner() + i, which);
      call.memory.copy(parallel::heads_of(result.view, heads),
                       parts[static_cast<std::size_t>(i)].view);
    }
    return result;
  }

  /// Sums of gradients, home to their tokens; a kv head that several ranks computed with is summed, in their order.
  void write(const EngineCall& call, const OwnedTensor& sums, HeadsOf which,
             const TensorView& written) const {
    std::vector<OwnedTensor> by_partner{sums};
    if (plan_.head_ranks > 1) by_partner = from_heads(call, sums, which);
    if (!written) return;
    for (std::int64_t head = 0; head < written.size(2); ++head) {
      std::vector<TensorView> parts;
      for (int i = 0; i < plan_.head_ranks; ++i) {
        const HeadRange heads = heads_of_rank(first_partner() + i, which);
        if (head < heads.begin || head >= heads.end) continue;
        const TensorView& all = by_partner[static_cast<std::size_t>(i)].view;
        parts.push_back(parallel::heads_of(all, {head - heads.begin, head - heads.begin + 1}));
      }
      call.memory.sum(parallel::heads_of(written, {head, head + 1}), parts);
    }
  }

  static std::vector<std::int64_t> shape_of_heads(const TensorView& like, std::int64_t num_tokens,
                                                  const HeadRange& heads) {
    std::vector<std::int64_t> shape = shape_with_tokens(like, num_tokens);
    shape[2] = heads.size();
    return shape;
  }

  // ---- The ring ----

  /// To the next group, from the one before.
  std::vector<Pending> passed_on(const EngineCall& call,
                                 std::span<const OwnedTensor> tensors) const {
    const auto neighbour = [&](int step) {
      return (plan_.group(rank_) + step + num_groups()) % num_groups() * plan_.head_ranks +
             plan_.part(rank_);
    };
    std::vector<Pending> result;
    for (const OwnedTensor& tensor : tensors) {
      const OwnedTensor arriving = call.memory.make_like(tensor.view, tensor.view.dtype());
      result.push_back(call.ranks.swap(std::array{Outgoing{neighbour(1), tensor}},
                                       std::array{Incoming{neighbour(-1), arriving}}));
    }
    return result;
  }

  /// Partial results are rounded once, at the end.
  State empty_state(const EngineCall& call, const TensorView& q, bool is_rounded) const {
    std::vector<std::int64_t> shape = shape_with_tokens(q, q.size(0));
    shape[3] = plan_.shape.head_dim_v;
    const Dtype dtype = is_rounded ? call.rows.out.dtype() : Dtype::f32;
    OwnedTensor out = call.memory.make(dtype, shape);
    shape.pop_back();
    State state{.out = std::move(out), .lse = call.memory.make(Dtype::f32, shape)};
    if (call.rows.row_max) state.row_max = call.memory.make(Dtype::f32, shape);
    return state;
  }

  State merged(const EngineCall& call, const State& before, const State& made,
               bool is_rounded) const {
    State result = empty_state(call, before.out.view, is_rounded);
    merge_states({.outs = {turned(before.out.view), turned(made.out.view)},
                  .lses = {lse_of_call(before.lse.view), lse_of_call(made.lse.view)},
                  .out = turned(result.out.view),
                  .lse = lse_of_call(result.lse.view),
                  .executor = call.args.executor,
                  .stream = call.args.stream});
    if (call.rows.row_max)
      call.memory.largest(result.row_max.view, std::array{before.row_max.view, made.row_max.view});
    return result;
  }

  static OwnedTensor sums_like(const EngineCall& call, const OwnedTensor& x) {
    return call.memory.make_like(x.view, Dtype::f32);
  }
  static OwnedTensor added(const EngineCall& call, const OwnedTensor& before,
                           const OwnedTensor& made) {
    if (before.memory == nullptr) return made;
    OwnedTensor result = sums_like(call, made);
    call.memory.sum(result.view, std::array{before.view, made.view});
    return result;
  }

  const ShardPlan::Impl& plan_;
  int rank_;
  Heads heads_;
  std::vector<OwnedPlaces> places_;  // of each group's rows
};

}  // namespace

std::unique_ptr<Engine> make_heads_and_ring_engine(const ShardPlan::Impl& plan, int rank,
                                                   const Memory& memory) {
  return std::make_unique<HeadsAndRingEngine>(plan, rank, memory);
}

}  // namespace fovea::parallel
