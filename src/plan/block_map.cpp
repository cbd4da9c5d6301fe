// Block maps as callers see them: a spec is checked, every (sequence, head) that differs is mapped once.
#include "fovea/block_map.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "core/float_environment.hpp"
#include "cpu/mask_elements.hpp"
#include "expr/passes.hpp"
#include "mask/block_map.hpp"
#include "problem/captured_tensors.hpp"
#include "problem/forward.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

using expr::Variable;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();  // programs count so far

/// Rows of tiles that are mapped, some gigabytes at most; and of all sequences and heads, those that share a map too.
constexpr std::int64_t kMostMappedRows = std::int64_t{1} << 26;
constexpr std::int64_t kMostRows = std::int64_t{1} << 31;

struct Lengths {
  std::int64_t q = 0, kv = 0;
};

/// The true index of each sequence and head of a spec, and its lengths.
struct Scope {
  std::int64_t first_sequence = 0, num_sequences = 0;
  std::int64_t first_head = 0, num_heads = 0;
  std::int64_t group = 1;
  std::vector<Lengths> lengths;  // of each packed sequence of the scope, or one of all

  const Lengths& lengths_of(std::int64_t sequence) const {
    return lengths[lengths.size() == 1 ? 0 : static_cast<std::size_t>(sequence)];
  }
};

/// What a spec must satisfy, in the name of the function that the caller called.
class SpecChecks {
 public:
  SpecChecks(const BlockMapSpec& spec, std::string_view where)
      : spec_(spec), where_(where), checks_(where) {}

  Scope scope() const {
    check_numbers();
    const std::int64_t batch = is_packed() ? check_cu_seqlens() : spec_.batch;
    check_programs(batch);
    Scope scope{.num_sequences = batch,
                .num_heads = spec_.num_heads_q,
                .group = spec_.num_heads_q / spec_.num_heads_kv,
                .lengths = {}};
    if (spec_.sequence) {
      check_index("sequence", *spec_.sequence, batch);
      scope.first_sequence = *spec_.sequence;
      scope.num_sequences = 1;
    }
    if (spec_.q_head) {
      check_index("q_head", *spec_.q_head, spec_.num_heads_q);
      scope.first_head = *spec_.q_head;
      scope.num_heads = 1;
    }
    const std::int64_t num_lengths = is_packed() ? scope.num_sequences : 1;
    for (std::int64_t i = 0; i < num_lengths; ++i)
      scope.lengths.push_back(lengths_of(scope.first_sequence + i));
    return scope;
  }

 private:
  void check_range(std::string_view name, std::int64_t value, std::int64_t least) const {
    if (value >= least && value <= kMost) return;
    checks_.refuse(fmt::format("{} is {}; expected {} to {}", name, value, least, kMost));
  }

  void check_numbers() const {
    check_range("batch", spec_.batch, 0);
    check_range("seqlen_q", spec_.seqlen_q, 0);
    check_range("seqlen_kv", spec_.seqlen_kv, 0);
    check_range("num_heads_q", spec_.num_heads_q, 0);
    check_range("num_heads_kv", spec_.num_heads_kv, 1);
    check_range("tile_q", spec_.tile_q, 1);
    check_range("tile_kv", spec_.tile_kv, 1);
    if (spec_.num_heads_q % spec_.num_heads_kv != 0) {
      checks_.refuse(fmt::format("num_heads_q is {}; expected a multiple of num_heads_kv, {}",
                                 spec_.num_heads_q, spec_.num_heads_kv));
    }
  }

  bool is_packed() const { return spec_.cu_seqlens_q || spec_.cu_seqlens_kv; }

  /// As those of a call of these lengths; a tensor without data may hold anything.
  void check_programs(std::int64_t batch) const {
    const auto rows = [&](std::int64_t seqlen, std::int64_t num_heads) {
      return make_spec(Dtype::f32, std::array{batch, seqlen, num_heads, std::int64_t{1}});
    };
    Lengths longest{spec_.seqlen_q, spec_.seqlen_kv};
    if (is_packed()) {
      longest = {};
      for (std::int64_t i = 0; i < batch; ++i) {
        const Lengths lengths = lengths_of(i);
        longest = {std::max(longest.q, lengths.q), std::max(longest.kv, lengths.kv)};
      }
    }
    Problem problem{.q = rows(longest.q, spec_.num_heads_q),
                    .k = rows(longest.kv, spec_.num_heads_kv)};
    problem.v = problem.k;
    problem.mask = spec_.mask;
    const ForwardProblem f = validate(problem, where_);
    for (const CapturedTensor& tensor : spec_.mask.captures().tensors) {
      const bool has_no_data = tensor.view.data() == nullptr;
      if (has_no_data && tensor.view.spec().num_elements() > 0) continue;
      check_captured_tensor(f, tensor, checks_);
    }
  }

