// fovea calibrate: what recipes cost a layer's own q, k and v, head by head.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "attention_options.hpp"
#include "command.hpp"
#include "command_line.hpp"
#include "core/shape.hpp"
#include "failure.hpp"
#include "files.hpp"
#include "png.hpp"
#include "progress.hpp"
#include "quant/check.hpp"
#include "recipe_file.hpp"

namespace fovea::tools {
namespace {

constexpr const char* kAbout =
    "Measures what each recipe of eight-bit attention, or those named, costs real q, k and v, head "
    "by head, the worst first, beside attention in f32; chooses the fastest recipe that every head "
    "bears, and writes it to a file that calls take.";

constexpr const char* kExamples =
    R"(Examples
  A layer's tensors q, k and v:
    fovea calibrate layer3.safetensors --causal
  The recipe that keeps every head within 2 %, for calls and plans; a picture:
    fovea calibrate layer3.safetensors --accuracy 0.02 --out layer3.json --png layer3.png
    fovea attend --input other.safetensors --quant layer3.json --out out.safetensors
  Recipes of one's own, the fastest first:
    fovea calibrate layer3.safetensors --recipe fast,hadamard=yes --recipe accurate
  What four bits would cost:
    fovea calibrate layer3.safetensors --recipe nvfp4 --recipe mxfp4

Error: |got - exact| / |exact| of a head's out, over all sequences and queries. Of the recipes measured by default, `fast`
and `accurate`, rotated or not, are chosen among; the others are shown. A plan has one recipe for all heads, so the choice
is for the worst head; the file has each head's own beside it.

Exit codes: 0 done; 1 writing failed; 2 bad input; 3 not supported here.
)";

/// Fastest first: those chosen among, and those shown beside them.
constexpr std::string_view kChoices[] = {"fast", "fast,hadamard=yes", "accurate",
                                         "accurate,hadamard=yes"};
constexpr std::string_view kShown[] = {"int8", "sage1", "sage2", "fp8_static,scales=measured"};

struct CalibrateOptions {
  AttentionOptions attention;
  std::string input;
  std::vector<std::string> recipes;  // of --recipe
  double accuracy = .02;
  std::optional<std::string> out, png;
  bool wants_json = false;
};

/// A recipe, and whether it may be chosen.
struct Candidate {
  std::string text;
  Quantization quant;
  bool is_choice = false;
};

std::vector<Candidate> candidates_of(const CalibrateOptions& options, std::int64_t head_dim) {
  std::vector<Candidate> candidates;
  const auto add = [&](std::string_view text, bool is_choice) {
    candidates.push_back({std::string(text), parse_quantization(text), is_choice});
  };
  for (const std::string& text : options.recipes) add(text, true);
  if (!candidates.empty()) return candidates;
  for (const std::string_view text : kChoices) add(text, true);
  for (const std::string_view text : kShown) add(text, false);
  // What this head_dim has no rotation for is no news here; named by --recipe it is an error.
  std::erase_if(candidates, [&](const Candidate& each) {
    return !quant::obstacle(each.quant, head_dim).empty();
  });
  return candidates;
}

// ---- Measuring ----

/// out of a call as f32, in the layout that the library has.
Array attend(AttentionForward args, const Array& out, const Quantization& quant) {
  args.quant = quant;
  args.out = out.mutable_view();
  attention_forward(args);
  return out;
}

/// Where heads of out lie: its last but one axis.
std::int64_t num_heads_of(const TensorSpec& out) {
  return out.shape[static_cast<std::size_t>(out.rank - 2)];
}

/// A head without a finite number would cost nothing by any recipe.
void refuse_nothing_to_measure(const std::string& input, const Array& exact) {
  const std::int64_t num_heads = num_heads_of(exact.spec);
  const std::int64_t head_dim = exact.spec.shape[static_cast<std::size_t>(exact.spec.rank - 1)];
  std::vector<bool> has_finite(static_cast<std::size_t>(num_heads));
  const auto* const out = static_cast<const float*>(exact.view().data());
  for (std::int64_t i = 0; i < exact.spec.num_elements(); ++i) {
    if (std::isfinite(out[i]))
      has_finite[static_cast<std::size_t>(i / head_dim % num_heads)] = true;
  }
  const auto without = std::ranges::find(has_finite, false);
  if (num_heads > 0 && without == has_finite.end()) return;
  bad_input(fmt::format(
      "{}: out of q_head {} has no finite number to measure errors by; expected q, k and v "
      "of a layer, without NaN and infinity",
      input, without - has_finite.begin()));
}

/// Of each head, over all elements; those that are not finite exactly are left out. Infinite where the recipe's are not
/// finite, or anything beside zeros.
std::vector<double> errors_of(const Array& got, const Array& exact) {
  const std::int64_t num_heads = num_heads_of(exact.spec);
  const std::int64_t head_dim = exact.spec.shape[static_cast<std::size_t>(exact.spec.rank - 1)];
  std::vector<double> error(static_cast<std::size_t>(num_heads)), norm(error.size());
  const auto* const a = static_cast<const float*>(got.view().data());
  const auto* const b = static_cast<const float*>(exact.view().data());
  for (std::int64_t i = 0; i < exact.spec.num_elements(); ++i) {
    if (!std::isfinite(b[i])) continue;
    const auto head = static_cast<std::size_t>(i / head_dim % num_heads);
    error[head] += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm[head] += std::pow(static_cast<double>(b[i]), 2);
  }
  for (std::size_t head = 0; head < error.size(); ++head) {
    if (error[head] == 0) continue;
    const double relative = std::sqrt(error[head] / norm[head]);
    error[head] = std::isnan(relative) ? std::numeric_limits<double>::infinity() : relative;
  }
  return error;
}

/// [recipe][head]
using Errors = std::vector<std::vector<double>>;

Errors measure(const CalibrateOptions& options, const Inputs& inputs,
               const std::vector<Candidate>& candidates) {
  Progress progress("fovea calibrate: without a recipe");
  const std::unique_ptr<Executor> executor = make_thread_pool(options.attention.threads);
  AttentionForward args = make_call(options.attention, inputs);
  args.compute_dtype = ComputeDtype::f32;
  args.executor = executor.get();
  const TensorView shape =
      as_bshd(TensorView(static_cast<void*>(nullptr), out_spec(inputs, Dtype::f32)),
              options.attention.layout);
  const Array exact = attend(args, make_array(Dtype::f32, shape_of(shape)), {});
  refuse_nothing_to_measure(options.input, exact);
  const Array out = make_array(Dtype::f32, shape_of(shape));
  Errors errors;
  for (const Candidate& candidate : candidates) {
    progress.set(fmt::format("fovea calibrate: {} {}", bar(errors.size(), candidates.size()),
                             candidate.text));
    errors.push_back(errors_of(attend(args, out, candidate.quant), exact));
  }
  return errors;
}

// ---- Choosing ----

/// The first choice within the accuracy, where `error` gives the error of a candidate.
template <typename ErrorOf>
RecipeError choose(const std::vector<Candidate>& candidates, double accuracy, ErrorOf error) {
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].is_choice && error(i) <= accuracy) return {candidates[i].text, error(i)};
  }
  return {"none", 0};
}

