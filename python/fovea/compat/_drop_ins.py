"""The packages whose place Fovea takes, their modules, and what becomes of each argument: data."""

from __future__ import annotations

import dataclasses
from typing import Literal

#: "honoured": as it is there; "taken": has no meaning here and changes no result; "refused": an error names it.
Verdict = Literal["honoured", "taken", "refused"]


@dataclasses.dataclass(frozen=True)
class Row:
    """What becomes of an argument or of a part of a package.

    Attributes
    ----------
    name : str
        Of the argument or module; several share a row, separated by commas.
    verdict : str
        "honoured", "taken" or "refused".
    note : str
        What is particular, or why.
    """

    name: str
    verdict: Verdict
    note: str


@dataclasses.dataclass(frozen=True)
class DropIn:
    """A package.

    Attributes
    ----------
    name : str
        What `install` takes.
    distribution : str
        What package managers call it.
    version : str
        The version whose functions ours are.
    modules : dict
        The name that hosts import to the module of ours.
    arguments : tuple of Row
        Of all its functions.
    parts : tuple of Row
        All else.
    operators : str, optional
        The module of ours whose `register` puts operators of the package in place.
    """

    name: str
    distribution: str
    version: str
    modules: dict[str, str]
    arguments: tuple[Row, ...]
    parts: tuple[Row, ...]
    operators: str | None = None


_FLASH_ATTN = "fovea.compat.flash_attn"
#: Of flash_attn, with weights, and what they are made of.
_MODULES = (
    "modules", "modules.mha", "modules.mlp", "modules.block", "modules.embedding", "ops", "ops.activations", "ops.fused_dense",
    "ops.rms_norm", "ops.triton", "ops.triton.layer_norm", "models", "models.gpt", "models.llama", "models.bert", "utils",
    "utils.generation",
)  # fmt: skip
_WINDOW = "both ends count; a negative side is open; beside causal the right side is 0; a pair, list or tensor"
_SCALE_AND_CAUSAL = (
    Row("softmax_scale", "honoured", "1 / sqrt(head_dim) unless given"),
    Row("causal", "honoured", "bottom right: the last query meets the last key"),
)

