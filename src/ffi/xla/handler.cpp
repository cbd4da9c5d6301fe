// The handlers that XLA calls: a frame becomes the structs of the C ABI, whose errors become XLA's.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/fovea.h"

#include "core/check.hpp"
#include "ffi/arguments.hpp"
#include "ffi/error.hpp"
#include "ffi/xla/call_site.hpp"
#include "ffi/xla/frame.hpp"
#include "ffi/xla/scratch.hpp"

namespace fovea::ffi::xla {
namespace {

constexpr auto kWhere = "fovea_xla_handler";
constexpr std::size_t kMaxRank = 8;

// ---- Arrays ----

/// A buffer as DLPack has it.
struct Tensor {
  DLTensor tensor{};
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};
};

DLDataType dtype_of(ElementType type) {
  switch (type) {
    case ElementType::pred:
      return {kDLBool, 8, 1};
    case ElementType::s8:
      return {kDLInt, 8, 1};
    case ElementType::s32:
      return {kDLInt, 32, 1};
    case ElementType::s64:
      return {kDLInt, 64, 1};
    case ElementType::u8:
      return {kDLUInt, 8, 1};
    case ElementType::u32:
      return {kDLUInt, 32, 1};
    case ElementType::f16:
      return {kDLFloat, 16, 1};
    case ElementType::f32:
      return {kDLFloat, 32, 1};
    case ElementType::bf16:
      return {kDLBfloat, 16, 1};
    case ElementType::f8e4m3fn:
      return {kDLFloat8_e4m3fn, 8, 1};
  }
  invalid(kWhere, "an array has XLA's element type " + std::to_string(static_cast<int>(type)) +
                      "; expected f32, f16, bf16, e4m3, bool, u8, i8, i32 or i64");
}

/// Axes 1 and 2 change places.
void swap_heads(Tensor& tensor) {
  std::int64_t stride = 1;
  for (int axis = tensor.tensor.ndim - 1; axis >= 0; --axis) {
    tensor.strides[static_cast<std::size_t>(axis)] = stride;
    stride *= tensor.shape[static_cast<std::size_t>(axis)];
  }
  std::swap(tensor.shape[1], tensor.shape[2]);
  std::swap(tensor.strides[1], tensor.strides[2]);
  tensor.tensor.strides = tensor.strides.data();
}

void fill_tensor(const Buffer& buffer, DLDevice device, bool is_swapped, Tensor& tensor) {
  const auto rank = static_cast<std::size_t>(buffer.rank);
  if (rank > kMaxRank) {
    invalid(kWhere, "an array has rank " + std::to_string(rank) + "; expected at most " +
                        std::to_string(kMaxRank));
  }
  for (std::size_t i = 0; i < rank; ++i) tensor.shape[i] = buffer.dims[i];
  tensor.tensor = {.data = buffer.data,
                   .device = device,
                   .ndim = static_cast<std::int32_t>(rank),
                   .dtype = dtype_of(buffer.dtype),
                   .shape = tensor.shape.data(),
                   .strides = nullptr,
                   .byte_offset = 0};
  if (is_swapped && rank == 4) swap_heads(tensor);
}

/// JAX has no 64-bit integers unless it is told so: two of 32 bits, the low one first, are one.
void join_halves(Tensor& tensor) {
  DLTensor& given = tensor.tensor;
  if (given.dtype.code != kDLUInt || given.dtype.bits != 32 || given.ndim != 1 ||
      tensor.shape[0] != 2)
    return;
  given.dtype = {kDLInt, 64, 1};
  tensor.shape[0] = 1;
}

/// The structs of a run of a site.
class Call {
 public:
  Call(const CallSite& site, const Frame& frame, DLDevice device)
      : arguments_(site.arguments),
        tensors_(site.operands.size() + site.results.size()),
        score_(site.num_score_tensors),
        mask_(site.num_mask_tensors),
        named_(site.names.size()) {
    for (std::size_t i = 0; i < named_.size(); ++i) named_[i].name = site.names[i].c_str();
    place_all(site.operands, frame.operands, "operands", device, tensors_.data());
    place_all(site.results, frame.results, "results", device,
              tensors_.data() + site.operands.size());
    join_structs(site);
  }

