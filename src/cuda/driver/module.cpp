#include "cuda/driver/module.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fovea::cuda::driver {
namespace {

/// CUDA_ERROR_INVALID_IMAGE, _NO_BINARY_FOR_GPU, _INVALID_PTX, _UNSUPPORTED_PTX_VERSION, _INVALID_SOURCE, _NOT_FOUND.
constexpr std::array kRefusals{200, 209, 218, 222, 300, 500};

/// Driver::check, where another image may give another result.
void check_image(const Driver& driver, Result result, std::string_view call,
                 const std::string& about) {
  try {
    driver.check(result, call, about);
  } catch (const DeviceError& error) {
    if (std::ranges::find(kRefusals, result) == kRefusals.end()) throw;
    throw ImageRefused(error.what());
  }
}

/// Loading and unloading may allocate and wait, which by default no thread may do while a stream is captured anywhere;
/// none of it belongs to the capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Api& api) : api_(api) { api_.exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { api_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  static constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
  const Api& api_;
  int mode_ = kRelaxed;  // then the thread's own
};

}  // namespace

Module::Module(const DeviceContext& context, std::span<const std::byte> image,
               const std::string& label)
    : context_(context), label_(label) {
  const ContextScope scope(context);
  const RelaxedCapture relaxed(context.api());
  check_image(context.driver(),
              context.api().module_load(&handle_, image.data(), 0, nullptr, nullptr),
              "cuModuleLoadDataEx",
              fmt::format("kernel {}, {} bytes, on {}", label, image.size(), context.info().name));
}

Module::~Module() {
  give_back_in(context_, [&](const Api& api) {
    const RelaxedCapture relaxed(api);
    api.module_unload(handle_);
  });
}

Function Module::function(const std::string& name) const {
  const Driver& driver = context_.driver();
  const Api& api = context_.api();
  const ContextScope scope(context_);
  const RelaxedCapture relaxed(api);
  Function function{.context = &context_, .is_captured = &is_captured_};
  check_image(driver, api.module_function(&function.handle, handle_, name.c_str()),
              "cuModuleGetFunction", fmt::format("{} of kernel {}", name, label_));
  const auto attribute = [&](FunctionAttribute which) {
    int value = 0;
    driver.check(api.function_attribute(&value, which, function.handle), "cuFuncGetAttribute",
                 label_);
    return value;
  };
  function.num_registers = attribute(FunctionAttribute::num_registers);
  function.local_bytes = attribute(FunctionAttribute::local_bytes);
  function.static_shared_bytes = attribute(FunctionAttribute::static_shared_bytes);
  function.max_threads_per_cta = attribute(FunctionAttribute::max_threads_per_cta);
  if (driver.is_hip()) return function;  // takes what there is, unasked
  const int dynamic_bytes = context_.info().shared_bytes_per_cta - function.static_shared_bytes;
  driver.check(api.function_set_attribute(
                   function.handle, FunctionAttribute::max_dynamic_shared_bytes, dynamic_bytes),
               "cuFuncSetAttribute", label_);
  return function;
}

int max_ctas_per_sm(const Function& function, int num_threads, int dynamic_shared_bytes) {
  const ContextScope scope(*function.context);
  int num_ctas = 0;
  function.context->driver().check(
      function.context->api().occupancy(&num_ctas, function.handle, num_threads,
                                        static_cast<std::size_t>(dynamic_shared_bytes)),
      "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  return num_ctas;
}

}  // namespace fovea::cuda::driver
