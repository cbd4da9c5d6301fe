#include "attention_options.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "command_line.hpp"
#include "failure.hpp"
#include "recipe_file.hpp"

namespace fovea::tools {
namespace {

constexpr const char* kInputGroup = "Input";
constexpr const char* kScoreGroup = "Score (applied in this order)";
constexpr const char* kMaskGroup = "Mask (a key is visible where all of them show it)";
constexpr const char* kProgramGroup = "What programs read";
constexpr const char* kRunGroup = "Run";

void add_text(CommandLine& line, const char* group, const std::string& names,
              const std::string& type, const std::string& help, std::optional<std::string>& field) {
  line.add({names, type, group, help},
           [&field](const std::string&, const std::string& text) { field = text; });
}

void add_file(CommandLine& line, const char* group, const std::string& names,
              const std::string& help, std::optional<std::string>& field) {
  add_text(line, group, names, "FILE", help, field);
}

void add_extent(CommandLine& line, const std::string& names, const std::string& help,
                std::optional<std::int64_t>& field, std::int64_t least) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  line.add({names, "N", kInputGroup, help},
           [&field, least](const std::string& option, const std::string& text) {
             field = parse_integer(option, text, {.least = least, .most = kMost});
           });
}

Layout parse_layout(const std::string& option, const std::string& text) {
  if (text == "bshd") return Layout::bshd;
  if (text == "bhsd") return Layout::bhsd;
  if (text == "thd") return Layout::thd;
  bad_input(fmt::format("{}: got '{}'; expected bshd, bhsd or thd", option, text));
}

void refuse_repeated_name(const AttentionOptions& options, const std::string& option,
                          const std::string& name) {
  const bool is_tensor = std::any_of(options.tensors.begin(), options.tensors.end(),
                                     [&](const auto& tensor) { return tensor.first == name; });
  const bool is_scalar = std::any_of(options.scalars.begin(), options.scalars.end(),
                                     [&](const auto& scalar) { return scalar.name == name; });
  if (is_tensor || is_scalar)
    bad_input(fmt::format("{}: the name {} is given twice", option, name));
}

void set_deterministic(bool is_wanted, AttentionOptions& o) {
  if (o.is_deterministic.value_or(is_wanted) != is_wanted)
    bad_input("--nondeterministic: stands beside --deterministic; expected one of them");
  o.is_deterministic = is_wanted;
}

}  // namespace

void add_file_options(CommandLine& line, AttentionOptions& o) {
  add_file(line, kInputGroup, "--q", "queries, .npy", o.q);
  add_file(line, kInputGroup, "--k", "keys, .npy", o.k);
  add_file(line, kInputGroup, "--v", "values, .npy", o.v);
  add_file(line, kInputGroup, "--input",
           "a .safetensors file with tensors q, k and v, instead of three files", o.input);
  add_layout_options(line, o);
  line.add(
      {"--dtype", "NAME", kInputGroup,
       "f32, f16 or bf16: what q, k and v hold. .npy has no bf16: it travels as uint16, and needs "
       "--dtype bf16"},
      [&o](const std::string& option, const std::string& text) {
        o.dtype = parse_float_dtype(option, text);
      });
}

void add_layout_options(CommandLine& line, AttentionOptions& o) {
  line.add(
      {"--layout", "NAME", kInputGroup,
       "bshd: [batch, seqlen, heads, head_dim] (default). bhsd: [batch, heads, seqlen, head_dim]. "
       "thd: packed [total, heads, head_dim] with --cu-seqlens-q and --cu-seqlens-kv"},
      [&o](const std::string& option, const std::string& text) {
        o.layout = parse_layout(option, text);
      });
  add_file(line, kInputGroup, "--cu-seqlens-q",
           "thd: where sequences of q begin, and the last one ends; int32 or int64",
           o.cu_seqlens_q);
  add_file(line, kInputGroup, "--cu-seqlens-kv", "the same for k and v", o.cu_seqlens_kv);
}

