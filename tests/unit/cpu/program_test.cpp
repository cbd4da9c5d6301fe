// Programs on tiles, on every target this processor runs, against an evaluator of one score at a
// time that walks the DAG and shares nothing with the tape.
#include "cpu/program.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/features.hpp"
#include "cpu/kernels/panel.hpp"

namespace fovea::cpu {
namespace {

using expr::Node;
using expr::NodePtr;
using expr::Op;
using expr::Variable;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kHighest = std::numeric_limits<std::int32_t>::max();

struct Target {
  std::string name;
  const PanelKernels* kernels;
};

/// Those that this build and this processor have. bf16 targets run the programs of the f32 ones.
std::vector<Target> targets() {
  std::vector<Target> table;
  for (const CpuTarget target :
       {CpuTarget::scalar, CpuTarget::neon, CpuTarget::avx2, CpuTarget::avx512}) {
    if (panel_kernels(target) != nullptr && missing_for(target).empty())
      table.push_back({std::string(name(target)), panel_kernels(target)});
  }
  return table;
}

// ---- The evaluator of one score.

struct Value {
  float f = 0;
  std::int32_t i = 0;  // ints, and bools as 0 or 1
};

struct Position {
  float score = 0;
  std::int32_t variables[expr::kNumVariables] = {};
};

std::int32_t wrapped(std::int64_t value) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(value));
}

std::int32_t saturated(double value) {
  if (std::isnan(value)) return 0;
  return static_cast<std::int32_t>(std::clamp<double>(std::trunc(value), kLowest, kHighest));
}

std::int32_t floor_quotient(std::int64_t a, std::int64_t b) {
  if (b == 0) return 0;
  return wrapped(a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0));
}

Value int_result(Op op, std::int64_t a, std::int64_t b) {
  const auto shift = static_cast<int>(b & 31);
  switch (op) {
    case Op::add:
      return {.i = wrapped(a + b)};
    case Op::sub:
      return {.i = wrapped(a - b)};
    case Op::mul:
      return {.i = wrapped(a * b)};
    case Op::floor_div:
      return {.i = floor_quotient(a, b)};
    case Op::mod:
      return {.i = b == 0 ? 0 : wrapped(a - std::int64_t{floor_quotient(a, b)} * b)};
    case Op::neg:
      return {.i = wrapped(-a)};
    case Op::abs:
      return {.i = wrapped(a < 0 ? -a : a)};
    case Op::min:
      return {.i = static_cast<std::int32_t>(std::min(a, b))};
    case Op::max:
      return {.i = static_cast<std::int32_t>(std::max(a, b))};
    case Op::bit_and:
      return {.i = wrapped(a & b)};
    case Op::bit_or:
      return {.i = wrapped(a | b)};
    case Op::bit_xor:
      return {.i = wrapped(a ^ b)};
    case Op::bit_not:
      return {.i = wrapped(~a)};
    case Op::shl:
      return {.i = wrapped(static_cast<std::int64_t>(static_cast<std::uint64_t>(a) << shift))};
    case Op::shr:
      return {.i = wrapped(a >> shift)};
    default:
      ADD_FAILURE() << "no such op on ints";
      return {};
  }
}

double float_result(Op op, double a, double b) {
  const bool any_nan = std::isnan(a) || std::isnan(b);
  switch (op) {
    case Op::add:
      return a + b;
    case Op::sub:
      return a - b;
    case Op::mul:
      return a * b;
    case Op::div:
      return a / b;
    case Op::floor_div:
      return std::floor(static_cast<float>(a / b));
    case Op::mod: {
      const double remainder = std::fmod(a, b);
      return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
    }
    case Op::neg:
      return -a;
    case Op::abs:
      return std::fabs(a);
    case Op::floor:
      return std::floor(a);
    case Op::min:
      return any_nan ? kNan : a < b ? a : b;  // of zeros of two signs: the second
    case Op::max:
      return any_nan ? kNan : a > b ? a : b;
    case Op::exp:
      return std::exp(a);
    case Op::exp2:
      return std::exp2(a);
    case Op::log:
      return std::log(a);
    case Op::log2:
      return std::log2(a);
    case Op::tanh:
      return std::tanh(a);
    case Op::sqrt:
      return std::sqrt(a);
    case Op::rsqrt:
      return 1 / std::sqrt(a);
    case Op::sigmoid:
      return 1 / (1 + std::exp(-a));
    case Op::sin:
      return std::sin(a);
    case Op::cos:
      return std::cos(a);
    case Op::tan:
      return std::tan(a);
    case Op::erf:
      return std::erf(a);
    case Op::round:
      return std::nearbyint(a);
    case Op::ceil:
      return std::ceil(a);
    case Op::trunc:
      return std::trunc(a);
    case Op::log1p:
      return std::log1p(a);
    case Op::expm1:
      return std::expm1(a);
    case Op::fmod:
      return std::fmod(a, b);
    case Op::pow:
      return std::pow(a, b);
    default:
      ADD_FAILURE() << "no such op on floats";
      return 0;
  }
}

