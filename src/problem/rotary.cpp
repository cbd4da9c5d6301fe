#include "problem/rotary.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <vector>

#include "core/shape.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

constexpr std::int64_t kMaxRotaryDim = 512;
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();

std::string shown(const TensorView& view) { return view ? to_string(view.spec()) : "missing"; }

class RotaryChecks {
 public:
  RotaryChecks(const ApplyRotary& args, std::string_view where)
      : args_(args), checks_(where, args.x.spec().device) {}

  void check() const {
    check_rows();
    check_angles();
    if (args_.positions && args_.offsets) {
      checks_.refuse(
          "positions is given beside offsets; expected one of them, or none: rows from 0 on");
    }
    const TensorView& x = args_.x;
    const bool is_packed = static_cast<bool>(args_.cu_seqlens);
    std::vector<std::int64_t> rows{x.size(0)};
    if (!is_packed) rows.push_back(x.size(1));
    if (args_.positions) check_indices({"positions", args_.positions}, rows);
    if (args_.offsets) check_indices({"offsets", args_.offsets}, {rotary_batch(args_)});
    check_overlap();
    if (checks_.is_host()) check_reach();
  }

 private:
  void check_rows() const {
    const bool is_packed = static_cast<bool>(args_.cu_seqlens);
    if (args_.x.rank() != (is_packed ? 3 : 4)) {
      checks_.refuse(fmt::format("x is {}; expected {}", shown(args_.x),
                                 is_packed
                                     ? "[total, num_heads, head_dim] (packed: cu_seqlens is given)"
                                     : "[batch, seqlen, num_heads, head_dim]"));
    }
    checks_.check_float({"x", args_.x}, shape_of(args_.x.spec()));
    checks_.check_float({"out", args_.out, true}, shape_of(args_.x.spec()));
    const TensorSpec& x = args_.x.spec();
    const std::int64_t heads = x.shape[static_cast<std::size_t>(x.rank - 2)];
    const std::int64_t head_dim = x.shape[static_cast<std::size_t>(x.rank - 1)];
    const std::int64_t rows = is_packed ? x.shape[0] : x.shape[0] * x.shape[1];
    for (const auto& [label, count] :
         {std::pair{"rows", rows}, {"num_heads", heads}, {"head_dim", head_dim}}) {
      if (count > kMaxRows)
        checks_.refuse(fmt::format("x has {} {}; expected at most {}", count, label, kMaxRows));
    }
    if (!is_packed) return;
    const TensorSpec& offsets = args_.cu_seqlens.spec();
    if (!is_index(offsets.dtype) || offsets.rank != 1 || offsets.shape[0] < 1) {
      checks_.refuse(
          fmt::format("cu_seqlens is {}; expected i32 or i64 [batch + 1]", to_string(offsets)));
    }
    check_packed_offsets({.name = "cu_seqlens",
                          .cu_seqlens = args_.cu_seqlens,
                          .batch = rotary_batch(args_),
                          .total = rows,
                          .longest = rows,
                          .longest_name = "the rows of x"},
                         checks_);
  }

  void check_angles() const {
    const TensorView& cos = args_.cos;
    if (cos.rank() != 2) {
      checks_.refuse(
          fmt::format("cos is {}; expected rank 2: [max_positions, rotary_dim / 2]", shown(cos)));
    }
    const std::array shape{cos.size(0), cos.size(1)};
    checks_.check_float({"cos", cos}, shape);
    checks_.check_float({"sin", args_.sin}, shape);
    const std::int64_t widest = std::min(args_.x.size(args_.x.rank() - 1), kMaxRotaryDim);
    if (cos.size(1) <= widest / 2) return;
    checks_.refuse(fmt::format("cos is {}, for a rotary_dim of 2 x {}; expected at most {}, {}",
                               shown(cos), cos.size(1), widest,
                               widest < kMaxRotaryDim ? "the head_dim of x" : "the widest head"));
  }

  void check_indices(const NamedTensor& e, const std::vector<std::int64_t>& shape) const {
    if (!is_index(e.view.dtype()) || !std::ranges::equal(shape_of(e.view.spec()), shape)) {
      checks_.refuse(fmt::format("{} is {}; expected i32 or i64 [{}]", e.name, shown(e.view),
                                 fmt::join(shape, ", ")));
    }
    checks_.check_memory(e);
  }

  void check_overlap() const {
    OverlapCheck overlap;
    const bool is_in_place =
        args_.x.data() == args_.out.data() && args_.x.spec() == args_.out.spec();
    if (!is_in_place) overlap.add_input("x", args_.x);
    overlap.add_input("cos", args_.cos);
    overlap.add_input("sin", args_.sin);
    overlap.add_input("positions", args_.positions);
    overlap.add_input("offsets", args_.offsets);
    overlap.add_input("cu_seqlens", args_.cu_seqlens);
    overlap.add_output("out", args_.out);
    overlap.refuse_overlap(checks_);
  }

  void check_reach() const {
    const SequenceRows rows = sequence_rows(args_.x, args_.cu_seqlens);
    const std::int64_t most = args_.cos.size(0);
    for (std::int64_t i = 0; i < rotary_batch(args_); ++i) {
      for (std::int64_t row = 0; row < rows.count(i); ++row) {
        // Without positions the first and the last row bound all.
        if (!args_.positions && row > 0 && row + 1 < rows.count(i)) continue;
        const std::int64_t position = rotary_position(args_, rows, {i, row});
        if (position >= 0 && position < most) continue;
        checks_.refuse(fmt::format(
            "row {} of sequence {} stands at position {}; expected 0 to {}, the rows of cos", row,
            i, position, most - 1));
      }
    }
  }

  const ApplyRotary& args_;
  const TensorChecks checks_;
};

}  // namespace

std::int64_t rotary_batch(const ApplyRotary& args) {
  return args.cu_seqlens ? args.cu_seqlens.size(0) - 1 : args.x.size(0);
}

std::int64_t rotary_position(const ApplyRotary& args, const SequenceRows& rows,
                             const SequenceRows::Token& token) {
  const auto& [sequence, index] = token;
  if (args.positions) {
    return rows.is_packed() ? index_at(args.positions, rows.begin(sequence) + index)
                            : index_at(args.positions, sequence, index);
  }
  return index + (args.offsets ? index_at(args.offsets, sequence) : 0);
}

void validate_rotary(const ApplyRotary& args, std::string_view where) {
  RotaryChecks(args, where).check();
}

}  // namespace fovea
