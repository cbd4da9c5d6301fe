// Cases of tcgen05: products of every kind, alone and in pairs, a in shared and in tensor memory, with every swizzle
// and major; loads, stores and copies of every shape. What is expected follows from the tables of the PTX ISA (data
// movement shape, layout organization, instruction descriptor), written down again here.
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "conformance/cases.hpp"
#include "conformance/noise.hpp"
#include "conformance/operand_layout.hpp"

namespace fovea::cuda::conformance {
namespace {

using ptx::Major;

constexpr int kLanes = 128, kTensorMajor = 10;

// ---- elements ----

struct Element {
  const char* name;
  int bits;                          // in shared memory
  int exponent_bits, fraction_bits;  // of floating-point types
  int least, greatest;               // of the numbers that are drawn
  std::uint32_t code;                // in the instruction descriptor
};

constexpr Element kBf16{"bf16", 16, 8, 7, -3, 3, 1}, kF16{"f16", 16, 5, 10, -3, 3, 0},
    kTf32{"tf32", 32, 8, 23, -3, 3, 2}, kE4m3{"e4m3", 8, 4, 3, -3, 3, 0},
    kE5m2{"e5m2", 8, 5, 2, -3, 3, 1}, kE2m3{"e2m3", 6, 2, 3, -3, 3, 3},
    kE3m2{"e3m2", 6, 3, 2, -3, 3, 4}, kE2m1{"e2m1", 4, 2, 1, -3, 3, 5},
    kPackedE2m1{"e2m1", 4, 2, 1, -3, 3, 1}, kU8{"u8", 8, 0, 0, 0, 255, 0},
    kS8{"s8", 8, 0, 0, -128, 127, 1};

std::uint32_t encoded(const Element& element, int value) {
  if (element.exponent_bits == 0) return static_cast<std::uint32_t>(value) & 0xFFU;
  if (value == 0) return 0;
  const int exponent = std::ilogb(std::abs(value));
  const auto fraction =
      static_cast<std::uint32_t>(std::ldexp(std::abs(value), element.fraction_bits - exponent)) -
      (1U << element.fraction_bits);
  const auto biased = static_cast<std::uint32_t>(exponent + (1 << (element.exponent_bits - 1)) - 1);
  const std::uint32_t sign = value < 0 ? 1 : 0;
  return (sign << element.exponent_bits | biased) << element.fraction_bits | fraction;
}

/// Elements of 4 and 6 bits fill 16 bytes by sixteen, packed from the low end; of 4 bits in mxf4 and mxf4nvf4 by 32.
int elements_of_chunk(const Element& element, bool is_packed) {
  if (is_packed) return 32;
  return element.bits < 8 ? 16 : 128 / element.bits;
}

// ---- forms ----

enum class Sum { f32, f16, s32 };

struct Scales {
  int per_step;  // 0: none
  bool is_ue8m0;
  int second_byte;  // where those of the second step begin; the first step's begin at 0
};

struct Kind {
  const char* name;  // of the kernel
  const char* type;  // as the kernel's template argument
  Scales scales;
  bool is_packed;
};

constexpr Kind kF16Kind{"f16", "ptx::Tcgen05Kind::f16", {}, false},
    kTf32Kind{"tf32", "ptx::Tcgen05Kind::tf32", {}, false},
    kF8Kind{"f8f6f4", "ptx::Tcgen05Kind::f8f6f4", {}, false},
    kI8Kind{"i8", "ptx::Tcgen05Kind::i8", {}, false},
    kMxf8Kind{"mxf8f6f4_block32", "ptx::Tcgen05ScaledKind::mxf8f6f4_block32", {1, true, 1}, false},
    kMxf4Kind{"mxf4_block32", "ptx::Tcgen05ScaledKind::mxf4_block32", {2, true, 2}, true},
    kNvf4Kind32{"mxf4nvf4_block32", "ptx::Tcgen05ScaledKind::mxf4nvf4_block32", {2, true, 2}, true},
    kNvf4Kind{"mxf4nvf4_block16", "ptx::Tcgen05ScaledKind::mxf4nvf4_block16", {4, false, 0}, true};
constexpr const Kind* kKinds[] = {&kF16Kind,  &kTf32Kind, &kF8Kind,     &kI8Kind,
                                  &kMxf8Kind, &kMxf4Kind, &kNvf4Kind32, &kNvf4Kind};

struct Form {
  const Kind* kind;
  const Element *a, *b;
  Sum sum = Sum::f32;
  int m = 128, n = 64, cta_group = 1;
  bool is_ts = false;
  Major a_major = Major::k, b_major = Major::k;

