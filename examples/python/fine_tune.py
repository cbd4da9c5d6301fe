"""Fine-tunes a small language model twice, with PyTorch's attention and with Fovea's: the losses are the same.

The model is transformers' Llama with random weights; it learns to count. Needs PyTorch and transformers, and takes some seconds.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import fovea.torch

STEPS, VOCABULARY = 20, 50


def make_model(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes)
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def batches():
    """Sequences that count upwards from anywhere; the second half of a batch is padded on its left."""
    seeds = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = (torch.randint(0, VOCABULARY, (8, 1), generator=seeds) + torch.arange(32)) % VOCABULARY
        visible = torch.ones_like(tokens)
        visible[4:, :10] = 0
        yield tokens, visible


def train(attention: str) -> list[float]:
    model = make_model(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for tokens, visible in batches():
        labels = tokens.masked_fill(visible == 0, -100)
        loss = model(input_ids=tokens, attention_mask=visible, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    logging.set_verbosity_error()
    fovea.torch.install_transformers()
    curves = {name: train(name) for name in ("sdpa", "fovea")}
    for step in range(0, STEPS, 4):
        print(f"step {step:2}: sdpa {curves['sdpa'][step]:.5f}, fovea {curves['fovea'][step]:.5f}")
    largest = max(abs(one - other) for one, other in zip(*curves.values()))
    print(f"largest difference {largest:.1e}")
    assert curves["fovea"][-1] < 0.8 * curves["fovea"][0], "nothing was learned"
    assert largest < 1e-3, "the curves differ"


if __name__ == "__main__":
    main()