  void check_index(std::string_view name, std::int64_t index, std::int64_t count) const {
    if (index >= 0 && index < count) return;
    checks_.refuse(fmt::format("{} is {}; expected 0 to {}", name, index, count - 1));
  }

  std::int64_t check_cu_seqlens() const {
    const std::int64_t batch = check_offsets("cu_seqlens_q", spec_.cu_seqlens_q);
    const std::int64_t other = check_offsets("cu_seqlens_kv", spec_.cu_seqlens_kv);
    if (batch != other) {
      checks_.refuse(fmt::format("cu_seqlens_kv is {}; expected i32 or i64 [{}], as cu_seqlens_q",
                                 to_string(spec_.cu_seqlens_kv.spec()), batch + 1));
    }
    return batch;
  }

  std::int64_t check_offsets(std::string_view name, const TensorView& cu) const {
    const bool is_index = cu.dtype() == Dtype::i32 || cu.dtype() == Dtype::i64;
    if (cu.rank() != 1 || !is_index || cu.size(0) < 1) {
      checks_.refuse(fmt::format("{} is {}; expected i32 or i64 [num_sequences + 1]", name,
                                 cu ? to_string(cu.spec()) : "missing"));
    }
    checks_.check_memory({name, cu});
    std::int64_t before = 0;
    for (std::int64_t i = 0; i < cu.size(0); ++i) {
      const std::int64_t offset = cu_seqlen(cu, i);
      const bool is_right = i == 0 ? offset == 0 : offset >= before && offset - before <= kMost;
      if (!is_right) {
        checks_.refuse(
            fmt::format("{}[{}] is {} after {}; expected offsets from 0 that never decrease", name,
                        i, offset, before));
      }
      before = offset;
    }
    return cu.size(0) - 1;
  }

  Lengths lengths_of(std::int64_t sequence) const {
    if (!is_packed()) return {spec_.seqlen_q, spec_.seqlen_kv};
    const auto length = [&](const TensorView& cu) {
      return cu_seqlen(cu, sequence + 1) - cu_seqlen(cu, sequence);
    };
    return {length(spec_.cu_seqlens_q), length(spec_.cu_seqlens_kv)};
  }

  const BlockMapSpec& spec_;
  const std::string_view where_;
  const TensorChecks checks_;
};

std::int64_t tiles_of(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }

void check_index(std::string_view name, std::int64_t index, std::int64_t count) {
  if (index >= 0 && index < count) return;
  TensorChecks("BlockMap")
      .refuse(fmt::format("{} is {}; expected 0 to {}", name, index, count - 1));
}

}  // namespace

struct BlockMap::Impl {
  Impl(const BlockMapSpec& spec, Scope checked)
      : scope(std::move(checked)), tile_q(spec.tile_q), tile_kv(spec.tile_kv) {
    const expr::Node& mask = spec.mask.expr().node();
    const bool heads_differ =
        expr::reads(mask, Variable::q_head) || expr::reads(mask, Variable::kv_head);
    const bool sequences_differ = expr::reads(mask, Variable::batch) || spec.cu_seqlens_q;
    num_mapped_heads = heads_differ ? scope.num_heads : std::min<std::int64_t>(1, scope.num_heads);
    num_mapped_sequences =
        sequences_differ ? scope.num_sequences : std::min<std::int64_t>(1, scope.num_sequences);
    head_stride = heads_differ ? 1 : 0;
    sequence_stride = sequences_differ ? num_mapped_heads : 0;
    refuse_too_many_rows();
  }

  /// Before memory is taken for them.
  void refuse_too_many_rows() const {
    std::int64_t longest = 1;
    for (const Lengths& lengths : scope.lengths)
      longest = std::max(longest, tiles_of(lengths.q, tile_q));
    const auto refuse_beyond = [&](std::int64_t sequences, std::int64_t heads, std::int64_t most) {
      std::int64_t rows = 0;
      const bool is_huge = __builtin_mul_overflow(sequences, heads, &rows) ||
                           __builtin_mul_overflow(rows, longest, &rows);
      if (!is_huge && rows <= most) return;
      TensorChecks("block_map")
          .refuse(fmt::format("{} rows of tiles in {} sequences and {} heads are to be mapped; "
                              "expected at most {} in "
                              "all, take larger tiles, or one sequence or head",
                              longest, sequences, heads, most));
    };
    refuse_beyond(num_mapped_sequences, num_mapped_heads, kMostMappedRows);
    refuse_beyond(scope.num_sequences, scope.num_heads, kMostRows);
  }

