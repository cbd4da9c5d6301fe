// Runs score and mask programs on tiles of scores: a tape, executed by vector code that is compiled
// once per target.
//
// Values of a lower rate are computed once per tile. What is left for every score is turned into
// steps with their operands found, once per tile too; a chunk of about 768 scores then runs through
// all steps: cheap operations in groups, with values in registers (program_steps-inl.hpp), loads,
// exponentials and their like in a pass over the chunk each.
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
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include "fovea/dtype.hpp"

#include "cpu/kernels/math-inl.hpp"
#include "cpu/kernels/program_steps-inl.hpp"
#include "cpu/program.hpp"
#include "expr/tape.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using expr::Instruction;
using expr::Op;
using expr::Rate;
/// Where an operand of a call lies: the value of (key, lane) is data[key * row_step + lane * step].
struct ProgramOperand {
  const float* data = nullptr;
  std::int64_t step = 1;
  std::int64_t row_step = 0;

  HWY_INLINE float value(std::int64_t key, std::int64_t lane) const {
    return data[key * row_step + lane * step];
  }
};

struct ProgramArea {
  std::int64_t keys = 1;
  std::int64_t lanes = 0;
};

/// out[i] = f(d, in[i]). Three vectors at a time: f takes long.
template <class F>
HWY_NOINLINE void map(std::int64_t count, const float* in, float* out, F f) {
  const ProgramTag d;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + 3 * n <= count; i += 3 * n) {
    const auto first = f(d, hn::LoadU(d, in + i));
    const auto second = f(d, hn::LoadU(d, in + i + n));
    const auto third = f(d, hn::LoadU(d, in + i + 2 * n));
    hn::StoreU(first, d, out + i);
    hn::StoreU(second, d, out + i + n);
    hn::StoreU(third, d, out + i + 2 * n);
  }
  for (; i < count; i += n) hn::StoreU(f(d, hn::LoadU(d, in + i)), d, out + i);
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
    case Dtype::e4m3:  // refused where it is captured
      return;
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

  /// Of a vector, where they fit in 32 bits.
  template <class D>
  HWY_INLINE hn::Vec<D> offsets(D di, std::int64_t i) const {
    constexpr std::int64_t kHighest = std::numeric_limits<std::int32_t>::max();
    const auto last = hn::Set(di, static_cast<std::int32_t>(std::min(extent - 1, kHighest)));
    const auto value = hn::BitCast(di, hn::LoadU(ProgramTag(), data + i));
    const auto limited = hn::Min(hn::Max(value, hn::Zero(di)), last);
    return hn::Mul(limited, hn::Set(di, static_cast<std::int32_t>(stride)));
  }
};

/// The offset of element (key, lane) is key_offsets[key] + lane_offsets[lane].
struct SeparableLoad {
  const std::int64_t* key_offsets;
  const std::int64_t* lane_offsets;
  ProgramArea area;
  float* out;
  std::int64_t keys_ahead = 0;  // as in ProgramTile
  float factor = 1;             // as in ProgramTile
};

/// Scores of a vector once an element of the load is known to each.
template <LoadUse kUse>
HWY_INLINE ProgramVector used(ProgramVector element, ProgramVector score, ProgramVector factor) {
  const ProgramTag d;
  if constexpr (kUse == LoadUse::add) return hn::MulAdd(score, factor, element);
  return hn::IfThenElse(hn::MaskFromVec(element), score, hn::Neg(hn::Inf(d)));
}

/// The same for what was loaded into a register.
template <LoadUse kUse>
HWY_NOINLINE void use_register(std::int64_t count, const float* elements, float factor,
                               float* scores) {
  const ProgramTag d;
  const auto f = hn::Set(d, factor);
  for (std::int64_t i = 0; i < count; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    hn::StoreU(used<kUse>(hn::LoadU(d, elements + i), hn::LoadU(d, scores + i), f), d, scores + i);
  }
}

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
  } else if constexpr (sizeof(T) == 2) {
    const hn::Rebind<std::uint16_t, FourTag> d16;
    const hn::RebindToUnsigned<FourTag> du;
    const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p));
    if constexpr (std::is_same_v<T, bfloat16>) {
      return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
    } else {
      const hn::Rebind<hwy::float16_t, FourTag> d_half;
      return hn::PromoteTo(d, hn::BitCast(d_half, bits));
    }
  } else if constexpr (sizeof(T) == 4) {
    return hn::LoadU(d, reinterpret_cast<const float*>(p));
  } else {
    HWY_ALIGN float values[4];
    for (int i = 0; i < 4; ++i) values[i] = element_value(p + i);
    return hn::Load(d, values);
  }
}

