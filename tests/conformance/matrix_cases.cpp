// Cases of ldmatrix, stmatrix and mma.sync.
#include <fmt/format.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "conformance/cases.hpp"
#include "conformance/noise.hpp"
#include "tile/fragment.cuh"

namespace fovea::cuda::conformance {
namespace {

constexpr int kImage = 8192;

template <class T>
void append(Bytes& to, const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  to.insert(to.end(), bytes, bytes + values.size() * sizeof(T));
}

std::uint32_t half(const Bytes& image, int offset) {
  std::uint16_t value;
  std::memcpy(&value, &image[static_cast<std::size_t>(offset)], 2);
  return value;
}

/// The two elements of matrix `m` in a lane's register.
std::uint32_t pair_of(const Bytes& image, const std::vector<std::int32_t>& rows, int lane, int m,
                      bool is_transposed) {
  const int i = lane / 4, j = 2 * (lane % 4);
  const auto element = [&](int row, int column) {
    return half(image, rows[static_cast<std::size_t>(8 * m + row)] + 2 * column);
  };
  return is_transposed ? element(j, i) | element(j + 1, i) << 16U
                       : element(i, j) | element(i, j + 1) << 16U;
}

void store_pairs(Bytes& image, const std::vector<std::int32_t>& rows,
                 const std::vector<std::uint32_t>& words, bool is_transposed) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int m = 0; m < 4; ++m) {
      const std::uint32_t word = words[static_cast<std::size_t>(4 * lane + m)];
      for (int e = 0; e < 2; ++e) {
        const int i = lane / 4, j = 2 * (lane % 4) + e;
        const int row = is_transposed ? j : i, column = is_transposed ? i : j;
        const auto value = static_cast<std::uint16_t>(word >> (16 * e));
        std::memcpy(&image[static_cast<std::size_t>(rows[static_cast<std::size_t>(8 * m + row)] +
                                                    2 * column)],
                    &value, 2);
      }
    }
  }
}

/// 32 distinct offsets of rows among `count` from `first`, in random order.
std::vector<std::int32_t> draw_rows(Noise& noise, int first, int count) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), first);
  for (std::size_t i = all.size() - 1; i > 0; --i) std::swap(all[i], all[noise.bits() % (i + 1)]);
  all.resize(32);
  for (std::int32_t& row : all) row *= 16;
  return all;
}

Case make_matrices(std::uint64_t seed) {
  Noise noise(seed);
  Case one{.name = "ldmatrix and stmatrix, draw " + std::to_string(seed),
           .kernel = "matrices",
           .num_threads = 32};
  one.shared_bytes = kImage;
  one.in.resize(kImage);
  for (std::byte& byte : one.in) byte = static_cast<std::byte>(noise.bits());
  // Rows that are written: each 16 bytes of the upper half at most once by either store.
  const auto read = draw_rows(noise, 0, 512), written = draw_rows(noise, 256, 128),
             written_trans = draw_rows(noise, 384, 128);

  Bytes image = one.in;
  std::vector<std::uint32_t> x4, out;
  for (int lane = 0; lane < 32; ++lane) {
    for (int m = 0; m < 4; ++m) x4.push_back(pair_of(image, read, lane, m, false));
    for (int m = 0; m < 4; ++m) out.push_back(x4[static_cast<std::size_t>(4 * lane + m)]);
    for (int m = 0; m < 4; ++m) out.push_back(pair_of(image, read, lane, m, true));
    for (int m = 0; m < 2; ++m) out.push_back(pair_of(image, read, lane, m, false));
    for (int m = 0; m < 2; ++m) out.push_back(pair_of(image, read, lane, m, true));
  }
  store_pairs(image, written, x4, false);
  store_pairs(image, written_trans, x4, true);
  append(one.in, read);
  append(one.in, written);
  append(one.in, written_trans);
  append(one.expected, out);
  one.expected.insert(one.expected.end(), image.begin(), image.end());
  return one;
}

struct ProductRow {
  const char* name;
  const char* call;
  int depth, fraction_bits, exponent_bits;
};

constexpr std::array<ProductRow, 5> kProducts{
    {{"mma_bf16", "mma<Product::bf16>", 16, 7, 8},
     {"mma_f16", "mma<Product::f16>", 16, 10, 5},
     {"mma_f16_halves", "mma<Product::f16_halves>", 16, 10, 5},
     {"mma_tf32", "mma<Product::tf32>", 8, 23, 8},
     {"mma_e4m3", "mma<Product::e4m3>", 32, 3, 4}}};

std::uint32_t encoded(const ProductRow& row, int value) {
  if (value == 0) return 0;
  const int exponent = std::ilogb(std::abs(value));
  const int fraction = static_cast<int>(std::ldexp(std::abs(value), row.fraction_bits - exponent)) -
                       (1 << row.fraction_bits);
  const int biased = exponent + (1 << (row.exponent_bits - 1)) - 1;
  return (value < 0 ? 1U : 0U) << (row.exponent_bits + row.fraction_bits) |
         static_cast<std::uint32_t>(biased << row.fraction_bits | fraction);
}

