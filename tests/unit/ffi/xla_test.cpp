// The handlers as XLA calls them, over a frame made by hand.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "fovea/fovea.h"

#include "ffi/xla/frame.hpp"
#include "ffi/xla/scratch.hpp"
#include "unit/ffi/c_call.hpp"

namespace fovea::ffi::xla {

/// What XLA makes of an error.
struct Error {
  ErrorCode code;
  std::string message;
};

namespace {

using fovea::testing::SmallCall;

std::deque<Error> errors;
int num_destroyed = 0;

Error* create_error(ErrorCreate* args) {
  return &errors.emplace_back(Error{args->code, args->message});
}
void destroy_error(ErrorDestroy*) { ++num_destroyed; }
Error* give_stream(StreamGet* args) {
  args->stream = nullptr;
  return nullptr;
}
Error* refuse_stream(StreamGet*) {
  return &errors.emplace_back(Error{ErrorCode::internal, "none"});
}
Error* give_ordinal(DeviceOrdinalGet* args) {
  args->ordinal = 63;
  return nullptr;
}

/// A call of a handler; arrays are f32 unless their element type is changed.
class FrameByHand {
 public:
  explicit FrameByHand(std::string text) : text_(std::move(text)) {
    api_.error_create = create_error;
    api_.error_destroy = destroy_error;
    api_.stream_get = give_stream;
    api_.device_ordinal_get = give_ordinal;
    frame_.api = &api_;
    frame_.stage = Stage::execute;
  }

  FrameByHand(SmallCall& call, std::string text) : FrameByHand(std::move(text)) {
    operand(call.q.tensor).operand(call.k.tensor).operand(call.v.tensor).result(call.out.tensor);
  }
  FrameByHand(const FrameByHand&) = delete;
  FrameByHand& operator=(const FrameByHand&) = delete;
  ~FrameByHand() = default;

  FrameByHand& operand(const DLTensor& tensor) { return add(tensor, operands_); }
  FrameByHand& result(const DLTensor& tensor) { return add(tensor, results_); }

  Error* run(std::int32_t device = kDLCPU) {
    attribute_ = {text_.data(), text_.size()};
    frame_.attributes = {.struct_size = 0,
                         .extensions = nullptr,
                         .size = has_text ? 1 : 0,
                         .types = &string_,
                         .names = &name_,
                         .values = &value_};
    frame_.operands = buffers(operands_);
    frame_.results = buffers(results_);
    auto* const handler = reinterpret_cast<Error* (*)(Frame*)>(fovea_xla_handler(device));
    return handler(&frame_);
  }

  Frame& frame() { return frame_; }
  Api& api() { return api_; }
  Buffer& buffer(std::size_t index) { return *operands_[index]; }
  bool has_text = true;

 private:
  FrameByHand& add(const DLTensor& tensor, std::vector<Buffer*>& to) {
    to.push_back(&buffers_.emplace_back(Buffer{.struct_size = sizeof(Buffer),
                                               .extensions = nullptr,
                                               .dtype = ElementType::f32,
                                               .data = tensor.data,
                                               .rank = tensor.ndim,
                                               .dims = tensor.shape}));
    return *this;
  }

  Buffers buffers(std::vector<Buffer*>& from) {
    types_.assign(8, kBuffer);
    return {.struct_size = sizeof(Buffers),
            .extensions = nullptr,
            .size = static_cast<std::int64_t>(from.size()),
            .types = types_.data(),
            .buffers = from.data()};
  }

