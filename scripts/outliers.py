#!/usr/bin/env python3
"""q, k and v with the outliers that recipes of eight bits are known to be good or bad at: what `fovea calibrate` is tried on.

usage: scripts/outliers.py {normal,biased,spikes,gains} FILE.safetensors [--seqlen N] [--heads N] [--head-dim N]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import struct
from typing import Callable

import numpy as np


def biased(name: str, x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Every eighth channel of k has a bias of 20 or -20, as rotary embeddings leave them."""
    bias = np.zeros(x.shape[-1])
    bias[::16], bias[8::16] = 20, -20
    return x + bias if name == "k" else x


def spikes(name: str, x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """One number in a thousand of q, k and v has ten times a normal number added."""
    return np.where(draw.random(x.shape) < 0.001, x + 10 * draw.standard_normal(x.shape), x)


def gains(name: str, x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Channel 5 of every 32 of k is ten times as large, of q 0.3 times."""
    gain = np.ones(x.shape[-1])
    gain[5::32] = {"q": 0.3, "k": 10, "v": 1}[name]
    return x * gain


PATTERNS: dict[str, Callable[[str, np.ndarray, np.random.Generator], np.ndarray]] = {
    "normal": lambda name, x, draw: x, "biased": biased, "spikes": spikes, "gains": gains,
}  # fmt: skip


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """A file of f32 tensors."""
    header, end = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(x.tobytes() for x in tensors.values())


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", choices=PATTERNS)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args()
    draw = np.random.default_rng(7)
    shape = (1, args.seqlen, args.heads, args.head_dim)
    drawn = {name: PATTERNS[args.pattern](name, draw.standard_normal(shape), draw) for name in "qkv"}
    args.file.write_bytes(safetensors({name: x.astype("<f4") for name, x in drawn.items()}))


if __name__ == "__main__":
    main()
