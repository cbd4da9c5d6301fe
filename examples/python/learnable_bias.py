"""Learns what a score program reads: a bias by distance for each head, from the outputs of an attention that has one.

Needs PyTorch.
"""

import torch

import fovea
import fovea.torch  # noqa: F401

HEADS, LENGTH, REACH = 4, 48, 8


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    def biased(score, batch, head, q_idx, kv_idx):
        return score + table[head, torch.clamp(q_idx - kv_idx, 0, REACH - 1)]

    return fovea.attention(q, k, v, causal=True, score_mod=biased)


def main() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(HEADS, REACH)
    table = torch.nn.Parameter(torch.zeros(HEADS, REACH))
    optimizer = torch.optim.Adam([table], lr=0.1)
    for step in range(90):
        q, k, v = torch.randn(3, 2, LENGTH, HEADS, 16)
        loss = (attend(q, k, v, table) - attend(q, k, v, wanted)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step:3}: loss {loss.item():.2e}")

    def centred(x: torch.Tensor) -> torch.Tensor:  # softmax sees differences alone
        return x - x.mean(-1, keepdim=True)

    error = (centred(table) - centred(wanted)).abs().max().item()
    print(f"largest error of the table {error:.3f}")
    assert error < 0.05, "the table was not found"


if __name__ == "__main__":
    main()
