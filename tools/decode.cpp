// fovea decode: the loop of a server, small enough to read. Captured layers of a model see a text token by token; each
// layer keeps its keys and values in a cache that grows.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>

#include "fovea/kv_cache.hpp"

#include "array.hpp"
#include "attention_options.hpp"
#include "command.hpp"
#include "command_line.hpp"
#include "core/shape.hpp"
#include "failure.hpp"
#include "files.hpp"
#include "progress.hpp"
#include "reference/element.hpp"
#include "reference/tolerance.hpp"
#include "safetensors.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;
using Seconds = std::chrono::duration<double>;

constexpr const char* kAbout =
    "Serves captured layers of a model from a growing cache: a prompt in one call, then token by "
    "token. Every row is compared "
    "with one causal call over the whole text.";

constexpr const char* kExamples =
    R"(Examples
  Three layers of a small transformer, half of the text as prompt:
    fovea decode --input moby_dick_layer0.safetensors --input moby_dick_layer3.safetensors \
      --input moby_dick_layer5.safetensors
  One layer from a contiguous cache, one thread, every token by itself:
    fovea decode --input moby_dick_layer0.safetensors --page-size 0 --prompt 0 --threads 1

Files hold q, k and v, [batch, seqlen, heads, head_dim], equal shapes in every file. A token passes all layers in order.

Exit codes: 0 done; 1 a row differs from prefill by more than allowed, or is not finite though every input is; 2 bad input; 3 not supported here.
)";

struct DecodeOptions {
  AttentionOptions attention;
  std::vector<std::string> inputs;
  std::int64_t page_size = 16;
  std::optional<std::int64_t> prompt;
  bool wants_json = false;
};

void add_decode_options(CommandLine& line, DecodeOptions& o) {
  constexpr const char* kGroup = "Input";
  const auto integer = [&](const std::string& option, const std::string& help, auto set) {
    line.add({option, "N", kGroup, help}, [=](const std::string& name, const std::string& text) {
      set(parse_integer(name, text, {.least = 0, .most = 1 << 30}));
    });
  };
  line.add_repeated({"--input", "FILE", kGroup,
                     "a layer: a .safetensors file with tensors q, k and v; may be repeated"},
                    [&](const std::string&, const std::string& path) { o.inputs.push_back(path); });
  integer("--prompt", "tokens of the first call (default: half of the text)",
          [&o](std::int64_t value) { o.prompt = value; });
  integer("--page-size", "keys in a page of the cache (default 16); 0: a contiguous cache",
          [&o](std::int64_t value) { o.page_size = value; });
  add_run_options(line, o.attention);
  add_threads_option(line, o.attention.threads);
  line.add_flag({"--json", "", "Output", "print one JSON object"}, o.wants_json);
}

/// Tokens [begin, begin + count) of a tensor [batch, seqlen, heads, head_dim].
TensorView tokens(const TensorView& view, std::int64_t begin, std::int64_t count) {
  TensorSpec spec = view.spec();
  spec.shape[1] = count;
  const auto offset = begin * view.stride(1) * static_cast<std::int64_t>(size_bytes(spec.dtype));
  auto* const data = static_cast<std::byte*>(const_cast<void*>(view.data())) + offset;
  return view.is_mutable() ? TensorView(static_cast<void*>(data), spec)
                           : TensorView(static_cast<const void*>(data), spec);
}

/// A layer's tensors, its cache, and what came out: served, and computed at once.
struct Layer {
  std::string path;
  Array q, k, v;
  Array k_cache, v_cache, page_table, seqlens;
  Array served, whole;

  KvCache cache() const {
    return {.k = k_cache.mutable_view(),
            .v = v_cache.mutable_view(),
            .page_table = page_table.view(),
            .seqlens = seqlens.view()};
  }
};

Array zeros(Dtype dtype, std::initializer_list<std::int64_t> shape) {
  return make_array(dtype, std::span(shape.begin(), shape.size()));
}

/// Pages are handed out to the sequences in turn, as they grow: those of one sequence do not lie together.
void make_cache(Layer& layer, std::int64_t page_size) {
  const auto& [batch, seqlen, heads, head_dim] = std::array{
      layer.k.spec.shape[0], layer.k.spec.shape[1], layer.k.spec.shape[2], layer.k.spec.shape[3]};
  const Dtype dtype = layer.k.spec.dtype;
  const std::int64_t head_dim_v = layer.v.spec.shape[3];
  layer.seqlens = zeros(Dtype::i32, {batch});
  if (page_size == 0) {
    layer.k_cache = zeros(dtype, {batch, seqlen, heads, head_dim});
    layer.v_cache = zeros(dtype, {batch, seqlen, heads, head_dim_v});
    return;
  }
  const std::int64_t pages = (seqlen + page_size - 1) / page_size;
  layer.k_cache = zeros(dtype, {batch * pages, page_size, heads, head_dim});
  layer.v_cache = zeros(dtype, {batch * pages, page_size, heads, head_dim_v});
  layer.page_table = zeros(Dtype::i32, {batch, pages});
  auto* const table = static_cast<std::int32_t*>(layer.page_table.mutable_view().mutable_data());
  for (std::int64_t sequence = 0; sequence < batch; ++sequence) {
    for (std::int64_t page = 0; page < pages; ++page)
      table[sequence * pages + page] = static_cast<std::int32_t>(page * batch + sequence);
  }
}