_FLASH_ATTN_2 = DropIn(
    name="flash_attn",
    distribution="flash-attn",
    version="2.8.4",
    modules={
        "flash_attn": _FLASH_ATTN,
        "flash_attn.flash_attn_interface": f"{_FLASH_ATTN}.flash_attn_interface",
        "flash_attn.bert_padding": f"{_FLASH_ATTN}.bert_padding",
        "flash_attn.layers": f"{_FLASH_ATTN}.layers",
        "flash_attn.layers.rotary": f"{_FLASH_ATTN}.layers.rotary",
        **{f"flash_attn.{name}": f"{_FLASH_ATTN}.{name}" for name in _MODULES},
        "flash_attn_2_cuda": f"{_FLASH_ATTN}.extension",
    },
    arguments=(
        Row("q, k, v, kv, qkv", "honoured", "f32, too; head dims up to 576; any strides; gradients but over caches"),
        Row("cu_seqlens, cu_seqlens_q, cu_seqlens_k", "honoured", "i32 or i64"),
        Row("max_seqlen, max_seqlen_q, max_seqlen_k", "honoured", "may be more than the longest; beside block_table they bound kernels, else they are not needed"),
        Row("dropout_p", "honoured", "drawn from PyTorch's generator, other elements than there; 0 beside block_table"),
        *_SCALE_AND_CAUSAL,
        Row("softcap", "honoured", "0 is none; beside dropout, too"),
        Row("window_size", "honoured", f"{_WINDOW}; a right side of seqlen_k or more is open"),
        Row("alibi_slopes", "honoured", "lse has the bias by distance beside causal, too, where the peer's is larger by slope * position"),
        Row("deterministic", "honoured", "forward always is; without it gradients may take a faster kernel"),
        Row("return_attn_probs", "honoured", "(out, lse, S_dmask): lse +inf where a row sees no key; S_dmask is exp(score - row maximum), the sign bit set where "
            "dropout drops, without elements where there is no dropout"),
        Row("block_table", "honoured", "pages of any size, no multiple of 256; without gradients"),
        Row("k_cache, v_cache", "honoured", "contiguous or pages; written in place; without gradients"),
        Row("cache_seqlens", "honoured", "a number, a tensor, or None for the whole cache; a sequence without room is refused on the CPU, on a GPU nothing is written there"),
        Row("cache_batch_idx", "honoured", "not beside block_table; two sequences that append to one slot are refused on the CPU"),
        Row("cache_leftpad", "honoured", "beside block_table, too"),
        Row("rotary_cos, rotary_sin", "honoured", "f32, f16 or bf16; beside new keys alone; keys at their rows of the cache, queries of neither causal nor a window all at cache_seqlens"),
        Row("rotary_interleaved", "honoured", "True unless given"),
        Row("num_splits", "taken", "lengths alone decide where keys are split, so no bits depend on it; above 128, and above 1 beside block_table of packed queries, refused"),
        Row("return_softmax_lse", "honoured", "(out, lse): +inf where a row sees no key"),
    ),
    parts=(
        Row("flash_attn.flash_attn_interface", "honoured", "and its _flash_attn_forward, _flash_attn_backward, their varlen and _wrapped_ kinds"),
        Row("flash_attn.bert_padding", "honoured", "pad_input, unpad_input, unpad_input_for_concatenated_sequences, index_first_axis, index_put_first_axis, index_first_axis_residual"),
        Row("flash_attn.layers.rotary", "honoured", "apply_rotary_emb (also as apply_rotary_emb_func), apply_rotary_emb_qkv_, apply_rotary_emb_kv_, apply_rotary_emb_torch, RotaryEmbedding with XPos"),
        Row("flash_attn.modules.mha", "honoured", "MHA, FlashSelfAttention, FlashCrossAttention, SelfAttention, CrossAttention, get_alibi_slopes, LinearResidual; caches keep to window_size, "
            "where the peer's forget it; SelfAttention hides padding truly, a row that sees no key is 0; ParallelMHA is not there"),
        Row("flash_attn.modules.mlp, .modules.block, .modules.embedding", "honoured", "Mlp, GatedMlp, FusedMLP; Block, ParallelBlock; GPT2Embeddings, BertEmbeddings, by PyTorch's layers: words "
            "about fused kernels and checkpoint_lvl change nothing; tensor parallel classes are not there"),
        Row("flash_attn.ops.triton.layer_norm, .ops.rms_norm, .ops.activations, .ops.fused_dense", "honoured", "layer_norm_fn, rms_norm_fn, RMSNorm, rms_norm, swiglu, sqrelu_fwd, FusedDense, "
            "fused_dense_func, by PyTorch's operators"),
        Row("flash_attn.models.gpt, .models.llama, .models.bert", "honoured", "GPTModel, GPTLMHeadModel, BertModel, BertForPreTraining, and remap_state_dict_hf_gpt2, llama_config_to_gpt2_config, "
            "remap_state_dict_hf_llama and its inverse, bert's remap_state_dict; refused by name: process_group, dense_seq_output, last_layer_subset; from_pretrained is not there"),
        Row("flash_attn.utils.generation", "honoured", "InferenceParams; generate is not there"),
        Row("flash_attn.losses, .cute, .layers.patch_embed, .models.vit, .utils.benchmark", "refused", "not there: ModuleNotFoundError"),
        Row("flash_attn_2_cuda", "honoured", "fwd, varlen_fwd, bwd, varlen_bwd, fwd_kvcache, by position: flash_attn's own Python runs on them"),
        Row("torch.compile", "honoured", "whole graphs, over caches and block_table too; a gradient through a cache is an error when it is asked for"),
    ),
)

