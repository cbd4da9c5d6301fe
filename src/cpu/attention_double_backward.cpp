// The plain formula, a row at a time in fp64; score and mask programs run on a panel of rows, in fp32 as everywhere.
//
// With a = ddq, b = ddk, c = ddv, and for one row, over the keys j that it sees:
//   z_j = scale q·k_j   f_j = F(z_j)   p = softmax(f), the sink in its denominator     m_j: dropout, 0 or 1 / (1 - p)
//   t_j = scale (a·k_j + q·b_j)               u_j = F'(z_j) t_j                                the tangents of z and f
//   w_j = m_j dout·v_j      n_j = m_j dout·c_j
// <ddq, dq> + <ddk, dk> + <ddv, dv> is the derivative of <dout, out> + <dlse, lse> along (a, b, c):
//   L = Σ p_j (u_j - ū) w_j + Σ p_j n_j + dlse ū,      ū = Σ p_j u_j
// and so, with w̄ = Σ p_j w_j:
//   dL/du_j = p_j (w_j - w̄ + dlse)                 dL/dw_j = p_j (u_j - ū)           dL/dn_j = p_j
//   dL/dp_j = (u_j - ū) w_j - u_j w̄ + n_j + dlse u_j
//   dL/df_j = p_j (dL/dp_j - Σ p_i dL/dp_i)
//   dL/dz_j = dL/df_j F'(z_j) + dL/du_j F''(z_j) t_j      dL/dt_j = dL/du_j F'(z_j)
//
// An item is a kv head of a sequence: its sums of grad_k and grad_v stay with one worker, and rows come in order.
#include "cpu/attention_double_backward.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "core/philox.hpp"
#include "core/scalar_io.hpp"
#include "cpu/bound_tape.hpp"
#include "cpu/carver.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/operands.hpp"
#include "cpu/row_state.hpp"
#include "cpu/tasks.hpp"
#include "expr/differentiate.hpp"

namespace fovea::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kProgramKeys = 128;  // run through a program at once

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void add(std::span<double> to, double factor, std::span<const double> from) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += factor * from[i];
}

/// Rows of one head in fp64.
class Matrix {
 public:
  Matrix(std::int64_t num_rows, std::int64_t width)
      : width_(static_cast<std::size_t>(width)),
        values_(static_cast<std::size_t>(num_rows) * width_) {}

  std::span<double> operator[](std::int64_t row) {
    return std::span(values_).subspan(static_cast<std::size_t>(row) * width_, width_);
  }
  std::span<const double> operator[](std::int64_t row) const {
    return std::span(values_).subspan(static_cast<std::size_t>(row) * width_, width_);
  }

 private:
  std::size_t width_;
  std::vector<double> values_;
};

/// Where a row of a dense or packed tensor lies.
struct RowPlace {
  std::int64_t batch = 0, row = 0, head = 0;
};

/// Zeros where the tensor is not given.
void load(const TensorView& view, const RowPlace& at, std::span<double> row) {
  std::fill(row.begin(), row.end(), 0.0);
  if (!view) return;
  const Rows rows(view);
  const std::byte* data = rows.at(at.batch, at.row, at.head);
  for (std::size_t i = 0; i < row.size(); ++i)
    row[i] = load_scalar(data, rows.dtype, static_cast<std::int64_t>(i) * rows.col_stride);
}

void store(const TensorView& view, const RowPlace& at, std::span<const double> row) {
  if (!view) return;
  const Rows rows(view);
  std::byte* data = rows.at(at.batch, at.row, at.head);
  for (std::size_t i = 0; i < row.size(); ++i) {
    store_scalar(data, rows.dtype, static_cast<std::int64_t>(i) * rows.col_stride,
                 static_cast<float>(row[i]));
  }
}

/// A kv head of a sequence: what all its rows read and add to.
struct HeadItem {
  Sequence sequence;
  std::int64_t kv_head = 0;
  Matrix k, v, ddk, ddv, grad_k, grad_v;

