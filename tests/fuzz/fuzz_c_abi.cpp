// Any structs through the C ABI: a call answers, or refuses and writes nothing; it never reads or writes beside what it
// was given. Structs and tensors are heap blocks of their exact sizes, so that the address sanitizer sees the first
// byte beside one.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "fovea/fovea.h"

#include "tests/fuzz/bytes.hpp"

namespace {

using fovea::fuzz::Bytes;
using Extents = std::vector<std::int64_t>;

constexpr std::int64_t kMostElements = 4096;  // of a tensor that has memory: a call ends soon
constexpr std::int64_t kMostBytes = 1 << 16;
constexpr std::size_t kMostWorkspace = 1 << 24;
constexpr std::int32_t kMostDims =
    9;  // beyond the rank of any tensor: fewer are as many as a shape has
constexpr std::uint8_t kUnwritten = 0xA5;

constexpr DLDataType kF32{kDLFloat, 32, 1};
constexpr std::array<DLDataType, 3> kFloats{kF32, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}};
constexpr std::array<DLDataType, 2> kIndices{{{kDLInt, 32, 1}, {kDLInt, 64, 1}}};

void require(bool condition) {
  if (!condition) __builtin_trap();
}

struct Tensor {
  DLTensor dlpack{};
  Extents shape, strides;
  std::unique_ptr<std::uint8_t[]> memory;
  std::size_t size = 0;
  bool is_output = false;

  /// The bytes of all elements, from the lowest to the highest, where they are few.
  void allocate(Bytes& bytes, bool has_values) {
    const std::int64_t element = dlpack.dtype.bits / 8;
    std::int64_t low = 0, high = element, count = 1, dense = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      if (shape[i] < 0 || shape[i] > kMostElements) return;
      const std::int64_t stride = strides.empty() ? dense : strides[i];
      if (std::abs(stride / 2) > kMostBytes) return;
      count *= shape[i];
      dense *= std::max<std::int64_t>(1, shape[i]);
      if (count > kMostElements || dense > kMostElements) return;
      const std::int64_t reach = std::max<std::int64_t>(0, shape[i] - 1) * stride * element;
      (reach < 0 ? low : high) += reach;
    }
    if (count == 0 || high - low > kMostBytes || element == 0) return;
    size = static_cast<std::size_t>(high - low);
    memory = std::make_unique<std::uint8_t[]>(size);
    std::memset(memory.get(), kUnwritten, size);
    if (has_values) std::generate_n(memory.get(), size, [&] { return bytes.next(); });
    dlpack.data = memory.get() - low;
  }

  bool is_unwritten() const {
    return std::all_of(memory.get(), memory.get() + size,
                       [](std::uint8_t byte) { return byte == kUnwritten; });
  }
};

/// What one call borrows.
class Loan {
 public:
  explicit Loan(Bytes& bytes) : bytes_(bytes), float_type_(kFloats[bytes.next() % 3]) {}

  /// Mostly of this shape and type; sometimes absent, of another rank, extent, stride, type, device or without memory.
  const DLTensor* tensor(DLDataType type, Extents shape, bool is_output = false) {
    const std::uint8_t fate = bytes_.next();
    if (fate % 16 == 1) return nullptr;
    Tensor& t = tensors_.emplace_back();
    t.shape = std::move(shape);
    t.is_output = is_output;
    t.dlpack.dtype = type;
    t.dlpack.device = {kDLCPU, 0};
    if (fate % 16 == 2) distort(t);
    if (fate % 16 == 3) give_strides(t);
    t.dlpack.ndim = static_cast<std::int32_t>(t.shape.size());
    if (fate == 20) t.dlpack.ndim = bytes_.next() < 128 ? -1 : kMostDims + bytes_.next();
    t.dlpack.shape = t.shape.data();
    t.dlpack.strides = t.strides.empty() ? nullptr : t.strides.data();
    const bool is_index = type.code == kDLInt;
    if (fate != 36) t.allocate(bytes_, !is_output && (is_index || bytes_.flag()));
    if (is_index && !is_output && fate % 4 == 0) give_counts(t);
    return &t.dlpack;
  }
  const DLTensor* floats(Extents shape, bool is_output = false) {
    return tensor(float_type_, std::move(shape), is_output);
  }
  const DLTensor* f32(Extents shape, bool is_output = false) {
    return tensor(kF32, std::move(shape), is_output);
  }
  /// Above 0 where they have memory, mostly.
  const DLTensor* scales(Extents shape) {
    const DLTensor* result = f32(std::move(shape));
    if (result == nullptr || bytes_.next() % 16 == 1) return result;
    const Tensor& t = tensors_.back();
    constexpr float kScale = 0.01F;
    for (std::size_t at = 0; at + sizeof kScale <= t.size; at += sizeof kScale)
      std::memcpy(t.memory.get() + at, &kScale, sizeof kScale);
    return result;
  }
  const DLTensor* indices(Extents shape) {
    return tensor(kIndices[bytes_.next() % 2], std::move(shape));
  }

  /// In a block of as many bytes as it says it has.
  template <typename Struct>
  const Struct* lend(Struct value) {
    value.struct_size = sizeof(Struct);
    value.version = FOVEA_ABI_VERSION;
    const std::uint8_t fate = bytes_.next();
    if (fate == 1) value.version = bytes_.next();
    if (fate == 2) value.struct_size = bytes_.next();
    const std::size_t size = std::max<std::size_t>(value.struct_size, 12);
    auto& block = structs_.emplace_back(std::make_unique<std::uint8_t[]>(size));
    std::memcpy(block.get(), &value, std::min(size, sizeof(Struct)));
    return reinterpret_cast<const Struct*>(block.get());
  }

