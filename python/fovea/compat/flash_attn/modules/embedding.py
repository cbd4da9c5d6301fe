"""flash_attn.modules.embedding by PyTorch's layers: the same constructor arguments and names of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def _positions(input_ids: Any, position_ids: Any) -> Any:
    return torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids


class GPT2Embeddings(nn.Module):  # type: ignore[misc, unused-ignore]
    """Tokens, projected where their width is not the model's, and positions unless there are none (max_position_embeddings <= 0)."""

    def __init__(
        self, embed_dim: int, vocab_size: int, max_position_embeddings: int, padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        made = {"device": device, "dtype": dtype}
        width = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=padding_idx, **made)
        self.project_in = None if word_embed_proj_dim is None else nn.Linear(width, embed_dim, bias=False, **made)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **made)

    def forward(self, input_ids: Any, position_ids: Any = None) -> Any:
        """[batch, seqlen, embed_dim]."""
        embeddings = self.word_embeddings(input_ids)
        embeddings = embeddings if self.project_in is None else self.project_in(embeddings)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_positions(input_ids, position_ids))
        return embeddings


class BertEmbeddings(nn.Module):  # type: ignore[misc, unused-ignore]
    """Tokens, positions and token types, the latter two unless there are none."""

    def __init__(
        self, embed_dim: int, vocab_size: int, max_position_embeddings: int, type_vocab_size: int, padding_idx: int | None = None,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.word_embeddings = nn.Embedding(vocab_size, embed_dim, padding_idx=padding_idx, **made)
        self.max_position_embeddings, self.type_vocab_size = max_position_embeddings, type_vocab_size
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **made)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, **made)

    def forward(self, input_ids: Any, position_ids: Any = None, token_type_ids: Any = None) -> Any:
        """[batch, seqlen, embed_dim]."""
        embeddings = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_positions(input_ids, position_ids))
        if self.type_vocab_size > 0:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            embeddings = embeddings + self.token_type_embeddings(types)
        return embeddings
