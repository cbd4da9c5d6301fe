// One step of decoding over caches whose pages are dealt over ranks: what of it is this rank's.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fovea/kv_cache.hpp"

#include "parallel/engine/memory.hpp"
#include "parallel/engine/places.hpp"

namespace fovea::parallel {

/// A call, of all sequences.
struct DecodeStepSource {
  int rank = 0, world_size = 1;
  std::int64_t seqlen_q = 1;
  const KvCache& cache;  // seqlens are those of whole sequences, before new tokens
  Append append{};       // optional
  const Rotary* rotary = nullptr;
  // What the caller gives of them, [batch, tokens]; without: places in whole sequences.
  TensorView positions_new{}, positions_q{};
  Executor* executor = nullptr;

  std::int64_t batch() const { return cache.seqlens.size(0); }
  std::int64_t num_new() const { return append.k ? append.k.size(1) : 0; }
  std::int64_t page_size() const { return cache.k.size(1); }
};

struct DecodeStep {
  OwnedTensor seqlens{};                  // [batch] i32, of whole sequences, new tokens among them
  OwnedTensor own_seqlens{};              // [batch] i32, of this rank's pages alone
  TensorView positions_q{};               // [batch, seqlen_q] where queries are turned
  std::optional<AppendToCache> append{};  // of what has pages here
  std::vector<OwnedTensor> kept{};        // what the two read
};

/// On a GPU kernels find them, from lengths that lie there: the host waits for nothing, and a captured graph serves
/// whatever they hold at its replay.
DecodeStep make_decode_step(const DecodeStepSource& source, const Memory& memory);

/// The same angles at other positions.
Rotary rotary_at(const Rotary& rotary, const TensorView& positions);

// ---- What it does on a GPU: device_decode_step.cpp ----

DecodeStep make_decode_step_on_device(const DecodeStepSource& source, const Memory& memory);

}  // namespace fovea::parallel