  template <typename T>
  const T* lend_array(std::vector<T> values) {
    auto& block =
        structs_.emplace_back(std::make_unique<std::uint8_t[]>(values.size() * sizeof(T)));
    std::memcpy(block.get(), values.data(), values.size() * sizeof(T));
    return reinterpret_cast<const T*>(block.get());
  }

  const fovea_program* keep(std::shared_ptr<const fovea_program> program) {
    return programs_.emplace_back(std::move(program)).get();
  }

  void expect_unwritten() const {
    for (const Tensor& t : tensors_) require(!t.is_output || t.is_unwritten());
  }

 private:
  void distort(Tensor& t) {
    switch (bytes_.next() % 4) {
      case 0:
        t.shape.resize(bytes_.next() % 12, 1);
        break;
      case 1:
        if (!t.shape.empty()) t.shape[bytes_.next() % t.shape.size()] = bytes_.extent();
        break;
      case 2:
        t.dlpack.dtype = {bytes_.next(), bytes_.next(), bytes_.next()};
        break;
      default:
        t.dlpack.device = {static_cast<DLDeviceType>(bytes_.next() % 16), bytes_.next()};
    }
  }
  void give_strides(Tensor& t) {
    std::int64_t dense = 1;
    t.strides.resize(t.shape.size());
    for (std::size_t i = t.shape.size(); i-- > 0;) {
      const std::uint8_t kind = bytes_.next() % 8;
      t.strides[i] = kind == 0 ? bytes_.extent() : kind == 1 ? 0 : kind == 2 ? -dense : dense;
      dense *= t.shape[i] + (kind == 3 ? 1 : 0);
    }
  }
  /// Small numbers instead of any: lengths and pages that exist.
  void give_counts(Tensor& t) {
    const std::size_t element = t.dlpack.dtype.bits / 8U;
    for (std::size_t i = 0; element != 0 && i + element <= t.size; i += element) {
      const std::int64_t count = bytes_.next() % 8;
      std::memcpy(t.memory.get() + i, &count, std::min<std::size_t>(element, sizeof(count)));
    }
  }

  Bytes& bytes_;
  DLDataType float_type_;
  std::deque<Tensor> tensors_;
  std::deque<std::unique_ptr<std::uint8_t[]>> structs_;
  std::deque<std::shared_ptr<const fovea_program>> programs_;
};

/// Runs in the fuzzer's thread.
fovea_executor own_thread() {
  fovea_executor executor{};
  executor.struct_size = sizeof(executor);
  executor.version = FOVEA_ABI_VERSION;
  executor.concurrency = [](void*) -> std::int32_t { return 1; };
  executor.run = [](void*, std::int64_t count, fovea_task task, void* context) {
    for (std::int64_t i = 0; i < count; ++i) task(context, 0, i);
  };
  return executor;
}

struct Sizes {
  std::int64_t batch, seqlen_q, seqlen_kv, heads_q, heads_kv, dim_qk, dim_v;
};

Sizes some_sizes(Bytes& bytes) {
  constexpr std::array<std::int64_t, 8> kLengths{1, 5, 0, 17, 2, 3, 9, 16};
  constexpr std::array<std::int64_t, 4> kDims{8, 16, 1, 3};
  const std::int64_t heads_kv = 1 + bytes.next() % 2, group = 1 + bytes.next() % 2;
  return {
      bytes.next() % 4, kLengths[bytes.next() % 8], kLengths[bytes.next() % 8], heads_kv * group,
      heads_kv,         kDims[bytes.next() % 4],    kDims[bytes.next() % 4]};
}

void give_programs(Loan& loan, Bytes& bytes, const Sizes& s, fovea_attention_forward_args& args) {
  constexpr std::array<const char*, 8> kScores{nullptr,
                                               "score + slopes[q_head]",
                                               "score * n",
                                               "score + table[q_idx, kv_idx]",
                                               "score + float(ids[kv_idx])",
                                               "score * tanh(slopes[ids[q_idx]]) + n",
                                               "score + slopes[batch]",
                                               "score +"};
  constexpr std::array<const char*, 6> kMasks{nullptr,
                                              "kv_idx <= q_idx",
                                              "ids[q_idx] == ids[kv_idx]",
                                              "kv_idx < ids[q_idx] || kv_idx % 3 == 0",
                                              "table[q_idx, kv_idx] > n",
                                              "slopes[q_head]"};
  args.score_mod = kScores[bytes.next() % kScores.size()];
  args.mask_mod = kMasks[bytes.next() % kMasks.size()];
  args.tensors = loan.lend_array(
      std::vector<fovea_named_tensor>{{"slopes", loan.f32({s.heads_q})},
                                      {"table", loan.floats({s.seqlen_q, s.seqlen_kv})},
                                      {"ids", loan.indices({std::max(s.seqlen_q, s.seqlen_kv)})}});
  args.num_tensors = 3;
  args.scalars =
      loan.lend_array(std::vector<fovea_named_scalar>{{"n", bytes.next() % 3, bytes.number()}});
  args.num_scalars = 1;
}

