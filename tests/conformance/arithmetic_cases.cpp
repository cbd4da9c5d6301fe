// Cases of conversions, of operations that round once, and of approximations within the errors that their wrappers
// state.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "conformance/cases.hpp"
#include "conformance/noise.hpp"

namespace fovea::cuda::conformance {
namespace {

constexpr int kThreads = 128, kCtas = 256;

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x; }

/// To nearest even, with `fraction_bits` and the exponents of the format.
double rounded(double x, int fraction_bits, int min_exponent, double greatest) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), min_exponent);
  const double y =
      std::ldexp(std::nearbyint(std::ldexp(x, fraction_bits - exponent)), exponent - fraction_bits);
  return std::abs(y) > greatest ? std::copysign(std::numeric_limits<double>::infinity(), x) : y;
}

std::uint32_t bf16_bits(double x) {
  if (std::isnan(x)) return 0x7FFF;
  const double y = rounded(x, 7, -126, 0x1.FEp127);
  return std::bit_cast<std::uint32_t>(static_cast<float>(y)) >> 16U;
}

std::uint32_t f16_bits(double x) {
  if (std::isnan(x)) return 0x7FFF;
  const double y = std::abs(rounded(x, 10, -14, 65504.0));
  const std::uint32_t sign = std::signbit(x) ? 0x8000U : 0U;
  if (std::isinf(y)) return sign | 0x7C00U;
  if (y < 0x1p-14) return sign | static_cast<std::uint32_t>(std::ldexp(y, 24));
  const int exponent = std::ilogb(y);
  return sign | static_cast<std::uint32_t>((exponent + 15) << 10 |
                                           (static_cast<int>(std::ldexp(y, 10 - exponent)) - 1024));
}

double of_bf16(std::uint32_t bits) { return std::bit_cast<float>(bits << 16U); }