template <typename T>
bool compared(Op op, T a, T b) {
  switch (op) {
    case Op::lt:
      return a < b;
    case Op::le:
      return a <= b;
    case Op::gt:
      return a > b;
    case Op::ge:
      return a >= b;
    case Op::eq:
      return a == b;
    default:
      return a != b;
  }
}

Value element(const TensorView& view, std::int64_t offset) {
  const auto as = [&](auto sample) {
    return static_cast<const decltype(sample)*>(view.data())[offset];
  };
  switch (view.dtype()) {
    case Dtype::f32:
      return {.f = as(float{})};
    case Dtype::f16:
      return {.f = static_cast<float>(as(float16{}))};
    case Dtype::bf16:
      return {.f = static_cast<float>(as(bfloat16{}))};
    case Dtype::boolean:
      return {.i = as(std::uint8_t{}) != 0 ? 1 : 0};
    case Dtype::u8:
      return {.i = as(std::uint8_t{})};
    case Dtype::i8:
      return {.i = as(std::int8_t{})};
    case Dtype::i32:
      return {.i = as(std::int32_t{})};
    case Dtype::i64: {
      const auto value = std::clamp<std::int64_t>(as(std::int64_t{}), kLowest, kHighest);
      return {.i = static_cast<std::int32_t>(value)};
    }
    case Dtype::e4m3:  // refused where it is captured
      break;
  }
  return {};
}

class Evaluator {
 public:
  Value operator()(const Node& node, const Position& at) {
    values_.clear();
    return visit(node, at);
  }

 private:
  Value visit(const Node& node, const Position& at) {
    if (const auto known = values_.find(&node); known != values_.end()) return known->second;
    const Value value = compute(node, at);
    values_.emplace(&node, value);
    return value;
  }

  Value compute(const Node& node, const Position& at) {
    Value x[3];
    if (node.op != Op::load) {
      for (std::size_t i = 0; i < node.operands.size(); ++i) x[i] = visit(*node.operands[i], at);
    }
    const auto operand_type = node.operands.empty() ? node.type : node.operands.back()->type;
    switch (node.op) {
      case Op::constant:
        return {static_cast<float>(node.float_value), static_cast<std::int32_t>(node.int_value)};
      case Op::variable:
        return {at.score, at.variables[static_cast<int>(node.variable)]};
      case Op::scalar:
        return {static_cast<float>(node.scalar_binding->value),
                saturated(node.scalar_binding->value)};
      case Op::load:
        return load(node, at);
      case Op::select:
        return x[0].i != 0 ? x[1] : x[2];
      case Op::to_int:
        return {.i = operand_type == ExprType::floating ? saturated(x[0].f) : x[0].i};
      case Op::to_float:
        return {.f = static_cast<float>(x[0].i)};
      case Op::logical_and:
        return {.i = x[0].i & x[1].i};
      case Op::logical_or:
        return {.i = x[0].i | x[1].i};
      case Op::logical_not:
        return {.i = 1 - x[0].i};
      default:
        break;
    }
    if (Op::lt <= node.op && node.op <= Op::ne) {
      const bool on_floats = operand_type == ExprType::floating;
      return {.i = on_floats ? compared(node.op, x[0].f, x[1].f)
                             : compared(node.op, x[0].i, x[1].i)};
    }
    if (node.type == ExprType::integer) return int_result(node.op, x[0].i, x[1].i);
    return {.f = static_cast<float>(float_result(node.op, x[0].f, x[1].f))};
  }

  Value load(const Node& node, const Position& at) {
    const TensorView& view = node.tensor->view;
    std::int64_t offset = 0;
    for (int dim = 0; dim < view.rank(); ++dim) {
      if (view.size(dim) == 0) return {};
      const std::int64_t index = visit(*node.operands[static_cast<std::size_t>(dim)], at).i;
      offset += std::clamp<std::int64_t>(index, 0, view.size(dim) - 1) * view.stride(dim);
    }
    return element(view, offset);
  }

  std::unordered_map<const Node*, Value> values_;
};

// ---- Tiles.

