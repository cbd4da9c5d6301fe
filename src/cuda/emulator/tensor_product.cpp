// Products and copies of the tensor core, and the commits that track them. Which register, lane and column holds what:
// tensor_memory.cpp; descriptors: tensor_form.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "cuda/emulator/formats.hpp"
#include "cuda/emulator/operand.hpp"
#include "cuda/emulator/tensor.hpp"
#include "cuda/emulator/tensor_form.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr std::uint32_t kDepthBytes = 32, kChunkBytes = 16, kDepthColumns = 8;

/// Work of the tensor core: issued by a thread, done at any time until its commit arrives, after what the ISA puts
/// before it.
struct TensorOperation : Operation {
  Thread* issuer = nullptr;
  int cta_group = 1;
  Actor memory, tensor;  // as it touches shared memory, and tensor memory
  VectorClock seen_memory, seen_tensor;
  std::vector<OperationRef> after;

  void land(Machine& machine) final {
    for (const OperationRef& before : std::exchange(after, {})) machine.land(*before);
    memory.seen = &seen_memory;
    tensor.seen = &seen_tensor;
    tensor.known = &seen_memory;
    work(machine);
  }

  virtual void work(Machine& machine) = 0;

  std::uint32_t halves() const { return static_cast<std::uint32_t>(cta_group); }
  Cta& cta(std::uint32_t half) const { return *tensor_cta(*issuer->cta, cta_group, half); }
  void read_chunk(Machine& machine, std::uint32_t half, std::uint32_t address,
                  std::byte (&chunk)[kChunkBytes]) const {
    const std::uint32_t shared = cta(half).rank << kRankShift | address;
    const Machine::Place place =
        machine.shared_place(shared, kChunkBytes, kChunkBytes, memory.what, memory);
    if (place.block == nullptr) {
      std::memset(chunk, 0xff, sizeof chunk);
    } else {
      place.block->read_async(machine, memory, place.range, chunk);
    }
  }
  void read_columns(Machine& machine, std::uint32_t half, TensorPlace place,
                    std::span<std::uint32_t> words) const {
    TensorMemory& from = *cta(half).tensor.memory;
    from.cells.read(machine, tensor, from.range(place, static_cast<std::uint32_t>(words.size())),
                    words.data());
  }
  void write_columns(Machine& machine, std::uint32_t half, TensorPlace place,
                     std::span<const std::uint32_t> words) const {
    TensorMemory& to = *cta(half).tensor.memory;
    to.cells.write(machine, tensor, to.range(place, static_cast<std::uint32_t>(words.size())),
                   words.data());
  }
};

/// [rows, depth] or [depth, columns].
struct Values {
  std::uint32_t columns = 0;
  std::vector<double> values;

  Values(std::uint32_t rows, std::uint32_t of_row)
      : columns(of_row), values(std::size_t{rows} * of_row) {}
  double& at(std::uint32_t row, std::uint32_t column) {
    return values[std::size_t{row} * columns + column];
  }
};

/// Columns of d that lie side by side in one lane.
struct Run {
  std::uint32_t half, first, count;  // of the columns of the product
  TensorPlace place;
};

struct TensorProduct final : TensorOperation {
  TensorMma mma{};
  TensorForm form{};
  std::array<std::uint32_t, 8> disabled_lanes{};

  void work(Machine& machine) override;

 private:
  std::uint32_t rows_of_cta() const { return form.m / halves(); }
  /// A pair of 64 rows each: lanes 64 and up have the second half of the columns.
  bool is_split() const { return cta_group == 2 && form.m == 128; }
  std::uint32_t lane_of(std::uint32_t row, TensorPlace origin) const;
  Run run_of(std::uint32_t row, std::uint32_t part) const;
  Values read_a(Machine& machine, std::uint32_t part) const;
  Values read_b(Machine& machine) const;
  void read_operand(Machine& machine, std::uint32_t half, std::uint64_t descriptor, bool is_a,
                    std::uint32_t rows, std::uint32_t first, Values& to) const;
  void scale_a(Machine& machine, Values& a) const;
  Values scaled_b(Machine& machine, std::uint32_t half, const Values& b) const;
  double scale_at(Machine& machine, std::uint32_t half, TensorPlace place,
                  std::span<const std::uint32_t> quarters, std::uint32_t byte) const;
  void write_row(Machine& machine, std::uint32_t row, std::uint32_t part, Values& a,
                 Values& b) const;
  double decode_sum(std::uint32_t bits) const;
  std::uint32_t encode_sum(double sum) const;
};

