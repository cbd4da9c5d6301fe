// What a test tells the fake compiler (kFakeLibnvrtc, fake_libnvrtc.cpp), and what it learns from it.
#pragma once

namespace fovea::cuda::jit {

struct FakeNvrtcState {
  int num_expected = 1;  // compilations that shall be under way at once: each waits until they are
  int longest_wait_ms = 5000;
  int num_under_way = 0, most_at_once = 0;
};

/// Compilations of texts that have these words wait until a release, or until whoever asked for them wants an end.
/// Null: none waits.
using FakeNvrtcHold = void (*)(const char* words);

}  // namespace fovea::cuda::jit