/// Scores with everything special in them, and indices that do not start at 0.
struct Tile {
  explicit Tile(std::int64_t keys, int num_lanes) : num_keys(keys), lanes(num_lanes) {
    constexpr float kSpecial[] = {0.0F, -0.0F,  1.0F,  -1.5F,  kInfinity, -kInfinity,
                                  kNan, 1e-40F, 3e38F, -3e38F, 0x1p31F,   -0x1p31F,
                                  2.5F, 1e-6F,  88.8F, -104.5F};
    std::mt19937 random(static_cast<unsigned>(keys * 1000 + num_lanes));
    std::normal_distribution<float> normal(0, 4);
    for (std::int64_t i = 0; i < keys * lanes; ++i) {
      scores.push_back(random() % 4 == 0 ? kSpecial[random() % std::size(kSpecial)]
                                         : normal(random));
    }
    for (int lane = 0; lane < lanes; ++lane) {
      // Two heads of a group share a position; with an odd number of keys there is one head.
      const bool has_two_heads = keys % 2 == 0;
      q_idx.push_back(5 + (has_two_heads ? lane / 2 : lane));
      q_head.push_back(2 + (has_two_heads ? lane % 2 : 0));
    }
  }

  Position position(std::int64_t key, int lane) const {
    Position at;
    at.score = scores[static_cast<std::size_t>(key * lanes + lane)];
    const auto set = [&](Variable variable, std::int64_t value) {
      at.variables[static_cast<int>(variable)] = static_cast<std::int32_t>(value);
    };
    set(Variable::batch, 1);
    set(Variable::kv_head, 1);
    set(Variable::seqlen_q, 40);
    set(Variable::seqlen_kv, 300);
    set(Variable::q_idx, q_idx[static_cast<std::size_t>(lane)]);
    set(Variable::q_head, q_head[static_cast<std::size_t>(lane)]);
    set(Variable::kv_idx, kv_begin + key);
    return at;
  }

  std::int64_t num_keys = 0;
  int lanes = 0;
  std::int64_t kv_begin = 3;
  std::int64_t keys_ahead = 0;
  float factor = 1;
  std::vector<float> scores;
  std::vector<std::int32_t> q_idx, q_head;
};

std::vector<float> run(const NodePtr& root, const Captures& captures, const Tile& tile,
                       const PanelKernels& kernels) {
  const expr::Tape tape = expr::lower(root);
  std::vector<TensorView> tensors;
  for (const std::string& name : tape.tensors) {
    for (const CapturedTensor& each : captures.tensors) {
      if (each.name == name) tensors.push_back(each.view);
    }
  }
  std::vector<double> scalars;
  for (const std::string& name : tape.scalars) {
    for (const CapturedScalar& each : captures.scalars) {
      if (each.name == name) scalars.push_back(each.value);
    }
  }
  // Poisoned, and one byte more than asked for: guarded by the test of its value.
  const std::size_t bytes = program_scratch_bytes(tape, tile.num_keys, tile.lanes);
  std::vector<std::byte> memory(bytes + 64 + 64, std::byte{0xff});
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  std::byte* scratch = memory.data() + (64 - address % 64) % 64;
  std::vector<float> scores = tile.scores;
  const auto execute = root->type == ExprType::boolean ? kernels.run_mask : kernels.run_score;
  execute(tape, {.scores = scores.data(),
                 .num_keys = tile.num_keys,
                 .lanes = tile.lanes,
                 .kv_begin = tile.kv_begin,
                 .q_idx = tile.q_idx.data(),
                 .q_head = tile.q_head.data(),
                 .batch = 1,
                 .kv_head = 1,
                 .seqlen_q = 40,
                 .seqlen_kv = 300,
                 .tensors = tensors.data(),
                 .scalars = scalars.data(),
                 .scratch = scratch,
                 .keys_ahead = tile.keys_ahead,
                 .factor = tile.factor});
  EXPECT_EQ(scratch[bytes], std::byte{0xff}) << "wrote behind its scratch";
  return scores;
}

std::int64_t ulps_between(float a, float b) {
  const auto ordered = [](float x) {
    const auto bits = std::bit_cast<std::int32_t>(x);
    return std::int64_t{bits < 0 ? kLowest - bits : bits};
  };
  return std::abs(ordered(a) - ordered(b));
}

bool agree(float got, float expected, int ulps) {
  if (std::isnan(expected)) return std::isnan(got);
  return got == expected || ulps_between(got, expected) <= ulps;
}

std::vector<float> expected_scores(const NodePtr& root, const Tile& tile) {
  Evaluator evaluate;
  std::vector<float> expected;
  for (std::int64_t key = 0; key < tile.num_keys; ++key) {
    for (int lane = 0; lane < tile.lanes; ++lane) {
      Position at = tile.position(key, lane);
      const bool is_mask = root->type == ExprType::boolean;
      if (!is_mask) at.score *= tile.factor;
      const Value value = evaluate(*root, at);
      expected.push_back(!is_mask ? value.f : value.i != 0 ? at.score : -kInfinity);
    }
  }
  return expected;
}

