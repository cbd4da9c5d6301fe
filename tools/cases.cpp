#include "cases.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "failure.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::json;
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 40;

class CaseReader {
 public:
  CaseReader(const Json& json, std::string_view where) : json_(json), where_(where) {}

  Case read() {
    if (!json_.is_object()) fail("is not an object");
    result_.name = text("name");
    result_.why = text("why");
    for (const auto& item : json_.items()) {
      key_ = item.key();
      const auto field = fields().find(key_);
      if (field == fields().end()) fail("is an unknown key");
      field->second(*this, item.value());
    }
    key_ = "seqlen_q";
    if (result_.seqlens_q.size() != result_.seqlens_kv.size())
      fail("and seqlen_kv pack different numbers of sequences");
    if (result_.seqlens_q.empty() && !result_.options.seqlen_q) fail("is missing");
    check_packed();
    check_latent_values();
    check_cache();
    return std::move(result_);
  }

 private:
  void check_packed() {
    if (result_.seqlens_q.empty()) return;
    for (const std::string_view key : {"batch", "documents"}) {
      key_ = key;
      if (json_.contains(key)) fail("stands beside packed sequences");
    }
  }

  void check_latent_values() {
    const AttentionOptions& o = result_.options;
    if (!o.has_latent_values) return;
    key_ = "latent_values";
    if (o.head_dim && o.head_dim_v.value_or(*o.head_dim) > *o.head_dim)
      fail("stands beside values that are wider than keys");
  }

  void check_cache() {
    const AttentionOptions& o = result_.options;
    key_ = "codes";
    if (result_.codes && result_.page_size == 0 && !result_.is_cached)
      fail("stands beside no cache; expected page_size or cached");
    if (result_.codes && result_.shared_prefix > 0) fail("stands beside shared_prefix");
    if (result_.page_size == 0 && result_.shared_prefix == 0 && !result_.is_cached) return;
    key_ = result_.page_size > 0       ? "page_size"
           : result_.shared_prefix > 0 ? "shared_prefix"
                                       : "cached";
    if (result_.is_backward) fail("stands beside backward: a cache has no gradients");
    if (!result_.seqlens_q.empty()) fail("stands beside packed sequences");
    if (result_.num_documents > 0 || o.dropout.p > 0) fail("stands beside documents or dropout");
    if (!o.quant.is_none()) fail("stands beside quant: a cache is not rounded");
    const std::int64_t seqlen_kv = o.seqlen_kv.value_or(*o.seqlen_q);
    if (result_.page_size > 0 && seqlen_kv % result_.page_size != 0)
      fail("does not divide seqlen_kv");
    key_ = "shared_prefix";
    if (result_.shared_prefix > std::max<std::int64_t>(0, seqlen_kv - *o.seqlen_q))
      fail("is more than seqlen_kv - seqlen_q: queries stand behind it");
  }

  using Field = std::function<void(CaseReader&, const Json&)>;

  [[noreturn]] void fail(std::string_view reason) const {
    bad_input(fmt::format("{}: case '{}': {} {}", where_, result_.name, key_, reason));
  }

  std::string text(std::string_view key) {
    key_ = key;
    if (!json_.contains(key) || !json_[key_].is_string()) fail("is not a string");
    return json_[key_].get<std::string>();
  }

  std::string string(const Json& value) const {
    if (!value.is_string()) fail("is not a string");
    return value.get<std::string>();
  }

