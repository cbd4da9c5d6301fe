// merge_states on a GPU through the public function and its plan, against the oracle. Without a driver or a device
// everything is skipped.
#include <gtest/gtest.h>

#include "fovea/state.hpp"

#include "gpu/device_copy.hpp"
#include "reference/merge_states.hpp"
#include "support/compare.hpp"
#include "support/merge_case.hpp"

namespace fovea::testing {
namespace {

class GpuMerge : public Gpu {};

/// The call over copies of everything that it reads and writes.
struct DeviceMerge {
  explicit DeviceMerge(const MergeStates& host) : args(host) {
    copies.add(tensors_of_merge(host));
    args.out = copies.view(host.out);
    args.lse = copies.view(host.lse);
    for (TensorView& view : args.outs) view = copies.view(view);
    for (TensorView& view : args.lses) view = copies.view(view);
  }

  DeviceCopies copies;
  MergeStates args;
};

TEST_F(GpuMerge, EveryCaseEqualsTheOracle) {
  for (const MergeCase& each : merge_cases()) {
    SCOPED_TRACE(each.name);
    MergeMemory memory(each);
    const reference::MergedState expected = reference::merge_states(memory.args);
    DeviceMerge call(memory.args);
    merge_states(call.args);
    call.copies.copy_back();
    expect_merged(each, memory, expected.out, expected.lse);
    MergeMemory again(each);
    DeviceMerge planned(again.args);
    plan_merge_states(planned.args).run(planned.args);
    planned.copies.copy_back();
    EXPECT_EQ(bits_of(again.args.out), bits_of(memory.args.out));
  }
}

}  // namespace
}  // namespace fovea::testing
