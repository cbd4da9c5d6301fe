// What a handler sees of XLA's foreign function interface, version 0.1: C structs and functions of XLA, declared here
// so that no build needs its headers. Later versions change only what is not declared, or append.
// tests/python/package/jax_abi_test.py compares this file with the headers of the jaxlib that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea::ffi::xla {

/// A node of a list of what later versions add to a struct.
struct Extension {
  std::size_t struct_size;
  std::int32_t type;
  Extension* next;
};
inline constexpr std::int32_t kMetadataExtension = 1;

struct Version {
  std::size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};
/// The oldest that jaxlib 0.6.2 takes, and with it every later one.
inline constexpr int kMajorVersion = 0;
inline constexpr int kMinorVersion = 1;

/// What XLA asks a handler for when it is registered.
struct Metadata {
  std::size_t struct_size;
  Version version;
  std::uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

enum class ElementType : std::int32_t {
  pred = 1,
  s8 = 2,
  s32 = 4,
  s64 = 5,
  u8 = 6,
  u32 = 8,
  f16 = 10,
  f32 = 11,
  bf16 = 16,
  f8e4m3fn = 20,
};

/// An array of the device, row-major.
struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  ElementType dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;  // [rank]
};

/// Operands of a call, or its results: all are buffers.
struct Buffers {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* types;  // [size], 1: a buffer
  Buffer** buffers;     // [size]
};
inline constexpr std::int32_t kBuffer = 1;

struct Span {
  const char* data;
  std::size_t size;
};

/// Attributes, sorted by name.
struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* types;  // [size], 4: a string, whose value is a Span
  Span** names;         // [size]
  void** values;        // [size]
};
inline constexpr std::int32_t kString = 4;

struct Context;  // of a run, opaque
struct Error;    // XLA's

enum class ErrorCode : std::int32_t {
  invalid_argument = 3,
  failed_precondition = 9,
  unimplemented = 12,
  internal = 13,
  unavailable = 14,
};

struct ErrorCreate {
  std::size_t struct_size = sizeof(ErrorCreate);
  Extension* extensions = nullptr;
  const char* message;
  ErrorCode code;
};
struct ErrorDestroy {
  std::size_t struct_size = sizeof(ErrorDestroy);
  Extension* extensions = nullptr;
  Error* error;
};
struct StreamGet {
  std::size_t struct_size = sizeof(StreamGet);
  Extension* extensions = nullptr;
  Context* context;
  void* stream = nullptr;  // written
};
struct MemoryAllocate {
  std::size_t struct_size = sizeof(MemoryAllocate);
  Extension* extensions = nullptr;
  Context* context;
  std::size_t size;
  std::size_t alignment;
  void* data = nullptr;  // written
};
struct MemoryFree {
  std::size_t struct_size = sizeof(MemoryFree);
  Extension* extensions = nullptr;
  Context* context;
  std::size_t size;
  void* data;
};
struct DeviceOrdinalGet {
  std::size_t struct_size = sizeof(DeviceOrdinalGet);
  Extension* extensions = nullptr;
  Context* context;
  std::int32_t ordinal = 0;  // written
};

/// Functions of XLA; those with a null error succeeded.
struct Api {
  std::size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  void* error_get_message;
  void (*error_destroy)(ErrorDestroy*);
  void* handler_register;
  Error* (*stream_get)(StreamGet*);
  void* type_register;
  void* execution_context_get;
  void* state_set;
  void* state_get;
  Error* (*memory_allocate)(MemoryAllocate*);
  Error* (*memory_free)(MemoryFree*);
  void* thread_pool_schedule;
  void* thread_pool_num_threads;
  void* future_create;
  void* future_set_available;
  void* future_set_error;
  void* run_id_get;
  Error* (*device_ordinal_get)(DeviceOrdinalGet*);
};

enum class Stage : std::int32_t { instantiate = 0, prepare = 1, initialize = 2, execute = 3 };

/// A call of a handler.
struct Frame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  Stage stage;
  Buffers operands;
  Buffers results;
  Attributes attributes;
  void* future;  // of handlers that return before they are done
};

}  // namespace fovea::ffi::xla