  HeadItem(const Sequence& of, std::int64_t head, const ForwardProblem& problem)
      : sequence(of),
        kv_head(head),
        k(of.seqlen_kv, problem.head_dim_qk),
        v(of.seqlen_kv, problem.head_dim_v),
        ddk(k),
        ddv(v),
        grad_k(k),
        grad_v(v) {}

  RowPlace key(std::int64_t kv_idx) const {
    return {sequence.batch_offset, sequence.kv_begin + kv_idx, kv_head};
  }
};

/// Scores of a panel of rows, [keys][lanes], and what the programs made of them.
struct PanelScores {
  std::vector<std::int32_t> q_idx, q_head;                       // [lanes]
  float *scores = nullptr, *first = nullptr, *second = nullptr;  // f, F', F''
  std::byte* program = nullptr;                                  // scratch
  AlignedBytes memory;

  void allocate(std::size_t count, std::size_t program_bytes) {
    const auto carve = [&](Carver carver) {
      for (float** piece : {&scores, &first, &second}) *piece = carver.take<float>(count);
      program = carver.take<std::byte>(program_bytes);
      return carver.used();
    };
    memory = AlignedBytes(carve(Carver(nullptr)));
    carve(Carver(memory.data()));
  }
};

/// A row of q and dout, and what is summed over its keys.
struct QueryRow {
  std::vector<double> q, ddq, dout, grad_q, grad_dout;
  double dlse = 0, grad_dlse = 0;
};

struct VisibleKey {
  std::int64_t kv_idx = 0;
  double f = 0, first = 1, second = 0;  // final score, F', F''
  double p = 0, kept = 1;
  double t = 0, u = 0, w = 0, n = 0, by_p = 0;
};

class DoubleBackwardRun {
 public:
  DoubleBackwardRun(const ForwardProblem& problem, const AttentionDoubleBackward& args,
                    Executor& executor)
      : problem_(problem),
        args_(args),
        forward_(args.backward.forward),
        kernels_(best_f32_kernels()),
        executor_(executor) {
    const ScoreMod& score = forward_.score;
    if (!score.is_identity()) {
      const expr::NodePtr first = expr::derivative_by_score(score.expr().shared());
      score_ = BoundTape(score.expr().shared(), score.captures());
      first_ = BoundTape(first, score.captures());
      second_ = BoundTape(expr::derivative_by_score(first), score.captures());
    }
    if (!forward_.mask.is_all_visible())
      mask_ = BoundTape(forward_.mask.expr().shared(), forward_.mask.captures());
    for (const BoundTape* tape : {&score_, &first_, &second_, &mask_}) {
      program_bytes_ =
          std::max(program_bytes_, program_scratch_bytes(tape->tape, kProgramKeys, kernels_.lanes));
    }
  }

  void run() {
    clear_padding_rows();
    run_tasks(executor_, problem_.num_sequences * problem_.num_heads_kv,
              [this](int /*worker*/, std::int64_t index) { compute_item(index); });
  }

 private:
  void compute_item(std::int64_t index) const {
    const Sequence s = sequence_at(problem_, forward_, index / problem_.num_heads_kv);
    HeadItem item(s, index % problem_.num_heads_kv, problem_);
    for (std::int64_t key = 0; key < s.seqlen_kv; ++key) {
      load(forward_.k, item.key(key), item.k[key]);
      load(forward_.v, item.key(key), item.v[key]);
      load(args_.ddk, item.key(key), item.ddk[key]);
      load(args_.ddv, item.key(key), item.ddv[key]);
    }
    const std::int64_t num_rows = problem_.num_heads_q == 0 ? 0 : problem_.group * s.seqlen_q;
    for (std::int64_t begin = 0; begin < num_rows; begin += kernels_.lanes)
      compute_panel(item, begin, std::min(num_rows - begin, std::int64_t{kernels_.lanes}));
    for (std::int64_t key = 0; key < s.seqlen_kv; ++key) {
      store(args_.grad_k, item.key(key), item.grad_k[key]);
      store(args_.grad_v, item.key(key), item.grad_v[key]);
    }
  }

