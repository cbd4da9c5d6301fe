#include "recipe_file.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "failure.hpp"
#include "files.hpp"
#include "option_values.hpp"

namespace fovea::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kFormat = "fovea recipe 1";

Json head_json(const HeadRecipe& head) {
  Json errors;
  for (const RecipeError& each : head.errors) errors[each.quant] = each.error;
  return {{"q_head", head.q_head},
          {"quant", head.chosen.quant},
          {"error", head.chosen.error},
          {"errors", errors}};
}

}  // namespace

std::string to_json(const RecipeFile& file) {
  Json heads = Json::array();
  for (const HeadRecipe& head : file.heads) heads.push_back(head_json(head));
  const Json json = {{"format", kFormat},          {"quant", file.chosen.quant},
                     {"error", file.chosen.error}, {"accuracy", file.accuracy},
                     {"input", file.input},        {"heads", heads}};
  return json.dump(2) + "\n";
}

bool is_recipe_file(std::string_view text) { return text.ends_with(".json"); }

Quantization read_recipe(std::string_view option, const std::string& path) {
  const auto file = read_file(option, path);
  const std::span<const std::byte> bytes = file->bytes();
  const auto* const text = reinterpret_cast<const char*>(bytes.data());
  const Json json = Json::parse(text, text + bytes.size(), nullptr, /*allow_exceptions=*/false);
  const auto refuse = [&](std::string_view got) {
    bad_input(
        fmt::format("{}: {}: {}; expected what fovea calibrate --out writes, \"format\": "
                    "\"{}\" and \"quant\"",
                    option, path, got, kFormat));
  };
  if (!json.is_object()) refuse("no JSON object");
  if (!json.contains("format") || json["format"] != kFormat) refuse("another \"format\", or none");
  if (!json.contains("quant") || !json["quant"].is_string()) refuse("no text \"quant\"");
  return parse_recipe(fmt::format("{}: {}", option, path), json["quant"].get<std::string>());
}

}  // namespace fovea::tools