/// Empty when all targets agree with the evaluator, else the first difference.
std::string difference(const NodePtr& root, const Captures& captures, const Tile& tile, int ulps) {
  const std::vector<float> expected = expected_scores(root, tile);
  for (const auto& target : targets()) {
    if (tile.lanes % target.kernels->vector_lanes != 0) continue;
    const std::vector<float> got = run(root, captures, tile, *target.kernels);
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (agree(got[i], expected[i], ulps)) continue;
      const auto lanes = static_cast<std::size_t>(tile.lanes);
      return target.name + ": key " + std::to_string(i / lanes) + " lane " +
             std::to_string(i % lanes) + " score " + std::to_string(tile.scores[i]) + ": got " +
             std::to_string(got[i]) + ", expected " + std::to_string(expected[i]) + " in " +
             to_string(Expr(root));
    }
  }
  return {};
}

// Keys: one, a few, one chunk of 16 lanes exactly and one more, more than a chunk of 48 lanes, rows
// that do not fill a block. Lanes: of AVX2, AVX-512 and vectors of four.
constexpr std::pair<int, int> kTiles[] = {{1, 48},  {5, 16},  {96, 16}, {97, 16},
                                          {38, 48}, {37, 48}, {7, 12}};

void expect_agreement(const Expr& formula, const Captures& captures = {}, int ulps = 0) {
  for (const auto& [keys, lanes] : kTiles) {
    EXPECT_EQ(difference(formula.shared(), captures, Tile(keys, lanes), ulps), "");
  }
}

// ---- Tensors of every dtype.

template <typename T>
std::vector<T> sample_values(std::int64_t count) {
  std::mt19937 random(7);
  std::vector<T> values;
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>) {
      const T value = T::from_bits(static_cast<std::uint16_t>(random()));
      values.push_back(T(static_cast<float>(value)));  // quiets NaN
    } else if constexpr (std::is_same_v<T, float>) {
      const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
      values.push_back(std::isnan(value) ? kNan : value);
    } else {
      const auto bits = (static_cast<std::uint64_t>(random()) << 32U) | random();
      values.push_back(static_cast<T>(bits >> (i % 2 == 0 ? 0U : 32U)));
    }
  }
  return values;
}

// 45 x 61: smaller than the tiles' indices, so that loads clamp on both sides of the diagonal.
constexpr std::int64_t kRows = 45;
constexpr std::int64_t kColumns = 61;

template <typename T>
struct Sample {
  std::vector<T> values = sample_values<T>(kRows * kColumns);
};

struct Samples {
  Sample<float> f32;
  Sample<float16> f16;
  Sample<bfloat16> bf16;
  Sample<std::uint8_t> boolean, u8;
  Sample<std::int8_t> i8;
  Sample<std::int32_t> i32;
  Sample<std::int64_t> i64;

  static TensorView matrix(Dtype dtype, const void* data, std::int64_t row_stride = kColumns,
                           std::int64_t column_stride = 1) {
    const std::int64_t shape[] = {kRows, kColumns};
    const std::int64_t strides[] = {row_stride, column_stride};
    return TensorView(data, make_spec(dtype, shape, strides));
  }

  Captures captures() const {
    const float* last = f32.values.data() + kRows * kColumns - 1;
    return {.tensors = {{"f", matrix(Dtype::f32, f32.values.data())},
                        {"h", matrix(Dtype::f16, f16.values.data())},
                        {"b", matrix(Dtype::bf16, bf16.values.data())},
                        {"m", matrix(Dtype::boolean, boolean.values.data())},
                        {"u", matrix(Dtype::u8, u8.values.data())},
                        {"c", matrix(Dtype::i8, i8.values.data())},
                        {"i", matrix(Dtype::i32, i32.values.data())},
                        {"l", matrix(Dtype::i64, i64.values.data())},
                        {"reversed", matrix(Dtype::f32, last, -kColumns, -1)},
                        {"repeated", matrix(Dtype::f32, f32.values.data(), 0, 1)},
                        {"transposed", matrix(Dtype::i32, i32.values.data(), 1, kRows)}},
            .scalars = {CapturedScalar::of("n", 3), CapturedScalar::of("x", 0.75)}};
  }
};

Captured tensor(const Captures& captures, const std::string& name) {
  for (const CapturedTensor& each : captures.tensors) {
    if (each.name == name) return capture(name, each.view);
  }
  ADD_FAILURE() << name;
  return capture("", {});
}