  void compute_panel(HeadItem& item, std::int64_t row_begin, std::int64_t count) const {
    const Sequence& s = item.sequence;
    PanelScores panel;
    for (std::int64_t lane = 0; lane < kernels_.lanes; ++lane) {
      // Padding lanes repeat the last row, so that programs read what exists.
      const std::int64_t row = row_begin + std::min(lane, count - 1);
      panel.q_idx.push_back(static_cast<std::int32_t>(row % s.seqlen_q));
      panel.q_head.push_back(
          static_cast<std::int32_t>(item.kv_head * problem_.group + row / s.seqlen_q));
    }
    std::vector<QueryRow> rows;
    for (std::int64_t lane = 0; lane < count; ++lane)
      rows.push_back(load_row(s, q_place(s, panel, lane)));
    compute_scores(item, rows, panel);
    for (std::int64_t lane = 0; lane < count; ++lane) {
      QueryRow& row = rows[static_cast<std::size_t>(lane)];
      compute_row(item, panel, lane, row);
      store_row(s, q_place(s, panel, lane), row);
    }
  }

  static RowPlace q_place(const Sequence& s, const PanelScores& panel, std::int64_t lane) {
    const auto at = static_cast<std::size_t>(lane);
    return {s.batch_offset, s.q_begin + panel.q_idx[at], panel.q_head[at]};
  }

  QueryRow load_row(const Sequence& s, const RowPlace& at) const {
    QueryRow row;
    for (std::vector<double>* values : {&row.q, &row.ddq, &row.grad_q})
      values->resize(static_cast<std::size_t>(problem_.head_dim_qk));
    for (std::vector<double>* values : {&row.dout, &row.grad_dout})
      values->resize(static_cast<std::size_t>(problem_.head_dim_v));
    load(forward_.q, at, row.q);
    load(args_.ddq, at, row.ddq);
    load(args_.backward.dout, at, row.dout);
    if (const float* dlse = row_value(args_.backward.dlse, s, at)) row.dlse = *dlse;
    return row;
  }

  void store_row(const Sequence& s, const RowPlace& at, const QueryRow& row) const {
    store(args_.grad_q, at, row.grad_q);
    store(args_.grad_dout, at, row.grad_dout);
    if (float* const value = row_value(args_.grad_dlse, s, at))
      *value = static_cast<float>(row.grad_dlse);
  }

  /// An element of a tensor in the shape of lse; null where it is not given.
  float* row_value(const TensorView& view, const Sequence& s, const RowPlace& at) const {
    if (!view) return nullptr;
    auto* const data = const_cast<float*>(static_cast<const float*>(view.data()));
    return data + row_value_offset(view, s, at.row - s.q_begin, at.head);
  }

  // ---- programs ----

  void compute_scores(const HeadItem& item, const std::vector<QueryRow>& rows,
                      PanelScores& panel) const {
    const std::int64_t lanes = kernels_.lanes;
    const auto count = static_cast<std::size_t>(item.sequence.seqlen_kv * lanes);
    panel.allocate(count, program_bytes_);
    for (std::int64_t key = 0; key < item.sequence.seqlen_kv; ++key) {
      for (std::size_t lane = 0; lane < rows.size(); ++lane) {
        const double score = problem_.softmax_scale * dot(rows[lane].q, item.k[key]);
        panel.scores[static_cast<std::size_t>(key * lanes) + lane] = static_cast<float>(score);
      }
    }
    if (!score_.empty()) {
      std::copy_n(panel.scores, count, panel.first);
      std::copy_n(panel.scores, count, panel.second);
      run_program(first_, forward_.score, item, panel, panel.first);
      run_program(second_, forward_.score, item, panel, panel.second);
      run_program(score_, forward_.score, item, panel, panel.scores);
    }
    if (!mask_.empty()) run_program(mask_, forward_.mask, item, panel, panel.scores);
  }