/// Mostly programs that calls can use; sometimes none.
std::shared_ptr<const fovea_program> some_program(Bytes& bytes, std::int32_t kind) {
  constexpr std::array<const char*, 5> kScores{"score + slopes[q_head] * one", "score * n",
                                               "score + table[q_idx, kv_idx]", "score +",
                                               "score * tanh(slopes[int(one)]) + n"};
  constexpr std::array<const char*, 4> kMasks{"kv_idx <= q_idx", "table[q_idx, kv_idx] > n",
                                              "kv_idx - q_idx < one", "slopes[q_head]"};
  const std::array<fovea_tensor_slot, 3> tensors{
      {{"slopes", kF32, 1}, {"table", kF32, 2}, {"one", kF32, bytes.next() % 64 == 1 ? 1 : 0}}};
  const fovea_scalar_slot scalar{"n", bytes.next() % 3};
  fovea_program_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.kind = kind;
  args.text = kind == FOVEA_SCORE_MOD ? kScores[bytes.next() % kScores.size()]
                                      : kMasks[bytes.next() % kMasks.size()];
  args.tensors = tensors.data();
  args.num_tensors = tensors.size();
  args.scalars = &scalar;
  args.num_scalars = 1;
  fovea_program* program = nullptr;
  fovea_error* error = nullptr;
  const int result = fovea_program_create(&args, &program, &error);
  require((program != nullptr) == (result == FOVEA_OK));
  require((error != nullptr) == (result != FOVEA_OK));
  fovea_error_free(error);
  char* text = nullptr;
  require((fovea_program_text(program, &text, nullptr) == FOVEA_OK) == (program != nullptr));
  fovea_string_free(text);
  return {program,
          [](const fovea_program* p) { fovea_program_destroy(const_cast<fovea_program*>(p)); }};
}

void give_handles(Loan& loan, Bytes& bytes, const Sizes& s, fovea_attention_forward_args& args) {
  const auto tensors = [&] {
    return loan.lend_array(std::vector<const DLTensor*>{
        loan.f32({s.heads_q}), loan.f32({s.seqlen_q, s.seqlen_kv}), loan.f32({})});
  };
  const auto scalars = [&] { return loan.lend_array(std::vector<double>{bytes.number()}); };
  const std::uint8_t which = bytes.next();
  if (which % 3 != 1) {
    args.score_program =
        loan.keep(some_program(bytes, which == 3 ? FOVEA_MASK_MOD : FOVEA_SCORE_MOD));
    args.score_tensors = tensors();
    args.num_score_tensors = which == 6 ? bytes.next() % 4 : 3;
    args.score_scalars = scalars();
    args.num_score_scalars = which == 9 ? bytes.next() % 2 : 1;
  }
  if (which % 3 != 2) {
    args.mask_program =
        loan.keep(some_program(bytes, which == 3 ? FOVEA_SCORE_MOD : FOVEA_MASK_MOD));
    args.mask_tensors = tensors();
    args.num_mask_tensors = which == 6 ? bytes.next() % 4 : 3;
    args.mask_scalars = scalars();
    args.num_mask_scalars = which == 9 ? bytes.next() % 2 : 1;
  }
}

/// Of q, k, v, out and their gradients.
struct ShapeOf {
  std::int64_t batch;
  bool is_packed;
  Extents operator()(std::int64_t length, std::int64_t heads, std::int64_t dim) const {
    return is_packed ? Extents{batch * length, heads, dim} : Extents{batch, length, heads, dim};
  }
};

/// q, k and v as codes, with scales and the recipe that they are of; sometimes without.
void give_codes(Loan& loan, Bytes& bytes, const Sizes& s, const ShapeOf& shape,
                fovea_attention_forward_args& args) {
  constexpr DLDataType kCodes{kDLFloat8_e4m3fn, 8, 1};
  args.q = loan.tensor(kCodes, shape(s.seqlen_q, s.heads_q, s.dim_qk));
  args.k = loan.tensor(kCodes, shape(s.seqlen_kv, s.heads_kv, s.dim_qk));
  args.v = loan.tensor(kCodes, shape(s.seqlen_kv, s.heads_kv, s.dim_v));
  if (bytes.next() % 16 != 1) args.quant = "fp8_static";
  for (const DLTensor** scale : {&args.q_scale, &args.k_scale, &args.v_scale})
    *scale = loan.scales({s.batch, s.heads_kv});
}