// Dense masks and biases: keys lie side by side in memory, queries a row apart. A cache line of each of a vector's
// rows is copied at once, since rows a power of two apart share a set of the first-level cache, which has fewer lines
// than a vector has rows. Then blocks of 16 bytes of all rows are transposed as 32-bit words, whatever they hold, and
// the words' elements, of the same keys in all lanes, become values.

inline constexpr std::int64_t kLineBytes = 64;
inline constexpr std::int64_t kBlockBytes = 16;
inline constexpr std::int64_t kBlockWords = 4;

/// The first 16 bytes of rows 0, 4, 8, ... behind `row`; rows lie kLineBytes apart.
template <class D>
HWY_INLINE hn::Vec<D> every_fourth_row(D d, const float* row) {
  if constexpr (hn::MaxLanes(D()) == kBlockWords) {
    return hn::LoadU(d, row);
  } else {
    const hn::Half<D> half;
    constexpr auto kRows = static_cast<std::int64_t>(hn::MaxLanes(hn::Half<D>()));
    const float* upper = row + kRows * kLineBytes / static_cast<std::int64_t>(sizeof(float));
    return hn::Combine(d, every_fourth_row(half, upper), every_fourth_row(half, row));
  }
}

/// Word w of the first 16 bytes of every lane's row.
HWY_INLINE void transpose_words(const float* rows, ProgramVector (&words)[kBlockWords]) {
  const ProgramTag d;
  const hn::Repartition<std::uint64_t, ProgramTag> d64;
  constexpr auto kRow = kLineBytes / static_cast<std::int64_t>(sizeof(float));
  const auto r0 = every_fourth_row(d, rows);
  const auto r1 = every_fourth_row(d, rows + kRow);
  const auto r2 = every_fourth_row(d, rows + 2 * kRow);
  const auto r3 = every_fourth_row(d, rows + 3 * kRow);
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  words[0] = hn::BitCast(d, hn::InterleaveLower(d64, low01, low23));
  words[1] = hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23));
  words[2] = hn::BitCast(d, hn::InterleaveLower(d64, high01, high23));
  words[3] = hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23));
}

/// Element kIndex of a word of elements, as registers hold it.
template <class T, int kIndex>
HWY_INLINE ProgramVector element_of_words(ProgramVector words) {
  const ProgramTag d;
  const hn::RebindToUnsigned<ProgramTag> du;
  const hn::RebindToSigned<ProgramTag> di;
  const auto bits = hn::BitCast(du, words);
  if constexpr (sizeof(T) == 4) {
    return words;
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    if constexpr (kIndex == 0) return hn::BitCast(d, hn::ShiftLeft<16>(bits));
    return hn::BitCast(d, hn::And(bits, hn::Set(du, 0xffff0000U)));
  } else if constexpr (std::is_same_v<T, float16>) {
    const hn::Rebind<std::uint16_t, ProgramTag> d16;
    const hn::Rebind<hwy::float16_t, ProgramTag> d_half;
    const auto half = hn::TruncateTo(d16, hn::ShiftRight<16 * kIndex>(bits));
    return hn::PromoteTo(d, hn::BitCast(d_half, half));
  } else if constexpr (std::is_same_v<T, BoolByte>) {
    const auto byte = hn::And(bits, hn::Set(du, 0xffU << (8 * kIndex)));
    return hn::BitCast(d, hn::VecFromMask(du, hn::Ne(byte, hn::Zero(du))));
  } else if constexpr (std::is_same_v<T, std::uint8_t>) {
    return hn::BitCast(d, hn::And(hn::ShiftRight<8 * kIndex>(bits), hn::Set(du, 0xffU)));
  } else {
    const auto highest = hn::BitCast(di, hn::ShiftLeft<24 - 8 * kIndex>(bits));
    return hn::BitCast(d, hn::ShiftRight<24>(highest));
  }
}

/// Element kIndex of words that belong to a key, at `out`, a row of lanes behind that of the element before.
template <class T, LoadUse kUse, int kIndex>
HWY_INLINE void use_element(ProgramVector words, ProgramVector factor, float* out) {
  const ProgramTag d;
  const ProgramVector element = element_of_words<T, kIndex>(words);
  if constexpr (kUse == LoadUse::keep) {
    hn::StoreU(element, d, out);
  } else {
    hn::StoreU(used<kUse>(element, hn::LoadU(d, out), factor), d, out);
  }
}

/// All elements of words, of `keys` keys at most.
template <class T, LoadUse kUse, int... kIndices>
HWY_INLINE void use_words(ProgramVector words, ProgramVector factor, float* out, std::int64_t lanes,
                          std::int64_t keys, std::integer_sequence<int, kIndices...>) {
  if (keys >= static_cast<std::int64_t>(sizeof...(kIndices))) {
    (use_element<T, kUse, kIndices>(words, factor, out + kIndices * lanes), ...);
  } else {
    ((kIndices < keys ? use_element<T, kUse, kIndices>(words, factor, out + kIndices * lanes)
                      : void()),
     ...);
  }
}

