// The spec of Blackwell's forward kernel, and where things lie in its shared memory and its tensor memory.
#pragma once

#include "shared/element.h"
#include "shared/forward_spec.h"
#include "shared/types.h"

namespace fovea::cuda {

/// sm100/attention_forward: what sm90/attention_forward asks of its spec, for one or two groups of 128 rows.
struct Sm100ForwardSpec : Sm90ForwardSpec {
  // Of each 16 keys, so many have their power of 2 from a polynomial and not from ex2: where that unit would be the
  // bound.
  std::int32_t polynomial_keys = 0;
  // Scores that take the place of P wait until P has been multiplied, as the ISA's text asks for. Else they are issued
  // behind that product, by the same thread: tensor cores execute in the order of issue, but no text says so.
  bool awaits_sums = false;

  bool operator==(const Sm100ForwardSpec&) const = default;
};

inline constexpr std::int32_t kSm100MostGroups = 2;
inline constexpr std::int32_t kSm100GroupRows =
    128;  // lanes of tensor memory, and threads of a group
constexpr std::int32_t sm100_groups(const Sm100ForwardSpec& spec) {
  return spec.tile_q / kSm100GroupRows;
}
inline constexpr std::int32_t kSm100Columns = 512;  // of tensor memory, all of which a CTA takes

/// Columns of tensor memory, 32 bits each, of a group: those of group g begin so many further on.
struct Sm100TensorLayout {
  std::int32_t s, s_step;  // scores, f32
  std::int32_t p, p_step;  // probabilities, two to a column
  std::int32_t o, o_step;  // sums, f32
  bool is_p_over_s;        // else they have columns of their own
  std::int32_t columns;
};

constexpr Sm100TensorLayout sm100_tensor_layout(const Sm100ForwardSpec& spec) {
  const std::int32_t groups = sm100_groups(spec);
  Sm100TensorLayout at{};
  at.s_step = spec.tile_kv;
  at.o = groups * at.s_step;
  at.o_step = spec.head_dim_v;
  const std::int32_t end = at.o + groups * at.o_step;
  const std::int32_t p_columns = spec.tile_kv / 2;
  at.is_p_over_s = end + groups * p_columns > kSm100Columns;
  at.p = at.is_p_over_s ? at.s : end;
  at.p_step = at.is_p_over_s ? at.s_step : p_columns;
  at.columns = at.is_p_over_s ? end : end + groups * p_columns;
  return at;
}

/// Shared memory: that of Hopper's kernel as far as the same roles read it, with O in nobody's place: it goes from
/// registers to memory.
struct Sm100ForwardLayout : Sm90ForwardLayout {
  std::int32_t s_full, p_full, sums_done;  // [group] barriers of 8 bytes
  std::int32_t tensor_memory;              // where that begins
  std::int32_t slots_read;                 // [computing warp] how many so far
};

constexpr Sm100ForwardLayout sm100_forward_layout(const Sm100ForwardSpec& spec) {
  SharedRoom room;
  Sm100ForwardLayout at{};
  at.num_slots = sm90_posts_place(spec) ? 3 : 2;
  at.slot_bytes = sm90_posts_place(spec) ? 32 : 16;
  const std::int32_t bytes = element_bytes(spec.element);
  const std::int32_t groups = sm100_groups(spec);
  const std::int32_t queries = spec.q_stages * groups;
  at.q_bytes = kSm100GroupRows * bytes * spec.head_dim_qk;
  at.q = room.take(queries * at.q_bytes);
  at.k = room.take(spec.stages * spec.tile_kv * bytes * spec.head_dim_qk);
  at.v = room.take(spec.stages * spec.tile_kv * bytes * spec.head_dim_v);
  at.q_full = room.take(8 * queries);
  at.q_empty = room.take(8 * queries);
  at.o_full = room.take(8 * groups);
  at.s_full = room.take(8 * groups);
  at.p_full = room.take(8 * groups);
  at.sums_done = room.take(8 * groups);
  take_schedule(room, spec.stages, at);
  at.kv_tiles = room.take(8 * spec.stages);
  at.pages = room.take(4 * sm90_page_words(spec));
  at.redo_list = room.take(4 * 2);
  at.pass = room.take(4);
  at.needs_low = room.take(4);
  at.ids = room.take(4 * 4);
  at.tensor_memory = room.take(4);
  at.slots_read = room.take(4 * 4 * groups);
  at.bytes = room.end;
  return at;
}

}  // namespace fovea::cuda
