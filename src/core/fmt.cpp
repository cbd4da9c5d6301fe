// fmt's functions, compiled once: as headers alone they cost 3 s in each of fifty files (-DFMT_HEADER_ONLY is set here
// and nowhere else). What is called below is emitted, weak as inline functions are, so a program that links libfmt has
// no clash. Calls through fmt's public face alone reach it all, whatever a version names its own functions: the file is
// compiled without inlining (CMakeLists.txt), or what is called would vanish in its callers.
#define FMT_HEADER_ONLY 1

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <string>
#include <vector>

namespace fovea {
namespace {

/// Each kind of argument that the library formats, with and without a specification, and one that is made of others;
/// and what the command prints with.
[[gnu::used]] std::string format_each_kind(std::FILE* file, fmt::string_view format,
                                           const std::vector<long>& list) {
  fmt::vprint(file, format, fmt::make_format_args(list));
  return fmt::vformat(format, fmt::make_format_args(list)) +
         fmt::format("{} {:L} {} {:.3g} {} {:?} {:c} {}", 1, 2L, 3U, 4.0, 5.0F, 'c', 'c', "text") +
         fmt::format("{:>{}} {} {:x}", true, 6, fmt::string_view("text"), 7ULL) +
         fmt::format("{}", fmt::join(list, ", "));
}

}  // namespace
}  // namespace fovea
