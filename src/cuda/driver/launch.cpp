#include "cuda/driver/launch.hpp"

#include <fmt/format.h>

#include <array>

#include "core/check.hpp"

namespace fovea::cuda::driver {
namespace {

bool is_empty(const Extent& extent) { return extent.x == 0 || extent.y == 0 || extent.z == 0; }

bool is_one(const Extent& extent) { return extent.x == 1 && extent.y == 1 && extent.z == 1; }

std::string describe(const LaunchConfig& config, const Function& function) {
  return fmt::format(
      "grid {}x{}x{}, {}x{}x{} threads, {} bytes of dynamic shared memory, cluster {}x{}x{}; the "
      "kernel takes {} registers and at most {} threads",
      config.grid.x, config.grid.y, config.grid.z, config.block.x, config.block.y, config.block.z,
      config.shared_bytes, config.cluster.x, config.cluster.y, config.cluster.z,
      function.num_registers, function.max_threads_per_cta);
}

/// A graph launches what it captured whenever it is launched itself, so the module stays loaded.
void remember_capture(const Function& function, StreamHandle stream) {
  if (stream == nullptr || function.is_captured == nullptr) return;
  if (function.is_captured->load(std::memory_order_relaxed)) return;
  int status = 0;
  const Result result = function.context->api().stream_is_capturing(stream, &status);
  if (result != kSuccess || status != 0)
    function.is_captured->store(true, std::memory_order_relaxed);
}

}  // namespace

std::string describe_foreign(const DeviceContext& context, Stream stream) {
  if (context.driver().is_hip()) return "";  // whose streams are devices'
  ContextHandle found = nullptr;
  const Result result = context.api().stream_context(stream.handle(), &found);
  if (result == kSuccess && found == context.handle()) return "";
  return fmt::format(
      "the stream is none of the primary context of {}, but of a green context, of one that "
      "cuCtxCreate made or of another device; kernels run on streams of the primary context: ",
      context.info().name);
}

namespace {

/// With clusters and early starts, which HIP has not.
Result launch_with_attributes(const Api& api, const LaunchConfig& config, FunctionHandle function,
                              void** params) {
  std::array<LaunchAttribute, 2> attributes{};
  unsigned num_attributes = 0;
  if (!is_one(config.cluster)) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = LaunchAttribute::cluster_dimension;
    attribute.value.cluster = {config.cluster.x, config.cluster.y, config.cluster.z};
  }
  if (config.is_pdl) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = LaunchAttribute::programmatic_stream_serialization;
    attribute.value.is_programmatic = 1;
  }
  const RawLaunchConfig raw{.grid_x = config.grid.x,
                            .grid_y = config.grid.y,
                            .grid_z = config.grid.z,
                            .block_x = config.block.x,
                            .block_y = config.block.y,
                            .block_z = config.block.z,
                            .shared_bytes = config.shared_bytes,
                            .stream = config.stream.handle(),
                            .attributes = attributes.data(),
                            .num_attributes = num_attributes};
  return api.launch(&raw, function, params, nullptr);
}

Result launch_plain(const Api& api, const LaunchConfig& config, FunctionHandle function,
                    void** params) {
  FOVEA_ASSERT(is_one(config.cluster) && !config.is_pdl);
  return api.launch_plain(function, config.grid.x, config.grid.y, config.grid.z, config.block.x,
                          config.block.y, config.block.z, config.shared_bytes,
                          config.stream.handle(), params, nullptr);
}

}  // namespace

void launch(const LaunchConfig& config, const Function& function, void** params) {
  if (is_empty(config.grid)) return;
  const DeviceContext& context = *function.context;
  const ContextScope scope(context, config.stream.handle());
  const Result result =
      context.driver().is_hip()
          ? launch_plain(context.api(), config, function.handle, params)
          : launch_with_attributes(context.api(), config, function.handle, params);
  if (result != kSuccess) {
    context.driver().check(result, "cuLaunchKernelEx",
                           describe_foreign(context, config.stream) + describe(config, function));
  }
  remember_capture(function, config.stream.handle());
}

}  // namespace fovea::cuda::driver
