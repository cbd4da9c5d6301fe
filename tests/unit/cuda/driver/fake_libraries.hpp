// Where the fakes of drivers, compilers and NCCL lie, as tests open them.
#pragma once

namespace fovea {

extern const char* const kFakeLibcuda;
extern const char* const kFakeProcessLibcuda;  // by the name that the library opens
extern const char* const kFakeLibamdhip64;
extern const char* const kFakeLibnvrtc;
extern const char* const kFakeLibhiprtc;
extern const char* const kFakeLibnccl;

}  // namespace fovea