  std::int64_t count(const Json& value) const {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kMaxExtent)
      fail("is not a count");
    return value.get<std::int64_t>();
  }

  float real(const Json& value) const {
    if (!value.is_number()) fail("is not a number");
    return value.get<float>();
  }

  bool boolean(const Json& value) const {
    if (!value.is_boolean()) fail("is not true or false");
    return value.get<bool>();
  }

  Dtype code(const Json& value) const {
    const std::string named = string(value);
    for (const Dtype dtype : {Dtype::i8, Dtype::e4m3})
      if (named == name(dtype)) return dtype;
    fail("is not i8 or e4m3");
  }

  Quantization recipe(const Json& value) const {
    const Quantization quant =
        parse_recipe(fmt::format("{}: case '{}': {}", where_, result_.name, key_), string(value));
    if (quant.accuracy > 0) fail("is an accuracy; expected a recipe, whose kernels are known");
    if (quant.scales == ScaleSource::given) fail("has scales=given; a case gives none");
    return quant;
  }

  /// One length, or a list of the lengths of packed sequences.
  void lengths(const Json& value, std::optional<std::int64_t>& length,
               std::vector<std::int64_t>& packed) {
    if (!value.is_array()) {
      length = count(value);
      return;
    }
    for (const Json& entry : value) packed.push_back(count(entry));
    if (packed.empty()) fail("is an empty list");
    result_.options.layout = Layout::thd;
  }

  void window(const Json& value) {
    if (!value.is_array() || value.size() != 2)
      fail("is not [left, right], null for an unbounded side");
    const auto side = [&](const Json& entry) -> std::optional<std::int64_t> {
      if (entry.is_null()) return std::nullopt;
      return count(entry);
    };
    result_.options.window = Window{.left = side(value[0]), .right = side(value[1])};
  }

  void scalars(const Json& value) {
    if (!value.is_object()) fail("is not an object");
    for (const auto& item : value.items()) {
      if (item.value().is_number_unsigned() && item.value().get<std::uint64_t>() > kMaxExtent)
        fail(fmt::format("holds {}, which is beyond 32 bits", item.value().dump()));
      if (item.value().is_number_integer()) {
        result_.options.scalars.push_back(
            CapturedScalar::of(item.key(), item.value().get<std::int64_t>()));
      } else {
        result_.options.scalars.push_back(
            CapturedScalar::of(item.key(), static_cast<double>(real(item.value()))));
      }
    }
  }

  static const std::map<std::string, Field, std::less<>>& fields() {
    static const std::map<std::string, Field, std::less<>> all_fields = {
        {"name", [](CaseReader&, const Json&) {}},
        {"why", [](CaseReader&, const Json&) {}},
        {"batch", [](CaseReader& r, const Json& v) { r.result_.options.batch = r.count(v); }},
        {"seqlen_q",
         [](CaseReader& r, const Json& v) {
           r.lengths(v, r.result_.options.seqlen_q, r.result_.seqlens_q);
         }},
        {"seqlen_kv",
         [](CaseReader& r, const Json& v) {
           r.lengths(v, r.result_.options.seqlen_kv, r.result_.seqlens_kv);
         }},
        {"num_heads_q",
         [](CaseReader& r, const Json& v) { r.result_.options.num_heads_q = r.count(v); }},
        {"num_heads_kv",
         [](CaseReader& r, const Json& v) { r.result_.options.num_heads_kv = r.count(v); }},
        {"head_dim", [](CaseReader& r, const Json& v) { r.result_.options.head_dim = r.count(v); }},
        {"head_dim_v",
         [](CaseReader& r, const Json& v) { r.result_.options.head_dim_v = r.count(v); }},
        {"latent_values",
         [](CaseReader& r, const Json& v) { r.result_.options.has_latent_values = r.boolean(v); }},
        {"dtype",
         [](CaseReader& r, const Json& v) {
           r.result_.options.dtype = parse_float_dtype("dtype", r.string(v));
         }},
        {"softmax_scale",
         [](CaseReader& r, const Json& v) { r.result_.options.softmax_scale = r.real(v); }},
        {"softcap", [](CaseReader& r, const Json& v) { r.result_.options.softcap = r.real(v); }},
        {"alibi", [](CaseReader& r, const Json& v) { r.result_.has_alibi = r.boolean(v); }},
        {"sinks", [](CaseReader& r, const Json& v) { r.result_.has_sinks = r.boolean(v); }},
        {"score_mod",
         [](CaseReader& r, const Json& v) { r.result_.options.score_mod = r.string(v); }},
        {"backward", [](CaseReader& r, const Json& v) { r.result_.is_backward = r.boolean(v); }},
        {"deterministic",
         [](CaseReader& r, const Json& v) { r.result_.options.is_deterministic = r.boolean(v); }},
        {"causal",
         [](CaseReader& r, const Json& v) {
           r.result_.options.is_causal = true;
           r.result_.options.causal_align = parse_align("causal", r.string(v));
         }},
        {"window", [](CaseReader& r, const Json& v) { r.window(v); }},
        {"page_size", [](CaseReader& r, const Json& v) { r.result_.page_size = r.count(v); }},
        {"cached", [](CaseReader& r, const Json& v) { r.result_.is_cached = r.boolean(v); }},
        {"codes", [](CaseReader& r, const Json& v) { r.result_.codes = r.code(v); }},
        {"shared_prefix",
         [](CaseReader& r, const Json& v) { r.result_.shared_prefix = r.count(v); }},
        {"documents", [](CaseReader& r, const Json& v) { r.result_.num_documents = r.count(v); }},
        {"mask_mod",
         [](CaseReader& r, const Json& v) { r.result_.options.mask_mod = r.string(v); }},
        {"scalars", [](CaseReader& r, const Json& v) { r.scalars(v); }},
        {"dropout", [](CaseReader& r, const Json& v) { r.result_.options.dropout.p = r.real(v); }},
        {"quant", [](CaseReader& r, const Json& v) { r.result_.options.quant = r.recipe(v); }},
    };
    return all_fields;
  }

  const Json& json_;
  std::string_view where_;
  std::string key_;
  Case result_;
};