/// The next `bytes` of each lane's row, kLineBytes apart.
template <class T>
HWY_INLINE void copy_rows(const T* p, const SeparableLoad& load, std::int64_t lane,
                          std::int64_t bytes, std::byte* to) {
  const auto num_rows = static_cast<std::int64_t>(hn::Lanes(ProgramTag()));
  const std::int64_t* offsets = load.lane_offsets + lane;
  const auto each_row = [&](auto copy) HWY_ATTR {
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const T* from = p + offsets[row];
      copy(from, to + row * kLineBytes);
      if (load.keys_ahead > 0) __builtin_prefetch(from + load.keys_ahead, 0, 2);
    }
  };
  switch (bytes) {
    case kLineBytes:
      return each_row([](const T* from, std::byte* row) { std::memcpy(row, from, kLineBytes); });
    case kLineBytes / 2:
      return each_row(
          [](const T* from, std::byte* row) { std::memcpy(row, from, kLineBytes / 2); });
    default:
      std::memset(to, 0, static_cast<std::size_t>(num_rows * kLineBytes));
      return each_row([bytes](const T* from, std::byte* row) {
        std::memcpy(row, from, static_cast<std::size_t>(bytes));
      });
  }
}

template <class T, LoadUse kUse>
HWY_NOINLINE void load_contiguous(const T* p, const SeparableLoad& load) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
  constexpr std::int64_t kWordKeys = 4 / kSize;
  constexpr std::int64_t kLineKeys = kLineBytes / kSize;
  const auto n = static_cast<std::int64_t>(hn::Lanes(ProgramTag()));
  const std::int64_t lanes = load.area.lanes;
  const auto factor = hn::Set(ProgramTag(), load.factor);
  HWY_ALIGN float rows[hn::MaxLanes(ProgramTag()) * kLineBytes / sizeof(float)];
  const T* base = p + load.key_offsets[0];
  for (std::int64_t lane = 0; lane < lanes; lane += n) {
    for (std::int64_t begin = 0; begin < load.area.keys; begin += kLineKeys) {
      const std::int64_t count = std::min(kLineKeys, load.area.keys - begin);
      copy_rows(base + begin, load, lane, count * kSize, reinterpret_cast<std::byte*>(rows));
      for (std::int64_t key = 0; key < count; key += kBlockBytes / kSize) {
        ProgramVector words[kBlockWords];
        transpose_words(rows + key * kSize / static_cast<std::int64_t>(sizeof(float)), words);
        for (std::int64_t w = 0; w < kBlockWords; ++w) {
          const std::int64_t first = key + w * kWordKeys;
          use_words<T, kUse>(words[w], factor, load.out + (begin + first) * lanes + lane, lanes,
                             count - first, std::make_integer_sequence<int, kWordKeys>());
        }
      }
    }
  }
}

/// Did it? Biases are floats, and masks that hide as they are bools.
template <class T>
HWY_INLINE bool use_contiguous(const T* p, const SeparableLoad& load, LoadUse use) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, float16> ||
                std::is_same_v<T, bfloat16>) {
    if (use == LoadUse::add) return load_contiguous<T, LoadUse::add>(p, load), true;
  } else if constexpr (std::is_same_v<T, BoolByte>) {
    if (use == LoadUse::hide) return load_contiguous<T, LoadUse::hide>(p, load), true;
  }
  return false;
}

inline bool is_contiguous(const SeparableLoad& load) {
  bool result = true;
  for (std::int64_t key = 1; key < load.area.keys; ++key) {
    result &= load.key_offsets[key] == load.key_offsets[0] + key;
  }
  return result;
}
#endif

/// Lanes [lane, lane + n) of every key, key by key: of neighbouring elements, or where neighbouring keys read the same
/// (packed bits, chunked tables).
template <class T>
HWY_INLINE void load_keys_of_lanes(const T* p, const SeparableLoad& load, std::int64_t lane,
                                   bool are_neighbours) {
  const auto n = static_cast<std::int64_t>(hn::Lanes(ProgramTag()));
  const std::int64_t* offsets = load.lane_offsets + lane;
  for (std::int64_t key = 0; key < load.area.keys; ++key) {
    float* row = load.out + key * load.area.lanes + lane;
    const T* base = p + load.key_offsets[key];
    if (key > 0 && load.key_offsets[key] == load.key_offsets[key - 1]) {
      std::memcpy(row, row - load.area.lanes, static_cast<std::size_t>(n) * sizeof(float));
    } else if (!are_neighbours || HWY_TARGET == HWY_SCALAR) {
      for (std::int64_t i = 0; i < n; ++i) row[i] = element_value(base + offsets[i]);
    } else {
#if HWY_TARGET != HWY_SCALAR
      for (std::int64_t i = 0; i < n; i += 4)
        hn::StoreU(four_values(base + offsets[0] + i), FourTag(), row + i);
#endif
    }
  }
}