Expr as_score(const Expr& value) {
  return value.type() == ExprType::floating ? value : to_float(value);
}

/// Every int that may matter: small ones of both signs, and random bits.
Expr some_ints(const Captures& captures, bool wide) {
  const Arguments x = arguments();
  const Expr bits = tensor(captures, "i")(x.q_idx, x.kv_idx);
  return wide ? bits : Expr(bits & 7) - 3;
}

// ---- Tests.

TEST(Program, UnaryFloatOpsAgreeOnSpecialAndOrdinaryScores) {
  const Expr s = arguments().score;
  for (const Expr& formula : {-s, abs(s), floor(s), sqrt(s)}) expect_agreement(formula);
  for (const Expr& formula : {exp(s), exp2(s), log(s), log2(s), tanh(s), rsqrt(s), sigmoid(s)}) {
    expect_agreement(formula, {}, 4);
  }
}

TEST(Program, BinaryFloatOpsAgreeOnSpecialAndOrdinaryScores) {
  const Samples samples;
  const Captures captures = samples.captures();
  const Arguments x = arguments();
  const Expr a = x.score;
  for (const Expr& b : {tensor(captures, "h")(x.q_idx, x.kv_idx), Expr(2.5), to_float(x.kv_idx),
                        to_float(x.q_idx)}) {
    for (const Expr& formula : {a + b, a - b, b - a, a * b, a / b, b / a, floor_div(a, b), a % b,
                                min(a, b), max(b, a), select(a < b, a, b)}) {
      expect_agreement(formula, captures);
    }
    for (const Expr& c : {a<b, a <= b, a> b, a >= b, a == b, a != b}) {
      expect_agreement(to_float(c), captures);
    }
    expect_agreement(pow(a, b), captures, 1);
  }
}

TEST(Program, IntOpsAgreeAtEveryRateAndExtreme) {
  const Samples samples;
  const Captures captures = samples.captures();
  const Arguments x = arguments();
  const Expr wide = some_ints(captures, true);
  const Expr small = some_ints(captures, false);
  for (const Expr& formula : {-wide, abs(wide), ~wide})
    expect_agreement(to_float(formula), captures);
  const Expr lowest = Expr(1) << 31;
  const std::vector<std::pair<Expr, Expr>> pairs = {
      {wide, small},       {small, wide},    {wide, x.kv_idx},   {x.q_idx, wide}, {wide, Expr(8)},
      {x.q_idx, x.kv_idx}, {wide, Expr(-3)}, {wide, Expr(1000)}, {lowest, small}, {wide, lowest}};
  for (const auto& [a, b] : pairs) {
    for (const Expr& formula :
         {a + b, a - b, a * b, floor_div(a, b), a % b, min(a, b), max(a, b), a & b, a | b, a ^ b,
          a << b, a >> b, to_int(a < b), to_int(a <= b), to_int(a > b), to_int(a >= b),
          to_int(a == b), to_int(a != b), select(a < b, a, b)}) {
      expect_agreement(to_float(formula), captures);
    }
  }
}

TEST(Program, BoolOpsAgree) {
  const Arguments x = arguments();
  const Expr a = x.score > 0;
  const Expr b = x.kv_idx % 3 == 0;
  for (const Expr& formula : {a && b, a || b, !a, a == b, a != b, select(a, b, !b)}) {
    expect_agreement(to_float(formula));
    expect_agreement(to_float(to_int(formula) + to_int(a)));
  }
}

TEST(Program, ConversionToIntTruncatesAndSaturates) {
  const Expr s = arguments().score;
  expect_agreement(to_float(to_int(s)));
  expect_agreement(to_float(to_int(s * 1e9F)));
}

TEST(Program, FusedProductsAreWithinOneRounding) {
  const Arguments x = arguments();
  // Products of 12-bit values are exact, so that one rounding and two agree.
  const Expr a = floor(max(min(x.score, Expr(100.0)), Expr(-100.0)));
  const Expr b = to_float(x.kv_idx - x.q_idx);
  EXPECT_TRUE(expr::lower((x.score + a * b).shared()).code.back().is_fused);
  for (const Expr& formula : {x.score + a * b, x.score - a * b, a * b + to_float(x.kv_idx),
                              a * to_float(x.kv_idx) + to_float(x.q_idx)}) {
    expect_agreement(formula);
  }
}