_FLASH_ATTN_3 = DropIn(
    name="flash_attn_3",
    distribution="flash_attn_3",
    version="3.0.0",
    modules={
        "flash_attn_interface": "fovea.compat.flash_attn_3",
        "flash_attn_3": "fovea.compat.flash_attn_3",
        "flash_attn_3._C": "fovea.compat.flash_attn_3.operators",
    },
    arguments=(
        Row("q, k, v, qkv", "honoured", "f32, f16, bf16, any head dims up to 576, head_dim_v too; gradients but over caches; float8_e4m3fn but over caches, beside qv, "
            "without gradients, on GPUs from compute capability 8.9 on and up to head dims of 128; out is bf16 then"),
        Row("num_heads_q", "honoured", "of a qkv of rank 4"),
        Row("qv", "honoured", "k and v are joined by a copy, unless they are the last and the first columns of one tensor; over a cache that alone, and without new keys"),
        Row("q_descale, k_descale, v_descale", "honoured", "of q, k and v in float8, and of caches in float8 beside q in f16, bf16 or f32; as there, no effect on other dtypes"),
        *_SCALE_AND_CAUSAL,
        Row("softcap", "honoured", "0 is none"),
        Row("window_size", "honoured", _WINDOW),
        Row("attention_chunk", "honoured", "0 is none; with gradients, too"),
        Row("cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new", "honoured", "i32 or i64; on a GPU packed new keys go with packed queries"),
        Row("max_seqlen_q, max_seqlen_k", "honoured", "may be more than the longest; over a cache they bound kernels, else they are not needed"),
        Row("seqused_q, seqused_k", "honoured", "with gradients; out of other queries is 0, lse -inf; no row is copied, but queries by seqused_q over a cache"),
        Row("num_splits", "taken", "lengths alone decide where keys are split, so no bits depend on it; above 256 refused"),
        Row("pack_gqa", "taken", "kernels decide"),
        Row("deterministic", "honoured", "forward always is; without it gradients may take a faster kernel"),
        Row("sm_margin", "honoured", "on a GPU, by kernels that run a CTA an SM; others refuse it by name"),
        Row("return_attn_probs", "honoured", "(out, lse): -inf where a row sees no key, also of no keys at all"),
        Row("k_cache, v_cache", "honoured", "contiguous or pages; written in place; without gradients"),
        Row("cache_seqlens", "honoured", "a number, a tensor, or None for the whole cache"),
        Row("cache_batch_idx", "honoured", "beside page_table the rows of the table"),
        Row("cache_leftpad", "honoured", "beside page_table, too"),
        Row("page_table", "honoured", "pages of any size"),
        Row("rotary_cos, rotary_sin", "honoured", "beside new keys alone; keys at their rows of the cache, queries of neither causal nor a window all at the first"),
        Row("rotary_seqlens", "honoured", "the first position of each sequence, of queries and new keys"),
        Row("rotary_interleaved", "honoured", "True unless given"),
        Row("scheduler_metadata", "taken", "kernels read lengths themselves"),
        Row("return_softmax_lse", "honoured", "(out, lse, out_accum, lse_accum), the last two without elements: splits are joined"),
        Row("out_partial, lse_partial, out, out_dtype", "honoured", "of flash_attn_combine"),
        Row("batch_size, max_seqlen_k_new, num_heads_kv, headdim, headdim_v, qkv_dtype, page_size, has_softcap", "taken", "of get_scheduler_metadata, "
            "which gives a tensor without elements"),
    ),
    parts=(
        Row("torch.ops.flash_attn_3", "honoured", "fwd, bwd, fwd_combine, get_scheduler_metadata, in graphs too; those of another package stay where they are there already"),
        Row("flash_attn_3._C", "honoured", "importing it is no error"),
        Row("torch.nn.attention", "honoured", 'activate_flash_attention_impl("FA3") runs on the operators, on GPUs of compute capability 9.0: PyTorch asks for one'),
    ),
    operators="fovea.compat.flash_attn_3.operators",
)  # fmt: skip