/// Of a row of one CTA.
std::uint32_t TensorProduct::lane_of(std::uint32_t row, TensorPlace origin) const {
  const std::uint32_t local = row % rows_of_cta();
  if (cta_group == 1 && form.m == 64) return 32 * (local / 16) + local % 16 + origin.lane;
  return local;
}

Run TensorProduct::run_of(std::uint32_t row, std::uint32_t part) const {
  const TensorPlace d = tensor_place(mma.d);
  const std::uint32_t count = is_split() ? form.n / 2 : form.n;
  return {.half = row / rows_of_cta(),
          .first = part * count,
          .count = count,
          .place = {lane_of(row, d) + 64 * part, d.column}};
}

void TensorProduct::read_operand(Machine& machine, std::uint32_t half, std::uint64_t descriptor,
                                 bool is_a, std::uint32_t rows, std::uint32_t first,
                                 Values& to) const {
  const bool is_mn_major = is_a ? form.a_is_mn_major : form.b_is_mn_major;
  const TensorElement element = is_a ? form.a : form.b;
  const double sign = (is_a ? form.negates_a : form.negates_b) ? -1 : 1;
  const OperandLayout layout(descriptor, !is_mn_major);
  const std::uint32_t of_chunk = elements_of_chunk(element, form.is_packed);
  // Either rows of two chunks of depth, or depths of chunks of rows.
  const std::uint32_t lines = is_mn_major ? form.k : rows;
  const std::uint32_t chunks =
      is_mn_major ? (rows + of_chunk - 1) / of_chunk : kDepthBytes / kChunkBytes;
  std::byte chunk[kChunkBytes];
  for (std::uint32_t line = 0; line < lines; ++line) {
    for (std::uint32_t c = 0; c < chunks; ++c) {
      read_chunk(machine, half, layout.chunk_address(line, c), chunk);
      for (std::uint32_t i = 0; i < of_chunk; ++i) {
        const std::uint32_t across = c * of_chunk + i;
        if (across >= (is_mn_major ? rows : form.k)) break;
        const std::uint32_t row = first + (is_mn_major ? across : line);
        const std::uint32_t depth = is_mn_major ? line : across;
        (is_a ? to.at(row, depth) : to.at(depth, row)) = sign * element_at(element, chunk, i);
      }
    }
  }
}

/// a as the columns of `part` see it: in tensor memory, a split pair has it twice.
Values TensorProduct::read_a(Machine& machine, std::uint32_t part) const {
  Values a(form.m, form.k);
  for (std::uint32_t half = 0; half < halves(); ++half) {
    const std::uint32_t rows = rows_of_cta();
    if (!mma.a_is_in_tensor_memory) {
      read_operand(machine, half, mma.a, true, rows, half * rows, a);
      continue;
    }
    const TensorPlace place = tensor_place(static_cast<std::uint32_t>(mma.a));
    for (std::uint32_t row = half * rows; row < (half + 1) * rows; ++row) {
      std::array<std::uint32_t, kDepthColumns> words{};
      read_columns(machine, half, {lane_of(row, place) + 64 * part, place.column}, words);
      std::array<std::byte, kDepthBytes> bytes{};
      std::memcpy(bytes.data(), words.data(), sizeof bytes);
      for (std::uint32_t k = 0; k < form.k; ++k) {
        a.at(row, k) = (form.negates_a ? -1 : 1) * element_at(form.a, bytes.data(), k);
      }
    }
  }
  if (form.scales != 0) scale_a(machine, a);
  return a;
}

