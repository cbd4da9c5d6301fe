#include "safetensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "failure.hpp"

namespace fovea::tools {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors hold little-endian numbers");

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr std::size_t kDataAlignment = 8;

struct DtypeName {
  std::string_view text;
  std::size_t bytes;
  std::optional<Dtype> dtype;  // empty: of the format, but not of Fovea
};
constexpr DtypeName kDtypeNames[] = {{"F32", 4, Dtype::f32},   {"F16", 2, Dtype::f16},
                                     {"BF16", 2, Dtype::bf16}, {"BOOL", 1, Dtype::boolean},
                                     {"U8", 1, Dtype::u8},     {"I8", 1, Dtype::i8},
                                     {"I32", 4, Dtype::i32},   {"I64", 8, Dtype::i64},
                                     {"F64", 8, {}},           {"I16", 2, {}},
                                     {"U16", 2, {}},           {"U32", 4, {}},
                                     {"U64", 8, {}},           {"F8_E4M3", 1, Dtype::e4m3},
                                     {"F8_E5M2", 1, {}}};

const DtypeName* find_dtype(std::string_view text) {
  const auto* found =
      std::find_if(std::begin(kDtypeNames), std::end(kDtypeNames),
                   [&](const DtypeName& candidate) { return candidate.text == text; });
  return found == std::end(kDtypeNames) ? nullptr : found;
}

std::vector<std::string_view> dtypes_of_fovea() {
  std::vector<std::string_view> texts;
  for (const DtypeName& each : kDtypeNames)
    if (each.dtype) texts.push_back(each.text);
  return texts;
}

const DtypeName* find_dtype(Dtype dtype) {
  return std::find_if(std::begin(kDtypeNames), std::end(kDtypeNames),
                      [&](const DtypeName& candidate) { return candidate.dtype == dtype; });
}

std::string printable(std::string_view text) {
  std::string result(text.substr(0, 64));
  std::replace_if(
      result.begin(), result.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return result;
}

/// Takes the header event by event, so that neither depth nor a repeated key survives to a tree.
class HeaderReader : public nlohmann::json::json_sax_t {
 public:
  explicit HeaderReader(std::vector<Safetensors::Entry>& entries) : entries_(entries) {}

  const std::string& error() const { return error_; }

  bool start_object(std::size_t) override {
    if (depth_ == 0 || (depth_ == 1 && !expects_tensor_name_)) {
      ++depth_;
      expects_tensor_name_ = true;
      has_dtype_ = has_shape_ = has_offsets_ = false;
      field_ = Field::none;
      return true;
    }
    return fail("an object stands where none belongs");
  }

  bool end_object() override {
    --depth_;
    if (depth_ == 1 && !is_metadata_ && !(has_dtype_ && has_shape_ && has_offsets_)) {
      return fail(fmt::format("tensor '{}' lacks dtype, shape or data_offsets",
                              printable(entries_.back().name)));
    }
    expects_tensor_name_ = true;
    is_metadata_ = false;
    return true;
  }

  bool key(std::string& key) override {
    if (depth_ == 1) return tensor_name(key);
    if (is_metadata_) {
      return metadata_keys_.insert(key).second ||
             fail(fmt::format("metadata '{}' stands twice", printable(key)));
    }
    if (key == "dtype") return once(has_dtype_, Field::dtype, key);
    if (key == "shape") return once(has_shape_, Field::shape, key);
    if (key == "data_offsets") return once(has_offsets_, Field::offsets, key);
    return fail(fmt::format("unknown key '{}' in tensor '{}'", printable(key),
                            printable(entries_.back().name)));
  }

  bool string(std::string& value) override {
    if (is_metadata_ && depth_ == 2) return true;
    if (field_ != Field::dtype || is_in_array_) return fail("a string stands where none belongs");
    entries_.back().dtype = value;
    field_ = Field::none;
    return true;
  }

  bool start_array(std::size_t) override {
    const bool belongs = !is_in_array_ && (field_ == Field::shape || field_ == Field::offsets);
    if (!belongs) return fail("an array stands where none belongs");
    is_in_array_ = true;
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    is_in_array_ = false;
    Safetensors::Entry& entry = entries_.back();
    if (field_ == Field::shape) {
      entry.shape.assign(numbers_.begin(), numbers_.end());
    } else {
      if (numbers_.size() != 2) return fail("data_offsets are not two numbers");
      entry.begin = numbers_[0];
      entry.end = numbers_[1];
    }
    field_ = Field::none;
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (!is_in_array_) return fail("a number stands where none belongs");
    if (value > (std::uint64_t{1} << 62U)) return fail("a number leaves 62 bits");
    if (numbers_.size() > static_cast<std::size_t>(kMaxRank)) return fail("an array is too long");
    numbers_.push_back(value);
    return true;
  }

  bool number_integer(std::int64_t) override { return fail("a number is negative"); }
  bool number_float(double, const std::string&) override {
    return fail("a number is not an integer");
  }
  bool null() override { return fail("null stands where none belongs"); }
  bool boolean(bool) override { return fail("a bool stands where none belongs"); }
  bool binary(nlohmann::json::binary_t&) override {
    return fail("binary data stand in the header");
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return fail(fmt::format("not JSON at byte {}", position));
  }

 private:
  enum class Field : std::uint8_t { none, dtype, shape, offsets };

  bool fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return false;
  }

  bool tensor_name(const std::string& key) {
    if (!names_.insert(key).second)
      return fail(fmt::format("tensor '{}' stands twice", printable(key)));
    expects_tensor_name_ = false;
    is_metadata_ = key == "__metadata__";
    if (!is_metadata_) entries_.push_back({.name = key, .dtype = {}, .shape = {}});
    return true;
  }

  bool once(bool& seen, Field field, std::string_view key) {
    if (seen)
      return fail(
          fmt::format("'{}' stands twice in tensor '{}'", key, printable(entries_.back().name)));
    seen = true;
    field_ = field;
    return true;
  }

  std::vector<Safetensors::Entry>& entries_;
  std::set<std::string> names_, metadata_keys_;
  std::vector<std::uint64_t> numbers_;
  std::string error_;
  Field field_ = Field::none;
  int depth_ = 0;
  bool expects_tensor_name_ = true, is_metadata_ = false, is_in_array_ = false;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
};

/// Every byte behind the header belongs to exactly one tensor, and to as many bytes as its shape needs.
std::string find_range_fault(const std::vector<Safetensors::Entry>& entries,
                             std::uint64_t data_bytes) {
  std::vector<const Safetensors::Entry*> sorted;
  sorted.reserve(entries.size());
  for (const auto& entry : entries) sorted.push_back(&entry);
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  std::uint64_t end = 0;
  for (const Safetensors::Entry* entry : sorted) {
    const std::string name = printable(entry->name);
    if (entry->end < entry->begin)
      return fmt::format("data_offsets of tensor '{}' run backwards", name);
    if (entry->begin < end) return fmt::format("tensor '{}' overlaps another", name);
    if (entry->begin > end)
      return fmt::format("{} bytes before tensor '{}' belong to none", entry->begin - end, name);
    end = entry->end;
    if (end > data_bytes) {
      return fmt::format("tensor '{}' ends at byte {} of {}; the file is truncated", name, end,
                         data_bytes);
    }
  }
  if (end != data_bytes) return fmt::format("{} trailing bytes", data_bytes - end);
  return {};
}

std::string find_size_fault(const Safetensors::Entry& entry) {
  const std::string name = printable(entry.name);
  if (entry.shape.size() > static_cast<std::size_t>(kMaxRank)) {
    return fmt::format("tensor '{}' has rank {}; expected at most {}", name, entry.shape.size(),
                       kMaxRank);
  }
  const DtypeName* dtype = find_dtype(entry.dtype);
  if (dtype == nullptr)
    return fmt::format("tensor '{}' has unknown dtype '{}'", name, printable(entry.dtype));
  const CheckedBytes elements = checked_size_bytes(Dtype::u8, entry.shape);
  if (!elements.fits || elements.bytes > (std::uint64_t{1} << 58U)) {
    return fmt::format("shape of tensor '{}' overflows", name);
  }
  const std::uint64_t expected = elements.bytes * dtype->bytes;
  if (entry.end - entry.begin != expected) {
    return fmt::format("tensor '{}' has {} bytes, but {} [{}] needs {}", name,
                       entry.end - entry.begin, entry.dtype, fmt::join(entry.shape, ", "),
                       expected);
  }
  return {};
}

std::uint64_t read_u64(const std::byte* data) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    value |= std::to_integer<std::uint64_t>(data[i]) << (8 * i);
  return value;
}

}  // namespace