RecipeFile choose_all(const CalibrateOptions& options, const std::vector<Candidate>& candidates,
                      const Errors& errors) {
  RecipeFile file{.input = std::filesystem::path(options.input).filename().string(),
                  .accuracy = options.accuracy};
  file.chosen = choose(candidates, options.accuracy,
                       [&](std::size_t i) { return std::ranges::max(errors[i]); });
  for (std::size_t head = 0; head < errors.front().size(); ++head) {
    const auto error = [&](std::size_t i) { return errors[i][head]; };
    HeadRecipe each{.q_head = static_cast<std::int64_t>(head),
                    .chosen = choose(candidates, options.accuracy, error)};
    for (std::size_t i = 0; i < candidates.size(); ++i)
      each.errors.push_back({candidates[i].text, error(i)});
    file.heads.push_back(std::move(each));
  }
  return file;
}

// ---- Showing ----

constexpr std::size_t kColumn = 8;  // least width of a recipe's errors

double worst_of(const HeadRecipe& head) {
  return std::ranges::max_element(head.errors, {}, &RecipeError::error)->error;
}

std::vector<HeadRecipe> worst_first(std::vector<HeadRecipe> heads) {
  std::ranges::stable_sort(heads, std::ranges::greater(), worst_of);
  return heads;
}

/// A bar of the error beside the accuracy: "####--" is two thirds of it, "######>" more than it.
std::string bar_of(double error, double accuracy) {
  constexpr int kWidth = 10;
  const double share = error / accuracy;
  const int filled = static_cast<int>(std::lround(std::min(share, 1.0) * kWidth));
  return std::string(static_cast<std::size_t>(filled), '#') +
         std::string(static_cast<std::size_t>(kWidth - filled), '-') + (share > 1 ? ">" : "");
}

std::string print(const RecipeFile& file) {
  std::string text = fmt::format("{:>6}", "q_head");
  for (const RecipeError& each : file.heads.front().errors)
    text += fmt::format("  {:>{}}", each.quant, kColumn);
  text += fmt::format("  within {:g}\n", file.accuracy);
  for (const HeadRecipe& head : worst_first(file.heads)) {
    text += fmt::format("{:>6}", head.q_head);
    for (const RecipeError& each : head.errors)
      text += fmt::format("  {:>{}.4f}", each.error, std::max(each.quant.size(), kColumn));
    const double error = head.chosen.error;
    text += fmt::format("  {}  {}\n", bar_of(error, file.accuracy), head.chosen.quant);
  }
  text += fmt::format("chosen  {}{}\n", file.chosen.quant,
                      file.chosen.quant == "none"
                          ? ": no choice keeps every head within the accuracy"
                          : fmt::format(", of all heads: the worst has {:.4f}", file.chosen.error));
  return text;
}