TEST(Program, LoadsOfEveryDtypeAgreeAtEveryRate) {
  const Samples samples;
  const Captures captures = samples.captures();
  const Arguments x = arguments();
  for (const CapturedTensor& each : captures.tensors) {
    const Captured t = tensor(captures, each.name);
    for (const Expr& formula :
         {t(x.q_idx, x.kv_idx), t(x.kv_idx, x.q_idx), t(x.q_head, x.batch), t(x.batch, x.kv_idx),
          t(x.batch, x.kv_head), t(x.q_idx, x.kv_idx - x.q_idx), t(x.q_idx, x.kv_idx >> 5),
          t(x.kv_idx, x.kv_idx), t(x.q_idx, x.kv_idx - 20), t(to_int(x.score), x.kv_idx),
          t(x.q_idx - 7, to_int(x.score))}) {
      expect_agreement(as_score(formula), captures);
    }
  }
}

/// How a dense mask or bias may lie: keys side by side in rows that lie apart by any number of elements, or else.
struct DenseLayout {
  std::int64_t row_stride, column_stride;
};

/// All queries of a tile and no key more, so that a sanitizer sees reads behind the last row.
TensorView dense_matrix(const void* data, Dtype dtype, const Tile& tile, DenseLayout layout) {
  const std::int64_t shape[] = {tile.q_idx.back() + 1, tile.kv_begin + tile.num_keys};
  const std::int64_t strides[] = {layout.row_stride, layout.column_stride};
  std::int64_t first = 0;
  if (layout.row_stride < 0) first -= layout.row_stride * (shape[0] - 1);
  if (layout.column_stride < 0) first -= layout.column_stride * (shape[1] - 1);
  const auto offset = static_cast<std::size_t>(first) * size_bytes(dtype);
  return TensorView(static_cast<const std::byte*>(data) + offset, make_spec(dtype, shape, strides));
}

/// Loads, biases and masks of one layout.
template <typename T>
void expect_dense_agreement(Dtype dtype, const Tile& tile) {
  const std::int64_t columns = tile.kv_begin + tile.num_keys;
  const std::int64_t rows = tile.q_idx.back() + 1;
  for (const DenseLayout layout : {DenseLayout{columns, 1},
                                   {columns + 1, 1},
                                   {-columns, 1},
                                   {0, 1},
                                   {columns, 0},
                                   {2 * columns, 2},
                                   {columns, -1},
                                   {1, rows}}) {
    const std::int64_t last =
        std::abs(layout.row_stride) * (rows - 1) + std::abs(layout.column_stride) * (columns - 1);
    const std::vector<T> values = sample_values<T>(last + 1);
    const TensorView view = dense_matrix(values.data(), dtype, tile, layout);
    const Captures captures{.tensors = {{"t", view}}, .scalars = {}};
    const Arguments x = arguments();
    const Expr element = capture("t", view)(x.q_idx, x.kv_idx);
    std::vector<Expr> formulas;
    if (element.type() == ExprType::boolean) {
      formulas = {element, !element, element && x.kv_idx <= x.q_idx,
                  element && (element != (x.kv_idx <= x.q_idx))};
    } else {
      const Expr value = as_score(element);
      formulas = {value,           x.score + value,      value + x.score,
                  x.score - value, abs(x.score) + value, x.score + value + min(value, Expr(1.0))};
    }
    for (const Expr& formula : formulas) {
      // A factor may be fused with the sum.
      EXPECT_EQ(difference(formula.shared(), captures, tile, tile.factor == 1 ? 0 : 1), "")
          << name(dtype) << ", " << tile.num_keys << " keys, strides " << layout.row_stride << ' '
          << layout.column_stride;
    }
  }
}

// Keys around blocks of 16 bytes and lines of 64 of every dtype, and around chunks; lanes of every target's vectors.
TEST(Program, DenseLoadsAgreeInEveryLayoutAndAtEveryEdge) {
  for (const int lanes : {16, 48}) {
    for (const std::int64_t keys : {1, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 130}) {
      Tile tile(keys, lanes);
      // A power of two: products are exact but where they are denormal.
      tile.factor = keys % 2 == 0 ? 0.125F : 1.0F;
      tile.keys_ahead = keys % 3 == 0 ? 128 : 0;
      expect_dense_agreement<float>(Dtype::f32, tile);
      expect_dense_agreement<float16>(Dtype::f16, tile);
      expect_dense_agreement<bfloat16>(Dtype::bf16, tile);
      expect_dense_agreement<std::uint8_t>(Dtype::boolean, tile);
      expect_dense_agreement<std::uint8_t>(Dtype::u8, tile);
      expect_dense_agreement<std::int8_t>(Dtype::i8, tile);
      expect_dense_agreement<std::int32_t>(Dtype::i32, tile);
      expect_dense_agreement<std::int64_t>(Dtype::i64, tile);
    }
  }
}

