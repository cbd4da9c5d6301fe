#include "ffi/programs.hpp"

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <unordered_set>

#include "core/check.hpp"
#include "core/shape.hpp"
#include "expr/node.hpp"
#include "expr/passes.hpp"

namespace fovea::ffi {
namespace {

/// Combinations of fields that one program meets in a model: with and without causal, a window, a bias.
constexpr std::size_t kMaxEntries = 8;

// ---- structure: what decides the formula ----

/// Words look at the dtype, the rank and which extents broadcast.
bool same_word(const TensorView& a, const TensorView& b) {
  const auto broadcasts = [](std::int64_t x, std::int64_t y) { return (x == 1) == (y == 1); };
  return a.dtype() == b.dtype() && std::ranges::equal(shape_of(a), shape_of(b), broadcasts);
}

/// Texts are refused by constant indices beyond an extent, too.
bool same_slot(const CapturedTensor& a, const CapturedTensor& b) {
  return a.name == b.name && a.view.dtype() == b.view.dtype() &&
         std::ranges::equal(shape_of(a.view), shape_of(b.view));
}

bool same_slot(const CapturedScalar& a, const CapturedScalar& b) {
  return a.name == b.name && a.type == b.type;
}

template <typename Captured>
bool same_slots(const std::vector<Captured>& a, const std::vector<Captured>& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) { return same_slot(x, y); });
}

bool same_input(const ProgramInput& a, const ProgramInput& b) {
  return a.parsed == b.parsed && a.text == b.text;
}

bool same_structure(const ProgramSource& a, const ProgramSource& b) {
  if (!same_input(a.score_mod, b.score_mod) || !same_input(a.mask_mod, b.mask_mod)) return false;
  if (a.is_causal != b.is_causal || a.align != b.align || a.window_left != b.window_left ||
      a.window_right != b.window_right ||
      std::bit_cast<std::uint32_t>(a.softcap) != std::bit_cast<std::uint32_t>(b.softcap)) {
    return false;
  }
  for (const auto field : {&ProgramSource::bias, &ProgramSource::alibi, &ProgramSource::mask,
                           &ProgramSource::segments_q, &ProgramSource::segments_kv,
                           &ProgramSource::cu_seqlens_q, &ProgramSource::cu_seqlens_kv}) {
    if (!same_word(a.*field, b.*field)) return false;
  }
  // Of both sides one tensor is one slot.
  if ((a.segments_q == a.segments_kv) != (b.segments_q == b.segments_kv)) return false;
  if ((a.cu_seqlens_q == a.cu_seqlens_kv) != (b.cu_seqlens_q == b.cu_seqlens_kv)) return false;
  const bool has_text = a.score_mod.text || a.mask_mod.text;
  return !has_text || (same_slots(a.captures.tensors, b.captures.tensors) &&
                       same_slots(a.captures.scalars, b.captures.scalars));
}

// ---- where a slot of the formula gets its tensor or number ----

enum class From : std::uint8_t { word, text, handle };

struct Origin {
  From from = From::word;
  TensorView ProgramSource::*field =
      nullptr;          // word; null: a scalar, which is part of the structure
  std::size_t idx = 0;  // text, handle: into the captures
};

struct Origins {
  std::vector<Origin> tensors, scalars;  // in the order of the formula's captures

  bool are_constant() const {
    return tensors.empty() && std::ranges::all_of(scalars, [](const Origin& origin) {
             return origin.from == From::word;
           });
  }
};

template <typename Captured>
std::size_t index_of(const std::vector<Captured>& captures, const std::string& name) {
  const auto found = std::ranges::find(captures, name, &Captured::name);
  FOVEA_ASSERT(found != captures.end());
  return static_cast<std::size_t>(found - captures.begin());
}

/// One program of words, and of the text or handle behind them.
template <typename Mod>
class Combination {
 public:
  /// A word's tensor stands in `field`.
  void add_word(const Mod& word, TensorView ProgramSource::*field) {
    for (const CapturedTensor& tensor : word.captures().tensors)
      origins_[tensor.name] = {.from = From::word, .field = field};
    add_scalars_and_join(word);
  }

  /// Each of its tensors in the field that its name says.
  void add_word(const Mod& word,
                const std::unordered_map<std::string, TensorView ProgramSource::*>& fields) {
    for (const CapturedTensor& tensor : word.captures().tensors)
      origins_[tensor.name] = {.from = From::word, .field = fields.at(tensor.name)};
    add_scalars_and_join(word);
  }

