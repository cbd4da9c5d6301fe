// Runs score and mask programs on tiles of scores: a tape, executed by vector code that is compiled
// once per target.
//
// Cost: an instruction is dispatched once per chunk of about 768 scores, so that the interpreter
// costs little beside the arithmetic (bench/micro/program_bench.cpp). Values of a lower rate are
// computed once per tile: those per query are laid out for a whole chunk, so that every operand of
// a per_score instruction is read contiguously, or as one value per key.
//
// Registers hold 32-bit values in float arrays; bools are int masks, 0 or -1. Read program.hpp for
// the layout of scratch, ../../expr/tape.hpp for the instructions.

#if defined(FOVEA_CPU_PROGRAM_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_PROGRAM_INL_
#undef FOVEA_CPU_PROGRAM_INL_
#else
#define FOVEA_CPU_PROGRAM_INL_
#endif

#include <hwy/highway.h>
#include <math.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>

#include "fovea/dtype.hpp"

#include "cpu/kernels/math-inl.hpp"
#include "cpu/program.hpp"
#include "expr/tape.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using expr::Instruction;
using expr::Op;
using expr::Rate;
using ProgramTag = hn::CappedTag<float, 16>;

/// Where an operand lies for a rectangle of keys x lanes.
struct ProgramOperand {
  const float* data = nullptr;
  std::int64_t step = 1;  // from one value to the next: 1, or 0 for a value repeated for a vector
  bool is_key = false;    // one value per key instead
};

struct ProgramArea {
  std::int64_t keys = 1;
  std::int64_t lanes = 0;
};

/// Whether a function of two or three operands gets loops of its own for one operand that is
/// uniform or per key. Worth their code for the ops of common masks and biases.
enum class KeyLoops : std::uint8_t { shared, own };

/// One row of an operand that has a value for each score. (Members and indices rather than moving
/// pointers: GCC keeps arrays of those in memory.)
struct PlainRow {
  const float* data;

  HWY_INLINE hn::Vec<ProgramTag> read(std::int64_t i) const {
    return hn::LoadU(ProgramTag(), data + i);
  }
};

/// One row of any operand. Value i is data[i & mask]: a mask of 0 repeats the first vector.
struct MaskedRow {
  const float* data;
  std::int64_t mask;

  HWY_INLINE hn::Vec<ProgramTag> read(std::int64_t i) const {
    return hn::LoadU(ProgramTag(), data + (i & mask));
  }
};

/// A value per key is spread over a vector in memory.
HWY_INLINE MaskedRow masked_row(const ProgramOperand& operand, std::int64_t first, std::int64_t key,
                                float* spread) {
  if (!operand.is_key) return {operand.data + first * operand.step, -operand.step};
  const ProgramTag d;
  hn::Store(hn::Set(d, operand.data[key]), d, spread);
  return {spread, 0};
}

/// Vector i of operand k; operand kFixed is `fixed`, the same for the whole row.
template <std::size_t k, std::size_t kFixed, class Row>
HWY_INLINE hn::Vec<ProgramTag> read_operand(const Row& row, std::int64_t i,
                                            hn::Vec<ProgramTag> fixed) {
  if constexpr (k == kFixed) return fixed;
  return row.read(i);
}

/// f(d, operands...) of vector i. Not a lambda: those are not always inlined.
template <std::size_t kFixed, std::size_t... k, class Row, class F>
HWY_INLINE hn::Vec<ProgramTag> apply_to_vector(std::index_sequence<k...> /* operands */,
                                               const Row* rows, std::int64_t i,
                                               hn::Vec<ProgramTag> fixed, const F& f) {
  return f(ProgramTag(), read_operand<k, kFixed>(rows[k], i, fixed)...);
}

/// One row: out[i] = f(d, operands...). Three vectors at a time, as rows have 3 (AVX-512, NEON) or
/// 2 (AVX2).
template <std::size_t kFixed, class Row, std::size_t kOperands, class F>
HWY_INLINE void map_row(std::int64_t width, float* out, const Row (&rows)[kOperands],
                        hn::Vec<ProgramTag> fixed, const F& f) {
  const ProgramTag d;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  const std::make_index_sequence<kOperands> all;
  std::int64_t i = 0;
  for (; i + 3 * n <= width; i += 3 * n) {
    const auto first = apply_to_vector<kFixed>(all, rows, i, fixed, f);
    const auto second = apply_to_vector<kFixed>(all, rows, i + n, fixed, f);
    const auto third = apply_to_vector<kFixed>(all, rows, i + 2 * n, fixed, f);
    hn::StoreU(first, d, out + i);
    hn::StoreU(second, d, out + i + n);
    hn::StoreU(third, d, out + i + 2 * n);
  }
  for (; i < width; i += n) {
    hn::StoreU(apply_to_vector<kFixed>(all, rows, i, fixed, f), d, out + i);
  }
}

/// Every operand has a value for each score: the area is one long row.
template <std::size_t... k, class F>
HWY_INLINE void map_plain(std::index_sequence<k...> /* operands */, const ProgramArea& area,
                          float* out, const ProgramOperand* in, const F& f) {
  const PlainRow rows[] = {PlainRow{in[k].data}...};
  map_row<sizeof...(k)>(area.keys * area.lanes, out, rows, hn::Zero(ProgramTag()), f);
}

/// Operand kFixed is one value per key or uniform, the others have a value for each score.
template <std::size_t kFixed, std::size_t... k, class F>
HWY_INLINE void map_fixed(std::index_sequence<k...> /* operands */, const ProgramArea& area,
                          float* out, const ProgramOperand* in, const F& f) {
  const ProgramTag d;
  const ProgramOperand& operand = in[kFixed];
  const std::int64_t num_rows = operand.is_key ? area.keys : 1;
  const std::int64_t width = operand.is_key ? area.lanes : area.keys * area.lanes;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t first = row * width;
    const PlainRow rows[] = {PlainRow{in[k].data + first}...};
    map_row<kFixed>(width, out + first, rows, hn::Set(d, operand.data[row]), f);
  }
}

