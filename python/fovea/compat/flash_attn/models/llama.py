"""flash_attn.models.llama: configurations and weights of transformers' llama for `GPTLMHeadModel`."""

from __future__ import annotations

from typing import Any

import torch

from ..._flash import InvalidCall
from .gpt import _padded_vocab, pad_rows, renamed

#: transformers' beginnings of names and ours, of what is neither cut nor joined.
_NAMES = (
    ("model.embed_tokens.", "transformer.embeddings.word_embeddings."), ("model.norm.", "transformer.ln_f."),
    ("model.layers.{i}.input_layernorm.", "transformer.layers.{i}.norm1."),
    ("model.layers.{i}.post_attention_layernorm.", "transformer.layers.{i}.norm2."),
    ("model.layers.{i}.self_attn.o_proj.", "transformer.layers.{i}.mixer.out_proj."),
    ("model.layers.{i}.mlp.down_proj.", "transformer.layers.{i}.mlp.fc2."),
)  # fmt: skip


def llama_config_to_gpt2_config(llama_config: Any) -> Any:
    """A GPT2Config that makes a llama of `GPTLMHeadModel`: RMS norms, gated MLPs, rotary embedding in pairs of neighbours."""
    from transformers import GPT2Config

    scaling = getattr(llama_config, "rope_parameters", None) or getattr(llama_config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise InvalidCall(f"llama_config_to_gpt2_config: rope_type is {kind!r}; expected 'default': other angles are not here")
    own: dict[str, Any] = {
        "rms_norm": True, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": True, "qkv_proj_bias": False, "out_proj_bias": False,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False, "mlp_multiple_of": 1, "n_head_kv": llama_config.num_key_value_heads,
        "rotary_emb_base": getattr(llama_config, "rope_theta", scaling.get("rope_theta", 10000.0)),
    }  # fmt: skip
    return GPT2Config(
        vocab_size=llama_config.vocab_size, n_positions=0, n_embd=llama_config.hidden_size, n_layer=llama_config.num_hidden_layers,
        n_head=llama_config.num_attention_heads, n_inner=llama_config.intermediate_size, activation_function="swiglu", resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=llama_config.rms_norm_eps, bos_token_id=llama_config.bos_token_id,
        eos_token_id=llama_config.eos_token_id, pad_token_id=llama_config.pad_token_id, tie_word_embeddings=False, **own,
    )  # fmt: skip


def _turned_over(weight: Any, num_heads: int, is_interleaved: bool) -> Any:
    """Rows of each head from halves to pairs of neighbours, or back: transformers turns halves."""
    shape = (num_heads, -1, 2) if is_interleaved else (num_heads, 2, -1)
    return weight.unflatten(0, shape).transpose(1, 2).flatten(0, 2)


def _heads(config: Any) -> tuple[int, int]:
    return config.num_attention_heads, getattr(config, "n_head_kv", None) or config.num_attention_heads


def remap_state_dict_hf_llama(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Weights of transformers' LlamaForCausalLM by flash_attn's names; `config` is that of `llama_config_to_gpt2_config`."""
    num_heads, num_heads_kv = _heads(config)
    own = {name: weight for name, weight in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    made: dict[str, Any] = {}
    for i in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{i}.", f"transformer.layers.{i}."
        q, k, v = (own.pop(f"{theirs}self_attn.{part}_proj.weight") for part in "qkv")
        made[f"{ours}mixer.Wqkv.weight"] = torch.cat([_turned_over(q, num_heads, False), _turned_over(k, num_heads_kv, False), v])
        gate, up = (own.pop(f"{theirs}mlp.{part}_proj.weight") for part in ("gate", "up"))
        made[f"{ours}mlp.fc1.weight"] = torch.cat([up, gate])
    made |= renamed(own, _NAMES)
    words = "transformer.embeddings.word_embeddings.weight"
    made["lm_head.weight"] = pad_rows(made.get("lm_head.weight", made[words]), _padded_vocab(config))
    made[words] = pad_rows(made[words], _padded_vocab(config))
    return made


def inv_remap_state_dict_hf_llama(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """`remap_state_dict_hf_llama` the other way; rows of a padded vocabulary go."""
    num_heads, num_heads_kv = _heads(config)
    head_dim = config.hidden_size // num_heads
    own, made = dict(state_dict), dict[str, Any]()
    for i in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{i}.", f"transformer.layers.{i}."
        widths = [head_dim * heads for heads in (num_heads, num_heads_kv, num_heads_kv)]
        q, k, v = own.pop(f"{ours}mixer.Wqkv.weight").split(widths)
        rows = _turned_over(q, num_heads, True), _turned_over(k, num_heads_kv, True), v
        made |= {f"{theirs}self_attn.{part}_proj.weight": weight for part, weight in zip("qkv", rows)}
        up, gate = own.pop(f"{ours}mlp.fc1.weight").chunk(2)
        made |= {f"{theirs}mlp.up_proj.weight": up, f"{theirs}mlp.gate_proj.weight": gate}
    made |= renamed(own, tuple((ours, theirs) for theirs, ours in _NAMES))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        made[name] = made[name][: config.vocab_size]
    return made
