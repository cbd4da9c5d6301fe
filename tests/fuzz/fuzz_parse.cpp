// Any bytes are a formula or a refusal; a formula goes through every pass and its text comes back the same.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fovea/error.hpp"

#include "expr/interval.hpp"
#include "expr/parse.hpp"
#include "expr/passes.hpp"
#include "expr/print.hpp"

namespace {

using namespace fovea;

TensorView shape_only(Dtype dtype, int rank) {
  TensorSpec spec;
  spec.dtype = dtype;
  spec.rank = rank;
  for (int dim = 0; dim < rank; ++dim) {
    spec.shape[static_cast<std::size_t>(dim)] = 8;
    spec.strides[static_cast<std::size_t>(dim)] = 1;
  }
  return {static_cast<const void*>(nullptr), spec};
}

const Captures& captures() {
  static const Captures kCaptures{
      .tensors = {{"a", shape_only(Dtype::f32, 1)},
                  {"b", shape_only(Dtype::i32, 2)},
                  {"m", shape_only(Dtype::boolean, 2)}},
      .scalars = {CapturedScalar::of("n", 3), CapturedScalar::of("t", 0.5)}};
  return kCaptures;
}

void require(bool condition) {
  if (!condition) __builtin_trap();
}

expr::NodePtr parse_or_null(std::string_view text) {
  try {
    return expr::parse(text, captures(), "formula");
  } catch (const InvalidArgument&) {
    return nullptr;
  }
}

void check_text(const expr::NodePtr& formula) {
  // Left-leaning chains may be written as deep as they like, right-leaning ones need nesting, as the input did.
  const expr::NodePtr again = parse_or_null(expr::print(*formula));
  require(again != nullptr && again->digest == formula->digest);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const expr::NodePtr formula = parse_or_null({reinterpret_cast<const char*>(data), size});
  if (formula == nullptr) return 0;
  check_text(formula);
  expr::verify(*formula, "parse");
  const expr::NodePtr simple = expr::simplify(formula);
  require(simple->type == formula->type);
  expr::structural_key(simple);
  expr::collect_captures(*formula);
  expr::Box box;
  for (expr::Interval& variable : box.variables) variable = {-100, 100, false};
  const expr::Interval range = expr::IntervalProgram(simple).evaluate(box);
  require(range.lo <= range.hi);
  return 0;
}
