// What engines of all schemes are made of: a call as they see it, and the calls on what a rank has. Tensors have tokens
// first: [tokens, batch, heads, head_dim], lse [tokens, batch, heads].
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/backward.hpp"
#include "fovea/communicator.hpp"

#include "parallel/engine/memory.hpp"
#include "parallel/engine/places.hpp"
#include "parallel/engine/ranks.hpp"
#include "parallel/shard_plan.hpp"

namespace fovea::parallel {

/// bshd to tokens first, or back.
TensorView turned(const TensorView& tensor);
/// lse or row_max: [batch, heads, tokens] to [tokens, batch, heads], and back.
TensorView turned_lse(const TensorView& lse);
TensorView lse_of_call(const TensorView& tokens_first);

struct Keys {
  TensorView k{}, v{};
};

/// Rows of a call; what a forward call writes is out, lse and row_max.
struct Rows {
  TensorView q{}, out{}, lse{};
  TensorView row_max{};       // of forward, optional
  TensorView dout{}, dlse{};  // backward; dlse is optional
};

struct Heads {
  HeadRange q{}, kv{};
};

class DropoutTables;

/// A call on this rank, its tensors as the caller has them.
struct EngineCall {
  const ShardPlan::Impl& plan;
  const Ranks& ranks;
  const Memory& memory;
  DropoutTables& dropout_tables;
  const AttentionForward& args;  // programs, sinks and all that is no tensor of tokens
  Rows rows{};
  Keys keys{};
};

/// What backward writes. dq, dk and dv are optional, as dsinks and captured ones are.
struct EngineGradients {
  TensorView dq{}, dk{}, dv{};
  TensorView dsinks{};
  std::vector<CapturedTensor> dcaptured{};
};

/// Which part of the whole a local call is.
struct LocalPart {
  Places q{}, kv{};
  Heads heads{};
  bool has_sinks = true;  // a sink joins one partial result, and with it the whole
};

/// dropout_places of local calls: each made once.
class DropoutTables {
 public:
  TensorView of(const LocalPart& part, const Rows& rows, const Keys& keys, const Memory& memory);

 private:
  struct Key {
    std::int64_t batch, num_queries, num_keys;
    std::int64_t first_head, num_heads;
    const TokenRange *q, *kv;  // the plan's

    bool operator==(const Key&) const = default;
  };
  struct Made {
    Key key{};
    OwnedTensor table{};
  };

  std::vector<Made> made_{};  // as many as a plan has parts
};

/// Writes rows.out, rows.lse and, where it is given, rows.row_max.
void attend(const EngineCall& call, const Rows& rows, const Keys& keys, const LocalPart& part);

/// Gradients by what captures of scores hold are sums over a rank's local calls.
class CapturedSums {
 public:
  CapturedSums(const Memory& memory, const std::vector<CapturedTensor>& written)
      : memory_(memory), written_(written), parts_(written.size()) {}

  /// f32 memory for one more local call.
  std::vector<CapturedTensor> next();
  void write() const;

 private:
  const Memory& memory_;
  const std::vector<CapturedTensor>& written_;
  std::vector<std::vector<OwnedTensor>> parts_;
};

/// Gradients from these rows and keys alone: out and lse are those of all keys. Writes what `made` has.
void differentiate(const EngineCall& call, const Rows& rows, const Keys& keys,
                   const LocalPart& part, const EngineGradients& made);

/// One scheme on one rank. What it keeps from call to call is where tokens stand.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual void forward(const EngineCall& call) = 0;
  virtual void backward(const EngineCall& call, const EngineGradients& made) = 0;
};

std::unique_ptr<Engine> make_gathering_engine(const ShardPlan::Impl& plan, int rank,
                                              const Memory& memory);
std::unique_ptr<Engine> make_needed_only_engine(const ShardPlan::Impl& plan, int rank,
                                                const Memory& memory);
std::unique_ptr<Engine> make_heads_and_ring_engine(const ShardPlan::Impl& plan, int rank,
                                                   const Memory& memory);

}  // namespace fovea::parallel