double of_f16(std::uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10U & 31U),
            fraction = static_cast<int>(bits & 1023U);
  const double sign = (bits & 0x8000U) != 0 ? -1 : 1;
  if (exponent == 31)
    return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  return sign *
         (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

float greater(float a, float b) {
  a = flushed(a), b = flushed(b);
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
float lesser(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? greater(a, b) : -greater(-a, -b);
}

enum class Holds { f32, bf16x2, f16x2 };

struct Inputs {
  std::uint32_t ua, ub;
  float a, b, c;
};

struct Operation {
  const char* name;
  Holds holds;
  std::uint32_t (*expected)(const Inputs& in);
};

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// In the order of kernels.cuh.
constexpr Operation kExact[] = {
    {"cvt_bf16x2", Holds::bf16x2,
     [](const Inputs& in) { return bf16_bits(in.a) | bf16_bits(in.b) << 16U; }},
    {"cvt_f16x2", Holds::f16x2,
     [](const Inputs& in) { return f16_bits(in.a) | f16_bits(in.b) << 16U; }},
    {"cvt_rna_tf32", Holds::f32,
     [](const Inputs& in) {
       return std::isfinite(in.a) ? (in.ua + 0x1000U) & 0xFFFFE000U : in.ua & 0xFFFFE000U;
     }},
    {"f32_of_bf16_lo", Holds::f32, [](const Inputs& in) { return in.ua << 16U; }},
    {"f32_of_bf16_hi", Holds::f32, [](const Inputs& in) { return in.ua & 0xFFFF0000U; }},
    {"f32_of_f16_lo", Holds::f32,
     [](const Inputs& in) { return bits(static_cast<float>(of_f16(in.ua & 0xFFFFU))); }},
    {"f32_of_f16_hi", Holds::f32,
     [](const Inputs& in) { return bits(static_cast<float>(of_f16(in.ua >> 16U))); }},
    {"mul_bf16x2", Holds::bf16x2,
     [](const Inputs& in) {
       return bf16_bits(of_bf16(in.ua & 0xFFFFU) * of_bf16(in.ub & 0xFFFFU)) |
              bf16_bits(of_bf16(in.ua >> 16U) * of_bf16(in.ub >> 16U)) << 16U;
     }},
    {"mul_f16x2", Holds::f16x2,
     [](const Inputs& in) {
       return f16_bits(of_f16(in.ua & 0xFFFFU) * of_f16(in.ub & 0xFFFFU)) |
              f16_bits(of_f16(in.ua >> 16U) * of_f16(in.ub >> 16U)) << 16U;
     }},
    {"fma_rn_ftz", Holds::f32,
     [](const Inputs& in) {
       return bits(flushed(std::fma(flushed(in.a), flushed(in.b), flushed(in.c))));
     }},
    {"fma_rn", Holds::f32, [](const Inputs& in) { return bits(std::fma(in.a, in.b, in.c)); }},
    {"add_rn", Holds::f32, [](const Inputs& in) { return bits(in.a + in.b); }},
    {"mul_rn", Holds::f32, [](const Inputs& in) { return bits(in.a * in.b); }},
    {"div_rn", Holds::f32, [](const Inputs& in) { return bits(in.a / in.b); }},
    {"sqrt_rn", Holds::f32, [](const Inputs& in) { return bits(std::sqrt(in.a)); }},
    {"max_ftz", Holds::f32, [](const Inputs& in) { return bits(greater(in.a, in.b)); }},
    {"min_ftz", Holds::f32, [](const Inputs& in) { return bits(lesser(in.a, in.b)); }},
    {"abs", Holds::f32, [](const Inputs& in) { return bits(std::fabs(in.a)); }},
    {"abs_ftz", Holds::f32, [](const Inputs& in) { return bits(std::fabs(flushed(in.a))); }},
    {"max_nan", Holds::f32,
     [](const Inputs& in) {
       if (std::isnan(in.a) || std::isnan(in.b)) return 0x7FFFFFFFU;
       if (in.a == in.b) return std::signbit(in.a) ? in.ub : in.ua;
       return in.a > in.b ? in.ua : in.ub;
     }},
    {"min_ftz of max_ftz", Holds::f32,
     [](const Inputs& in) { return bits(lesser(greater(in.a, in.b), in.c)); }},
    {"ordered_cvt_bf16x2", Holds::bf16x2,
     [](const Inputs& in) { return bf16_bits(in.a) | bf16_bits(in.b) << 16U; }},
    {"ordered_cvt_f16x2", Holds::f16x2,
     [](const Inputs& in) { return f16_bits(in.a) | f16_bits(in.b) << 16U; }},
    {"ordered_fma_rn_ftz", Holds::f32,
     [](const Inputs& in) {
       return bits(flushed(std::fma(flushed(in.a), flushed(in.b), flushed(in.c))));
     }},
    {"ordered_add_rn_ftz", Holds::f32,
     [](const Inputs& in) { return bits(flushed(flushed(in.a) + flushed(in.b))); }},
};

struct Approximation {
  const char* name;
  double (*exact)(double x);
  /// The greatest error allowed.
  double (*allowed)(double x, double y);
};

constexpr double kSmallest = 0x1p-126;  // below, .ftz gives zero

constexpr Approximation kApproximate[] = {
    {"ex2_approx_ftz", [](double x) { return std::exp2(x); },
     [](double, double y) { return 0x1p-22 * y + kSmallest; }},
    {"lg2_approx_ftz", [](double x) { return std::log2(x); },
     [](double x, double y) { return 0x1p-22 * (x > 0.5 && x < 2 ? 1 : std::abs(y)); }},
    {"rcp_approx_ftz", [](double x) { return 1 / x; },
     [](double, double y) {
       return 0x1p-23 * std::abs(y) + (std::abs(y) < 0x1p-125 ? kSmallest : 0);
     }},
    {"tanh_approx", [](double x) { return std::tanh(x); },
     [](double, double y) { return 0x1p-11 * std::abs(y); }},
    {"exp_f32", [](double x) { return std::exp(x); },
     [](double, double y) { return 0x1p-21 * y + 0x1p-149; }},
    {"log_f32", [](double x) { return std::log(x); },
     [](double, double y) { return 0x1p-20 * std::abs(y); }},
    {"ordered_ex2_approx_ftz", [](double x) { return std::exp2(x); },
     [](double, double y) { return 0x1p-22 * y + kSmallest; }},
};
static_assert(std::size(kExact) == 25 && std::size(kApproximate) == 7,
              "kernels.cuh writes so many");

bool is_nan(Holds holds, std::uint32_t word) {
  if (holds == Holds::f32) return std::isnan(std::bit_cast<float>(word));
  const std::uint32_t infinity = holds == Holds::bf16x2 ? 0x7F80U : 0x7C00U;
  return (word & 0x7FFFU) > infinity;
}

/// Equal bits, where the expected one is NaN any NaN.
bool agree(Holds holds, std::uint32_t got, std::uint32_t want) {
  if (holds == Holds::f32) return got == want || (is_nan(holds, got) && is_nan(holds, want));
  for (int shift = 0; shift < 32; shift += 16) {
    const std::uint32_t g = got >> shift & 0xFFFFU, w = want >> shift & 0xFFFFU;
    if (g != w && !(is_nan(holds, g) && is_nan(holds, w))) return false;
  }
  return true;
}

bool is_within(const Approximation& op, float x, float got) {
  if (op.exact == kApproximate[1].exact || op.exact == kApproximate[2].exact) x = flushed(x);
  const double want = op.exact(x);
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want) || std::abs(want) > std::numeric_limits<float>::max()) {
    return std::isinf(got) && std::signbit(got) == std::signbit(want);
  }
  if (std::isinf(got)) return std::abs(want) * (1 + 0x1p-20) > std::numeric_limits<float>::max();
  return std::abs(got - want) <= op.allowed(x, want);
}