_PALLAS = "fovea.compat.pallas_flexattn"
_PALLAS_FLEXATTN = DropIn(
    name="pallas_flexattn",
    distribution="pallas-flexattn",
    version="0.1.0",
    modules={"pallas_flexattn": _PALLAS, **{f"pallas_flexattn.{part}": f"{_PALLAS}.{part}" for part in ("flash_attn", "mask_mod", "block_mask", "kernel_tuner")}},
    arguments=(
        Row("q, k, v", "honoured", "any lengths, no multiples of blocks; k and v with fewer heads, too; derivatives of all orders that fovea.jax has"),
        Row("mask_mod", "honoured", "of (q_idx, kv_idx) or of (batch, head, q_idx, kv_idx); a row that sees no key gives 0, where the peer gives NaN"),
        Row("causal, window_size, sliding_window", "honoured", "of the package's first signature, by position too; beside causal the window is not looked at; -1 is open on its side alone"),
        Row("score_mod", "honoured", "of (score, batch, head, q_idx, kv_idx), which the peer planned"),
        Row("block_mask", "honoured", "what it does not list is not seen; the peer's kernels do not look at theirs"),
        Row("block_r, block_c, num_warps, num_stages, interpret", "taken", "plans choose; the CPU needs no interpreter"),
        Row("o, logsumexp, do", "honoured", "of flash_attention_bwd; o and logsumexp are made anew"),
    ),
    parts=(
        Row("create_block_mask", "honoured", "exact, where the peer looks at nine cells of a block"),
        Row("document_mask", "honoured", "of mask_mod, without block_size; the peer raises NotImplementedError"),
        Row("get_optimal_params, get_kernel_config, print_kernel_config", "honoured", "the peer's numbers, which nothing here reads"),
        Row("pallas_flexattn.benchmark", "refused", "not there: ModuleNotFoundError"),
    ),
)  # fmt: skip

_SAGE = "fovea.compat.sageattention"
_SAGEATTENTION = DropIn(
    name="sageattention",
    distribution="sageattention",
    version="2.2.0",
    modules={"sageattention": _SAGE, **{f"sageattention.{part}": f"{_SAGE}.{part}" for part in ("core", "quant")}},
    arguments=(
        Row("q, k, v", "honoured", "f32, too; any head dims up to 576, lengths and strides; fewer heads of k and v; on the CPU, on GPUs f16 and bf16 up to head dims of 128: those of fp8 from "
            "compute capability 8.9 on, those of fp16 in f16 alone, else a refusal by name; forward: asking for a gradient is an error"),
        Row("tensor_layout", "honoured", "HND unless given, or NHD"),
        Row("is_causal", "honoured", "top left, as there, of any lengths"),
        Row("sm_scale, scale", "honoured", "1 / sqrt(head_dim) unless given; scale is PyTorch's word for it"),
        Row("return_lse", "honoured", "(out, lse), lse of the problem before smoothing, -inf where a row sees no key; of sageattn_varlen, too, which drops it there"),
        Row("attn_mask", "honoured", "of every function, where all but one drop it there, and beside is_causal; bool: hidden truly, a row that sees no key is 0; any other is added: in powers of two "
            "in sageattn_qk_int8_pv_fp16_triton, as there, in those of e elsewhere, as PyTorch does; not in sageattn_varlen"),
        Row("smooth_k", "honoured", "True unless given; the mean is a sequence's in sageattn_varlen, where the peer takes that of the pack"),
        Row("smooth_v", "honoured", "beside every pv_accum_dtype, where the peer warns and forgets it; exact means, without the peer's padding; on GPUs not beside dropout"),
        Row("qk_quant_gran", "honoured", "per_thread or per_warp"),
        Row("pv_accum_dtype", "honoured", "the format of v, the range of its codes and the levels of sums; sums are f32, where the peer's may be f16 or have 22 bits; "
            "an unknown word is refused, where the peer's fp8 kernels return what lay in memory"),
        Row("quantization_backend", "taken", "triton or cuda: halves are rounded to even for both"),
        Row("dropout_p", "honoured", "of PyTorch's generator; dropped there"),
        Row("enable_gqa", "taken", "heads say it"),
        Row("align, window, softcap, bias, alibi, score_mod, mask, mask_mod, segment_ids, sinks, dropout, cpu_target, deterministic, sm_margin", "honoured", "Fovea's own words, which the peer "
            "lacks; any other keyword is refused, where the peer drops it"),
        Row("quant", "honoured", "another recipe in place of the function's: accurate, fast, none"),
        Row("cu_seqlens_q, cu_seqlens_k", "honoured", "i32 or i64"),
        Row("max_seqlen_q, max_seqlen_k", "taken", "lengths are read from the offsets"),
        Row("km, BLKQ, WARPQ, BLKK, scale_max", "honoured", "of sageattention.quant: any sizes, WARPQ divides BLKQ; km [batch, heads, dim], or with its axis of rows"),
    ),
    parts=(
        Row("sageattention.core", "honoured", "the six functions, get_cuda_version, get_cuda_arch_versions, SM80_ENABLED and its like; sageattn runs what the peer runs on sm80, 86, 89, 90, 120 and 121, "
            "and on others, which the peer refuses, and on the CPU what it runs on sm80"),
        Row("sageattention.quant", "honoured", "per_block_int8, per_warp_int8, sub_mean, per_channel_fp8, by PyTorch's operators on every device; zeros have scales above 0"),
        Row("sageattention.triton, sageattention.fa3_wrapper, sageattention._fused, sageattention._qattn_sm80, sageattention._qattn_sm89, sageattention._qattn_sm90", "refused", "not there: "
            "ModuleNotFoundError"),
        Row("sageattn3", "refused", "not there: a package of its own, which fovea.compat installs by that name"),
        Row("torch.compile", "honoured", "a graph breaks at each call"),
    ),
)  # fmt: skip

