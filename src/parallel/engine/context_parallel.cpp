// The entry points of a rank: its problem is checked, ranks agree, the scheme's engine runs.
#include "fovea/context_parallel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/shape.hpp"
#include "parallel/engine/agreement.hpp"
#include "parallel/engine/engine.hpp"
#include "problem/backward.hpp"
#include "problem/captured_tensors.hpp"
#include "problem/forward.hpp"
#include "problem/input_codes.hpp"

namespace fovea {
namespace {

using parallel::Engine;
using parallel::EngineCall;
using parallel::EngineGradients;
using parallel::Facts;
using parallel::Memory;
using parallel::Ranks;

constexpr std::string_view kForward = "context_parallel_forward";
constexpr std::string_view kBackward = "context_parallel_backward";

std::unique_ptr<Engine> make_engine(const ShardPlan::Impl& plan, int rank, const Memory& memory) {
  switch (plan.scheme) {
    case ParallelScheme::all_gather:
    case ParallelScheme::head_group_all_gather:
      return make_gathering_engine(plan, rank, memory);
    case ParallelScheme::needed_only:
      return make_needed_only_engine(plan, rank, memory);
    default:
      return make_heads_and_ring_engine(plan, rank, memory);
  }
}

/// A formula with the numbers that it captured.
std::string with_numbers(const Program& program) {
  std::string text = program.to_string();
  for (const CapturedScalar& scalar : program.captures().scalars)
    text += fmt::format("; {} = {}", scalar.name, scalar.value);
  return text;
}

/// The caller's own mistakes, before anything is exchanged.
class Checks {
 public:
  Checks(const ShardPlan::Impl& plan, Device device) : plan_(plan), device_(device) {}

  void forward(const AttentionForward& args) const {
    features(args);
    if (args.row_max) check_lse("row_max", args.row_max);
    // What attention itself refuses, before a rank stops in the middle: dtypes, overlaps, programs.
    validate_arguments(validate(problem_of(args), ""), args, "");
  }

  void backward(const AttentionBackward& args) const {
    features(args.forward);
    const parallel::Shape& shape = plan_.shape;
    refuse(!args.forward.lse, "forward.lse is missing; expected what forward wrote");
    check_tensor("dout", args.dout, shape.num_heads_q, shape.head_dim_v);
    if (args.dlse) check_lse("dlse", args.dlse);
    if (args.dq) check_tensor("dq", args.dq, shape.num_heads_q, shape.head_dim_qk);
    if (args.dk) check_tensor("dk", args.dk, shape.num_heads_kv, shape.head_dim_qk);
    if (args.dv) check_tensor("dv", args.dv, shape.num_heads_kv, shape.head_dim_v);
    validate_arguments(validate(problem_of(args), ""), args, "");
  }

 private:
  void features(const AttentionForward& args) const {
    const parallel::Shape& shape = plan_.shape;
    check_tensor("q", args.q, shape.num_heads_q, shape.head_dim_qk);
    check_tensor("k", args.k, shape.num_heads_kv, shape.head_dim_qk);
    check_tensor("v", args.v, shape.num_heads_kv, shape.head_dim_v);
    check_tensor("out", args.out, shape.num_heads_q, shape.head_dim_v);
    if (args.lse) check_lse("lse", args.lse);
    refuse(
        args.cu_seqlens_q || args.cu_seqlens_kv,
        "cu_seqlens are given; expected the tokens of a plan: give sequences as documents of the "
        "mask");
    refuse(!args.quant.is_none() && plan_.scheme != ParallelScheme::ulysses,
           fmt::format("quant is given and the scheme is {}; expected ulysses, where a rank has "
                       "whole sequences: a recipe's means and scales are theirs",
                       name(plan_.scheme)));
    refuse(are_codes(args.q.dtype()),
           fmt::format("q is {}; expected f32, f16 or bf16", name(args.q.dtype())));
    refuse(!!args.dropout_places, "dropout_places is given; a rank's places are those of the plan");
    if (args.dropout.p > 0) check_dropout();
    check_extents(args.score, args.mask,
                  {.batch = shape.batch,
                   .num_heads_q = shape.num_heads_q,
                   .seqlen_q = shape.seqlen,
                   .seqlen_kv = shape.seqlen},
                  TensorChecks(""));
    const std::string mask = with_numbers(args.mask), of_plan = with_numbers(plan_.mask);
    refuse(mask != of_plan,
           fmt::format("mask is {}; expected that of the plan, {}", mask, of_plan));
    for (const TensorSpec* spec :
         {&args.q.spec(), &args.k.spec(), &args.v.spec(), &args.out.spec()}) {
      const Device device = spec->device;
      refuse(device != device_,
             fmt::format("a tensor lives on {}; expected {}, where the communicator exchanges",
                         to_string(device), to_string(device_)));
    }
  }

