// The entry point of rotary: everything is checked before the first row is written.
#include "cpu/rotary.hpp"

#include <string_view>

#include "core/float_environment.hpp"
#include "core/verbose.hpp"
#include "plan/device_kernels.hpp"
#include "plan/plan.hpp"
#include "problem/rotary.hpp"

namespace fovea {
namespace {

constexpr std::string_view kWhere = "rotary";

}  // namespace

void rotary(const ApplyRotary& args, Runtime& runtime) {
  const FloatEnvironment environment;
  const CallLog log(kWhere);
  validate_rotary(args, kWhere);
  const Device device = args.x.spec().device;
  if (is_cpu(device)) {
    cpu::rotary(args, args.executor != nullptr ? *args.executor : runtime.executor());
  } else {
    cuda::rotary(find_rotary(device, runtime), args);
  }
  if (!log.is_on()) [[likely]]
    return;
  log.write(to_string(args.x.spec()), is_cpu(device) ? "cpu/rotary" : "cuda/common/rotary",
            to_string(device));
}

void rotary(const ApplyRotary& args) { rotary(args, Runtime::process_default()); }

}  // namespace fovea