Safetensors::Safetensors(std::shared_ptr<const Buffer> file, std::string_view name)
    : file_(std::move(file)), name_(name) {
  const auto refuse = [&](std::string_view reason) {
    bad_input(fmt::format("{}: malformed .safetensors file: {}", name_, reason));
  };
  if (file_->size() < kLengthBytes) refuse("shorter than its 8-byte length");
  const std::uint64_t header_bytes = read_u64(file_->data());
  if (header_bytes > kMaxHeaderBytes)
    refuse(fmt::format("a header of {} bytes; expected at most {}", header_bytes, kMaxHeaderBytes));
  if (header_bytes > file_->size() - kLengthBytes) refuse("the header is truncated");
  payload_ = kLengthBytes + static_cast<std::size_t>(header_bytes);
  const char* text = reinterpret_cast<const char*>(file_->data()) + kLengthBytes;
  if (header_bytes == 0 || *text != '{') refuse("the header is not a JSON object");
  HeaderReader reader(entries_);
  if (!nlohmann::json::sax_parse(text, text + header_bytes, &reader)) refuse(reader.error());
  if (const std::string fault = find_range_fault(entries_, file_->size() - payload_);
      !fault.empty())
    refuse(fault);
  for (const Entry& entry : entries_) {
    if (const std::string fault = find_size_fault(entry); !fault.empty()) refuse(fault);
  }
}