  ArgumentSet& arguments() { return arguments_; }

 private:
  void place_all(const std::vector<Place>& places, const Buffers& buffers, const char* what,
                 DLDevice device, Tensor* tensors) {
    if (static_cast<std::size_t>(buffers.size) != places.size()) {
      invalid(kWhere, "the call has " + std::to_string(buffers.size) + " " + what + "; expected " +
                          std::to_string(places.size()));
    }
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (buffers.types[i] != kBuffer)
        invalid(kWhere, std::string("one of ") + what + " is no array");
      fill_tensor(*buffers.buffers[i], device, places[i].is_swapped, tensors[i]);
      place(places[i], tensors[i]);
    }
  }

  void place(const Place& place, Tensor& tensor) {
    switch (place.kind) {
      case Place::Kind::field:
        if (place.at == offsetof(ArgumentSet, forward.dropout_seed) ||
            place.at == offsetof(ArgumentSet, forward.dropout_offset))
          join_halves(tensor);
        return write(place.at, &tensor.tensor);
      case Place::Kind::score:
        score_.at(place.at) = &tensor.tensor;
        return;
      case Place::Kind::mask:
        mask_.at(place.at) = &tensor.tensor;
        return;
      case Place::Kind::named:
        named_.at(place.at).tensor = &tensor.tensor;
        return;
    }
  }

  void join_structs(const CallSite& site) {
    fovea_attention_forward_args& forward = arguments_.forward;
    forward.score_program = site.score.get();
    forward.score_tensors = score_.data();
    forward.num_score_tensors = score_.size();
    forward.mask_program = site.mask.get();
    forward.mask_tensors = mask_.data();
    forward.num_mask_tensors = mask_.size();
    arguments_.backward.forward = &forward;
    arguments_.jvp.forward = &forward;
    arguments_.double_backward.forward = &forward;
    arguments_.decode.forward = &forward;
    for (const NamedList& list : site.lists) {
      write(list.list_at, named_.data() + list.begin);
      write(list.count_at, list.end - list.begin);
    }
  }

  template <typename Value>
  void write(std::size_t at, Value value) {
    std::memcpy(reinterpret_cast<std::byte*>(&arguments_) + at, &value, sizeof value);
  }

  ArgumentSet arguments_;
  std::vector<Tensor> tensors_;
  std::vector<const DLTensor*> score_, mask_;
  std::vector<fovea_named_tensor> named_;
};

// ---- A GPU's stream and memory ----

void check(Error* error, const Frame& frame, const char* what) {
  if (error == nullptr) return;
  ErrorDestroy destroy{.error = error};
  frame.api->error_destroy(&destroy);
  throw fovea::Error(ErrorKind::device_error, std::string(kWhere) + ": XLA gives no " + what);
}

void* stream_of(const Frame& frame) {
  StreamGet get{.context = frame.context};
  check(frame.api->stream_get(&get), frame, "stream");
  return get.stream;
}

DLDevice gpu_of(const Frame& frame, DLDeviceType type) {
  DeviceOrdinalGet get{.context = frame.context};
  check(frame.api->device_ordinal_get(&get), frame, "number of a device");
  return {type, get.ordinal};
}

/// The runtime of calls on GPUs: workspace is scratch memory of the call that runs on this thread.
class ScratchRuntime {
 public:
  explicit ScratchRuntime(DLDeviceType type) : runtime_{Runtime(1)} {
    fovea_allocator allocator{};
    allocator.struct_size = sizeof allocator;
    allocator.version = FOVEA_ABI_VERSION;
    allocator.device_type = type;
    allocator.allocate = allocate;
    allocator.deallocate = deallocate;
    fovea_runtime_set_allocator(&runtime_, &allocator, nullptr);
  }

  fovea_runtime* get() { return &runtime_; }

  /// For the length of a call.
  class Lend {
   public:
    explicit Lend(const Frame& frame) : scratch_(frame) { current = &scratch_; }
    ~Lend() { current = nullptr; }
    Lend(const Lend&) = delete;
    Lend& operator=(const Lend&) = delete;

   private:
    Scratch scratch_;
  };

