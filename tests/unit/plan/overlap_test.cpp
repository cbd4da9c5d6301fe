// Every output of every operation, moved onto every input and onto every other output, is refused by both names. Lists
// of a test here are written by hand, from the headers.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fovea/jvp.hpp"

#include "problem/backward.hpp"
#include "problem/decode.hpp"
#include "problem/double_backward.hpp"
#include "problem/jvp.hpp"
#include "unit/problem/problems.hpp"

namespace fovea::testing {
namespace {

// Every tensor of a call has a place of its own here, zeros: lengths, slots, pages and offsets that are all in range.
constexpr std::size_t kRoom = 1024;  // bytes: more than any tensor below
alignas(64) std::array<std::byte, 64 * kRoom> memory{};

// Of every tensor below. Checks read nothing at addresses of a GPU, so `memory` serves as both.
Device device = Device::cpu();

TensorSpec placed(Dtype dtype, const std::vector<std::int64_t>& shape) {
  TensorSpec spec = spec_of(dtype, shape);
  spec.device = device;
  return spec;
}

std::byte* place(int index) { return memory.data() + static_cast<std::size_t>(index) * kRoom; }

template <typename Args>
struct Moved {
  std::string name;
  std::function<void(Args&, std::byte*)> move;
};

/// What a call reads and what it writes, each by its name in refusals.
template <typename Args>
struct Call {
  std::vector<Moved<Args>> inputs{}, outputs{};
  std::function<std::string(const Args&)> refusal_of{};
};

/// Moves a tensor that `find` finds in the arguments and that has this shape.
template <typename Args, typename Find>
Moved<Args> tensor(std::string name, Dtype dtype, const std::vector<std::int64_t>& shape,
                   const Find& find) {
  return {std::move(name), [=](Args& args, std::byte* to) {
            find(args) = TensorView(static_cast<void*>(to), placed(dtype, shape));
          }};
}

template <typename Args>
void expect_every_overlap_refused(const Call<Args>& call) {
  Args args;
  int next = 0;
  for (const auto* list : {&call.inputs, &call.outputs}) {
    for (const Moved<Args>& each : *list) each.move(args, place(next++));
  }
  EXPECT_EQ(call.refusal_of(args), "(not refused)");
  const auto refused = [&](const Moved<Args>& moved, int to) {
    Args changed = args;
    moved.move(changed, place(to));
    return call.refusal_of(changed);
  };
  const int num_inputs = static_cast<int>(call.inputs.size());
  for (std::size_t i = 0; i < call.outputs.size(); ++i) {
    const std::string& output = call.outputs[i].name;
    for (const Moved<Args>& input : call.inputs) {
      EXPECT_EQ(refused(input, num_inputs + static_cast<int>(i)),
                "run: " + output + " overlaps " + input.name + "; expected memory of its own");
    }
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_EQ(
          refused(call.outputs[i], num_inputs + static_cast<int>(j)),
          "run: " + output + " overlaps " + call.outputs[j].name + "; expected memory of its own");
    }
  }
}

/// "score + slopes[q_head]" and "ids[kv_idx] == 0", one of which is elsewhere.
template <typename Args, typename Find>
std::vector<Moved<Args>> captured(const Find& find_forward) {
  return {
      {"slopes",
       [=](Args& args, std::byte* to) {
         const TensorView slopes(static_cast<void*>(to), placed(Dtype::f32, {4}));
         find_forward(args).score =
             parse_score_mod("score + slopes[q_head]", {.tensors = {{"slopes", slopes}}});
       }},
      {"ids", [=](Args& args, std::byte* to) {
         const TensorView ids(static_cast<void*>(to), placed(Dtype::i32, {9}));
         find_forward(args).mask = parse_mask_mod("ids[kv_idx] == 0", {.tensors = {{"ids", ids}}});
       }}};
}

template <typename Args>
void append(std::vector<Moved<Args>>& list, const std::vector<Moved<Args>>& more) {
  list.insert(list.end(), more.begin(), more.end());
}

/// All that a packed forward call reads: three sequences in 7 and 9 rows.
template <typename Args, typename Find>
std::vector<Moved<Args>> forward_inputs(const Find& f) {
  std::vector<Moved<Args>> inputs = {
      tensor<Args>("q", Dtype::f32, {7, 4, 8}, [=](Args& a) -> TensorView& { return f(a).q; }),
      tensor<Args>("k", Dtype::f32, {9, 2, 8}, [=](Args& a) -> TensorView& { return f(a).k; }),
      tensor<Args>("v", Dtype::f32, {9, 2, 6}, [=](Args& a) -> TensorView& { return f(a).v; }),
      tensor<Args>("sinks", Dtype::f32, {4}, [=](Args& a) -> TensorView& { return f(a).sinks; }),
      tensor<Args>("cu_seqlens_q", Dtype::i32, {4},
                   [=](Args& a) -> TensorView& { return f(a).cu_seqlens_q; }),
      tensor<Args>("cu_seqlens_kv", Dtype::i64, {4},
                   [=](Args& a) -> TensorView& { return f(a).cu_seqlens_kv; })};
  append(inputs, captured<Args>(f));
  return inputs;
}

template <typename Args, typename Find>
std::vector<Moved<Args>> out_and_lse(const Find& f) {
  return {
      tensor<Args>("out", Dtype::f32, {7, 4, 6}, [=](Args& a) -> TensorView& { return f(a).out; }),
      tensor<Args>("lse", Dtype::f32, {4, 7}, [=](Args& a) -> TensorView& { return f(a).lse; })};
}

/// Of an operation that GPUs have too: arguments there are accepted and refused as here.
template <typename Args>
void expect_every_overlap_refused_everywhere(const Call<Args>& call) {
  for (const Device each : {Device::cuda(0), Device::cpu()}) {
    device = each;
    expect_every_overlap_refused(call);
  }
}

template <typename Args, typename Find>
Moved<Args> workspace(const Find& find) {
  return {"workspace",
          [=](Args& args, std::byte* to) { find(args).workspace = std::span(to, kRoom); }};
}

TEST(Overlap, OfEverythingInAForwardCall) {
  using Args = AttentionForward;
  const auto self = [](Args& args) -> Args& { return args; };
  Call<Args> call{.inputs = forward_inputs<Args>(self), .outputs = out_and_lse<Args>(self)};
  call.outputs.push_back(tensor<Args>("row_max", Dtype::f32, {4, 7},
                                      [](Args& a) -> TensorView& { return a.row_max; }));
  call.outputs.push_back(workspace<Args>(self));
  call.refusal_of = [](const Args& args) {
    return refusal([&] { validate_arguments(validate(problem_of(args), "plan"), args, "run"); });
  };
  expect_every_overlap_refused_everywhere(call);
}

TEST(Overlap, OfEverythingInABackwardCall) {
  using Args = AttentionBackward;
  const auto self = [](Args& args) -> Args& { return args; };
  const auto forward = [](Args& args) -> AttentionForward& { return args.forward; };
  Call<Args> call{.inputs = forward_inputs<Args>(forward)};
  append(call.inputs, out_and_lse<Args>(forward));
  append(
      call.inputs,
      {tensor<Args>("dout", Dtype::f32, {7, 4, 6}, [](Args& a) -> TensorView& { return a.dout; }),
       tensor<Args>("dlse", Dtype::f32, {4, 7}, [](Args& a) -> TensorView& { return a.dlse; })});
  call.outputs = {
      tensor<Args>("dq", Dtype::f32, {7, 4, 8}, [](Args& a) -> TensorView& { return a.dq; }),
      tensor<Args>("dk", Dtype::f32, {9, 2, 8}, [](Args& a) -> TensorView& { return a.dk; }),
      tensor<Args>("dv", Dtype::f32, {9, 2, 6}, [](Args& a) -> TensorView& { return a.dv; }),
      tensor<Args>("dsinks", Dtype::f32, {4}, [](Args& a) -> TensorView& { return a.dsinks; }),
      {"slopes",
       [](Args& args, std::byte* to) {
         const TensorView dslopes(static_cast<void*>(to), placed(Dtype::f32, {4}));
         args.dcaptured = {{"slopes", dslopes}};
       }},
      workspace<Args>(self)};
  call.refusal_of = [](const Args& args) {
    return refusal([&] { validate_arguments(validate(problem_of(args), "plan"), args, "run"); });
  };
  expect_every_overlap_refused_everywhere(call);
}

TEST(Overlap, OfEverythingInADoubleBackwardCall) {
  using Args = AttentionDoubleBackward;
  const auto forward = [](Args& args) -> AttentionForward& { return args.backward.forward; };
  Call<Args> call{.inputs = forward_inputs<Args>(forward)};
  append(
      call.inputs,
      {tensor<Args>("dout", Dtype::f32, {7, 4, 6},
                    [](Args& a) -> TensorView& { return a.backward.dout; }),
       tensor<Args>("dlse", Dtype::f32, {4, 7},
                    [](Args& a) -> TensorView& { return a.backward.dlse; }),
       tensor<Args>("ddq", Dtype::f32, {7, 4, 8}, [](Args& a) -> TensorView& { return a.ddq; }),
       tensor<Args>("ddk", Dtype::f32, {9, 2, 8}, [](Args& a) -> TensorView& { return a.ddk; }),
       tensor<Args>("ddv", Dtype::f32, {9, 2, 6}, [](Args& a) -> TensorView& { return a.ddv; })});
  call.outputs = {tensor<Args>("grad_dout", Dtype::f32, {7, 4, 6},
                               [](Args& a) -> TensorView& { return a.grad_dout; }),
                  tensor<Args>("grad_dlse", Dtype::f32, {4, 7},
                               [](Args& a) -> TensorView& { return a.grad_dlse; }),
                  tensor<Args>("grad_q", Dtype::f32, {7, 4, 8},
                               [](Args& a) -> TensorView& { return a.grad_q; }),
                  tensor<Args>("grad_k", Dtype::f32, {9, 2, 8},
                               [](Args& a) -> TensorView& { return a.grad_k; }),
                  tensor<Args>("grad_v", Dtype::f32, {9, 2, 6},
                               [](Args& a) -> TensorView& { return a.grad_v; })};
  static std::array<std::byte, kRoom> out;
  call.refusal_of = [](Args args) {
    args.backward.forward.out =
        TensorView(static_cast<const void*>(out.data()), placed(Dtype::f32, {7, 4, 6}));
    return refusal([&] {
      validate_arguments(validate(problem_of(args.backward.forward), "plan"), args, "run");
    });
  };
  expect_every_overlap_refused(call);
}

TEST(Overlap, OfEverythingInAJvpCall) {
  using Args = AttentionJvp;
  const auto forward = [](Args& args) -> AttentionForward& { return args.forward; };
  Call<Args> call{.inputs = forward_inputs<Args>(forward)};
  append(call.inputs, {tensor<Args>("q_tangent", Dtype::f32, {7, 4, 8},
                                    [](Args& a) -> TensorView& { return a.q_tangent; }),
                       tensor<Args>("k_tangent", Dtype::f32, {9, 2, 8},
                                    [](Args& a) -> TensorView& { return a.k_tangent; }),
                       tensor<Args>("v_tangent", Dtype::f32, {9, 2, 6},
                                    [](Args& a) -> TensorView& { return a.v_tangent; }),
                       tensor<Args>("sinks_tangent", Dtype::f32, {4},
                                    [](Args& a) -> TensorView& { return a.sinks_tangent; }),
                       {"slopes", [](Args& args, std::byte* to) {
                          const TensorView tangent(static_cast<void*>(to), placed(Dtype::f32, {4}));
                          args.captured_tangents = {{"slopes", tangent}};
                        }}});
  call.outputs = out_and_lse<Args>(forward);
  append(call.outputs, {tensor<Args>("out_tangent", Dtype::f32, {7, 4, 6},
                                     [](Args& a) -> TensorView& { return a.out_tangent; }),
                        tensor<Args>("lse_tangent", Dtype::f32, {4, 7},
                                     [](Args& a) -> TensorView& { return a.lse_tangent; })});
  call.refusal_of = [](const Args& args) {
    return refusal([&] { validate_arguments(validate(problem_of(args), "plan"), args, "run"); });
  };
  expect_every_overlap_refused_everywhere(call);
}

/// What a call over a cache reads beside the cache: a batch of one, two pages of four rows, one new token.
std::vector<Moved<AttentionDecode>> decode_inputs() {
  using Args = AttentionDecode;
  const auto self = [](Args& args) -> Args& { return args; };
  const auto rotary = [](Args& args) -> Rotary& {
    if (!args.rotary) args.rotary.emplace();
    return *args.rotary;
  };
  std::vector<Moved<Args>> inputs = {
      tensor<Args>("q", Dtype::f32, {1, 1, 4, 8}, [](Args& a) -> TensorView& { return a.q; }),
      tensor<Args>("sinks", Dtype::f32, {4}, [](Args& a) -> TensorView& { return a.sinks; })};
  append(inputs, captured<Args>(self));
  append(inputs, {tensor<Args>("append.k", Dtype::f32, {1, 1, 2, 8},
                               [](Args& a) -> TensorView& { return a.append.k; }),
                  tensor<Args>("append.v", Dtype::f32, {1, 1, 2, 6},
                               [](Args& a) -> TensorView& { return a.append.v; }),
                  tensor<Args>("rotary.cos", Dtype::f32, {9, 4},
                               [=](Args& a) -> TensorView& { return rotary(a).cos; }),
                  tensor<Args>("rotary.sin", Dtype::f32, {9, 4},
                               [=](Args& a) -> TensorView& { return rotary(a).sin; }),
                  tensor<Args>("rotary.positions", Dtype::i32, {1, 1},
                               [=](Args& a) -> TensorView& { return rotary(a).positions; }),
                  tensor<Args>("cache.seqlens", Dtype::i32, {1},
                               [](Args& a) -> TensorView& { return a.cache.seqlens; }),
                  tensor<Args>("cache.left_padding", Dtype::i64, {1},
                               [](Args& a) -> TensorView& { return a.cache.left_padding; })});
  return inputs;
}

std::vector<Moved<AttentionDecode>> caches() {
  using Args = AttentionDecode;
  return {tensor<Args>("cache.k", Dtype::f32, {2, 4, 2, 8},
                       [](Args& a) -> TensorView& { return a.cache.k; }),
          tensor<Args>("cache.v", Dtype::f32, {2, 4, 2, 6},
                       [](Args& a) -> TensorView& { return a.cache.v; })};
}

Moved<AttentionDecode> slots(bool is_paged) {
  using Args = AttentionDecode;
  if (!is_paged) {
    return tensor<Args>("cache.batch_idx", Dtype::i32, {1},
                        [](Args& a) -> TensorView& { return a.cache.batch_idx; });
  }
  return tensor<Args>("cache.page_table", Dtype::i32, {1, 2},
                      [](Args& a) -> TensorView& { return a.cache.page_table; });
}

std::string refusal_of_decode(const AttentionDecode& args) {
  return refusal([&] {
    validate_cache(args.cache, args.append, args.rotary, 1, "run");
    const ForwardProblem f =
        validate_decode_problem(decode_problem(args, 8, 1, "run"), cache_layout(args), "run");
    validate_decode(f, args, "run");
  });
}

TEST(Overlap, OfEverythingInADecodeCall) {
  using Args = AttentionDecode;
  const auto self = [](Args& args) -> Args& { return args; };
  for (const bool is_paged : {false, true}) {
    Call<Args> call{.inputs = decode_inputs()};
    call.inputs.push_back(slots(is_paged));
    append(call.inputs, caches());
    call.outputs = {
        tensor<Args>("out", Dtype::f32, {1, 1, 4, 6}, [](Args& a) -> TensorView& { return a.out; }),
        tensor<Args>("lse", Dtype::f32, {1, 4, 1}, [](Args& a) -> TensorView& { return a.lse; }),
        workspace<Args>(self)};
    call.refusal_of = refusal_of_decode;
    expect_every_overlap_refused_everywhere(call);
  }
}

TEST(Overlap, OfACacheThatIsAppendedTo) {
  using Args = AttentionDecode;
  for (const bool is_paged : {false, true}) {
    Call<Args> call{.inputs = decode_inputs()};
    call.inputs.push_back(slots(is_paged));
    call.outputs = caches();
    call.refusal_of = [](Args args) {
      static std::array<std::byte, kRoom> out;
      args.out = TensorView(static_cast<void*>(out.data()), placed(Dtype::f32, {1, 1, 4, 6}));
      return refusal_of_decode(args);
    };
    expect_every_overlap_refused_everywhere(call);
    // Without attention.
    std::erase_if(call.inputs,
                  [](const Moved<Args>& each) { return each.name.find('.') == std::string::npos; });
    call.refusal_of = [](const Args& args) {
      return refusal([&] {
        validate_cache(args.cache, args.append, args.rotary, 1, "run");
        validate_append(args.cache, args.append, args.rotary, "run");
      });
    };
    expect_every_overlap_refused_everywhere(call);
  }
}

}  // namespace
}  // namespace fovea::testing