  void run_program(const BoundTape& tape, const Program& program, const HeadItem& item,
                   const PanelScores& panel, float* scores) const {
    const Bindings bindings = tape.bindings(program);
    const Sequence& s = item.sequence;
    for (std::int64_t key = 0; key < s.seqlen_kv; key += kProgramKeys) {
      const ProgramTile tile{.scores = scores + key * kernels_.lanes,
                             .num_keys = std::min(kProgramKeys, s.seqlen_kv - key),
                             .lanes = kernels_.lanes,
                             .kv_begin = key,
                             .q_idx = panel.q_idx.data(),
                             .q_head = panel.q_head.data(),
                             .batch = static_cast<std::int32_t>(s.index),
                             .kv_head = static_cast<std::int32_t>(item.kv_head),
                             .seqlen_q = static_cast<std::int32_t>(s.seqlen_q),
                             .seqlen_kv = static_cast<std::int32_t>(s.seqlen_kv),
                             .tensors = bindings.tensors.data(),
                             .scalars = bindings.scalars.data(),
                             .scratch = panel.program};
      (&tape == &mask_ ? kernels_.run_mask : kernels_.run_score)(tape.tape, tile);
    }
  }

  // ---- one row ----

  void compute_row(HeadItem& item, const PanelScores& panel, std::int64_t lane,
                   QueryRow& row) const {
    std::vector<VisibleKey> keys = visible_keys(item, panel, lane, row);
    if (keys.empty()) return;
    normalise(panel.q_head[static_cast<std::size_t>(lane)], keys);
    drop(item, panel, lane, keys);
    double mean_u = 0;
    double mean_w = 0;
    for (VisibleKey& key : keys) {
      const double scale = problem_.softmax_scale;
      key.t = scale * (dot(row.ddq, item.k[key.kv_idx]) + dot(row.q, item.ddk[key.kv_idx]));
      key.u = key.first * key.t;
      key.w = key.kept * dot(row.dout, item.v[key.kv_idx]);
      key.n = key.kept * dot(row.dout, item.ddv[key.kv_idx]);
      mean_u += key.p * key.u;
      mean_w += key.p * key.w;
    }
    double mean_by_p = 0;
    for (VisibleKey& key : keys) {
      key.by_p = (key.u - mean_u) * key.w - key.u * mean_w + key.n + row.dlse * key.u;
      mean_by_p += key.p * key.by_p;
    }
    row.grad_dlse = mean_u;
    for (const VisibleKey& key : keys) {
      const double by_u = key.p * (key.w - mean_w + row.dlse);
      const double by_w = key.p * (key.u - mean_u);
      const double by_f = key.p * (key.by_p - mean_by_p);
      const double by_z = by_f * key.first + by_u * key.second * key.t;
      const double by_t = by_u * key.first;
      add_key(item, key, {by_z, by_t, by_w}, row);
    }
  }

  struct KeyGradient {
    double by_z, by_t, by_w;
  };

  void add_key(HeadItem& item, const VisibleKey& key, const KeyGradient& g, QueryRow& row) const {
    const double scale = problem_.softmax_scale;
    const std::int64_t at = key.kv_idx;
    add(row.grad_q, scale * g.by_z, item.k[at]);
    add(row.grad_q, scale * g.by_t, item.ddk[at]);
    add(row.grad_dout, key.kept * g.by_w, item.v[at]);
    add(row.grad_dout, key.kept * key.p, item.ddv[at]);
    add(item.grad_k[at], scale * g.by_z, row.q);
    add(item.grad_k[at], scale * g.by_t, row.ddq);
    add(item.grad_v[at], key.kept * g.by_w, row.dout);
  }