Case make_product(const ProductRow& row, std::uint64_t seed) {
  constexpr int kWarps = 64;
  Noise noise(seed);
  Case one{
      .name = std::string(row.name), .kernel = row.name, .num_ctas = kWarps, .num_threads = 32};
  const int per_word = row.depth / 8;
  std::vector<std::uint32_t> in, out;
  for (int warp = 0; warp < kWarps; ++warp) {
    std::vector<int> a(static_cast<std::size_t>(16 * row.depth)),
        b(static_cast<std::size_t>(8 * row.depth)), c(128);
    for (auto* matrix : {&a, &b, &c}) {
      for (int& value : *matrix) value = noise.whole(-7, 7);
    }
    const auto packed = [&](const std::vector<int>& matrix, int line, int k) {
      std::uint32_t word = 0;
      for (int e = 0; e < per_word; ++e) {
        word |= encoded(row, matrix[static_cast<std::size_t>(line * row.depth + k + e)])
                << (32 / per_word * e);
      }
      return word;
    };
    for (int lane = 0; lane < 32; ++lane) {
      // tf32 has one element where 16-bit types have two, e4m3 four: depth is so much less, or more, everywhere.
      for (int r = 0; r < 4; ++r) {
        const Coordinate at = a_coordinate_16_bit(lane, r);
        in.push_back(packed(a, at.row, at.column * per_word / 2));
      }
      for (int r = 0; r < 2; ++r)
        in.push_back(packed(b, lane / 4, (8 * r + 2 * (lane % 4)) * per_word / 2));
      in.insert(in.end(), 2, 0);
      for (int i = 0; i < 4; ++i) {
        const Coordinate at = accumulator_coordinate(lane, i);
        int sum = c[static_cast<std::size_t>(8 * at.row + at.column)];
        in.push_back(std::bit_cast<std::uint32_t>(static_cast<float>(sum)));
        for (int k = 0; k < row.depth; ++k) {
          sum += a[static_cast<std::size_t>(at.row * row.depth + k)] *
                 b[static_cast<std::size_t>(at.column * row.depth + k)];
        }
        out.push_back(std::bit_cast<std::uint32_t>(static_cast<float>(sum)));
      }
    }
  }
  append(one.in, in);
  append(one.expected, out);
  return one;
}

/// A row of a or a column of b: 64 numbers of e2m1, and scales 1, 2, 4 or 8 of groups, of ue4m3 also 1.5 times those.
struct ScaledLine {
  bool is_ue4m3;
  std::array<std::uint32_t, 64> codes{};
  std::array<std::uint32_t, 4> exponents{}, halves{};

  ScaledLine(bool has_ue4m3, Noise& noise) : is_ue4m3(has_ue4m3) {
    for (std::uint32_t& code : codes) code = static_cast<std::uint32_t>(noise.bits() % 16);
    for (std::uint32_t& exponent : exponents)
      exponent = static_cast<std::uint32_t>(noise.bits() % 4);
    for (std::uint32_t& half : halves)
      half = is_ue4m3 ? static_cast<std::uint32_t>(noise.bits() % 2) : 0;
  }

  std::size_t group() const { return is_ue4m3 ? 16 : 32; }
  double number(std::size_t k) const {
    constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const std::size_t g = k / group();
    const double scale = std::ldexp(1 + halves[g] * 0.5, static_cast<int>(exponents[g]));
    return (codes[k] < 8 ? 1 : -1) * kMagnitudes[codes[k] % 8] * scale;
  }
  /// Eight numbers.
  std::uint32_t word(int from) const {
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 8; ++i)
      bits |= codes[static_cast<std::size_t>(from) + i] << (4 * i);
    return bits;
  }
  std::uint32_t scale_word() const {
    std::uint32_t bits = is_ue4m3 ? 0 : 0xabcd0000U;  // bytes that no group of 32 has
    for (std::size_t g = 0; g < 64 / group(); ++g) {
      const std::uint32_t scale =
          is_ue4m3 ? (exponents[g] + 7) << 3 | halves[g] << 2 : exponents[g] + 127;
      bits |= scale << (8 * g);
    }
    return bits;
  }
};

double dot(const ScaledLine& a, const ScaledLine& b) {
  double sum = 0;
  for (std::size_t k = 0; k < a.codes.size(); ++k) sum += a.number(k) * b.number(k);
  return sum;
}

