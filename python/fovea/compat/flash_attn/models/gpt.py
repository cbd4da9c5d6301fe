"""flash_attn.models.gpt by Fovea's attention and PyTorch's layers: configured by the attributes of a GPT2Config, with flash_attn's names of weights."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ....errors import Unsupported
from ..._flash import InvalidCall
from ..modules.block import Block, ParallelBlock
from ..modules.embedding import GPT2Embeddings
from ..modules.mha import MHA
from ..modules.mlp import GatedMlp, Mlp
from ..ops.activations import ACTIVATIONS, GATED
from ..ops.triton.layer_norm import RMSNorm


class CausalLMOutput(NamedTuple):
    """What `GPTLMHeadModel` returns."""

    logits: Any


def _padded_vocab(config: Any) -> int:
    """Rows of the embedding."""
    multiple = getattr(config, "pad_vocab_size_multiple", 1)
    return -(-int(config.vocab_size) // multiple) * multiple


def _norm_cls(config: Any, made: dict[str, Any]) -> Any:
    return partial(RMSNorm if getattr(config, "rms_norm", False) else nn.LayerNorm, eps=config.layer_norm_epsilon, **made)


def _softmax_scale(config: Any, layer_idx: int, head_dim: int) -> float:
    power = -1.0 if getattr(config, "mup_scale_qk_dot_by_d", False) else -0.5
    scale = head_dim**power if config.scale_attn_weights else 1.0
    scale *= getattr(config, "mup_attn_multiplier", 1.0)
    return float(scale / (layer_idx + 1) if config.scale_attn_by_inverse_layer_idx else scale)


def _mixer_cls(config: Any, layer_idx: int, made: dict[str, Any]) -> Any:
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    return partial(
        MHA, num_heads=config.num_attention_heads, num_heads_kv=getattr(config, "n_head_kv", None),
        qkv_proj_bias=getattr(config, "qkv_proj_bias", True), out_proj_bias=getattr(config, "out_proj_bias", True),
        dropout=config.attn_pdrop, softmax_scale=_softmax_scale(config, layer_idx, head_dim), causal=True, layer_idx=layer_idx,
        dwconv=getattr(config, "attn_dwconv", False), rotary_emb_dim=int(getattr(config, "rotary_emb_fraction", 0.0) * head_dim),
        rotary_emb_base=getattr(config, "rotary_emb_base", 10000.0), rotary_emb_scale_base=getattr(config, "rotary_emb_scale_base", None),
        rotary_emb_interleaved=getattr(config, "rotary_emb_interleaved", False), use_alibi=getattr(config, "use_alibi", False),
        window_size=getattr(config, "window_size", (-1, -1)), use_flash_attn=getattr(config, "use_flash_attn", False), **made,
    )  # fmt: skip


def _mlp_cls(config: Any, made: dict[str, Any]) -> Any:
    name = "sqrelu" if getattr(config, "fused_dense_sqrelu_dense", False) else config.activation_function
    if name not in ACTIVATIONS:
        raise InvalidCall(f"GPTModel: activation_function is {name!r}; expected one of {', '.join(ACTIVATIONS)}")
    hidden = config.n_inner if config.n_inner is not None else None if name in GATED else 4 * config.hidden_size
    more: dict[str, Any] = {"multiple_of": getattr(config, "mlp_multiple_of", 128)} if name in GATED else {}
    return partial(
        GatedMlp if name in GATED else Mlp, hidden_features=hidden, activation=ACTIVATIONS[name], bias1=getattr(config, "mlp_fc1_bias", True),
        bias2=getattr(config, "mlp_fc2_bias", True), **more, **made,
    )  # fmt: skip


def _is_parallel(config: Any) -> bool:
    return bool(getattr(config, "parallel_block", False))


def _block(config: Any, layer_idx: int, made: dict[str, Any]) -> Any:
    common: dict[str, Any] = {
        "norm_cls": _norm_cls(config, made), "resid_dropout1": config.embd_pdrop if layer_idx == 0 else config.resid_pdrop,
        "resid_dropout2": config.resid_pdrop, "residual_in_fp32": getattr(config, "residual_in_fp32", False),
    }  # fmt: skip
    classes = _mixer_cls(config, layer_idx, made), _mlp_cls(config, made)
    if _is_parallel(config):
        return ParallelBlock(config.hidden_size, *classes, tied_norm=getattr(config, "parallel_block_tied_norm", False), **common)
    return Block(config.hidden_size, *classes, prenorm=getattr(config, "prenorm", True), **common)


def _init_weights(module: Any, config: Any) -> None:
    """Normal weights; those whose results join the residual are smaller, the more layers there are."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            joins = name.endswith(("out_proj", "fc2"))
            nn.init.normal_(part.weight, std=config.initializer_range / ((2 * config.num_hidden_layers) ** 0.5 if joins else 1.0))
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


