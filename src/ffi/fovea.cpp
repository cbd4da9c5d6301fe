// The functions of fovea.h: convert, call, translate errors.
#include "fovea/fovea.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "fovea/attention.hpp"
#include "fovea/describe.hpp"
#include "fovea/runtime.hpp"

#include "core/check.hpp"
#include "ffi/arguments.hpp"
#include "ffi/error.hpp"
#include "ffi/explanation.hpp"
#include "ffi/plan.hpp"
#include "ffi/programs.hpp"
#include "ffi/sized_struct.hpp"

namespace {

using fovea::ffi::guarded;
using fovea::ffi::render;

template <typename T>
void require(T* pointer, const char* where, const char* name) {
  if (pointer == nullptr)
    fovea::invalid(where, std::string(name) + " is NULL; expected an address");
}

DLDevice to_dlpack(fovea::Device device) {
  switch (device.kind) {
    case fovea::Device::Kind::cuda:
      return {kDLCUDA, device.index};
    case fovea::Device::Kind::rocm:
      return {kDLROCM, device.index};
    case fovea::Device::Kind::cpu:
      break;
  }
  return {kDLCPU, device.index};
}

/// The context of both is the caller's struct.
void* allocate(void* context, std::size_t bytes, std::size_t alignment, fovea::Device device,
               void* stream) {
  const auto* callbacks = static_cast<const fovea_allocator*>(context);
  return callbacks->allocate(callbacks->context, bytes, alignment, to_dlpack(device), stream);
}

void deallocate(void* context, void* data, std::size_t bytes, fovea::Device device, void* stream) {
  const auto* callbacks = static_cast<const fovea_allocator*>(context);
  callbacks->deallocate(callbacks->context, data, bytes, to_dlpack(device), stream);
}

void set_allocator(fovea::Runtime& runtime, fovea::ffi::KeptAllocators& kept,
                   const fovea_allocator& callbacks, const char* where) {
  const bool has_one = callbacks.allocate != nullptr || callbacks.deallocate != nullptr;
  if (has_one && (callbacks.allocate == nullptr || callbacks.deallocate == nullptr))
    fovea::invalid(where, "allocate or deallocate is NULL; expected both functions, or neither");
  fovea::Allocator allocator;
  if (has_one) {
    allocator = {.context = &kept.keep(callbacks), .allocate = allocate, .deallocate = deallocate};
  }
  switch (callbacks.device_type) {
    case 0:
      return runtime.set_allocator(allocator);
    case kDLCPU:
      return runtime.set_allocator(fovea::Device::Kind::cpu, allocator);
    case kDLCUDA:
      return runtime.set_allocator(fovea::Device::Kind::cuda, allocator);
    case kDLROCM:
      return runtime.set_allocator(fovea::Device::Kind::rocm, allocator);
    default:
      fovea::invalid(where, "device_type is " + std::to_string(callbacks.device_type) +
                                "; expected kDLCPU (1), kDLCUDA (2), kDLROCM (10), or 0 for all");
  }
}

}  // namespace

extern "C" {

int fovea_error_kind(const fovea_error* error) { return error == nullptr ? FOVEA_OK : error->kind; }

const char* fovea_error_message(const fovea_error* error) {
  return error == nullptr ? "" : error->message.c_str();
}

size_t fovea_error_column(const fovea_error* error) { return error == nullptr ? 0 : error->column; }

void fovea_error_free(fovea_error* error) { fovea::ffi::release(error); }

void fovea_string_free(char* text) { std::free(text); }

const char* fovea_version(void) { return fovea::version().data(); }

uint32_t fovea_abi_version(void) { return FOVEA_ABI_VERSION; }

int fovea_runtime_create(int32_t num_threads, fovea_runtime** runtime, fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_runtime_create";
    require(runtime, kWhere, "runtime");
    *runtime = nullptr;
    if (num_threads < 0) {
      fovea::invalid(kWhere, "num_threads is " + std::to_string(num_threads) +
                                 "; expected >= 0, 0 is automatic");
    }
    *runtime = new fovea_runtime{fovea::Runtime(num_threads)};
  });
}

