// Cases of wgmma: every pair of types, n, source of a, majors and swizzles.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "conformance/cases.hpp"
#include "conformance/noise.hpp"
#include "conformance/operand_layout.hpp"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::conformance {
namespace {

using ptx::Major;
using ptx::WgmmaType;

constexpr int kRows = 64;
constexpr std::array<Major, 2> kMajors{Major::k, Major::mn};
constexpr std::array<WgmmaType, 6> kTypes{WgmmaType::bf16, WgmmaType::f16, WgmmaType::e4m3,
                                          WgmmaType::e5m2, WgmmaType::s8,  WgmmaType::u8};

struct TypeRow {
  const char* name;
  int bytes;
  int exponent_bits, fraction_bits;  // of floating-point types
  int least, greatest;               // of the numbers that are drawn
};

const TypeRow& row_of(WgmmaType type) {
  static constexpr TypeRow kRowsOfTypes[] = {{"bf16", 2, 8, 7, -3, 3},   {"f16", 2, 5, 10, -3, 3},
                                             {"e4m3", 1, 4, 3, -3, 3},   {"e5m2", 1, 5, 2, -3, 3},
                                             {"s8", 1, 0, 0, -128, 127}, {"u8", 1, 0, 0, 0, 255}};
  return kRowsOfTypes[static_cast<int>(type)];
}

bool is_integer(WgmmaType type) { return row_of(type).exponent_bits == 0; }

/// A small whole number as the type holds it.
std::uint32_t encoded(WgmmaType type, int value) {
  const TypeRow& row = row_of(type);
  if (is_integer(type)) return static_cast<std::uint32_t>(value) & 0xFFU;
  if (value == 0) return 0;
  const int exponent = std::ilogb(std::abs(value));
  const int fraction = static_cast<int>(std::ldexp(std::abs(value), row.fraction_bits - exponent)) -
                       (1 << row.fraction_bits);
  const int biased = exponent + (1 << (row.exponent_bits - 1)) - 1;
  const int sign = value < 0 ? 1 : 0;
  return static_cast<std::uint32_t>((sign << row.exponent_bits | biased) << row.fraction_bits |
                                    fraction);
}

/// A matrix of whole numbers, [rows][depth].
struct Matrix {
  WgmmaType type;
  int rows, depth;
  std::vector<int> values;

  int at(int row, int k) const { return values[static_cast<std::size_t>(row * depth + k)]; }
};

Matrix draw(WgmmaType type, int rows, Noise& noise) {
  Matrix matrix{
      .type = type, .rows = rows, .depth = kSteps * kDepthBytes / row_of(type).bytes, .values = {}};
  matrix.values.resize(static_cast<std::size_t>(rows * matrix.depth));
  for (int& value : matrix.values) value = noise.whole(row_of(type).least, row_of(type).greatest);
  return matrix;
}

/// MN-major are types of 16 bits alone.
OperandTile tile_of(const Matrix& matrix, Major major, Swizzle swizzle) {
  return operand_tile(matrix.rows, row_of(matrix.type).bytes, major, swizzle);
}

void store(Bytes& image, const Matrix& matrix, const OperandTile& layout) {
  const int bytes = row_of(matrix.type).bytes;
  const int first = layout.first_step * kDepthBytes / bytes;
  for (int row = 0; row < matrix.rows; ++row) {
    for (int k = 0; k < matrix.depth; ++k) {
      const std::uint32_t bits = encoded(matrix.type, matrix.at(row, k));
      const int tile_row = layout.major == Major::k ? row : first + k;
      const int tile_byte = (layout.major == Major::k ? first + k : row) * bytes;
      std::memcpy(&image[layout.address(tile_row, tile_byte)], &bits,
                  static_cast<std::size_t>(bytes));
    }
  }
}

/// What each thread's four registers of a hold, for each step.
Bytes registers_of(const Matrix& a) {
  const int bytes = row_of(a.type).bytes, per_word = 4 / bytes, depth = kDepthBytes / bytes;
  std::vector<std::uint32_t> words;
  for (int step = 0; step < kSteps; ++step) {
    for (int thread = 0; thread < 128; ++thread) {
      for (int r = 0; r < 4; ++r) {
        const Coordinate first =
            bytes == 2 ? a_coordinate_16_bit(thread % 32, r) : a_coordinate_8_bit(thread % 32, r);
        std::uint32_t word = 0;
        for (int i = 0; i < per_word; ++i) {
          const int value = a.at(16 * (thread / 32) + first.row, step * depth + first.column + i);
          word |= encoded(a.type, value) << (8 * bytes * i);
        }
        words.push_back(word);
      }
    }
  }
  Bytes result(words.size() * 4);
  std::memcpy(result.data(), words.data(), result.size());
  return result;
}

Bytes expected_of(const Matrix& a, const Matrix& b) {
  std::vector<std::uint32_t> words;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < b.rows / 2; ++i) {
      const Coordinate at = wgmma_coordinate(thread, i);
      std::int32_t sum = 0;
      for (int k = 0; k < a.depth; ++k) sum += a.at(at.row, k) * b.at(at.column, k);
      const auto value = static_cast<float>(sum);
      std::uint32_t word;
      std::memcpy(&word, is_integer(a.type) ? static_cast<const void*>(&sum) : &value, 4);
      words.push_back(word);
    }
  }
  Bytes result(words.size() * 4);
  std::memcpy(result.data(), words.data(), result.size());
  return result;
}