  int depth() const { return kSteps * 2 * elements_of_chunk(*a, kind->is_packed); }
  int rows_of_cta() const { return m / cta_group; }
  int columns_of_cta() const { return n / cta_group; }
  bool is_split() const { return cta_group == 2 && m == 128; }
  int columns_of_d() const { return is_split() ? n / 2 : n; }
  std::string kernel() const {
    return std::string("tcgen05_") + (cta_group == 2 ? "pair_" : "") + (is_ts ? "ts_" : "ss_") +
           kind->name;
  }
  std::string name() const {
    const auto word = [](Major major) { return major == Major::k ? "k" : "mn"; };
    return kernel() + " " + a->name + " " + b->name + " " + std::to_string(m) + "x" +
           std::to_string(n) + " " + word(a_major) + " " + word(b_major) +
           (sum == Sum::f16 ? " sums in f16" : "");
  }

  std::uint32_t instruction(int step) const {
    const std::uint32_t shared = a->code << 7 | b->code << 10 |
                                 static_cast<std::uint32_t>(a_major == Major::mn) << 15 |
                                 static_cast<std::uint32_t>(b_major == Major::mn) << 16 |
                                 static_cast<std::uint32_t>(n / 8) << 17;
    if (kind->scales.per_step == 0) {
      const std::uint32_t d = sum == Sum::f16 ? 0 : sum == Sum::f32 ? 1 : 2;
      return shared | d << 4 | static_cast<std::uint32_t>(m / 16) << 24;
    }
    const auto byte = static_cast<std::uint32_t>(step == 0 ? 0 : kind->scales.second_byte);
    return shared | byte << 4 | static_cast<std::uint32_t>(kind->scales.is_ue8m0) << 23 |
           static_cast<std::uint32_t>(m / 128) << 27 | byte << 29;
  }
};

// ---- operands ----

/// Whole numbers, [rows][depth].
struct Matrix {
  int depth;
  std::vector<int> values;

  int at(int row, int k) const { return values[static_cast<std::size_t>(row * depth + k)]; }
};

Matrix draw(const Element& element, int rows, int depth, Noise& noise) {
  Matrix matrix{.depth = depth, .values = {}};
  matrix.values.resize(static_cast<std::size_t>(rows * depth));
  for (int& value : matrix.values) value = noise.whole(element.least, element.greatest);
  return matrix;
}

/// Puts element i of a chunk of 16 bytes that begins at `chunk`, whose bits are zero.
void put(std::byte* chunk, const Element& element, int i, int value) {
  const int first = i * element.bits;
  const std::uint64_t bits = std::uint64_t{encoded(element, value)} << first % 8;
  for (int byte = 0; byte < (first % 8 + element.bits + 7) / 8; ++byte)
    chunk[first / 8 + byte] |= static_cast<std::byte>(bits >> 8 * byte);
}

/// Rows first.. of the matrix as an operand in shared memory.
void store(Bytes& image, const Matrix& matrix, const Element& element, bool is_packed, int first,
           int rows, const OperandTile& tile) {
  const int of_chunk = elements_of_chunk(element, is_packed);
  const int first_depth = tile.first_step * 2 * of_chunk;
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < matrix.depth; ++k) {
      const int line = tile.major == Major::k ? row : first_depth + k;
      const int across = tile.major == Major::k ? first_depth + k : row;
      std::byte* chunk = &image[tile.address(line, across / of_chunk * 16)];
      put(chunk, element, across % of_chunk, matrix.at(first + row, k));
    }
  }
}

/// A scale for each row and block of a step's depth, as an exponent of 2.
struct ScaleTable {
  int per_row;
  std::vector<int> exponents;

  int at(int row, int block) const {
    return exponents[static_cast<std::size_t>(row * per_row + block)];
  }
};

ScaleTable draw_scales(const Scales& scales, int rows, Noise& noise) {
  // Four bytes to a row, of which steps take what their instruction says.
  ScaleTable table{.per_row = 4, .exponents = {}};
  for (int i = 0; scales.per_step != 0 && i < 4 * rows; ++i)
    table.exponents.push_back(noise.whole(-2, 2));
  return table;
}