  Scope scope;
  std::int64_t tile_q = 1, tile_kv = 1;
  std::int64_t num_mapped_sequences = 0, num_mapped_heads = 0;  // that differ
  std::int64_t sequence_stride = 0, head_stride = 0;            // 0 where all are alike
  std::vector<mask::BlockMap> maps;

  const Lengths& lengths(std::int64_t sequence) const {
    check_index("sequence", sequence, scope.num_sequences);
    return scope.lengths_of(sequence);
  }
  const mask::BlockMap& map(std::int64_t sequence, std::int64_t q_head) const {
    check_index("sequence", sequence, scope.num_sequences);
    check_index("q_head", q_head, scope.num_heads);
    return maps[static_cast<std::size_t>(sequence * sequence_stride + q_head * head_stride)];
  }
};

BlockMap block_map(const BlockMapSpec& spec) {
  const FloatEnvironment environment;
  auto impl = std::make_shared<BlockMap::Impl>(spec, SpecChecks(spec, "block_map").scope());
  const Scope& scope = impl->scope;
  for (std::int64_t i = 0; i < impl->num_mapped_sequences; ++i) {
    for (std::int64_t h = 0; h < impl->num_mapped_heads; ++h) {
      const Lengths& lengths = scope.lengths_of(i);
      const std::int64_t q_head = scope.first_head + h;
      impl->maps.push_back(mask::build_block_map(spec.mask, lengths.q, lengths.kv, spec.tile_q,
                                                 spec.tile_kv, scope.first_sequence + i, q_head,
                                                 q_head / scope.group));
    }
  }
  return BlockMap(std::move(impl));
}

std::int64_t BlockMap::num_sequences() const { return impl_->scope.num_sequences; }
std::int64_t BlockMap::num_heads() const { return impl_->scope.num_heads; }
std::int64_t BlockMap::seqlen_q(std::int64_t sequence) const { return impl_->lengths(sequence).q; }
std::int64_t BlockMap::seqlen_kv(std::int64_t sequence) const {
  return impl_->lengths(sequence).kv;
}
std::int64_t BlockMap::num_q_tiles(std::int64_t sequence) const {
  return tiles_of(impl_->lengths(sequence).q, impl_->tile_q);
}
std::int64_t BlockMap::num_kv_tiles(std::int64_t sequence) const {
  return tiles_of(impl_->lengths(sequence).kv, impl_->tile_kv);
}

std::span<const TileRun> BlockMap::row(std::int64_t q_tile, std::int64_t sequence,
                                       std::int64_t q_head) const {
  const mask::BlockMap& map = impl_->map(sequence, q_head);
  check_index("q_tile", q_tile, num_q_tiles(sequence));
  return map.rows[static_cast<std::size_t>(q_tile)];
}

TileKind BlockMap::at(std::int64_t q_tile, std::int64_t kv_tile, std::int64_t sequence,
                      std::int64_t q_head) const {
  const mask::BlockMap& map = impl_->map(sequence, q_head);
  check_index("q_tile", q_tile, num_q_tiles(sequence));
  check_index("kv_tile", kv_tile, num_kv_tiles(sequence));
  return map.at(q_tile, kv_tile);
}

TileCount BlockMap::count() const {
  TileCount sum;
  for (std::int64_t i = 0; i < num_sequences(); ++i) {
    for (std::int64_t h = 0; h < num_heads(); ++h) {
      const TileCount part = count(i, h);
      sum.empty += part.empty;
      sum.partial += part.partial;
      sum.full += part.full;
    }
  }
  return sum;
}

TileCount BlockMap::count(std::int64_t sequence, std::int64_t q_head) const {
  return impl_->map(sequence, q_head).count();
}

std::string BlockMap::print(std::int64_t sequence, std::int64_t q_head, int max_width,
                            int max_height) const {
  return mask::print_block_map(impl_->map(sequence, q_head), max_width, max_height);
}

MaskPicture BlockMap::draw(std::int64_t sequence, std::int64_t q_head, int max_size) const {
  return mask::draw_block_map(impl_->map(sequence, q_head), max_size);
}

// ---- the mask itself ----