/// Scales are in lanes `a_thread` and `b_thread` of each four; registers of others hold noise.
Case make_scaled_product(bool is_ue4m3, int a_thread, int b_thread) {
  const int threads = 4 * a_thread + b_thread;
  Noise noise(static_cast<std::uint64_t>(threads));
  const std::string name = (is_ue4m3 ? "mma_ue4m3_" : "mma_ue8m0_") + std::to_string(threads);
  Case one{.name = name, .kernel = name, .num_threads = 32};
  one.compute_capability_major = 12;
  std::vector<ScaledLine> a, b;
  for (int row = 0; row < 16; ++row) a.emplace_back(is_ue4m3, noise);
  for (int column = 0; column < 8; ++column) b.emplace_back(is_ue4m3, noise);
  std::vector<std::uint32_t> in, out;
  for (int lane = 0; lane < 32; ++lane) {
    const int place = lane % 4;
    const auto line = static_cast<std::size_t>(lane / 4);
    for (const int from : {8 * place, 32 + 8 * place}) {
      in.push_back(a[line].word(from));
      in.push_back(a[line + 8].word(from));
    }
    for (const int from : {8 * place, 32 + 8 * place}) in.push_back(b[line].word(from));
    const auto other = static_cast<std::uint32_t>(noise.bits());
    const std::size_t of_half = line + 8 * static_cast<std::size_t>(place % 2);
    in.push_back(place / 2 == a_thread ? a[of_half].scale_word() : other);
    in.push_back(place == b_thread ? b[line].scale_word() : ~other);
    for (int i = 0; i < 4; ++i) {
      const Coordinate at = accumulator_coordinate(lane, i);
      const double before = noise.whole(-7, 7);
      const double after =
          before + dot(a[static_cast<std::size_t>(at.row)], b[static_cast<std::size_t>(at.column)]);
      in.push_back(std::bit_cast<std::uint32_t>(static_cast<float>(before)));
      out.push_back(std::bit_cast<std::uint32_t>(static_cast<float>(after)));
    }
  }
  append(one.in, in);
  append(one.expected, out);
  return one;
}

/// Numbers at a code, half way between two and near that, of either sign; beyond all codes; NaN. What they become is
/// counted from the list of codes: the nearest, of two the one that ends in 0.
Case make_codes_of_four_bits() {
  constexpr float kMagnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  std::vector<float> numbers{NAN, INFINITY, 6.5F, 1e30F};
  std::vector<std::uint32_t> codes{7, 7, 7, 7};
  const auto add = [&](float number, std::uint32_t code) {
    for (const float sign : {1.0F, -1.0F}) {
      numbers.push_back(std::copysign(number, sign));
      codes.push_back(code | (sign < 0 ? 8U : 0U));
    }
  };
  for (std::uint32_t code = 0; code < 8; ++code) {
    add(kMagnitudes[code], code);
    if (code == 7) continue;
    const float middle = (kMagnitudes[code] + kMagnitudes[code + 1]) / 2;
    add(std::nextafter(middle, 0.0F), code);
    add(middle, code % 2 == 0 ? code : code + 1);
    add(std::nextafter(middle, 8.0F), code + 1);
  }
  while (numbers.size() % 8 != 0) add(0x1p-140F, 0);
  Case one{.name = "codes_of_four_bits",
           .kernel = "codes_of_four_bits",
           .num_threads = static_cast<int>(numbers.size() / 8)};
  one.compute_capability_major = 12;
  std::vector<std::uint32_t> words(numbers.size() / 8);
  for (std::size_t i = 0; i < codes.size(); ++i) words[i / 8] |= codes[i] << (4 * (i % 8));
  append(one.in, numbers);
  append(one.expected, words);
  return one;
}

}  // namespace

std::vector<Case> matrix_cases() {
  std::vector<Case> cases;
  for (std::uint64_t seed = 0; seed < 16; ++seed) cases.push_back(make_matrices(seed));
  for (const ProductRow& row : kProducts) cases.push_back(make_product(row, 1));
  cases.push_back(make_codes_of_four_bits());
  for (int threads = 0; threads < 8; ++threads) {
    for (const bool is_ue4m3 : {true, false})
      cases.push_back(make_scaled_product(is_ue4m3, threads / 4, threads % 4));
  }
  for (Case& one : cases) one.out_before.assign(one.expected.size(), std::byte{0xEE});
  return cases;
}

std::vector<Kernel> matrix_kernels() {
  std::vector<Kernel> all{{"matrices", "matrices", "others"}};
  for (const ProductRow& row : kProducts) all.push_back({row.name, row.call, "others"});
  all.push_back({"codes_of_four_bits", "codes_of_four_bits", "scaled"});
  for (int threads = 0; threads < 8; ++threads) {
    const std::string lanes = fmt::format(", {}, {}>", threads / 4, threads % 4);
    all.push_back({fmt::format("mma_ue4m3_{}", threads),
                   "mma_scaled<ptx::GroupScales::ue4m3_of_16" + lanes, "scaled"});
    all.push_back({fmt::format("mma_ue8m0_{}", threads),
                   "mma_scaled<ptx::GroupScales::ue8m0_of_32" + lanes, "scaled"});
  }
  return all;
}

}  // namespace fovea::cuda::conformance