/// Row r's four bytes, in the chunk that tcgen05.cp.32x128b.warpx4 takes.
void store_scales(std::byte* chunk, const ScaleTable& table, bool is_ue8m0, int first, int rows) {
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < 4; ++i) {
      const int exponent = table.at(first + row, i);
      const int bits = is_ue8m0 ? 127 + exponent : (7 + exponent) << 3;
      chunk[row % 32 * 16 + row / 32 * 4 + i] = static_cast<std::byte>(bits);
    }
  }
}

struct Operands {
  Matrix a, b;
  ScaleTable a_scales, b_scales;
};

/// Sums are whole multiples of 2^-4 and small: exact in every order.
double sum_at(const Form& form, const Operands& operands, int row, int column) {
  const Scales& scales = form.kind->scales;
  const int step_depth = form.depth() / kSteps;
  double sum = 0;
  for (int k = 0; k < form.depth(); ++k) {
    double product = operands.a.at(row, k) * operands.b.at(column, k);
    if (scales.per_step != 0) {
      const int step = k / step_depth, block = k % step_depth / (step_depth / scales.per_step);
      const int byte = (step == 0 ? 0 : scales.second_byte) + block;
      product =
          std::ldexp(product, operands.a_scales.at(row, byte) + operands.b_scales.at(column, byte));
    }
    sum += product;
  }
  return sum;
}

std::uint32_t word_of(Sum type, double sum) {
  if (type == Sum::s32) return static_cast<std::uint32_t>(static_cast<std::int32_t>(sum));
  if (type == Sum::f16) return encoded(kF16, static_cast<int>(sum));
  return std::bit_cast<std::uint32_t>(static_cast<float>(sum));
}

/// The lane of a row of one CTA.
int lane_of(const Form& form, int row) {
  const int local = row % form.rows_of_cta();
  return form.cta_group == 1 && form.m == 64 ? 32 * (local / 16) + local % 16 : local;
}

std::vector<std::uint32_t> expected_of(const Form& form, const Operands& operands) {
  const int columns = form.columns_of_d();
  std::vector<std::uint32_t> words(static_cast<std::size_t>(form.cta_group * kLanes * columns));
  for (int row = 0; row < form.m; ++row) {
    for (int column = 0; column < form.n; ++column) {
      const int part = column / columns;
      const int lane = lane_of(form, row) + 64 * part;
      const int cta = row / form.rows_of_cta();
      words[static_cast<std::size_t>((cta * kLanes + lane) * columns + column % columns)] =
          word_of(form.sum, sum_at(form, operands, row, column));
    }
  }
  return words;
}

/// [128][16] words of one CTA: 32 bytes of each step; a split pair has the rows in both halves of its lanes.
Bytes a_in_tensor_memory(const Form& form, const Matrix& a, int cta) {
  Bytes image(std::size_t{kLanes} * 64);
  const int of_chunk = elements_of_chunk(*form.a, form.kind->is_packed);
  for (int local = 0; local < form.rows_of_cta(); ++local) {
    const int row = cta * form.rows_of_cta() + local;
    for (int copy = 0; copy < (form.is_split() ? 2 : 1); ++copy) {
      const int lane = lane_of(form, row) + 64 * copy;
      for (int k = 0; k < a.depth; ++k) {
        put(&image[static_cast<std::size_t>(lane * 64 + k / of_chunk * 16)], *form.a, k % of_chunk,
            a.at(row, k));
      }
    }
  }
  return image;
}

void append(Bytes& to, const void* from, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(from);
  to.insert(to.end(), begin, begin + bytes);
}

std::uint64_t tensor_descriptor(std::uint64_t of_wgmma) {
  return of_wgmma | std::uint64_t{1} << 46;
}

// ---- products ----

/// The upper halves of words with sums in f16 are not defined.
std::function<std::string(const Bytes&)> compare_low_halves(std::vector<std::uint32_t> expected) {
  return [expected = std::move(expected)](const Bytes& out) -> std::string {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      std::uint32_t word;
      std::memcpy(&word, &out[4 * i], 4);
      if ((word & 0xFFFFU) != (expected[i] & 0xFFFFU))
        return "word " + std::to_string(i) + " differs";
    }
    return {};
  };
}