/// Operands of any rate.
template <std::size_t... k, class F>
HWY_INLINE void map_any(std::index_sequence<k...> /* operands */, const ProgramArea& area,
                        float* out, const ProgramOperand* in, const F& f) {
  HWY_ALIGN float spread[sizeof...(k)][16];
  const bool by_key = (in[k].is_key || ...);
  const std::int64_t num_rows = by_key ? area.keys : 1;
  const std::int64_t width = by_key ? area.lanes : area.keys * area.lanes;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t first = row * width;
    const MaskedRow rows[] = {masked_row(in[k], first, row, spread[k])...};
    map_row<sizeof...(k)>(width, out + first, rows, hn::Zero(ProgramTag()), f);
  }
}

/// out[i] = f(d, in[0][i], ...) for all of an area; in place is allowed.
template <KeyLoops kLoops = KeyLoops::shared, std::size_t kOperands, class F>
HWY_NOINLINE void map(const ProgramArea& area, float* out, const ProgramOperand (&in)[kOperands],
                      F f) {
  const std::make_index_sequence<kOperands> all;
  if constexpr (kLoops == KeyLoops::own) {
    static_assert(kOperands >= 2, "loops for one fixed operand need another that varies");
    const auto is_fixed = [](const ProgramOperand& each) { return each.is_key || each.step == 0; };
    const auto num_fixed = std::count_if(std::begin(in), std::end(in), is_fixed);
    if (num_fixed == 0) return map_plain(all, area, out, in, f);
    if (num_fixed == 1 && is_fixed(in[0])) return map_fixed<0>(all, area, out, in, f);
    if (num_fixed == 1 && is_fixed(in[1])) return map_fixed<1>(all, area, out, in, f);
  }
  map_any(all, area, out, in, f);
}

// Adaptors: registers hold floats, ops may want ints, unsigned bits, or yield masks.

template <class F>
struct OnInts {
  explicit OnInts(F function) : f(function) {}
  template <class D, class... V>
  HWY_INLINE hn::Vec<D> operator()(D d, V... v) const {
    const hn::RebindToSigned<D> di;
    return hn::BitCast(d, f(di, hn::BitCast(di, v)...));
  }
  F f;
};

/// Sums and products wrap, which only unsigned arithmetic does without undefined behaviour.
template <class F>
struct OnBits {
  explicit OnBits(F function) : f(function) {}
  template <class D, class... V>
  HWY_INLINE hn::Vec<D> operator()(D d, V... v) const {
    const hn::RebindToUnsigned<D> du;
    return hn::BitCast(d, f(du, hn::BitCast(du, v)...));
  }
  F f;
};

template <class F>
struct FloatComparison {
  explicit FloatComparison(F function) : f(function) {}
  template <class D, class V>
  HWY_INLINE hn::Mask<D> operator()(D, V a, V b) const {
    return f(a, b);
  }
  F f;
};

template <class F>
struct IntComparison {
  explicit IntComparison(F function) : f(function) {}
  template <class D, class V>
  HWY_INLINE hn::Mask<D> operator()(D d, V a, V b) const {
    const hn::RebindToSigned<D> di;
    return hn::RebindMask(d, f(hn::BitCast(di, a), hn::BitCast(di, b)));
  }
  F f;
};

/// -1 or 0 from a comparison.
template <class C>
struct AsBool {
  explicit AsBool(C comparison) : c(comparison) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return hn::VecFromMask(d, c(d, a, b));
  }
  C c;
};

/// The score where a comparison holds, else -inf: whatever the score is, NaN included.
template <class C>
struct AsHiding {
  explicit AsHiding(C comparison) : c(comparison) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b, V score) const {
    return hn::IfThenElse(c(d, a, b), score, hn::Neg(hn::Inf(d)));
  }
  C c;
};

/// Keeps the sign of zero, which hn::Floor loses on targets without the instruction.
template <class V>
HWY_INLINE V floor(V x) {
  return hn::CopySign(hn::Floor(x), x);
}

/// The lesser; NaN where either is NaN.
template <class V>
HWY_INLINE V min_or_nan(V a, V b) {
  const auto lesser = hn::IfThenElse(hn::Lt(a, b), a, b);  // b when unordered
  return hn::IfThenElse(hn::Eq(a, a), lesser, a);
}

template <class V>
HWY_INLINE V max_or_nan(V a, V b) {
  const auto greater = hn::IfThenElse(hn::Gt(a, b), a, b);
  return hn::IfThenElse(hn::Eq(a, a), greater, a);
}

/// Truncates; saturates at the ends of int32; NaN gives 0.
template <class D>
HWY_INLINE hn::Vec<D> float_to_int_bits(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto low = hn::Set(d, -0x1p31F);
  const auto is_high = hn::Ge(x, hn::Set(d, 0x1p31F));
  const auto raised = hn::IfThenElse(hn::Lt(x, low), low, x);
  const auto is_convertible = hn::And(hn::Eq(x, x), hn::Not(is_high));
  const auto converted = hn::ConvertTo(di, hn::IfThenElseZero(is_convertible, raised));
  const auto highest = hn::Set(di, std::numeric_limits<std::int32_t>::max());
  return hn::BitCast(d, hn::IfThenElse(hn::RebindMask(di, is_high), highest, converted));
}

