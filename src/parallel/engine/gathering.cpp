// all_gather and head_group_all_gather: whole keys, in parts of the heads, each attended to while the next one arrives.
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "parallel/engine/engine.hpp"

namespace fovea::parallel {
namespace {

class GatheringEngine : public Engine {
 public:
  GatheringEngine(const ShardPlan::Impl& plan, int rank, const Memory& memory)
      : plan_(plan), own_(places_of(plan.rank_tokens[static_cast<std::size_t>(rank)], memory)) {
    std::vector<std::int32_t> permutation;
    for (const std::vector<TokenRange>& ranges : plan.rank_tokens)
      append_tokens(permutation, ranges);
    std::vector<std::int32_t> inverse(permutation.size());
    for (std::size_t i = 0; i < permutation.size(); ++i)
      inverse[static_cast<std::size_t>(permutation[i])] = static_cast<std::int32_t>(i);
    permutation_ = memory.of_values(permutation);
    inverse_ = memory.of_values(inverse);
  }

  void forward(const EngineCall& call) override {
    for_each_part(call, [&](const Heads& heads, const Keys& keys) {
      Rows rows{.q = heads_of(call.rows.q, heads.q),
                .out = heads_of(call.rows.out, heads.q),
                .lse = heads_of(call.rows.lse, heads.q)};
      if (call.rows.row_max) rows.row_max = heads_of(call.rows.row_max, heads.q);
      attend(call, rows, keys, {.q = own_.places, .heads = heads});
    });
  }

  void backward(const EngineCall& call, const EngineGradients& made) override {
    CapturedSums captured(call.memory, made.dcaptured);
    std::vector<Returning> returning;
    for_each_part(call, [&](const Heads& heads, const Keys& keys) {
      EngineGradients of_part{.dq = made.dq ? heads_of(made.dq, heads.q) : made.dq,
                              .dsinks = made.dsinks,
                              .dcaptured = captured.next()};
      OwnedTensor dk, dv;
      if (!call.args.is_deterministic) {
        dk = call.memory.make_like(keys.k, Dtype::f32);
        dv = call.memory.make_like(keys.v, Dtype::f32);
        of_part.dk = dk.view;
        of_part.dv = dv.view;
      }
      differentiate(call, rows_of(call.rows, heads.q), keys, {.q = own_.places, .heads = heads},
                    of_part);
      // On their way while the next part is computed.
      if (!call.args.is_deterministic)
        returning.push_back({heads.kv, scattered(call, dk), scattered(call, dv)});
    });
    captured.write();
    if (call.args.is_deterministic) {
      differentiate_by_all_rows(call, made);
    } else {
      for (Returning& part : returning) write(call, part, made);
    }
  }

 private:
  /// Sums of a part's gradients that are on their way home.
  struct Returning {
    HeadRange heads{};
    Pending dk, dv;
  };

  static Rows rows_of(const Rows& rows, const HeadRange& heads) {
    return {.q = heads_of(rows.q, heads),
            .out = heads_of(rows.out, heads),
            .lse = heads_of(rows.lse, heads),
            .dout = heads_of(rows.dout, heads),
            .dlse = rows.dlse ? heads_of(rows.dlse, heads) : rows.dlse};
  }

  Heads heads_of_part(std::int64_t part) const {
    const std::int64_t parts = num_parts();
    const auto range = [&](std::int64_t heads) {
      return HeadRange{part * heads / parts, (part + 1) * heads / parts};
    };
    return {range(plan_.shape.num_heads_q), range(plan_.shape.num_heads_kv)};
  }
  std::int64_t num_parts() const {
    return plan_.scheme == ParallelScheme::head_group_all_gather ? plan_.options.head_parts : 1;
  }

  void for_each_part(const EngineCall& call,
                     const std::function<void(const Heads&, const Keys&)>& body) const {
    const auto begin = [&](std::int64_t part) {
      const HeadRange heads = heads_of_part(part).kv;
      return std::array{call.ranks.gather({heads_of(call.keys.k, heads)}),
                        call.ranks.gather({heads_of(call.keys.v, heads)})};
    };
    std::array arriving = begin(0);
    for (std::int64_t part = 0; part < num_parts(); ++part) {
      const OwnedTensor k = in_order(call.memory, arriving[0].wait()[0]);
      const OwnedTensor v = in_order(call.memory, arriving[1].wait()[0]);
      if (part + 1 < num_parts()) arriving = begin(part + 1);
      body(heads_of_part(part), {k.view, v.view});
    }
  }

  /// The sequence in its own order: no bits then depend on who had which token.
  OwnedTensor in_order(const Memory& memory, const OwnedTensor& by_rank) const {
    OwnedTensor result = memory.make_like(by_rank.view, by_rank.view.dtype());
    memory.sum(result.view, std::array{PlacedPart{by_rank.view, inverse_.view}});
    return result;
  }

  Pending scattered(const EngineCall& call, const OwnedTensor& sums) const {
    const OwnedTensor by_rank = call.memory.make_like(sums.view, Dtype::f32);
    call.memory.sum(by_rank.view, std::array{PlacedPart{sums.view, permutation_.view}});
    return call.ranks.reduce_scatter(by_rank);
  }

  static void write(const EngineCall& call, Returning& part, const EngineGradients& made) {
    const OwnedTensor dk = part.dk.wait()[0], dv = part.dv.wait()[0];
    if (made.dk) call.memory.sum(heads_of(made.dk, part.heads), std::array{dk.view});
    if (made.dv) call.memory.sum(heads_of(made.dv, part.heads), std::array{dv.view});
  }

  /// Gradients by this rank's own keys, of the rows of all ranks in their own order: each sum is one call's.
  void differentiate_by_all_rows(const EngineCall& call, const EngineGradients& made) const {
    std::vector<TensorView> own{call.rows.q, call.rows.out, call.rows.lse, call.rows.dout};
    if (call.rows.dlse) own.push_back(call.rows.dlse);
    std::vector<Pending> arriving;
    for (const TensorView& tensor : own) arriving.push_back(call.ranks.gather({tensor}));
    std::vector<OwnedTensor> whole;
    for (Pending& pending : arriving) whole.push_back(in_order(call.memory, pending.wait()[0]));
    Rows rows{
        .q = whole[0].view, .out = whole[1].view, .lse = whole[2].view, .dout = whole[3].view};
    if (call.rows.dlse) rows.dlse = whole[4].view;
    if (!made.dk && !made.dv) return;
    const Heads all{{0, plan_.shape.num_heads_q}, {0, plan_.shape.num_heads_kv}};
    differentiate(call, rows, call.keys, {.kv = own_.places, .heads = all},
                  {.dk = made.dk, .dv = made.dv});
  }

  const ShardPlan::Impl& plan_;
  OwnedPlaces own_;
  // [seqlen] i32: the tokens of ranks one behind the other, and where each token is there.
  OwnedTensor permutation_{}, inverse_{};
};

}  // namespace

std::unique_ptr<Engine> make_gathering_engine(const ShardPlan::Impl& plan, int rank,
                                              const Memory& memory) {
  return std::make_unique<GatheringEngine>(plan, rank, memory);
}

}  // namespace fovea::parallel