Values TensorProduct::read_b(Machine& machine) const {
  Values b(form.k, form.n);
  const std::uint32_t columns = form.n / halves();
  for (std::uint32_t half = 0; half < halves(); ++half) {
    read_operand(machine, half, mma.b, false, columns, half * columns, b);
  }
  return b;
}

/// The scale in this byte of a column, which must be the same in these quarters of the lanes.
double TensorProduct::scale_at(Machine& machine, std::uint32_t half, TensorPlace place,
                               std::span<const std::uint32_t> quarters, std::uint32_t byte) const {
  std::uint32_t scale = 0;
  for (const std::uint32_t quarter : quarters) {
    std::array<std::uint32_t, 1> word{};
    read_columns(machine, half, {place.lane + 32 * quarter, place.column}, word);
    const std::uint32_t bits = word[0] >> 8 * byte & 0xffU;
    if (quarter != quarters.front() && bits != scale) {
      machine.report(Fault::scale_factors, issuer,
                     fmt::format("multiplies by scales that differ between quarters of the lanes: "
                                 "{:#04x} in lane {}, {:#04x} in lane {}, column {}",
                                 scale, place.lane + 32 * quarters.front(), bits,
                                 place.lane + 32 * quarter, place.column),
                     machine.site(tensor.site));
    }
    scale = bits;
  }
  if (!form.has_ue8m0_scales && (scale & 0x80U) != 0) {
    machine.report(
        Fault::scale_factors, issuer,
        fmt::format("multiplies by the ue4m3 scale {:#04x}, whose bit 7 is not zero", scale),
        machine.site(tensor.site));
  }
  return decode_scale(scale, form.has_ue8m0_scales);
}

void TensorProduct::scale_a(Machine& machine, Values& a) const {
  static constexpr std::array<std::uint32_t, 4> kAll{0, 1, 2, 3};
  const TensorPlace place = tensor_place(mma.a_scales);
  for (std::uint32_t row = 0; row < form.m; ++row) {
    const std::uint32_t local = row % rows_of_cta();
    for (std::uint32_t block = 0; block < form.scales; ++block) {
      const double scale =
          scale_at(machine, row / rows_of_cta(), {local % 32, place.column + local / 32}, kAll,
                   form.a_scale_byte + block);
      const std::uint32_t depth = form.k / form.scales;
      for (std::uint32_t k = block * depth; k < (block + 1) * depth; ++k) a.at(row, k) *= scale;
    }
  }
}

/// Each CTA of a pair has the scales of all columns.
Values TensorProduct::scaled_b(Machine& machine, std::uint32_t half, const Values& b) const {
  static constexpr std::array<std::uint32_t, 4> kQuarters{0, 1, 2, 3};
  Values scaled = b;
  const TensorPlace place = tensor_place(mma.b_scales);
  const std::uint32_t columns = is_split() ? form.n / 2 : form.n;
  for (std::uint32_t column = 0; column < form.n; ++column) {
    const std::uint32_t local = column % columns;
    const std::span<const std::uint32_t> quarters =
        is_split() ? std::span(kQuarters).subspan(2 * (column / columns), 2) : std::span(kQuarters);
    for (std::uint32_t block = 0; block < form.scales; ++block) {
      const double scale = scale_at(machine, half, {local % 32, place.column + local / 32},
                                    quarters, form.b_scale_byte + block);
      const std::uint32_t depth = form.k / form.scales;
      for (std::uint32_t k = block * depth; k < (block + 1) * depth; ++k)
        scaled.at(k, column) *= scale;
    }
  }
  return scaled;
}

double TensorProduct::decode_sum(std::uint32_t bits) const {
  switch (form.sum) {
    case TensorSum::f16:
      return double{decode_f16(bits & 0xffffU)};
    case TensorSum::f32:
      return double{std::bit_cast<float>(bits)};
    case TensorSum::s32:
      return static_cast<std::int32_t>(bits);
  }
  return 0;
}

