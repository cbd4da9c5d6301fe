#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "attention_options.hpp"
#include "failure.hpp"
#include "safetensors.hpp"

namespace fovea::tools {
namespace {

std::string_view name(Layout layout) {
  constexpr std::string_view kNames[] = {"bshd", "bhsd", "thd"};
  return kNames[static_cast<int>(layout)];
}

std::string_view axes(Layout layout) {
  constexpr std::string_view kAxes[] = {"[batch, seqlen, heads, head_dim]",
                                        "[batch, heads, seqlen, head_dim]",
                                        "[total, heads, head_dim]"};
  return kAxes[static_cast<int>(layout)];
}

/// Where the sequence axis of q, k and v is.
int sequence_axis(Layout layout) {
  return layout == Layout::bshd ? 1 : layout == Layout::bhsd ? 2 : 0;
}
int head_axis(Layout layout) { return layout == Layout::bshd ? 2 : 1; }

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
    check_input("q", inputs.q);
    check_input("k", inputs.k);
    check_input("v", inputs.v);
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
  }

  void check_input(std::string_view tensor, const Array& array) const {
    if (!is_float(array.spec.dtype)) {
      bad_input(fmt::format("{} has dtype {}; expected f32, f16 or bf16", tensor,
                            fovea::name(array.spec.dtype)));
    }
    if (options_.dtype && array.spec.dtype != *options_.dtype) {
      bad_input(fmt::format("--dtype: {} says {}, but {} holds {}", "the option",
                            fovea::name(*options_.dtype), tensor, fovea::name(array.spec.dtype)));
    }
    const int rank = options_.layout == Layout::thd ? 3 : 4;
    if (array.spec.rank != rank) {
      bad_input(fmt::format("{} has rank {}; expected {} {} (--layout {})", tensor, array.spec.rank,
                            rank, axes(options_.layout), name(options_.layout)));
    }
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

void check_segments(const AttentionOptions& options, const Inputs& inputs) {
  if (!inputs.segments_q) return;
  const auto at = static_cast<std::size_t>(sequence_axis(options.layout));
  const auto check = [&](std::string_view option, const Array& ids, const Array& rows) {
    if (ids.spec.dtype != Dtype::i32 && ids.spec.dtype != Dtype::i64) {
      bad_input(fmt::format("{}: has dtype {}; expected int32 or int64", option,
                            fovea::name(ids.spec.dtype)));
    }
    const bool is_packed = options.layout == Layout::thd;
    const int rank = is_packed ? 1 : 2;
    const std::int64_t seqlen = rows.spec.shape[at];
    const bool fits = ids.spec.rank == rank &&
                      ids.spec.shape[static_cast<std::size_t>(rank - 1)] == seqlen &&
                      (is_packed || ids.spec.shape[0] == rows.spec.shape[0]);
    if (!fits) {
      bad_input(fmt::format(
          "{}: has shape {}; expected {}", option, to_string(ids.spec),
          is_packed ? fmt::format("[{}] (total)", seqlen)
                    : fmt::format("[{}, {}] (batch, seqlen)", rows.spec.shape[0], seqlen)));
    }
  };
  check("--segments-q", inputs.segments_q, inputs.q);
  check("--segments-kv", inputs.segments_kv, inputs.k);
}

/// A tensor of up to four axes, matched from the right with [batch, num_heads_q, seqlen_q, seqlen_kv].
void check_broadcast(std::string_view option, const Array& array,
                     const std::array<std::int64_t, 4>& full) {
  if (!array) return;
  const auto rank = static_cast<std::size_t>(array.spec.rank);
  bool fits = rank >= 2 && rank <= 4;
  for (std::size_t i = 0; fits && i < rank; ++i) {
    const std::int64_t extent = array.spec.shape[rank - 1 - i];
    fits = extent == full[3 - i] || extent == 1;
  }
  if (!fits) {
    bad_input(fmt::format(
        "{}: has shape {}; expected [{}, {}, {}, {}], extents of 1, or without leading axes",
        option, to_string(array.spec), full[0], full[1], full[2], full[3]));
  }
}

void check_alibi(const Array& slopes, std::int64_t batch, std::int64_t num_heads_q) {
  if (!slopes) return;
  const auto& shape = slopes.spec.shape;
  const bool fits = (slopes.spec.rank == 1 && shape[0] == num_heads_q) ||
                    (slopes.spec.rank == 2 && shape[0] == batch && shape[1] == num_heads_q);
  if (!fits) {
    bad_input(fmt::format("--alibi: has shape {}; expected [{}] (num_heads_q) or [{}, {}]",
                          to_string(slopes.spec), num_heads_q, batch, num_heads_q));
  }
}

/// Loads out of range are clamped in programs; a file of the wrong shape is a mistake.
void check_side_tensors(const AttentionOptions& options, const Inputs& inputs) {
  check_segments(options, inputs);
  const auto& q = inputs.q.spec.shape;
  const auto seq = static_cast<std::size_t>(sequence_axis(options.layout));
  const std::int64_t num_heads_q = q[static_cast<std::size_t>(head_axis(options.layout))];
  const bool is_packed = options.layout == Layout::thd;
  const std::int64_t batch = !is_packed            ? q[0]
                             : inputs.cu_seqlens_q ? inputs.cu_seqlens_q.spec.shape[0] - 1
                                                   : 0;
  const std::array full{batch, num_heads_q, q[seq], inputs.k.spec.shape[seq]};
  check_broadcast("--bias", inputs.bias, full);
  check_broadcast("--mask", inputs.mask, full);
  check_alibi(inputs.alibi, batch, num_heads_q);
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
  const Captures captures{.tensors = {{"segments_q", inputs.segments_q.view()},
                                      {"segments_kv", inputs.segments_kv.view()},
                                      {"cu_seqlens_q", inputs.cu_seqlens_q.view()},
                                      {"cu_seqlens_kv", inputs.cu_seqlens_kv.view()}},
                          .scalars = {}};
  return parse_mask_mod(
      "segments_q[cu_seqlens_q[batch] + q_idx] == segments_kv[cu_seqlens_kv[batch] + kv_idx] && "
      "segments_q[cu_seqlens_q[batch] + q_idx] != -1",
      captures);
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
  if (options.is_causal) mask = mask && causal(align);
  if (options.window) mask = mask && window(options.window->left, options.window->right, align);
  if (inputs.segments_q) {
    mask = mask && (options.layout == Layout::thd
                        ? packed_documents(inputs)
                        : documents(inputs.segments_q.view(), inputs.segments_kv.view()));
  }
  if (inputs.mask) mask = mask && dense_mask(inputs.mask.view());
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
      .cu_seqlens_q = inputs.cu_seqlens_q.view(),
      .cu_seqlens_kv = inputs.cu_seqlens_kv.view(),
      .compute_dtype = options.compute_dtype,
      .cpu_target = options.target,
  };
  refuse_unread(options, args.score, args.mask);
  return args;
}

}  // namespace fovea::tools