fovea_attention_forward_args forward_args(Loan& loan, Bytes& bytes, const Sizes& s,
                                          bool writes = true) {
  const bool is_packed = bytes.next() % 4 == 1;
  const ShapeOf shape{s.batch, is_packed};
  const Extents rows = is_packed ? Extents{s.heads_q, s.batch * s.seqlen_q}
                                 : Extents{s.batch, s.heads_q, s.seqlen_q};
  fovea_attention_forward_args args{};
  args.q = loan.floats(shape(s.seqlen_q, s.heads_q, s.dim_qk));
  args.k = loan.floats(shape(s.seqlen_kv, s.heads_kv, s.dim_qk));
  args.v = loan.floats(shape(s.seqlen_kv, s.heads_kv, s.dim_v));
  args.out = loan.floats(shape(s.seqlen_q, s.heads_q, s.dim_v), writes);
  if (bytes.flag() || !writes) args.lse = loan.f32(rows, writes);
  if (bytes.next() % 4 == 1) args.row_max = loan.f32(rows, writes);
  if (is_packed) {
    args.cu_seqlens_q = loan.indices({s.batch + 1});
    args.cu_seqlens_kv = loan.indices({s.batch + 1});
  }
  const std::uint8_t features = bytes.next();
  if ((features & 1U) != 0) give_programs(loan, bytes, s, args);
  if (bytes.next() % 4 == 1) give_handles(loan, bytes, s, args);
  if ((features & 2U) != 0) args.causal = bytes.next() % 3;
  if ((features & 4U) != 0) args.sinks = loan.f32({s.heads_q});
  if ((features & 8U) != 0) args.bias = loan.floats({s.heads_q, s.seqlen_q, s.seqlen_kv});
  if ((features & 16U) != 0) args.alibi = loan.f32({s.heads_q});
  if ((features & 32U) != 0) {
    args.has_window_left = args.has_window_right = 1;
    args.window_left = bytes.extent();
    args.window_right = bytes.extent();
  }
  if ((features & 64U) != 0) {
    args.segments_q = loan.indices({s.batch, s.seqlen_q});
    args.segments_kv = loan.indices({s.batch, s.seqlen_kv});
  }
  if ((features & 128U) != 0) {
    args.dropout = {bytes.number(), bytes.next(), bytes.next()};
    args.softcap = bytes.number();
    args.has_softmax_scale = bytes.next();
    args.softmax_scale = bytes.number();
    args.align = bytes.next() % 4;
    args.compute_dtype = bytes.next() % 4;
    args.cpu_target = bytes.next() % 9;
    args.allows_nondeterminism = bytes.next() % 4;
    args.sm_margin = bytes.next() % 4 - 1;
    if (bytes.next() % 4 == 1) args.dropout_seed = loan.indices({1});
    if (args.dropout_seed != nullptr && bytes.next() % 4 != 1)
      args.dropout_offset = loan.indices(bytes.flag() ? Extents{} : Extents{1});
    if (bytes.next() % 16 == 1) args.dropout_places = loan.indices({bytes.next() % 64});
  }
  constexpr const char* kRecipes[] = {"accurate", "int8,hadamard=yes", "fp8_static", "no recipe",
                                      "mxfp4"};
  if (bytes.next() % 8 == 1) args.quant = kRecipes[bytes.next() % 5];
  if (bytes.next() % 16 == 1) args.q_scale = args.k_scale = args.v_scale = args.sinks;
  if (bytes.next() % 8 == 1) give_codes(loan, bytes, s, shape, args);
  args.executor = loan.lend(own_thread());
  return args;
}

fovea_attention_decode_args decode_args(Loan& loan, Bytes& bytes, const Sizes& s) {
  const bool is_paged = bytes.flag();
  constexpr std::int64_t kPages = 5, kPageSize = 4;
  const auto cache = [&](std::int64_t dim) {
    return is_paged ? Extents{kPages, kPageSize, s.heads_kv, dim}
                    : Extents{s.batch + 1, s.seqlen_kv, s.heads_kv, dim};
  };
  fovea_attention_forward_args forward{};
  const bool is_packed = bytes.next() % 4 == 1;
  const auto tokens = [&](std::int64_t each, std::int64_t heads, std::int64_t dim) {
    return is_packed ? Extents{s.batch * each, heads, dim} : Extents{s.batch, each, heads, dim};
  };
  forward.q = loan.floats(tokens(s.seqlen_q, s.heads_q, s.dim_qk));
  forward.k = loan.floats(cache(s.dim_qk));
  forward.v = loan.floats(cache(s.dim_v));
  forward.out = loan.floats(tokens(s.seqlen_q, s.heads_q, s.dim_v), true);
  const Extents statistics = is_packed ? Extents{s.heads_q, s.batch * s.seqlen_q}
                                       : Extents{s.batch, s.heads_q, s.seqlen_q};
  if (bytes.flag()) forward.lse = loan.f32(statistics, true);
  if (is_packed) forward.cu_seqlens_q = loan.indices({s.batch + 1});
  if (bytes.next() % 4 == 1) give_programs(loan, bytes, s, forward);
  if (bytes.next() % 4 == 1) forward.sinks = loan.f32({s.heads_q});
  forward.executor = loan.lend(own_thread());
  fovea_attention_decode_args args{};
  if (bytes.next() % 4 == 1) {
    const DLDataType codes =
        bytes.flag() ? DLDataType{kDLInt, 8, 1} : DLDataType{kDLFloat8_e4m3fn, 8, 1};
    forward.k = loan.tensor(codes, cache(s.dim_qk), true);
    forward.v = loan.tensor(codes, cache(s.dim_v), true);
    const Extents rows = cache(1);
    const bool is_of_rows = bytes.next() % 4 != 1;
    const Extents scales =
        is_of_rows ? Extents{rows[0], rows[1], rows[2]} : Extents{s.batch, s.heads_kv};
    args.k_scale = loan.f32(scales, true);
    if (bytes.next() % 8 != 1) args.v_scale = loan.f32(scales, true);
  }
  args.forward = loan.lend(forward);
  args.seqlens = loan.indices({s.batch});
  const bool is_listed = is_paged && bytes.next() % 4 == 1;
  if (is_paged && !is_listed) args.page_table = loan.indices({s.batch, 3});
  if (is_listed) {
    args.page_indptr = loan.indices({s.batch + 1});
    args.page_indices = loan.indices({s.batch * 3});
  }
  if (bytes.next() % 4 == 1) args.batch_idx = loan.indices({s.batch});
  if (bytes.next() % 4 == 1) args.left_padding = loan.indices({s.batch});
  if (bytes.flag()) {
    args.append_k = loan.floats(tokens(2, s.heads_kv, s.dim_qk));
    args.append_v = loan.floats(tokens(2, s.heads_kv, s.dim_v));
    if (is_packed && bytes.flag()) args.append_cu_seqlens = loan.indices({s.batch + 1});
  }
  if (bytes.next() % 4 == 1) {
    args.rotary_cos = loan.f32({32, s.dim_qk / 2});
    args.rotary_sin = loan.f32({32, s.dim_qk / 2});
    const Extents positions =
        is_packed ? Extents{s.batch * s.seqlen_q} : Extents{s.batch, s.seqlen_q};
    if (bytes.flag()) args.rotary_positions = loan.indices(positions);
    if (bytes.next() % 4 == 1) args.rotary_positions_q = loan.indices(positions);
    args.is_interleaved = bytes.next() % 3;
  }
  if (is_packed && bytes.next() % 4 == 1) args.max_seqlen_q = bytes.next() % 8 - 1;
  args.sees_all_keys = bytes.next() % 3;
  if (bytes.next() % 4 == 1) {
    args.shared_prefix = bytes.next() % 8 - 1;
    if (bytes.flag()) args.shared_cu_sequences = loan.indices({bytes.next() % 3 + 1});
  }
  return args;
}