/// Floor division of ints or its remainder; 0 where the divisor is 0. Exact in fp64: the quotient
/// of two int32 is at least 2^-31 away from the next integer, or is one.
template <bool kRemainder>
HWY_NOINLINE void divide_ints(std::int64_t count, float* out, const ProgramOperand& dividend,
                              const ProgramOperand& divisor) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<std::int32_t, decltype(d)> di;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto* a_bits = reinterpret_cast<const std::int32_t*>(dividend.data);
  const auto* b_bits = reinterpret_cast<const std::int32_t*>(divisor.data);
  auto* out_bits = reinterpret_cast<std::int32_t*>(out);
  for (std::int64_t i = 0; i < count; i += n) {
    const auto a = hn::PromoteTo(d, hn::LoadU(di, a_bits + i * dividend.step));
    const auto b = hn::PromoteTo(d, hn::LoadU(di, b_bits + i * divisor.step));
    const auto is_zero = hn::Eq(b, hn::Zero(d));
    const auto nonzero = hn::IfThenElse(is_zero, hn::Set(d, 1.0), b);
    auto result = hn::Floor(hn::Div(a, nonzero));
    if constexpr (kRemainder) {
      result = hn::Sub(a, hn::Mul(result, nonzero));
    } else {  // -2^31 / -1 wraps
      result = hn::IfThenElse(hn::Ge(result, hn::Set(d, 0x1p31)), hn::Set(d, -0x1p31), result);
    }
    hn::StoreU(hn::DemoteTo(di, hn::IfThenZeroElse(is_zero, result)), di, out_bits + i);
  }
}

/// One element as a register holds it.
template <class T>
HWY_INLINE float element_value(const T* p) {
  return std::bit_cast<float>(static_cast<std::int32_t>(*p));
}
HWY_INLINE float element_value(const float* p) { return *p; }
HWY_INLINE float element_value(const float16* p) { return static_cast<float>(*p); }
HWY_INLINE float element_value(const bfloat16* p) { return static_cast<float>(*p); }
HWY_INLINE float element_value(const std::int64_t* p) {
  using Int32 = std::numeric_limits<std::int32_t>;
  const std::int64_t limited = std::clamp<std::int64_t>(*p, Int32::min(), Int32::max());
  return std::bit_cast<float>(static_cast<std::int32_t>(limited));
}

/// A stored bool: any byte but 0 is true.
struct BoolByte {
  std::uint8_t byte;
};
HWY_INLINE float element_value(const BoolByte* p) {
  return std::bit_cast<float>(p->byte != 0 ? -1 : 0);
}

/// Calls visit(p) with the tensor's data as the type of its elements.
template <class Visit>
HWY_INLINE void visit_elements(const TensorView& tensor, Visit visit) {
  switch (tensor.dtype()) {
    case Dtype::f32:
      return visit(static_cast<const float*>(tensor.data()));
    case Dtype::f16:
      return visit(static_cast<const float16*>(tensor.data()));
    case Dtype::bf16:
      return visit(static_cast<const bfloat16*>(tensor.data()));
    case Dtype::boolean:
      return visit(static_cast<const BoolByte*>(tensor.data()));
    case Dtype::u8:
      return visit(static_cast<const std::uint8_t*>(tensor.data()));
    case Dtype::i8:
      return visit(static_cast<const std::int8_t*>(tensor.data()));
    case Dtype::i32:
      return visit(static_cast<const std::int32_t*>(tensor.data()));
    case Dtype::i64:
      return visit(static_cast<const std::int64_t*>(tensor.data()));
  }
}

/// One index of a load: where its values lie, and what it contributes to the offset.
struct LoadIndex {
  const float* data = nullptr;  // ints
  Rate rate = Rate::uniform;
  std::int64_t extent = 0;
  std::int64_t stride = 0;

  HWY_INLINE std::int64_t offset(std::int64_t i) const {
    const std::int64_t value = std::bit_cast<std::int32_t>(data[i]);
    return std::clamp<std::int64_t>(value, 0, extent - 1) * stride;
  }
};

#if HWY_TARGET != HWY_SCALAR
using FourTag = hn::FixedTag<float, 4>;

/// Four consecutive elements as registers hold them.
template <class T>
HWY_INLINE hn::Vec<FourTag> four_values(const T* p) {
  const FourTag d;
  const hn::RebindToSigned<FourTag> di;
  if constexpr (sizeof(T) == 1) {
    using Byte = std::conditional_t<std::is_same_v<T, std::int8_t>, std::int8_t, std::uint8_t>;
    const hn::Rebind<Byte, FourTag> db;
    const auto ints = hn::PromoteTo(di, hn::LoadU(db, reinterpret_cast<const Byte*>(p)));
    if constexpr (std::is_same_v<T, BoolByte>) {
      return hn::BitCast(d, hn::VecFromMask(di, hn::Ne(ints, hn::Zero(di))));
    }
    return hn::BitCast(d, ints);
  } else if constexpr (sizeof(T) == 4) {
    return hn::LoadU(d, reinterpret_cast<const float*>(p));
  } else {
    HWY_ALIGN float values[4];
    for (int i = 0; i < 4; ++i) values[i] = element_value(p + i);
    return hn::Load(d, values);
  }
}

/// out[key][lane] = p[lane_offsets[lane] + key] for 4 keys and 4 lanes.
template <class T>
HWY_INLINE void load_transposed(const T* p, const std::int64_t* lane_offsets, float* out,
                                std::int64_t lanes) {
  const FourTag d;
  const auto r0 = four_values(p + lane_offsets[0]);
  const auto r1 = four_values(p + lane_offsets[1]);
  const auto r2 = four_values(p + lane_offsets[2]);
  const auto r3 = four_values(p + lane_offsets[3]);
  const auto low01 = hn::InterleaveLower(d, r0, r1);
  const auto low23 = hn::InterleaveLower(d, r2, r3);
  const auto high01 = hn::InterleaveUpper(d, r0, r1);
  const auto high23 = hn::InterleaveUpper(d, r2, r3);
  hn::StoreU(hn::ConcatLowerLower(d, low23, low01), d, out);
  hn::StoreU(hn::ConcatUpperUpper(d, low23, low01), d, out + lanes);
  hn::StoreU(hn::ConcatLowerLower(d, high23, high01), d, out + 2 * lanes);
  hn::StoreU(hn::ConcatUpperUpper(d, high23, high01), d, out + 3 * lanes);
}
#endif