  std::string text_;
  Api api_{};
  Frame frame_{};
  std::deque<Buffer> buffers_;
  std::vector<Buffer*> operands_, results_;
  std::vector<std::int32_t> types_;
  std::string word_ = "call";
  Span span_{word_.data(), word_.size()}, attribute_{};
  Span* name_ = &span_;
  void* value_ = &attribute_;
  std::int32_t string_ = kString;
};

constexpr auto kForward = "operation=forward\noperand=q\noperand=k\noperand=v\nresult=out";

TEST(XlaHandler, SaysItsVersionWhereItIsRegistered) {
  for (const std::int32_t device : {kDLCPU, kDLCUDA, kDLROCM}) {
    Metadata metadata{};
    metadata.traits = 7;
    MetadataExtension extension{{sizeof(MetadataExtension), kMetadataExtension, nullptr},
                                &metadata};
    FrameByHand frame("");
    frame.frame().extensions = &extension.base;
    EXPECT_EQ(frame.run(device), nullptr);
    EXPECT_EQ(metadata.version.major, 0);
    EXPECT_EQ(metadata.version.minor, 1);
    EXPECT_EQ(metadata.traits, 0U);
  }
  EXPECT_EQ(fovea_xla_handler(9), nullptr);
}

TEST(XlaHandler, RunsInTheLastStageAlone) {
  SmallCall call;
  FrameByHand frame(call, kForward);
  for (const Stage stage : {Stage::instantiate, Stage::prepare, Stage::initialize}) {
    frame.frame().stage = stage;
    EXPECT_EQ(frame.run(), nullptr);
    EXPECT_EQ(call.out.values[0], -7.0F);
  }
}

TEST(XlaHandler, SameAsTheCAbi) {
  SmallCall expected;
  expected.args.causal = 1;
  expected.args.has_softmax_scale = 1;
  expected.args.softmax_scale = 0.75F;
  expected.args.has_window_left = 1;
  expected.args.window_left = 2;
  expected.args.score_mod = "score + 0.25 * kv_idx";
  ASSERT_EQ(fovea_attention_forward(&expected.args, nullptr), FOVEA_OK);
  const std::string numbers =
      "\ncausal=1\nhas_softmax_scale=1\nsoftmax_scale=0.75\nhas_window_left=1\nwindow_left=2";
  SmallCall call;
  for (int run = 0; run < 2; ++run) {  // a text that is new, and one that is known
    call.out.values.assign(call.out.values.size(), 0);
    EXPECT_EQ(FrameByHand(call, kForward + numbers + "\nscore=score + 0.25 * kv_idx").run(),
              nullptr);
    EXPECT_EQ(call.out.values, expected.out.values);
  }
}

TEST(XlaHandler, HeadsFirstAreTheSameArraysInAnotherOrder) {
  SmallCall expected;
  ASSERT_EQ(fovea_attention_forward(&expected.args, nullptr), FOVEA_OK);
  const auto turned = [](const fovea::testing::FloatTensor& from, fovea::testing::FloatTensor& to) {
    for (std::size_t row = 0; row < 5; ++row) {
      for (std::size_t head = 0; head < 2; ++head) {
        for (std::size_t i = 0; i < 8; ++i)
          to.values[(head * 5 + row) * 8 + i] = from.values[(row * 2 + head) * 8 + i];
      }
    }
  };
  using fovea::testing::FloatTensor;
  FloatTensor q{{1, 2, 5, 8}}, k{{1, 2, 5, 8}}, v{{1, 2, 5, 8}}, out{{1, 2, 5, 8}},
      turned_out{{1, 2, 5, 8}};
  turned(expected.q, q);
  turned(expected.k, k);
  turned(expected.v, v);
  turned(expected.out, turned_out);
  FrameByHand frame(std::string("operation=forward\nlayout=bhsd") +
                    std::string(kForward).substr(17));
  frame.operand(q.tensor).operand(k.tensor).operand(v.tensor).result(out.tensor);
  EXPECT_EQ(frame.run(), nullptr);
  EXPECT_EQ(out.values, turned_out.values);
}

struct Refused {
  const char* text;
  ErrorCode code;
  const char* message;
};

TEST(XlaHandler, ErrorsKeepKindAndMessage) {
  const Refused cases[] = {
      {"operation=forward\noperand=q\noperand=k\nresult=out", ErrorCode::invalid_argument,
       "the call has 3 operands; expected 2"},
      {"operation=sideways", ErrorCode::invalid_argument, "operation 'sideways' is not known"},
      {"operand=q", ErrorCode::invalid_argument, "names an array before its operation"},
      {"", ErrorCode::invalid_argument, "names no operation"},
      {"operation=forward\noperand=qq", ErrorCode::invalid_argument,
       "operand or result 'qq' is not known"},
      {"operation=forward\noperand=dcaptured:bias", ErrorCode::invalid_argument,
       "list 'dcaptured' is not known"},
      {"operation=forward\nhue=1", ErrorCode::invalid_argument, "line 'hue' is not known"},
      {"operation=forward\ncausal=often", ErrorCode::invalid_argument, "often stands where"},
      {"operation=forward\nscore=score +", ErrorCode::invalid_argument, "column"},
  };
  for (const Refused& refused : cases) {
    SmallCall call;
    Error* const error = FrameByHand(call, refused.text).run();
    ASSERT_NE(error, nullptr) << refused.text;
    EXPECT_EQ(error->code, refused.code) << refused.text;
    EXPECT_NE(error->message.find(refused.message), std::string::npos) << error->message;
    EXPECT_EQ(call.out.values[0], -7.0F);
  }
}

TEST(XlaHandler, RefusesWhatTheLibraryRefuses) {
  SmallCall call;
  call.k.shape[1] = 4;
  const Error* const error = FrameByHand(call, kForward).run();
  ASSERT_NE(error, nullptr);
  EXPECT_EQ(error->code, ErrorCode::invalid_argument);
  EXPECT_EQ(error->message,
            fovea::testing::outcome_of(fovea_attention_forward, &call.args).message);
}

TEST(XlaHandler, RefusesFramesThatAreNotOfFovea) {
  SmallCall call;
  FrameByHand no_text(call, kForward);
  no_text.has_text = false;
  EXPECT_NE(no_text.run()->message.find("no attribute 'call'"), std::string::npos);
  FrameByHand complex(call, kForward);
  complex.buffer(1).dtype = static_cast<ElementType>(15);
  EXPECT_NE(complex.run()->message.find("element type 15"), std::string::npos);
  FrameByHand deep(call, kForward);
  deep.buffer(0).rank = 9;
  EXPECT_NE(deep.run()->message.find("rank 9; expected at most 8"), std::string::npos);
}

TEST(XlaHandler, AGpusCallIsOfItsDeviceAndItsStream) {
  SmallCall call;
  FrameByHand frame(call, kForward);
  const Error* const no_gpu = frame.run(kDLCUDA);  // there are fewer here
  ASSERT_NE(no_gpu, nullptr);
  EXPECT_NE(no_gpu->message.find("cuda:63"), std::string::npos) << no_gpu->message;
  const Error* const none_of_amd = frame.run(kDLROCM);
  ASSERT_NE(none_of_amd, nullptr);
  EXPECT_NE(none_of_amd->message.find("rocm:63"), std::string::npos) << none_of_amd->message;
  frame.api().stream_get = refuse_stream;
  num_destroyed = 0;
  const Error* const no_stream = frame.run(kDLCUDA);
  ASSERT_NE(no_stream, nullptr);
  EXPECT_EQ(no_stream->code, ErrorCode::unavailable);
  EXPECT_EQ(num_destroyed, 1);
}

// ---- Scratch memory ----

struct Lender {
  alignas(512) std::byte memory[4096];
  std::size_t asked = 0, returned = 0;
  void* taken_back = nullptr;
};
Lender lender;

/// As XLA: at 16 bytes and no more.
Error* lend(MemoryAllocate* args) {
  if (args->alignment > 16 || args->size > 2048)
    return &errors.emplace_back(Error{ErrorCode::invalid_argument, "Unsupported"});
  lender.asked = args->size;
  args->data = lender.memory + 16;
  return nullptr;
}
Error* take_back(MemoryFree* args) {
  lender.returned = args->size;
  lender.taken_back = args->data;
  return nullptr;
}

TEST(XlaScratch, IsAlignedAsTheCallWantsAndGoesBackAsItCame) {
  FrameByHand frame("");
  frame.api().memory_allocate = lend;
  frame.api().memory_free = take_back;
  Scratch scratch(frame.frame());
  for (const std::size_t alignment : {1, 16, 256, 512}) {
    lender = {};
    void* const data = scratch.allocate(100, alignment);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % alignment, 0U);
    const auto* const begin = static_cast<std::byte*>(data);
    EXPECT_GE(begin, lender.memory + 16);
    EXPECT_LE(begin + 100, lender.memory + 16 + lender.asked);
    scratch.deallocate(data);
    EXPECT_EQ(lender.taken_back, lender.memory + 16);
    EXPECT_EQ(lender.returned, lender.asked);
    lender.taken_back = nullptr;
    scratch.deallocate(data);
    EXPECT_EQ(lender.taken_back, nullptr);
  }
}

TEST(XlaScratch, NullWhereXlaHasNone) {
  FrameByHand frame("");
  frame.api().memory_allocate = lend;
  num_destroyed = 0;
  EXPECT_EQ(Scratch(frame.frame()).allocate(4096, 256), nullptr);
  EXPECT_EQ(num_destroyed, 1);
}

}  // namespace
}  // namespace fovea::ffi::xla
