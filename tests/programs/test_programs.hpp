// Score and mask programs over captured data of every dtype, by number: one for each op, then random ones.
// print_programs.cpp prints them, printed_test.cpp runs what was printed. Both must draw the same ones, so a draw
// depends on the number alone.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "fovea/expr.hpp"

#include "expr/passes.hpp"
#include "property/expr_formulas.hpp"
#include "reference/evaluate.hpp"

namespace fovea::testing {

/// FormulaData, and what it leaves out: narrow dtypes, a stride of 0, a negative one, NaN and infinities among the
/// elements.
class ProgramData {
 public:
  static constexpr std::int64_t kExtent = 12;

  ProgramData() {
    for (std::size_t i = 0; i < kExtent; ++i) {
      const auto x = static_cast<float>(i);
      halves_[i] = float16(0.25F * x - 1);
      brains_[i] = bfloat16(3 - x);
      bytes_[i] = static_cast<std::uint8_t>(40 * i);
      chars_[i] = static_cast<std::int8_t>(20 * static_cast<int>(i) - 120);
      odd_[i] = 1.5F - x;
      words_[i] = static_cast<std::int64_t>(0x9e3779b97f4a7c15U * (i + 1));
    }
    odd_[2] = std::numeric_limits<float>::infinity();
    odd_[5] = std::numeric_limits<float>::quiet_NaN();
  }
  ProgramData(const ProgramData&) = delete;
  ProgramData& operator=(const ProgramData&) = delete;

  Captures captures() const {
    Captures all = formula_data_.captures();
    all.tensors.push_back({"halves", line(halves_.data(), Dtype::f16, 1)});
    all.tensors.push_back({"brains", line(brains_.data() + kExtent - 1, Dtype::bf16, -1)});
    all.tensors.push_back({"bytes", line(bytes_.data(), Dtype::u8, 1)});
    all.tensors.push_back({"chars", line(chars_.data() + 3, Dtype::i8, 0)});
    all.tensors.push_back({"odd", line(odd_.data(), Dtype::f32, 1)});
    all.tensors.push_back({"words", as_words32(line(words_.data(), Dtype::i64, 1))});
    return all;
  }

 private:
  static TensorView line(const void* data, Dtype dtype, std::int64_t stride) {
    TensorSpec spec;
    spec.dtype = dtype;
    spec.rank = 1;
    spec.shape[0] = kExtent;
    spec.strides[0] = stride;
    return {data, spec};
  }