_SAGEATTN3 = DropIn(
    name="sageattn3",
    distribution="sageattn3",
    version="1.0.0",
    modules=dict.fromkeys(("sageattn3", "sageattn3.api"), f"{_SAGE}.blackwell"),
    arguments=(
        Row("q, k, v", "honoured", "f32, too; any head dims up to 576, lengths and strides; fewer heads of k and v; k is not written; on the CPU, on GPUs the refusal of every kernel; forward: asking "
            "for a gradient is an error"),
        Row("attn_mask", "honoured", "dropped there; bool: hidden truly, a row that sees no key is 0; any other is added"),
        Row("is_causal", "honoured", "top left, of any lengths"),
        Row("per_block_mean", "honoured", "True: the means of blocks of 128 queries, without the peer's padding, in f32; False is refused"),
        Row("scale, dropout_p, enable_gqa", "honoured", "PyTorch's words, as in sageattention; dropped there"),
        Row("return_lse", "honoured", "(out, lse), lse of the problem before smoothing"),
        Row("align, window, softcap, bias, alibi, score_mod, mask, mask_mod, segment_ids, sinks, dropout, cpu_target, deterministic, sm_margin", "honoured", "Fovea's own words, which the peer "
            "lacks; any other keyword is refused, where the peer drops it"),
        Row("quant", "honoured", "another recipe in place of nvfp4: mxfp4, fast, none"),
    ),
    parts=(
        Row("sageattn3.api", "honoured", "sageattn3_blackwell; preprocess_qkv, scale_and_quant_fp4 and its kin, blockscaled_fp4_attn are not there: attention rounds by itself"),
        Row("fp4attn_cuda, fp4quant_cuda", "refused", "not there: ModuleNotFoundError"),
        Row("torch.compile", "honoured", "a graph breaks at each call"),
    ),
)  # fmt: skip

