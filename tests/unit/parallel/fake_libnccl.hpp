// NCCL without a GPU: a shared library with its names whose ranks are threads of one process. Bytes really move, of
// host memory, while a call is made: a collective returns when every rank has come to it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "unit/cuda/driver/fake_libcuda.hpp"

namespace fovea::parallel {

struct FakeNcclCall {
  std::string name;
  int rank = -1;
  std::size_t count = 0;
};

struct FakeNccl {
  /// What is enqueued is told to it, so that one list has the driver's calls as well.
  void (*enqueue)(const cuda::driver::FakeStreamCall& call) = nullptr;
  std::string failing_call;  // this function gives failing_result
  int failing_result = 0;
  std::map<int, int> async_errors;  // by rank
  int num_in_progress = 0;          // so often an asynchronous state is "in progress" first
  std::vector<FakeNcclCall> calls;

  int count(const std::string& call) const {
    int number = 0;
    for (const FakeNcclCall& each : calls) number += each.name == call ? 1 : 0;
    return number;
  }
};

/// Opens the fake (kFakeLibnccl) and gives it a fresh memory; what it enqueues is told to the driver in this
/// file.
FakeNccl& fresh_fake_nccl(const char* libcuda);

}  // namespace fovea::parallel
