// An allocator of the caller's: what calls take, and that each piece comes back.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/kv_cache.hpp"
#include "fovea/runtime.hpp"

namespace fovea::testing {
namespace {

/// Counts what is out, and refuses from `most` bytes on.
struct Ledger {
  std::map<void*, std::size_t> lent;
  int num_allocations = 0;
  std::size_t most = SIZE_MAX;
  bool is_right = true;

  Allocator allocator() {
    return {.context = this, .allocate = allocate, .deallocate = deallocate};
  }

  static void* allocate(void* context, std::size_t bytes, std::size_t alignment, Device device,
                        void* stream) {
    auto& ledger = *static_cast<Ledger*>(context);
    ledger.is_right = ledger.is_right && bytes > 0 && alignment == 64 && device == Device::cpu() &&
                      stream == nullptr;
    if (bytes > ledger.most) return nullptr;
    ++ledger.num_allocations;
    void* const data =
        std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    ledger.lent[data] = bytes;
    return data;
  }
  static void deallocate(void* context, void* data, std::size_t bytes, Device device,
                         void* /*stream*/) {
    auto& ledger = *static_cast<Ledger*>(context);
    ledger.is_right = ledger.is_right && ledger.lent[data] == bytes && device == Device::cpu();
    ledger.lent.erase(data);
    std::free(data);
  }
};

struct Call {
  std::vector<float> q = std::vector<float>(2 * 40 * 2 * 8, 0.5F), out = q, dq = q;
  std::vector<float> lse = std::vector<float>(2 * 2 * 40);
  std::array<std::int32_t, 2> lengths{40, 17};

  TensorView tensor(std::vector<float>& data) { return view(data.data(), {2, 40, 2, 8}); }
  AttentionForward forward() {
    return {.q = tensor(q),
            .k = tensor(q),
            .v = tensor(q),
            .out = tensor(out),
            .lse = view(lse.data(), {2, 2, 40})};
  }
  AttentionBackward backward() {
    return {.dout = tensor(q), .forward = forward(), .dq = tensor(dq)};
  }
  AttentionJvp jvp() {
    return {.forward = forward(), .q_tangent = tensor(q), .out_tangent = tensor(dq)};
  }
  AttentionDecode decode() {
    return {.q = view(q.data(), {2, 1, 2, 8}),
            .cache = {.k = tensor(q), .v = tensor(q), .seqlens = view(lengths.data(), {2})},
            .out = view(out.data(), {2, 1, 2, 8})};
  }
};

TEST(Allocator, GivesEachCallItsWorkspaceAndTakesItBack) {
  Ledger ledger;
  Runtime runtime(2);
  runtime.set_allocator(ledger.allocator());
  Call call;
  attention_forward(call.forward(), runtime);
  EXPECT_EQ(ledger.num_allocations, 1);
  attention_backward(call.backward(), runtime);
  EXPECT_EQ(ledger.num_allocations, 2);
  attention_decode(call.decode(), runtime);
  EXPECT_EQ(ledger.num_allocations, 3);
  attention_jvp(call.jvp(), runtime);
  EXPECT_EQ(ledger.num_allocations, 4);
  EXPECT_TRUE(ledger.lent.empty());
  EXPECT_TRUE(ledger.is_right);
}

TEST(Allocator, IsNotAskedWhereTheCallerBringsWorkspace) {
  Ledger ledger;
  Runtime runtime(1);
  runtime.set_allocator(ledger.allocator());
  Call call;
  AttentionForward args = call.forward();
  std::vector<std::byte> own(1 << 22);
  args.workspace = own;
  attention_forward(args, runtime);
  EXPECT_EQ(ledger.num_allocations, 0);
}

TEST(Allocator, GetsItsMemoryBackFromACallThatIsRefused) {
  Ledger ledger;
  Runtime runtime(1);
  runtime.set_allocator(ledger.allocator());
  Call call;
  AttentionForward args = call.forward();
  args.out = args.q;  // overlaps: found when the plan is there
  EXPECT_THROW(attention_forward(args, runtime), InvalidArgument);
  EXPECT_TRUE(ledger.lent.empty());
}

TEST(Allocator, WithoutMemoryRefusesTheCallAndWritesNothing) {
  Ledger ledger;
  ledger.most = 1;
  Runtime runtime(1);
  runtime.set_allocator(ledger.allocator());
  Call call;
  const std::vector<float> before = call.out;
  EXPECT_THROW(attention_forward(call.forward(), runtime), std::bad_alloc);
  EXPECT_EQ(call.out, before);
  runtime.set_allocator({});
  attention_forward(call.forward(), runtime);
  EXPECT_EQ(ledger.num_allocations, 0);
}

TEST(Allocator, OfAKindOfDeviceIsAskedForThatKindAlone) {
  Ledger host, cuda;
  Runtime runtime(1);
  runtime.set_allocator(Device::Kind::cuda, cuda.allocator());
  Call call;
  attention_forward(call.forward(), runtime);
  runtime.set_allocator(Device::Kind::cpu, host.allocator());
  attention_forward(call.forward(), runtime);
  EXPECT_EQ(host.num_allocations, 1);
  runtime.set_allocator(Device::Kind::cpu, {});
  attention_forward(call.forward(), runtime);
  EXPECT_EQ(host.num_allocations, 1);
  EXPECT_EQ(cuda.num_allocations, 0);
}

TEST(Allocator, HasBothFunctionsOrNeither) {
  Ledger ledger;
  Runtime runtime(1);
  Allocator half = ledger.allocator();
  half.deallocate = nullptr;
  EXPECT_THROW(runtime.set_allocator(half), InvalidArgument);
}

}  // namespace
}  // namespace fovea::testing
