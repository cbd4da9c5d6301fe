// The plain formula, a row at a time in fp64; score and mask programs run on a panel of rows, in fp32 as everywhere.
//
// With a = ddq, b = ddk, c = ddv, e = ddsinks, and for one row, over the keys j that it sees and its sink:
//   z_j = scale q·k_j   f_j = F(z_j)   p = softmax(f), the sink among them   m_j: dropout, 0 or 1 / (1 - p)
//   t_j = scale (a·k_j + q·b_j)     u_j = F_z(z_j) t_j + G(z_j), the sink's e             the tangents of z and f
//   w_j = m_j dout·v_j              n_j = m_j dout·c_j               both 0 for the sink
// <ddq, dq> + ... is the derivative of <dout, out> + <dlse, lse> along the direction that the dd... give:
//   L = Σ p_j (u_j - ū) w_j + Σ p_j n_j + dlse ū,      ū = Σ p_j u_j
// and so, with w̄ = Σ p_j w_j:
//   dL/du_j = p_j (w_j - w̄ + dlse)                 dL/dw_j = p_j (u_j - ū)           dL/dn_j = p_j
//   dL/dp_j = (u_j - ū) w_j - u_j w̄ + n_j + dlse u_j
//   dL/df_j = p_j (dL/dp_j - Σ p_i dL/dp_i)                          that of the sink is grad_sinks
//   dL/dz_j = dL/df_j F_z(z_j) + dL/du_j (F_zz(z_j) t_j + G_z(z_j))  dL/dt_j = dL/du_j F_z(z_j)
// G and gradients of what the program captures: double_backward/score_derivatives.hpp.
//
// An item is a kv head of a sequence: its sums of grad_k and grad_v stay with one worker, and rows come in order. Sums
// over items: double_backward/parameter_sums.hpp.
#include "cpu/attention_double_backward.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "core/philox.hpp"
#include "core/scalar_io.hpp"
#include "cpu/double_backward/parameter_sums.hpp"
#include "cpu/double_backward/score_derivatives.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/operands.hpp"
#include "cpu/row_state.hpp"
#include "cpu/tasks.hpp"

namespace fovea::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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
  std::int64_t task = 0;  // whose ParameterSums it adds to
  Matrix k, v, ddk, ddv, grad_k, grad_v;

  HeadItem(const Sequence& of, std::int64_t head, std::int64_t of_task,
           const ForwardProblem& problem)
      : sequence(of),
        kv_head(head),
        task(of_task),
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

/// A row of q and dout, and what is summed over its keys.
struct QueryRow {
  std::vector<double> q, ddq, dout, grad_q, grad_dout;
  double dlse = 0, grad_dlse = 0;
};

struct VisibleKey {
  std::int64_t kv_idx = 0;
  double f = 0, first = 1, second = 0;      // final score, F_z, F_zz
  double captured = 0, captured_first = 0;  // G, G_z
  double p = 0, kept = 1;
  double t = 0, u = 0, w = 0, n = 0, by_p = 0;
};

/// The sink of a row, a key without a value: its share, tangent and gradient.
struct RowSink {
  double p = 0, u = 0, by_p = 0;
};

class DoubleBackwardRun {
 public:
  DoubleBackwardRun(const ForwardProblem& problem, const AttentionDoubleBackward& args,
                    Executor& executor)
      : problem_(problem),
        args_(args),
        forward_(args.backward.forward),
        kernels_(best_f32_kernels()),
        executor_(executor),
        derivatives_(args, kernels_),
        sums_(args, problem.num_sequences * problem.num_heads_kv) {}

  void run() {
    clear_padding_rows();
    const std::int64_t num_items = problem_.num_sequences * problem_.num_heads_kv;
    run_tasks(executor_, sums_.num_tasks(), [&](int /*worker*/, std::int64_t task) {
      for (std::int64_t item = task; item < num_items; item += sums_.num_tasks())
        compute_item(item, task);
    });
    sums_.write();
  }

