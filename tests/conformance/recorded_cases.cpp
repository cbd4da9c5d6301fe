// Cases whose result no manual tells: descriptors with odd offsets and addresses, sums that round. What the GPU gave is
// kept with --save, and the emulator is compared with it by --against.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "conformance/cases.hpp"
#include "conformance/noise.hpp"
#include "tile/fragment.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::conformance {
namespace {

constexpr int kColumns = 16;

std::string anything(const Bytes&) { return {}; }

Case make_wgmma(const std::string& name, const std::string& kernel, int image_bytes) {
  Case one{.name = name, .kernel = kernel};
  one.shared_bytes = image_bytes;
  one.params.n[0] = image_bytes;
  one.in.resize(static_cast<std::size_t>(image_bytes));
  one.out_before.assign(128 * kColumns / 2 * 4, std::byte{0});
  one.check = anything;
  one.is_recorded = true;
  return one;
}

/// bf16 whole numbers in -3..3.
void fill_with_wholes(Bytes& image, Noise& noise) {
  for (std::size_t at = 0; at < image.size(); at += 2) {
    const auto value = static_cast<float>(noise.whole(-3, 3));
    std::memcpy(&image[at], reinterpret_cast<const char*>(&value) + 2, 2);
  }
}

struct Odd {
  const char* name;
  int address_step, offset_step;  // multiples that addresses and offsets are drawn in
};

// The base offset (bits 49-51) is left at 0: the emulator refuses another by name.
constexpr std::array<Odd, 3> kOdds{{{"offsets drawn", 1024, 128},
                                    {"addresses at 128", 128, 1024},
                                    {"addresses and offsets at 16", 16, 16}}};

std::vector<Case> descriptor_cases() {
  constexpr int kImage = 64 * 1024;
  Noise noise(23);
  std::vector<Case> cases;
  for (const Odd& odd : kOdds) {
    for (const char* majors : {"k_k", "k_mn", "mn_k", "mn_mn"}) {
      for (int swizzle = 0; swizzle < 4; ++swizzle) {
        Case one = make_wgmma(std::string("descriptor, ") + odd.name + ", " + majors +
                                  ", swizzle " + std::to_string(16 << swizzle),
                              "wgmma_ss_bf16_bf16_16_" + std::string(majors), kImage);
        fill_with_wholes(one.in, noise);
        const auto draw = [&] {
          const int address = noise.whole(0, 16 * 1024 / odd.address_step - 1) * odd.address_step;
          const auto offset = [&] {
            return static_cast<std::uint32_t>(noise.whole(1, 2048 / odd.offset_step) *
                                              odd.offset_step);
          };
          const std::uint32_t leading = offset(), stride = offset();
          return matrix_descriptor(static_cast<std::uint32_t>(address), leading, stride,
                                   static_cast<Swizzle>(swizzle));
        };
        for (int step = 0; step < 2; ++step) {
          one.params.a[step] = draw();
          one.params.b[step] = draw();
        }
        cases.push_back(std::move(one));
      }
    }
  }
  return cases;
}

// ---- sums that round ---------------------------------------------------------------------------

struct Rounding {
  const char* a;
  const char* b;
  double error;  // of a sum, as a part of the sum of its terms' magnitudes
};

// Sixteen-bit products are added with a few bits more than f32 has; those of 8 bits with 13 bits below the greatest
// term (H200: at worst 2^-22.1 and 2^-10.9).
constexpr std::array<Rounding, 6> kRoundings{{{"bf16", "bf16", 0x1p-22},
                                              {"f16", "f16", 0x1p-22},
                                              {"e4m3", "e4m3", 0x1p-10},
                                              {"e4m3", "e5m2", 0x1p-10},
                                              {"e5m2", "e4m3", 0x1p-10},
                                              {"e5m2", "e5m2", 0x1p-10}}};

struct Format {
  int bytes, fraction_bits, bias;
};

Format format_of(const std::string& type) {
  if (type == "bf16") return {2, 7, 127};
  if (type == "f16") return {2, 10, 15};
  return type == "e4m3" ? Format{1, 3, 7} : Format{1, 2, 15};
}

/// [rows][64 bytes of depth], laid out as K-major tiles without a swizzle: chunks of 16 bytes of all rows after each
/// other.
struct Operand {
  Format format;
  int rows;
  Bytes image{};
  std::vector<double> values{};

