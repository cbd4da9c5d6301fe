#include "ffi/xla/call_site.hpp"

#include <array>
#include <charconv>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "core/check.hpp"

namespace fovea::ffi::xla {
namespace {

constexpr auto kWhere = "fovea_xla_handler";
constexpr std::size_t kMaxSites = 4096;

// ---- Names of fields ----

struct Field {
  std::string_view name;
  std::size_t at;
  bool has_heads =
      false;  // beside seqlen: its axes 1 and 2 change places where XLA has heads first
};

// NOLINTBEGIN(cppcoreguidelines-macro-usage): a name and its place, of which neither can be said without the other.
#define FOVEA_FIELD(group, name) \
  { #name, offsetof(ArgumentSet, group.name) }
#define FOVEA_FIELD_WITH_HEADS(group, name) \
  { #name, offsetof(ArgumentSet, group.name), true }
// NOLINTEND(cppcoreguidelines-macro-usage)

constexpr Field kForwardFields[] = {
    FOVEA_FIELD_WITH_HEADS(forward, q),
    FOVEA_FIELD_WITH_HEADS(forward, k),
    FOVEA_FIELD_WITH_HEADS(forward, v),
    FOVEA_FIELD_WITH_HEADS(forward, out),
    FOVEA_FIELD(forward, lse),
    FOVEA_FIELD(forward, bias),
    FOVEA_FIELD(forward, alibi),
    FOVEA_FIELD(forward, mask),
    FOVEA_FIELD(forward, segments_q),
    FOVEA_FIELD(forward, segments_kv),
    FOVEA_FIELD(forward, sinks),
    FOVEA_FIELD(forward, cu_seqlens_q),
    FOVEA_FIELD(forward, cu_seqlens_kv),
    FOVEA_FIELD(forward, dropout_seed),
    FOVEA_FIELD(forward, dropout_offset),
    FOVEA_FIELD(forward, dropout_places),
    FOVEA_FIELD(forward, q_scale),
    FOVEA_FIELD(forward, k_scale),
    FOVEA_FIELD(forward, v_scale),
};

constexpr Field kBackwardFields[] = {
    FOVEA_FIELD_WITH_HEADS(backward, dout), FOVEA_FIELD(backward, dlse),
    FOVEA_FIELD_WITH_HEADS(backward, dq),   FOVEA_FIELD_WITH_HEADS(backward, dk),
    FOVEA_FIELD_WITH_HEADS(backward, dv),   FOVEA_FIELD(backward, dsinks),
};

constexpr Field kJvpFields[] = {
    FOVEA_FIELD_WITH_HEADS(jvp, q_tangent),   FOVEA_FIELD_WITH_HEADS(jvp, k_tangent),
    FOVEA_FIELD_WITH_HEADS(jvp, v_tangent),   FOVEA_FIELD(jvp, sinks_tangent),
    FOVEA_FIELD_WITH_HEADS(jvp, out_tangent), FOVEA_FIELD(jvp, lse_tangent),
};

constexpr Field kDoubleBackwardFields[] = {
    FOVEA_FIELD_WITH_HEADS(double_backward, dout),
    FOVEA_FIELD(double_backward, dlse),
    FOVEA_FIELD_WITH_HEADS(double_backward, ddq),
    FOVEA_FIELD_WITH_HEADS(double_backward, ddk),
    FOVEA_FIELD_WITH_HEADS(double_backward, ddv),
    FOVEA_FIELD(double_backward, ddsinks),
    FOVEA_FIELD_WITH_HEADS(double_backward, grad_dout),
    FOVEA_FIELD(double_backward, grad_dlse),
    FOVEA_FIELD_WITH_HEADS(double_backward, grad_q),
    FOVEA_FIELD_WITH_HEADS(double_backward, grad_k),
    FOVEA_FIELD_WITH_HEADS(double_backward, grad_v),
    FOVEA_FIELD(double_backward, grad_sinks),
};

constexpr Field kDecodeFields[] = {
    FOVEA_FIELD(decode, seqlens),
    FOVEA_FIELD(decode, page_table),
    FOVEA_FIELD(decode, batch_idx),
    FOVEA_FIELD(decode, left_padding),
    FOVEA_FIELD(decode, append_k),
    FOVEA_FIELD(decode, append_v),
    FOVEA_FIELD(decode, rotary_cos),
    FOVEA_FIELD(decode, rotary_sin),
    FOVEA_FIELD(decode, rotary_positions),
    FOVEA_FIELD(decode, append_cu_seqlens),
    FOVEA_FIELD(decode, shared_cu_sequences),
    FOVEA_FIELD(decode, rotary_positions_q),
};

struct ListField {
  std::string_view name;
  std::size_t list_at, count_at;
};
#define FOVEA_LIST(group, name) \
  { #name, offsetof(ArgumentSet, group.name), offsetof(ArgumentSet, group.num_##name) }

constexpr ListField kBackwardLists[] = {FOVEA_LIST(backward, dcaptured)};
constexpr ListField kJvpLists[] = {FOVEA_LIST(jvp, captured_tangents)};
constexpr ListField kDoubleBackwardLists[] = {FOVEA_LIST(double_backward, ddcaptured),
                                              FOVEA_LIST(double_backward, grad_captured)};
#undef FOVEA_LIST
#undef FOVEA_FIELD
#undef FOVEA_FIELD_WITH_HEADS

struct Operation {
  std::string_view name;
  int (*run)(const ArgumentSet&, fovea_error**);
  std::span<const Field> fields;  // beside forward's
  std::span<const ListField> lists;
};

constexpr Operation kOperations[] = {
    {"forward",
     [](const ArgumentSet& set, fovea_error** error) {
       return fovea_attention_forward(&set.forward, error);
     },
     {},
     {}},
    {"backward",
     [](const ArgumentSet& set, fovea_error** error) {
       return fovea_attention_backward(&set.backward, error);
     },
     kBackwardFields, kBackwardLists},
    {"jvp",
     [](const ArgumentSet& set, fovea_error** error) {
       return fovea_attention_jvp(&set.jvp, error);
     },
     kJvpFields, kJvpLists},
    {"double_backward",
     [](const ArgumentSet& set, fovea_error** error) {
       return fovea_attention_double_backward(&set.double_backward, error);
     },
     kDoubleBackwardFields, kDoubleBackwardLists},
    {"decode",
     [](const ArgumentSet& set, fovea_error** error) {
       return fovea_attention_decode(&set.decode, error);
     },
     kDecodeFields,
     {}},
};

// ---- Numbers ----

enum class NumberType { i32, i64, u64, f32 };
struct Number {
  std::string_view name;
  NumberType type;
  std::size_t at;
};

constexpr Number kNumbers[] = {
    {"has_softmax_scale", NumberType::i32, offsetof(ArgumentSet, forward.has_softmax_scale)},
    {"softmax_scale", NumberType::f32, offsetof(ArgumentSet, forward.softmax_scale)},
    {"softcap", NumberType::f32, offsetof(ArgumentSet, forward.softcap)},
    {"causal", NumberType::i32, offsetof(ArgumentSet, forward.causal)},
    {"align", NumberType::i32, offsetof(ArgumentSet, forward.align)},
    {"has_window_left", NumberType::i32, offsetof(ArgumentSet, forward.has_window_left)},
    {"has_window_right", NumberType::i32, offsetof(ArgumentSet, forward.has_window_right)},
    {"window_left", NumberType::i64, offsetof(ArgumentSet, forward.window_left)},
    {"window_right", NumberType::i64, offsetof(ArgumentSet, forward.window_right)},
    {"dropout.p", NumberType::f32, offsetof(ArgumentSet, forward.dropout.p)},
    {"dropout.seed", NumberType::u64, offsetof(ArgumentSet, forward.dropout.seed)},
    {"dropout.offset", NumberType::u64, offsetof(ArgumentSet, forward.dropout.offset)},
    {"compute_dtype", NumberType::i32, offsetof(ArgumentSet, forward.compute_dtype)},
    {"cpu_target", NumberType::i32, offsetof(ArgumentSet, forward.cpu_target)},
    {"allows_nondeterminism", NumberType::i32,
     offsetof(ArgumentSet, forward.allows_nondeterminism)},
    {"sm_margin", NumberType::i32, offsetof(ArgumentSet, forward.sm_margin)},
    {"is_interleaved", NumberType::i32, offsetof(ArgumentSet, decode.is_interleaved)},
    {"sees_all_keys", NumberType::i32, offsetof(ArgumentSet, decode.sees_all_keys)},
    {"max_seqlen_q", NumberType::i64, offsetof(ArgumentSet, decode.max_seqlen_q)},
    {"shared_prefix", NumberType::i64, offsetof(ArgumentSet, decode.shared_prefix)},
};

template <typename Value>
void write_number(std::string_view text, void* to) {
  Value value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end)
    invalid(kWhere, std::string(text).append(" stands where a number of another kind is expected"));
  std::memcpy(to, &value, sizeof value);
}

void write_number(const Number& number, std::string_view text, ArgumentSet& set) {
  auto* const to = reinterpret_cast<std::byte*>(&set) + number.at;
  switch (number.type) {
    case NumberType::i32:
      return write_number<std::int32_t>(text, to);
    case NumberType::i64:
      return write_number<std::int64_t>(text, to);
    case NumberType::u64:
      return write_number<std::uint64_t>(text, to);
    case NumberType::f32:
      return write_number<float>(text, to);
  }
}

// ---- Texts ----

template <typename Rows>
auto* find_row(const Rows& rows, std::string_view name) {
  for (const auto& row : rows) {
    if (row.name == name) return &row;
  }
  return static_cast<decltype(&*std::begin(rows))>(nullptr);
}

/// What stands before the first mark, which goes with it; all of the text where there is none.
std::string_view take_until(char mark, std::string_view& text) {
  const std::size_t at = text.find(mark);
  const std::string_view taken = text.substr(0, at);
  text.remove_prefix(at == std::string_view::npos ? text.size() : at + 1);
  return taken;
}

/// A program under construction: its text, and the arrays that it reads.
struct ProgramText {
  fovea_mod kind;
  std::string text{};
  std::vector<std::string> names{};
  std::vector<fovea_tensor_slot> slots{};

  /// "slopes 2 32 1": name, DLPack's code and bits, rank.
  void add_slot(std::string_view slot) {
    names.emplace_back(take_until(' ', slot));
    fovea_tensor_slot read{};
    write_number<std::uint8_t>(take_until(' ', slot), &read.dtype.code);
    write_number<std::uint8_t>(take_until(' ', slot), &read.dtype.bits);
    write_number<std::int32_t>(slot, &read.rank);
    read.dtype.lanes = 1;
    slots.push_back(read);
  }

  ProgramHandle parsed() {
    if (text.empty()) return nullptr;
    for (std::size_t i = 0; i < names.size(); ++i) slots[i].name = names[i].c_str();
    fovea_program_args args{};
    args.struct_size = sizeof args;
    args.version = FOVEA_ABI_VERSION;
    args.kind = kind;
    args.text = text.c_str();
    args.tensors = slots.data();
    args.num_tensors = slots.size();
    fovea_program* made = nullptr;
    fovea_error* error = nullptr;
    if (fovea_program_create(&args, &made, &error) != FOVEA_OK) {
      const std::string message = fovea_error_message(error);
      fovea_error_free(error);
      throw InvalidArgument(message);
    }
    return ProgramHandle(made);
  }
};

class Reader {
 public:
  explicit Reader(CallSite& site) : site_(site) {}

  void read(std::string_view text) {
    while (!text.empty()) {
      std::string_view line = take_until('\n', text);
      const std::string_view name = take_until('=', line);
      read_line(name, line);
    }
    if (operation_ == nullptr) invalid(kWhere, "the text of the call names no operation");
    site_.run = operation_->run;
    site_.score = score_.parsed();
    site_.mask = mask_.parsed();
    site_.num_score_tensors = score_.slots.size();
    site_.num_mask_tensors = mask_.slots.size();
    order_lists();
  }

 private:
  void read_line(std::string_view name, std::string_view value) {
    if (name == "operation") {
      operation_ = find_row(kOperations, value);
      if (operation_ == nullptr) unknown("operation", value);
    } else if (name == "layout") {
      is_heads_first_ = value == "bhsd";
    } else if (name == "operand") {
      site_.operands.push_back(place_of(value));
    } else if (name == "result") {
      site_.results.push_back(place_of(value));
    } else if (name == "quant") {
      site_.quant = value;
      site_.arguments.forward.quant = site_.quant.c_str();
    } else if (name == "score" || name == "mask") {
      (name == "score" ? score_ : mask_).text = value;
    } else if (name == "score_slot" || name == "mask_slot") {
      (name == "score_slot" ? score_ : mask_).add_slot(value);
    } else if (const Number* const number = find_row(kNumbers, name)) {
      write_number(*number, value, site_.arguments);
    } else {
      unknown("line", name);
    }
  }

  Place place_of(std::string_view name) {
    std::string_view rest = name;
    const std::string_view list = take_until(':', rest);
    if (list.size() < name.size()) return place_in_list(list, rest);
    const Field* field = find_row(operation().fields, name);
    if (field == nullptr) field = find_row(kForwardFields, name);
    if (field == nullptr) unknown("operand or result", name);
    return {Place::Kind::field, field->at, is_heads_first_ && field->has_heads};
  }

  Place place_in_list(std::string_view list, std::string_view name) {
    if (list == "score") return {Place::Kind::score, num_score_++};
    if (list == "mask") return {Place::Kind::mask, num_mask_++};
    const ListField* const field = find_row(operation().lists, list);
    if (field == nullptr) unknown("list", list);
    named_.push_back(field);
    site_.names.emplace_back(name);
    return {Place::Kind::named, site_.names.size() - 1};
  }

  /// Elements of one list stand together, since its operands or its results do.
  void order_lists() {
    for (std::size_t i = 0; i < named_.size(); ++i) {
      if (i == 0 || named_[i] != named_[i - 1])
        site_.lists.push_back({named_[i]->list_at, named_[i]->count_at, i, i});
      site_.lists.back().end = i + 1;
    }
  }

  const Operation& operation() const {
    if (operation_ == nullptr)
      invalid(kWhere, "the text of the call names an array before its operation");
    return *operation_;
  }

  [[noreturn]] static void unknown(std::string_view what, std::string_view name) {
    invalid(kWhere, std::string(what).append(" '").append(name).append(
                        "' is not known; expected a call of fovea.jax of this version"));
  }

  CallSite& site_;
  const Operation* operation_ = nullptr;
  bool is_heads_first_ = false;
  ProgramText score_{FOVEA_SCORE_MOD}, mask_{FOVEA_MASK_MOD};
  std::size_t num_score_ = 0, num_mask_ = 0;
  std::vector<const ListField*> named_;
};

template <typename Struct>
void fill_size(Struct& args) {
  args.struct_size = sizeof args;
  args.version = FOVEA_ABI_VERSION;
}

}  // namespace

CallSite::CallSite(std::string_view text) {
  fill_size(arguments.forward);
  fill_size(arguments.backward);
  fill_size(arguments.jvp);
  fill_size(arguments.double_backward);
  fill_size(arguments.decode);
  Reader(*this).read(text);
}

std::shared_ptr<const CallSite> CallSites::find(std::string_view text) {
  {
    const std::shared_lock lock(mutex_);
    const auto found = sites_.find(text);
    if (found != sites_.end()) return found->second;
  }
  auto made = std::make_shared<const CallSite>(text);
  const std::unique_lock lock(mutex_);
  if (sites_.size() >= kMaxSites) sites_.clear();
  return sites_.try_emplace(std::string(text), std::move(made)).first->second;
}

}  // namespace fovea::ffi::xla