/// An error and its kind agree.
int outcome(int kind, fovea_error* error) {
  require((error == nullptr) == (kind == FOVEA_OK));
  require(fovea_error_kind(error) == kind);
  require(kind == FOVEA_OK || *fovea_error_message(error) != '\0');
  require(kind != FOVEA_INTERNAL);
  fovea_error_free(error);
  return kind;
}

template <typename Function, typename... Args>
int call(Function function, Args... args) {
  fovea_error* error = nullptr;
  const int kind = function(args..., &error);
  return outcome(kind, error);
}

/// A plan, and a run that differs from it by the decision of one byte, or in none.
int run_plan(Bytes& bytes, const Sizes& sizes) {
  const std::size_t changed = bytes.next();
  const std::uint8_t change = bytes.next();
  std::vector<std::uint8_t> twin_bytes(bytes.rest().begin(), bytes.rest().end());
  if (changed < twin_bytes.size()) twin_bytes[changed] ^= change;
  Bytes twin(twin_bytes.data(), twin_bytes.size());
  fovea_plan* plan = nullptr;
  {
    Loan planned(bytes);
    const fovea_attention_forward_args args = forward_args(planned, bytes, sizes);
    fovea_plan_options options{};
    options.max_seqlen_q = bytes.next() % 4 == 1 ? bytes.extent() : 0;
    options.max_seqlen_kv = bytes.next() % 4 == 1 ? bytes.extent() : 0;
    options.num_threads = bytes.next() % 4;
    const int kind = call(fovea_plan_create, planned.lend(args),
                          bytes.flag() ? planned.lend(options) : nullptr, &plan);
    if (kind != FOVEA_OK) return kind;
  }
  // What the plan was made with is gone.
  char* text = nullptr;
  call(fovea_plan_explain, static_cast<const fovea_plan*>(plan), bytes.next() % 3, &text);
  fovea_string_free(text);
  const std::size_t size = fovea_plan_workspace_bytes(plan);
  int kind = FOVEA_OK;
  if (size <= kMostWorkspace) {
    std::vector<std::byte> workspace(size);
    Loan ran(twin);
    fovea_attention_forward_args args = forward_args(ran, twin, sizes);
    args.workspace = workspace.data();
    args.workspace_bytes = bytes.next() == 1 ? bytes.next() : size;
    kind = call(fovea_plan_run, static_cast<const fovea_plan*>(plan), ran.lend(args));
    if (kind != FOVEA_OK) ran.expect_unwritten();
  }
  fovea_plan_destroy(plan);
  return kind;
}

int run_backward(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  const fovea_attention_forward_args forward = forward_args(loan, bytes, sizes, false);
  const ShapeOf shape{sizes.batch, forward.cu_seqlens_q != nullptr};
  fovea_attention_backward_args args{};
  args.forward = loan.lend(forward);
  args.dout = loan.floats(shape(sizes.seqlen_q, sizes.heads_q, sizes.dim_v));
  args.dq = loan.floats(shape(sizes.seqlen_q, sizes.heads_q, sizes.dim_qk), true);
  args.dk = loan.floats(shape(sizes.seqlen_kv, sizes.heads_kv, sizes.dim_qk), true);
  args.dv = loan.floats(shape(sizes.seqlen_kv, sizes.heads_kv, sizes.dim_v), true);
  if (bytes.flag()) args.dsinks = loan.f32({sizes.heads_q}, true);
  if (bytes.flag()) {
    args.dcaptured = loan.lend_array(std::vector<fovea_named_tensor>{
        {"slopes", loan.f32({sizes.heads_q}, true)}, {"n", loan.f32({}, true)}});
    args.num_dcaptured = bytes.next() % 3;
  }
  return call(fovea_attention_backward, loan.lend(args));
}