Case make_product(const Form& form, Swizzle a_swizzle, Swizzle b_swizzle, std::uint64_t seed) {
  Noise noise(seed);
  Operands operands{.a = draw(*form.a, form.m, form.depth(), noise),
                    .b = draw(*form.b, form.n, form.depth(), noise),
                    .a_scales = draw_scales(form.kind->scales, form.m, noise),
                    .b_scales = draw_scales(form.kind->scales, form.n, noise)};
  const auto bytes_of = [](const Element& element) { return std::max(1, element.bits / 8); };
  OperandTile a = operand_tile(form.rows_of_cta(), bytes_of(*form.a), form.a_major, a_swizzle);
  OperandTile b = operand_tile(form.columns_of_cta(), bytes_of(*form.b), form.b_major, b_swizzle);
  b.base = static_cast<std::uint32_t>(form.is_ts ? 0 : round_up(a.bytes(), 1024));
  const int scales = round_up(static_cast<int>(b.base) + b.bytes(), 128);
  const int image_bytes = scales + (form.kind->scales.per_step != 0 ? 1024 : 0);

  Case one{.name = form.name() + " swizzle " + std::to_string(swizzle_span(a_swizzle)) + " " +
                   std::to_string(swizzle_span(b_swizzle)),
           .kernel = form.kernel(),
           .num_ctas = form.cta_group,
           .cluster = form.cta_group,
           .shared_bytes = image_bytes + 16};
  one.compute_capability_major = kTensorMajor;
  for (int cta = 0; cta < form.cta_group; ++cta) {
    Bytes image(static_cast<std::size_t>(image_bytes));
    if (!form.is_ts) {
      store(image, operands.a, *form.a, form.kind->is_packed, cta * form.rows_of_cta(),
            form.rows_of_cta(), a);
    }
    store(image, operands.b, *form.b, form.kind->is_packed, cta * form.columns_of_cta(),
          form.columns_of_cta(), b);
    if (form.kind->scales.per_step != 0) {
      const bool is_ue8m0 = form.kind->scales.is_ue8m0;
      store_scales(&image[static_cast<std::size_t>(scales)], operands.a_scales, is_ue8m0,
                   cta * form.rows_of_cta(), form.rows_of_cta());
      store_scales(&image[static_cast<std::size_t>(scales + 512)], operands.b_scales, is_ue8m0, 0,
                   form.n);
    }
    append(one.in, image.data(), image.size());
    if (!form.is_ts) continue;
    const Bytes words = a_in_tensor_memory(form, operands.a, cta);
    append(one.in, words.data(), words.size());
  }
  for (int step = 0; step < kSteps; ++step) {
    one.params.a[step] = tensor_descriptor(a.descriptor(step, kDepthBytes / bytes_of(*form.a)));
    one.params.b[step] = tensor_descriptor(b.descriptor(step, kDepthBytes / bytes_of(*form.b)));
  }
  // What ProductField of tcgen05_kernels.cuh names.
  const int fields[] = {image_bytes, static_cast<int>(form.instruction(0)), form.columns_of_d(),
                        scales, static_cast<int>(form.instruction(1))};
  std::copy(std::begin(fields), std::end(fields), one.params.n);
  const std::vector<std::uint32_t> expected = expected_of(form, operands);
  one.out_before.assign(4 * expected.size(), std::byte{0xEE});
  if (form.sum == Sum::f16) {
    one.check = compare_low_halves(expected);
  } else {
    append(one.expected, expected.data(), 4 * expected.size());
  }
  return one;
}