void add_shape_options(CommandLine& line, AttentionOptions& o) {
  add_extent(line, "--batch", "batch (default 1)", o.batch, 0);
  add_extent(line, "--seqlen-q", "queries of a sequence", o.seqlen_q, 0);
  add_extent(line, "--seqlen-kv", "keys of a sequence (default: --seqlen-q)", o.seqlen_kv, 0);
  add_extent(line, "--num-heads-q", "query heads (default 1)", o.num_heads_q, 1);
  add_extent(line, "--num-heads-kv", "key and value heads (default: --num-heads-q)", o.num_heads_kv,
             1);
  add_extent(line, "--head-dim", "head_dim of q and k (default 64)", o.head_dim, 1);
  add_extent(line, "--head-dim-v", "head_dim of v (default: --head-dim)", o.head_dim_v, 1);
}

void add_score_options(CommandLine& line, AttentionOptions& o) {
  line.add(
      {"--scale,--softmax-scale", "X", kScoreGroup, "factor of q.k (default 1 / sqrt(head_dim))"},
      [&o](const std::string& option, const std::string& text) {
        o.softmax_scale = parse_real(option, text);
      });
  line.add({"--softcap", "C", kScoreGroup, "then C * tanh(score / C)"},
           [&o](const std::string& option, const std::string& text) {
             o.softcap = parse_real(option, text);
           });
  add_file(line, kScoreGroup, "--bias",
           "then + bias[batch, head, q, kv]; missing leading axes and extents of 1 broadcast",
           o.bias);
  add_file(line, kScoreGroup, "--alibi", "then - slopes[head] * abs(aligned q position - kv_idx)",
           o.alibi);
  add_text(line, kScoreGroup, "--score-mod", "TEXT",
           "then this formula, as in 'score + 0.5 * tanh(score)'", o.score_mod);
  add_file(line, kScoreGroup, "--sinks",
           "one logit per query head that joins the softmax's denominator", o.sinks);
  line.add({"--dropout", "P", kScoreGroup, "drop weights with probability P, after the softmax"},
           [&o](const std::string& option, const std::string& text) {
             o.dropout.p = parse_real(option, text);
             if (o.dropout.p < 0 || o.dropout.p > 1)
               bad_input(fmt::format("{}: got '{}'; expected 0 to 1", option, text));
           });
  line.add({"--seed", "N", kScoreGroup, "of dropout (default 0)"},
           [&o](const std::string& option, const std::string& text) {
             o.dropout.seed = parse_counter(option, text);
           });
  line.add({"--dropout-offset", "N", kScoreGroup, "of dropout's counter (default 0)"},
           [&o](const std::string& option, const std::string& text) {
             o.dropout.offset = parse_counter(option, text);
           });
}

void add_mask_options(CommandLine& line, AttentionOptions& o) {
  line.add_with_optional_value(
      {"--causal", "[=ALIGN]", kMaskGroup,
       "hide the future. bottom_right (default): the last query meets the last key. top_left: "
       "the first the first"},
      [&o](const std::string& option, const std::string& text) {
        o.is_causal = true;
        if (!text.empty()) o.causal_align = parse_align(option, text);
      });
  line.add(
      {"--window", "L,R", kMaskGroup,
       "see L keys to the left and R to the right of the aligned position, inclusive; - for an "
       "unbounded side"},
      [&o](const std::string& option, const std::string& text) {
        o.window = parse_window(option, text);
      });
  line.add({"--align", "ALIGN", kMaskGroup,
            "of --window and --alibi (and of --causal): bottom_right (default) or top_left"},
           [&o](const std::string& option, const std::string& text) {
             o.align = parse_align(option, text);
           });
  add_file(line, kMaskGroup, "--segments-q",
           "document ids [batch, seqlen_q], or [total_q] for thd: a query sees keys of its own id; "
           "-1 is padding",
           o.segments_q);
  add_file(line, kMaskGroup, "--segments-kv",
           "the ids of keys; one of the two serves both where lengths are equal", o.segments_kv);
  add_file(
      line, kMaskGroup, "--mask",
      "bools [batch, head, q, kv], true: visible; missing leading axes and extents of 1 broadcast",
      o.mask);
  add_text(line, kMaskGroup, "--mask-mod", "TEXT",
           "a formula that is true where visible, as in 'kv_idx <= q_idx'", o.mask_mod);
  line.add_repeated({"--tensor", "NAME=FILE", kProgramGroup,
                     "a tensor that --score-mod or --mask-mod reads; may be repeated"},
                    [&o](const std::string& option, const std::string& text) {
                      auto tensor = parse_assignment(option, text);
                      refuse_repeated_name(o, option, tensor.first);
                      o.tensors.push_back(std::move(tensor));
                    });
  line.add_repeated({"--scalar", "NAME=VALUE", kProgramGroup,
                     "a number that they read: 3 is an int, 3.0 a float; may be repeated"},
                    [&o](const std::string& option, const std::string& text) {
                      CapturedScalar scalar = parse_scalar(option, text);
                      refuse_repeated_name(o, option, scalar.name);
                      o.scalars.push_back(std::move(scalar));
                    });
}