 private:
  void compute_item(std::int64_t index, std::int64_t task) {
    const Sequence s = sequence_at(problem_, forward_, index / problem_.num_heads_kv);
    HeadItem item(s, index % problem_.num_heads_kv, task, problem_);
    for (std::int64_t key = 0; key < s.seqlen_kv; ++key) {
      load_row(forward_.k, item.key(key), item.k[key]);
      load_row(forward_.v, item.key(key), item.v[key]);
      load_row(args_.ddk, item.key(key), item.ddk[key]);
      load_row(args_.ddv, item.key(key), item.ddv[key]);
    }
    const std::int64_t num_rows = problem_.num_heads_q == 0 ? 0 : problem_.group * s.seqlen_q;
    for (std::int64_t begin = 0; begin < num_rows; begin += kernels_.lanes)
      compute_panel(item, begin, std::min(num_rows - begin, std::int64_t{kernels_.lanes}));
    for (std::int64_t key = 0; key < s.seqlen_kv; ++key) {
      store(args_.grad_k, item.key(key), item.grad_k[key]);
      store(args_.grad_v, item.key(key), item.grad_v[key]);
    }
  }

  void compute_panel(HeadItem& item, std::int64_t row_begin, std::int64_t count) {
    const Sequence& s = item.sequence;
    ScorePanel panel = panel_of(item, row_begin, count);
    std::vector<QueryRow> rows;
    for (std::int64_t lane = 0; lane < count; ++lane)
      rows.push_back(query_row(s, panel.place(lane)));
    multiply_queries(item, rows, panel);
    derivatives_.evaluate(panel);
    ScoreSlopes slopes;
    if (derivatives_.wants_captured()) {
      const auto size = static_cast<std::size_t>(s.seqlen_kv * kernels_.lanes);
      for (auto* each : {&slopes.by_score, &slopes.by_tangent, &slopes.by_tangent_motion})
        each->resize(size);
    }
    for (std::int64_t lane = 0; lane < count; ++lane) {
      QueryRow& row = rows[static_cast<std::size_t>(lane)];
      compute_row(item, panel, lane, row, slopes);
      store_row(s, panel.place(lane), row);
    }
    if (derivatives_.wants_captured()) derivatives_.add_captured(panel, slopes, item.task, sums_);
  }

  ScorePanel panel_of(const HeadItem& item, std::int64_t row_begin, std::int64_t count) const {
    ScorePanel panel{plain_panel(item.sequence, {item.kv_head, row_begin, count}, problem_.group,
                                 kernels_.lanes)};
    derivatives_.allocate(panel);
    return panel;
  }