  FormulaData formula_data_;
  std::array<float16, kExtent> halves_;
  std::array<bfloat16, kExtent> brains_;
  std::array<std::uint8_t, kExtent> bytes_{};
  std::array<std::int8_t, kExtent> chars_{};
  std::array<float, kExtent> odd_{};
  std::array<std::int64_t, kExtent> words_{};
};

struct TestProgram {
  ScoreMod score;
  MaskMod mask;
};

/// One op over ints or floats that take every sign, and all of its result compared with another int.
inline std::vector<TestProgram> op_programs(const Captures& captures) {
  const auto program = [&](const std::string& score, const std::string& value) {
    return TestProgram{parse_score_mod(score, captures),
                       parse_mask_mod("(" + value + ") <= seqlen_kv - 20", captures)};
  };
  std::vector<TestProgram> programs;
  for (const char* op : {"+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>"}) {
    const std::string infix = std::string(" ") + op + " ";
    programs.push_back(
        program("float(q_idx" + infix + "kv_idx)", "(q_idx - 20)" + infix + "(kv_idx - 20)"));
    // By a constant, which has rules and spellings of its own.
    programs.push_back(program("float(q_idx" + infix + "8)", "(q_idx - kv_idx)" + infix + "8"));
    programs.push_back(program("float(q_idx" + infix + "-7)", "(q_idx - kv_idx)" + infix + "-7"));
  }
  for (const char* op : {"<", "<=", ">", ">=", "==", "!="}) {
    const std::string infix = std::string(" ") + op + " ";
    programs.push_back(program("score" + infix + "float(q_idx) ? 1.0 : 2.0",
                               "q_idx % 7" + infix + "kv_idx % 5 ? q_idx : kv_idx"));
    programs.push_back(program("float(q_idx)" + infix + "odd[kv_idx] ? 1.0 : 2.0",
                               "float(q_idx)" + infix + "odd[kv_idx] ? q_idx : kv_idx - 40"));
  }
  for (const char* op : {"min", "max"}) {
    programs.push_back(
        program(std::string(op) + "(score, odd[q_idx])", std::string(op) + "(q_idx, kv_idx) - 20"));
    programs.push_back(program(std::string("float(") + op + "(q_idx, kv_idx))",
                               std::string("int(") + op + "(halves[q_idx], odd[kv_idx]) * 8.0)"));
  }
  for (const char* op : {"-", "~", "abs"}) {
    programs.push_back(
        program(std::string("float(") + op + "(q_idx))", std::string(op) + "(q_idx - kv_idx)"));
  }
  for (const char* op :
       {"-",       "abs", "floor", "exp", "exp2", "log",   "log2", "tanh",  "sqrt",  "rsqrt",
        "sigmoid", "sin", "cos",   "tan", "erf",  "round", "ceil", "trunc", "log1p", "expm1"}) {
    const std::string call = std::string(op) + "(";
    programs.push_back(program(call + "score)", "int(" + call + "float(q_idx - 20) * 0.3) * 4.0)"));
    programs.push_back(
        program(call + "score * 1e-3)", "int(" + call + "float(kv_idx) * 0.05 + 1e-3) * 9.0)"));
  }
  for (const char* op : {"+", "-", "*", "/", "//", "%"}) {
    const std::string infix = std::string(" ") + op + " ";
    programs.push_back(program("score" + infix + "(float(q_idx) * 0.75 - 3.0)",
                               "int((float(q_idx) - 19.5)" + infix + "(float(kv_idx) - 20.25))"));
    programs.push_back(program("floor(score" + infix + "odd[q_idx])",
                               "int(float(q_idx - 20)" + infix + "odd[kv_idx])"));
  }
  programs.push_back(program("fmod(score, float(q_idx) * 0.75 - 3.0)",
                             "int(fmod(float(q_idx - 20) * 0.7, float(kv_idx) - 20.25) * 4.0)"));
  programs.push_back(program("pow(score, float(q_idx % 9 - 4))",
                             "int(pow(float(q_idx) * 0.3, float(kv_idx % 5) - 2.0))"));
  programs.push_back(
      program("pow(halves[q_idx], score * 0.1)", "int(pow(odd[q_idx], odd[kv_idx]))"));
  programs.push_back(program("float(int(score * 1e9))", "int(odd[q_idx] * float(kv_idx))"));
  for (const char* tensor :
       {"slopes", "halves", "brains", "odd", "bytes", "chars", "flags", "wide"}) {
    const std::string load = std::string(tensor) + "[";
    programs.push_back(
        program("score + float(" + load + "q_idx - 3])", "int(" + load + "kv_idx - 3]) - q_idx"));
  }
  programs.push_back(
      program("float(ids[q_head, kv_idx])", "ids[q_head, kv_idx] * ids[batch, q_idx] - 15"));
  programs.push_back(program("float(ids[kv_idx, q_idx])", "ids[kv_idx, q_idx] + 17"));
  programs.push_back(program("float(words[q_idx, kv_idx % 2])",
                             "(words[q_idx % 12, kv_idx // 32 % 2] >> kv_idx % 32 & 1) * 50 - 20"));
  // One element, in a mask a number that ranges know.
  programs.push_back(program("score * gain + gain", "q_idx - kv_idx + reach"));
  programs.push_back(program("kv_idx < reach ? score : gain", "(q_idx - kv_idx) * reach + kv_idx"));
  programs.push_back(
      program("gain * tanh(score / gain)", "int(gain * (q_idx - kv_idx)) + ids[reach, kv_idx]"));
  // Ranges that end in NaN, and those of a dtype alone.
  programs.push_back(
      program("sqrt(score) < 2.0 ? 1.0 : 2.0", "sqrt(float(q_idx) - 25.0) < 100.0 ? -30 : 30"));
  programs.push_back(program("float(bytes[q_idx])", "bytes[kv_idx] // 14 - 9"));
  programs.push_back(program("float(chars[q_idx])", "q_idx // (kv_idx - 10)"));
  // Sums that share positions: bounded as a whole, unless they wrap.
  programs.push_back(program("float(q_idx * 2 - kv_idx * 2)", "q_idx + 37 > q_idx ? -5 : 25"));
  programs.push_back(program("float(q_idx + 3 - q_idx)", "q_idx - kv_idx + kv_idx - 10"));
  programs.push_back(
      program("q_idx + 3 > q_idx ? 1.0 : 2.0", "q_idx * 3 + 7 > q_idx * 3 ? kv_idx : q_idx"));
  programs.push_back(
      program("score == score ? 1.0 : 2.0",
              "odd[q_idx] == odd[q_idx] && odd[kv_idx] != odd[kv_idx] ? 0 : kv_idx"));
  programs.push_back(program("n * 2 < q_idx && !(t < score || kv_idx == 3) ? t : -t",
                             "(q_idx < kv_idx) == (kv_idx < n + 9) ? 5 : -25"));
  // One range of keys for each row, or nearly.
  for (const char* mask :
       {"kv_idx <= q_idx", "kv_idx < q_idx && q_idx - kv_idx <= n",
        "q_idx - kv_idx < 9 && kv_idx - q_idx <= 3", "kv_idx == q_idx // 2",
        "kv_idx <= q_idx && q_idx - kv_idx < reach * 4", "kv_idx > q_idx - 7 && kv_idx < n * 4",
        "10 > kv_idx && kv_idx >= ids[batch, q_idx]", "kv_idx <= q_idx || kv_idx == 20",
        "q_idx + kv_idx <= 30 && kv_idx != 4"}) {
    programs.push_back({parse_score_mod("score * 0.5"), parse_mask_mod(mask, captures)});
  }
  // A line along the keys, or nearly.
  for (const char* score :
       {"score + slopes[q_head] * (kv_idx - q_idx)", "slopes[q_head] * kv_idx + score - t * q_idx",
        "score - (q_idx + (seqlen_kv - seqlen_q) - kv_idx) / 4", "score + halves[q_head]",
        "(kv_idx - n) * t - (-score)", "t * (float(-kv_idx) * 2.0) + (score + halves[q_idx])",
        "score - t * abs(q_idx - kv_idx)", "score + float(kv_idx + 2147483640)",
        "score * t + kv_idx", "score + float(kv_idx) * kv_idx",
        "score + gain * (kv_idx - q_idx)"}) {
    programs.push_back({parse_score_mod(score, captures), parse_mask_mod("kv_idx < 30")});
  }
  // Loaded by keys and rows alone, or nearly.
  for (const char* mask :
       {"ids[batch, q_idx] == ids[batch, kv_idx] && ids[batch, q_idx] != 3", "flags[kv_idx]",
        "flags[q_idx] != flags[kv_idx]", "odd[kv_idx] < halves[kv_idx] || flags[q_idx]",
        "ids[batch, q_idx] + ids[q_idx, kv_idx] < 9 + bytes[kv_idx]",
        "flags[kv_idx] && odd[kv_idx] < 0.5 + q_idx && bytes[kv_idx] > q_idx"}) {
    programs.push_back({parse_score_mod("score * halves[kv_idx] + odd[q_head]", captures),
                        parse_mask_mod(mask, captures)});
  }
  return programs;
}

/// Does the formula have several values at positions? A constant would test little.
inline bool varies(const Program& program) {
  reference::Evaluator evaluate(program);
  std::mt19937 random(5);
  std::set<double> values;
  for (int i = 0; i < 24; ++i) {
    const auto index = [&] { return static_cast<std::int64_t>(random() % 24); };
    const double value = evaluate({.score = static_cast<double>(index()) / 4 - 2,
                                   .batch = index(),
                                   .q_head = index(),
                                   .kv_head = index(),
                                   .q_idx = index(),
                                   .kv_idx = index(),
                                   .seqlen_q = index(),
                                   .seqlen_kv = index()});
    if (std::isfinite(value)) values.insert(value);
  }
  return values.size() > (program.expr().type() == ExprType::boolean ? 1U : 4U);
}

/// Enough for ops to meet each other; a translation unit of all programs compiles in some ten seconds.
inline constexpr int kNumRandomPrograms = 60;

/// Formulas are drawn until one is of use. Sizes run from two ops to more than a line.
inline TestProgram random_program(const Captures& captures, int number) {
  const int num_steps = 2 + number / 2;
  const auto draw = [&](std::uint32_t stream, auto is_of_use) {
    for (std::uint32_t attempt = 0;; ++attempt) {
      const std::uint32_t seed = static_cast<std::uint32_t>(number) * 100003 + stream + 2 * attempt;
      const Expr formula(FormulaGenerator(captures, seed).formula(num_steps));
      if (is_of_use(formula)) return formula;
    }
  };
  const Expr score = draw(0, [](const Expr& formula) {
    return formula.type() != ExprType::boolean && varies(ScoreMod(formula));
  });
  const Expr mask = draw(1, [](const Expr& formula) {
    return formula.type() == ExprType::boolean &&
           !expr::reads(formula.node(), expr::Variable::score) && varies(MaskMod(formula));
  });
  return {ScoreMod(score), MaskMod(mask)};
}

inline std::vector<TestProgram> test_programs(const Captures& captures) {
  std::vector<TestProgram> programs = op_programs(captures);
  for (int i = 0; i < kNumRandomPrograms; ++i) programs.push_back(random_program(captures, i));
  return programs;
}

}  // namespace fovea::testing