/// Green well within the accuracy, yellow at it, red from four times on.
void paint(double error, double accuracy, std::uint8_t* rgb) {
  const double octaves = std::clamp(std::log2(std::max(error, 1e-9) / accuracy), -2.0, 2.0);
  rgb[0] = static_cast<std::uint8_t>(std::lround(230 * std::min(1.0, (octaves + 2) / 2)));
  rgb[1] = static_cast<std::uint8_t>(std::lround(200 * std::min(1.0, (2 - octaves) / 2)));
  rgb[2] = 60;
}

/// A cell for each head (down) and recipe (right), as the table has them.
std::string picture(const RecipeFile& file) {
  constexpr int kCell = 24;
  const std::vector<HeadRecipe> heads = worst_first(file.heads);
  const auto width = static_cast<int>(heads.front().errors.size()) * kCell;
  const auto height = static_cast<int>(heads.size()) * kCell;
  std::vector<std::uint8_t> rgb(static_cast<std::size_t>(width) * static_cast<std::size_t>(height) *
                                3);
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      std::uint8_t* const pixel = &rgb[static_cast<std::size_t>(y * width + x) * 3];
      const bool is_edge = y % kCell == 0 || x % kCell == 0;
      const RecipeError& each =
          heads[static_cast<std::size_t>(y / kCell)].errors[static_cast<std::size_t>(x / kCell)];
      if (!is_edge) paint(each.error, file.accuracy, pixel);
    }
  }
  return encode_png(width, height, rgb);
}

// ---- The command ----

int calibrate(CalibrateOptions& options) {
  options.attention.input = options.input;
  OutputFiles files;
  if (options.out) files.add("--out", *options.out);
  if (options.png) files.add("--png", *options.png);
  if (options.out && !is_recipe_file(*options.out))
    bad_input(fmt::format("--out: {}; expected a name that ends in .json", *options.out));
  const Inputs inputs = load_inputs(options.attention, files);
  files.refuse_clashes();
  const auto head_dim = inputs.q.spec.shape[static_cast<std::size_t>(inputs.q.spec.rank - 1)];
  const std::vector<Candidate> candidates = candidates_of(options, head_dim);
  const RecipeFile file = choose_all(options, candidates, measure(options, inputs, candidates));

  std::vector<OutputFiles::Content> contents;
  if (options.out) contents.push_back({*options.out, to_json(file), {}});
  if (options.png) contents.push_back({*options.png, picture(file), {}});
  OutputFiles::write(contents);
  std::string text = options.wants_json ? to_json(file) : print(file);
  if (!options.wants_json) {
    for (const auto& content : contents) text += fmt::format("wrote   {}\n", content.path);
  }
  print_out(text);
  return kSuccess;
}

void add_calibrate_options(CommandLine& line, CalibrateOptions& options) {
  constexpr const char* kGroup = "Recipes";
  line.add_repeated({"--recipe", "TEXT", kGroup,
                     "measure this recipe, and choose among those given, the first that is good "
                     "enough; may be repeated"},
                    [&](const std::string& option, const std::string& text) {
                      static_cast<void>(parse_recipe(option, text));
                      options.recipes.push_back(text);
                    });
  line.add(
      {"--accuracy", "X", kGroup, "the relative error that every head may have (default 0.02)"},
      [&](const std::string& option, const std::string& text) {
        options.accuracy = parse_accuracy(option, text);
      });
  line.add(
      {"--out", "FILE", kGroup, "write the recipe, and every head's errors, to this .json file"},
      [&](const std::string&, const std::string& path) { options.out = path; });
  line.add({"--png", "FILE", kGroup,
            "write the table as a picture: green within the accuracy, yellow at it, red beyond"},
           [&](const std::string&, const std::string& path) { options.png = path; });
  line.add_flag({"--json", "", kGroup, "print what --out writes instead of a table"},
                options.wants_json);
}

}  // namespace

int run_calibrate(const std::vector<std::string>& words) {
  CalibrateOptions options;
  CommandLine line("fovea calibrate", kAbout, kExamples);
  line.add_word("FILE", "a .safetensors file with tensors q, k and v", options.input);
  add_layout_options(line, options.attention);
  add_score_options(line, options.attention);
  add_mask_options(line, options.attention);
  add_threads_option(line, options.attention.threads);
  add_calibrate_options(line, options);
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;
  return calibrate(options);
}

}  // namespace fovea::tools