  static constexpr int kDepthBytes = 64;
  std::size_t offset(int row, int byte) const {
    return static_cast<std::size_t>((byte / 16 * rows + row) * 16 + byte % 16);
  }
  double at(int row, int byte) const { return values[offset(row, byte)]; }
};

/// Numbers whose exponents are spread about 0.
Operand draw(const std::string& type, int rows, int spread, Noise& noise) {
  Operand operand{.format = format_of(type), .rows = rows};
  const Format& format = operand.format;
  operand.image.resize(static_cast<std::size_t>(rows * Operand::kDepthBytes));
  operand.values.resize(operand.image.size());
  for (std::size_t at = 0; at < operand.image.size();
       at += static_cast<std::size_t>(format.bytes)) {
    const int reach = format.bias - 1;
    const int exponent = std::min(noise.whole(0, spread - 1), reach) - std::min(spread / 2, reach);
    const std::uint32_t sign = noise.bits() & 1U;
    const std::uint32_t fraction = noise.bits() & ((1U << format.fraction_bits) - 1);
    const std::uint32_t bits =
        sign << (8 * format.bytes - 1) |
        static_cast<std::uint32_t>(format.bias + exponent) << format.fraction_bits | fraction;
    std::memcpy(&operand.image[at], &bits, static_cast<std::size_t>(format.bytes));
    operand.values[at] = std::ldexp(1 + std::ldexp(fraction, -format.fraction_bits), exponent) *
                         (sign != 0 ? -1 : 1);
  }
  return operand;
}

std::string check_sums(const Operand& a, const Operand& b, double error, const Bytes& out) {
  double worst = 0;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < kColumns / 2; ++i) {
      const Coordinate at = wgmma_coordinate(thread, i);
      double sum = 0, magnitude = 0;
      for (int byte = 0; byte < Operand::kDepthBytes; byte += a.format.bytes) {
        const double term = a.at(at.row, byte) * b.at(at.column, byte);
        sum += term;
        magnitude += std::abs(term);
      }
      float got;
      std::memcpy(&got, &out[static_cast<std::size_t>(4 * (thread * kColumns / 2 + i))], 4);
      const double off = std::abs(got - sum) / magnitude;
      worst = std::isnan(off) ? off : std::max(worst, off);
    }
  }
  if (worst <= error) return {};
  return "a sum is off by " + std::to_string(worst) +
         " of its terms' magnitudes; expected at most " + std::to_string(error);
}

std::vector<Case> rounding_cases() {
  constexpr int kRows = 64, kSpan = 16;
  Noise noise(29);
  std::vector<Case> cases;
  for (const Rounding& rounding : kRoundings) {
    for (const int spread : {1, 4, 16}) {
      const Operand a = draw(rounding.a, kRows, spread, noise),
                    b = draw(rounding.b, kColumns, spread, noise);
      const std::string types = std::string(rounding.a) + "_" + rounding.b;
      Case one = make_wgmma("rounding, " + types + ", exponents over " + std::to_string(spread),
                            "wgmma_ss_" + types + "_16_k_k",
                            static_cast<int>(a.image.size() + b.image.size()));
      std::copy(b.image.begin(), b.image.end(),
                std::copy(a.image.begin(), a.image.end(), one.in.begin()));
      for (int step = 0; step < 2; ++step) {
        const auto a_step = static_cast<std::uint32_t>(2 * step * kRows * kSpan);
        const auto b_step = static_cast<std::uint32_t>(a.image.size()) +
                            static_cast<std::uint32_t>(2 * step * kColumns * kSpan);
        one.params.a[step] = matrix_descriptor(a_step, kRows * kSpan, 8 * kSpan, Swizzle::none);
        one.params.b[step] = matrix_descriptor(b_step, kColumns * kSpan, 8 * kSpan, Swizzle::none);
      }
      one.check = [a, b, error = rounding.error](const Bytes& out) {
        return check_sums(a, b, error, out);
      };
      cases.push_back(std::move(one));
    }
  }
  return cases;
}

std::vector<Case> product_cases() {
  Noise noise(31);
  std::vector<Case> cases;
  for (const char* kernel : {"mma_bf16", "mma_f16", "mma_tf32"}) {
    Case one{.name = std::string("rounding, ") + kernel,
             .kernel = kernel,
             .num_ctas = 8,
             .num_threads = 32};
    one.in.resize(8 * 32 * 48);
    const bool is_f16 = kernel[4] == 'f', is_32_bit = kernel[4] == 't';
    for (std::size_t word = 0; word < one.in.size() / 4; ++word) {
      std::uint32_t bits = noise.bits();
      const std::uint32_t exponent = 120 + noise.bits() % 16, narrow = 11 + noise.bits() % 8;
      if (word % 12 >= 8 || is_32_bit) {
        bits = (bits & 0x807FFFFFU) | exponent << 23U;
        if (word % 12 < 8) bits &= 0xFFFFE000U;  // tf32
      } else if (is_f16) {
        bits = (bits & 0x83FF83FFU) | narrow << 10U | (narrow ^ 3U) << 26U;
      } else {
        bits = (bits & 0x807F807FU) | exponent << 7U | (exponent ^ 5U) << 23U;
      }
      std::memcpy(&one.in[4 * word], &bits, 4);
    }
    one.out_before.assign(8 * 32 * 16, std::byte{0});
    one.check = anything;
    one.is_recorded = true;
    cases.push_back(std::move(one));
  }
  return cases;
}

}  // namespace

std::vector<Case> recorded_cases() {
  std::vector<Case> all = descriptor_cases();
  for (auto family : {rounding_cases, product_cases}) {
    for (Case& one : family()) all.push_back(std::move(one));
  }
  return all;
}

}  // namespace fovea::cuda::conformance
