// The programs of a call: what its fields, texts and handles say, as one score and one mask program. Which formula that
// is follows from their structure; tensors and numbers are put into it at each call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/expr.hpp"
#include "fovea/fovea.h"
#include "fovea/mask.hpp"

namespace fovea::ffi {

/// What is behind a fovea_program. One of the two programs, by its kind; its slots are bound to no data.
struct ParsedProgram {
  fovea_mod kind = FOVEA_SCORE_MOD;
  ScoreMod score{};
  MaskMod mask{};
  Captures signature{};  // as declared: the order in which tensors and scalars are given

  const Program& program() const {
    return kind == FOVEA_SCORE_MOD ? static_cast<const Program&>(score) : mask;
  }
};

/// One program of a call, but for the words: a text, a handle or neither.
struct ProgramInput {
  std::optional<std::string> text{};  // reads ProgramSource::captures
  std::shared_ptr<const ParsedProgram> parsed{};
  Captures captures{};  // of `parsed`, by position in its signature

  bool empty() const { return !text && parsed == nullptr; }
};

/// All that the programs of a call are made from.
struct ProgramSource {
  float softcap = 0;  // 0: none
  TensorView bias{}, alibi{}, mask{}, segments_q{}, segments_kv{};
  TensorView cu_seqlens_q{}, cu_seqlens_kv{};  // where segments are of packed rows
  bool is_causal = false;
  Align align = Align::bottom_right;
  std::optional<std::int64_t> window_left{}, window_right{};
  ProgramInput score_mod{}, mask_mod{};
  Captures captures{};  // what texts read
};

struct Programs {
  ScoreMod score{};
  MaskMod mask{};
  /// What a C caller names ("bias", "alibi", what score_mod reads) and the slot of `score` that it became. A name that
  /// stands twice means the first.
  using Slots = std::vector<std::pair<std::string, std::string>>;
  std::shared_ptr<const Slots> slots;
};

/// Formulas of the last calls. Making them anew (nodes, texts) costs a call 8 to 30 microseconds; giving them the
/// tensors and numbers of this one costs a fraction of one. Thread safe.
class ProgramCache {
 public:
  ProgramCache();
  ~ProgramCache();
  ProgramCache(const ProgramCache&) = delete;
  ProgramCache& operator=(const ProgramCache&) = delete;

  Programs programs_of(const ProgramSource& source);

 private:
  struct Formulas;
  struct Entry;
  std::shared_ptr<const Formulas> find(const ProgramSource& source);

  std::mutex mutex_;
  std::vector<Entry> entries_;  // the last used first
};

}  // namespace fovea::ffi

struct fovea_program {
  std::shared_ptr<const fovea::ffi::ParsedProgram> parsed;
  mutable fovea::ffi::ProgramCache programs{};  // of calls without a plan
};