  void add_scalars_and_join(const Mod& word) {
    for (const CapturedScalar& scalar : word.captures().scalars) origins_[scalar.name] = {};
    join(word);
  }

  /// What callers of C name a word's tensor. A word captures at most one; what else it captures, they cannot name.
  void add_named_word(const std::string& name, const Mod& word, TensorView ProgramSource::*field) {
    for (const CapturedTensor& tensor : word.captures().tensors)
      slots_.emplace_back(name, tensor.name);
    add_word(word, field);
  }

  /// A text or handle may name a slot as a word does, bound to the same tensor even: two slots all the same, since
  /// each has a gradient of its own, and which formula it is must not depend on addresses.
  void add_input(const Mod& input, From from, const Captures& captures) {
    std::unordered_set<std::string> taken;
    add_names(mod_.captures(), taken);
    const std::unordered_set<std::string> of_words = taken;
    add_names(input.captures(), taken);
    std::unordered_map<std::string, std::string> renamed;
    const auto slot_of = [&](const std::string& name) {
      const auto [entry, is_new] = renamed.emplace(name, name);
      for (int suffix = 2; is_new && of_words.contains(entry->second); ++suffix) {
        std::string candidate = name + "_" + std::to_string(suffix);
        if (taken.insert(candidate).second) entry->second = std::move(candidate);
      }
      return entry->second;
    };
    const Mod apart(Expr(expr::rename_slots(input.formula().shared(), slot_of)));
    for (const CapturedTensor& tensor : input.captures().tensors) {
      origins_[renamed.at(tensor.name)] = {.from = from,
                                           .idx = index_of(captures.tensors, tensor.name)};
    }
    for (const CapturedScalar& scalar : input.captures().scalars) {
      origins_[renamed.at(scalar.name)] = {.from = from,
                                           .idx = index_of(captures.scalars, scalar.name)};
    }
    slots_.insert(slots_.end(), renamed.begin(), renamed.end());
    join(apart);
  }

  const Mod& mod() const { return mod_; }
  const Programs::Slots& slots() const { return slots_; }

  Origins origins() const {
    Origins result;
    for (const CapturedTensor& tensor : mod_.captures().tensors)
      result.tensors.push_back(origins_.at(tensor.name));
    for (const CapturedScalar& scalar : mod_.captures().scalars)
      result.scalars.push_back(origins_.at(scalar.name));
    return result;
  }

 private:
  void join(const ScoreMod& next) { mod_ = mod_ | next; }
  void join(const MaskMod& next) { mod_ = mod_.is_all_visible() ? next : mod_ && next; }

  static void add_names(const Captures& captures, std::unordered_set<std::string>& names) {
    for (const CapturedTensor& tensor : captures.tensors) names.insert(tensor.name);
    for (const CapturedScalar& scalar : captures.scalars) names.insert(scalar.name);
  }

  Mod mod_;
  std::unordered_map<std::string, Origin> origins_;  // by slot of mod_
  Programs::Slots slots_;
};

Combination<ScoreMod> score_of(const ProgramSource& source) {
  Combination<ScoreMod> score;
  if (source.softcap != 0) score.add_word(softcap(source.softcap), nullptr);
  if (source.bias) score.add_named_word("bias", bias(source.bias), &ProgramSource::bias);
  if (source.alibi) {
    score.add_named_word("alibi", alibi(source.alibi, source.align), &ProgramSource::alibi);
  }
  const ProgramInput& input = source.score_mod;
  if (input.text)
    score.add_input(parse_score_mod(*input.text, source.captures), From::text, source.captures);
  if (input.parsed) score.add_input(input.parsed->score, From::handle, input.parsed->signature);
  return score;
}

