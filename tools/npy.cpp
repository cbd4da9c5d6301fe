#include "npy.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <vector>

#include "failure.hpp"

namespace fovea::tools {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kVersionEnd = 8;
constexpr std::size_t kAlignment = 64;
// Real headers have some hundred bytes; NumPy itself refuses more than 10,000 by default.
constexpr std::size_t kMaxHeaderBytes = 65536;
constexpr char kNativeOrder = std::endian::native == std::endian::little ? '<' : '>';

struct Header {
  std::string descr;
  bool is_fortran = false;
  std::vector<std::int64_t> shape;
};

/// The header is a Python dict literal of three known keys; nothing else of Python is understood.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, std::string_view name) : rest_(text), name_(name) {}

  Header parse() {
    expect('{');
    while (!accept('}')) {
      parse_item();
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (!rest_.empty()) fail("there is text after the dictionary");
    if (!has_descr_ || !has_order_ || !has_shape_) {
      fail("expected the keys 'descr', 'fortran_order' and 'shape'");
    }
    return header_;
  }

 private:
  [[noreturn]] void fail(std::string_view reason) const {
    bad_input(fmt::format("{}: malformed .npy header: {}", name_, reason));
  }

  void skip_space() {
    const std::size_t begin = rest_.find_first_not_of(" \t\n\r");
    rest_.remove_prefix(begin == std::string_view::npos ? rest_.size() : begin);
  }

  bool accept(char c) {
    skip_space();
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char c) {
    if (!accept(c)) fail(fmt::format("expected '{}'", c));
  }

  bool accept_word(std::string_view word) {
    skip_space();
    if (!rest_.starts_with(word)) return false;
    rest_.remove_prefix(word.size());
    return true;
  }

  std::string parse_string() {
    skip_space();
    if (rest_.empty() || (rest_.front() != '\'' && rest_.front() != '"')) fail("expected a string");
    const std::size_t end = rest_.find(rest_.front(), 1);
    if (end == std::string_view::npos) fail("a string has no end");
    std::string result(rest_.substr(1, end - 1));
    rest_.remove_prefix(end + 1);
    return result;
  }

  std::int64_t parse_extent() {
    skip_space();
    std::int64_t value = 0;
    std::size_t digits = 0;
    for (; digits < rest_.size() && rest_[digits] >= '0' && rest_[digits] <= '9'; ++digits) {
      if (value > (std::int64_t{1} << 58U)) fail("an extent is too large");
      value = value * 10 + (rest_[digits] - '0');
    }
    if (digits == 0) fail("an extent of the shape is not a non-negative integer");
    rest_.remove_prefix(digits);
    accept_word("L");  // Python 2 wrote long integers so
    return value;
  }

  void parse_shape() {
    expect('(');
    while (!accept(')')) {
      header_.shape.push_back(parse_extent());
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
  }

  void once(bool& seen, std::string_view key) {
    if (seen) fail(fmt::format("the key '{}' stands twice", key));
    seen = true;
  }

  void parse_item() {
    const std::string key = parse_string();
    expect(':');
    if (key == "descr") {
      once(has_descr_, key);
      skip_space();
      if (rest_.starts_with('[')) {
        bad_input(fmt::format(
            "{}: structured dtypes are not supported; expected one number per element", name_));
      }
      header_.descr = parse_string();
    } else if (key == "fortran_order") {
      once(has_order_, key);
      header_.is_fortran = accept_word("True");
      if (!header_.is_fortran && !accept_word("False"))
        fail("fortran_order is neither True nor False");
    } else if (key == "shape") {
      once(has_shape_, key);
      parse_shape();
    } else {
      fail(fmt::format("unknown key '{}'", printable(key)));
    }
  }

  static std::string printable(std::string_view text) {
    std::string result(text.substr(0, 32));
    std::replace_if(
        result.begin(), result.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    return result;
  }

  std::string_view rest_;
  std::string_view name_;
  Header header_;
  bool has_descr_ = false, has_order_ = false, has_shape_ = false;
};

std::string printable_descr(std::string_view descr) {
  std::string result(descr.substr(0, 16));
  std::replace_if(
      result.begin(), result.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return result;
}

std::optional<Dtype> dtype_of_code(std::string_view code, Uint16 uint16) {
  if (code == "f4") return Dtype::f32;
  if (code == "f2") return Dtype::f16;
  if (code == "b1") return Dtype::boolean;
  if (code == "u1") return Dtype::u8;
  if (code == "i1") return Dtype::i8;
  if (code == "i4") return Dtype::i32;
  if (code == "i8") return Dtype::i64;
  if (code == "u2" && uint16 == Uint16::is_bf16) return Dtype::bf16;
  return std::nullopt;
}

Dtype parse_dtype(std::string_view descr, std::string_view name, Uint16 uint16) {
  const std::string shown = printable_descr(descr);
  if (descr.size() < 2) bad_input(fmt::format("{}: unknown dtype '{}'", name, shown));
  const char order = descr.front();
  const std::string_view code = descr.substr(1);
  if (code.starts_with("O")) {
    bad_input(fmt::format("{}: holds Python objects (dtype '{}'); expected numbers", name, shown));
  }
  const bool has_order = order == '<' || order == '>';
  if (has_order && order != kNativeOrder && !code.ends_with("1")) {
    bad_input(
        fmt::format("{}: dtype '{}' is {}-endian; expected the byte order of this machine, "
                    "convert with x.astype(x.dtype.newbyteorder('='))",
                    name, shown, order == '>' ? "big" : "little"));
  }
  if (!has_order && order != '=' && order != '|') {
    bad_input(fmt::format("{}: unknown dtype '{}'", name, shown));
  }
  if (code == "f8") {
    bad_input(
        fmt::format("{}: float64 is not supported; expected float32 or float16, convert with "
                    "x.astype('float32')",
                    name));
  }
  if (code == "u2" && uint16 == Uint16::refused) {
    bad_input(
        fmt::format("{}: uint16 is not supported; where it holds bf16, say --dtype bf16", name));
  }
  const std::optional<Dtype> dtype = dtype_of_code(code, uint16);
  if (!dtype) {
    bad_input(fmt::format(
        "{}: dtype '{}' is not supported; expected float32, float16, bool, uint8, int8, "
        "int32, int64, or bf16 as uint16",
        name, shown));
  }
  return *dtype;
}

std::uint32_t read_little_endian(const std::byte* data, std::size_t count) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < count; ++i) {
    value |= std::to_integer<std::uint32_t>(data[i]) << (8 * i);
  }
  return value;
}

/// The dictionary's text; `payload` becomes the offset of the elements.
std::string_view header_text(std::span<const std::byte> bytes, std::string_view name,
                             std::size_t& payload) {
  if (!is_npy(bytes)) {
    bad_input(fmt::format("{}: not a .npy file (it does not start with \\x93NUMPY)", name));
  }
  const auto truncated = [&] {
    bad_input(fmt::format("{}: truncated .npy file: the header is cut off", name));
  };
  if (bytes.size() < kVersionEnd) truncated();
  const int major = std::to_integer<int>(bytes[6]);
  const int minor = std::to_integer<int>(bytes[7]);
  if (major < 1 || major > 3 || minor != 0) {
    bad_input(fmt::format("{}: .npy version {}.{} is unknown; expected 1.0, 2.0 or 3.0", name,
                          major, minor));
  }
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  if (bytes.size() < kVersionEnd + length_bytes) truncated();
  const std::size_t length = read_little_endian(bytes.data() + kVersionEnd, length_bytes);
  if (length > kMaxHeaderBytes) {
    bad_input(fmt::format("{}: .npy header of {} bytes; expected at most {}", name, length,
                          kMaxHeaderBytes));
  }
  const std::size_t begin = kVersionEnd + length_bytes;
  if (bytes.size() - begin < length) truncated();
  payload = begin + length;
  return {reinterpret_cast<const char*>(bytes.data()) + begin, length};
}

TensorSpec make_npy_spec(Dtype dtype, const Header& header, std::string_view name) {
  if (header.shape.empty()) {
    bad_input(fmt::format("{}: holds one number (shape ()); expected at least one axis", name));
  }
  if (header.shape.size() > static_cast<std::size_t>(kMaxRank)) {
    bad_input(fmt::format("{}: rank {}; expected at most {}", name, header.shape.size(), kMaxRank));
  }
  if (!checked_size_bytes(dtype, header.shape).fits) {
    bad_input(fmt::format("{}: shape ({}) overflows 62 bits of bytes", name,
                          fmt::join(header.shape, ", ")));
  }
  if (!header.is_fortran) return make_spec(dtype, header.shape);
  std::vector<std::int64_t> strides(header.shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < strides.size(); ++i) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(header.shape[i], 1);
  }
  return make_spec(dtype, header.shape, strides);
}

}  // namespace

