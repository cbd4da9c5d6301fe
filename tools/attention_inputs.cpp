#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "attention_options.hpp"
#include "failure.hpp"
#include "input_checks.hpp"
#include "safetensors.hpp"

namespace fovea::tools {

std::string_view name(Layout layout) {
  constexpr std::string_view kNames[] = {"bshd", "bhsd", "thd"};
  return kNames[static_cast<int>(layout)];
}

int sequence_axis(Layout layout) {
  return layout == Layout::bshd ? 1 : layout == Layout::bhsd ? 2 : 0;
}
int head_axis(Layout layout) { return layout == Layout::bshd ? 2 : 1; }

namespace {

class Loader {
 public:
  Loader(const AttentionOptions& options, OutputFiles& outputs)
      : options_(options), outputs_(outputs) {}

  Array npy(std::string_view option, const std::optional<std::string>& path) {
    if (!path) return {};
    outputs_.add_input(option, *path);
    return read_npy(option, *path,
                    options_.dtype == Dtype::bf16 ? Uint16::is_bf16 : Uint16::refused);
  }

  void load_qkv(Inputs& inputs) {
    if (options_.input) {
      load_safetensors(inputs);
    } else {
      inputs.q = required("--q", options_.q);
      inputs.k = required("--k", options_.k);
      inputs.v = required("--v", options_.v);
    }
    check_input(options_, "q", inputs.q);
    check_input(options_, "k", inputs.k);
    check_input(options_, "v", inputs.v);
    check_related(options_, inputs);
  }

  void load_others(Inputs& inputs) {
    inputs.cu_seqlens_q = npy("--cu-seqlens-q", options_.cu_seqlens_q);
    inputs.cu_seqlens_kv = npy("--cu-seqlens-kv", options_.cu_seqlens_kv);
    inputs.bias = npy("--bias", options_.bias);
    inputs.alibi = npy("--alibi", options_.alibi);
    inputs.segments_q = npy("--segments-q", options_.segments_q);
    inputs.segments_kv = npy("--segments-kv", options_.segments_kv);
    inputs.mask = npy("--mask", options_.mask);
    inputs.sinks = npy("--sinks", options_.sinks);
    for (const auto& [tensor_name, path] : options_.tensors) {
      inputs.tensors.emplace_back(tensor_name, npy(fmt::format("--tensor {}", tensor_name), path));
    }
  }

 private:
  Array required(std::string_view option, const std::optional<std::string>& path) {
    if (!path) {
      bad_input(fmt::format(
          "{}: is missing; expected --q, --k and --v, or --input FILE.safetensors", option));
    }
    if (path->ends_with(".safetensors")) {
      bad_input(fmt::format("{}: {} is a .safetensors file; expected .npy, give it to --input",
                            option, *path));
    }
    return npy(option, path);
  }

  void load_safetensors(Inputs& inputs) {
    if (options_.q || options_.k || options_.v) {
      bad_input("--input: stands beside --q, --k or --v; expected one or the other");
    }
    outputs_.add_input("--input", *options_.input);
    const auto file = read_file("--input", *options_.input);
    if (is_npy(file->bytes())) {
      bad_input(
          fmt::format("--input: {} is a .npy file; expected .safetensors, or --q, --k and --v",
                      *options_.input));
    }
    const Safetensors tensors(file, fmt::format("--input: {}", *options_.input));
    inputs.q = tensors.tensor("q");
    inputs.k = tensors.tensor("k");
    inputs.v = tensors.tensor("v");
    if (options_.quant.scales != ScaleSource::given) return;
    const auto scale = [&](std::string_view name) {
      return tensors.contains(name) ? tensors.tensor(name) : Array{};
    };
    inputs.q_scale = scale("q_scale");
    inputs.k_scale = scale("k_scale");
    inputs.v_scale = scale("v_scale");
  }

