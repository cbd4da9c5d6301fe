#include "expr/tape.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace fovea::expr {
namespace {

int count(const Tape& tape, Rate rate) {
  return static_cast<int>(
      std::count_if(tape.code.begin(), tape.code.end(),
                    [&](const Instruction& each) { return each.rate == rate; }));
}

Tape lowered(const Expr& formula) { return lower(formula.shared()); }

TensorView vector_of(const float* data, std::int64_t size) { return view(data, {size}); }

TEST(Tape, RatesAreTheJoinOfTheOperands) {
  EXPECT_EQ(join(Rate::uniform, Rate::uniform), Rate::uniform);
  EXPECT_EQ(join(Rate::uniform, Rate::per_key), Rate::per_key);
  EXPECT_EQ(join(Rate::per_query, Rate::uniform), Rate::per_query);
  EXPECT_EQ(join(Rate::per_query, Rate::per_query), Rate::per_query);
  EXPECT_EQ(join(Rate::per_query, Rate::per_key), Rate::per_score);
  EXPECT_EQ(join(Rate::per_score, Rate::per_key), Rate::per_score);
}

TEST(Tape, VariablesHaveTheRateOfTheirAxis) {
  const Arguments x = arguments();
  const auto rate = [](const Expr& variable) { return lowered(variable).code.back().rate; };
  EXPECT_EQ(rate(x.score), Rate::per_score);
  EXPECT_EQ(rate(x.q_idx), Rate::per_query);
  EXPECT_EQ(rate(x.q_head), Rate::per_query);
  EXPECT_EQ(rate(x.kv_idx), Rate::per_key);
  EXPECT_EQ(rate(x.batch), Rate::uniform);
  EXPECT_EQ(rate(x.kv_head), Rate::uniform);
  EXPECT_EQ(rate(x.seqlen_q), Rate::uniform);
  EXPECT_EQ(rate(x.seqlen_kv), Rate::uniform);
}

TEST(Tape, OperandsStandBeforeTheirUsers) {
  const Arguments x = arguments();
  const float slopes[4] = {};
  const Captured table = capture("slopes", vector_of(slopes, 4));
  const Tape tape = lowered(x.score - table[x.q_head] * abs(x.q_idx - x.kv_idx));
  for (std::size_t i = 0; i < tape.code.size(); ++i) {
    for (const std::int32_t operand : tape.code[i].operands) {
      EXPECT_LT(operand, static_cast<std::int32_t>(i));
    }
    for (const std::int32_t index : tape.code[i].indices) {
      EXPECT_LT(index, static_cast<std::int32_t>(i));
    }
  }
}

TEST(Tape, WhatDependsOnOneSideIsNotPaidPerScore) {
  const Arguments x = arguments();
  const float ids[8] = {};
  const Captured doc = capture("doc", vector_of(ids, 8));
  const Tape tape = lowered(doc[x.q_idx + 1] * 2.0 == doc[x.kv_idx * 3] && x.kv_idx <= x.q_idx);
  EXPECT_EQ(tape.num_per_score_ops(), 2);
  EXPECT_EQ(tape.num_registers[static_cast<int>(Rate::per_score)], 0);
}

TEST(Tape, ConjunctionsBecomeConditions) {
  const Arguments x = arguments();
  const Expr formula = x.kv_idx <= x.q_idx && x.q_idx - x.kv_idx <= 9 && x.kv_idx < x.seqlen_kv;
  const Tape tape = lowered(formula);
  int conditions = 0;
  for (const Instruction& each : tape.code) {
    EXPECT_NE(each.op, Op::logical_and);
    conditions += each.is_condition ? 1 : 0;
  }
  EXPECT_EQ(conditions, 3);
}

TEST(Tape, ConjunctionsInsideAnotherFormulaStay) {
  const Arguments x = arguments();
  const Expr both = x.kv_idx <= x.q_idx && x.q_idx != 3;
  const Tape tape = lowered(both || x.kv_idx == 0);
  EXPECT_EQ(std::count_if(tape.code.begin(), tape.code.end(),
                          [](const Instruction& each) { return each.op == Op::logical_and; }),
            1);
  EXPECT_TRUE(tape.code.back().is_condition);
}

TEST(Tape, ConditionsReadElsewhereKeepTheirValue) {
  const Arguments x = arguments();
  const Expr causal = x.kv_idx <= x.q_idx;
  const Tape tape = lowered(causal && (causal != (x.kv_idx - x.q_idx == 3)));
  for (const Instruction& each : tape.code) {
    if (each.op == Op::le) {
      EXPECT_TRUE(each.is_condition);
      EXPECT_GE(each.target, 0);
    }
  }
}

TEST(Tape, ProductsOfScoresAreFusedIntoSums) {
  const Arguments x = arguments();
  const Expr product = x.score * to_float(x.kv_idx - x.q_idx);
  EXPECT_TRUE(lowered(x.score + product).code.back().is_fused);
  EXPECT_TRUE(lowered(product + x.score).code.back().is_fused);
  EXPECT_TRUE(lowered(x.score - product).code.back().is_fused);
  EXPECT_FALSE(lowered(product - x.score).code.back().is_fused);
  EXPECT_EQ(lowered(x.score + product).num_per_score_ops(), 3);  // sub, float, multiply-add
}

TEST(Tape, ProductsReadTwiceAreNotFused) {
  const Arguments x = arguments();
  const Expr product = x.score * to_float(x.kv_idx - x.q_idx);
  for (const Instruction& each : lowered((x.score + product) * tanh(product)).code) {
    EXPECT_FALSE(each.is_fused);
  }
}

TEST(Tape, ValuesThatTheNextInstructionAloneReadsAreMarked) {
  const Arguments x = arguments();
  const Expr distance = x.q_idx - x.kv_idx;  // per score; read by abs, which float reads
  const Expr twice = tanh(x.score);          // read by two instructions
  const Tape tape = lowered(twice * to_float(abs(distance)) + exp(twice));
  for (const Instruction& each : tape.code) {
    const bool expected = (each.op == Op::sub || each.op == Op::abs || each.op == Op::exp);
    EXPECT_EQ(each.feeds_only_next, expected) << info(each.op).name;
  }
}

TEST(Tape, DeadRegistersAreReused) {
  const Arguments x = arguments();
  Expr value = x.score;
  for (int i = 0; i < 20; ++i) value = tanh(value + x.score);
  EXPECT_EQ(lowered(value).num_registers[static_cast<int>(Rate::per_score)], 1);
}

TEST(Tape, RegistersInUseAreNotReused) {
  const Arguments x = arguments();
  std::vector<Expr> parts;
  for (int i = 0; i < 5; ++i) parts.push_back(tanh(x.score + static_cast<double>(i)));
  Expr value = parts[0];
  for (int i = 1; i < 5; ++i) value = value / parts[static_cast<std::size_t>(i)];
  const Tape tape = lowered(value);
  // A value must not be overwritten between its instruction and its last reader.
  for (std::size_t i = 0; i < tape.code.size(); ++i) {
    for (const std::int32_t operand : tape.code[i].operands) {
      if (operand < 0 || tape.code[static_cast<std::size_t>(operand)].target < 0) continue;
      const Instruction& read = tape.code[static_cast<std::size_t>(operand)];
      for (auto between = static_cast<std::size_t>(operand) + 1; between < i; ++between) {
        const Instruction& other = tape.code[between];
        EXPECT_FALSE(other.rate == read.rate && other.target == read.target);
      }
    }
  }
}

TEST(Tape, TheResultReplacesTheScore) {
  EXPECT_EQ(lowered(arguments().score * 2.0).code.back().target, -1);
}

TEST(Tape, SlotsAreInOrderOfFirstUse) {
  const Arguments x = arguments();
  const float data[4] = {};
  const Captured a = capture("a", vector_of(data, 4));
  const Captured b = capture("b", vector_of(data, 4));
  const Expr n = scalar(CapturedScalar::of("n", 3));
  const Tape tape = lowered(b[x.q_idx] * to_float(n) + a[x.kv_idx] + b[x.kv_idx]);
  EXPECT_EQ(tape.tensors, (std::vector<std::string>{"b", "a"}));
  EXPECT_EQ(tape.scalars, (std::vector<std::string>{"n"}));
}

TEST(Tape, ConstantsStayUniform) {
  EXPECT_EQ(count(lowered(arguments().score + 1.0), Rate::uniform), 1);
}

}  // namespace
}  // namespace fovea::expr