namespace {

constexpr std::string_view kMaterialize = "materialize_mask";

/// The part of a mask that a tensor holds, block by block.
class Materializer {
 public:
  Materializer(const BlockMapSpec& spec, const TensorView& visible, std::int64_t q_begin,
               std::int64_t kv_begin)
      : mask_(spec.mask),
        visible_(visible),
        q_begin_(q_begin),
        kv_begin_(kv_begin),
        checks_(kMaterialize),
        scope_(SpecChecks(spec, kMaterialize).scope()) {}

  void check() const {
    const bool is_flag = visible_.dtype() == Dtype::boolean || visible_.dtype() == Dtype::u8;
    if (visible_.rank() != 4 || !is_flag || visible_.size(0) != scope_.num_sequences ||
        visible_.size(1) != scope_.num_heads) {
      checks_.refuse(fmt::format("visible is {}; expected bool or u8 [{}, {}, rows, columns]",
                                 visible_ ? to_string(visible_.spec()) : "missing",
                                 scope_.num_sequences, scope_.num_heads));
    }
    checks_.check_memory({"visible", visible_, true});
    for (const auto& [name, begin] :
         {std::pair{"q_begin", q_begin_}, std::pair{"kv_begin", kv_begin_}}) {
      if (begin < 0 || begin > kMost)
        checks_.refuse(fmt::format("{} is {}; expected 0 to {}", name, begin, kMost));
    }
    for (const CapturedTensor& tensor : mask_.captures().tensors) {
      if (tensor.view.data() == nullptr)
        checks_.refuse(fmt::format("captured '{}' has no data; expected some here", tensor.name));
    }
    OverlapCheck overlap;
    for (const CapturedTensor& tensor : mask_.captures().tensors)
      overlap.add_input(tensor.name, tensor.view);
    overlap.add_output("visible", visible_);
    overlap.refuse_overlap(checks_);
  }

  void run() {
    cpu::MaskElements elements(mask_);
    for (std::int64_t i = 0; i < scope_.num_sequences; ++i) {
      for (std::int64_t h = 0; h < scope_.num_heads; ++h) fill_head(i, h, elements);
    }
  }

 private:
  void fill_head(std::int64_t sequence, std::int64_t head, cpu::MaskElements& elements) const {
    const Lengths& lengths = scope_.lengths_of(sequence);
    const std::int64_t q_head = scope_.first_head + head;
    cpu::MaskBlock block{.batch = scope_.first_sequence + sequence,
                         .q_head = q_head,
                         .kv_head = q_head / scope_.group,
                         .seqlen_q = lengths.q,
                         .seqlen_kv = lengths.kv};
    for (std::int64_t row = 0; row < visible_.size(2); row += elements.lanes()) {
      for (std::int64_t key = 0; key < visible_.size(3); key += cpu::kSubTileKeys) {
        const std::int64_t rows = std::min(elements.lanes(), visible_.size(2) - row);
        const std::int64_t keys = std::min(cpu::kSubTileKeys, visible_.size(3) - key);
        block.q_begin = q_begin_ + row;
        block.kv_begin = kv_begin_ + key;
        block.num_rows = std::clamp<std::int64_t>(lengths.q - block.q_begin, 0, rows);
        block.num_keys = std::clamp<std::int64_t>(lengths.kv - block.kv_begin, 0, keys);
        const bool exists = block.num_rows > 0 && block.num_keys > 0;
        if (exists) elements.compute(block);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < keys; ++j) {
            const bool is_inside = exists && i < block.num_rows && j < block.num_keys;
            at(sequence, head, row + i, key + j) = is_inside && elements.is_visible(i, j) ? 1 : 0;
          }
        }
      }
    }
  }

  std::uint8_t& at(std::int64_t i, std::int64_t h, std::int64_t row, std::int64_t key) const {
    return static_cast<std::uint8_t*>(
        visible_.mutable_data())[i * visible_.stride(0) + h * visible_.stride(1) +
                                 row * visible_.stride(2) + key * visible_.stride(3)];
  }

  const MaskMod& mask_;
  const TensorView& visible_;
  const std::int64_t q_begin_, kv_begin_;
  const TensorChecks checks_;
  const Scope scope_;
};

}  // namespace

void materialize_mask(const BlockMapSpec& spec, const TensorView& visible, std::int64_t q_begin,
                      std::int64_t kv_begin) {
  const FloatEnvironment environment;
  Materializer materializer(spec, visible, q_begin, kv_begin);
  materializer.check();
  materializer.run();
}

}  // namespace fovea
