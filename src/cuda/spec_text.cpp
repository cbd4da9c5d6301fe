#include "cuda/spec_text.hpp"

namespace fovea::cuda {

std::string_view name(Element element) {
  switch (element) {
    case Element::f32:
      return "f32";
    case Element::f16:
      return "f16";
    case Element::bf16:
      return "bf16";
  }
  return "";
}

std::string_view name(Codes codes) {
  switch (codes) {
    case Codes::none:
      return "none";
    case Codes::int8:
      return "int8";
    case Codes::e4m3:
      return "e4m3";
  }
  return "";
}

namespace spec_text {

std::string print_value(Element value) { return "Element::" + std::string(name(value)); }
std::string print_value(Codes value) { return "Codes::" + std::string(name(value)); }
std::string print_value(Instructions value) {
  return value == Instructions::sm75 ? "Instructions::sm75" : "Instructions::sm80";
}
std::string print_value(Rounding value) {
  switch (value) {
    case Rounding::rows:
      return "Rounding::rows";
    case Rounding::lanes:
      return "Rounding::lanes";
    case Rounding::given:
      return "Rounding::given";
  }
  return "";
}
std::string print_value(KeyMean value) {
  switch (value) {
    case KeyMean::none:
      return "KeyMean::none";
    case KeyMean::sample:
      return "KeyMean::sample";
    case KeyMean::all:
      return "KeyMean::all";
  }
  return "";
}
std::string print_value(std::int32_t value) { return std::to_string(value); }
std::string print_value(bool value) { return value ? "true" : "false"; }

}  // namespace spec_text
}  // namespace fovea::cuda