/// The same lane by lane: a row's keys lie nearer to each other than rows do.
template <class T>
HWY_INLINE void load_lanes_of_keys(const T* p, const SeparableLoad& load, std::int64_t lane) {
  const auto n = static_cast<std::int64_t>(hn::Lanes(ProgramTag()));
  for (std::int64_t i = lane; i < lane + n; ++i) {
    const T* row = p + load.lane_offsets[i];
    float* out = load.out + i;
    for (std::int64_t key = 0; key < load.area.keys; ++key)
      out[key * load.area.lanes] = element_value(row + load.key_offsets[key]);
  }
}

template <class T>
HWY_NOINLINE void load_separable(const T* p, const SeparableLoad& load) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) <= 4) {
    if (is_contiguous(load)) return load_contiguous<T, LoadUse::keep>(p, load);
  }
#endif
  const auto n = static_cast<std::int64_t>(hn::Lanes(ProgramTag()));
  bool repeats = false;
  for (std::int64_t key = 1; key < load.area.keys; ++key)
    repeats |= load.key_offsets[key] == load.key_offsets[key - 1];
  for (std::int64_t lane = 0; lane < load.area.lanes; lane += n) {
    const std::int64_t* offsets = load.lane_offsets + lane;
    bool are_neighbours = true;
    for (std::int64_t i = 1; i < n; ++i) are_neighbours &= offsets[i] == offsets[0] + i;
    if (repeats || are_neighbours) {
      load_keys_of_lanes(p, load, lane, are_neighbours);
    } else {
      load_lanes_of_keys(p, load, lane);
    }
  }
}

/// Values at p + offsets, as registers hold them. Neighbouring lanes mostly read neighbouring elements (tables of
/// relative positions) or one element (buckets): those are loads. Elements of 32 bits are gathered, others read one by
/// one.
template <class T>
HWY_INLINE void load_vector(const T* p, hn::Vec<hn::RebindToSigned<ProgramTag>> offsets,
                            float* out) {
  const ProgramTag d;
  const hn::RebindToSigned<ProgramTag> di;
  const std::size_t n = hn::Lanes(d);
  HWY_ALIGN std::int32_t each[hn::MaxLanes(di)];
  hn::Store(offsets, di, each);
  const auto first = hn::Set(di, each[0]);
  if (hn::AllTrue(di, hn::Eq(offsets, first))) {
    return hn::StoreU(hn::Set(d, element_value(p + each[0])), d, out);
  }
#if HWY_TARGET != HWY_SCALAR
  if (hn::AllTrue(di, hn::Eq(offsets, hn::Add(first, hn::Iota(di, 0))))) {
    const FourTag d4;
    for (std::size_t i = 0; i < n; i += 4) hn::StoreU(four_values(p + each[0] + i), d4, out + i);
    return;
  }
#endif
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, std::int32_t>) {
    const auto* elements = reinterpret_cast<const float*>(p);
    return hn::StoreU(hn::GatherIndex(d, elements, offsets), d, out);
  }
  for (std::size_t i = 0; i < n; ++i) out[i] = element_value(p + each[i]);
}

/// Some index differs for every score; all offsets within the tensor fit in 32 bits.
template <class T>
HWY_NOINLINE void load_scattered(const T* p, const SeparableLoad& load,
                                 std::span<const LoadIndex> indices) {
  const hn::RebindToSigned<ProgramTag> di;
  const auto n = static_cast<std::int64_t>(hn::Lanes(di));
  for (std::int64_t lane = 0; lane < load.area.lanes; lane += n) {
    HWY_ALIGN std::int32_t lane_offsets[hn::MaxLanes(di)];
    for (std::int64_t i = 0; i < n; ++i) {
      lane_offsets[i] = static_cast<std::int32_t>(load.lane_offsets[lane + i]);
    }
    const auto begin = hn::Load(di, lane_offsets);
    for (std::int64_t key = 0; key < load.area.keys; ++key) {
      const std::int64_t at = key * load.area.lanes + lane;
      auto offsets = begin;
      for (const LoadIndex& index : indices) {
        if (index.rate == Rate::per_score) offsets = hn::Add(offsets, index.offsets(di, at));
      }
      load_vector(p + load.key_offsets[key], offsets, load.out + at);
    }
  }
}