/// The offset of element (key, lane) is key_offsets[key] + lane_offsets[lane].
struct SeparableLoad {
  const std::int64_t* key_offsets;
  const std::int64_t* lane_offsets;
  ProgramArea area;
  float* out;
};

template <class T>
HWY_INLINE void load_rows(const T* p, const SeparableLoad& load, std::int64_t first_key) {
  const std::int64_t lanes = load.area.lanes;
  for (std::int64_t key = first_key; key < load.area.keys; ++key) {
    float* row = load.out + key * lanes;
    // Packed bits and chunked tables: neighbouring keys often read the same elements.
    if (key > 0 && load.key_offsets[key] == load.key_offsets[key - 1]) {
      std::memcpy(row, row - lanes, static_cast<std::size_t>(lanes) * sizeof(float));
      continue;
    }
    const T* base = p + load.key_offsets[key];
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      row[lane] = element_value(base + load.lane_offsets[lane]);
    }
  }
}

template <class T>
HWY_NOINLINE void load_separable(const T* p, const SeparableLoad& load) {
  std::int64_t done = 0;
#if HWY_TARGET != HWY_SCALAR
  bool is_contiguous = load.area.lanes % 4 == 0;
  for (std::int64_t key = 1; key < load.area.keys; ++key) {
    is_contiguous &= load.key_offsets[key] == load.key_offsets[0] + key;
  }
  for (; is_contiguous && done + 4 <= load.area.keys; done += 4) {
    const T* base = p + load.key_offsets[done];
    for (std::int64_t lane = 0; lane < load.area.lanes; lane += 4) {
      load_transposed(base, load.lane_offsets + lane, load.out + done * load.area.lanes + lane,
                      load.area.lanes);
    }
  }
#endif
  load_rows(p, load, done);
}

/// One run of a tape on one tile.
class ProgramRun {
 public:
  ProgramRun(const expr::Tape& tape, const ProgramTile& tile)
      : tape_(tape), tile_(tile), layout_(program_layout(tape, tile.num_keys, tile.lanes)) {}

  void run_score() {
    if (tape_.empty() || tile_.num_keys == 0) return;
    compute_lower_rates();
    const Instruction& result = tape_.code.back();
    for_each_chunk([&] {
      if (result.rate == Rate::per_score) return compute_per_score();
      map(area_, scores(), {operand(index_of(result))}, [](auto, auto x) HWY_ATTR { return x; });
    });
  }

  void run_mask() {
    if (tape_.empty() || tile_.num_keys == 0) return;
    compute_lower_rates();
    if (!uniform_conditions_hold()) return hide_all();
    for_each_chunk([&] {
      for (const Instruction& each : tape_.code) {
        const bool is_lower = each.rate == Rate::per_query || each.rate == Rate::per_key;
        if (each.is_condition && is_lower) hide_where_false(operand(index_of(each)));
      }
      compute_per_score();
    });
  }

 private:
  std::int32_t index_of(const Instruction& instruction) const {
    return static_cast<std::int32_t>(&instruction - tape_.code.data());
  }
  const Instruction& at(std::int32_t index) const {
    return tape_.code[static_cast<std::size_t>(index)];
  }
  float* scratch(std::size_t offset) const {
    return reinterpret_cast<float*>(tile_.scratch + offset);
  }
  float* scores() const { return tile_.scores + key_begin_ * tile_.lanes; }

  template <class Chunk>
  void for_each_chunk(Chunk chunk) {
    for (key_begin_ = 0; key_begin_ < tile_.num_keys; key_begin_ += layout_.chunk_keys) {
      area_ = {std::min(layout_.chunk_keys, tile_.num_keys - key_begin_), tile_.lanes};
      chunk();
    }
  }

  float* register_of(const Instruction& instruction) const {
    const auto target = static_cast<std::size_t>(instruction.target);
    switch (instruction.rate) {
      case Rate::uniform:
        return scratch(target * layout_.uniform_bytes);
      case Rate::per_query:
        return scratch(layout_.query_begin + target * layout_.query_bytes);
      case Rate::per_key:
        return scratch(layout_.key_begin + target * layout_.key_bytes);
      case Rate::per_score:
        return instruction.target < 0 ? scores()
                                      : scratch(layout_.score_begin + target * layout_.score_bytes);
    }
    return nullptr;
  }

  /// As a per_score instruction of the current chunk reads it.
  ProgramOperand operand(std::int32_t index) const {
    const Instruction& instruction = at(index);
    const float* data = register_of(instruction);
    if (instruction.rate == Rate::uniform) return {data, 0, false};
    if (instruction.rate == Rate::per_key) return {data + key_begin_, 1, true};
    return {data, 1, false};
  }

  /// As an instruction of this rate reads it: lower rates see contiguous values or uniform ones.
  ProgramOperand operand(std::int32_t index, Rate reader) const {
    if (reader == Rate::per_score) return operand(index);
    const Instruction& instruction = at(index);
    return {register_of(instruction), instruction.rate == Rate::uniform ? 0 : 1, false};
  }

