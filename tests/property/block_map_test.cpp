// Soundness of block maps: for random masks, sizes and tiles, no tile called empty has a visible score and no tile
// called full has a hidden one. Every formula is built twice, as an Expr and as a plain C++ function, so no evaluator
// is shared.
#include "mask/block_map.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fovea/error.hpp"

#include "unit/mask/dense_truth.hpp"

namespace fovea::mask {
namespace {

using IntFunction = std::function<std::int64_t(const Position&)>;

struct IntFormula {
  Expr expr;
  IntFunction value;
};

struct MaskFormula {
  MaskMod mask;
  Visible visible;
};

int pick(int begin, int end) { return *rc::gen::inRange(begin, end); }

std::int64_t wrap(std::int64_t value) { return static_cast<std::int32_t>(value); }
std::int64_t floor_quotient(std::int64_t a, std::int64_t b) {
  if (b == 0) return 0;
  return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}
std::int64_t floor_remainder(std::int64_t a, std::int64_t b) {
  return b == 0 ? 0 : a - floor_quotient(a, b) * b;
}

/// Tensors live as long as the formulas of one test case; slots are named by number.
class Data {
 public:
  explicit Data(const Sizes& sizes) : sizes_(sizes) {}

  const std::vector<std::int32_t>& ints(std::int64_t count, int least, int greatest) {
    auto& data = *stored_.emplace_back(std::make_unique<std::vector<std::int32_t>>());
    // Runs, as of documents: short ones and long ones.
    const int run_length = pick(1, 20);
    for (std::int64_t i = 0; i < count; ++i) {
      data.push_back(i % run_length == 0 ? pick(least, greatest) : data.back());
    }
    return data;
  }

  IntFormula load(const IntFormula& idx) {
    const std::int64_t extent = pick(1, 60);
    const auto& data = ints(extent, -6, 30);
    const Captured table = capture(next_name(), view(data.data(), {extent}));
    return {table[idx.expr], [&data, extent, f = idx.value](const Position& p) {
              const std::int64_t i = std::clamp<std::int64_t>(f(p), 0, extent - 1);
              return std::int64_t{data[static_cast<std::size_t>(i)]};
            }};
  }

  MaskFormula documents_word() {
    const std::int64_t longest = std::max(sizes_.seqlen_q, sizes_.seqlen_kv);
    const auto& data = ints(sizes_.num_batches * longest, -1, 4);
    const TensorView q = view(data.data(), {sizes_.num_batches, sizes_.seqlen_q}, {longest, 1});
    const TensorView kv = view(data.data(), {sizes_.num_batches, sizes_.seqlen_kv}, {longest, 1});
    return {documents(q, kv), [&data, longest](const Position& p) {
              const auto id_q = data[static_cast<std::size_t>(p.batch * longest + p.q_idx)];
              const auto id_kv = data[static_cast<std::size_t>(p.batch * longest + p.kv_idx)];
              return id_q == id_kv && id_q != -1;
            }};
  }

  MaskFormula prefix_word() {
    const auto& data = ints(sizes_.num_batches, 0, 60);
    return {prefix_lm(view(data.data(), {sizes_.num_batches})), [&data](const Position& p) {
              return p.kv_idx < data[static_cast<std::size_t>(p.batch)] || p.kv_idx <= p.pos();
            }};
  }

  MaskFormula dense_word() {
    const std::int64_t heads = pick(0, 2) == 0 ? 1 : sizes_.num_heads;
    const std::int64_t rows = pick(0, 2) == 0 ? 1 : sizes_.seqlen_q;
    const std::int64_t keys = sizes_.seqlen_kv;
    const auto& data = ints(heads * rows * keys, 0, 2);
    auto& bytes =
        *bytes_.emplace_back(std::make_unique<std::vector<std::uint8_t>>(data.begin(), data.end()));
    return {dense_mask(view(bytes.data(), {heads, rows, keys})), [=, &bytes](const Position& p) {
              const std::int64_t head = heads == 1 ? 0 : p.q_head;
              const std::int64_t row = rows == 1 ? 0 : p.q_idx;
              return bytes[static_cast<std::size_t>((head * rows + row) * keys + p.kv_idx)] != 0;
            }};
  }

