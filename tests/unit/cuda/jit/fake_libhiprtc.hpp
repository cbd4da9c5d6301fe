// What a test tells the fake of AMD's compiler (kFakeLibhiprtc, fake_libhiprtc.cpp), and what it learns from it.
#pragma once

#include <string>
#include <vector>

namespace fovea::cuda::jit {

struct FakeHiprtcState {
  int clang = 20;       // its major version
  std::string failure;  // of every kernel: the log of its compilation, which fails
  std::vector<std::string>
      options;  // of every compilation, joined by spaces, that of the version among them
  std::vector<std::string> headers;  // of the last one: names
};

}  // namespace fovea::cuda::jit