const char* word(Major major) { return major == Major::k ? "k" : "mn"; }

struct Form {
  WgmmaType a, b;
  int n;
  bool is_rs;
  Major a_major, b_major;

  std::string types() const {
    return std::string(row_of(a).name) + "_" + row_of(b).name + "_" + std::to_string(n);
  }
  std::string kernel() const {
    if (is_rs) return "wgmma_rs_" + types() + "_" + word(b_major);
    return "wgmma_ss_" + types() + "_" + word(a_major) + "_" + word(b_major);
  }
  std::string call() const {
    const auto type = [](WgmmaType t) {
      return std::string("ptx::WgmmaType::") + row_of(t).name + ", ";
    };
    const auto major = [](Major m) { return std::string(", ptx::Major::") + word(m); };
    const std::string arguments = type(a) + type(b) + std::to_string(n);
    if (is_rs) return "wgmma_rs<" + arguments + major(b_major) + ">";
    return "wgmma_ss<" + arguments + major(a_major) + major(b_major) + ">";
  }
};

std::vector<Form> all_forms() {
  std::vector<Form> forms;
  for (const WgmmaType a : kTypes) {
    for (const WgmmaType b : kTypes) {
      for (int n = 8; n <= 256; n += 8) {
        if (!ptx::is_wgmma_form(a, b, n)) continue;
        for (const Major b_major : kMajors) {
          if (b_major == Major::mn && !ptx::is_16_bit(a)) continue;
          forms.push_back({a, b, n, true, Major::k, b_major});
          for (const Major a_major : kMajors) {
            if (a_major == Major::k || ptx::is_16_bit(a))
              forms.push_back({a, b, n, false, a_major, b_major});
          }
        }
      }
    }
  }
  return forms;
}

Case make_case(const Form& form, Swizzle a_swizzle, Swizzle b_swizzle, std::uint64_t seed) {
  Noise noise(seed);
  const Matrix a = draw(form.a, kRows, noise), b = draw(form.b, form.n, noise);
  OperandTile a_layout = tile_of(a, form.a_major, a_swizzle),
              b_layout = tile_of(b, form.b_major, b_swizzle);
  const int a_bytes = form.is_rs ? 0 : round_up(a_layout.bytes(), 1024);
  b_layout.base = static_cast<std::uint32_t>(a_bytes);
  const int image_bytes = round_up(a_bytes + b_layout.bytes(), 16);

  Case one{.name = form.kernel() + " swizzle " +
                   (form.is_rs ? "" : std::to_string(swizzle_span(a_swizzle)) + " ") +
                   std::to_string(swizzle_span(b_swizzle)),
           .kernel = form.kernel()};
  one.compute_capability_major = 9;
  one.shared_bytes = image_bytes;
  one.params.n[0] = image_bytes;
  one.in.assign(static_cast<std::size_t>(image_bytes),
                std::byte{0xFF});  // NaN in every floating-point type
  if (is_integer(form.a)) {
    for (std::byte& byte : one.in) byte = static_cast<std::byte>(noise.bits());
  }
  if (!form.is_rs) store(one.in, a, a_layout);
  store(one.in, b, b_layout);
  for (int step = 0; step < kSteps; ++step) {
    one.params.a[step] = a_layout.descriptor(step);
    one.params.b[step] = b_layout.descriptor(step);
  }
  if (form.is_rs) {
    const Bytes registers = registers_of(a);
    one.in.insert(one.in.end(), registers.begin(), registers.end());
  }
  one.expected = expected_of(a, b);
  one.out_before.assign(one.expected.size(), std::byte{0xEE});
  return one;
}

}  // namespace

std::vector<Case> wgmma_cases() {
  std::vector<Case> cases;
  for (const Form& form : all_forms()) {
    for (std::size_t i = 0; i < kSwizzles.size(); ++i) {
      // Neighbouring n pair the swizzles of a and b differently: every pair comes up with every form.
      const Swizzle a_swizzle =
          kSwizzles[(i + static_cast<std::size_t>(form.n / 8)) % kSwizzles.size()];
      cases.push_back(make_case(form, a_swizzle, kSwizzles[i], cases.size()));
    }
  }
  return cases;
}

std::vector<Kernel> wgmma_kernels() {
  std::vector<Kernel> all;
  for (const Form& form : all_forms()) {
    all.push_back({form.kernel(), form.call(), std::string("wgmma_") + row_of(form.a).name});
  }
  return all;
}

}  // namespace fovea::cuda::conformance
