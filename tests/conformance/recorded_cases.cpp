// Cases whose result no manual tells: descriptors with odd offsets and addresses, boxes narrower than their swizzle, sums that round. What the GPU gave is
// kept with --save, and the emulator is compared with it by --against.
#include <array>
#include <cstring>

#include "conformance/cases.hpp"
#include "conformance/noise.hpp"
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

/// K-major tiles without a swizzle whose numbers are of all sizes: sums round, and 8-bit sums lose low bits of small addends.
std::vector<Case> rounding_cases() {
  constexpr int kSpan = 16, kDepthBytes = 64, kRows = 64;
  Noise noise(29);
  std::vector<Case> cases;
  for (const char* types :
       {"bf16_bf16", "f16_f16", "e4m3_e4m3", "e4m3_e5m2", "e5m2_e4m3", "e5m2_e5m2"}) {
    for (const int spread : {1, 4, 16}) {
      const std::string name = types;
      const bool is_8_bit = name[0] == 'e';
      Case one = make_wgmma("rounding, " + name + ", exponents over " + std::to_string(spread),
                            "wgmma_ss_" + name + "_16_k_k", (kRows + kColumns) * kDepthBytes);
      for (std::size_t at = 0; at < one.in.size(); ++at) {
        const bool is_b = at >= static_cast<std::size_t>(kRows * kDepthBytes);
        const std::string type =
            is_b ? name.substr(name.find('_') + 1) : name.substr(0, name.find('_'));
        const int fraction_bits = type == "bf16" ? 7 : type == "f16" ? 10 : type == "e4m3" ? 3 : 2;
        const int bias = type == "bf16" ? 127 : type == "e4m3" ? 7 : 15;
        const int exponent =
            bias + std::min(noise.whole(0, spread - 1), bias - 1) - std::min(spread / 2, bias - 1);
        const std::uint32_t sign = noise.bits() & 1U;
        const std::uint32_t fraction = noise.bits() & ((1U << fraction_bits) - 1);
        const int width = is_8_bit ? 8 : 16;
        const std::uint32_t bits =
            sign << (width - 1) | static_cast<std::uint32_t>(exponent) << fraction_bits | fraction;
        std::memcpy(&one.in[at], &bits, is_8_bit ? 1 : 2);
        if (!is_8_bit) ++at;
      }
      for (int step = 0; step < 2; ++step) {
        const auto a_step = static_cast<std::uint32_t>(2 * step * kRows * kSpan);
        const auto b_step =
            static_cast<std::uint32_t>(kRows * kDepthBytes + 2 * step * kColumns * kSpan);
        one.params.a[step] = matrix_descriptor(a_step, kRows * kSpan, 8 * kSpan, Swizzle::none);
        one.params.b[step] = matrix_descriptor(b_step, kColumns * kSpan, 8 * kSpan, Swizzle::none);
      }
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

/// Boxes whose rows are narrower than the swizzle's span.
std::vector<Case> narrow_cases() {
  constexpr int kBoxOffset = 1024, kRows = 16, kImage = 4096;
  Noise noise(37);
  std::vector<Case> cases;
  for (int swizzle = 1; swizzle < 4; ++swizzle) {
    for (int inner_bytes = 16; inner_bytes < 16 << swizzle; inner_bytes *= 2) {
      Case one{.name = "load of " + std::to_string(inner_bytes) + " bytes a row, swizzle " +
                       std::to_string(16 << swizzle),
               .kernel = "tma_load_2"};
      one.shared_bytes = kImage + 16;
      one.map_of = MapOf::in;
      one.map.rank = 2;
      one.map.element = driver::TensorMapElement::bf16;
      one.map.swizzle = static_cast<driver::TensorMapSwizzle>(swizzle);
      one.map.shape = {128, 32};
      one.map.stride_bytes = {2, 256};
      one.map.box = {static_cast<std::uint32_t>(inner_bytes / 2), kRows};
      const std::int32_t n[] = {kImage, inner_bytes * kRows, kBoxOffset, 8, 2};
      std::memcpy(one.params.n, n, sizeof n);
      one.in.resize(32 * 256);
      for (std::byte& byte : one.in) byte = static_cast<std::byte>(noise.bits());
      one.out_before.assign(kImage, std::byte{0xEE});
      one.check = anything;
      one.is_recorded = true;
      cases.push_back(std::move(one));
    }
  }
  return cases;
}

}  // namespace

std::vector<Case> recorded_cases() {
  std::vector<Case> all = descriptor_cases();
  for (auto family : {rounding_cases, product_cases, narrow_cases}) {
    for (Case& one : family()) all.push_back(std::move(one));
  }
  return all;
}

}  // namespace fovea::cuda::conformance
