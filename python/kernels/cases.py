"""Prints the cases whose kernels the wheel fovea-kernels carries, for `fovea pack --cases`: what models call most.

Text alone makes a kernel, so lengths and heads stand here for what they decide: tiles, splits, heads of a tile.
"""

import itertools
import json

LENGTHS = (256, 2048, 8192)
WINDOW = {"causal": "bottom_right", "window": [1023, 0]}
MASKS = {"full": {}, "causal": {"causal": "bottom_right"}, "window": WINDOW}


def dense():
    """Training and prompts; f32 where there is nothing but the plain formula."""
    for dtype, head_dim, seqlen, group in itertools.product(("bf16", "f16"), (64, 128), LENGTHS, (1, 4)):
        for mask, fields in MASKS.items():
            yield f"dense_{mask}", {"seqlen_q": seqlen, "num_heads_q": 32, "num_heads_kv": 32 // group, "head_dim": head_dim, "dtype": dtype} | fields
    for head_dim, mask in itertools.product((64, 128), ("full", "causal")):
        yield f"dense_{mask}", {"seqlen_q": 2048, "num_heads_q": 32, "head_dim": head_dim, "dtype": "f32"} | MASKS[mask]


def packed():
    """Sequences of many lengths in one call."""
    lengths = {"seqlen_q": [1500, 3, 700, 2000], "seqlen_kv": [1500, 3, 700, 2000]}
    for dtype, head_dim, mask in itertools.product(("bf16", "f16"), (64, 128), ("full", "causal")):
        yield f"packed_{mask}", lengths | {"num_heads_q": 32, "num_heads_kv": 8, "head_dim": head_dim, "dtype": dtype} | MASKS[mask]


def cached():
    """Steps of generation and chunks of prompts over caches, contiguous or in pages of 16."""
    for dtype, group, pages in itertools.product(("bf16", "f16"), (1, 4, 8), ({}, {"page_size": 16})):
        shape = {"num_heads_q": 32, "num_heads_kv": 32 // group, "head_dim": 128, "dtype": dtype, "causal": "bottom_right"} | pages
        for batch, seqlen_kv in ((1, 4096), (16, 4096)):
            yield "decode", {"batch": batch, "seqlen_q": 1, "seqlen_kv": seqlen_kv} | shape
        if pages:
            yield "chunk", {"seqlen_q": 512, "seqlen_kv": 4096} | shape


def prefixed():
    """Steps of generation whose sequences begin with the same keys, with the end of these at a page's end and inside a page."""
    for dtype, group, pages, prefix in itertools.product(("bf16", "f16"), (1, 4, 8), ({}, {"page_size": 16}), (1024, 1000)):
        shape = {"num_heads_q": 32, "num_heads_kv": 32 // group, "head_dim": 128, "dtype": dtype, "causal": "bottom_right"} | pages
        for batch in (2, 4, 16, 64):
            yield "prefix", {"batch": batch, "seqlen_q": 1, "seqlen_kv": 4096, "shared_prefix": prefix} | shape


def gradients():
    """Training: gradients of q, k and v. Of f16, dense without a window: each is a few hundred kilobytes. Lengths decide nothing here."""
    dense_masks = [("bf16", mask) for mask in MASKS] + [("f16", "full"), ("f16", "causal")]
    for (dtype, mask), head_dim in itertools.product(dense_masks, (64, 128)):
        yield f"backward_{mask}", {"seqlen_q": 2048, "num_heads_q": 32, "head_dim": head_dim, "dtype": dtype, "backward": True} | MASKS[mask]
    lengths = {"seqlen_q": [1500, 3, 700, 2000], "seqlen_kv": [1500, 3, 700, 2000]}
    for head_dim in (64, 128):
        yield "backward_packed", lengths | {"num_heads_q": 32, "head_dim": head_dim, "dtype": "bf16", "backward": True} | MASKS["causal"]


def cases():
    for number, (name, fields) in enumerate(itertools.chain(dense(), packed(), cached(), prefixed(), gradients())):
        yield {"name": f"{name}_{number}", "why": "a common call", "batch": 1} | fields


if __name__ == "__main__":
    found = [{key: value for key, value in case.items() if not (key == "batch" and isinstance(case["seqlen_q"], list))} for case in cases()]
    print(json.dumps({"cases": found}, indent=1))
