#include <fmt/format.h>

#include <array>
#include <bit>
#include <numeric>

#include "cuda/emulator/formats.hpp"
#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

/// Rows that lanes name, and the registers that move; an 8x8 matrix of 16 bits has 8 rows of 16 bytes.
struct MatrixMove {
  std::uint32_t row;
  std::uint32_t* registers;
  Actor actor;
};

constexpr std::uint32_t kRowBytes = 16;

struct Matrices {
  std::uint16_t element[4][8][8];
};

/// Row and column, in matrix m, of half h of register m of a lane.
struct Position {
  std::uint32_t row, column;
};

Position position_of(std::uint32_t lane, std::uint32_t half, bool is_transposed) {
  const std::uint32_t slow = lane / 4, fast = 2 * (lane % 4) + half;
  return is_transposed ? Position{fast, slow} : Position{slow, fast};
}

bool is_converged(const Warp& warp, Instruction what) {
  if (warp.alive == ~0U) return true;
  machine().report(Fault::divergence, &warp.first_alive(),
                   std::string(what.name) + " needs all 32 lanes of a warp", what.site);
  return false;
}

void load_rows(const Arguments& arguments, std::uint32_t matrices, Matrices& to, const char* what) {
  for (std::uint32_t lane = 0; lane < 8 * matrices; ++lane) {
    const auto& move = *static_cast<MatrixMove*>(arguments[lane]);
    std::uint16_t* row = to.element[lane / 8][lane % 8];
    const Machine::Place place =
        machine().shared_place(move.row, kRowBytes, kRowBytes, what, move.actor);
    if (place.block == nullptr) {
      std::fill_n(row, 8, std::uint16_t{0xffff});
    } else {
      place.block->read(machine(), move.actor, place.range, row);
    }
  }
}

void store_rows(const Arguments& arguments, std::uint32_t matrices, const Matrices& from,
                const char* what) {
  for (std::uint32_t lane = 0; lane < 8 * matrices; ++lane) {
    const auto& move = *static_cast<MatrixMove*>(arguments[lane]);
    const Machine::Place place =
        machine().shared_place(move.row, kRowBytes, kRowBytes, what, move.actor);
    if (place.block == nullptr) continue;
    place.block->write(machine(), move.actor, place.range, from.element[lane / 8][lane % 8]);
    const_cast<Thread*>(move.actor.thread)->unfenced.push_back(place.block, place.range);
  }
}

/// Operands and sums of one mma, as its lanes hold them.
struct Product {
  float* d;
  const std::uint32_t* a;
  std::uint32_t b[2];
};

constexpr std::uint32_t kRows = 16, kColumns = 8, kMostDepth = 32;

bool is_integer(Format format) { return format == Format::s8 || format == Format::u8; }

/// Exact; integers wrap.
float with_sum(Format format, float d, double sum) {
  if (!is_integer(format)) return static_cast<float>(double{d} + sum);
  const auto added = static_cast<std::uint32_t>(static_cast<std::int64_t>(sum));
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(d) + added);
}

void multiply(const Arguments& arguments, Format format) {
  const std::uint32_t per_register = 4 / element_bytes(format);
  const std::uint32_t depth = 8 * per_register, bits = 8 * element_bytes(format);
  float a[kRows][kMostDepth], b[kMostDepth][kColumns];
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    const auto& own = *static_cast<Product*>(arguments[lane]);
    const std::uint32_t slow = lane / 4, fast = per_register * (lane % 4);
    for (std::uint32_t i = 0; i < per_register; ++i) {
      const auto part = [&](std::uint32_t word) {
        return decode(format, word >> (bits * i) & ~0U >> (32 - bits));
      };
      const std::uint32_t half = depth / 2;
      a[slow][fast + i] = part(own.a[0]);
      a[slow + 8][fast + i] = part(own.a[1]);
      a[slow][half + fast + i] = part(own.a[2]);
      a[slow + 8][half + fast + i] = part(own.a[3]);
      b[fast + i][slow] = part(own.b[0]);
      b[half + fast + i][slow] = part(own.b[1]);
    }
  }
  double sum[kRows][kColumns] = {};
  for (std::uint32_t row = 0; row < kRows; ++row) {
    for (std::uint32_t k = 0; k < depth; ++k) {
      for (std::uint32_t column = 0; column < kColumns; ++column) {
        sum[row][column] += double{a[row][k]} * double{b[k][column]};
      }
    }
  }
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    float* d = static_cast<Product*>(arguments[lane])->d;
    const std::uint32_t row = lane / 4, column = 2 * (lane % 4);
    for (std::uint32_t i = 0; i < 4; ++i) {
      d[i] = with_sum(format, d[i], sum[row + i / 2 * 8][column + i % 2]);
    }
  }
}

/// Byte g of a register: the scale of group g along k.
float scale_of(std::uint32_t scales, std::uint32_t g, std::uint32_t group) {
  const std::uint32_t bits = scales >> (8 * g) & 0xffU;
  return group == 32 ? decode_ue8m0(bits) : decode_small_float(bits & 0x7fU, 4, 3, false);
}

/// 64 numbers of e2m1 of a row of a, or of a column of b, each with its scale.
constexpr std::uint32_t kScaledDepth = 64;
using ScaledLine = std::array<double, kScaledDepth>;

const ScaledProduct& product_of(const Arguments& arguments, std::uint32_t lane) {
  return *static_cast<const ScaledProduct*>(arguments[lane]);
}