TEST(Program, LoadsAtAnIndexForEveryScoreAgree) {
  const Samples samples;
  Captures captures = samples.captures();
  // Beyond 32 bits of offset, though no element there is read.
  const std::int64_t shape[] = {1, kRows * kColumns};
  const std::int64_t strides[] = {std::int64_t{1} << 32, 1};
  captures.tensors.push_back(
      {"far", TensorView(samples.f32.values.data(), make_spec(Dtype::f32, shape, strides))});
  const Arguments x = arguments();
  // Neighbours in a row read neighbouring elements, in either direction, one element, or any.
  const Expr distance = x.q_idx - x.kv_idx;
  for (const Expr& index : {distance + 20, 40 - distance, min(abs(distance), Expr(7)),
                            floor_div(distance, Expr(16)), distance * distance % 61}) {
    for (const CapturedTensor& each : captures.tensors) {
      const Expr row = each.name == "far" ? Expr(0) : x.q_head;
      expect_agreement(as_score(capture(each.name, each.view)(row, index)), captures);
      expect_agreement(x.score + as_score(capture(each.name, each.view)(row, index)), captures);
      expect_agreement(as_score(capture(each.name, each.view)(index, x.kv_idx)), captures);
    }
  }
}

TEST(Program, TensorsWithoutElementsReadAsZero) {
  const std::int64_t shape[] = {0, 4};
  const Captures captures{.tensors = {{"t", TensorView(static_cast<const void*>(nullptr),
                                                       make_spec(Dtype::f32, shape))}},
                          .scalars = {}};
  const Arguments x = arguments();
  const Captured t = tensor(captures, "t");
  expect_agreement(x.score + t(x.q_idx, x.kv_idx), captures);
  expect_agreement(t(x.batch, x.batch), captures);
  const Captures bools{.tensors = {{"t", TensorView(static_cast<const void*>(nullptr),
                                                    make_spec(Dtype::boolean, shape))}},
                       .scalars = {}};
  expect_agreement(tensor(bools, "t")(x.q_idx, x.kv_idx), bools);
}

TEST(Program, ScalarsAreReadByType) {
  const Samples samples;
  const Captures captures = samples.captures();
  const Expr n = scalar(captures.scalars[0]);
  const Expr x = scalar(captures.scalars[1]);
  expect_agreement(arguments().score * x - to_float(arguments().kv_idx % n), captures);
}

TEST(Program, ResultsOfLowerRateReplaceEveryScore) {
  const Arguments x = arguments();
  for (const Expr& formula : {Expr(2.5), to_float(x.q_idx), to_float(x.kv_idx), x.score}) {
    expect_agreement(formula);
  }
}

TEST(Program, MasksHideWithMinusInfinityWhateverTheScore) {
  const Samples samples;
  const Captures captures = samples.captures();
  const Arguments x = arguments();
  const Captured m = tensor(captures, "m");
  const Captured i = tensor(captures, "i");
  const Expr causal = x.kv_idx <= x.q_idx;
  const Expr window = x.q_idx - x.kv_idx <= 9;
  const Expr documents = (i(x.batch, x.q_idx) & 1) == (i(x.batch, x.kv_idx) & 1);
  for (const Expr& formula :
       {causal, causal && window, documents && causal, causal || x.kv_idx < 6, !causal,
        m(x.q_idx, x.kv_idx), m(x.q_idx, x.kv_idx) && causal,
        x.kv_idx<9, x.q_idx<12, x.seqlen_kv> 300, x.seqlen_kv> 299,
        x.kv_idx < 9 && x.q_idx > 7 && causal,
        ((i(x.q_idx, x.kv_idx >> 5) >> (x.kv_idx & 31)) & 1) == 1, Expr(false), Expr(true),
        causal && (causal != window), select(causal, window, m(x.kv_idx, x.q_idx)),
        floor_div(x.q_idx, Expr(5)) == floor_div(x.kv_idx, Expr(5)), (x.q_idx - x.kv_idx) % 3 == 0,
        (x.q_idx - x.kv_idx) % 4 == 0}) {
    expect_agreement(formula, captures);
  }
}

TEST(Program, NothingHappensWithoutKeys) {
  const Expr formula = arguments().score + 1.0;
  for (const auto& target : targets()) {
    EXPECT_TRUE(run(formula.shared(), {}, Tile(0, 48), *target.kernels).empty());
  }
}

// ---- Random programs. Ops that are exact in fp32 given exact operands, so that all must agree to
// the last bit; products are kept from sums, where targets with FMA round once.