Layer load_layer(const std::string& path, const DecodeOptions& options) {
  const Safetensors file(read_file("--input", path), fmt::format("--input: {}", path));
  Layer layer{.path = path,
              .q = file.tensor("q"),
              .k = file.tensor("k"),
              .v = file.tensor("v"),
              .k_cache = {},
              .v_cache = {},
              .page_table = {},
              .seqlens = {},
              .served = {},
              .whole = {}};
  for (const auto& [name, array] : {std::pair{"q", &layer.q}, {"k", &layer.k}, {"v", &layer.v}}) {
    if (array->spec.rank != 4 || !is_float(array->spec.dtype)) {
      bad_input(
          fmt::format("--input: {}: {} is {}; expected floats [batch, seqlen, heads, head_dim]",
                      path, name, to_string(array->spec)));
    }
  }
  if (layer.q.spec.shape[1] != layer.k.spec.shape[1]) {
    bad_input(fmt::format("--input: {}: q has {} tokens and k {}; expected as many", path,
                          layer.q.spec.shape[1], layer.k.spec.shape[1]));
  }
  make_cache(layer, options.page_size);
  TensorSpec out = layer.q.spec;
  out.shape[3] = layer.v.spec.shape[3];
  layer.served = make_array(Dtype::f32, shape_of(out));
  layer.whole = make_array(Dtype::f32, shape_of(out));
  return layer;
}

std::vector<Layer> load_layers(const DecodeOptions& options) {
  if (options.inputs.empty())
    bad_input("--input: is missing; expected a .safetensors file with tensors q, k and v");
  std::vector<Layer> layers;
  for (const std::string& path : options.inputs) {
    layers.push_back(load_layer(path, options));
    if (!std::ranges::equal(shape_of(layers.back().q.spec), shape_of(layers[0].q.spec))) {
      bad_input(fmt::format("--input: {}: q is {}; expected the shape of the first layer, {}", path,
                            to_string(layers.back().q.spec), to_string(layers[0].q.spec)));
    }
  }
  return layers;
}

/// One step of the server: these tokens through all layers.
void serve(std::vector<Layer>& layers, std::int64_t begin, std::int64_t count,
           const AttentionOptions& options, Executor& executor) {
  for (Layer& layer : layers) {
    attention_decode({.q = tokens(layer.q.view(), begin, count),
                      .cache = layer.cache(),
                      .append = {.k = tokens(layer.k.view(), begin, count),
                                 .v = tokens(layer.v.view(), begin, count)},
                      .out = tokens(layer.served.mutable_view(), begin, count),
                      .cpu_target = options.target,
                      .compute_dtype = options.compute_dtype,
                      .executor = &executor});
    auto* const seqlens = static_cast<std::int32_t*>(layer.seqlens.mutable_view().mutable_data());
    for (std::int64_t i = 0; i < layer.seqlens.spec.shape[0]; ++i)
      seqlens[i] = static_cast<std::int32_t>(begin + count);
  }
}

/// One causal call over the whole text. Its explanation tells the kernel.
Explanation prefill(Layer& layer, const AttentionOptions& options, Executor& executor) {
  AttentionForward args{.q = layer.q.view(),
                        .k = layer.k.view(),
                        .v = layer.v.view(),
                        .out = layer.whole.mutable_view(),
                        .mask = causal(),
                        .compute_dtype = options.compute_dtype,
                        .cpu_target = options.target,
                        .executor = &executor};
  attention_forward(args);
  return explain(problem_of(args));
}

struct Report {
  Explanation explanation{};
  std::int64_t num_layers = 0, batch = 0, prompt = 0, seqlen = 0, page_size = 0;
  int num_threads = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  double difference = 0, allowed = 0;
  std::int64_t num_wrong =
      0;  // elements beyond what is allowed, or not finite where all inputs are

  double prefill_rate() const { return static_cast<double>(batch * prompt) / prefill_seconds; }
  double decode_rate() const {
    return static_cast<double>(batch * (seqlen - prompt)) / decode_seconds;
  }
  bool passes() const { return num_wrong == 0; }
};

/// Both may be off by a few dozen roundings of what the products take, relative to the largest value.
constexpr double kRoundings = 64;

bool is_finite(const std::vector<double>& values) {
  return std::ranges::all_of(values, [](double value) { return std::isfinite(value); });
}

