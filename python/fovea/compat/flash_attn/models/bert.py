"""flash_attn.models.bert by Fovea's attention and PyTorch's layers: configured by a BertConfig, with flash_attn's names of weights."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ....errors import Unsupported
from ..bert_padding import pad_input, unpad_input
from ..modules.block import Block
from ..modules.embedding import BertEmbeddings
from ..modules.mha import MHA
from ..modules.mlp import Mlp
from ..ops.activations import ACTIVATIONS
from .gpt import _init_weights, _padded_vocab, pad_rows, renamed


class BertModelOutput(NamedTuple):
    """What `BertModel` returns."""

    last_hidden_state: Any
    pooler_output: Any


class BertForPreTrainingOutput(NamedTuple):
    """What `BertForPreTraining` returns; no loss where no labels are given."""

    loss: Any
    prediction_logits: Any
    seq_relationship_logits: Any


def _check(config: Any) -> None:
    for name in ("dense_seq_output", "last_layer_subset"):
        if getattr(config, name, False):
            raise Unsupported(f"BertModel: {name} is set; expected False: logits of all tokens, of which a loss may take some")


def _is_rotary(config: Any) -> bool:
    return bool(getattr(config, "position_embedding_type", "absolute") == "rotary")


def _unpads(config: Any) -> bool:
    """Whether layers get packed rows: angles belong to places in a sequence, which packed rows do not have here."""
    return bool(getattr(config, "use_flash_attn", False)) and not _is_rotary(config)


def _block(config: Any) -> Block:
    head_dim = config.hidden_size // config.num_attention_heads
    mixer_cls = partial(
        MHA, num_heads=config.num_attention_heads, dropout=config.attention_probs_dropout_prob, causal=False,
        use_flash_attn=_unpads(config), return_residual=True,
        rotary_emb_dim=int(getattr(config, "rotary_emb_dim", head_dim)) if _is_rotary(config) else 0,
        rotary_emb_base=getattr(config, "rotary_emb_base", 10000.0), rotary_emb_scale_base=getattr(config, "rotary_emb_scale_base", None),
        rotary_emb_interleaved=getattr(config, "rotary_emb_interleaved", False),
    )  # fmt: skip
    mlp_cls = partial(Mlp, hidden_features=config.intermediate_size, activation=ACTIVATIONS[config.hidden_act], return_residual=True)
    return Block(
        config.hidden_size, mixer_cls, mlp_cls, partial(nn.LayerNorm, eps=config.layer_norm_eps), prenorm=False,
        resid_dropout1=config.hidden_dropout_prob, resid_dropout2=config.hidden_dropout_prob, return_residual=True,
    )  # fmt: skip


class BertEncoder(nn.Module):  # type: ignore[misc, unused-ignore]
    """The blocks, over packed rows without padding where attention takes them (use_flash_attn)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.unpads = _unpads(config)
        self.layers: Any = nn.ModuleList([_block(config) for _ in range(config.num_hidden_layers)])

    def forward(self, hidden_states: Any, key_padding_mask: Any = None) -> Any:
        """[batch, seqlen, hidden_size]; rows of padding are 0 where rows were packed."""
        if key_padding_mask is None or not self.unpads:
            kwargs = {} if key_padding_mask is None else {"key_padding_mask": key_padding_mask}
            return self._run(hidden_states, kwargs)
        rows, indices, cu_seqlens, max_seqlen, _ = unpad_input(hidden_states, key_padding_mask)
        rows = self._run(rows, {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen})
        return pad_input(rows, indices, *hidden_states.shape[:2])

    def _run(self, hidden_states: Any, mixer_kwargs: dict[str, Any]) -> Any:
        for layer in self.layers:
            hidden_states = layer(hidden_states, mixer_kwargs=mixer_kwargs)
        return hidden_states