  const AttentionOptions& options_;
  OutputFiles& outputs_;
};

void check_packing(const AttentionOptions& options) {
  if (options.layout != Layout::thd) {
    if (options.cu_seqlens_q || options.cu_seqlens_kv) {
      bad_input(fmt::format("{}: needs --layout thd; got {}",
                            options.cu_seqlens_q ? "--cu-seqlens-q" : "--cu-seqlens-kv",
                            name(options.layout)));
    }
    return;
  }
  if (!options.cu_seqlens_q) bad_input("--layout thd: needs --cu-seqlens-q");
  if (!options.cu_seqlens_kv)
    bad_input("--layout thd: needs --cu-seqlens-kv (the same file where both are equal)");
  if (options.mask)
    bad_input("--mask: is dense; expected a program with --layout thd, use --mask-mod");
  if (options.bias)
    bad_input("--bias: is dense; expected a program with --layout thd, use --score-mod");
}

Array shape_alone(Dtype dtype, std::array<std::int64_t, 4> shape, Layout layout) {
  if (layout == Layout::bhsd) std::swap(shape[1], shape[2]);
  if (!checked_size_bytes(dtype, shape).fits) {
    bad_input(fmt::format("the shape [{}, {}, {}, {}] overflows", shape[0], shape[1], shape[2],
                          shape[3]));
  }
  return {.storage = {}, .data = nullptr, .spec = make_spec(dtype, shape)};
}

/// Ids of one side serve both where the lengths are equal.
void share_segments(const AttentionOptions& options, Inputs& inputs) {
  if (static_cast<bool>(inputs.segments_q) == static_cast<bool>(inputs.segments_kv)) return;
  const int axis = sequence_axis(options.layout);
  const auto at = static_cast<std::size_t>(axis);
  const std::int64_t seqlen_q = inputs.q.spec.shape[at], seqlen_kv = inputs.k.spec.shape[at];
  const bool has_q = static_cast<bool>(inputs.segments_q);
  if (seqlen_q != seqlen_kv) {
    bad_input(
        fmt::format("{}: one side alone serves both only where lengths are equal, but q has {} and "
                    "k {}; expected {} too",
                    has_q ? "--segments-q" : "--segments-kv", seqlen_q, seqlen_kv,
                    has_q ? "--segments-kv" : "--segments-q"));
  }
  (has_q ? inputs.segments_kv : inputs.segments_q) = has_q ? inputs.segments_q : inputs.segments_kv;
}

}  // namespace

Inputs load_inputs(const AttentionOptions& options, OutputFiles& outputs) {
  check_packing(options);
  Loader loader(options, outputs);
  Inputs inputs;
  loader.load_qkv(inputs);
  loader.load_others(inputs);
  share_segments(options, inputs);
  check_side_tensors(options, inputs);
  return inputs;
}

Inputs inputs_of_shapes(const AttentionOptions& options, OutputFiles& outputs) {
  if (options.layout == Layout::thd)
    bad_input("--layout thd: needs files; expected bshd or bhsd with shapes");
  check_packing(options);
  if (!options.seqlen_q)
    bad_input("--seqlen-q: is missing; expected a length, as in --seqlen-q 1024");
  const std::int64_t batch = options.batch.value_or(1);
  const std::int64_t num_heads_q = options.num_heads_q.value_or(1);
  const std::int64_t num_heads_kv = options.num_heads_kv.value_or(num_heads_q);
  const std::int64_t seqlen_kv = options.seqlen_kv.value_or(*options.seqlen_q);
  const std::int64_t head_dim = options.head_dim.value_or(64);
  const Dtype dtype = options.dtype.value_or(Dtype::f32);
  Inputs inputs;
  inputs.q = shape_alone(dtype, {batch, *options.seqlen_q, num_heads_q, head_dim}, options.layout);
  inputs.k = shape_alone(dtype, {batch, seqlen_kv, num_heads_kv, head_dim}, options.layout);
  inputs.v =
      shape_alone(dtype, {batch, seqlen_kv, num_heads_kv, options.head_dim_v.value_or(head_dim)},
                  options.layout);
  Loader(options, outputs).load_others(inputs);
  share_segments(options, inputs);
  check_side_tensors(options, inputs);
  return inputs;
}

Inputs inputs_of(const AttentionOptions& options, OutputFiles& outputs) {
  if (options.names_files() && options.names_shapes()) {
    bad_input("shapes stand beside files; expected one or the other");
  }
  return options.names_files() ? load_inputs(options, outputs) : inputs_of_shapes(options, outputs);
}

namespace {

Align alignment(const AttentionOptions& options) {
  if (options.causal_align && options.align && *options.causal_align != *options.align) {
    bad_input("--align: differs from --causal; expected one alignment");
  }
  return options.causal_align.value_or(options.align.value_or(Align::bottom_right));
}

Captures captures_of(const AttentionOptions& options, const Inputs& inputs) {
  Captures captures;
  for (const auto& [tensor_name, array] : inputs.tensors)
    captures.tensors.push_back({tensor_name, array.view()});
  captures.scalars = options.scalars;
  return captures;
}

/// Packed ids are found through the offsets: q_idx counts within a sequence.
MaskMod packed_documents(const Inputs& inputs) {
  return documents({.segments_q = inputs.segments_q.view(),
                    .segments_kv = inputs.segments_kv.view(),
                    .cu_seqlens_q = inputs.cu_seqlens_q.view(),
                    .cu_seqlens_kv = inputs.cu_seqlens_kv.view()});
}

void refuse_unread(const AttentionOptions& options, const ScoreMod& score, const MaskMod& mask) {
  const auto is_read = [&](const std::string& slot) {
    const auto reads = [&](const Captures& captures) {
      const auto has_name = [&](const auto& captured) { return captured.name == slot; };
      return std::any_of(captures.tensors.begin(), captures.tensors.end(), has_name) ||
             std::any_of(captures.scalars.begin(), captures.scalars.end(), has_name);
    };
    return reads(score.captures()) || reads(mask.captures());
  };
  for (const auto& tensor : options.tensors) {
    if (!is_read(tensor.first))
      bad_input(fmt::format("--tensor {}: no program reads it", tensor.first));
  }
  for (const auto& scalar : options.scalars) {
    if (!is_read(scalar.name))
      bad_input(fmt::format("--scalar {}: no program reads it", scalar.name));
  }
}

}  // namespace

ScoreMod make_score(const AttentionOptions& options, const Inputs& inputs) {
  const Align align = alignment(options);
  ScoreMod score;
  if (options.softcap) score = score | softcap(*options.softcap);
  if (inputs.bias) score = score | bias(inputs.bias.view());
  if (inputs.alibi) score = score | alibi(inputs.alibi.view(), align);
  if (options.score_mod)
    score = score | parse_score_mod(*options.score_mod, captures_of(options, inputs));
  return score;
}

MaskMod make_mask(const AttentionOptions& options, const Inputs& inputs) {
  const Align align = alignment(options);
  MaskMod mask;
  // In the order of the C ABI: a formula's text decides which kernel of a pack, and which tuning, is its own.
  if (inputs.mask) mask = mask && dense_mask(inputs.mask.view());
  if (options.window) mask = mask && window(options.window->left, options.window->right, align);
  if (options.is_causal) mask = mask && causal(align);
  if (inputs.segments_q) {
    mask = mask && (options.layout == Layout::thd
                        ? packed_documents(inputs)
                        : documents(inputs.segments_q.view(), inputs.segments_kv.view()));
  }
  if (options.mask_mod)
    mask = mask && parse_mask_mod(*options.mask_mod, captures_of(options, inputs));
  return mask;
}

TensorView as_bshd(const TensorView& view, Layout layout) {
  return layout == Layout::bhsd ? view.permuted({0, 2, 1, 3}) : view;
}

TensorSpec out_spec(const Inputs& inputs, Dtype dtype) {
  const auto rank = static_cast<std::size_t>(inputs.q.spec.rank);
  std::vector<std::int64_t> shape(inputs.q.spec.shape.begin(),
                                  inputs.q.spec.shape.begin() + inputs.q.spec.rank);
  shape[rank - 1] = inputs.v.spec.shape[rank - 1];
  return make_spec(dtype, shape);
}

TensorSpec lse_spec(const AttentionOptions& options, const Inputs& inputs) {
  const auto& shape = inputs.q.spec.shape;
  const std::int64_t seqlen_q = shape[static_cast<std::size_t>(sequence_axis(options.layout))];
  const std::int64_t num_heads_q = shape[static_cast<std::size_t>(head_axis(options.layout))];
  if (options.layout == Layout::thd)
    return make_spec(Dtype::f32, std::array{num_heads_q, seqlen_q});
  return make_spec(Dtype::f32, std::array{shape[0], num_heads_q, seqlen_q});
}

namespace {

TensorView first_columns(const TensorView& view, std::int64_t count) {
  TensorSpec spec = view.spec();
  spec.shape[static_cast<std::size_t>(spec.rank - 1)] = count;
  return {view.data(), spec};
}

}  // namespace

AttentionForward make_call(const AttentionOptions& options, const Inputs& inputs) {
  AttentionForward args{
      .q = as_bshd(inputs.q.view(), options.layout),
      .k = as_bshd(inputs.k.view(), options.layout),
      .v = as_bshd(inputs.v.view(), options.layout),
      .score = make_score(options, inputs),
      .mask = make_mask(options, inputs),
      .softmax_scale = options.softmax_scale,
      .sinks = inputs.sinks.view(),
      .dropout = options.dropout,
      .quant = options.quant,
      .q_scale = inputs.q_scale.view(),
      .k_scale = inputs.k_scale.view(),
      .v_scale = inputs.v_scale.view(),
      .cu_seqlens_q = inputs.cu_seqlens_q.view(),
      .cu_seqlens_kv = inputs.cu_seqlens_kv.view(),
      .compute_dtype = options.compute_dtype,
      .cpu_target = options.target,
      .is_deterministic = options.is_deterministic.value_or(true),
      .sm_margin = options.sm_margin,
  };
  if (options.has_latent_values) args.v = first_columns(args.k, args.v.size(args.v.rank() - 1));
  refuse_unread(options, args.score, args.mask);
  return args;
}

}  // namespace fovea::tools