  void compute_lower_rates() {
    const auto keys = static_cast<std::int64_t>(layout_.key_bytes / sizeof(float));
    const auto vector = static_cast<std::int64_t>(layout_.uniform_bytes / sizeof(float));
    for (const Instruction& each : tape_.code) {
      if (each.rate == Rate::per_score) continue;
      area_ = {1, each.rate == Rate::uniform   ? vector
                  : each.rate == Rate::per_key ? keys
                                               : tile_.lanes};
      execute(each, register_of(each));
      if (each.rate == Rate::per_query && each.feeds_scores) repeat_for_keys(register_of(each));
    }
  }

  /// The lanes again for each key of a chunk.
  void repeat_for_keys(float* values) const {
    const std::int64_t keys = std::min(layout_.chunk_keys, tile_.num_keys);
    for (std::int64_t key = 1; key < keys; ++key) {
      std::memcpy(values + key * tile_.lanes, values,
                  static_cast<std::size_t>(tile_.lanes) * sizeof(float));
    }
  }

  void compute_per_score() {
    for (const Instruction& each : tape_.code) {
      if (each.rate != Rate::per_score || each.op == Op::variable) continue;
      execute(each, register_of(each));
      if (each.is_condition && each.target >= 0) hide_where_false({register_of(each), 1, false});
    }
  }

  bool uniform_conditions_hold() const {
    return std::none_of(tape_.code.begin(), tape_.code.end(), [&](const Instruction& each) {
      return each.is_condition && each.rate == Rate::uniform &&
             std::bit_cast<std::int32_t>(*register_of(each)) == 0;
    });
  }

  void hide_all() const {
    const float infinity = std::numeric_limits<float>::infinity();
    std::fill_n(tile_.scores, tile_.num_keys * tile_.lanes, -infinity);
  }

  void hide_where_false(const ProgramOperand& condition) const {
    map(area_, scores(), {condition, {scores()}}, [](auto d, auto c, auto score) HWY_ATTR {
      return hn::IfThenElse(hn::MaskFromVec(c), score, hn::Neg(hn::Inf(d)));
    });
  }

  void execute(const Instruction& instruction, float* out) {
    switch (instruction.op) {
      case Op::constant:
        return fill(out, instruction.type == ExprType::floating ? instruction.float_value
                                                                : int_value(instruction));
      case Op::variable:
        return read_variable(instruction.variable, out);
      case Op::scalar:
        return fill(out, scalar_value(instruction));
      case Op::load:
        return load(instruction, out);
      case Op::select:
        return select(instruction, out);
      case Op::to_int:
      case Op::to_float:
        return convert(instruction, out);
      default:
        break;
    }
    if (Op::lt <= instruction.op && instruction.op <= Op::ne) return compare(instruction, out);
    if (instruction.type == ExprType::floating) {
      if (instruction.is_fused) return multiply_add(instruction, out);
      return at_arity_one(instruction) ? float_function(instruction, out)
                                       : float_arithmetic(instruction, out);
    }
    return at_arity_one(instruction) ? int_function(instruction, out)
                                     : int_arithmetic(instruction, out);
  }

  static bool at_arity_one(const Instruction& instruction) { return instruction.operands[1] < 0; }

  template <class F>
  void map_one(const Instruction& instruction, float* out, F f) const {
    map(area_, out, {operand(instruction.operands[0], instruction.rate)}, f);
  }
  template <KeyLoops kLoops = KeyLoops::shared, class F>
  void map_two(const Instruction& instruction, float* out, F f) const {
    map<kLoops>(area_, out,
                {operand(instruction.operands[0], instruction.rate),
                 operand(instruction.operands[1], instruction.rate)},
                f);
  }
  template <class F>
  void map_three(const Instruction& instruction, float* out, F f) const {
    map(area_, out,
        {operand(instruction.operands[0], instruction.rate),
         operand(instruction.operands[1], instruction.rate),
         operand(instruction.operands[2], instruction.rate)},
        f);
  }

  void fill(float* out, float value) const {
    const ProgramTag d;
    const auto v = hn::Set(d, value);
    for (std::int64_t i = 0; i < area_.keys * area_.lanes; i += hn::Lanes(d)) {
      hn::StoreU(v, d, out + i);
    }
  }

  static float int_value(const Instruction& instruction) {
    const bool is_bool = instruction.type == ExprType::boolean;
    return std::bit_cast<float>(is_bool ? -instruction.int_value : instruction.int_value);
  }

  float scalar_value(const Instruction& instruction) const {
    const double value = tile_.scalars[instruction.slot];
    if (instruction.type == ExprType::floating) return static_cast<float>(value);
    if (instruction.type == ExprType::boolean) return std::bit_cast<float>(value != 0 ? -1 : 0);
    const double limited = value > -0x1p31 ? std::min(value, 0x1p31 - 1) : -0x1p31;
    return std::bit_cast<float>(static_cast<std::int32_t>(limited));
  }

  void read_variable(expr::Variable variable, float* out) const {
    const auto fill_int = [&](std::int32_t value) { fill(out, std::bit_cast<float>(value)); };
    const auto lanes_bytes = static_cast<std::size_t>(tile_.lanes) * sizeof(float);
    switch (variable) {
      case expr::Variable::score:
        return;
      case expr::Variable::batch:
        return fill_int(tile_.batch);
      case expr::Variable::kv_head:
        return fill_int(tile_.kv_head);
      case expr::Variable::seqlen_q:
        return fill_int(tile_.seqlen_q);
      case expr::Variable::seqlen_kv:
        return fill_int(tile_.seqlen_kv);
      case expr::Variable::q_idx:
        std::memcpy(out, tile_.q_idx, lanes_bytes);
        return;
      case expr::Variable::q_head:
        std::memcpy(out, tile_.q_head, lanes_bytes);
        return;
      case expr::Variable::kv_idx:
        for (std::int64_t key = 0; key < area_.lanes; ++key) {
          out[key] = std::bit_cast<float>(static_cast<std::int32_t>(tile_.kv_begin + key));
        }
        return;
    }
  }

