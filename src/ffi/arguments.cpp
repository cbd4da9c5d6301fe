#include "ffi/arguments.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/check.hpp"
#include "ffi/sized_struct.hpp"
#include "ffi/tensor.hpp"

namespace fovea::ffi {
namespace {

static_assert(std::is_same_v<fovea_task, void (*)(void*, int, std::int64_t)>,
              "Executor::Task::body and fovea_task must be one type");
static_assert(static_cast<int>(Align::bottom_right) == FOVEA_BOTTOM_RIGHT);
static_assert(static_cast<int>(Align::top_left) == FOVEA_TOP_LEFT);
static_assert(static_cast<int>(ComputeDtype::automatic) == FOVEA_COMPUTE_AUTOMATIC);
static_assert(static_cast<int>(ComputeDtype::f32) == FOVEA_COMPUTE_F32);
static_assert(static_cast<int>(ComputeDtype::bf16) == FOVEA_COMPUTE_BF16);
static_assert(static_cast<int>(CpuTarget::automatic) == FOVEA_CPU_AUTOMATIC);
static_assert(static_cast<int>(CpuTarget::scalar) == FOVEA_CPU_SCALAR);
static_assert(static_cast<int>(CpuTarget::avx2) == FOVEA_CPU_AVX2);
static_assert(static_cast<int>(CpuTarget::avx512) == FOVEA_CPU_AVX512);
static_assert(static_cast<int>(CpuTarget::avx512_bf16) == FOVEA_CPU_AVX512_BF16);
static_assert(static_cast<int>(CpuTarget::amx_bf16) == FOVEA_CPU_AMX_BF16);
static_assert(static_cast<int>(CpuTarget::neon) == FOVEA_CPU_NEON);
static_assert(static_cast<int>(CpuTarget::avx512_vnni) == FOVEA_CPU_AVX512_VNNI);
static_assert(static_cast<int>(CpuTarget::avx_vnni) == FOVEA_CPU_AVX_VNNI);

static_assert(static_cast<int>(CompileMode::automatic) == FOVEA_COMPILE_AUTOMATIC);
static_assert(static_cast<int>(CompileMode::complete) == FOVEA_COMPILE_COMPLETE);
static_assert(static_cast<int>(CompileMode::staged) == FOVEA_COMPILE_STAGED);

// Ends of the fields that the first release had and that mean nothing when cut off.
constexpr std::size_t kLeastArgsSize = offsetof(fovea_attention_forward_args, lse);
constexpr std::size_t kLeastOptionsSize = offsetof(fovea_plan_options, max_seqlen_kv);

/// A handle and what it is given to read.
struct ProgramArgument {
  const fovea_program* program;
  fovea_mod kind;
  const DLTensor* const* tensors;
  std::size_t num_tensors;
  const double* scalars;
  std::size_t num_scalars;
  std::string name, text_name;  // the fields
};

// Reads the fields of one struct and says whose they are when one is wrong.
class Reader {
 public:
  Reader(const fovea_attention_forward_args& args, std::string where)
      : args_(args), where_(std::move(where)) {}

  // Most tensors of most calls are NULL: what they would be called in an error is not spelt out.
  TensorView input(const DLTensor* tensor, std::string_view name) const {
    return tensor == nullptr ? TensorView() : to_view(tensor, Access::read, label(name));
  }
  /// Of rank 0 as of shape [1].
  TensorView number(const DLTensor* tensor, std::string_view name) const {
    return tensor == nullptr ? TensorView() : to_elements_view(tensor, Access::read, label(name));
  }
  TensorView captured(const DLTensor* tensor, std::string_view name) const {
    return to_view(tensor, Access::read, label(name), Rank::from_zero);
  }
  TensorView output(const DLTensor* tensor, std::string_view name) const {
    return tensor == nullptr ? TensorView() : to_view(tensor, Access::write, label(name));
  }
  TensorView required(TensorView view, std::string_view name) const {
    if (!view) invalid(label(name), "is NULL; expected a tensor");
    return view;
  }
  bool boolean(std::int32_t value, std::string_view name) const {
    return enumerator<int>(value, 1, name) == 1;
  }
  template <typename Enum>
  Enum enumerator(std::int32_t value, int last, std::string_view name) const {
    if (value < 0 || value > last) {
      invalid(label(name),
              "is " + std::to_string(value) + "; expected 0 to " + std::to_string(last));
    }
    return static_cast<Enum>(value);
  }

