#include <fmt/format.h>

#include <algorithm>

#include "cuda/emulator/formats.hpp"
#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr std::uint32_t kSize = 32, kMostDepth = 16, kLanes = 64, kSums = kSize * kSize / kLanes;

/// Operands and sums of one product, as its lanes hold them.
struct Product {
  float* d;
  const std::uint32_t *a, *b;
};

/// What the lanes of a wave hold, AMD Instinct MI300 ISA, section 7.1: of A element i is at (slow, fast + i), of B at
/// (fast + i, slow).
struct OperandPlace {
  std::uint32_t slow, fast;
};
OperandPlace operand_place(std::uint32_t lane, std::uint32_t depth) {
  return {lane % kSize, lane / kSize * (depth / 2)};
}

struct SumPlace {
  std::uint32_t row, column;
};
SumPlace sum_place(std::uint32_t lane, std::uint32_t i) {
  return {i / 4 * 8 + lane / kSize * 4 + i % 4, lane % kSize};
}

void multiply(const Arguments& arguments, Format format, std::uint32_t depth) {
  float a[kSize][kMostDepth], b[kMostDepth][kSize];
  for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
    const auto& own = *static_cast<Product*>(arguments[lane]);
    const OperandPlace at = operand_place(lane, depth);
    for (std::uint32_t i = 0; i < depth / 2; ++i) {
      const auto element = [&](const std::uint32_t* words) {
        return decode(format, words[i / 2] >> (16 * (i % 2)) & 0xffffU);
      };
      a[at.slow][at.fast + i] = element(own.a);
      b[at.fast + i][at.slow] = element(own.b);
    }
  }
  double sum[kSize][kSize] = {};
  for (std::uint32_t row = 0; row < kSize; ++row) {
    for (std::uint32_t k = 0; k < depth; ++k) {
      for (std::uint32_t column = 0; column < kSize; ++column)
        sum[row][column] += double{a[row][k]} * double{b[k][column]};
    }
  }
  for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
    float* d = static_cast<Product*>(arguments[lane])->d;
    for (std::uint32_t i = 0; i < kSums; ++i) {
      const SumPlace at = sum_place(lane, i);
      d[i] = static_cast<float>(double{d[i]} + sum[at.row][at.column]);
    }
  }
}

/// What a lane names for a transposed read, where it gets its column.
struct TransposedRead {
  std::uint32_t from;
  std::uint32_t* to;
  Actor actor;
};

constexpr std::uint32_t kReadBytes = 8, kReadLanes = 16, kReadRows = 4;

/// Of 16 lanes, lane 4 r + c names elements 4 c .. 4 c + 3 of row r.
void read_transposed(const Arguments& arguments, Instruction what) {
  for (std::uint32_t first = 0; first < kLanes; first += kReadLanes) {
    std::uint16_t rows[kReadRows][kReadLanes];
    for (std::uint32_t lane = 0; lane < kReadLanes; ++lane) {
      const auto& own = *static_cast<TransposedRead*>(arguments[first + lane]);
      std::uint16_t* const part = &rows[lane / kReadRows][lane % kReadRows * 4];
      const Machine::Place place =
          machine().shared_place(own.from, kReadBytes, kReadBytes, what.name, own.actor);
      if (place.block == nullptr) {
        std::fill_n(part, 4, std::uint16_t{0xffff});
      } else {
        place.block->read(machine(), own.actor, place.range, part);
      }
    }
    for (std::uint32_t lane = 0; lane < kReadLanes; ++lane) {
      std::uint32_t* const to = static_cast<TransposedRead*>(arguments[first + lane])->to;
      for (std::uint32_t i = 0; i < 2; ++i)
        to[i] = rows[2 * i][lane] | std::uint32_t{rows[2 * i + 1][lane]} << 16;
    }
  }
}

bool has_all_lanes(const Warp& warp, Instruction what) {
  if (warp.alive == ~LaneMask{0}) return true;
  machine().report(Fault::divergence, &warp.first_alive(),
                   fmt::format("{} needs all 64 lanes of a warp", what.name), what.site);
  return false;
}

}  // namespace

void check_gfx950(const Warp& warp, Instruction what) {
  const int gfx = machine().config().gfx;
  if (gfx == 0 || gfx == 0x950) return;
  machine().report(Fault::architecture, &warp.first_alive(),
                   fmt::format("{} of this size needs gfx950; the GPU is gfx{:x}", what.name, gfx),
                   what.site);
}

void mfma(Format format, std::uint32_t depth, float* d, const std::uint32_t* a,
          const std::uint32_t* b, Instruction what) {
  Product own{d, a, b};
  machine().meet(
      what.name, &own, what.site,
      [=](Warp& warp, const Arguments& arguments) {
        if (depth == 16) check_gfx950(warp, what);
        if (has_all_lanes(warp, what)) multiply(arguments, format, depth);
      },
      true);
}

void ds_read_tr_b16(std::uint32_t from, std::uint32_t* to, Instruction what) {
  TransposedRead own{from, to, machine().actor(what.name, what.site)};
  machine().meet(
      what.name, &own, what.site,
      [=](Warp& warp, const Arguments& arguments) {
        check_gfx950(warp, what);
        if (has_all_lanes(warp, what)) read_transposed(arguments, what);
      },
      true);
}

}  // namespace fovea::cuda::emulator
