#include "input_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <initializer_list>

#include "failure.hpp"
#include "problem/forward.hpp"

namespace fovea::tools {
namespace {

std::string_view axes(Layout layout) {
  constexpr std::string_view kAxes[] = {"[batch, seqlen, heads, head_dim]",
                                        "[batch, heads, seqlen, head_dim]",
                                        "[total, heads, head_dim]"};
  return kAxes[static_cast<int>(layout)];
}

[[noreturn]] void refuse(const Array& array, const std::string& expected) {
  bad_input(
      fmt::format("{}: holds {}; expected {}", array.source, to_string(array.spec), expected));
}

void check_dtype(const Array& array, std::initializer_list<Dtype> allowed,
                 std::string_view expected) {
  if (array && std::ranges::find(allowed, array.spec.dtype) == allowed.end())
    refuse(array, std::string(expected));
}

void check_segments(const AttentionOptions& options, const Inputs& inputs) {
  if (!inputs.segments_q) return;
  const auto at = static_cast<std::size_t>(sequence_axis(options.layout));
  for (const auto& [ids, rows] :
       {std::pair{&inputs.segments_q, &inputs.q}, std::pair{&inputs.segments_kv, &inputs.k}}) {
    check_dtype(*ids, {Dtype::i32, Dtype::i64}, "int32 or int64");
    const bool is_packed = options.layout == Layout::thd;
    const int rank = is_packed ? 1 : 2;
    const std::int64_t batch = rows->spec.shape[0], seqlen = rows->spec.shape[at];
    const bool fits = ids->spec.rank == rank &&
                      ids->spec.shape[static_cast<std::size_t>(rank - 1)] == seqlen &&
                      (is_packed || ids->spec.shape[0] == batch);
    if (fits) continue;
    refuse(*ids, is_packed ? fmt::format("[{}] (total)", seqlen)
                           : fmt::format("[{}, {}] (batch, seqlen)", batch, seqlen));
  }
}

/// A tensor of up to four axes, matched from the right with [batch, num_heads_q, seqlen_q, seqlen_kv].
void check_broadcast(const Array& array, const std::array<std::int64_t, 4>& full) {
  if (!array) return;
  const auto rank = static_cast<std::size_t>(array.spec.rank);
  bool fits = rank >= 2 && rank <= 4;
  for (std::size_t i = 0; fits && i < rank; ++i) {
    const std::int64_t extent = array.spec.shape[rank - 1 - i];
    fits = extent == full[3 - i] || extent == 1;
  }
  if (!fits) {
    refuse(array, fmt::format("[{}, {}, {}, {}], extents of 1, or without leading axes", full[0],
                              full[1], full[2], full[3]));
  }
}

void check_alibi(const Array& slopes, std::int64_t batch, std::int64_t num_heads_q) {
  if (!slopes) return;
  const auto& shape = slopes.spec.shape;
  const bool fits = (slopes.spec.rank == 1 && shape[0] == num_heads_q) ||
                    (slopes.spec.rank == 2 && shape[0] == batch && shape[1] == num_heads_q);
  if (!fits)
    refuse(slopes, fmt::format("[{}] (num_heads_q) or [{}, {}]", num_heads_q, batch, num_heads_q));
}

void check_sinks(const Array& sinks, std::int64_t num_heads_q) {
  if (!sinks) return;
  if (sinks.spec.dtype != Dtype::f32 || sinks.spec.rank != 1 || sinks.spec.shape[0] != num_heads_q)
    refuse(sinks, fmt::format("f32 [{}] (num_heads_q)", num_heads_q));
}

void check_offsets_shape(const Array& offsets) {
  check_dtype(offsets, {Dtype::i32, Dtype::i64}, "int32 or int64");
  if (offsets.spec.rank != 1 || offsets.spec.shape[0] < 1)
    refuse(offsets, "[sequences + 1]: where each sequence begins, and where the last one ends");
}

void check_offsets(const Array& offsets, std::int64_t total) {
  const auto refuse_entry = [&](std::int64_t i, std::int64_t entry, const std::string& expected) {
    bad_input(fmt::format("{}: entry {} is {}; expected {}", offsets.source, i, entry, expected));
  };
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < offsets.spec.shape[0]; ++i) {
    const std::int64_t entry = cu_seqlen(offsets.view(), i);
    if (i == 0 && entry != 0) refuse_entry(i, entry, "0");
    if (entry < before)
      refuse_entry(i, entry, fmt::format("at least {}, the entry before it", before));
    if (entry > total) refuse_entry(i, entry, fmt::format("at most {}, the packed rows", total));
    before = entry;
  }
}

void check_cu_seqlens(const Inputs& inputs) {
  const Array &q = inputs.cu_seqlens_q, &kv = inputs.cu_seqlens_kv;
  if (!q || !kv) return;
  check_offsets_shape(q);
  check_offsets_shape(kv);
  const std::int64_t of_q = q.spec.shape[0], of_kv = kv.spec.shape[0];
  if (of_q != of_kv) {
    const bool is_q =
        of_q < of_kv;  // one entry is no sequence: more likely the wrong file than the longer one
    refuse(is_q ? q : kv, fmt::format("{} entries, as {} holds", std::max(of_q, of_kv),
                                      is_q ? kv.source : q.source));
  }
  check_offsets(q, inputs.q.spec.shape[0]);
  check_offsets(kv, inputs.k.spec.shape[0]);
}

}  // namespace