  void check_dropout() const {
    const bool is_needed_only = plan_.scheme == ParallelScheme::needed_only;
    for (const auto& ranges : is_needed_only ? plan_.group_needs : plan_.group_rows) {
      const TokenRange* const range = parallel::range_out_of_step(ranges);
      if (range == nullptr) continue;
      invalid("", fmt::format("dropout is given and keys of a rank are tokens {} to {}; expected "
                              "ranges that begin and "
                              "end at multiples of 4, whose keys are drawn for at once: take such "
                              "chunks and tile_kv",
                              range->begin, range->end));
    }
  }

  static void refuse(bool condition, const std::string& message) {
    if (condition) invalid("", message);
  }

  void check_tensor(std::string_view name, const TensorView& tensor, std::int64_t num_heads,
                    std::int64_t head_dim) const {
    const std::array expected{plan_.shape.batch, own_tokens(), num_heads, head_dim};
    check_shape(name, tensor, expected);
  }
  void check_lse(std::string_view name, const TensorView& tensor) const {
    check_shape(name, tensor, std::array{plan_.shape.batch, plan_.shape.num_heads_q, own_tokens()});
  }
  static void check_shape(std::string_view name, const TensorView& tensor,
                          std::span<const std::int64_t> expected) {
    if (!tensor) invalid("", fmt::format("{} is missing", name));
    if (!std::ranges::equal(shape_of(tensor), expected)) {
      invalid("", fmt::format("{} is {}; expected {}, this rank's tokens", name,
                              to_string(tensor.spec()),
                              to_string(make_spec(tensor.dtype(), expected))));
    }
  }
  std::int64_t own_tokens() const { return plan_.shape.seqlen / plan_.world_size; }

  const ShardPlan::Impl& plan_;
  Device device_;
};

void add_tensor(Facts& facts, std::string name, const TensorView& tensor) {
  facts.emplace_back(std::move(name),
                     tensor ? to_string(make_spec(tensor.dtype(), shape_of(tensor))) : "missing");
}

void add_forward(Facts& facts, const AttentionForward& args) {
  add_tensor(facts, "q", args.q);
  add_tensor(facts, "k", args.k);
  add_tensor(facts, "v", args.v);
  add_tensor(facts, "out", args.out);
  facts.emplace_back("score", with_numbers(args.score));
  facts.emplace_back("softmax_scale",
                     args.softmax_scale ? fmt::format("{}", *args.softmax_scale) : "default");
  facts.emplace_back("sinks", args.sinks ? "given" : "missing");
  facts.emplace_back("quant", print(args.quant));
  facts.emplace_back("dropout",
                     fmt::format("{} of seed {}, offset {}{}", args.dropout.p, args.dropout.seed,
                                 args.dropout.offset, args.dropout_seed ? ", and tensors" : ""));
  facts.emplace_back("is_deterministic", args.is_deterministic ? "true" : "false");
}

}  // namespace

struct ContextParallel::Impl {
  ShardPlan shards;
  std::shared_ptr<Communicator> communicator;
  Facts plan_facts{};
  parallel::Agreement agreement{};
  std::unique_ptr<Engine> engine{};
  parallel::DropoutTables dropout_tables{};