void fovea_runtime_destroy(fovea_runtime* runtime) { delete runtime; }

int fovea_runtime_set_allocator(fovea_runtime* runtime, const fovea_allocator* allocator,
                                fovea_error** error) {
  return guarded(error, [&] {
    static fovea::ffi::KeptAllocators of_process;
    auto& target = runtime == nullptr ? fovea::Runtime::process_default() : runtime->runtime;
    auto& kept = runtime == nullptr ? of_process : runtime->allocators;
    if (allocator == nullptr) return target.set_allocator({});
    constexpr auto kWhere = "fovea_runtime_set_allocator";
    set_allocator(target, kept, fovea::ffi::read_struct(allocator, sizeof(fovea_allocator), kWhere),
                  kWhere);
  });
}

int fovea_attention_forward(const fovea_attention_forward_args* args, fovea_error** error) {
  return guarded(error, [&] {
    const auto call = fovea::ffi::to_call(args, "fovea_attention_forward");
    fovea::attention_forward(call.args, fovea::ffi::runtime_of(call.threads));
  });
}

int fovea_plan_create(const fovea_attention_forward_args* args, const fovea_plan_options* options,
                      fovea_plan** plan, fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_create";
    fovea::ffi::create_plan(plan, kWhere, [&] {
      const auto call = fovea::ffi::to_call(args, kWhere);
      return fovea::plan(fovea::ffi::to_problem(call, options, kWhere));
    });
  });
}

void fovea_plan_destroy(fovea_plan* plan) { delete plan; }

size_t fovea_plan_workspace_bytes(const fovea_plan* plan) {
  if (plan == nullptr) return 0;
  return std::visit([](const auto& of) { return of.workspace_bytes(); }, plan->plan);
}

int fovea_plan_run(const fovea_plan* plan, const fovea_attention_forward_args* args,
                   fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_run";
    const auto& of_forward = fovea::ffi::plan_of<fovea::Plan>(plan, kWhere);
    const auto call = fovea::ffi::to_call(args, kWhere, &plan->programs);
    of_forward.run(call.args);
  });
}

int fovea_plan_is_final(const fovea_plan* plan, int32_t* is_final, fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_is_final";
    require(plan, kWhere, "plan");
    require(is_final, kWhere, "is_final");
    const auto* const forward = std::get_if<fovea::Plan>(&plan->plan);
    *is_final = forward == nullptr || forward->is_final() ? 1 : 0;
  });
}

int fovea_plan_wait(const fovea_plan* plan, fovea_error** error) {
  return guarded(error, [&] {
    require(plan, "fovea_plan_wait", "plan");
    if (const auto* const forward = std::get_if<fovea::Plan>(&plan->plan)) forward->wait();
  });
}

int fovea_plan_explain(const fovea_plan* plan, int32_t format, char** text, fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_explain";
    fovea::ffi::require_text(text, kWhere);
    require(plan, kWhere, "plan");
    const auto explain = [](const auto& of) { return of.explain(); };
    *text = render(std::visit(explain, plan->plan), format, kWhere);
  });
}

int fovea_explain(const fovea_attention_forward_args* args, const fovea_plan_options* options,
                  int32_t format, char** text, fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_explain";
    fovea::ffi::require_text(text, kWhere);
    const auto call = fovea::ffi::to_call(args, kWhere);
    const auto problem = fovea::ffi::to_problem(call, options, kWhere);
    *text = render(fovea::explain(problem), format, kWhere);
  });
}

int fovea_describe(char** text, fovea_error** error) {
  return guarded(error, [&] {
    fovea::ffi::require_text(text, "fovea_describe");
    *text = fovea::ffi::copy_text(fovea::describe().json());
  });
}

}  // extern "C"
