// Problems of sm90/attention_forward whose masks select pieces of the score matrix by a table: see forward_cases.hpp.
#include <utility>

#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

/// Four row tiles of 64 and five of 64 keys, the last ones cut; two heads, each with a selection of its own.
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

/// sel[q_head, row, column] of pieces that cover 512 x 512 positions and more: three of seven, in no order, and none in
/// the second row of the first head.
Case selecting(Case problem, const char* mask, std::int64_t piece) {
  const std::int64_t pieces = 512 / piece;
  const TensorView table =
      problem.capture(Dtype::boolean, {2, pieces, pieces}, [=](std::int64_t i) {
        const std::int64_t row = i / pieces;
        return double(row != 1 && (i * 5 + i / 3) % 7 < 3);
      });
  problem.mask = parse_mask_mod(mask, {.tensors = {{"sel", table}}});
  return problem;
}

}  // namespace

std::vector<Case> hopper_selection_cases() {
  constexpr const char* kPiecesOf64 = "sel[q_head, q_idx // 64, kv_idx // 64]";
  Case plain = selecting(base_case("hopper_selected_d128", 128), kPiecesOf64, 64);
  plain.has_sinks = true;
  // Three CTAs on an SM; tiles on the diagonal are partial, and infinities have row tiles computed again.
  Case causal_too = selecting(base_case("hopper_selected_causal_d64", 64),
                              "sel[q_head, q_idx // 64, kv_idx // 64] && kv_idx <= q_idx + 65", 64);
  causal_too.has_infinite_values = true;
  // Tiles of 64 x 32, in which four pieces meet.
  Case fine = selecting(base_case("hopper_selected_fine", 128),
                        "sel[q_head, q_idx // 32, kv_idx // 16]", 16);
  fine.score = softcap(3);
  // Two groups, tiles of 128 x 64.
  Case tall = selecting(base_case("hopper_selected_tall", 128),
                        "sel[q_head, q_idx // 128, kv_idx // 64]", 64);
  Case packed = selecting(base_case("hopper_selected_packed", 128), kPiecesOf64, 64);
  packed.sequences = {{150, 270}, {0, 3}, {70, 130}};
  // Keys that the cache has no room for (sectioned_hopper): row tiles wait for those of the wave before.
  Case waves = selecting(base_case("hopper_selected_waves", 128), kPiecesOf64, 64);
  waves.seqlen_kv = 530;
  Case dropped = selecting(base_case("hopper_selected_dropout", 64), kPiecesOf64, 64);
  dropped.dropout = kSomeDropped;
  return {plain, causal_too, fine, tall, packed, waves, dropped};
}

}  // namespace fovea::testing