int run_double_backward(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  const fovea_attention_forward_args forward = forward_args(loan, bytes, sizes, false);
  const ShapeOf shape{sizes.batch, forward.cu_seqlens_q != nullptr};
  const Extents q = shape(sizes.seqlen_q, sizes.heads_q, sizes.dim_qk);
  const Extents k = shape(sizes.seqlen_kv, sizes.heads_kv, sizes.dim_qk);
  fovea_attention_double_backward_args args{};
  args.forward = loan.lend(forward);
  args.dout = loan.floats(shape(sizes.seqlen_q, sizes.heads_q, sizes.dim_v));
  args.ddq = loan.floats(q);
  args.ddk = loan.floats(k);
  args.grad_q = loan.floats(q, true);
  args.grad_k = loan.floats(k, true);
  args.grad_dout = loan.floats(shape(sizes.seqlen_q, sizes.heads_q, sizes.dim_v), true);
  if (bytes.flag()) args.ddsinks = loan.f32({sizes.heads_q});
  if (bytes.flag()) args.grad_sinks = loan.f32({sizes.heads_q}, true);
  if (bytes.flag()) {
    args.ddcaptured = loan.lend_array(std::vector<fovea_named_tensor>{
        {"slopes", loan.f32({sizes.heads_q})}, {"n", loan.f32({})}});
    args.num_ddcaptured = bytes.next() % 3;
  }
  if (bytes.flag()) {
    args.grad_captured = loan.lend_array(std::vector<fovea_named_tensor>{
        {"slopes", loan.f32({sizes.heads_q}, true)}, {"n", loan.f32({}, true)}});
    args.num_grad_captured = bytes.next() % 3;
  }
  const fovea_attention_double_backward_args* lent = loan.lend(args);
  char* text = nullptr;
  call(fovea_explain_double_backward, lent, bytes.next() % 3, &text);
  fovea_string_free(text);
  return call(fovea_attention_double_backward, lent);
}

/// Of another operation than forward: made, explained, run with what it was made with, and with a plan's workspace.
template <typename Args, typename Create, typename Run>
int run_other_plan(Loan& loan, Bytes& bytes, Args& args, const Create& create, const Run& run) {
  fovea_plan* plan = nullptr;
  int kind = create(loan.lend(args), &plan);
  require((plan != nullptr) == (kind == FOVEA_OK));
  if (plan == nullptr) return kind;
  char* text = nullptr;
  call(fovea_plan_explain, static_cast<const fovea_plan*>(plan), bytes.next() % 3, &text);
  fovea_string_free(text);
  const std::size_t size = fovea_plan_workspace_bytes(plan);
  kind = size <= kMostWorkspace ? run(plan, size) : FOVEA_OK;
  fovea_plan_destroy(plan);
  return kind;
}

int run_jvp(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  const Extents q{sizes.batch, sizes.seqlen_q, sizes.heads_q, sizes.dim_qk};
  fovea_attention_jvp_args args{};
  args.forward = loan.lend(forward_args(loan, bytes, sizes));
  args.q_tangent = loan.floats(q);
  args.v_tangent = loan.floats({sizes.batch, sizes.seqlen_kv, sizes.heads_kv, sizes.dim_v});
  args.out_tangent = loan.floats({sizes.batch, sizes.seqlen_q, sizes.heads_q, sizes.dim_v}, true);
  args.lse_tangent = loan.f32({sizes.batch, sizes.heads_q, sizes.seqlen_q}, true);
  if (!bytes.flag()) return call(fovea_attention_jvp, loan.lend(args));
  std::vector<std::byte> workspace;
  return run_other_plan(
      loan, bytes, args,
      [](const auto* lent, fovea_plan** plan) { return call(fovea_plan_create_jvp, lent, plan); },
      [&](const fovea_plan* plan, std::size_t size) {
        workspace.resize(size);
        args.workspace = workspace.data();
        args.workspace_bytes = size;
        return call(fovea_plan_run_jvp, plan, loan.lend(args));
      });
}

fovea_merge_states_args merge_args(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  const Extents out{sizes.batch, sizes.seqlen_q, sizes.heads_q, sizes.dim_v};
  const Extents lse{sizes.batch, sizes.heads_q, sizes.seqlen_q};
  fovea_merge_states_args args{};
  args.num_states = bytes.next() % 4;
  args.outs = loan.lend_array(
      std::vector<const DLTensor*>{loan.floats(out), loan.floats(out), loan.floats(out)});
  args.lses =
      loan.lend_array(std::vector<const DLTensor*>{loan.f32(lse), loan.f32(lse), loan.f32(lse)});
  args.out = loan.floats(out, true);
  if (bytes.flag()) args.lse = loan.f32(lse, true);
  args.executor = loan.lend(own_thread());
  return args;
}

int run_merge(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  fovea_merge_states_args args = merge_args(loan, bytes, sizes);
  if (!bytes.flag()) return call(fovea_merge_states, loan.lend(args));
  std::vector<std::byte> workspace;
  return run_other_plan(
      loan, bytes, args,
      [](const auto* lent, fovea_plan** plan) {
        return call(fovea_plan_create_merge_states, lent, plan);
      },
      [&](const fovea_plan* plan, std::size_t size) {
        workspace.resize(size);
        args.workspace = workspace.data();
        args.workspace_bytes = size;
        return call(fovea_plan_run_merge_states, plan, loan.lend(args));
      });
}