/// A sum in f16 has the low half of its word; what is in the other half then, the ISA does not say.
std::uint32_t TensorProduct::encode_sum(double sum) const {
  switch (form.sum) {
    case TensorSum::f16:
      return 0xffff'0000U | encode_f16(static_cast<float>(sum));
    case TensorSum::f32:
      return std::bit_cast<std::uint32_t>(static_cast<float>(sum));
    case TensorSum::s32:
      return static_cast<std::uint32_t>(static_cast<std::int64_t>(sum));
  }
  return 0;
}

void TensorProduct::write_row(Machine& machine, std::uint32_t row, std::uint32_t part, Values& a,
                              Values& b) const {
  const Run run = run_of(row, part);
  const std::uint32_t lane = run.place.lane;
  if ((disabled_lanes[4 * run.half + lane / 32] >> lane % 32 & 1U) != 0) return;
  std::vector<double> sums(run.count, 0.0);
  for (std::uint32_t k = 0; k < form.k; ++k) {
    const double factor = a.at(row, k);
    const double* from = &b.at(k, run.first);
    for (std::uint32_t j = 0; j < run.count; ++j) sums[j] += factor * from[j];
  }
  std::vector<std::uint32_t> words(run.count);
  if (mma.is_accumulating) read_columns(machine, run.half, run.place, words);
  for (std::uint32_t j = 0; j < run.count; ++j) {
    words[j] = encode_sum(sums[j] + (mma.is_accumulating ? decode_sum(words[j]) : 0.0));
  }
  write_columns(machine, run.half, run.place, words);
}

void TensorProduct::work(Machine& machine) {
  const Values plain = read_b(machine);
  std::vector<Values> b;  // as each CTA multiplies with it
  for (std::uint32_t half = 0; half < halves(); ++half) {
    b.push_back(form.scales == 0 ? plain : scaled_b(machine, half, plain));
  }
  const std::uint32_t parts = is_split() ? 2 : 1;
  for (std::uint32_t part = 0; part < parts; ++part) {
    Values a = read_a(machine, mma.a_is_in_tensor_memory ? part : 0);
    for (std::uint32_t row = 0; row < form.m; ++row) {
      write_row(machine, row, part, a, b[row / rows_of_cta()]);
    }
  }
}

// ---- copies ----

struct TensorCopy final : TensorOperation {
  TensorCopyShape shape{};
  std::uint32_t to = 0;
  std::uint64_t from = 0;

  std::uint32_t rows() const;
  std::uint32_t chunks() const { return shape == TensorCopyShape::rows128x256b ? 2 : 1; }
  /// Lanes that row r goes to.
  std::vector<std::uint32_t> lanes_of(std::uint32_t row) const;
  void work(Machine& machine) override;
};

std::uint32_t TensorCopy::rows() const {
  switch (shape) {
    case TensorCopyShape::rows128x256b:
    case TensorCopyShape::rows128x128b:
      return 128;
    case TensorCopyShape::rows64x128b_warpx2_02_13:
    case TensorCopyShape::rows64x128b_warpx2_01_23:
      return 64;
    case TensorCopyShape::rows32x128b_warpx4:
      return 32;
  }
  return 0;
}

std::vector<std::uint32_t> TensorCopy::lanes_of(std::uint32_t row) const {
  switch (shape) {
    case TensorCopyShape::rows128x256b:
    case TensorCopyShape::rows128x128b:
      return {row};
    case TensorCopyShape::rows64x128b_warpx2_02_13:
      return {row, row + 64};
    case TensorCopyShape::rows64x128b_warpx2_01_23:
      return {row % 32 + 64 * (row / 32), row % 32 + 64 * (row / 32) + 32};
    case TensorCopyShape::rows32x128b_warpx4:
      return {row, row + 32, row + 64, row + 96};
  }
  return {};
}

void TensorCopy::work(Machine& machine) {
  const OperandLayout layout(from, true);
  const TensorPlace place = tensor_place(to);
  for (std::uint32_t half = 0; half < halves(); ++half) {
    for (std::uint32_t row = 0; row < rows(); ++row) {
      for (std::uint32_t c = 0; c < chunks(); ++c) {
        std::byte chunk[kChunkBytes];
        read_chunk(machine, half, layout.chunk_address(row, c), chunk);
        std::array<std::uint32_t, 4> words{};
        std::memcpy(words.data(), chunk, sizeof chunk);
        for (const std::uint32_t lane : lanes_of(row)) {
          write_columns(machine, half, {lane, place.column + 4 * c}, words);
        }
      }
    }
  }
}