bool is_npy(std::span<const std::byte> bytes) {
  return bytes.size() >= kMagic.size() &&
         std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0;
}

Array parse_npy(const std::shared_ptr<const Buffer>& file, std::string_view name, Uint16 uint16) {
  std::size_t payload = 0;
  const Header header = HeaderParser(header_text(file->bytes(), name, payload), name).parse();
  const Dtype dtype = parse_dtype(header.descr, name, uint16);
  const TensorSpec spec = make_npy_spec(dtype, header, name);
  const std::size_t expected = checked_size_bytes(dtype, header.shape).bytes;
  const std::size_t found = file->size() - payload;
  if (found != expected) {
    bad_input(fmt::format("{}: {} bytes of elements, but {} needs {}; the file {}", name, found,
                          to_string(make_spec(dtype, header.shape)), expected,
                          found < expected ? "is truncated" : "has trailing bytes"));
  }
  return adopt(file, payload, expected, spec);
}

std::string npy_header(const TensorSpec& spec) {
  constexpr std::string_view kCodes[] = {"<f4", "<f2", "<u2", "|b1", "|u1", "|i1", "<i4", "<i8"};
  std::string descr(kCodes[static_cast<int>(spec.dtype)]);
  if (descr.front() == '<') descr.front() = kNativeOrder;
  const std::span shape(spec.shape.data(), static_cast<std::size_t>(spec.rank));
  std::string dictionary =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", descr,
                  fmt::join(shape, ", "), spec.rank == 1 ? "," : "");
  const std::size_t unpadded = kVersionEnd + 2 + dictionary.size() + 1;
  dictionary.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  dictionary += '\n';
  std::string header(kMagic);
  header += {1, 0, static_cast<char>(dictionary.size() & 0xffU),
             static_cast<char>(dictionary.size() >> 8U)};
  return header + dictionary;
}

}  // namespace fovea::tools