int run_decode(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  fovea_attention_decode_args args = decode_args(loan, bytes, sizes);
  if (!bytes.flag()) return call(fovea_attention_decode, loan.lend(args));
  const std::int64_t max_seqlen_kv = bytes.extent();
  return run_other_plan(
      loan, bytes, args,
      [&](const auto* lent, fovea_plan** plan) {
        return call(fovea_plan_create_decode, lent, max_seqlen_kv, plan);
      },
      [&](const fovea_plan* plan, std::size_t) {
        // The workspace of forward is the caller's: none, or too little, is refused.
        return call(fovea_plan_run_decode, plan, loan.lend(args));
      });
}

int run_append(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  fovea_attention_decode_args args = decode_args(loan, bytes, sizes);
  if (!bytes.flag()) return call(fovea_append_to_cache, loan.lend(args));
  return run_other_plan(
      loan, bytes, args,
      [](const auto* lent, fovea_plan** plan) {
        return call(fovea_plan_create_append, lent, plan);
      },
      [&](const fovea_plan* plan, std::size_t) {
        return call(fovea_plan_run_append, plan, loan.lend(args));
      });
}

int run_explain(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  char* text = nullptr;
  const fovea_plan_options* no_options = nullptr;
  const int kind = call(fovea_explain, loan.lend(forward_args(loan, bytes, sizes)), no_options,
                        bytes.next() % 3, &text);
  require((text != nullptr) == (kind == FOVEA_OK));
  fovea_string_free(text);
  return kind;
}

bool is_huge(const DLTensor* tensor) {
  constexpr std::int64_t kMostRows = 64;
  return tensor != nullptr && tensor->ndim > 0 && tensor->ndim < kMostDims &&
         std::any_of(tensor->shape, tensor->shape + tensor->ndim,
                     [](std::int64_t extent) { return extent > kMostRows; });
}