_KVAX = "fovea.compat.kvax"
_KVAX_MODULES = (
    "ops", "ops.flash_attention_triton", "ops.flash_attention_clean", "ops.flash_attention_cudnn", "ops.mask_creator", "utils",
    "utils.benchmarking", "utils.common", "utils.math", "utils.permutation", "utils.sharding", "utils.specs", "utils.typing",
)  # fmt: skip
_KVAX_DROP_IN = DropIn(
    name="kvax",
    distribution="kvax",
    version="0.1.1",
    modules={"kvax": _KVAX, **{f"kvax.{part}": f"{_KVAX}.{part}" for part in _KVAX_MODULES}},
    arguments=(
        Row("query, key, value", "honoured", "f32, too; any head dims up to 576, any lengths, no multiples of blocks; gradients once, in reverse mode"),
        Row("query_positions, kv_positions", "honoured", "any integers"),
        Row("query_segment_ids, kv_segment_ids", "honoured", "a document may lie in several pieces; padding sees nothing and is seen by nobody, with output and gradients 0"),
        Row("mask", "honoured", "one or three; gradients are those of the first; None looks at positions and ids alone. A mask of other block sizes than fwd_params is refused"),
        Row("scale", "honoured", "1 unless given, as there"),
        Row("bias", "refused", "NotImplementedError, as there; fovea.jax.attention takes one"),
        Row("fwd_params, bwd_params", "honoured", "sizes of a mask's blocks; kernels choose their own"),
        Row("assume_sequential_positions", "honoured", "positions are indices, under context parallelism those of the whole sequence"),
        Row("memory_optimized_gqa_backward", "taken", "heads of a group are always summed in the kernel, in f32 and in a fixed order"),
        Row("permute_tokens_for_load_balance", "honoured", "key and value are put in order again, also by the API without context managers"),
        Row("debug", "taken", "fovea.explain says which kernel runs"),
        Row("mesh", "honoured", "that of jax.set_mesh or of `with mesh:` unless given"),
        Row("query_spec, kv_spec", "honoured", "kv heads may stay whole beside split query heads, also more than one"),
        Row("calc_bwd_mask, skip_pad_tokens", "honoured", "of create_attention_mask"),
    ),
    parts=(
        Row("kvax.ops.flash_attention", "honoured", "both versions' in one: with attention_specs, or with mesh, query_spec and kv_spec, or neither on one device"),
        Row("kvax.ops.flash_attention_clean", "honoured", "flash_attention and create_attention_mask"),
        Row("kvax.ops.flash_attention_cudnn", "honoured", "jax.nn.dot_product_attention, by cuDNN on GPUs alone"),
        Row("kvax.ops.mask_creator", "honoured", "in jax.numpy; also print_mask, calculate_mask_sparsity, make_attention_mask_specs"),
        Row("kvax.utils", "honoured", "FlashAttentionParamsConfig, PADDING_SEGMENT_ID, attention_specs, (un)permute_tokens_context_parallelism; and of its modules what they have"),
        Row("kvax.utils.benchmarking", "honoured", "inputs, timing and comparison; benchmarks.py is `python -m fovea bench mha` and its kin"),
        Row("kvax.ops.ring_attention_sketch, kernels of kvax.ops.flash_attention_triton", "refused", "not there: ModuleNotFoundError, AttributeError"),
        Row("jax.checkpoint", "honoured", 'out and lse are named "attention_outputs"'),
    ),
)  # fmt: skip

DROP_INS = {drop_in.name: drop_in for drop_in in (_FLASH_ATTN_2, _FLASH_ATTN_3, _PALLAS_FLEXATTN, _SAGEATTENTION, _SAGEATTN3, _KVAX_DROP_IN)}


def table(drop_in: DropIn) -> str:
    """Both tables of a package, in Markdown."""
    parts = []
    for title, rows in (("argument", drop_in.arguments), ("part", drop_in.parts)):
        parts.append(f"| {title} | | |\n|---|---|---|\n")
        parts += [f"| `{row.name.replace(', ', '` `')}` | {row.verdict} | {row.note} |\n" for row in rows]
        parts.append("\n")
    return "".join(parts).strip() + "\n"