class BertPooler(nn.Module):  # type: ignore[misc, unused-ignore]
    """tanh of a projection of the first token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Any) -> Any:
        """[batch, hidden_size]."""
        return torch.tanh(self.dense(hidden_states[:, 0]))


class BertModel(nn.Module):  # type: ignore[misc, unused-ignore]
    """Embeddings, their norm, the encoder, and a pooler unless it is not wanted."""

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__()
        _check(config)
        self.config = config
        positions = 0 if _is_rotary(config) else config.max_position_embeddings
        self.embeddings = BertEmbeddings(config.hidden_size, _padded_vocab(config), positions, config.type_vocab_size, config.pad_token_id)
        self.emb_drop = nn.Dropout(config.hidden_dropout_prob)
        self.emb_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        _init_weights(self, config)

    def forward(
        self, input_ids: Any, position_ids: Any = None, token_type_ids: Any = None, attention_mask: Any = None,
        masked_tokens_mask: Any = None,
    ) -> BertModelOutput:  # fmt: skip
        """`attention_mask` [batch, seqlen] is True, or 1, where a token counts."""
        if masked_tokens_mask is not None:
            raise Unsupported("BertModel: masked_tokens_mask; expected None: states of all tokens, of which a loss may take some")
        hidden_states = self.emb_drop(self.emb_ln(self.embeddings(input_ids, position_ids, token_type_ids)))
        mask = None if attention_mask is None else attention_mask.bool()
        hidden_states = self.encoder(hidden_states, mask)
        return BertModelOutput(hidden_states, None if self.pooler is None else self.pooler(hidden_states))


class _Transform(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = ACTIVATIONS[config.hidden_act]
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Any) -> Any:
        return self.layer_norm(self.transform_act_fn(self.dense(hidden_states)))


class _Predictions(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.transform = _Transform(config)
        self.decoder = nn.Linear(config.hidden_size, _padded_vocab(config))

    def forward(self, hidden_states: Any) -> Any:
        return self.decoder(self.transform(hidden_states))


class _Heads(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.predictions = _Predictions(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


class BertForPreTraining(nn.Module):  # type: ignore[misc, unused-ignore]
    """`BertModel` with heads for masked tokens and for the next sentence."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config)
        self.cls = _Heads(config)
        _init_weights(self.cls, config)
        self.tie_weights()

    def tie_weights(self) -> None:
        """One weight for embedding and prediction."""
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(
        self, input_ids: Any, position_ids: Any = None, token_type_ids: Any = None, attention_mask: Any = None, labels: Any = None,
        next_sentence_label: Any = None,
    ) -> BertForPreTrainingOutput:  # fmt: skip
        """`labels` [batch, seqlen] are 0 where a token was not masked; both kinds of labels together give a loss."""
        states, pooled = self.bert(input_ids, position_ids, token_type_ids, attention_mask)
        logits, relationship = self.cls.predictions(states), self.cls.seq_relationship(pooled)
        loss = None
        if labels is not None and next_sentence_label is not None:
            cross_entropy = nn.functional.cross_entropy
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
            loss = loss + cross_entropy(relationship, next_sentence_label.flatten(), ignore_index=-1)
        return BertForPreTrainingOutput(loss, logits, relationship)


# ---- Weights of transformers ----

_LAYER, _OURS = "bert.encoder.layer.{i}.", "bert.encoder.layers.{i}."
_NAMES = (
    ("bert.embeddings.LayerNorm.", "bert.emb_ln."), (f"{_LAYER}attention.output.dense.", f"{_OURS}mixer.out_proj."),
    (f"{_LAYER}attention.output.LayerNorm.", f"{_OURS}norm1."), (f"{_LAYER}intermediate.dense.", f"{_OURS}mlp.fc1."),
    (f"{_LAYER}output.dense.", f"{_OURS}mlp.fc2."), (f"{_LAYER}output.LayerNorm.", f"{_OURS}norm2."),
    ("cls.predictions.transform.LayerNorm.", "cls.predictions.transform.layer_norm."),
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
)  # fmt: skip
_UNLIKELY = -100.0  # the logit of a token that is padding of the vocabulary


def remap_state_dict(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Weights of transformers' BertForPreTraining by flash_attn's names."""
    own = {name: weight for name, weight in state_dict.items() if not name.endswith("position_ids")}
    made = {}
    for i in range(config.num_hidden_layers):
        for kind in ("weight", "bias"):
            parts = [own.pop(f"bert.encoder.layer.{i}.attention.self.{part}.{kind}") for part in ("query", "key", "value")]
            made[f"bert.encoder.layers.{i}.mixer.Wqkv.{kind}"] = torch.cat(parts)
    own.pop("cls.predictions.decoder.bias", None)  # transformers has it a second time, as cls.predictions.bias
    made |= renamed(own, _NAMES)
    rows, words, decoder = _padded_vocab(config), "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder"
    made[words] = pad_rows(made[words], rows)
    made[f"{decoder}.weight"] = made[words]
    made[f"{decoder}.bias"] = pad_rows(made[f"{decoder}.bias"], rows, _UNLIKELY)
    return made