 private:
  static void* allocate(void*, std::size_t bytes, std::size_t alignment, DLDevice, void*) {
    return current == nullptr ? nullptr : current->allocate(bytes, alignment);
  }

  static void deallocate(void*, void* data, std::size_t, DLDevice, void*) {
    if (current != nullptr) current->deallocate(data);
  }

  static thread_local Scratch* current;
  fovea_runtime runtime_;
};
thread_local Scratch* ScratchRuntime::current = nullptr;

// ---- The handlers ----

std::string_view text_of(const Frame& frame) {
  for (std::int64_t i = 0; i < frame.attributes.size; ++i) {
    const Span& name = *frame.attributes.names[i];
    if (frame.attributes.types[i] != kString || std::string_view(name.data, name.size) != "call")
      continue;
    const Span& text = *static_cast<const Span*>(frame.attributes.values[i]);
    return {text.data, text.size};
  }
  invalid(kWhere, "the call has no attribute 'call'; expected a call of fovea.jax");
}

CallSites& call_sites() {
  static CallSites sites;
  return sites;
}

/// Throws what the call reports.
void run(const CallSite& site, const ArgumentSet& arguments) {
  fovea_error* error = nullptr;
  const int kind = site.run(arguments, &error);
  if (kind == FOVEA_OK) return;
  const std::string message = fovea_error_message(error);
  fovea_error_free(error);
  throw fovea::Error(static_cast<ErrorKind>(kind), message);
}

/// A process has one runtime for each kind of GPU.
template <DLDeviceType type>
void run_on_gpu(const CallSite& site, const Frame& frame) {
  static ScratchRuntime scratch(type);
  Call call(site, frame, gpu_of(frame, type));
  call.arguments().forward.stream = stream_of(frame);
  call.arguments().forward.runtime = scratch.get();
  const ScratchRuntime::Lend lend(frame);
  run(site, call.arguments());
}

template <DLDeviceType type>
void run(const Frame& frame) {
  const auto site = call_sites().find(text_of(frame));
  if constexpr (type == kDLCPU) {
    run(*site, Call(*site, frame, {kDLCPU, 0}).arguments());
  } else {
    run_on_gpu<type>(*site, frame);
  }
}

ErrorCode code_of(int kind) {
  switch (kind) {
    case FOVEA_INVALID_ARGUMENT:
      return ErrorCode::invalid_argument;
    case FOVEA_UNSUPPORTED:
      return ErrorCode::unimplemented;
    case FOVEA_COMPILE_ERROR:
      return ErrorCode::failed_precondition;
    case FOVEA_DEVICE_ERROR:
      return ErrorCode::unavailable;
    default:
      return ErrorCode::internal;
  }
}

/// Whether XLA asks for the version alone, and its answer. No trait is claimed: a command buffer would keep the
/// addresses of scratch memory beyond the call that it was lent for.
bool answers_metadata(const Frame& frame) {
  for (Extension* node = frame.extensions; node != nullptr; node = node->next) {
    if (node->type != kMetadataExtension) continue;
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(node)->metadata;
    metadata.version.major = kMajorVersion;
    metadata.version.minor = kMinorVersion;
    metadata.traits = 0;
    return true;
  }
  return false;
}

template <DLDeviceType type>
Error* handle(Frame* frame) {
  if (answers_metadata(*frame) || frame->stage != Stage::execute) return nullptr;
  fovea_error* error = nullptr;
  const int kind = guarded(&error, [&] { run<type>(*frame); });
  if (kind == FOVEA_OK) return nullptr;
  ErrorCreate create{.message = fovea_error_message(error), .code = code_of(kind)};
  Error* const made = frame->api->error_create(&create);
  fovea_error_free(error);
  return made;
}

}  // namespace
}  // namespace fovea::ffi::xla

extern "C" void* fovea_xla_handler(int32_t device_type) {
  using fovea::ffi::xla::handle;
  switch (device_type) {
    case kDLCPU:
      return reinterpret_cast<void*>(&handle<kDLCPU>);
    case kDLCUDA:
      return reinterpret_cast<void*>(&handle<kDLCUDA>);
    case kDLROCM:
      return reinterpret_cast<void*>(&handle<kDLROCM>);
    default:
      return nullptr;
  }
}
