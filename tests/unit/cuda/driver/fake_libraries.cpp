#include "unit/cuda/driver/fake_libraries.hpp"

// The one file whose object differs from one build folder to another.
namespace fovea {

const char* const kFakeLibcuda = FOVEA_FAKE_LIBCUDA;
const char* const kFakeProcessLibcuda = FOVEA_FAKE_PROCESS_LIBCUDA;
const char* const kFakeLibamdhip64 = FOVEA_FAKE_LIBAMDHIP64;
const char* const kFakeLibnvrtc = FOVEA_FAKE_LIBNVRTC;
const char* const kFakeLibhiprtc = FOVEA_FAKE_LIBHIPRTC;
const char* const kFakeLibnccl = FOVEA_FAKE_LIBNCCL;

}  // namespace fovea