  Impl(ShardPlan plan, std::shared_ptr<Communicator> ranks)
      : shards(std::move(plan)), communicator(std::move(ranks)) {
    if (communicator->world_size() != shards.world_size()) {
      invalid("ContextParallel",
              fmt::format("the communicator has {} ranks; expected {}, those of the plan",
                          communicator->world_size(), shards.world_size()));
    }
    plan_facts = {{"call", ""},
                  {"scheme", std::string(name(shards.scheme()))},
                  {"seqlen", fmt::format("{}", shards.seqlen())},
                  {"mask", with_numbers(shards.impl().mask)},
                  {"plan", fmt::format("{:016x}", std::hash<std::string>{}(shards.json()))}};
  }

  Checks checks() const { return {shards.impl(), communicator->device()}; }

  /// Throws on every rank where one of them must.
  template <typename Check>
  void agree(std::string_view where, Facts facts, const Check& check) {
    facts.front().second = where;
    std::string problem;
    try {
      check();
    } catch (const Error& error) {
      problem = error.what();
    }
    agreement.reach(*communicator, where, facts, problem);
  }

  /// body(engine, call).
  template <typename Body>
  void run(const AttentionForward& args, const Body& body) {
    const Memory memory(communicator->device(), args.stream);
    const Ranks ranks(*communicator, memory);
    if (engine == nullptr) engine = make_engine(shards.impl(), ranks.rank(), memory);
    EngineCall call{.plan = shards.impl(),
                    .ranks = ranks,
                    .memory = memory,
                    .dropout_tables = dropout_tables,
                    .args = args,
                    .rows = {.q = parallel::turned(args.q), .out = parallel::turned(args.out)},
                    .keys = {parallel::turned(args.k), parallel::turned(args.v)}};
    if (args.lse) call.rows.lse = parallel::turned_lse(args.lse);
    body(*engine, call);
  }
};

ContextParallel::ContextParallel(ShardPlan shards, std::shared_ptr<Communicator> ranks)
    : impl_(std::make_unique<Impl>(std::move(shards), std::move(ranks))) {}
ContextParallel::~ContextParallel() = default;
ContextParallel::ContextParallel(ContextParallel&&) noexcept = default;
ContextParallel& ContextParallel::operator=(ContextParallel&&) noexcept = default;
const ShardPlan& ContextParallel::shards() const { return impl_->shards; }

void ContextParallel::forward(const AttentionForward& args) {
  Facts facts = impl_->plan_facts;
  add_forward(facts, args);
  facts.emplace_back("row_max", args.row_max ? "given" : "missing");
  impl_->agree(kForward, std::move(facts), [&] { impl_->checks().forward(args); });
  impl_->run(args, [&](Engine& engine, EngineCall& call) {
    parallel::OwnedTensor lse;
    if (!call.rows.lse) {
      lse = call.memory.make(
          Dtype::f32, std::array{call.rows.q.size(0), call.rows.q.size(1), call.rows.q.size(2)});
      call.rows.lse = lse.view;
    }
    if (args.row_max) call.rows.row_max = parallel::turned_lse(args.row_max);
    engine.forward(call);
  });
}

void ContextParallel::backward(const AttentionBackward& args) {
  Facts facts = impl_->plan_facts;
  add_forward(facts, args.forward);
  add_tensor(facts, "dout", args.dout);
  facts.emplace_back("dlse", args.dlse ? "given" : "missing");
  impl_->agree(kBackward, std::move(facts), [&] { impl_->checks().backward(args); });
  impl_->run(args.forward, [&](Engine& engine, EngineCall& call) {
    call.rows.dout = parallel::turned(args.dout);
    if (args.dlse) call.rows.dlse = parallel::turned_lse(args.dlse);
    EngineGradients made{.dsinks = args.dsinks, .dcaptured = args.dcaptured};
    for (const auto& [written, given] :
         {std::pair{&made.dq, &args.dq}, {&made.dk, &args.dk}, {&made.dv, &args.dv}}) {
      if (*given) *written = parallel::turned(*given);
    }
    engine.backward(call, made);
  });
}

}  // namespace fovea
