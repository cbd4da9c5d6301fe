#include "cpu/backward/non_finite.hpp"

#include <cmath>
#include <limits>

#include "core/scalar_io.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

void add_non_finite(const GradientTile& tile, const BackwardCall& call,
                    const BackwardScratch& scratch, float* dv) {
  const BackwardScratch::Panel& memory = *tile.panel.memory;
  const std::int64_t pitch = call.gradient.row_pitch(call.f.head_dim_v);
  for (std::int64_t lane = 0; lane < tile.panel.num_rows(); ++lane) {
    if (memory.log_sum[lane] == -kInfinity) continue;
    for (std::int64_t d = 0; d < call.f.head_dim_v; ++d) {
      const float x =
          load_scalar(memory.dout_source[lane], call.dout.dtype, d * call.dout.col_stride);
      if (std::isfinite(x)) continue;
      for (std::int64_t key = 0; key < tile.num_keys(); ++key) {
        const std::int64_t at = key * call.spec.lanes + lane;
        if (scratch.seen[at] != -kInfinity) dv[key * pitch + d] += scratch.scores[at] * x;
      }
    }
  }
}

}  // namespace fovea::cpu