  /// With f, F' and F''. Without a program f is exact: the panel's scores tell only what is hidden.
  std::vector<VisibleKey> visible_keys(const HeadItem& item, const PanelScores& panel,
                                       std::int64_t lane, const QueryRow& row) const {
    std::vector<VisibleKey> keys;
    for (std::int64_t kv_idx = 0; kv_idx < item.sequence.seqlen_kv; ++kv_idx) {
      const std::int64_t at = kv_idx * kernels_.lanes + lane;
      if (panel.scores[at] == -std::numeric_limits<float>::infinity()) continue;
      VisibleKey key{.kv_idx = kv_idx};
      if (score_.empty()) {
        key.f = problem_.softmax_scale * dot(row.q, item.k[kv_idx]);
      } else {
        key.f = panel.scores[at];
        key.first = panel.first[at];
        key.second = panel.second[at];
      }
      keys.push_back(key);
    }
    return keys;
  }

  void normalise(std::int64_t q_head, std::vector<VisibleKey>& keys) const {
    const TensorView& sinks = forward_.sinks;
    const double sink =
        sinks ? static_cast<const float*>(sinks.data())[q_head * sinks.stride(0)] : -kInfinity;
    double largest = sink;
    for (const VisibleKey& key : keys) largest = largest_of(key.f, largest);
    double sum = sink_share(sink, largest);
    for (VisibleKey& key : keys) {
      key.p = std::exp(key.f - largest);
      sum += key.p;
    }
    for (VisibleKey& key : keys) key.p /= sum;
  }

  void drop(const HeadItem& item, const PanelScores& panel, std::int64_t lane,
            std::vector<VisibleKey>& keys) const {
    const Dropout& dropout = forward_.dropout;
    if (dropout.p == 0) return;
    const philox::Key philox_key = philox::dropout_key(dropout.seed, dropout.offset);
    const auto at = static_cast<std::size_t>(lane);
    for (VisibleKey& key : keys) {
      const std::uint32_t word = philox::random_word(philox_key, item.sequence.index,
                                                     panel.q_head[at], panel.q_idx[at], key.kv_idx);
      const bool is_kept = word >= philox::drop_threshold(dropout.p);
      key.kept = is_kept ? 1 / (1 - static_cast<double>(dropout.p)) : 0;
    }
  }

  // ---- padding ----

  /// Packed rows behind the last sequence belong to nobody: all their gradients are 0.
  void clear_padding_rows() const {
    if (!problem_.is_varlen) return;
    const Sequence nobody;
    const Matrix key(1, problem_.head_dim_qk);
    const Matrix value(1, problem_.head_dim_v);
    QueryRow row;
    row.grad_q.assign(static_cast<std::size_t>(problem_.head_dim_qk), 0);
    row.grad_dout.assign(static_cast<std::size_t>(problem_.head_dim_v), 0);
    const std::int64_t last = problem_.num_sequences;
    for (std::int64_t at = cu_seqlen(forward_.cu_seqlens_q, last); at < problem_.total_q; ++at) {
      for (std::int64_t head = 0; head < problem_.num_heads_q; ++head)
        store_row(nobody, {0, at, head}, row);
    }
    for (std::int64_t at = cu_seqlen(forward_.cu_seqlens_kv, last); at < forward_.k.size(0); ++at) {
      for (std::int64_t head = 0; head < problem_.num_heads_kv; ++head) {
        store(args_.grad_k, {0, at, head}, key[0]);
        store(args_.grad_v, {0, at, head}, value[0]);
      }
    }
  }

  const ForwardProblem& problem_;
  const AttentionDoubleBackward& args_;
  const AttentionForward& forward_;
  const PanelKernels& kernels_;
  Executor& executor_;
  BoundTape score_, first_, second_, mask_;
  std::size_t program_bytes_ = 0;
};

}  // namespace

void attention_double_backward(const ForwardProblem& problem, const AttentionDoubleBackward& args,
                               Executor& executor) {
  DoubleBackwardRun(problem, args, executor).run();
}

}  // namespace fovea::cpu