/// A small generator of normal numbers (Marsaglia's xorshift64*, sums of four uniforms): data of a benchmark, no
/// statistics.
class Normal {
 public:
  float next() {
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += uniform();
    return (sum - 2) * 1.7320508F;
  }

 private:
  float uniform() {
    state_ ^= state_ >> 12U;
    state_ ^= state_ << 25U;
    state_ ^= state_ >> 27U;
    return static_cast<float>((state_ * 0x2545F4914F6CDD1DU) >> 40U) * 0x1p-24F;
  }
  std::uint64_t state_ = 0x9E3779B97F4A7C15U;
};

template <typename T>
void fill(Array& array, const std::function<float()>& next) {
  auto* data = static_cast<T*>(array.mutable_view().mutable_data());
  for (std::int64_t i = 0; i < array.spec.num_elements(); ++i) data[i] = T(next());
}

Array random_array(const TensorSpec& spec, Normal& normal) {
  Array array = make_array(spec.dtype, {spec.shape.data(), static_cast<std::size_t>(spec.rank)});
  const std::function<float()> next = [&] { return normal.next(); };
  if (spec.dtype == Dtype::f32) fill<float>(array, next);
  if (spec.dtype == Dtype::f16) fill<float16>(array, next);
  if (spec.dtype == Dtype::bf16) fill<bfloat16>(array, next);
  return array;
}

Array i32_array(const std::vector<std::int64_t>& shape,
                const std::function<std::int32_t(std::int64_t)>& value) {
  Array array = make_array(Dtype::i32, shape);
  auto* data = static_cast<std::int32_t*>(array.mutable_view().mutable_data());
  for (std::int64_t i = 0; i < array.spec.num_elements(); ++i) data[i] = value(i);
  return array;
}

Array cumulative(const std::vector<std::int64_t>& seqlens) {
  std::vector<std::int64_t> sums{0};
  for (const std::int64_t seqlen : seqlens) sums.push_back(sums.back() + seqlen);
  return i32_array({static_cast<std::int64_t>(sums.size())}, [&](std::int64_t i) {
    return static_cast<std::int32_t>(sums[static_cast<std::size_t>(i)]);
  });
}

Array document_ids(std::int64_t batch, std::int64_t seqlen, std::int64_t num_documents) {
  return i32_array({batch, seqlen}, [=](std::int64_t i) {
    return static_cast<std::int32_t>(i % seqlen * num_documents / seqlen);
  });
}

Array alibi_slopes(std::int64_t num_heads_q) {
  Array slopes = make_array(Dtype::f32, std::array{num_heads_q});
  std::int64_t head = 0;
  fill<float>(slopes, [&] {
    return std::exp2(-8 * static_cast<float>(++head) / static_cast<float>(num_heads_q));
  });
  return slopes;
}