bool Safetensors::contains(std::string_view tensor_name) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& e) { return e.name == tensor_name; });
}

Array Safetensors::tensor(std::string_view tensor_name) const {
  const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& e) { return e.name == tensor_name; });
  if (entry == entries_.end()) {
    std::vector<std::string> names;
    for (const Entry& e : entries_) names.push_back(printable(e.name));
    if (names.size() > 8) names.resize(8);
    bad_input(fmt::format("{}: no tensor '{}'; the file holds {}", name_, tensor_name,
                          names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
  }
  const DtypeName* dtype = find_dtype(entry->dtype);
  if (!dtype->dtype) {
    bad_input(fmt::format("{}: tensor '{}' has dtype {}; expected one of {}", name_, tensor_name,
                          entry->dtype, fmt::join(dtypes_of_fovea(), ", ")));
  }
  if (entry->shape.empty()) {
    bad_input(
        fmt::format("{}: tensor '{}' has rank 0; expected at least one axis", name_, tensor_name));
  }
  Array array = adopt(file_, payload_ + static_cast<std::size_t>(entry->begin),
                      static_cast<std::size_t>(entry->end - entry->begin),
                      make_spec(*dtype->dtype, entry->shape));
  array.source = fmt::format("{}: {}", name_, tensor_name);
  return array;
}

std::string safetensors_header(const std::vector<std::pair<std::string, TensorSpec>>& tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::uint64_t offset = 0;
  for (const auto& [name, spec] : tensors) {
    const std::uint64_t bytes =
        static_cast<std::uint64_t>(spec.num_elements()) * size_bytes(spec.dtype);
    const DtypeName* dtype = find_dtype(spec.dtype);
    header[name] = {
        {"dtype", dtype->text},
        {"shape", std::vector<std::int64_t>(spec.shape.begin(), spec.shape.begin() + spec.rank)},
        {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((kDataAlignment - text.size() % kDataAlignment) % kDataAlignment, ' ');
  std::string result;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    result += static_cast<char>(text.size() >> (8 * i) & 0xffU);
  return result + text;
}

}  // namespace fovea::tools