void check_input(const AttentionOptions& options, std::string_view tensor, const Array& array) {
  check_dtype(array, {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::e4m3}, "f32, f16, bf16 or e4m3");
  if (options.dtype && array.spec.dtype != *options.dtype) {
    bad_input(fmt::format("--dtype: is {}, but {} ({}) holds {}", fovea::name(*options.dtype),
                          tensor, array.source, to_string(array.spec)));
  }
  const int rank = options.layout == Layout::thd ? 3 : 4;
  if (array.spec.rank != rank) {
    refuse(array, fmt::format("rank {}, {} (--layout {})", rank, axes(options.layout),
                              name(options.layout)));
  }
}

void check_related(const AttentionOptions& options, const Inputs& inputs) {
  const Array &q = inputs.q, &k = inputs.k, &v = inputs.v;
  const auto batch = std::size_t{0};
  const auto seq = static_cast<std::size_t>(sequence_axis(options.layout));
  const auto heads = static_cast<std::size_t>(head_axis(options.layout));
  const auto dim = static_cast<std::size_t>(q.spec.rank - 1);
  const auto check_same = [&](const Array& array, std::size_t axis, std::string_view what,
                              const Array& other) {
    const std::int64_t extent = other.spec.shape[axis];
    if (array.spec.shape[axis] != extent)
      refuse(array, fmt::format("{} {}, as {} has", what, extent, other.source));
  };
  for (const Array* array : {&k, &v}) {
    if (array->spec.dtype != q.spec.dtype)
      refuse(*array, fmt::format("{}, as {} has", fovea::name(q.spec.dtype), q.source));
    if (options.layout != Layout::thd) check_same(*array, batch, "batch", q);
  }
  check_same(k, dim, "head_dim", q);
  check_same(v, seq, options.layout == Layout::thd ? "total" : "seqlen", k);
  check_same(v, heads, "num_heads_kv", k);
  const std::int64_t num_heads_q = q.spec.shape[heads], num_heads_kv = k.spec.shape[heads];
  if (num_heads_kv > 0 && num_heads_q % num_heads_kv != 0) {
    refuse(k, fmt::format("a number of heads that divides {}, the heads of {}", num_heads_q,
                          q.source));
  }
}

void check_side_tensors(const AttentionOptions& options, const Inputs& inputs) {
  check_cu_seqlens(inputs);
  check_segments(options, inputs);
  const auto& q = inputs.q.spec.shape;
  const auto seq = static_cast<std::size_t>(sequence_axis(options.layout));
  const std::int64_t num_heads_q = q[static_cast<std::size_t>(head_axis(options.layout))];
  const bool is_packed = options.layout == Layout::thd;
  const std::int64_t batch = !is_packed            ? q[0]
                             : inputs.cu_seqlens_q ? inputs.cu_seqlens_q.spec.shape[0] - 1
                                                   : 0;
  const std::array full{batch, num_heads_q, q[seq], inputs.k.spec.shape[seq]};
  const std::initializer_list<Dtype> floats = {Dtype::f32, Dtype::f16, Dtype::bf16};
  check_broadcast(inputs.bias, full);
  check_dtype(inputs.bias, floats, "f32, f16 or bf16");
  check_broadcast(inputs.mask, full);
  check_dtype(inputs.mask, {Dtype::boolean, Dtype::u8}, "bool or uint8");
  check_alibi(inputs.alibi, batch, num_heads_q);
  check_dtype(inputs.alibi, floats, "f32, f16 or bf16");
  check_sinks(inputs.sinks, num_heads_q);
}

}  // namespace fovea::tools