/// The same for tensors of any size.
template <class T>
HWY_NOINLINE void load_scattered_far(const T* p, const SeparableLoad& load,
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

/// Do offsets of elements fit in 32 bits?
inline bool is_near(std::span<const LoadIndex> indices) {
  double reach = 0;
  for (const LoadIndex& index : indices) {
    reach += static_cast<double>(index.extent) * std::fabs(static_cast<double>(index.stride));
  }
  return reach < 0x1p31;
}

/// One run of a tape on one tile.
class ProgramRun {
 public:
  ProgramRun(const expr::Tape& tape, const ProgramTile& tile)
      : tape_(tape), tile_(tile), layout_(program_layout(tape, tile.num_keys, tile.lanes)) {}

  void run_score() {
    if (tape_.empty() || tile_.num_keys == 0) return;
    compute_lower_rates();
    if (const Instruction* bias = bias_of_scores()) {
      add_load(*bias, LoadUse::add);
      return run_chunks();
    }
    scales_scores_ = tile_.factor != 1;
    const Instruction& result = tape_.code.back();
    if (result.rate != Rate::per_score) {
      add_step({.op = StepOp::load, .x = step_operand(index_of(result))});
      add_step({.op = StepOp::store, .x = operand_of_scores()});
    }
    add_steps();
    run_chunks();
  }

  void run_mask() {
    if (tape_.empty() || tile_.num_keys == 0) return;
    compute_lower_rates();
    if (!uniform_conditions_hold()) return hide_all();
    for (const Instruction& each : tape_.code) {
      const bool is_lower = each.rate == Rate::per_query || each.rate == Rate::per_key;
      if (!each.is_condition || !is_lower) continue;
      add_step({.op = StepOp::load, .x = step_operand(index_of(each))});
      add_hiding();
    }
    add_steps();
    run_chunks();
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

  // ---- steps ----

  void add_step(const ProgramStep& step) {
    std::construct_at(steps() + num_steps_, step);
    ++num_steps_;
  }
  /// What it leaves is in memory.
  void end_group() {
    if (num_steps_ > group_begin_) steps()[num_steps_ - 1].is_last = true;
    group_begin_ = num_steps_;
  }
  ProgramStep* steps() const {
    return reinterpret_cast<ProgramStep*>(tile_.scratch + layout_.steps_begin);
  }

  /// The load of a program that is the score and an element of a tensor, whose indices are known before the steps.
  const Instruction* bias_of_scores() const {
    const Instruction& sum = tape_.code.back();
    if (sum.op != Op::add || sum.is_fused || sum.rate != Rate::per_score) return nullptr;
    for (const int i : {0, 1}) {
      const Instruction& load = at(sum.operands[i]);
      const Instruction& score = at(sum.operands[1 - i]);
      const bool is_score = score.op == Op::variable && score.variable == expr::Variable::score;
      if (is_score && is_bias(load)) return &load;
    }
    return nullptr;
  }

  bool is_bias(const Instruction& load) const {
    const auto is_step = [&](std::int32_t index) { return at(index).rate == Rate::per_score; };
    return load.op == Op::load && load.rate == Rate::per_score && load.type == ExprType::floating &&
           std::ranges::none_of(load.indices, is_step);
  }

  /// By an instruction, beside what it hides.
  bool is_read(const Instruction& load) const {
    const auto is_among = [index = index_of(load)](const auto& operands) {
      return std::ranges::find(operands, index) != std::ranges::end(operands);
    };
    return std::ranges::any_of(tape_.code, [&](const Instruction& each) {
      return is_among(each.operands) || is_among(each.indices);
    });
  }

  void add_load(const Instruction& load, LoadUse use) {
    end_group();
    add_step({.op = StepOp::call, .instruction = &load, .use = use});
    group_begin_ = num_steps_;
  }

  /// Where the value in registers is false.
  void add_hiding() {
    add_step({.op = StepOp::hide, .x = operand_of_scores()});
    add_step({.op = StepOp::store, .x = operand_of_scores()});
  }

  /// The per_score instructions.
  void add_steps() {
    std::int32_t last = -1;  // the instruction whose result is in registers
    for (const Instruction& each : tape_.code) {
      if (each.rate != Rate::per_score || each.op == Op::variable) continue;
      if (each.op == Op::load && each.is_condition && !is_read(each)) {
        add_load(each, LoadUse::hide);
        last = -1;
        continue;
      }
      if (step_form(each, 0).op == StepOp::call) {
        end_group();
        add_step({.op = StepOp::call, .instruction = &each});
        group_begin_ = num_steps_;
        last = -1;
      } else {
        if (num_steps_ - group_begin_ > kMaxGroupSteps) {
          leave_registers(last);
          last = -1;
        }
        add_operation(each, last);
        last = index_of(each);
      }
      if (!each.is_condition) continue;
      if (last < 0) add_step({.op = StepOp::load, .x = step_operand(index_of(each))});
      add_hiding();
      last = -1;
    }
  }

  void leave_registers(std::int32_t last) {
    if (steps()[num_steps_ - 1].op != StepOp::store) {
      add_step({.op = StepOp::store, .x = step_operand(last)});
    }
    end_group();
  }

  /// `last` is the instruction whose result is in registers, or -1.
  void add_operation(const Instruction& instruction, std::int32_t last) {
    const auto* operands = instruction.operands;
    const auto found = std::find(operands, operands + 3, last);
    const bool is_found = last >= 0 && found != operands + 3;
    const StepForm form = step_form(instruction, is_found ? static_cast<int>(found - operands) : 0);
    const std::int32_t value = operands[form.value];
    const std::int32_t x = operands[form.x];
    const std::int32_t y = operands[form.y];
    const bool is_stored_too = is_found && (value != last || x == last || y == last);
    if (is_stored_too) add_step({.op = StepOp::store, .x = step_operand(last)});
    ProgramStep step{.op = form.op};
    if (x >= 0) step.x = step_operand(x);
    if (y >= 0) step.y = step_operand(y);
    if (value != last) load_value(step, step_operand(value));
    add_step(step);
    const bool is_result = instruction.target < 0 && !instruction.is_condition;
    if (is_result) add_step({.op = StepOp::store, .x = operand_of_scores()});
    if (instruction.target >= 0 && is_stored(instruction)) {
      add_step({.op = StepOp::store, .x = step_operand(index_of(instruction))});
    }
  }

  /// In the step itself where that is possible, else before it.
  void load_value(ProgramStep& step, const StepOperand& value) {
    step.loads_value = value.layout == StepLayout::scores && step.y.data == nullptr;
    if (step.loads_value) {
      step.value = value;
    } else {
      add_step({.op = StepOp::load, .x = value});
    }
  }

  /// Does anybody but the next step read it? A value that hides scores leaves registers.
  bool is_stored(const Instruction& instruction) const {
    if (!instruction.feeds_only_next || instruction.is_condition) return true;
    for (std::int32_t next = index_of(instruction) + 1;; ++next) {
      const bool is_per_score = at(next).rate == Rate::per_score && at(next).op != Op::variable;
      if (is_per_score) return step_form(at(next), 0).op == StepOp::call;
    }
  }

  StepOperand operand_of_scores() const {
    return {.data = tile_.scores,
            .block_stride = kStepRows * tile_.lanes,
            .chunk_stride = layout_.chunk_keys * tile_.lanes,
            .layout = StepLayout::scores};
  }

  /// As a per_score step reads it.
  StepOperand step_operand(std::int32_t index) const {
    const Instruction& instruction = at(index);
    const bool is_score = instruction.op == Op::variable && instruction.rate == Rate::per_score;
    if (is_score) return operand_of_scores();
    float* data = register_of(instruction);
    switch (instruction.rate) {
      case Rate::uniform:
        break;
      case Rate::per_query:
        return {.data = data, .layout = StepLayout::lanes};
      case Rate::per_key:
        return {.data = data,
                .block_stride = kStepRows,
                .chunk_stride = layout_.chunk_keys,
                .layout = StepLayout::keys};
      case Rate::per_score:
        return {
            .data = data, .block_stride = kStepRows * tile_.lanes, .layout = StepLayout::scores};
    }
    return {.data = data};
  }

  void run_chunks() {
    end_group();
    add_step({.op = StepOp::end});
    for (ProgramStep& step : std::span(steps(), num_steps_)) step = prepared(step);
    for (key_begin_ = 0; key_begin_ < tile_.num_keys; key_begin_ += layout_.chunk_keys) {
      area_ = {std::min(layout_.chunk_keys, tile_.num_keys - key_begin_), tile_.lanes};
      run_chunk();
    }
  }

  /// Leaves the steps ready for the next chunk.
  void run_chunk() {
    if (scales_scores_) {
      const float factor = tile_.factor;
      map(area_.keys * area_.lanes, scores(), scores(),
          [factor](auto d, auto x) HWY_ATTR { return hn::Mul(x, hn::Set(d, factor)); });
    }
    for (ProgramStep* step = steps(); step->op != StepOp::end; ++step) {
      if (step->op == StepOp::call) {
        const Instruction& instruction = *step->instruction;
        if (instruction.op == Op::load) {
          load(instruction, register_of(instruction), step->use);
        } else {
          execute(instruction, register_of(instruction));
        }
        continue;
      }
      run_steps(step, area_.keys, area_.lanes);
      for (;; ++step) {
        for (StepOperand* operand : {&step->value, &step->x, &step->y}) {
          operand->data += operand->chunk_stride;
        }
        if (step->is_last) break;
      }
    }
  }

  // ---- lower rates ----

  void compute_lower_rates() {
    const auto keys = static_cast<std::int64_t>(layout_.key_bytes / sizeof(float));
    const auto vector = static_cast<std::int64_t>(layout_.uniform_bytes / sizeof(float));
    for (const Instruction& each : tape_.code) {
      if (each.rate == Rate::per_score) continue;
      area_ = {1, each.rate == Rate::uniform   ? vector
                  : each.rate == Rate::per_key ? keys
                                               : tile_.lanes};
      const StepForm form = step_form(each, 0);
      form.op == StepOp::call ? execute(each, register_of(each)) : run_lower(each, form.op);
    }
  }

  /// Operands have values of the same rate, which are contiguous, or uniform ones.
  void run_lower(const Instruction& instruction, StepOp op) const {
    const std::int64_t width = kStepRowVectors * vector_lanes();
    const auto contiguous_or_uniform = [&](std::int32_t index) -> StepOperand {
      if (index < 0 || at(index).rate == Rate::uniform) {
        return {.data = index < 0 ? nullptr : register_of(at(index))};
      }
      return {.data = register_of(at(index)),
              .block_stride = kStepRows * width,
              .layout = StepLayout::scores};
    };
    const std::int32_t(&operands)[3] = instruction.operands;
    ProgramStep all[] = {prepared({.op = StepOp::load, .x = contiguous_or_uniform(operands[0])}),
                         prepared({.op = op,
                                   .x = contiguous_or_uniform(operands[1]),
                                   .y = contiguous_or_uniform(operands[2])}),
                         prepared({.op = StepOp::store,
                                   .is_last = true,
                                   .x = {.data = register_of(instruction),
                                         .block_stride = kStepRows * width,
                                         .layout = StepLayout::scores}})};
    const std::int64_t rows = area_.lanes / width;
    run_steps(all, rows, width);
    move_by(all, rows * width, 0, 0);
    run_vectors(all, 0, 1, area_.lanes - rows * width);
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

  // ---- calls: one pass over area_ ----

  /// As an instruction of this rate reads it: lower rates see contiguous values or uniform ones.
  ProgramOperand operand(std::int32_t index, Rate reader) const {
    const Instruction& instruction = at(index);
    const float* data = register_of(instruction);
    if (instruction.rate == Rate::uniform) return {data, 0, 0};
    if (reader != Rate::per_score || instruction.rate == Rate::per_query) return {data, 1, 0};
    if (instruction.rate == Rate::per_key) return {data + key_begin_, 0, 1};
    return {data, 1, area_.lanes};
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
        return load(instruction, out, LoadUse::keep);
      default:
        break;
    }
    if (instruction.type == ExprType::integer) return divide(instruction, out);
    call_function(instruction, out);
  }

  /// Of one operand: of the same rate, so its values lie as the results do.
  template <class F>
  void map_one(const Instruction& instruction, float* out, F f) const {
    map(area_.keys * area_.lanes, register_of(at(instruction.operands[0])), out, f);
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

  void call_function(const Instruction& instruction, float* out) const {
    switch (instruction.op) {
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
      case Op::rsqrt:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return rsqrt(d, x); });
      case Op::sigmoid:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return sigmoid(d, x); });
      case Op::sin:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return sin(d, x); });
      case Op::cos:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return cos(d, x); });
      case Op::tan:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return tan(d, x); });
      case Op::erf:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return erf(d, x); });
      case Op::log1p:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return log1p(d, x); });
      case Op::expm1:
        return map_one(instruction, out, [](auto d, auto x) HWY_ATTR { return expm1(d, x); });
      case Op::round:
        return map_one(instruction, out, [](auto, auto x) HWY_ATTR { return hn::Round(x); });
      case Op::ceil:
        return map_one(instruction, out, [](auto, auto x) HWY_ATTR { return hn::Ceil(x); });
      case Op::trunc:
        return map_one(instruction, out, [](auto, auto x) HWY_ATTR { return hn::Trunc(x); });
      case Op::fmod:
        return map_elements(instruction, out, [](float a, float b) { return fmodf(a, b); });
      case Op::pow:
        return map_elements(instruction, out, [](float a, float b) { return powf(a, b); });
      default:  // mod
        return map_elements(instruction, out, [](float a, float b) {
          const float remainder = fmodf(a, b);  // exact; its sign becomes that of the divisor
          return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
        });
    }
  }

  /// pow, fmod and float mod are rare and hard to do well: the C library's, element by element.
  template <class F>
  void map_elements(const Instruction& instruction, float* out, F f) const {
    const ProgramOperand a = operand(instruction.operands[0], instruction.rate);
    const ProgramOperand b = operand(instruction.operands[1], instruction.rate);
    for (std::int64_t key = 0, i = 0; key < area_.keys; ++key) {
      for (std::int64_t lane = 0; lane < area_.lanes; ++lane, ++i) {
        out[i] = f(a.value(key, lane), b.value(key, lane));
      }
    }
  }

  void divide(const Instruction& instruction, float* out) const {
    const ProgramOperand a = operand(instruction.operands[0], instruction.rate);
    const ProgramOperand b = operand(instruction.operands[1], instruction.rate);
    if (at(instruction.operands[1]).rate == Rate::uniform) {
      const auto divisor = static_cast<std::uint32_t>(std::bit_cast<std::int32_t>(*b.data));
      if (std::has_single_bit(divisor) && divisor >> 31U == 0) {
        return divide_by_power_of_two(instruction, out, static_cast<std::int32_t>(divisor));
      }
    }
    const bool is_remainder = instruction.op == Op::mod;
    HWY_ALIGN float repeated[2][16];
    for (std::int64_t key = 0; key < area_.keys; ++key) {
      const ProgramOperand dividend = row_of(a, key, repeated[0]);
      const ProgramOperand divisor = row_of(b, key, repeated[1]);
      float* row = out + key * area_.lanes;
      is_remainder ? divide_ints<true>(area_.lanes, row, dividend, divisor)
                   : divide_ints<false>(area_.lanes, row, dividend, divisor);
    }
  }

  /// A value for a whole row is repeated for a vector.
  static ProgramOperand row_of(const ProgramOperand& operand, std::int64_t key, float* repeated) {
    const float* row = operand.data + key * operand.row_step;
    if (operand.step != 0) return {row, operand.step, 0};
    std::fill_n(repeated, 16, *row);
    return {repeated, 0, 0};
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

  void load(const Instruction& instruction, float* out, LoadUse use) const {
    const TensorView& tensor = tile_.tensors[instruction.slot];
    LoadIndex indices[kMaxRank];
    const std::size_t rank = instruction.indices.size();
    for (std::size_t i = 0; i < rank; ++i) {
      const std::int32_t index = instruction.indices[i];
      const auto dim = static_cast<int>(i);
      if (tensor.size(dim) == 0) {
        fill(out, 0.0F);
        return use_loaded(out, use);
      }
      const std::int64_t key =
          at(index).rate == Rate::per_key && instruction.rate == Rate::per_score ? key_begin_ : 0;
      indices[i] = {register_of(at(index)) + key, at(index).rate, tensor.size(dim),
                    tensor.stride(dim)};
    }
    load_at(tensor, {indices, rank}, instruction.rate, out, use);
  }

  void use_loaded(const float* elements, LoadUse use) const {
    const std::int64_t count = area_.keys * area_.lanes;
    switch (use) {
      case LoadUse::keep:
        return;
      case LoadUse::add:
        return use_register<LoadUse::add>(count, elements, tile_.factor, scores());
      case LoadUse::hide:
        return use_register<LoadUse::hide>(count, elements, tile_.factor, scores());
    }
  }

  void load_at(const TensorView& tensor, std::span<const LoadIndex> indices, Rate rate, float* out,
               LoadUse use) const {
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
    const SeparableLoad load{key_offsets, lane_offsets, area_, out, tile_.keys_ahead, tile_.factor};
    visit_elements(tensor, [&](const auto* p) {
      if (!is_separable) {
        is_near(indices) ? load_scattered(p, load, indices) : load_scattered_far(p, load, indices);
      } else if (use_directly(p, load, use)) {
        return;
      } else {
        load_separable(p, load);
      }
      use_loaded(out, use);
    });
  }

  /// Elements that never become a register. Did it?
  template <class T>
  bool use_directly([[maybe_unused]] const T* p, [[maybe_unused]] SeparableLoad load,
                    [[maybe_unused]] LoadUse use) const {
#if HWY_TARGET != HWY_SCALAR
    if (use == LoadUse::keep || !is_contiguous(load)) return false;
    load.out = scores();
    return use_contiguous(p, load, use);
#else
    return false;
#endif
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

  const expr::Tape& tape_;
  const ProgramTile& tile_;
  ProgramLayout layout_;
  bool scales_scores_ = false;
  std::size_t num_steps_ = 0;
  std::size_t group_begin_ = 0;  // in the steps
  std::int64_t key_begin_ = 0;   // of the current chunk
  ProgramArea area_{};           // of the instruction being executed
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