std::string describe(const char* name, const std::uint32_t* in, std::uint32_t got,
                     std::uint32_t want) {
  char text[200];
  std::snprintf(text, sizeof text,
                "%s(%08x = %.9g, %08x = %.9g, %08x) is %08x = %.9g; expected %08x = %.9g", name,
                in[0], static_cast<double>(std::bit_cast<float>(in[0])), in[1],
                static_cast<double>(std::bit_cast<float>(in[1])), in[2], got,
                static_cast<double>(std::bit_cast<float>(got)), want,
                static_cast<double>(std::bit_cast<float>(want)));
  return text;
}

/// First mistakes of each operation, and how many.
std::string check(const std::vector<std::uint32_t>& in, const Bytes& out_bytes) {
  constexpr std::size_t kOut = std::size(kExact) + std::size(kApproximate);
  std::vector<std::uint32_t> out(out_bytes.size() / 4);
  std::memcpy(out.data(), out_bytes.data(), out_bytes.size());
  std::string message;
  for (std::size_t k = 0; k < kOut; ++k) {
    int num_wrong = 0;
    for (std::size_t i = 0; i < in.size() / 3; ++i) {
      const std::uint32_t* words = &in[3 * i];
      const std::uint32_t got = out[kOut * i + k];
      const Inputs inputs{words[0], words[1], std::bit_cast<float>(words[0]),
                          std::bit_cast<float>(words[1]), std::bit_cast<float>(words[2])};
      std::uint32_t want = 0;
      bool is_right = false;
      const char* name = nullptr;
      if (k < std::size(kExact)) {
        want = kExact[k].expected(inputs);
        is_right = agree(kExact[k].holds, got, want);
        name = kExact[k].name;
      } else {
        const Approximation& op = kApproximate[k - std::size(kExact)];
        want = bits(static_cast<float>(op.exact(inputs.a)));
        is_right = is_within(op, inputs.a, std::bit_cast<float>(got));
        name = op.name;
      }
      if (!is_right && ++num_wrong <= 3) message += "\n    " + describe(name, words, got, want);
    }
    if (num_wrong > 3) message += "\n    and " + std::to_string(num_wrong - 3) + " more";
  }
  return message;
}