// ---- issue ----

/// Products by accumulator, shape and kind; copies all by one.
using StreamKey = std::tuple<std::uint32_t, std::uint32_t, int>;
constexpr StreamKey kCopies{~0U, ~0U, -1};

/// Two threads that do not know of each other issue into one accumulator.
void check_issuer(const Thread& self, const TensorStream& stream, const VectorClock& seen,
                  Instruction what) {
  const Thread* other = stream.issuer;
  if (other == nullptr || other == &self || seen.of(stream.issued) >= stream.time) return;
  if (other->warp == self.warp) {
    wrong(Fault::tensor_issue, self,
          fmt::format("issues what lane {} of its warp issued, too: one thread does, behind one "
                      "elect_one()",
                      other->lane),
          what, stream.site);
  } else if (other->cta != self.cta) {
    wrong(Fault::tensor_issue, self, "issues for a pair whose other CTA issues, too", what,
          stream.site);
  } else {
    wrong(Fault::race, self,
          fmt::format("issues into an accumulator in no order with a product that thread {} issued",
                      other->linear),
          what, stream.site);
  }
}

/// What the tensor core puts before the operation: chains into one accumulator, copies before products; as a pipe,
/// everything.
void put_in_order(TensorOperation& operation, TensorCta& leader, const TensorStream& stream,
                  bool is_product) {
  VectorClock& seen = operation.seen_tensor;
  const auto follow = [&](const TensorStream& before) {
    if (before.agent == 0) return;
    seen.raise(before.agent, seen.of(before.issued));
  };
  if (machine().options().tensor_order == TensorOrder::pipe) {
    for (const auto& [key, before] : leader.streams) follow(before);
    if (leader.newest != nullptr) operation.after.push_back(leader.newest);
    return;
  }
  if (is_product) {
    if (stream.newest != nullptr) operation.after.push_back(stream.newest);
    follow(leader.streams[kCopies]);
    operation.after.insert(operation.after.end(), leader.copies.begin(), leader.copies.end());
  }
}

void enqueue(Thread& self, const std::shared_ptr<TensorOperation>& operation, StreamKey key,
             Instruction what) {
  TensorCta& leader = tensor_leader(*self.cta, operation->cta_group).tensor;
  TensorStream& stream = leader.streams[key];
  const bool is_product = key != kCopies;
  if (stream.agent == 0) {
    stream.agent = machine().new_agent(&self, what.name);
    stream.issued = machine().new_agent(&self, what.name);
  }
  operation->issuer = &self;
  operation->seen_tensor = tensor_seen(self);
  if (is_product) check_issuer(self, stream, operation->seen_tensor, what);
  put_in_order(*operation, leader, stream, is_product);
  operation->seen_memory = self.clock;
  ++stream.time;
  const Actor actor{.agent = stream.agent,
                    .time = stream.time,
                    .wave = machine().wave(),
                    .site = machine().intern(what.site),
                    .is_async = true,
                    .thread = &self,
                    .what = what.name};
  operation->memory = operation->tensor = actor;
  // A product comes after all of its chain (or that was reported), and does not race with itself: it reads d, then
  // writes it. Copies are in no order with each other.
  if (is_product) operation->seen_tensor.raise(stream.agent, stream.time);
  stream.newest = leader.newest = operation;
  stream.issuer = &self;
  stream.site = what.site;
  std::erase_if(leader.copies, [](const OperationRef& copy) { return copy->has_landed; });
  if (!is_product) leader.copies.push_back(operation);

  self.tensor.issued.raise(stream.agent, stream.time);
  std::erase_if(self.tensor.in_flight, [](const OperationRef& known) { return known->has_landed; });
  self.tensor.in_flight.push_back(operation);
  self.tensor.has_open = true;
  self.tensor.last_site = what.site;
  tensor_complete(self, stream.issued, stream.time);
  machine().issue(operation);
}