/// Row r: its quad's registers 0 and 2, from row 8 on 1 and 3.
ScaledLine line_of_a(const Arguments& arguments, std::uint32_t row) {
  const std::uint32_t first_lane = 4 * (row % 8), half = row / 8;
  const ScaledProduct& any = product_of(arguments, first_lane);
  const std::uint32_t scales = product_of(arguments, first_lane + 2 * any.a_thread + half).a_scales;
  ScaledLine line;
  for (std::uint32_t k = 0; k < kScaledDepth; ++k) {
    const std::uint32_t word = product_of(arguments, first_lane + k % 32 / 8).a[half + k / 32 * 2];
    line[k] = double{decode_e2m1(word >> (k % 8 * 4) & 15U)} *
              double{scale_of(scales, k / any.group, any.group)};
  }
  return line;
}

ScaledLine line_of_b(const Arguments& arguments, std::uint32_t column) {
  const std::uint32_t first_lane = 4 * column;
  const ScaledProduct& any = product_of(arguments, first_lane);
  const std::uint32_t scales = product_of(arguments, first_lane + any.b_thread).b_scales;
  ScaledLine line;
  for (std::uint32_t k = 0; k < kScaledDepth; ++k) {
    const std::uint32_t word = product_of(arguments, first_lane + k % 32 / 8).b[k / 32];
    line[k] = double{decode_e2m1(word >> (k % 8 * 4) & 15U)} *
              double{scale_of(scales, k / any.group, any.group)};
  }
  return line;
}

void multiply_scaled(const Arguments& arguments) {
  std::array<ScaledLine, kRows> a;
  std::array<ScaledLine, kColumns> b;
  for (std::uint32_t row = 0; row < kRows; ++row) a[row] = line_of_a(arguments, row);
  for (std::uint32_t column = 0; column < kColumns; ++column)
    b[column] = line_of_b(arguments, column);
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    float* const d = product_of(arguments, lane).d;
    for (std::uint32_t i = 0; i < 4; ++i) {
      const ScaledLine& row = a[lane / 4 + i / 2 * 8];
      const ScaledLine& column = b[2 * (lane % 4) + i % 2];
      d[i] = static_cast<float>(
          std::inner_product(row.begin(), row.end(), column.begin(), double{d[i]}));
    }
  }
}

}  // namespace

void ldmatrix(std::uint32_t row, std::uint32_t matrices, bool is_transposed, std::uint32_t* to,
              Instruction what) {
  MatrixMove own{row, to, machine().actor(what.name, what.site)};
  machine().meet(
      what.name, &own, what.site,
      [=](Warp& warp, const Arguments& arguments) {
        if (!is_converged(warp, what)) return;
        Matrices loaded;
        load_rows(arguments, matrices, loaded, what.name);
        for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
          std::uint32_t* registers = static_cast<MatrixMove*>(arguments[lane])->registers;
          const Position lo = position_of(lane, 0, is_transposed);
          const Position hi = position_of(lane, 1, is_transposed);
          for (std::uint32_t m = 0; m < matrices; ++m) {
            registers[m] = loaded.element[m][lo.row][lo.column] |
                           std::uint32_t{loaded.element[m][hi.row][hi.column]} << 16;
          }
        }
      },
      true);
}

void stmatrix(std::uint32_t row, std::uint32_t matrices, bool is_transposed,
              const std::uint32_t* from, Instruction what) {
  require(90, what);
  MatrixMove own{row, const_cast<std::uint32_t*>(from), machine().actor(what.name, what.site)};
  machine().meet(
      what.name, &own, what.site,
      [=](Warp& warp, const Arguments& arguments) {
        if (!is_converged(warp, what)) return;
        Matrices stored;
        for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
          const std::uint32_t* registers = static_cast<MatrixMove*>(arguments[lane])->registers;
          const Position lo = position_of(lane, 0, is_transposed);
          const Position hi = position_of(lane, 1, is_transposed);
          for (std::uint32_t m = 0; m < matrices; ++m) {
            stored.element[m][lo.row][lo.column] = static_cast<std::uint16_t>(registers[m]);
            stored.element[m][hi.row][hi.column] = static_cast<std::uint16_t>(registers[m] >> 16);
          }
        }
        store_rows(arguments, matrices, stored, what.name);
      },
      true);
}

namespace {

/// The first whose tensor cores multiply it in steps of this depth.
int least_capability(Format format) {
  return format == Format::e4m3 || format == Format::e5m2 ? 89 : 80;
}

void multiply_by_warp(Format format, Product own, Instruction what) {
  machine().meet(
      what.name, &own, what.site,
      [=](Warp& warp, const Arguments& arguments) {
        if (is_converged(warp, what)) multiply(arguments, format);
      },
      true);
}

}  // namespace

void mma(Format format, float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1,
         Instruction what) {
  require(least_capability(format), what);
  multiply_by_warp(format, {d, a, {b0, b1}}, what);
}

void mma_k8_f16(float* d, std::uint32_t a0, std::uint32_t a1, std::uint32_t b, Instruction what) {
  const std::uint32_t a[] = {a0, a1, 0, 0};
  multiply_by_warp(Format::f16, {d, a, {b, 0}}, what);
}

void mma_scaled(const ScaledProduct& own, Instruction what) {
  ScaledProduct product = own;
  machine().meet(
      what.name, &product, what.site,
      [=](Warp& warp, const Arguments& arguments) {
        if (is_converged(warp, what)) multiply_scaled(arguments);
      },
      true);
}

}  // namespace fovea::cuda::emulator