struct PairOperation {
  const char* name;
  float (*expected)(float a, float b, float c);
};

// In the order of tcgen05_kernels.cuh.
constexpr PairOperation kOfPairs[] = {
    {"fma_rn_ftz_f32x2",
     [](float a, float b, float c) {
       return flushed(std::fma(flushed(a), flushed(b), flushed(c)));
     }},
    {"add_rn_f32x2", [](float a, float b, float) { return a + b; }},
    {"mul_rn_f32x2", [](float a, float b, float) { return a * b; }},
};

/// The same of both places of pairs.
std::string check_pairs(const std::vector<std::uint32_t>& in, const Bytes& out_bytes) {
  std::vector<std::uint32_t> out(out_bytes.size() / 4);
  std::memcpy(out.data(), out_bytes.data(), out_bytes.size());
  std::string message;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const PairOperation& op = kOfPairs[i / 2 % std::size(kOfPairs)];
    const std::uint32_t* words = &in[i / (2 * std::size(kOfPairs)) * 3];
    const std::size_t place = i % 2;
    const std::uint32_t of_place[] = {words[place], words[(place + 1) % 3], words[(place + 2) % 3]};
    const auto number = [&](int k) { return std::bit_cast<float>(of_place[k]); };
    const std::uint32_t want = bits(op.expected(number(0), number(1), number(2)));
    if (agree(Holds::f32, out[i], want)) continue;
    message += "\n    " + describe(op.name, of_place, out[i], want);
    if (message.size() > 1000) return message + "\n    and perhaps more";
  }
  return message;
}

constexpr std::uint32_t kSpecial[] = {
    0,          0x80000000, 1,          0x80000001, 0x007FFFFF, 0x00800000, 0x807FFFFF, 0x3F800000,
    0xBF800000, 0x3F7FFFFF, 0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
    0x7F800001, 0xFFFFFFFF, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000, 0x477FF000, 0x477FEFFF,
    0x33000000, 0x33000001, 0x387FC000, 0x42FC0000, 0xC2FC0000, 0x42B17218, 0xC2CE8ED0, 0x7C007C01};

}  // namespace

std::vector<Case> arithmetic_cases() {
  Noise noise(3);
  std::vector<std::uint32_t> in;
  for (int i = 0; i < kThreads * kCtas; ++i) {
    for (int k = 0; k < 3; ++k) {
      const auto special = [&] { return kSpecial[noise.bits() % std::size(kSpecial)]; };
      const float ordinary = static_cast<float>(noise.whole(-1 << 24, 1 << 24)) * 0x1p-24F *
                             static_cast<float>(1 << noise.whole(0, 7));
      const std::uint32_t kinds[] = {special(), noise.bits(), bits(ordinary), bits(ordinary)};
      in.push_back(kinds[noise.bits() % 4]);
    }
  }
  Case one{
      .name = "arithmetic", .kernel = "arithmetic", .num_ctas = kCtas, .num_threads = kThreads};
  one.in.resize(in.size() * 4);
  std::memcpy(one.in.data(), in.data(), one.in.size());
  one.out_before.assign(in.size() / 3 * 4 * (std::size(kExact) + std::size(kApproximate)),
                        std::byte{0});
  one.check = [in](const Bytes& out) { return check(in, out); };
  Case pairs = one;
  pairs.name = pairs.kernel = "f32x2";
  pairs.compute_capability_major = 10;
  pairs.out_before.assign(in.size() / 3 * 8 * std::size(kOfPairs), std::byte{0});
  pairs.check = [in](const Bytes& out) { return check_pairs(in, out); };
  return {one, pairs};
}

}  // namespace fovea::cuda::conformance