/// What is not finite must be so in both, and only where an input is: two calls that lose everything agree, too.
void compare(const Layer& layer, Dtype product, Report& report) {
  const std::vector<double> served = reference::elements(layer.served.view());
  const std::vector<double> whole = reference::elements(layer.whole.view());
  const std::vector<double> values = reference::elements(layer.v.view());
  reference::Tolerance tolerance{.norm = std::numeric_limits<double>::infinity()};
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    tolerance.absolute =
        std::max(tolerance.absolute, kRoundings * reference::rounding(product, value));
  }
  const reference::Comparison compared = reference::compare(served, whole, tolerance);
  report.num_wrong += compared.num_wrong;
  report.difference = std::max(report.difference, compared.largest_error);
  report.allowed = std::max(report.allowed, tolerance.absolute);
  const bool has_finite_inputs = is_finite(values) &&
                                 is_finite(reference::elements(layer.q.view())) &&
                                 is_finite(reference::elements(layer.k.view()));
  if (has_finite_inputs)
    report.num_wrong +=
        std::ranges::count_if(whole, [](double each) { return !std::isfinite(each); });
}

Report run(std::vector<Layer>& layers, const DecodeOptions& options) {
  const std::unique_ptr<Executor> executor = make_thread_pool(options.attention.threads);
  const TensorSpec& q = layers[0].q.spec;
  Report report{.num_layers = static_cast<std::int64_t>(layers.size()),
                .batch = q.shape[0],
                .prompt = options.prompt.value_or(q.shape[1] / 2),
                .seqlen = q.shape[1],
                .page_size = options.page_size,
                .num_threads = executor->concurrency()};
  if (report.prompt > report.seqlen) {
    bad_input(fmt::format("--prompt: got {}; expected at most {}, the tokens of the text",
                          report.prompt, report.seqlen));
  }
  Progress progress("fovea decode: computing at once");
  for (Layer& layer : layers) report.explanation = prefill(layer, options.attention, *executor);
  progress.set("fovea decode: serving");
  const auto begin = std::chrono::steady_clock::now();
  if (report.prompt > 0) serve(layers, 0, report.prompt, options.attention, *executor);
  const auto after_prompt = std::chrono::steady_clock::now();
  for (std::int64_t token = report.prompt; token < report.seqlen; ++token)
    serve(layers, token, 1, options.attention, *executor);
  report.prefill_seconds = Seconds(after_prompt - begin).count();
  report.decode_seconds = Seconds(std::chrono::steady_clock::now() - after_prompt).count();
  const bool is_bf16 = report.explanation.compute_dtype == "bf16";
  for (const Layer& layer : layers) compare(layer, is_bf16 ? Dtype::bf16 : Dtype::f32, report);
  return report;
}

std::string print(const Report& r) {
  std::string text = fmt::format("ran        {} layers, {}\n", r.num_layers, r.explanation.problem);
  text += fmt::format("on         {}, {} products, {} threads\n", r.explanation.target,
                      r.explanation.compute_dtype, r.num_threads);
  text += r.page_size > 0 ? fmt::format("cache      pages of {} keys\n", r.page_size)
                          : std::string("cache      contiguous\n");
  if (r.prompt > 0) {
    text += fmt::format("prompt     {} tokens in {:.3f} ms: {:.0f} tokens/s\n", r.batch * r.prompt,
                        r.prefill_seconds * 1e3, r.prefill_rate());
  }
  if (r.seqlen > r.prompt) {
    text += fmt::format("decode     {} tokens in {:.3f} ms: {:.0f} tokens/s\n",
                        r.batch * (r.seqlen - r.prompt), r.decode_seconds * 1e3, r.decode_rate());
  }
  return text + fmt::format(
                    "check      every row beside one causal call: max difference {:.3g} (allowed "
                    "{:.3g}): {}\n",
                    r.difference, r.allowed,
                    r.passes() ? "right" : fmt::format("WRONG, {} elements", r.num_wrong));
}

Json json_of(const Report& r) {
  return {{"command", "decode"},
          {"explanation", Json::parse(r.explanation.json())},
          {"num_layers", r.num_layers},
          {"num_threads", r.num_threads},
          {"page_size", r.page_size},
          {"batch", r.batch},
          {"prompt_tokens", r.batch * r.prompt},
          {"prompt_ms", r.prefill_seconds * 1e3},
          {"decode_tokens", r.batch * (r.seqlen - r.prompt)},
          {"decode_ms", r.decode_seconds * 1e3},
          {"decode_tokens_per_second", r.seqlen > r.prompt ? r.decode_rate() : 0},
          {"check",
           {{"passes", r.passes()},
            {"max_difference", r.difference},
            {"allowed", r.allowed},
            {"num_wrong", r.num_wrong}}}};
}

}  // namespace

int run_decode(const std::vector<std::string>& words) {
  DecodeOptions options;
  CommandLine line("fovea decode", kAbout, kExamples);
  add_decode_options(line, options);
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;
  std::vector<Layer> layers = load_layers(options);
  const Report report = run(layers, options);
  print_out(options.wants_json ? json_of(report).dump() + "\n" : print(report));
  if (report.passes()) return kSuccess;
  throw Failure(
      kFailed,
      "a row served from the cache differs from prefill by more than allowed, or is not finite");
}

}  // namespace fovea::tools