bool is_origin(TensorPlace place, bool may_be_16) {
  return place.lane == 0 || (may_be_16 && place.lane == 16);
}

/// In each CTA of the pair.
bool are_allocated(const TensorProduct& product, std::uint32_t address, std::uint32_t columns,
                   const Thread& self, Instruction what) {
  const auto halves = static_cast<std::uint32_t>(product.mma.cta_group);
  for (std::uint32_t half = 0; half < halves; ++half) {
    const Cta& cta = *tensor_cta(*self.cta, product.mma.cta_group, half);
    if (!is_allocated(cta, {0, tensor_place(address).column}, kTensorLanes, columns, self, what))
      return false;
  }
  return true;
}

bool check_places(const TensorProduct& product, const Thread& self, Instruction what) {
  const TensorMma& mma = product.mma;
  const TensorForm& form = product.form;
  const bool may_be_16 = mma.cta_group == 1 && form.m == 64;
  const bool is_split = mma.cta_group == 2 && form.m == 128;
  const TensorPlace d = tensor_place(mma.d), a = tensor_place(static_cast<std::uint32_t>(mma.a));
  const bool has_a = mma.a_is_in_tensor_memory;
  if (!is_origin(d, may_be_16) || (has_a && a.lane != d.lane)) {
    wrong(Fault::tensor_address, self,
          fmt::format("names lane {} for d{}; expected lane 0{}, the same for a", d.lane,
                      has_a ? fmt::format(" and {} for a", a.lane) : "", may_be_16 ? " or 16" : ""),
          what);
    return false;
  }
  const std::uint32_t columns = is_split ? form.n / 2 : form.n;
  if (!are_allocated(product, mma.d, columns, self, what)) return false;
  if (has_a &&
      !are_allocated(product, static_cast<std::uint32_t>(mma.a), kDepthColumns, self, what))
    return false;
  if (has_a && a.column < d.column + columns && d.column < a.column + kDepthColumns) {
    wrong(Fault::tensor_address, self, "reads as a what it writes as d", what);
    return false;
  }
  if (form.scales == 0) return true;
  const std::uint32_t rows = form.m / static_cast<std::uint32_t>(mma.cta_group);
  return are_allocated(product, mma.a_scales, (rows + 31) / 32, self, what) &&
         are_allocated(product, mma.b_scales, (columns + 31) / 32, self, what);
}

bool check_descriptor(std::uint64_t descriptor, const char* operand, const Thread& self,
                      Instruction what) {
  const std::string complaint = complaint_of_descriptor(descriptor);
  if (complaint.empty()) return true;
  wrong(Fault::descriptor, self,
        fmt::format("gives a descriptor of {} whose {}", operand, complaint), what);
  return false;
}

bool decode_and_check(TensorProduct& product, const Thread& self, Instruction what) {
  const TensorMma& mma = product.mma;
  const DecodedForm decoded = decode_instruction(mma.kind, mma.cta_group, mma.instruction);
  if (!decoded.complaint.empty()) {
    wrong(Fault::instruction_descriptor, self,
          fmt::format("gives the instruction descriptor {:#010x}: {}", mma.instruction,
                      decoded.complaint),
          what);
    return false;
  }
  product.form = decoded.form;
  const bool is_padded = !decoded.form.is_packed && element_bits(decoded.form.a) < 8;
  if (mma.a_is_in_tensor_memory && (is_padded || decoded.form.a_is_mn_major)) {
    wrong(Fault::instruction_descriptor, self,
          "takes a from tensor memory: there it is K-major, and padded elements are not modelled",
          what);
    return false;
  }
  if (!mma.a_is_in_tensor_memory && !check_descriptor(mma.a, "a", self, what)) return false;
  return check_descriptor(mma.b, "b", self, what) && check_places(product, self, what);
}

}  // namespace