  QueryRow query_row(const Sequence& s, const RowPlace& at) const {
    QueryRow row;
    for (std::vector<double>* values : {&row.q, &row.ddq, &row.grad_q})
      values->resize(static_cast<std::size_t>(problem_.head_dim_qk));
    for (std::vector<double>* values : {&row.dout, &row.grad_dout})
      values->resize(static_cast<std::size_t>(problem_.head_dim_v));
    load_row(forward_.q, at, row.q);
    load_row(args_.ddq, at, row.ddq);
    load_row(args_.backward.dout, at, row.dout);
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

  void multiply_queries(const HeadItem& item, const std::vector<QueryRow>& rows,
                        const ScorePanel& panel) const {
    for (std::int64_t key = 0; key < item.sequence.seqlen_kv; ++key) {
      for (std::size_t lane = 0; lane < rows.size(); ++lane) {
        const double score = problem_.softmax_scale * dot(rows[lane].q, item.k[key]);
        panel.raw[static_cast<std::size_t>(key * kernels_.lanes) + lane] =
            static_cast<float>(score);
      }
    }
  }

  // ---- one row ----

  void compute_row(HeadItem& item, const ScorePanel& panel, std::int64_t lane, QueryRow& row,
                   ScoreSlopes& slopes) {
    std::vector<VisibleKey> keys = visible_keys(item, panel, lane, row);
    const std::int64_t q_head = panel.q_head[static_cast<std::size_t>(lane)];
    const double sink_logit = head_value(forward_.sinks, q_head, -kInfinity);
    if (keys.empty() && sink_logit == -kInfinity) return;
    RowSink sink = normalise(sink_logit, keys);
    sink.u = head_value(args_.ddsinks, q_head, 0);
    drop(item, panel, lane, keys);
    double mean_u = chained(sink.p, sink.u);
    double mean_w = 0;
    for (VisibleKey& key : keys) {
      const double scale = problem_.softmax_scale;
      key.t = scale * (dot(row.ddq, item.k[key.kv_idx]) + dot(row.q, item.ddk[key.kv_idx]));
      key.u = chained(key.first, key.t) + key.captured;
      key.w = key.kept * dot(row.dout, item.v[key.kv_idx]);
      key.n = key.kept * dot(row.dout, item.ddv[key.kv_idx]);
      mean_u += key.p * key.u;
      mean_w += key.p * key.w;
    }
    sink.by_p = chained(row.dlse - mean_w, sink.u);
    double mean_by_p = sink.p * sink.by_p;
    for (VisibleKey& key : keys) {
      key.by_p = (key.u - mean_u) * key.w - key.u * mean_w + key.n + row.dlse * key.u;
      mean_by_p += key.p * key.by_p;
    }
    row.grad_dlse = mean_u;
    if (const std::span<double> sinks = sums_.sinks(item.task); !sinks.empty())
      sinks[static_cast<std::size_t>(q_head)] += sink.p * (sink.by_p - mean_by_p);
    for (const VisibleKey& key : keys) {
      const double by_u = key.p * (key.w - mean_w + row.dlse);
      const double by_w = key.p * (key.u - mean_u);
      const double by_f = key.p * (key.by_p - mean_by_p);
      const double by_z = chained(key.first, by_f) + chained(key.second, by_u * key.t) +
                          chained(key.captured_first, by_u);
      add_key(item, key, {by_z, chained(key.first, by_u), by_w}, row);
      if (slopes.by_score.empty()) continue;
      const auto at = static_cast<std::size_t>(key.kv_idx * kernels_.lanes + lane);
      slopes.by_score[at] = by_f;
      slopes.by_tangent[at] = by_u;
      slopes.by_tangent_motion[at] = by_u * key.t;
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

  /// With f and the derivatives of the program. Without one f is exact: the panel's scores tell only what is hidden.
  std::vector<VisibleKey> visible_keys(const HeadItem& item, const ScorePanel& panel,
                                       std::int64_t lane, const QueryRow& row) const {
    std::vector<VisibleKey> keys;
    for (std::int64_t kv_idx = 0; kv_idx < item.sequence.seqlen_kv; ++kv_idx) {
      const std::int64_t at = kv_idx * kernels_.lanes + lane;
      if (panel.scores[at] == -std::numeric_limits<float>::infinity()) continue;
      VisibleKey key{.kv_idx = kv_idx};
      if (derivatives_.is_identity()) {
        key.f = problem_.softmax_scale * dot(row.q, item.k[kv_idx]);
      } else {
        key.f = panel.scores[at];
        key.first = panel.first[at];
        key.second = panel.second[at];
        key.captured = panel.captured[at];
        key.captured_first = panel.captured_first[at];
      }
      keys.push_back(key);
    }
    return keys;
  }

  static double head_value(const TensorView& view, std::int64_t q_head, double otherwise) {
    return view ? static_cast<const float*>(view.data())[q_head * view.stride(0)] : otherwise;
  }

  /// Probabilities of the keys; returns the sink's.
  static RowSink normalise(double sink, std::vector<VisibleKey>& keys) {
    double largest = sink;
    for (const VisibleKey& key : keys) largest = largest_of(key.f, largest);
    const double share = sink_share(sink, largest);
    double sum = share;
    for (VisibleKey& key : keys) {
      key.p = std::exp(key.f - largest);
      sum += key.p;
    }
    for (VisibleKey& key : keys) key.p /= sum;
    return {.p = share / sum};
  }

  void drop(const HeadItem& item, const ScorePanel& panel, std::int64_t lane,
            std::vector<VisibleKey>& keys) const {
    const Dropout dropout = dropout_of(forward_);
    if (dropout.p == 0) return;
    const philox::Key philox_key = philox::dropout_key(dropout.seed, dropout.offset);
    const philox::Places places = dropout_places_of(forward_);
    const auto at = static_cast<std::size_t>(lane);
    for (VisibleKey& key : keys) {
      const std::uint32_t word = philox::random_word(philox_key, places, item.sequence.index,
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
  const ScoreDerivatives derivatives_;
  ParameterSums sums_;
};

}  // namespace

void attention_double_backward(const ForwardProblem& problem, const AttentionDoubleBackward& args,
                               Executor& executor) {
  DoubleBackwardRun(problem, args, executor).run();
}

}  // namespace fovea::cpu