/// Ids of one side alone serve both.
void add_documents(const ProgramSource& source, Combination<MaskMod>& mask) {
  const auto one_of = [&](TensorView ProgramSource::*q, TensorView ProgramSource::*kv) {
    return source.*q ? q : kv;
  };
  const auto q_ids = one_of(&ProgramSource::segments_q, &ProgramSource::segments_kv);
  const auto kv_ids = one_of(&ProgramSource::segments_kv, &ProgramSource::segments_q);
  const std::unordered_map<std::string, TensorView ProgramSource::*> fields = {
      {"segments", q_ids},
      {"segments_q", q_ids},
      {"segments_kv", kv_ids},
      {"cu_seqlens", &ProgramSource::cu_seqlens_q},
      {"cu_seqlens_q", &ProgramSource::cu_seqlens_q},
      {"cu_seqlens_kv", &ProgramSource::cu_seqlens_kv}};
  if (!source.cu_seqlens_q) {
    mask.add_word(documents(source.*q_ids, source.*kv_ids), fields);
    return;
  }
  mask.add_word(documents({.segments_q = source.*q_ids,
                           .segments_kv = source.*kv_ids,
                           .cu_seqlens_q = source.cu_seqlens_q,
                           .cu_seqlens_kv = source.cu_seqlens_kv}),
                fields);
}

Combination<MaskMod> mask_of(const ProgramSource& source) {
  Combination<MaskMod> mask;
  if (source.mask) mask.add_word(dense_mask(source.mask), &ProgramSource::mask);
  if (source.window_left || source.window_right)
    mask.add_word(window(source.window_left, source.window_right, source.align), nullptr);
  if (source.is_causal) mask.add_word(causal(source.align), nullptr);
  if (source.segments_q || source.segments_kv) add_documents(source, mask);
  const ProgramInput& input = source.mask_mod;
  if (input.text)
    mask.add_input(parse_mask_mod(*input.text, source.captures), From::text, source.captures);
  if (input.parsed) mask.add_input(input.parsed->mask, From::handle, input.parsed->signature);
  return mask;
}

/// The formula over the tensors and numbers of this call.
template <typename Mod>
Mod bound(const Mod& formula, const Origins& origins, const ProgramSource& source,
          const ProgramInput& input) {
  if (origins.are_constant()) return formula;
  Captures captures = formula.captures();
  const auto given = [&](const Origin& origin) -> const Captures& {
    return origin.from == From::text ? source.captures : input.captures;
  };
  for (std::size_t i = 0; i < captures.tensors.size(); ++i) {
    const Origin& origin = origins.tensors[i];
    captures.tensors[i].view =
        origin.from == From::word ? source.*origin.field : given(origin).tensors[origin.idx].view;
  }
  for (std::size_t i = 0; i < captures.scalars.size(); ++i) {
    const Origin& origin = origins.scalars[i];
    if (origin.from != From::word)
      captures.scalars[i].value = given(origin).scalars[origin.idx].value;
  }
  return formula.with_captures(std::move(captures));
}

}  // namespace

struct ProgramCache::Formulas {
  ScoreMod score;
  MaskMod mask;
  Origins score_origins, mask_origins;
  std::shared_ptr<const Programs::Slots> slots;

  explicit Formulas(const ProgramSource& source) : Formulas(score_of(source), mask_of(source)) {}

 private:
  Formulas(const Combination<ScoreMod>& of_score, const Combination<MaskMod>& of_mask)
      : score(of_score.mod()),
        mask(of_mask.mod()),
        score_origins(of_score.origins()),
        mask_origins(of_mask.origins()),
        slots(std::make_shared<const Programs::Slots>(of_score.slots())) {}
};

struct ProgramCache::Entry {
  ProgramSource source;
  std::shared_ptr<const Formulas> formulas;
};

ProgramCache::ProgramCache() = default;
ProgramCache::~ProgramCache() = default;

std::shared_ptr<const ProgramCache::Formulas> ProgramCache::find(const ProgramSource& source) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(
      entries_, [&](const Entry& entry) { return same_structure(entry.source, source); });
  if (found == entries_.end()) return nullptr;
  std::rotate(entries_.begin(), found, found + 1);
  return entries_.front().formulas;
}

Programs ProgramCache::programs_of(const ProgramSource& source) {
  std::shared_ptr<const Formulas> formulas = find(source);
  if (formulas == nullptr) {
    formulas = std::make_shared<const Formulas>(source);
    const std::lock_guard lock(mutex_);
    if (entries_.size() == kMaxEntries) entries_.pop_back();
    entries_.insert(entries_.begin(), {source, formulas});
  }
  return {bound(formulas->score, formulas->score_origins, source, source.score_mod),
          bound(formulas->mask, formulas->mask_origins, source, source.mask_mod), formulas->slots};
}

}  // namespace fovea::ffi
