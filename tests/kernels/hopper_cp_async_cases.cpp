// Problems of sm90/attention_forward whose tensors threads copy, since TMA cannot read them; and of f32 outputs, which
// go from registers to memory. See forward_cases.hpp.
#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

/// Two row tiles, three kv tiles of 128 keys, the last of each cut.
Case base_case(const char* label, std::int64_t head_dim) {
  Case problem = plain_case(Dtype::bf16);
  problem.label = label;
  problem.batch = 1;
  problem.seqlen_q = 205;
  problem.seqlen_kv = 270;
  problem.num_heads_q = 2;
  problem.num_heads_kv = 1;
  problem.head_dim_qk = problem.head_dim_v = head_dim;
  problem.wants_row_max = false;
  return problem;
}

}  // namespace

std::vector<Case> hopper_cp_async_cases() {
  // Strides of 0, which TMA does not have.
  Case shared = base_case("hopper_copied_shared_head", 128);
  shared.num_heads_q = shared.num_heads_kv = 2;
  shared.batch = 2;
  shared.out_layout = Layout::padded;
  shared.wants_row_max = true;
  // The last panel of each row is cut; NaN and infinity are found in the copied rows, and added to.
  Case padded = base_case("hopper_copied_padded", 72);
  padded.num_heads_kv = 2;
  padded.head_dim_v = 136;  // tiles of 96 keys
  padded.dtype = Dtype::f16;
  padded.mask = window(90, 20);
  padded.has_infinite_values = true;
  Case wide = base_case("hopper_copied_d256", 256);
  wide.num_heads_kv = 2;
  wide.mask = causal();
  wide.has_infinite_values = true;
  wide.dropout = kSomeDropped;
  Case packed = base_case("hopper_copied_packed", 72);
  packed.num_heads_kv = 2;
  packed.sequences = {{0, 0}, {1, 1}, {63, 65}, {193, 129}, {5, 0}, {192, 300}};
  packed.trailing_rows = 3;
  packed.mask = causal();
  packed.has_sinks = true;
  Case packed_f32 = base_case("hopper_copied_packed_f32_out", 128);
  packed_f32.num_heads_kv = 2;
  packed_f32.sequences = {{70, 101}, {20, 300}, {130, 140}};
  packed_f32.out_layout = Layout::odd_offset;
  packed_f32.out_dtype = Dtype::f32;
  packed_f32.mask = window(50, 20);
  std::vector<Case> cases = {shared, padded, wide, packed, packed_f32};
  for (Case& each : cases) each.layout = Layout::shared_head;
  return cases;
}

std::vector<Case> hopper_f32_out_cases() {
  Case masked = base_case("hopper_f32_out_d128", 128);
  masked.mask = causal();
  masked.has_infinite_values = true;
  masked.has_sinks = true;
  masked.out_layout = Layout::bhsd;
  Case padded = base_case("hopper_f32_out_padded", 72);
  padded.head_dim_v = 200;
  padded.out_layout = Layout::strided_dim;
  padded.wants_row_max = true;
  Case packed = base_case("hopper_f32_out_packed", 64);
  packed.sequences = {{191, 129}, {0, 70}, {193, 1}, {192, 128}};
  packed.trailing_rows = 5;
  packed.dropout = kSomeDropped;
  Case few = base_case("hopper_f32_out_rows_40", 64);
  few.seqlen_q = 20;
  few.seqlen_kv = 531;
  std::vector<Case> cases = {masked, padded, packed, few};
  for (Case& each : cases) each.out_dtype = Dtype::f32;
  return cases;
}

}  // namespace fovea::testing