  std::string next_name() { return "t" + std::to_string(num_slots_++); }

 private:
  Sizes sizes_;
  int num_slots_ = 0;
  std::vector<std::unique_ptr<std::vector<std::int32_t>>> stored_;
  std::vector<std::unique_ptr<std::vector<std::uint8_t>>> bytes_;
};

IntFormula any_leaf(Data& data) {
  const Arguments x = arguments();
  switch (pick(0, 8)) {
    case 0:
      return {x.batch, [](const Position& p) { return p.batch; }};
    case 1:
      return {x.q_head, [](const Position& p) { return p.q_head; }};
    case 2:
      return {x.seqlen_kv - x.seqlen_q, [](const Position& p) { return p.seqlen_kv - p.seqlen_q; }};
    case 3: {
      const int value = pick(-20, 40);
      return {Expr(value), [=](const Position&) { return value; }};
    }
    case 4: {
      // A scalar that may drive 32-bit arithmetic over its edge.
      const std::int64_t value =
          pick(0, 4) == 0 ? (std::int64_t{1} << 31) - 1 - pick(0, 50) : pick(-9, 60);
      return {scalar(CapturedScalar::of(data.next_name(), value)),
              [=](const Position&) { return value; }};
    }
    case 5:
    case 6:
      return {x.q_idx, [](const Position& p) { return p.q_idx; }};
    default:
      return {x.kv_idx, [](const Position& p) { return p.kv_idx; }};
  }
}

IntFormula any_int(Data& data, int depth) {
  if (depth == 0) return any_leaf(data);
  const IntFormula a = any_int(data, depth - 1);
  const int op = pick(0, 10);
  if (op == 0) return data.load(a);
  if (op == 1)
    return {abs(a.expr), [f = a.value](const Position& p) { return wrap(std::abs(f(p))); }};
  if (op == 2) return {-a.expr, [f = a.value](const Position& p) { return wrap(-f(p)); }};
  const IntFormula b = any_int(data, pick(0, depth));
  const auto with = [&](const Expr& expr, auto&& combine) {
    return IntFormula{expr, [f = a.value, g = b.value, combine](const Position& p) {
                        return wrap(combine(f(p), g(p)));
                      }};
  };
  using Int = std::int64_t;
  switch (op) {
    case 3:
    case 4:
      return with(a.expr + b.expr, [](Int u, Int v) { return u + v; });
    case 5:
      return with(a.expr - b.expr, [](Int u, Int v) { return u - v; });
    case 6:
      return with(a.expr * b.expr, [](Int u, Int v) { return u * v; });
    case 7:
      return with(min(a.expr, b.expr), [](Int u, Int v) { return std::min(u, v); });
    case 8:
      return with(floor_div(a.expr, b.expr), floor_quotient);
    default:
      return with(a.expr % b.expr, floor_remainder);
  }
}

MaskFormula any_comparison(Data& data) {
  const IntFormula a = any_int(data, pick(0, 3));
  const IntFormula b = any_int(data, pick(0, 3));
  const auto with = [&](const Expr& expr, auto&& compare) {
    return MaskFormula{MaskMod(expr), [f = a.value, g = b.value, compare](const Position& p) {
                         return compare(f(p), g(p));
                       }};
  };
  switch (pick(0, 5)) {
    case 0:
      return with(a.expr < b.expr, std::less<>());
    case 1:
      return with(a.expr >= b.expr, std::greater_equal<>());
    case 2:
      return with(a.expr == b.expr, std::equal_to<>());
    case 3:
      return with(a.expr != b.expr, std::not_equal_to<>());
    default:
      return with(a.expr <= b.expr, std::less_equal<>());
  }
}

MaskFormula any_word(Data& data) {
  const std::int64_t size = pick(1, 40);
  switch (pick(0, 8)) {
    case 0:
      return {causal(), [](const Position& p) { return p.kv_idx <= p.pos(); }};
    case 1:
      return {window(size, size / 3), [=](const Position& p) {
                return p.kv_idx >= p.pos() - size && p.kv_idx <= p.pos() + size / 3;
              }};
    case 2:
      return {chunked(size), [=](const Position& p) {
                return floor_quotient(p.pos(), size) == floor_quotient(p.kv_idx, size);
              }};
    case 3:
      return {dilated(size), [=](const Position& p) { return (p.pos() - p.kv_idx) % size == 0; }};
    case 4:
      return {streaming(size / 4, size), [=](const Position& p) {
                return (p.kv_idx < size / 4 || p.kv_idx >= p.pos() - size) && p.kv_idx <= p.pos();
              }};
    case 5:
      return data.prefix_word();
    case 6:
      return data.dense_word();
    default:
      return data.documents_word();
  }
}

MaskFormula combined(const MaskFormula& a, const MaskFormula& b) {
  switch (pick(0, 3)) {
    case 0:
      return {a.mask || b.mask,
              [f = a.visible, g = b.visible](const Position& p) { return f(p) || g(p); }};
    case 1:
      return {a.mask && !b.mask,
              [f = a.visible, g = b.visible](const Position& p) { return f(p) && !g(p); }};
    default:
      return {a.mask && b.mask,
              [f = a.visible, g = b.visible](const Position& p) { return f(p) && g(p); }};
  }
}

MaskFormula any_combination(Data& data, MaskFormula (*any)(Data&)) {
  MaskFormula result = any(data);
  for (int more = pick(0, 3); more > 0; --more) result = combined(result, any(data));
  return result;
}

Sizes any_sizes() {
  return {.seqlen_q = pick(1, 70),
          .seqlen_kv = pick(1, 90),
          .tile_q = pick(1, 24),
          .tile_kv = pick(1, 24),
          .num_batches = pick(1, 3),
          .num_heads = pick(1, 4)};
}

void expect_sound(const MaskFormula& formula, const Sizes& sizes) {
  RC_LOG() << formula.mask.to_string() << "\nseqlen_q " << sizes.seqlen_q << ", seqlen_kv "
           << sizes.seqlen_kv << ", tiles " << sizes.tile_q << " x " << sizes.tile_kv << '\n';
  RC_ASSERT(compare_with_dense(formula.mask, formula.visible, sizes).wrong == "");
}

TEST(BlockMapProperty, WordsAndTheirCombinationsAreSound) {
  EXPECT_TRUE(rc::check([] {
    const Sizes sizes = any_sizes();
    Data data(sizes);
    expect_sound(any_combination(data, any_word), sizes);
  }));
}

TEST(BlockMapProperty, ArbitraryFormulasAreSound) {
  EXPECT_TRUE(rc::check([] {
    const Sizes sizes = any_sizes();
    Data data(sizes);
    try {
      expect_sound(any_combination(data, any_comparison), sizes);
    } catch (const InvalidArgument&) {
      RC_DISCARD("a constant division by zero");
    }
  }));
}

TEST(BlockMapProperty, BandsAreExactForOneHead) {
  EXPECT_TRUE(rc::check([] {
    Sizes sizes = any_sizes();
    sizes.num_heads = 1;
    const std::int64_t left = pick(0, 40);
    const std::int64_t right = pick(0, 40);
    const std::int64_t shift = pick(-30, 30);
    const MaskMod shifted = mask_mod([=](auto x) { return x.kv_idx + x.q_idx >= shift; });
    const Comparison result = compare_with_dense(
        window(left, right) && shifted,
        [=](const Position& p) {
          return p.kv_idx >= p.pos() - left && p.kv_idx <= p.pos() + right &&
                 p.kv_idx + p.q_idx >= shift;
        },
        sizes);
    RC_ASSERT(result.wrong == "");
    RC_ASSERT(result.num_undecided == 0);
  }));
}

}  // namespace
}  // namespace fovea::mask
