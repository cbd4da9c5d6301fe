#include "visible_work.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "expr/passes.hpp"
#include "mask/block_map.hpp"
#include "problem/forward.hpp"

namespace fovea::tools {
namespace {

constexpr double kMaxTiles = 1 << 20;  // of all matrices together: a fraction of a second

struct Matrix {
  std::int64_t batch = 0, q_head = 0, kv_head = 0, seqlen_q = 0, seqlen_kv = 0;
  double area() const { return static_cast<double>(seqlen_q) * static_cast<double>(seqlen_kv); }
};

double tensor_bytes(const TensorView& view) {
  return view ? static_cast<double>(view.spec().num_elements()) *
                    static_cast<double>(size_bytes(view.dtype()))
              : 0;
}

/// The score matrices that differ: one head where the mask reads no head, one sequence where all are alike.
std::vector<Matrix> different_matrices(const AttentionForward& args) {
  const bool is_packed = args.q.rank() == 3;
  const int heads_axis = is_packed ? 1 : 2;
  const std::int64_t num_heads_q = args.q.size(heads_axis), num_heads_kv = args.k.size(heads_axis);
  const expr::Node& mask = args.mask.expr().node();
  const bool reads_head =
      expr::reads(mask, expr::Variable::q_head) || expr::reads(mask, expr::Variable::kv_head);
  const bool differs = is_packed || expr::reads(mask, expr::Variable::batch);
  const std::int64_t num_sequences = is_packed ? args.cu_seqlens_q.size(0) - 1 : args.q.size(0);
  const std::int64_t heads = reads_head ? num_heads_q : std::min<std::int64_t>(num_heads_q, 1);
  std::vector<Matrix> matrices;
  for (std::int64_t batch = 0;
       batch < (differs ? num_sequences : std::min<std::int64_t>(num_sequences, 1)); ++batch) {
    Matrix matrix{.batch = batch, .seqlen_q = args.q.size(1), .seqlen_kv = args.k.size(1)};
    if (is_packed) {
      matrix.seqlen_q =
          cu_seqlen(args.cu_seqlens_q, batch + 1) - cu_seqlen(args.cu_seqlens_q, batch);
      matrix.seqlen_kv =
          cu_seqlen(args.cu_seqlens_kv, batch + 1) - cu_seqlen(args.cu_seqlens_kv, batch);
    }
    for (matrix.q_head = 0; matrix.q_head < heads; ++matrix.q_head) {
      matrix.kv_head = matrix.q_head / (num_heads_q / num_heads_kv);
      matrices.push_back(matrix);
    }
  }
  return matrices;
}

TileCount count(const MaskMod& mask, const Matrix& m, std::int64_t tile_q, std::int64_t tile_kv) {
  return mask::build_block_map(mask, m.seqlen_q, m.seqlen_kv, tile_q, tile_kv, m.batch, m.q_head,
                               m.kv_head)
      .count();
}

double visible_elements(const MaskMod& mask, const Matrix& m, double max_tiles) {
  if (mask.is_all_visible() || m.area() == 0) return m.area();
  const auto tile =
      static_cast<std::int64_t>(std::ceil(std::sqrt(std::max(1.0, m.area() / max_tiles))));
  const TileCount tiles = count(mask, m, tile, tile);
  return m.area() * (static_cast<double>(tiles.full) + 0.5 * static_cast<double>(tiles.partial)) /
         static_cast<double>(tiles.total());
}

}  // namespace

VisibleWork visible_work(const AttentionForward& args, std::int64_t tile_q, std::int64_t tile_kv) {
  const bool is_packed = args.q.rank() == 3;
  const std::vector<Matrix> matrices = different_matrices(args);
  const double max_tiles =
      kMaxTiles / static_cast<double>(std::max<std::size_t>(matrices.size(), 1));
  double visible = 0, area = 0;
  VisibleWork work;
  for (const Matrix& matrix : matrices) {
    visible += visible_elements(args.mask, matrix, max_tiles);
    area += matrix.area();
    const TileCount tiles = count(args.mask, matrix, tile_q, tile_kv);
    work.tiles.empty += tiles.empty;
    work.tiles.partial += tiles.partial;
    work.tiles.full += tiles.full;
  }
  const int heads_axis = is_packed ? 1 : 2;
  const double num_matrices =
      static_cast<double>(args.q.size(heads_axis)) *
      static_cast<double>(is_packed ? args.cu_seqlens_q.size(0) - 1 : args.q.size(0));
  const double copies = matrices.empty() ? 0 : num_matrices / static_cast<double>(matrices.size());
  work.share = area > 0 ? visible / area : 1;
  const auto head_dim_qk = static_cast<double>(args.q.size(heads_axis + 1));
  const auto head_dim_v = static_cast<double>(args.v.size(heads_axis + 1));
  work.flops = 2 * visible * copies * (head_dim_qk + head_dim_v);
  work.backward_flops = 2 * visible * copies * (3 * head_dim_qk + 2 * head_dim_v);
  // Values in the memory of keys are read with them.
  const double of_values = args.v.data() == args.k.data() ? 0 : tensor_bytes(args.v);
  work.bytes = tensor_bytes(args.q) + tensor_bytes(args.k) + of_values + tensor_bytes(args.out) +
               tensor_bytes(args.lse);
  work.backward_bytes = 2 * work.bytes;
  const auto times = static_cast<std::int64_t>(copies);
  work.tiles = {work.tiles.empty * times, work.tiles.partial * times, work.tiles.full * times};
  return work;
}

}  // namespace fovea::tools
