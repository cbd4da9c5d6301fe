#include "ffi/explanation.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "fovea/fovea.h"

#include "core/check.hpp"

namespace fovea::ffi {

void require_text(char** text, const std::string& where) {
  if (text == nullptr) invalid(where, "text is NULL; expected an address");
  *text = nullptr;
}

// From malloc, so that any language's binding can tell how it is freed.
char* copy_text(const std::string& text) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

char* render(const Explanation& explanation, std::int32_t format, const char* where) {
  switch (format) {
    case FOVEA_TEXT:
      return copy_text(explanation.print());
    case FOVEA_JSON:
      return copy_text(explanation.json());
    default:
      invalid(where, "format is " + std::to_string(format) + "; expected FOVEA_TEXT or FOVEA_JSON");
  }
}

}  // namespace fovea::ffi
