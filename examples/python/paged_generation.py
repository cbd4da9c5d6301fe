"""Generates tokens with a paged KV cache: two layers share page table and lengths, and each writes keys and values of its own.

The tokens are those that a model without a cache chooses. Needs PyTorch.
"""

import dataclasses

import torch

import fovea.torch

VOCABULARY, WIDTH, LAYERS, PAGE_SIZE = 100, 64, 2, 8


class Model(torch.nn.Module):
    """Embedding, attention and a layer norm per layer, and the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(
            fovea.torch.MultiheadAttention(WIDTH, num_heads=4, num_heads_kv=2, rotary_dim=16, window=(24, 0)) for _ in range(LAYERS)
        )
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(LAYERS))

    def make_caches(self, batch: int, capacity: int) -> list[fovea.KvCache]:
        first, *others = (layer.make_cache(batch, capacity, page_size=PAGE_SIZE) for layer in self.layers)
        shared = {"page_table": first.page_table, "seqlens": first.seqlens}
        return [first, *(dataclasses.replace(cache, **shared) for cache in others)]

    def forward(self, tokens: torch.Tensor, caches: list[fovea.KvCache] | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms)):
            x = x + layer(norm(x), is_causal=True, cache=caches[index] if caches else None)
        if caches:
            caches[0].seqlens += tokens.shape[1]  # once, since the layers share it
        return x[:, -1] @ self.embedding.weight.T


@torch.no_grad()
def generate(model: Model, prompt: torch.Tensor, count: int, *, has_cache: bool) -> torch.Tensor:
    caches = model.make_caches(prompt.shape[0], prompt.shape[1] + count) if has_cache else None
    tokens = new = prompt
    for _ in range(count):
        logits = model(new if has_cache else tokens, caches)
        new = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def main() -> None:
    torch.manual_seed(0)
    model = Model().eval()
    prompt = torch.randint(0, VOCABULARY, (2, 11))
    tokens = generate(model, prompt, 30, has_cache=True)
    for sequence in tokens:
        print(" ".join(map(str, sequence.tolist())))
    assert torch.equal(tokens, generate(model, prompt, 30, has_cache=False)), "the cache changed a token"


if __name__ == "__main__":
    main()