void add_run_options(CommandLine& line, AttentionOptions& o) {
  line.add({"--compute-dtype", "NAME", kRunGroup,
            "inputs of the two products: auto (default), f32 or bf16"},
           [&o](const std::string& option, const std::string& text) {
             o.compute_dtype = parse_compute_dtype(option, text);
           });
  line.add({"--target", "NAME", kRunGroup,
            "auto (default), scalar, avx2, avx512, avx512_bf16, amx_bf16, neon, and for --quant "
            "avx512_vnni "
            "or avx_vnni; see fovea doctor"},
           [&o](const std::string& option, const std::string& text) {
             o.target = parse_target(option, text);
           });
  line.add_flag({"--deterministic", "", kRunGroup,
                 "the same bits in every run, for any number of threads (default)"},
                [&o] { set_deterministic(true, o); });
  line.add_flag({"--nondeterministic", "", kRunGroup,
                 "gradients on a GPU may be summed in any order, which is faster: their last bits "
                 "differ from run to run"},
                [&o] { set_deterministic(false, o); });
}

void add_device_option(CommandLine& line, Device& device) {
  line.add({"--device", "NAME", kRunGroup,
            "cpu (default), cuda (the first GPU), cuda:N; rocm, rocm:N of AMD; see fovea doctor"},
           [&device](const std::string& option, const std::string& text) {
             device = parse_device(option, text);
           });
}

void add_sm_margin_option(CommandLine& line, int& sm_margin) {
  line.add({"--sm-margin", "N", kRunGroup,
            "SMs of a GPU to leave free for what runs beside it; 0 (default): none"},
           [&sm_margin](const std::string& option, const std::string& text) {
             sm_margin =
                 static_cast<int>(parse_integer(option, text, {.least = 0, .most = 65'535}));
           });
}

void add_quant_option(CommandLine& line, Quantization& quant) {
  line.add(
      {"--quant", "RECIPE", kRunGroup,
       "what q, k, probabilities and v are rounded to: accurate, fast, int8, sage1, sage2, nvfp4, "
       "mxfp4 or fp8_static (by q_scale, k_scale and v_scale of --input), and fields behind it: "
       "accurate,hadamard=yes; or a .json file of fovea calibrate"},
      [&quant](const std::string& option, const std::string& text) {
        quant = is_recipe_file(text) ? read_recipe(option, text) : parse_recipe(option, text);
      });
  line.add({"--accuracy", "X", kRunGroup,
            "instead of --quant: the relative error that out may have; the plan takes the fastest "
            "recipe within it, or none; see explain"},
           [&quant](const std::string& option, const std::string& text) {
             quant.accuracy = parse_accuracy(option, text);
           });
}

void refuse_options_of_other_devices(const AttentionOptions& options) {
  const auto refuse = [&](std::string_view option) {
    bad_input(fmt::format("{}: is for {}; expected none with --device {}", option,
                          options.is_on_gpu() ? "the cpu" : "GPUs", to_string(options.device)));
  };
  if (!options.is_on_gpu()) {
    if (options.sm_margin != 0) refuse("--sm-margin");
    return;
  }
  if (options.target != CpuTarget::automatic) refuse("--target");
  if (options.threads != 0) refuse("--threads");
}

void add_threads_option(CommandLine& line, int& threads) {
  line.add(
      {"--threads", "N", kRunGroup, "how many; 0 (default): as many as affinity and quota allow"},
      [&threads](const std::string& option, const std::string& text) {
        threads = parse_thread_count(option, text);
      });
}

}  // namespace fovea::tools