class Choices {
 public:
  explicit Choices(const std::vector<std::uint8_t>& bytes) : bytes_(bytes) {}
  std::size_t below(std::size_t count) {
    return next_ < bytes_.size() ? bytes_[next_++] % count : 0;
  }

 private:
  const std::vector<std::uint8_t>& bytes_;
  std::size_t next_ = 0;
};

class Generator {
 public:
  Generator(Choices choices, const Captures& captures, bool reads_score)
      : choices_(choices), captures_(captures), reads_score_(reads_score) {}

  Expr floating(int depth) {
    const Arguments x = arguments();
    if (depth == 0) {
      const Expr leaves[] = {reads_score_ ? x.score : to_float(x.kv_idx), Expr(0.5),
                             scalar(captures_.scalars[1]), Expr(-3.0)};
      return leaves[choices_.below(4)];
    }
    const auto a = [&] { return floating(depth - 1); };
    switch (choices_.below(13)) {
      case 0:
        return floating(0);
      case 1:
        return abs(a()) + abs(a());
      case 2:
        return abs(a()) - abs(a());
      case 3:
        return a() * a();
      case 4:
        return a() / a();
      case 5:
        return min(a(), a());
      case 6:
        return max(a(), a());
      case 7:
        return floor(a());
      case 8:
        return sqrt(a());
      case 9:
        return select(boolean(depth - 1), a(), a());
      case 10:
        return to_float(integer(depth - 1));
      case 11:
        return load("f", depth);
      default:
        return load("b", depth);
    }
  }

  Expr integer(int depth) {
    const Arguments x = arguments();
    if (depth == 0) {
      const Expr leaves[] = {x.q_idx, x.kv_idx, x.q_head,    x.seqlen_kv,
                             x.batch, Expr(7),  Expr(-1000), scalar(captures_.scalars[0])};
      return leaves[choices_.below(8)];
    }
    const auto a = [&] { return integer(depth - 1); };
    switch (choices_.below(17)) {
      case 0:
        return integer(0);
      case 1:
        return a() + a();
      case 2:
        return a() - a();
      case 3:
        return a() * a();
      case 4:
        return floor_div(a(), nonzero(depth));
      case 5:
        return a() % nonzero(depth);
      case 6:
        return min(a(), a());
      case 7:
        return max(a(), a());
      case 8:
        return abs(-a());
      case 9:
        return a() & a();
      case 10:
        return (a() | a()) ^ ~a();
      case 11:
        return a() << a();
      case 12:
        return a() >> a();
      case 13:
        return to_int(floating(depth - 1));
      case 14:
        return select(boolean(depth - 1), a(), a());
      case 15:
        return load("l", depth);
      default:
        return load("c", depth);
    }
  }

  Expr boolean(int depth) {
    if (depth == 0) return arguments().kv_idx <= arguments().q_idx;
    const auto a = [&] { return boolean(depth - 1); };
    switch (choices_.below(8)) {
      case 0:
        return a() && a();
      case 1:
        return a() || a();
      case 2:
        return !a();
      case 3:
        return integer(depth - 1) < integer(depth - 1);
      case 4:
        return integer(depth - 1) == integer(depth - 1);
      case 5:
        return floating(depth - 1) >= floating(depth - 1);
      case 6:
        return load("m", depth);
      default:
        return a() != a();
    }
  }

 private:
  /// A divisor that is no constant zero, which is refused when built.
  Expr nonzero(int depth) { return max(integer(depth - 1), Expr(-5)) ^ arguments().kv_idx; }

  Expr load(const std::string& name, int depth) {
    const Expr row = integer(depth - 1);
    return tensor(captures_, name)(row % 60, arguments().kv_idx - Expr(integer(0) & 3));
  }

  Choices choices_;
  const Captures& captures_;
  bool reads_score_;  // masks must not
};

TEST(Program, RandomScoreProgramsAgreeToTheBit) {
  const Samples samples;
  const Captures captures = samples.captures();
  const Tile tile(37, 48);
  rc::check([&](const std::vector<std::uint8_t>& bytes) {
    const Expr formula = Generator(Choices(bytes), captures, true).floating(5);
    const std::string found = difference(formula.shared(), captures, tile, 0);
    RC_ASSERT(found == std::string());
  });
}

TEST(Program, RandomMaskProgramsAgreeToTheBit) {
  const Samples samples;
  const Captures captures = samples.captures();
  const Tile tile(49, 16);
  rc::check([&](const std::vector<std::uint8_t>& bytes) {
    const Expr formula = Generator(Choices(bytes), captures, false).boolean(5);
    const std::string found = difference(formula.shared(), captures, tile, 0);
    RC_ASSERT(found == std::string());
  });
}

}  // namespace
}  // namespace fovea::cpu
