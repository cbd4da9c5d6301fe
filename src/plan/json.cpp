#include "plan/json.hpp"

#include <fmt/format.h>

namespace fovea {

std::string quoted_json(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      result += fmt::format("\\u{:04x}", static_cast<int>(c));
    } else {
      result += c;
    }
  }
  return result + '"';
}

JsonObject& JsonObject::json(std::string_view name, std::string_view value) {
  if (text_.size() > 1) text_ += ", ";
  text_ += quoted_json(name);
  text_ += ": ";
  text_ += value;
  return *this;
}

}  // namespace fovea
