// The options of a problem, the same for every command: what they are called, what they mean, and the call that they
// pose.
//
// Call path: add_..._options (command line to AttentionOptions) -> load_inputs or inputs_of_shapes -> make_call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"

#include "array.hpp"
#include "files.hpp"
#include "option_values.hpp"

namespace fovea::tools {

class CommandLine;

enum class Layout : std::uint8_t { bshd, bhsd, thd };

std::string_view name(Layout layout);
/// Where the sequence axis, and that of heads, of q, k and v is.
int sequence_axis(Layout layout);
int head_axis(Layout layout);

struct AttentionOptions {
  // Tensors: files ...
  std::optional<std::string> input, q, k, v, cu_seqlens_q, cu_seqlens_kv;
  // ... or shapes.
  std::optional<std::int64_t> batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim,
      head_dim_v;
  std::optional<Dtype> dtype;
  Layout layout = Layout::bshd;
  bool has_latent_values = false;  // v is the view of k's first head_dim_v columns

  // Scores, in the order in which they are applied.
  std::optional<float> softmax_scale, softcap;
  std::optional<std::string> bias, alibi, score_mod;

  // Masks: a key is visible where all of them show it.
  bool is_causal = false;
  std::optional<Align> causal_align, align;
  std::optional<Window> window;
  std::optional<std::string> segments_q, segments_kv, mask, mask_mod;

  std::vector<std::pair<std::string, std::string>> tensors;  // name, file
  std::vector<CapturedScalar> scalars;
  std::optional<std::string> sinks;
  Dropout dropout;

  ComputeDtype compute_dtype = ComputeDtype::automatic;
  CpuTarget target = CpuTarget::automatic;
  Device device{};
  int threads = 0;
  int sm_margin = 0;
  Quantization quant{};
  std::optional<bool> is_deterministic;  // default: true

  bool is_on_gpu() const { return device.kind != Device::Kind::cpu; }
  bool names_files() const { return input || q || k || v; }
  bool names_shapes() const {
    return batch || seqlen_q || seqlen_kv || num_heads_q || num_heads_kv || head_dim || head_dim_v;
  }
};

void add_file_options(CommandLine& line, AttentionOptions& options);
/// Those of them that say how tensors lie.
void add_layout_options(CommandLine& line, AttentionOptions& options);
void add_shape_options(CommandLine& line, AttentionOptions& options);
void add_score_options(CommandLine& line, AttentionOptions& options);
void add_mask_options(CommandLine& line, AttentionOptions& options);
void add_run_options(CommandLine& line, AttentionOptions& options);
void add_device_option(CommandLine& line, Device& device);
void add_sm_margin_option(CommandLine& line, int& sm_margin);
void add_quant_option(CommandLine& line, Quantization& quant);
void add_threads_option(CommandLine& line, int& threads);

/// The tensors of a call, in the layout of the options; absent ones have rank 0. An array without storage has a shape
/// alone.
struct Inputs {
  Array q, k, v, cu_seqlens_q, cu_seqlens_kv;
  Array q_scale, k_scale, v_scale;  // where --input holds them
  Array bias, alibi, segments_q, segments_kv, mask, sinks;
  std::vector<std::pair<std::string, Array>> tensors;
};

/// Reads every file that the options name. `outputs` learns their names, so that no output replaces an input.
Inputs load_inputs(const AttentionOptions& options, OutputFiles& outputs);
/// As load_inputs, with q, k and v as shapes.
Inputs inputs_of_shapes(const AttentionOptions& options, OutputFiles& outputs);
/// load_inputs or inputs_of_shapes, as the options ask.
Inputs inputs_of(const AttentionOptions& options, OutputFiles& outputs);

/// What means nothing on a GPU, --device cuda beside it.
void refuse_options_of_other_devices(const AttentionOptions& options);

ScoreMod make_score(const AttentionOptions& options, const Inputs& inputs);
MaskMod make_mask(const AttentionOptions& options, const Inputs& inputs);

/// Everything of a call but its outputs, executor and workspace. Views point into `inputs`.
AttentionForward make_call(const AttentionOptions& options, const Inputs& inputs);

/// out in the user's layout: as q, with v's head_dim. No storage.
TensorSpec out_spec(const Inputs& inputs, Dtype dtype);
/// [batch, num_heads_q, seqlen_q], or [num_heads_q, total_q] for thd.
TensorSpec lse_spec(const AttentionOptions& options, const Inputs& inputs);
/// A tensor in the user's layout as the library takes it: [batch, seqlen, heads, head_dim], or packed.
TensorView as_bshd(const TensorView& view, Layout layout);

}  // namespace fovea::tools
