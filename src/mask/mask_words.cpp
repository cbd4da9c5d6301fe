// The mask words. Each is an ordinary formula; sizes are run-time scalars, so changing a value changes no structure.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "mask/word_arguments.hpp"

namespace fovea {
namespace {

using mask::check_at_least;
using mask::check_tensor;
using mask::kLongestDistance;

Expr distance(std::string name, std::int64_t value) {
  return scalar(CapturedScalar::of(std::move(name), std::min(value, kLongestDistance)));
}

void check_segments(const TensorView& segments, std::string_view argument) {
  check_tensor(segments, {.word = "documents",
                          .argument = argument,
                          .ranks = {2},
                          .dtypes = {Dtype::i32, Dtype::i64},
                          .shape = "[batch, seqlen]"});
}

MaskMod same_document(const Expr& document_q, const Expr& document_kv) {
  return MaskMod(document_q == document_kv && document_q != -1);
}

Captured of_documents(std::string name, const TensorView& view, std::initializer_list<Axis> axes) {
  return mask::capture_for("documents", std::move(name), view, axes);
}

MaskMod same_document(const Captured& segments_q, const Captured& segments_kv) {
  const Arguments x = arguments();
  return same_document(segments_q(x.batch, x.q_idx), segments_kv(x.batch, x.kv_idx));
}

void check_list(const TensorView& list, std::string_view argument, std::string_view shape) {
  check_tensor(list, {.word = "documents",
                      .argument = argument,
                      .ranks = {1},
                      .dtypes = {Dtype::i32, Dtype::i64},
                      .shape = shape});
}

/// A list for each side, captured once where one serves both.
struct Sides {
  Captured q, kv;
};
struct AxesOfSides {
  Axis q, kv, both;
};
Sides sides(const std::string& name, const TensorView& of_queries, const TensorView& of_keys,
            const AxesOfSides& axes) {
  const bool is_one = !of_keys || of_keys == of_queries;
  const Captured q = of_documents(name + "_q", of_queries, {is_one ? axes.both : axes.q});
  if (is_one) return {q, q};
  return {q, of_documents(name + "_kv", of_keys, {axes.kv})};
}

}  // namespace

Expr aligned_q_idx(Align align) {
  const Arguments x = arguments();
  return align == Align::top_left ? x.q_idx : x.q_idx + (x.seqlen_kv - x.seqlen_q);
}

// The default of attention_decode, and what most calls through C pose anew each time: made once, which costs 4 us.
MaskMod causal(Align align) {
  static const MaskMod kBottomRight(arguments().kv_idx <= aligned_q_idx(Align::bottom_right));
  static const MaskMod kTopLeft(arguments().kv_idx <= aligned_q_idx(Align::top_left));
  return align == Align::bottom_right ? kBottomRight : kTopLeft;
}

MaskMod window(std::optional<std::int64_t> left, std::optional<std::int64_t> right, Align align) {
  constexpr std::string_view kHint = ", or nullopt for an unbounded side";
  if (left) check_at_least("window", "left", *left, 0, kHint);
  if (right) check_at_least("window", "right", *right, 0, kHint);
  const Expr kv_idx = arguments().kv_idx;
  const Expr pos = aligned_q_idx(align);
  MaskMod visible;
  if (left) visible = MaskMod(kv_idx >= pos - distance("window_left", *left));
  if (!right) return visible;
  const MaskMod right_side(kv_idx <= pos + distance("window_right", *right));
  return left ? visible && right_side : right_side;
}

MaskMod documents(const TensorView& segments_q, const TensorView& segments_kv) {
  if (segments_q && segments_q == segments_kv) return documents(segments_q);
  check_segments(segments_q, "segments_q");
  check_segments(segments_kv, "segments_kv");
  return same_document(of_documents("segments_q", segments_q, {Axis::batch, Axis::q_idx}),
                       of_documents("segments_kv", segments_kv, {Axis::batch, Axis::kv_idx}));
}

MaskMod documents(const TensorView& segments) {
  check_segments(segments, "segments");
  const Captured both = of_documents("segments", segments, {Axis::batch, Axis::q_or_kv_idx});
  return same_document(both, both);
}

MaskMod documents(const PackedSegments& packed) {
  check_list(packed.segments_q, "segments_q", "[total_q]");
  check_list(packed.cu_seqlens_q, "cu_seqlens_q", "[num_sequences + 1]");
  if (packed.segments_kv) check_list(packed.segments_kv, "segments_kv", "[total_kv]");
  if (packed.cu_seqlens_kv) {
    check_list(packed.cu_seqlens_kv, "cu_seqlens_kv", "[num_sequences + 1]");
  } else if (packed.segments_kv) {
    check_list({}, "cu_seqlens_kv", "[num_sequences + 1]");
  }
  const Arguments x = arguments();
  const Sides segments =
      sides("segments", packed.segments_q, packed.segments_kv,
            {.q = Axis::packed_q, .kv = Axis::packed_kv, .both = Axis::packed_q_or_kv});
  constexpr AxesOfSides kOffsets{
      .q = Axis::seqlen_offset, .kv = Axis::seqlen_offset, .both = Axis::seqlen_offset};
  const Sides begins = sides("cu_seqlens", packed.cu_seqlens_q, packed.cu_seqlens_kv, kOffsets);
  return same_document(segments.q[begins.q[x.batch] + x.q_idx],
                       segments.kv[begins.kv[x.batch] + x.kv_idx]);
}

MaskMod prefix_lm(const TensorView& prefix_lengths, Align align) {
  check_tensor(prefix_lengths, {.word = "prefix_lm",
                                .argument = "prefix_lengths",
                                .ranks = {1},
                                .dtypes = {Dtype::i32, Dtype::i64},
                                .shape = "[batch]"});
  const Arguments x = arguments();
  const Captured lengths =
      mask::capture_for("prefix_lm", "prefix_lengths", prefix_lengths, {Axis::batch});
  return MaskMod(x.kv_idx < lengths[x.batch] || x.kv_idx <= aligned_q_idx(align));
}

MaskMod chunked(std::int64_t chunk_size, Align align) {
  check_at_least("chunked", "chunk_size", chunk_size, 1);
  const Expr size = distance("chunk_size", chunk_size);
  return MaskMod(floor_div(aligned_q_idx(align), size) == floor_div(arguments().kv_idx, size));
}

MaskMod dilated(std::int64_t step, Align align) {
  check_at_least("dilated", "step", step, 1);
  return MaskMod((aligned_q_idx(align) - arguments().kv_idx) % distance("step", step) == 0);
}

MaskMod tree(const TensorView& tree_bits) {
  check_tensor(tree_bits, {.word = "tree",
                           .argument = "tree_bits",
                           .ranks = {2, 3},
                           .dtypes = {Dtype::i32},
                           .shape = "[seqlen_q, words] or [batch, seqlen_q, words]"});
  const Arguments x = arguments();
  const bool is_shared = tree_bits.rank() == 2;
  const Captured bits =
      is_shared
          ? mask::capture_for("tree", "tree_bits", tree_bits, {Axis::q_idx, Axis::bits_of_keys})
          : mask::capture_for("tree", "tree_bits", tree_bits,
                              {Axis::batch, Axis::q_idx, Axis::bits_of_keys});
  const Expr first_draft = x.seqlen_kv - x.seqlen_q;
  const Expr draft = x.kv_idx - first_draft;
  const Expr word_idx = floor_div(draft, 32);
  const Expr word = is_shared ? bits(x.q_idx, word_idx) : bits(x.batch, x.q_idx, word_idx);
  return MaskMod(x.kv_idx < first_draft || ((word >> (draft % 32)) & 1) == 1);
}

MaskMod streaming(std::int64_t num_sinks, std::int64_t window_left, Align align) {
  check_at_least("streaming", "num_sinks", num_sinks, 0);
  check_at_least("streaming", "window_left", window_left, 0);
  const Expr kv_idx = arguments().kv_idx;
  const Expr pos = aligned_q_idx(align);
  const Expr is_sink = kv_idx < distance("num_sinks", num_sinks);
  const Expr is_near = kv_idx >= pos - distance("window_left", window_left);
  return MaskMod((is_sink || is_near) && kv_idx <= pos);
}

MaskMod dense_mask(const TensorView& mask) {
  check_tensor(mask, {.word = "dense_mask",
                      .argument = "mask",
                      .ranks = {2, 3, 4},
                      .dtypes = {Dtype::boolean, Dtype::u8},
                      .shape = "[q, kv], [heads, q, kv] or [batch, heads, q, kv]"});
  const Expr element = mask::load_broadcast("dense_mask", "mask", mask);
  return MaskMod(mask.dtype() == Dtype::boolean ? element : element != 0);
}

MaskMod tile_mask(const TensorView& table, std::int64_t tile_q, std::int64_t tile_kv) {
  check_at_least("tile_mask", "tile_q", tile_q, 1);
  check_at_least("tile_mask", "tile_kv", tile_kv, 1);
  check_tensor(table, {.word = "tile_mask",
                       .argument = "table",
                       .ranks = {2, 3, 4},
                       .dtypes = {Dtype::boolean, Dtype::u8},
                       .shape = "[q_tiles, kv_tiles], [heads, q_tiles, kv_tiles] or [batch, heads, "
                                "q_tiles, kv_tiles]"});
  const auto tile_of = [](const Expr& position, std::int64_t size) {
    return floor_div(position, Expr(static_cast<int>(std::min(size, kLongestDistance))));
  };
  const Arguments x = arguments();
  const Expr element = mask::load_broadcast("tile_mask", "table", table,
                                            {.q = tile_of(x.q_idx, tile_q),
                                             .kv = tile_of(x.kv_idx, tile_kv),
                                             .axis_q = Axis::any,
                                             .axis_kv = Axis::any});
  return MaskMod(table.dtype() == Dtype::boolean ? element : element != 0);
}

}  // namespace fovea