  Quantization recipe(const char* text) const {
    if (text == nullptr) return {};
    try {
      return parse_quantization(text);
    } catch (const InvalidArgument& error) {
      invalid(where_, error.what());
    }
  }

  ProgramSource program_source() const;

 private:
  std::string label(std::string_view name) const { return where_ + ": " + std::string(name); }
  CapturedScalar scalar(std::string name, std::int32_t type, double value) const;
  CapturedScalar scalar(std::size_t i) const;
  void read_captures(ProgramSource& source) const;
  void read_handle(const ProgramArgument& given, ProgramInput& input) const;
  CapturedTensor handle_tensor(const ProgramArgument& given, std::size_t i) const;
  void refuse_one_sided_segments(const ProgramSource& source) const;
  void read_segments(ProgramSource& source) const;
  void check_packed_ids(const TensorView& ids, const DLTensor* rows, std::string_view name) const;

  const fovea_attention_forward_args& args_;
  std::string where_;
};

CapturedScalar Reader::scalar(std::string name, std::int32_t type, double value) const {
  if (type == FOVEA_SCALAR_FLOAT) return {std::move(name), ExprType::floating, value};
  if (!(value >= -2147483648.0 && value <= 2147483647.0) || value != std::trunc(value)) {
    invalid(label(name), "is " + std::to_string(value) +
                             "; expected a whole number of 32 bits, or FOVEA_SCALAR_FLOAT");
  }
  return {std::move(name), ExprType::integer, value};
}

CapturedScalar Reader::scalar(std::size_t i) const {
  const fovea_named_scalar& given = args_.scalars[i];
  const std::string name = "scalars[" + std::to_string(i) + "]";
  if (given.name == nullptr) invalid(label(name), "name is NULL; expected a name");
  enumerator<int>(given.type, FOVEA_SCALAR_FLOAT, name + ".type");
  return scalar(given.name, given.type, given.value);
}

void Reader::read_captures(ProgramSource& source) const {
  if (args_.num_tensors > 0 && args_.tensors == nullptr) {
    invalid(label("tensors"), "is NULL; expected num_tensors named tensors");
  }
  if (args_.num_scalars > 0 && args_.scalars == nullptr) {
    invalid(label("scalars"), "is NULL; expected num_scalars named scalars");
  }
  for (std::size_t i = 0; i < args_.num_tensors; ++i) {
    const fovea_named_tensor& given = args_.tensors[i];
    if (given.name == nullptr) {
      invalid(label("tensors[" + std::to_string(i) + "]"), "name is NULL; expected a name");
    }
    if (given.tensor == nullptr) invalid(label(given.name), "is NULL; expected a tensor");
    source.captures.tensors.push_back({given.name, captured(given.tensor, given.name)});
  }
  for (std::size_t i = 0; i < args_.num_scalars; ++i) source.captures.scalars.push_back(scalar(i));
}

/// NULL where the formula reads none of it.
CapturedTensor Reader::handle_tensor(const ProgramArgument& given, std::size_t i) const {
  const CapturedTensor& declared = given.program->parsed->signature.tensors[i];
  const DLTensor* tensor = given.tensors[i];
  if (tensor == nullptr) {
    const auto& read = given.program->parsed->program().captures().tensors;
    if (std::ranges::find(read, declared.name, &CapturedTensor::name) != read.end())
      invalid(label(declared.name), "is NULL; expected a tensor");
    return declared;
  }
  const TensorView view = captured(tensor, declared.name);
  if (view.dtype() != declared.view.dtype() || view.rank() != declared.view.rank()) {
    invalid(label(declared.name), "is " + to_string(view.spec()) + "; expected " +
                                      std::string(name(declared.view.dtype())) + " of rank " +
                                      std::to_string(declared.view.rank()) + ", as " + given.name +
                                      " was made with");
  }
  return {declared.name, view};
}

void Reader::read_handle(const ProgramArgument& given, ProgramInput& input) const {
  if (given.program == nullptr) {
    if (given.num_tensors > 0 || given.num_scalars > 0)
      invalid(label(given.name), "is NULL and tensors or scalars for it are given; expected both");
    return;
  }
  if (input.text) {
    invalid(label(given.name), "is given beside " + given.text_name + "; expected one of the two");
  }
  input.parsed = given.program->parsed;
  if (input.parsed->kind != given.kind) {
    invalid(label(given.name), given.kind == FOVEA_SCORE_MOD
                                   ? "is a mask program; expected FOVEA_SCORE_MOD"
                                   : "is a score program; expected FOVEA_MASK_MOD");
  }
  const Captures& signature = input.parsed->signature;
  const auto check_count = [&](std::string_view kind, std::size_t got, std::size_t expected,
                               const void* array) {
    if (got == expected && (got == 0 || array != nullptr)) return;
    invalid(label(given.name), "is given " + std::to_string(array == nullptr ? 0 : got) + " " +
                                   std::string(kind) + "; expected " + std::to_string(expected) +
                                   ", as it was made with");
  };
  check_count("tensors", given.num_tensors, signature.tensors.size(), given.tensors);
  check_count("scalars", given.num_scalars, signature.scalars.size(), given.scalars);
  for (std::size_t i = 0; i < given.num_tensors; ++i)
    input.captures.tensors.push_back(handle_tensor(given, i));
  for (std::size_t i = 0; i < given.num_scalars; ++i) {
    const CapturedScalar& declared = signature.scalars[i];
    const bool is_float = declared.type == ExprType::floating;
    input.captures.scalars.push_back(
        scalar(declared.name, is_float ? FOVEA_SCALAR_FLOAT : FOVEA_SCALAR_INT, given.scalars[i]));
  }
}

/// Ids of one side serve both where the lengths are equal.
void Reader::refuse_one_sided_segments(const ProgramSource& source) const {
  if (static_cast<bool>(source.segments_q) == static_cast<bool>(source.segments_kv)) return;
  const bool is_packed = args_.cu_seqlens_q != nullptr;
  if (is_packed || args_.q->ndim != 4 || args_.k->ndim != 4) return;
  if (args_.q->shape[1] == args_.k->shape[1]) return;
  invalid(label(source.segments_q ? "segments_kv" : "segments_q"),
          "is NULL and seqlen_q differs from seqlen_kv; expected ids of both sides");
}

/// Rows of q or k.
void Reader::check_packed_ids(const TensorView& ids, const DLTensor* rows,
                              std::string_view name) const {
  if (!ids || rows->ndim != 3) return;
  if (ids.rank() == 1 && ids.size(0) == rows->shape[0]) return;
  invalid(label(name), "is " + to_string(ids.spec()) + "; expected i32 or i64 [" +
                           std::to_string(rows->shape[0]) + "], an id for each packed row");
}

/// Ids of rank 1 are of packed rows, an id for each; then both sides have offsets, which find a sequence's.
void Reader::read_segments(ProgramSource& source) const {
  source.segments_q = input(args_.segments_q, "segments_q");
  source.segments_kv = input(args_.segments_kv, "segments_kv");
  refuse_one_sided_segments(source);
  const TensorView& any = source.segments_q ? source.segments_q : source.segments_kv;
  if (args_.cu_seqlens_q == nullptr || any.rank() != 1) return;
  check_packed_ids(source.segments_q, args_.q, "segments_q");
  check_packed_ids(source.segments_kv, args_.k, "segments_kv");
  if (!source.segments_kv) check_packed_ids(source.segments_q, args_.k, "segments_q");
  if (!source.segments_q) check_packed_ids(source.segments_kv, args_.q, "segments_kv");
  source.cu_seqlens_q = input(args_.cu_seqlens_q, "cu_seqlens_q");
  source.cu_seqlens_kv = required(input(args_.cu_seqlens_kv, "cu_seqlens_kv"), "cu_seqlens_kv");
}

ProgramSource Reader::program_source() const {
  ProgramSource source;
  read_captures(source);
  source.softcap = args_.softcap;
  source.bias = input(args_.bias, "bias");
  source.alibi = input(args_.alibi, "alibi");
  if (args_.score_mod != nullptr) source.score_mod.text = args_.score_mod;
  read_handle({.program = args_.score_program,
               .kind = FOVEA_SCORE_MOD,
               .tensors = args_.score_tensors,
               .num_tensors = args_.num_score_tensors,
               .scalars = args_.score_scalars,
               .num_scalars = args_.num_score_scalars,
               .name = "score_program",
               .text_name = "score_mod"},
              source.score_mod);
  source.mask = input(args_.mask, "mask");
  const bool has_left = boolean(args_.has_window_left, "has_window_left");
  const bool has_right = boolean(args_.has_window_right, "has_window_right");
  if (has_left) source.window_left = args_.window_left;
  if (has_right) source.window_right = args_.window_right;
  source.is_causal = boolean(args_.causal, "causal");
  read_segments(source);
  if (args_.mask_mod != nullptr) source.mask_mod.text = args_.mask_mod;
  read_handle({.program = args_.mask_program,
               .kind = FOVEA_MASK_MOD,
               .tensors = args_.mask_tensors,
               .num_tensors = args_.num_mask_tensors,
               .scalars = args_.mask_scalars,
               .num_scalars = args_.num_mask_scalars,
               .name = "mask_program",
               .text_name = "mask_mod"},
              source.mask_mod);
  const bool needs_align = source.is_causal || has_left || has_right || source.alibi;
  if (needs_align) source.align = enumerator<Align>(args_.align, FOVEA_TOP_LEFT, "align");
  return source;
}

std::unique_ptr<CallbackExecutor> to_executor(const fovea_executor* executor,
                                              const std::string& where) {
  const std::string what = where + ": executor";
  const auto callbacks = read_struct(executor, sizeof(fovea_executor), what);
  if (callbacks.concurrency == nullptr || callbacks.run == nullptr) {
    invalid(what, "concurrency or run is NULL; expected both functions");
  }
  const int concurrency = callbacks.concurrency(callbacks.context);
  if (concurrency < 1) {
    invalid(what, "concurrency is " + std::to_string(concurrency) + "; expected >= 1");
  }
  return std::make_unique<CallbackExecutor>(callbacks);
}

std::string slot_of(const Call& call, std::string_view name, const std::string& label) {
  const auto found = std::ranges::find(*call.slots, name, &Programs::Slots::value_type::first);
  if (found != call.slots->end()) return found->second;
  invalid(
      label,
      "is not read by the score; expected bias, alibi or a name that score_mod or score_program "
      "reads");
}

/// A text is parsed anew; a handle knows the formulas of its last calls, and a thread those of words alone.
Programs programs_of(const fovea_attention_forward_args& args, const ProgramSource& source,
                     ProgramCache* cache) {
  if (cache != nullptr) return cache->programs_of(source);
  const fovea_program* handle =
      args.score_program != nullptr ? args.score_program : args.mask_program;
  if (handle != nullptr) return handle->programs.programs_of(source);
  if (args.score_mod != nullptr || args.mask_mod != nullptr)
    return ProgramCache().programs_of(source);
  thread_local ProgramCache of_words;
  return of_words.programs_of(source);
}

}  // namespace

Threads to_threads(fovea_runtime* runtime, const fovea_executor* executor,
                   const std::string& where) {
  Threads threads;
  if (runtime != nullptr) {
    threads.runtime = &runtime->runtime;
    threads.executor = &threads.runtime->executor();
  }
  if (executor != nullptr) {
    threads.callbacks = to_executor(executor, where);
    threads.executor = threads.callbacks.get();
  }
  return threads;
}

Call to_call(const fovea_attention_forward_args* from, const std::string& where,
             ProgramCache* cache) {
  const auto c = read_struct(from, kLeastArgsSize, where);
  const Reader read(c, where);
  Call call;
  AttentionForward& args = call.args;
  args.q = read.required(read.input(c.q, "q"), "q");
  args.k = read.required(read.input(c.k, "k"), "k");
  args.v = read.required(read.input(c.v, "v"), "v");
  args.out = read.required(read.output(c.out, "out"), "out");
  args.lse = read.output(c.lse, "lse");
  args.row_max = read.output(c.row_max, "row_max");

  Programs programs = programs_of(c, read.program_source(), cache);
  args.score = std::move(programs.score);
  args.mask = std::move(programs.mask);
  call.slots = std::move(programs.slots);
  if (read.boolean(c.has_softmax_scale, "has_softmax_scale")) args.softmax_scale = c.softmax_scale;
  args.sinks = read.input(c.sinks, "sinks");
  args.dropout = {.p = c.dropout.p, .seed = c.dropout.seed, .offset = c.dropout.offset};
  args.dropout_seed = read.number(c.dropout_seed, "dropout_seed");
  args.dropout_offset = read.number(c.dropout_offset, "dropout_offset");
  args.dropout_places = read.input(c.dropout_places, "dropout_places");
  args.quant = read.recipe(c.quant);
  args.q_scale = read.input(c.q_scale, "q_scale");
  args.k_scale = read.input(c.k_scale, "k_scale");
  args.v_scale = read.input(c.v_scale, "v_scale");
  args.cu_seqlens_q = read.input(c.cu_seqlens_q, "cu_seqlens_q");
  args.cu_seqlens_kv = read.input(c.cu_seqlens_kv, "cu_seqlens_kv");

  args.compute_dtype =
      read.enumerator<ComputeDtype>(c.compute_dtype, FOVEA_COMPUTE_BF16, "compute_dtype");
  args.cpu_target = read.enumerator<CpuTarget>(c.cpu_target, FOVEA_CPU_AVX_VNNI, "cpu_target");
  args.is_deterministic = !read.boolean(c.allows_nondeterminism, "allows_nondeterminism");
  args.sm_margin = c.sm_margin;
  if (c.workspace == nullptr && c.workspace_bytes > 0) {
    invalid(where, "workspace is NULL; expected workspace_bytes bytes");
  }
  args.workspace = {static_cast<std::byte*>(c.workspace), c.workspace_bytes};

  call.threads = to_threads(c.runtime, c.executor, where);
  args.executor = call.threads.executor;
  args.stream = c.stream;
  return call;
}

MaskCall to_mask_call(const fovea_attention_forward_args* from, const std::string& where) {
  const auto c = read_struct(from, offsetof(fovea_attention_forward_args, v), where);
  const Reader read(c, where);
  MaskCall call{.q = read.required(read.input(c.q, "q"), "q"),
                .k = read.required(read.input(c.k, "k"), "k"),
                .cu_seqlens_q = read.input(c.cu_seqlens_q, "cu_seqlens_q"),
                .cu_seqlens_kv = read.input(c.cu_seqlens_kv, "cu_seqlens_kv"),
                .mask = {}};
  const bool is_packed = call.cu_seqlens_q || call.cu_seqlens_kv;
  const int rank = is_packed ? 3 : 4;
  for (const auto& [name, view] : {std::pair{"q", &call.q}, std::pair{"k", &call.k}}) {
    if (view->rank() == rank) continue;
    invalid(where, std::string(name) + " is " + to_string(view->spec()) + "; expected rank " +
                       std::to_string(rank) + (is_packed ? ", cu_seqlens are given" : ""));
  }
  if (!is_packed && call.q.size(0) != call.k.size(0)) {
    invalid(where, "k has batch " + std::to_string(call.k.size(0)) + " but q has " +
                       std::to_string(call.q.size(0)) + "; expected equal");
  }
  call.mask = programs_of(c, read.program_source(), nullptr).mask;
  return call;
}

std::vector<CapturedTensor> to_captured(const Call& call, const fovea_named_tensor* named,
                                        std::size_t count, Access access,
                                        const std::string& where) {
  if (count > 0 && named == nullptr)
    invalid(where, "is NULL; expected " + std::to_string(count) + " named tensors");
  std::vector<CapturedTensor> result;
  for (std::size_t i = 0; i < count; ++i) {
    const std::string at = where + "[" + std::to_string(i) + "]";
    if (named[i].name == nullptr) invalid(at, "name is NULL; expected a name");
    const std::string label = where + ": " + named[i].name;
    const TensorView view = to_elements_view(named[i].tensor, access, label);
    if (!view) invalid(label, "is NULL; expected a tensor");
    result.push_back({slot_of(call, named[i].name, label), view});
  }
  return result;
}

namespace {

CompileMode to_compile_mode(std::int32_t value, const std::string& where) {
  if (value < FOVEA_COMPILE_AUTOMATIC || value > FOVEA_COMPILE_STAGED) {
    invalid(where + ": options",
            "compile_mode is " + std::to_string(value) + "; expected a fovea_compile_mode, 0 to 2");
  }
  return static_cast<CompileMode>(value);
}

}  // namespace

Problem to_problem(const Call& call, const fovea_plan_options* source, const std::string& where) {
  Problem problem = problem_of(call.args);
  if (call.args.executor != nullptr) problem.num_threads = call.args.executor->concurrency();
  if (source == nullptr) return problem;
  const auto options = read_struct(source, kLeastOptionsSize, where + ": options");
  if (options.max_seqlen_q != 0) problem.seqlen_q = up_to(options.max_seqlen_q);
  if (options.max_seqlen_kv != 0) problem.seqlen_kv = up_to(options.max_seqlen_kv);
  if (options.num_threads != 0) problem.num_threads = options.num_threads;
  problem.compile_mode = to_compile_mode(options.compile_mode, where);
  return problem;
}

}  // namespace fovea::ffi