/// Tiles, runs, elements and pictures into memory of the sizes that a first call tells, or of others.
int run_block_map(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  fovea_block_map_args args{};
  const fovea_attention_forward_args forward = forward_args(loan, bytes, sizes);
  args.forward = loan.lend(forward);
  args.tile_q = bytes.next() % 4 == 1 ? bytes.extent() : 1 + bytes.next() % 8;
  args.tile_kv = bytes.next() % 4 == 1 ? bytes.extent() : 1 + bytes.next() % 8;
  args.has_sequence = bytes.next() % 3;
  args.has_q_head = bytes.next() % 3;
  args.sequence = bytes.next() % 4;
  args.q_head = bytes.next() % 4;
  if (is_huge(forward.q) || is_huge(forward.k)) {  // one map of few tiles
    args.has_sequence = args.has_q_head = 1;
    args.tile_q = args.tile_kv = std::int64_t{1} << 24;
  }
  const fovea_block_map_args* const lent = loan.lend(args);
  const std::uint8_t what = bytes.next() % 4;
  if (what == 0) {
    const DLTensor* visible = loan.tensor(
        {kDLBool, 8, 1}, {sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_kv}, true);
    return call(fovea_mask_elements, lent, std::int64_t{bytes.next()}, std::int64_t{bytes.next()},
                visible);
  }
  if (what == 1) {
    char* text = nullptr;
    const int kind =
        call(fovea_mask_print, lent, std::int32_t{bytes.next()}, std::int32_t{bytes.next()}, &text);
    require((text != nullptr) == (kind == FOVEA_OK));
    fovea_string_free(text);
    return kind;
  }
  if (what == 2) {
    std::int64_t counts[2] = {};
    std::int64_t* no_rows = nullptr;
    std::int32_t* no_runs = nullptr;
    const int kind =
        call(fovea_mask_runs, lent, no_rows, std::size_t{0}, no_runs, std::size_t{0}, counts);
    if (kind != FOVEA_OK) return kind;
    std::vector<std::int64_t> row_begin(static_cast<std::size_t>(counts[0]) + 1);
    std::vector<std::int32_t> runs(static_cast<std::size_t>(counts[1]) * 3);
    return call(fovea_mask_runs, lent, row_begin.data(), row_begin.size(), runs.data(),
                static_cast<std::size_t>(counts[1]), counts);
  }
  std::int64_t shape[4] = {};
  std::uint8_t* no_kinds = nullptr;
  const int kind = call(fovea_mask_tiles, lent, no_kinds, std::size_t{0}, shape);
  if (kind != FOVEA_OK) return kind;
  std::vector<std::uint8_t> kinds(
      static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
  return call(fovea_mask_tiles, lent, kinds.data(), kinds.size(), shape);
}

/// A rank alone, whose exchanges are copies.
fovea_communicator lone_rank() {
  fovea_communicator ranks{};
  ranks.world_size = 1;
  ranks.begin_all_gather = [](void*, const void* sent, void* received, std::size_t bytes, void*,
                              std::uint64_t*) {
    if (bytes != 0) std::memcpy(received, sent, bytes);
    return 0;
  };
  ranks.begin_reduce_scatter = [](void*, const float* sent, float* received, std::size_t count,
                                  void*, std::uint64_t*) {
    std::copy_n(sent, count, received);
    return 0;
  };
  ranks.begin_messages = [](void*, const fovea_outgoing_message*, std::size_t num_sent,
                            const fovea_incoming_message*, std::size_t num_received, void*,
                            std::uint64_t*) {
    require(num_sent == 0 && num_received == 0);  // what is a rank's own stays
    return 0;
  };
  ranks.wait = [](void*, std::uint64_t, void*) { return 0; };
  return ranks;
}

/// A plan, and each question that it answers about a rank that may not be; attention where one rank has all.
int run_shards(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  fovea_shard_args args{};
  const fovea_attention_forward_args forward = forward_args(loan, bytes, sizes);
  if (is_huge(forward.q) || is_huge(forward.k)) return FOVEA_INVALID_ARGUMENT;
  args.forward = loan.lend(forward);
  args.world_size = bytes.next() % 5;
  args.scheme = bytes.next() % 7;
  args.tile_q = bytes.next() % 8;
  args.tile_kv = bytes.next() % 8;
  args.chunk = bytes.next() % 4;
  args.head_parts = bytes.next() % 3;
  args.head_ranks = bytes.next() % 3;
  fovea_shard_plan* plan = nullptr;
  const int created = call(fovea_shard_plan_create, loan.lend(args), &plan);
  require((plan != nullptr) == (created == FOVEA_OK));
  if (created != FOVEA_OK) return created;
  const std::int32_t rank = bytes.next() % 5;
  std::size_t count = 0;
  std::int64_t* no_ranges = nullptr;
  fovea_transfer* no_transfers = nullptr;
  const int kind = call(fovea_shard_plan_ranges, plan, rank, std::int32_t{bytes.next()}, no_ranges,
                        std::size_t{0}, &count);
  call(fovea_shard_plan_transfers, plan, rank, no_transfers, std::size_t{0}, &count);
  char* text = nullptr;
  const int printed = call(fovea_shard_plan_print_ranks, plan, std::int64_t{bytes.next()},
                           std::int64_t{bytes.next()}, std::int32_t{bytes.next()},
                           std::int32_t{bytes.next()}, &text);
  require((text != nullptr) == (printed == FOVEA_OK));
  fovea_string_free(text);
  fovea_context_parallel* attention = nullptr;
  const int made = call(fovea_context_parallel_create, static_cast<const fovea_shard_plan*>(plan),
                        loan.lend(lone_rank()), &attention);
  require((attention != nullptr) == (made == FOVEA_OK));
  fovea_shard_plan_destroy(plan);
  if (made == FOVEA_OK) call(fovea_context_parallel_forward, attention, args.forward);
  fovea_context_parallel_destroy(attention);
  return kind;
}

int run_rotary(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  const bool is_packed = bytes.next() % 4 == 1;
  const std::int64_t rows = sizes.batch * sizes.seqlen_q;
  const Extents shape = is_packed
                            ? Extents{rows, sizes.heads_q, sizes.dim_qk}
                            : Extents{sizes.batch, sizes.seqlen_q, sizes.heads_q, sizes.dim_qk};
  fovea_rotary_args args{};
  args.out = loan.floats(shape, true);
  args.x = bytes.flag() ? args.out : loan.floats(shape);
  args.cos = loan.f32({32, sizes.dim_qk / 2});
  args.sin = loan.f32({32, sizes.dim_qk / 2});
  if (is_packed) args.cu_seqlens = loan.indices({sizes.batch + 1});
  if (bytes.next() % 4 == 1)
    args.positions = loan.indices(is_packed ? Extents{rows} : Extents{sizes.batch, sizes.seqlen_q});
  if (bytes.next() % 4 == 1) args.offsets = loan.indices({sizes.batch});
  args.is_interleaved = bytes.next() % 3;
  args.is_conjugate = bytes.next() % 3;
  args.executor = loan.lend(own_thread());
  return call(fovea_rotary, loan.lend(args));
}

int run_probabilities(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  const fovea_attention_forward_args forward = forward_args(loan, bytes, sizes, false);
  fovea_attention_probabilities_args args{};
  args.forward = loan.lend(forward);
  args.probabilities =
      loan.floats({sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_kv}, true);
  return call(fovea_attention_probabilities, loan.lend(args));
}

int run_tile_table(Loan& loan, Bytes& bytes, const Sizes& sizes) {
  fovea_tile_lists_args args{};
  const std::int64_t count = bytes.next() % 8;
  args.indptr = loan.indices({sizes.heads_q * sizes.seqlen_q + 1});
  args.indices = loan.indices({count});
  args.table = loan.tensor({kDLBool, 8, 1}, {sizes.heads_q, sizes.seqlen_q, sizes.seqlen_kv}, true);
  return call(fovea_tile_table, loan.lend(args));
}

int run(Loan& loan, Bytes& bytes) {
  const std::uint8_t operation = bytes.next();
  const Sizes sizes = some_sizes(bytes);
  switch (operation % 14) {
    case 0:
      return call(fovea_attention_forward, loan.lend(forward_args(loan, bytes, sizes)));
    case 1:
      return run_plan(bytes, sizes);
    case 2:
      return run_backward(loan, bytes, sizes);
    case 3:
      return run_jvp(loan, bytes, sizes);
    case 4:
      return run_merge(loan, bytes, sizes);
    case 5:
      return run_decode(loan, bytes, sizes);
    case 6:
      return run_double_backward(loan, bytes, sizes);
    case 7:
      return run_append(loan, bytes, sizes);
    case 8:
      return run_block_map(loan, bytes, sizes);
    case 9:
      return run_rotary(loan, bytes, sizes);
    case 10:
      return run_probabilities(loan, bytes, sizes);
    case 11:
      return run_shards(loan, bytes, sizes);
    case 12:
      return run_tile_table(loan, bytes, sizes);
    default:
      return run_explain(loan, bytes, sizes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  Loan loan(bytes);
  if (run(loan, bytes) != FOVEA_OK) loan.expect_unwritten();
  return 0;
}