  void float_function(const Instruction& instruction, float* out) const {
    switch (instruction.op) {
      case Op::neg:
        return map_one(instruction, out, [](auto, auto x) HWY_ATTR { return hn::Neg(x); });
      case Op::abs:
        return map_one(instruction, out, [](auto, auto x) HWY_ATTR { return hn::Abs(x); });
      case Op::floor:
        return map_one(instruction, out, [](auto, auto x) HWY_ATTR { return floor(x); });
      case Op::exp:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return exp(d, x); });
      case Op::exp2:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return exp2(d, x); });
      case Op::log:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return log(d, x); });
      case Op::log2:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return log2(d, x); });
      case Op::tanh:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return tanh(d, x); });
      case Op::sqrt:
        return map_one(instruction, out, [](auto, auto x) HWY_ATTR { return hn::Sqrt(x); });
      case Op::rsqrt:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return rsqrt(d, x); });
      default:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return sigmoid(d, x); });
    }
  }

  void float_arithmetic(const Instruction& instruction, float* out) const {
    switch (instruction.op) {
      case Op::add:
        return map_two<KeyLoops::own>(instruction, out,
                                      [](auto, auto a, auto b) HWY_ATTR { return hn::Add(a, b); });
      case Op::sub:
        return map_two<KeyLoops::own>(instruction, out,
                                      [](auto, auto a, auto b) HWY_ATTR { return hn::Sub(a, b); });
      case Op::mul:
        return map_two<KeyLoops::own>(instruction, out,
                                      [](auto, auto a, auto b) HWY_ATTR { return hn::Mul(a, b); });
      case Op::div:
        return map_two(instruction, out,
                       [](auto, auto a, auto b) HWY_ATTR { return hn::Div(a, b); });
      case Op::floor_div:
        return map_two(instruction, out,
                       [](auto, auto a, auto b) HWY_ATTR { return floor(hn::Div(a, b)); });
      case Op::min:
        return map_two(instruction, out,
                       [](auto, auto a, auto b) HWY_ATTR { return min_or_nan(a, b); });
      case Op::max:
        return map_two(instruction, out,
                       [](auto, auto a, auto b) HWY_ATTR { return max_or_nan(a, b); });
      case Op::pow:
        return map_elements(instruction, out, [](float a, float b) { return powf(a, b); });
      default:
        return map_elements(instruction, out, [](float a, float b) {
          const float remainder = fmodf(a, b);  // exact; its sign becomes that of the divisor
          return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
        });
    }
  }

  /// pow and float mod are rare and hard to do well: the C library's, element by element.
  template <class F>
  void map_elements(const Instruction& instruction, float* out, F f) const {
    const ProgramOperand a = operand(instruction.operands[0], instruction.rate);
    const ProgramOperand b = operand(instruction.operands[1], instruction.rate);
    const auto value = [](const ProgramOperand& from, std::int64_t key, std::int64_t i) {
      return from.is_key ? from.data[key] : from.data[i * from.step];
    };
    for (std::int64_t key = 0, i = 0; key < area_.keys; ++key) {
      for (std::int64_t lane = 0; lane < area_.lanes; ++lane, ++i) {
        out[i] = f(value(a, key, i), value(b, key, i));
      }
    }
  }

  void multiply_add(const Instruction& instruction, float* out) const {
    if (instruction.op == Op::add) {
      return map_three(instruction, out,
                       [](auto, auto a, auto b, auto c) HWY_ATTR { return hn::MulAdd(a, b, c); });
    }
    map_three(instruction, out,
              [](auto, auto a, auto b, auto c) HWY_ATTR { return hn::NegMulAdd(a, b, c); });
  }

  /// Of ints, and the logical not of bools.
  void int_function(const Instruction& instruction, float* out) const {
    switch (instruction.op) {
      case Op::neg:
        return map_one(instruction, out,
                       OnBits([](auto d, auto x) HWY_ATTR { return hn::Sub(hn::Zero(d), x); }));
      case Op::abs:
        return map_one(instruction, out, OnBits([](auto d, auto x) HWY_ATTR {
                         const hn::RebindToSigned<decltype(d)> di;
                         const auto sign = hn::ShiftRight<31>(hn::BitCast(di, x));
                         const auto flip = hn::BitCast(d, sign);
                         return hn::Sub(hn::Xor(x, flip), flip);
                       }));
      case Op::floor:
        return map_one(instruction, out, [](auto, auto x) HWY_ATTR { return x; });
      default:
        return map_one(instruction, out, OnBits([](auto, auto x) HWY_ATTR { return hn::Not(x); }));
    }
  }

  /// Of ints and bools.
  void int_arithmetic(const Instruction& instruction, float* out) const {
    switch (instruction.op) {
      case Op::add:
        return map_two<KeyLoops::own>(
            instruction, out, OnBits([](auto, auto a, auto b) HWY_ATTR { return hn::Add(a, b); }));
      case Op::sub:
        return map_two<KeyLoops::own>(
            instruction, out, OnBits([](auto, auto a, auto b) HWY_ATTR { return hn::Sub(a, b); }));
      case Op::mul:
        return map_two(instruction, out,
                       OnBits([](auto, auto a, auto b) HWY_ATTR { return hn::Mul(a, b); }));
      case Op::min:
        return map_two(instruction, out,
                       OnInts([](auto, auto a, auto b) HWY_ATTR { return hn::Min(a, b); }));
      case Op::max:
        return map_two(instruction, out,
                       OnInts([](auto, auto a, auto b) HWY_ATTR { return hn::Max(a, b); }));
      case Op::logical_and:
      case Op::bit_and:
        return map_two(instruction, out,
                       OnBits([](auto, auto a, auto b) HWY_ATTR { return hn::And(a, b); }));
      case Op::logical_or:
      case Op::bit_or:
        return map_two(instruction, out,
                       OnBits([](auto, auto a, auto b) HWY_ATTR { return hn::Or(a, b); }));
      case Op::bit_xor:
        return map_two(instruction, out,
                       OnBits([](auto, auto a, auto b) HWY_ATTR { return hn::Xor(a, b); }));
      case Op::shl:
        return map_two(instruction, out, OnBits([](auto d, auto a, auto b) HWY_ATTR {
                         return hn::Shl(a, hn::And(b, hn::Set(d, 31U)));
                       }));
      case Op::shr:
        return map_two(instruction, out, OnInts([](auto d, auto a, auto b) HWY_ATTR {
                         return hn::Shr(a, hn::And(b, hn::Set(d, 31)));
                       }));
      default:
        return divide(instruction, out);
    }
  }

  void divide(const Instruction& instruction, float* out) const {
    const bool is_remainder = instruction.op == Op::mod;
    const ProgramOperand a = operand(instruction.operands[0], instruction.rate);
    const ProgramOperand b = operand(instruction.operands[1], instruction.rate);
    if (b.step == 0) {
      const auto divisor = static_cast<std::uint32_t>(std::bit_cast<std::int32_t>(*b.data));
      if (std::has_single_bit(divisor) && divisor >> 31U == 0) {
        return divide_by_power_of_two(instruction, out, static_cast<std::int32_t>(divisor));
      }
    }
    HWY_ALIGN float repeated[2][16];
    const ProgramTag d;
    const bool by_key = a.is_key || b.is_key;
    const std::int64_t rows = by_key ? area_.keys : 1;
    const std::int64_t width = by_key ? area_.lanes : area_.keys * area_.lanes;
    const auto row_of = [&](const ProgramOperand& from, std::int64_t row, float* buffer) HWY_ATTR {
      if (!from.is_key) return from.data + row * width * from.step;
      hn::Store(hn::Set(d, from.data[row]), d, buffer);
      return static_cast<const float*>(buffer);
    };
    for (std::int64_t row = 0; row < rows; ++row) {
      divide_row(is_remainder, width, out + row * width,
                 {row_of(a, row, repeated[0]), a.is_key ? 0 : a.step},
                 {row_of(b, row, repeated[1]), b.is_key ? 0 : b.step});
    }
  }

  static void divide_row(bool is_remainder, std::int64_t count, float* out, const ProgramOperand& a,
                         const ProgramOperand& b) {
    if (is_remainder) return divide_ints<true>(count, out, a, b);
    divide_ints<false>(count, out, a, b);
  }

  /// Rounding to -inf is what shifts and masks of two's complement do.
  void divide_by_power_of_two(const Instruction& instruction, float* out,
                              std::int32_t divisor) const {
    if (instruction.op == Op::mod) {
      return map_one(instruction, out, OnInts([divisor](auto d, auto x) HWY_ATTR {
                       return hn::And(x, hn::Set(d, divisor - 1));
                     }));
    }
    const int bits = std::countr_zero(static_cast<std::uint32_t>(divisor));
    map_one(instruction, out,
            OnInts([bits](auto, auto x) HWY_ATTR { return hn::ShiftRightSame(x, bits); }));
  }

  void compare(const Instruction& instruction, float* out) const {
    if (instruction.operand_type == ExprType::floating) return compare_floats(instruction, out);
    compare_ints(instruction, out);
  }

  /// A condition that nobody reads hides scores at once; else its value is stored.
  template <class C>
  void compare_by(const Instruction& instruction, float* out, C comparison) const {
    if (instruction.target >= 0) return map_two(instruction, out, AsBool(comparison));
    map<KeyLoops::own>(
        area_, scores(),
        {operand(instruction.operands[0]), operand(instruction.operands[1]), {scores()}},
        AsHiding(comparison));
  }

  void compare_floats(const Instruction& instruction, float* out) const {
    switch (instruction.op) {
      case Op::lt:
        return compare_by(instruction, out,
                          FloatComparison([](auto a, auto b) HWY_ATTR { return hn::Lt(a, b); }));
      case Op::le:
        return compare_by(instruction, out,
                          FloatComparison([](auto a, auto b) HWY_ATTR { return hn::Le(a, b); }));
      case Op::gt:
        return compare_by(instruction, out,
                          FloatComparison([](auto a, auto b) HWY_ATTR { return hn::Gt(a, b); }));
      case Op::ge:
        return compare_by(instruction, out,
                          FloatComparison([](auto a, auto b) HWY_ATTR { return hn::Ge(a, b); }));
      case Op::eq:
        return compare_by(instruction, out,
                          FloatComparison([](auto a, auto b) HWY_ATTR { return hn::Eq(a, b); }));
      default:  // not hn::Ne, which is false for NaN on some targets
        return compare_by(instruction, out, FloatComparison([](auto a, auto b) HWY_ATTR {
                            return hn::Not(hn::Eq(a, b));
                          }));
    }
  }

  /// Of ints; bools are compared for equality only.
  void compare_ints(const Instruction& instruction, float* out) const {
    switch (instruction.op) {
      case Op::lt:
        return compare_by(instruction, out,
                          IntComparison([](auto a, auto b) HWY_ATTR { return hn::Lt(a, b); }));
      case Op::le:
        return compare_by(instruction, out, IntComparison([](auto a, auto b) HWY_ATTR {
                            return hn::Not(hn::Gt(a, b));
                          }));
      case Op::gt:
        return compare_by(instruction, out,
                          IntComparison([](auto a, auto b) HWY_ATTR { return hn::Gt(a, b); }));
      case Op::ge:
        return compare_by(instruction, out, IntComparison([](auto a, auto b) HWY_ATTR {
                            return hn::Not(hn::Lt(a, b));
                          }));
      case Op::eq:
        return compare_by(instruction, out,
                          IntComparison([](auto a, auto b) HWY_ATTR { return hn::Eq(a, b); }));
      default:
        return compare_by(instruction, out,
                          IntComparison([](auto a, auto b) HWY_ATTR { return hn::Ne(a, b); }));
    }
  }

  void select(const Instruction& instruction, float* out) const {
    map_three(instruction, out, [](auto, auto condition, auto yes, auto no) HWY_ATTR {
      return hn::IfThenElse(hn::MaskFromVec(condition), yes, no);
    });
  }

  void convert(const Instruction& instruction, float* out) const {
    const bool from_bool = instruction.operand_type == ExprType::boolean;
    if (instruction.type == ExprType::floating) {
      if (from_bool) {
        return map_one(instruction, out,
                       [](auto d, auto x) HWY_ATTR { return hn::And(x, hn::Set(d, 1.0F)); });
      }
      return map_one(instruction, out, [](auto d, auto x) HWY_ATTR {
        const hn::RebindToSigned<decltype(d)> di;
        return hn::ConvertTo(d, hn::BitCast(di, x));
      });
    }
    if (from_bool) {
      return map_one(instruction, out,
                     OnInts([](auto d, auto x) HWY_ATTR { return hn::And(x, hn::Set(d, 1)); }));
    }
    map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return float_to_int_bits(d, x); });
  }

  void load(const Instruction& instruction, float* out) const {
    const TensorView& tensor = tile_.tensors[instruction.slot];
    LoadIndex indices[kMaxRank];
    const std::size_t rank = instruction.indices.size();
    for (std::size_t i = 0; i < rank; ++i) {
      const std::int32_t index = instruction.indices[i];
      const auto dim = static_cast<int>(i);
      if (tensor.size(dim) == 0) return fill(out, 0.0F);
      const std::int64_t key =
          at(index).rate == Rate::per_key && instruction.rate == Rate::per_score ? key_begin_ : 0;
      indices[i] = {register_of(at(index)) + key, at(index).rate, tensor.size(dim),
                    tensor.stride(dim)};
    }
    load_at(tensor, {indices, rank}, instruction.rate, out);
  }

  void load_at(const TensorView& tensor, std::span<const LoadIndex> indices, Rate rate,
               float* out) const {
    if (rate == Rate::uniform) {
      std::int64_t offset = 0;
      for (const LoadIndex& index : indices) offset += index.offset(0);
      return visit_elements(tensor, [&](const auto* p) { fill(out, element_value(p + offset)); });
    }
    if (rate != Rate::per_score) return load_each(tensor, indices, out);
    auto* lane_offsets =
        reinterpret_cast<std::int64_t*>(tile_.scratch + layout_.lane_offsets_begin);
    auto* key_offsets = reinterpret_cast<std::int64_t*>(tile_.scratch + layout_.key_offsets_begin);
    std::fill_n(lane_offsets, area_.lanes, 0);
    std::fill_n(key_offsets, area_.keys, 0);
    bool is_separable = true;
    for (const LoadIndex& index : indices) {
      is_separable &= index.rate != Rate::per_score;
      if (index.rate == Rate::uniform) {
        const std::int64_t offset = index.offset(0);
        for (std::int64_t key = 0; key < area_.keys; ++key) key_offsets[key] += offset;
      } else if (index.rate == Rate::per_query) {
        for (std::int64_t i = 0; i < area_.lanes; ++i) lane_offsets[i] += index.offset(i);
      } else if (index.rate == Rate::per_key) {
        for (std::int64_t i = 0; i < area_.keys; ++i) key_offsets[i] += index.offset(i);
      }
    }
    const SeparableLoad load{key_offsets, lane_offsets, area_, out};
    visit_elements(tensor, [&](const auto* p) {
      if (is_separable) return load_separable(p, load);
      load_scattered(p, load, indices);
    });
  }

  /// Values of a lower rate: few, one by one.
  void load_each(const TensorView& tensor, std::span<const LoadIndex> indices, float* out) const {
    visit_elements(tensor, [&](const auto* p) {
      for (std::int64_t i = 0; i < area_.lanes; ++i) {
        std::int64_t offset = 0;
        for (const LoadIndex& index : indices) {
          offset += index.offset(index.rate == Rate::uniform ? 0 : i);
        }
        out[i] = element_value(p + offset);
      }
    });
  }

  /// Some index differs for every score.
  template <class T>
  HWY_NOINLINE static void load_scattered(const T* p, const SeparableLoad& load,
                                          std::span<const LoadIndex> indices) {
    std::int64_t i = 0;
    for (std::int64_t key = 0; key < load.area.keys; ++key) {
      for (std::int64_t lane = 0; lane < load.area.lanes; ++lane, ++i) {
        std::int64_t offset = load.key_offsets[key] + load.lane_offsets[lane];
        for (const LoadIndex& index : indices) {
          if (index.rate == Rate::per_score) offset += index.offset(i);
        }
        load.out[i] = element_value(p + offset);
      }
    }
  }

  const expr::Tape& tape_;
  const ProgramTile& tile_;
  ProgramLayout layout_;
  std::int64_t key_begin_ = 0;  // of the current chunk
  ProgramArea area_{};          // of the instruction being executed
};

/// scores <- program(scores).
inline void run_score_program(const expr::Tape& tape, const ProgramTile& tile) {
  ProgramRun(tape, tile).run_score();
}

/// scores <- mask ? scores : -inf.
inline void run_mask_program(const expr::Tape& tape, const ProgramTile& tile) {
  ProgramRun(tape, tile).run_mask();
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_PROGRAM_INL_