void tensor_mma(TensorMma form, Instruction what) {
  machine().maybe_yield();
  Thread& self = machine().thread();
  if (!is_right_group(self, form.cta_group, what)) machine().end_launch();
  auto product = std::make_shared<TensorProduct>();
  product->mma = form;
  product->cta_group = form.cta_group;
  std::copy(form.disabled_lanes.begin(), form.disabled_lanes.end(),
            product->disabled_lanes.begin());
  product->mma.disabled_lanes = {};
  if (!decode_and_check(*product, self, what)) machine().end_launch();
  const std::uint32_t shape = product->form.m << 16 | product->form.n;
  enqueue(self, product, {form.d, shape, static_cast<int>(form.kind)}, what);
}

void tensor_copy(TensorCopyShape shape, std::uint32_t to, std::uint64_t from, int cta_group,
                 Instruction what) {
  machine().maybe_yield();
  Thread& self = machine().thread();
  if (!is_right_group(self, cta_group, what)) machine().end_launch();
  if (!check_descriptor(from, "the source", self, what)) machine().end_launch();
  auto copy = std::make_shared<TensorCopy>();
  copy->shape = shape;
  copy->to = to;
  copy->from = from;
  copy->cta_group = cta_group;
  const TensorPlace place = tensor_place(to);
  for (std::uint32_t half = 0; half < copy->halves(); ++half) {
    const Cta& cta = *tensor_cta(*self.cta, cta_group, half);
    const bool is_there =
        place.lane == 0 && is_allocated(cta, place, kTensorLanes, 4 * copy->chunks(), self, what);
    if (!is_there) {
      wrong(Fault::tensor_address, self, fmt::format("names lane {}; expected 0", place.lane),
            what);
      machine().end_launch();
    }
  }
  enqueue(self, copy, kCopies, what);
}

// ---- commit ----

namespace {

struct TensorCommit final : Operation {
  std::vector<OperationRef> tracked;
  std::vector<std::uint32_t> barriers;
  Actor actor;
  VectorClock known;

  void land(Machine& machine) override {
    for (const OperationRef& operation : std::exchange(tracked, {})) machine.land(*operation);
    actor.seen = &known;
    for (const std::uint32_t address : barriers) {
      const bool is_remote = address >> kRankShift != actor.thread->cta->rank;
      Mbarrier* barrier = find_mbarrier(machine, address, actor, is_remote);
      if (barrier != nullptr) arrive(machine, *barrier, actor, {.arrivals = 1});
    }
  }
};

/// A commit tracks what its own thread issued.
void check_commit(const Thread& self, int cta_group, Instruction what) {
  if (self.tensor.has_open) return;
  for (const std::unique_ptr<Thread>& other : self.cta->threads) {
    if (!other->tensor.has_open) continue;
    wrong(Fault::tensor_issue, self,
          fmt::format(
              "commits nothing: what is open was issued by thread {}, and a commit tracks its "
              "own thread's alone",
              other->linear),
          what, other->tensor.last_site);
    return;
  }
  if (cta_group == 2) wrong(Fault::tensor_issue, self, "commits nothing, for a pair", what);
}

}  // namespace

void tensor_commit(std::uint32_t barrier, std::uint32_t cta_mask, int cta_group, Instruction what) {
  machine().maybe_yield();
  Thread& self = machine().thread();
  if (!is_right_group(self, cta_group, what)) machine().end_launch();
  check_commit(self, cta_group, what);
  tensor_release(self);
  auto commit = std::make_shared<TensorCommit>();
  commit->tracked = self.tensor.in_flight;
  commit->actor = machine().actor(what.name, what.site);
  commit->actor.is_async = true;
  commit->known = self.clock;
  commit->known.join(self.tensor.issued);
  if (cta_mask == 0) commit->barriers.push_back(barrier);
  for (std::uint32_t rank = 0; rank < 16; ++rank) {
    if ((cta_mask >> rank & 1U) == 0) continue;
    commit->barriers.push_back(rank << kRankShift | (barrier & ((1U << kRankShift) - 1)));
  }
  self.tensor.has_open = false;
  machine().tick(self);
  machine().issue(commit);
}

}  // namespace fovea::cuda::emulator