std::vector<Form> all_forms() {
  std::vector<Form> forms;
  struct Types {
    const Kind* kind;
    const Element *a, *b;
    Sum sum = Sum::f32;
  };
  const Types types[] = {{&kF16Kind, &kBf16, &kBf16},
                         {&kF16Kind, &kF16, &kF16},
                         {&kF16Kind, &kF16, &kF16, Sum::f16},
                         {&kTf32Kind, &kTf32, &kTf32},
                         {&kF8Kind, &kE4m3, &kE5m2},
                         {&kF8Kind, &kE5m2, &kE4m3, Sum::f16},
                         {&kF8Kind, &kE2m3, &kE3m2},
                         {&kF8Kind, &kE3m2, &kE2m1},
                         {&kF8Kind, &kE2m1, &kE4m3},
                         {&kI8Kind, &kS8, &kU8, Sum::s32},
                         {&kI8Kind, &kU8, &kS8, Sum::s32},
                         {&kMxf8Kind, &kE4m3, &kE5m2},
                         {&kMxf8Kind, &kE2m1, &kE3m2},
                         {&kMxf4Kind, &kPackedE2m1, &kPackedE2m1},
                         {&kNvf4Kind32, &kPackedE2m1, &kPackedE2m1},
                         {&kNvf4Kind, &kPackedE2m1, &kPackedE2m1}};
  for (const Types& type : types) {
    const Form plain{.kind = type.kind, .a = type.a, .b = type.b, .sum = type.sum};
    const auto add = [&](int m, int n, int cta_group, bool is_ts) {
      Form form = plain;
      form.m = m;
      form.n = n;
      form.cta_group = cta_group;
      form.is_ts = is_ts;
      forms.push_back(form);
    };
    const bool has_scales = type.kind->scales.per_step != 0;
    add(128, 32, 1, false);
    add(128, 96, 1, false);
    add(256, 64, 2, false);
    if (has_scales) continue;
    add(64, 48, 1, false);
    add(128, 64, 2, false);
    if (type.a->bits >= 8) {
      add(64, 16, 1, true);
      add(128, 256, 1, true);
      add(128, 32, 2, true);
      add(256, 32, 2, true);
    }
    const bool may_be_mn_major = type.a->bits >= 8 && type.a->bits <= 16 && type.b->bits >= 8;
    if (!may_be_mn_major) continue;
    for (int majors = 1; majors < 4; ++majors) {
      for (int cta_group = 1; cta_group <= 2; ++cta_group) {
        Form form = plain;
        form.m = 128 * cta_group;
        form.cta_group = cta_group;
        form.a_major = majors % 2 == 1 ? Major::mn : Major::k;
        form.b_major = majors / 2 == 1 ? Major::mn : Major::k;
        forms.push_back(form);
      }
    }
  }
  return forms;
}

// ---- moves and copies ----

struct Place {
  int lane, column;
};

struct MoveRow {
  const char* name;
  Place (*place)(int lane, int i);  // of register i of 16
};

constexpr MoveRow kMoves[] = {
    {"16x64b",
     [](int t, int i) {
       return Place{8 * (t % 2) + t / 4, t / 2 % 2 + 2 * i};
     }},
    {"16x128b",
     [](int t, int i) {
       return Place{t / 4 + 8 * (i % 2), t % 4 + 4 * (i / 2)};
     }},
    {"16x256b",
     [](int t, int i) {
       return Place{t / 4 + 8 * (i / 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i / 4)};
     }},
    {"16x32bx2",
     [](int t, int i) {
       return Place{t % 16, i + (t < 16 ? 0 : 16)};
     }},
};

Case make_move(const MoveRow& row) {
  constexpr int kColumns = 64, kRegisters = 16;
  Case one{.name = std::string("tcgen05_moves_") + row.name,
           .kernel = std::string("tcgen05_moves_") + row.name,
           .shared_bytes = 16};
  one.compute_capability_major = kTensorMajor;
  std::vector<std::uint32_t> memory;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int column = 0; column < kColumns; ++column)
      memory.push_back(static_cast<std::uint32_t>(1000 * lane + column));
  }
  append(one.in, memory.data(), 4 * memory.size());
  const auto cell = [&](int lane, int column) -> std::uint32_t& {
    return memory[static_cast<std::size_t>(lane * kColumns + column)];
  };
  std::vector<std::uint32_t> registers;
  for (int half = 0; half < 2; ++half) {
    for (int thread = 0; thread < kLanes; ++thread) {
      const int first = thread / 32 * 32 + 16 * half;
      for (int i = 0; i < kRegisters; ++i) {
        const Place place = row.place(thread % 32, i);
        registers.push_back(cell(first + place.lane, place.column));
        cell(first + place.lane, place.column + 32) = registers.back();
      }
    }
  }
  append(one.expected, registers.data(), 4 * registers.size());
  append(one.expected, memory.data(), 4 * memory.size());
  one.out_before.assign(one.expected.size(), std::byte{0xEE});
  return one;
}