class _Model(nn.Module):  # type: ignore[misc, unused-ignore]
    """What both models have in common."""

    def __init__(self, config: Any, process_group: Any) -> None:
        super().__init__()
        if process_group is not None:
            raise Unsupported(f"{type(self).__name__}: process_group; expected None: tensor parallel layers are not here")
        self.config = config


class GPTModel(_Model):
    """Embeddings, blocks and the last norm; `config` has the attributes of a GPT2Config and flash_attn's own."""

    def __init__(self, config: Any, process_group: Any = None, device: Any = None, dtype: Any = None) -> None:
        super().__init__(config, process_group)
        made = {"device": device, "dtype": dtype}
        self.prenorm = getattr(config, "prenorm", True)
        self.embeddings_multiplier = getattr(config, "mup_embeddings_multiplier", 1.0)
        self.embeddings = GPT2Embeddings(
            config.hidden_size, _padded_vocab(config), config.max_position_embeddings,
            word_embed_proj_dim=getattr(config, "word_embed_proj_dim", None), **made,
        )  # fmt: skip
        self.layers: Any = nn.ModuleList([_block(config, i, made) for i in range(config.num_hidden_layers)])
        if self.prenorm:
            self.drop_f = nn.Dropout(config.resid_pdrop)
            self.ln_f = _norm_cls(config, made)(config.hidden_size)
        _init_weights(self, config)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any) -> dict[int, Any]:
        """By layer: what `InferenceParams.key_value_memory_dict` holds."""
        return {i: layer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs) for i, layer in enumerate(self.layers)}

    def forward(self, input_ids: Any, position_ids: Any = None, inference_params: Any = None) -> Any:
        """[batch, seqlen, hidden_size]; with `inference_params` tokens follow those of the caches."""
        if position_ids is None and inference_params is not None:
            position_ids = _positions_behind(input_ids, inference_params)
        hidden = self.embeddings(input_ids, position_ids)
        hidden = hidden if self.embeddings_multiplier == 1.0 else hidden * self.embeddings_multiplier
        mixer_kwargs = {} if inference_params is None else {"inference_params": inference_params}
        if not self.prenorm:
            for layer in self.layers:
                hidden = layer(hidden, mixer_kwargs=mixer_kwargs)
            return hidden
        beside = residual = None
        for layer in self.layers:
            if _is_parallel(self.config):
                hidden, beside, residual = layer(hidden, beside, residual, mixer_kwargs)
            else:
                hidden, residual = layer(hidden, residual, mixer_kwargs=mixer_kwargs)
        summed = self.drop_f(hidden) if residual is None else self.drop_f(hidden) + residual
        summed = summed if beside is None else summed + self.drop_f(beside)
        return self.ln_f(summed.to(self.ln_f.weight.dtype))


def _positions_behind(input_ids: Any, inference_params: Any) -> Any:
    """[batch or 1, seqlen]: behind the tokens in the caches."""
    places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    if inference_params.lengths_per_sample is None:
        return places + inference_params.seqlen_offset
    first = inference_params.batch_size_offset
    return places + inference_params.lengths_per_sample[first : first + input_ids.shape[0], None]


