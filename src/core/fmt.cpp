// fmt's functions, compiled once: as headers alone they cost 3 s in each of fifty files (-DFMT_HEADER_ONLY is set here and
// nowhere else). What is named below is emitted, weak as inline functions are, so a program that links libfmt has no clash.
#define FMT_HEADER_ONLY 1

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace fovea {
namespace {

struct Emitted {
  std::string (*vformat)(fmt::string_view, fmt::format_args) = &fmt::vformat;
  void (*vprint)(std::FILE*, fmt::string_view, fmt::format_args) = &fmt::vprint;
  void (*assert_fail)(const char*, int, const char*) = &fmt::detail::assert_fail;
  void (*throw_format_error)(const char*) = &fmt::detail::throw_format_error;
  bool (*is_printable)(std::uint32_t) = &fmt::detail::is_printable;
  fmt::detail::thousands_sep_result<char> (*thousands_sep)(fmt::detail::locale_ref) =
      &fmt::detail::thousands_sep_impl<char>;
  char (*decimal_point)(fmt::detail::locale_ref) = &fmt::detail::decimal_point_impl<char>;
};
[[gnu::used]] const Emitted kEmitted;

}  // namespace
}  // namespace fovea