struct CopyRow {
  const char* name;
  int rows, chunks;
  std::vector<int> (*lanes)(int row);
};

const CopyRow kCopies[] = {
    {"rows128x256b", 128, 2, [](int r) { return std::vector<int>{r}; }},
    {"rows128x128b", 128, 1, [](int r) { return std::vector<int>{r}; }},
    {"rows64x128b_warpx2_02_13", 64, 1,
     [](int r) {
       return std::vector<int>{r, r + 64};
     }},
    {"rows64x128b_warpx2_01_23", 64, 1,
     [](int r) {
       return std::vector<int>{r < 32 ? r : r + 32, (r < 32 ? r : r + 32) + 32};
     }},
    {"rows32x128b_warpx4", 32, 1,
     [](int r) {
       return std::vector<int>{r, r + 32, r + 64, r + 96};
     }},
};

Case make_copy(const CopyRow& row, Swizzle swizzle) {
  constexpr int kColumns = 8;
  const OperandTile tile = operand_tile(row.rows, 1, Major::k, swizzle);
  const int image_bytes = round_up(tile.bytes(), 16);
  Case one{.name = std::string("tcgen05_copy_") + row.name + " swizzle " +
                   std::to_string(swizzle_span(swizzle)),
           .kernel = std::string("tcgen05_copy_") + row.name,
           .shared_bytes = image_bytes + 16};
  one.compute_capability_major = kTensorMajor;
  one.params.n[0] = image_bytes;
  one.params.a[0] = tensor_descriptor(tile.descriptor(0));
  one.in.resize(static_cast<std::size_t>(image_bytes));
  std::vector<std::uint32_t> memory(std::size_t{kLanes} * kColumns, 1);
  for (int r = 0; r < row.rows; ++r) {
    for (int column = 0; column < 4 * row.chunks; ++column) {
      const auto word = static_cast<std::uint32_t>(1000 * r + column + 2);
      const int byte = tile.first_step * kDepthBytes + 4 * column;
      std::memcpy(&one.in[tile.address(r, byte)], &word, 4);
      for (const int lane : row.lanes(r))
        memory[static_cast<std::size_t>(lane * kColumns + column)] = word;
    }
  }
  append(one.expected, memory.data(), 4 * memory.size());
  one.out_before.assign(one.expected.size(), std::byte{0xEE});
  return one;
}

}  // namespace

std::vector<Case> tcgen05_cases() {
  std::vector<Case> cases;
  for (const Form& form : all_forms()) {
    // Neighbours pair the swizzles of a and b differently.
    const std::size_t i = cases.size();
    cases.push_back(make_product(form, kSwizzles[i % 4], kSwizzles[(i / 4 + i) % 4], i));
  }
  for (const MoveRow& row : kMoves) cases.push_back(make_move(row));
  for (const CopyRow& row : kCopies) {
    for (const Swizzle swizzle : kSwizzles) cases.push_back(make_copy(row, swizzle));
  }
  return cases;
}

std::vector<Kernel> tcgen05_kernels() {
  std::vector<Kernel> all;
  for (const Kind* kind : kKinds) {
    for (const int cta_group : {1, 2}) {
      for (const bool is_ts : {false, true}) {
        if (is_ts && kind->scales.per_step != 0) continue;
        const std::string name = std::string("tcgen05_") + (cta_group == 2 ? "pair_" : "") +
                                 (is_ts ? "ts_" : "ss_") + kind->name;
        all.push_back({name,
                       std::string("tcgen05_product<") + kind->type + ", " +
                           std::to_string(cta_group) + (is_ts ? ", true>" : ", false>"),
                       "tcgen05_" + std::to_string(cta_group) + (kind == &kI8Kind ? "_i8" : "")});
      }
    }
  }
  for (const MoveRow& row : kMoves) {
    all.push_back({std::string("tcgen05_moves_") + row.name,
                   std::string("tcgen05_moves<Move::l") + row.name + ">", "tcgen05_1"});
  }
  for (const CopyRow& row : kCopies) {
    all.push_back({std::string("tcgen05_copy_") + row.name,
                   std::string("tcgen05_copy<ptx::TmemCopy::") + row.name + ">", "tcgen05_1"});
  }
  all.push_back({"f32x2", "f32x2", "tcgen05_1"});
  return all;
}

}  // namespace fovea::cuda::conformance
