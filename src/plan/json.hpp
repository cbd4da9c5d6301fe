// JSON as the library writes it: an object that grows field by field.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace fovea {

/// A text between quotes, with what JSON does not take there escaped.
std::string quoted_json(std::string_view text);

class JsonObject {
 public:
  JsonObject& text(std::string_view name, std::string_view value) {
    return json(name, quoted_json(value));
  }
  JsonObject& number(std::string_view name, std::integral auto value) {
    return json(name, std::to_string(value));
  }
  JsonObject& flag(std::string_view name, bool value) {
    return json(name, value ? "true" : "false");
  }
  JsonObject& json(std::string_view name, std::string_view value);

  std::string done() const { return text_ + "}"; }

 private:
  std::string text_ = "{";
};

/// write(element) of each, between brackets.
template <typename List, typename Write>
std::string json_list(const List& list, const Write& write) {
  std::string text = "[";
  for (const auto& element : list) {
    if (text.size() > 1) text += ", ";
    text += write(element);
  }
  return text + "]";
}

}  // namespace fovea