class GPTLMHeadModel(_Model):
    """`GPTModel` and the projection to the vocabulary."""

    def __init__(self, config: Any, process_group: Any = None, device: Any = None, dtype: Any = None) -> None:
        super().__init__(config, process_group)
        made = {"device": device, "dtype": dtype}
        self.transformer = GPTModel(config, **made)
        self.output_scale = getattr(config, "mup_output_multiplier", 1.0) * getattr(config, "mup_width_scale", 1.0)
        width = getattr(config, "word_embed_proj_dim", None)
        self.project_out = None if width is None else nn.Linear(config.hidden_size, width, bias=False, **made)
        bias = getattr(config, "lm_head_bias", False)
        self.lm_head = nn.Linear(config.hidden_size if width is None else width, _padded_vocab(config), bias=bias, **made)
        self.norm_head = getattr(config, "norm_head", False)
        for part in filter(None, (self.project_out, self.lm_head)):
            _init_weights(part, config)
        self.tie_weights()

    def tie_weights(self) -> None:
        """One weight for embedding and projection, unless the configuration says otherwise."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.embeddings.word_embeddings.weight

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any) -> dict[int, Any]:
        """By layer: what `InferenceParams.key_value_memory_dict` holds."""
        return self.transformer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(self, input_ids: Any, position_ids: Any = None, inference_params: Any = None, num_last_tokens: int = 0) -> CausalLMOutput:
        """(logits,), of the last `num_last_tokens` alone where that is not 0."""
        hidden = self.transformer(input_ids, position_ids, inference_params)
        hidden = hidden[:, -num_last_tokens:] if num_last_tokens > 0 else hidden
        hidden = hidden if self.project_out is None else self.project_out(hidden)
        weight = self.lm_head.weight
        if self.norm_head:
            weight = nn.functional.normalize(weight)
        return CausalLMOutput(nn.functional.linear(hidden * self.output_scale, weight, self.lm_head.bias))


# ---- Weights of others ----


def pad_rows(weight: Any, num_rows: int, value: float = 0.0) -> Any:
    """The weight with rows more, for padded vocabularies."""
    more = weight.new_full((num_rows - weight.shape[0], *weight.shape[1:]), value)
    return torch.cat([weight, more])


def renamed(state_dict: dict[str, Any], beginnings: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Weights by their new names: (old, new) beginnings of names, in which {i} is a number; a name without one stays."""
    patterns = [(re.escape(old).replace(r"\{i\}", r"(\d+)"), new.replace("{i}", r"\1")) for old, new in beginnings]

    def name_of(name: str) -> str:
        for pattern, new in patterns:
            if re.match(pattern, name):
                return re.sub(f"^{pattern}", new, name)
        return name

    return {name_of(name): weight for name, weight in state_dict.items()}


_GPT2 = (
    ("wte.", "transformer.embeddings.word_embeddings."), ("wpe.", "transformer.embeddings.position_embeddings."),
    ("ln_f.", "transformer.ln_f."), ("h.{i}.ln_1.", "transformer.layers.{i}.norm1."), ("h.{i}.ln_2.", "transformer.layers.{i}.norm2."),
    ("h.{i}.attn.c_attn.", "transformer.layers.{i}.mixer.Wqkv."), ("h.{i}.attn.c_proj.", "transformer.layers.{i}.mixer.out_proj."),
    ("h.{i}.mlp.c_fc.", "transformer.layers.{i}.mlp.fc1."), ("h.{i}.mlp.c_proj.", "transformer.layers.{i}.mlp.fc2."),
)  # fmt: skip


def remap_state_dict_hf_gpt2(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Weights of transformers' GPT2LMHeadModel or GPT2Model by flash_attn's names: its projections are transposed, its masks left out."""
    own = {name.removeprefix("transformer."): weight for name, weight in state_dict.items() if not re.search(r"\.attn\.(masked_)?bias$", name)}
    transposed = {name: w.T if re.search(r"\.c_\w+\.weight$", name) else w for name, w in own.items()}
    made = renamed(transposed, _GPT2)
    words = "transformer.embeddings.word_embeddings.weight"
    made[words] = pad_rows(made[words], _padded_vocab(config))
    made["lm_head.weight"] = made[words]
    return made