/// A key that stands twice in one object would hide what the first one says.
Json parse_json(std::string_view text, std::string_view where) {
  std::vector<std::set<std::string>> keys;  // of the objects around
  const auto callback = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      bad_input(fmt::format("{}: the key {} stands twice in one object", where, parsed.dump()));
    return true;
  };
  try {
    return Json::parse(text, callback);
  } catch (const Json::parse_error& error) {
    bad_input(fmt::format("{}: no JSON from byte {} on; expected {{\"cases\": [...]}}", where,
                          error.byte));
  } catch (const Json::out_of_range&) {
    bad_input(fmt::format("{}: holds a number beyond the range of doubles", where));
  }
}

/// Packed tensors have the shapes of the options, but their rows in one axis.
void pack(const Case& problem, Inputs& inputs) {
  inputs.cu_seqlens_q = cumulative(problem.seqlens_q);
  inputs.cu_seqlens_kv = cumulative(problem.seqlens_kv);
  const auto packed = [](const TensorSpec& spec, const std::vector<std::int64_t>& seqlens) {
    std::int64_t total = 0;
    for (const std::int64_t seqlen : seqlens) total += seqlen;
    return make_spec(spec.dtype, std::array{total, spec.shape[2], spec.shape[3]});
  };
  inputs.q.spec = packed(inputs.q.spec, problem.seqlens_q);
  inputs.k.spec = packed(inputs.k.spec, problem.seqlens_kv);
  inputs.v.spec = packed(inputs.v.spec, problem.seqlens_kv);
}

}  // namespace

std::vector<Case> parse_cases(std::string_view json, std::string_view where) {
  const Json root = parse_json(json, where);
  if (!root.is_object() || !root.contains("cases") || !root["cases"].is_array()) {
    bad_input(fmt::format("{}: not a file of cases; expected {{\"cases\": [...]}}", where));
  }
  for (const auto& item : root.items()) {
    if (item.key() != "cases")
      bad_input(
          fmt::format("{}: {} is an unknown key; expected \"cases\" alone", where, item.key()));
  }
  std::vector<Case> cases;
  for (const Json& entry : root["cases"]) cases.push_back(CaseReader(entry, where).read());
  return cases;
}

std::vector<Case> built_in_cases() {
  std::vector<Case> cases;
  for (const CaseText& text : case_texts()) {
    for (Case& problem : parse_cases(text.json, text.name)) cases.push_back(std::move(problem));
  }
  return cases;
}

void fill_random(Inputs& inputs) {
  Normal normal;
  inputs.q = random_array(inputs.q.spec, normal);
  inputs.k = random_array(inputs.k.spec, normal);
  inputs.v = random_array(inputs.v.spec, normal);
}

Inputs make_inputs(const Case& problem) {
  Inputs inputs = make_shapes(problem);
  fill_random(inputs);
  return inputs;
}

Inputs make_shapes(const Case& problem) {
  AttentionOptions shapes = problem.options;
  const bool is_packed = problem.options.layout == Layout::thd;
  if (is_packed) {
    shapes.layout = Layout::bshd;
    shapes.seqlen_q = 0;
  }
  OutputFiles no_files;
  Inputs inputs = inputs_of_shapes(shapes, no_files);
  if (is_packed) pack(problem, inputs);
  const std::int64_t num_heads_q = shapes.num_heads_q.value_or(1);
  if (problem.has_alibi) inputs.alibi = alibi_slopes(num_heads_q);
  if (problem.has_sinks) inputs.sinks = alibi_slopes(num_heads_q);
  if (problem.num_documents > 0 && !is_packed) {
    inputs.segments_q =
        document_ids(inputs.q.spec.shape[0], inputs.q.spec.shape[1], problem.num_documents);
    inputs.segments_kv =
        document_ids(inputs.k.spec.shape[0], inputs.k.spec.shape[1], problem.num_documents);
  }
  return inputs;
}

}  // namespace fovea::tools
