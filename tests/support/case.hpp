// One problem for tests: what to compute (Case), and its memory (CaseMemory). Read compare.hpp
// next.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/attention.hpp"

#include "support/drawn_spec.hpp"
#include "support/guarded_tensor.hpp"

namespace fovea::testing {

/// How q, k, v or out lie in memory; the names are for a dense tensor [batch, seqlen, heads,
/// head_dim].
enum class Layout : std::uint8_t {
  bshd,
  bhsd,
  padded,       // poison between heads, so a row that is written or read too far is noticed
  odd_offset,   // starts one element after an aligned address; no row is aligned like its neighbour
  strided_dim,  // every third element of the last dimension
  reversed,     // positions and dims run backwards (inputs only)
  shared_batch,  // stride 0 (inputs only)
  shared_head,   // stride 0 (inputs only)
};
inline constexpr Layout kInputLayouts[] = {
    Layout::bshd,        Layout::bhsd,     Layout::padded,       Layout::odd_offset,
    Layout::strided_dim, Layout::reversed, Layout::shared_batch, Layout::shared_head};
inline constexpr Layout kOutputLayouts[] = {Layout::bshd, Layout::bhsd, Layout::padded,
                                            Layout::odd_offset, Layout::strided_dim};
std::string_view name(Layout layout);

/// heavy_tailed: 0.5 % of a normal sample is 21 times larger, as activations of language models
/// are; it finds sums in too few bits and exponents that leave their range.
enum class Distribution : std::uint8_t { normal, heavy_tailed };

struct Lengths {
  std::int64_t q = 0, kv = 0;
};

/// Drops some keys of every row that has a few, and keeps some.
inline constexpr Dropout kSomeDropped{.p = 0.3F, .seed = 7, .offset = 1};

/// Everything has a default; `label` says which test this is when it fails.
struct Case {
  std::string label{};
  std::int64_t batch = 1, seqlen_q = 1, seqlen_kv = 1;
  std::vector<Lengths> sequences{};  // not empty: packed, and the three above do not count
  std::int64_t trailing_rows = 0;    // packed rows after the last sequence, of all tensors
  std::int64_t num_heads_q = 1, num_heads_kv = 1;
  std::int64_t head_dim_qk = 8, head_dim_v = 8;

  Dtype dtype = Dtype::f32;          // e4m3 beside a recipe whose scales are given
  std::optional<Dtype> out_dtype{};  // default: dtype, or bf16 where that is one of codes
  Dtype cu_seqlens_dtype = Dtype::i32;
  ComputeDtype compute_dtype = ComputeDtype::automatic;
  Layout layout = Layout::bshd;
  Layout out_layout = Layout::bshd;
  Distribution distribution = Distribution::normal;
  std::uint64_t seed = 1;
  std::uint64_t layout_seed = 0;  // of the layouts of all other tensors, drawn from `seed` too

  ScoreMod score{};
  MaskMod mask{};
  std::optional<float> softmax_scale{};
  bool has_sinks = false;
  Dropout dropout{};
  Quantization quant{};             // scales that it wants given are drawn
  bool reads_dropout_seed = false;  // most of its seed and offset is in tensors
  bool has_dropout_places = false;  // dense: dropout draws for a part of a larger problem
  bool wants_lse = true, wants_row_max = true;

  /// Keys that the mask hides from every row hold NaN and Inf.
  bool poisons_hidden_keys = true;
  /// A dense v holds infinities of either sign (in e4m3 the greatest codes) and NaN at keys from the first eighth to
  /// the last one, which some rows see.
  bool has_infinite_values = false;
  /// A column of v holds one value near the end of the range of floats.
  bool has_huge_value = false;
  /// All of v is times 2^value_exponent.
  int value_exponent = 0;

  bool is_packed() const { return !sequences.empty(); }
  std::int64_t num_sequences() const {
    return is_packed() ? static_cast<std::int64_t>(sequences.size()) : batch;
  }
  Lengths lengths(std::int64_t sequence) const;
  std::int64_t max_seqlen_q() const;
  std::int64_t max_seqlen_kv() const;

  /// A tensor for programs to capture, in a layout that is drawn; lives as long as any copy of the case.
  TensorView capture(Dtype element, const std::vector<std::int64_t>& shape,
                     const std::function<double(std::int64_t)>& value,
                     Strides strides = Strides::of_input);

  /// "f32 2x19x67 heads 4/2 dims 24/40 seed 7: score ..., mask ...".
  std::string describe() const;

  /// A spec in a layout of its own for every `stream`, which the seeds of the case draw.
  TensorSpec drawn(Dtype element, std::span<const std::int64_t> shape, std::uint64_t stream,
                   Strides strides) const;

  std::vector<std::shared_ptr<GuardedTensor>> captured{};  // what capture() made
};

/// Streams of Case::drawn; captured tensors have those from kCapturedLayout on.
enum LayoutStream : std::uint64_t {
  kSinksLayout = 1000,
  kCuSeqlensQLayout,
  kCuSeqlensKvLayout,
  kLseLayout,
  kRowMaxLayout,
  kDropoutSeedLayout,
  kDropoutOffsetLayout,
  kScaleLayout,
  kGradientLayout = 1100,
  kCapturedGradientLayout = 1150,
  kCapturedLayout = 1200,
};

/// A tensor [batch, seqlen, heads, head_dim] or packed [total, heads, head_dim] of this shape, laid
/// out so.
GuardedTensor tensor_like(const TensorSpec& shape, Dtype dtype, Layout layout);

/// Sets a row of such a tensor, one head of it; batch does not count where it is packed.
struct RowOfHead {
  std::int64_t batch = 0, row = 0, head = 0;
};
void set_row(GuardedTensor& tensor, const RowOfHead& which, double value);

/// The buffers of a case, each in guards; outputs start as NaN.
class CaseMemory {
 public:
  explicit CaseMemory(const Case& problem);

  AttentionForward args(CpuTarget target = CpuTarget::automatic);
  void poison_outputs();
  /// "k was written", "wrote outside of out": empty when inputs and guards are as they were.
  std::string damage() const;

  GuardedTensor q_scale, k_scale, v_scale;
  GuardedTensor q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, dropout_seed, dropout_offset,
      dropout_places;
  GuardedTensor out, lse, row_max;

 private:
  void fill_inputs();
  void fill_dropout_places();
  void fill_scales();
  void poison_trailing_rows();
  void poison_hidden_keys();
  void set_infinite_values();
  void set_huge_value();

  Case problem_;
};

}  // namespace fovea::testing
