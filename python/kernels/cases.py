"""Prints the cases whose kernels the wheel fovea-kernels carries, for `fovea pack --cases`: what models call most.

Text alone makes a kernel, so lengths and heads stand here for what they decide: tiles, splits, heads of a tile.
"""

import itertools
import json

# Short ones have tiles of their own, and whether a call fills the machine decides on others.
LENGTHS = (77, 128, 197, 256, 384, 577, 1024, 2048, 8192)
BATCHES = (1, 8, 64)
WINDOW = {"causal": "bottom_right", "window": [1023, 0]}
MASKS = {"full": {}, "causal": {"causal": "bottom_right"}, "window": WINDOW}
CACHES = ({"cached": True}, {"page_size": 16})
# Head dims beside 64 and 128, and their masks: vision encoders have 72 and 80, some language models 96 and 256.
OTHER_HEAD_DIMS = {72: ("full",), 80: ("full",), 96: ("full", "causal"), 256: ("full", "causal", "window")}


def dense():
    """Training and prompts; f32 where there is nothing but the plain formula."""
    shapes = itertools.product(("bf16", "f16"), ((64, tuple(MASKS)), (128, tuple(MASKS)), *OTHER_HEAD_DIMS.items()), BATCHES, LENGTHS, (1, 4))
    for dtype, (head_dim, masks), batch, seqlen, group in shapes:
        for mask in masks:
            shape = {"batch": batch, "seqlen_q": seqlen, "num_heads_q": 16, "num_heads_kv": 16 // group, "head_dim": head_dim, "dtype": dtype}
            yield f"dense_{mask}", shape | MASKS[mask]
    for seqlen in LENGTHS:
        latent = {"num_heads_q": 32, "head_dim": 192, "head_dim_v": 128, "dtype": "bf16"}  # prompts of multi-head latent attention
        yield "dense_latent", {"seqlen_q": seqlen} | latent | MASKS["causal"]
    for head_dim, mask in itertools.product((64, 128), ("full", "causal")):
        yield f"dense_{mask}", {"seqlen_q": 2048, "num_heads_q": 32, "head_dim": head_dim, "dtype": "f32"} | MASKS[mask]


def packed():
    """Sequences of many lengths in one call: of text, or of images."""
    lengths = {"seqlen_q": [1500, 3, 700, 2000], "seqlen_kv": [1500, 3, 700, 2000]}
    masks = dict.fromkeys((64, 128), ("full", "causal")) | {72: ("full",), 80: ("full",), 96: ("causal",), 256: ("causal",)}
    for dtype, head_dim in itertools.product(("bf16", "f16"), masks):
        for mask in masks[head_dim]:
            yield f"packed_{mask}", lengths | {"num_heads_q": 32, "num_heads_kv": 8, "head_dim": head_dim, "dtype": dtype} | MASKS[mask]


def cached():
    """Steps of generation and chunks of prompts over caches, contiguous or in pages of 16. Models have some group or other of up to
    eight heads, whose number is a tile's, and that many kv heads, or a share of them on each GPU, of which splits follow; those in f16 are older, and
    few."""
    groups = {"bf16": range(1, 9), "f16": (1, 4, 8)}
    for dtype, head_dim, pages in itertools.product(groups, (64, 128, 256), CACHES):
        for group, heads in itertools.product(groups[dtype], (8, 4, 2)):
            if heads < 8 and (group <= 4 or head_dim > 128):
                continue  # splits are as many as with eight
            shape = {"num_heads_q": heads * group, "num_heads_kv": heads, "head_dim": head_dim, "dtype": dtype, "causal": "bottom_right"} | pages
            for batch in (1, 16):
                yield "decode", {"batch": batch, "seqlen_q": 1, "seqlen_kv": 4096} | shape
            yield "chunk", {"seqlen_q": 512, "seqlen_kv": 4096} | shape
    # Codes in place of elements: what may differ in between is the group. Sixteen long sequences are taken in groups of splits.
    for codes, head_dim, group, pages in itertools.product(("i8", "e4m3"), (64, 128), (1, 4, 8), CACHES):
        shape = {"num_heads_q": 8 * group, "num_heads_kv": 8, "head_dim": head_dim, "dtype": "bf16", "causal": "bottom_right", "codes": codes} | pages
        for batch, seqlen_kv in ((1, 4096), (16, 4096), (16, 32768)):
            yield "decode_codes", {"batch": batch, "seqlen_q": 1, "seqlen_kv": seqlen_kv} | shape
        yield "chunk_codes", {"seqlen_q": 512, "seqlen_kv": 4096} | shape
    for dtype, pages, batch in itertools.product(("bf16", "f16"), CACHES, (1, 16)):
        shape = {"num_heads_q": 32, "head_dim": 96, "dtype": dtype, "causal": "bottom_right"} | pages
        yield "decode", {"batch": batch, "seqlen_q": 1, "seqlen_kv": 4096} | shape


def prefixed():
    """Steps of generation whose sequences begin with the same keys, with the end of these at a page's end and inside a page."""
    for dtype, group, pages, prefix in itertools.product(("bf16", "f16"), (1, 4, 8), ({}, {"page_size": 16}), (1024, 1000)):
        shape = {"num_heads_q": 32, "num_heads_kv": 32 // group, "head_dim": 128, "dtype": dtype, "causal": "bottom_right"} | pages
        for batch in (2, 4, 16, 64):
            yield "prefix", {"batch": batch, "seqlen_q": 1, "seqlen_kv": 4096, "shared_prefix": prefix} | shape


def featured():
    """Windows over caches; softcap; ALiBi: each of the head dims and groups of the models that have it, which are in bf16. Windows and caps of
    any size are one kernel."""
    causal = MASKS["causal"]
    for head_dim, group, softcap in ((64, 8, None), (128, 4, None), (128, 2, 50.0), (256, 2, 50.0)):
        shape = {"num_heads_q": 8 * group, "num_heads_kv": 8, "head_dim": head_dim, "dtype": "bf16"} | ({} if softcap is None else {"softcap": softcap})
        for mask, pages, (batch, seqlen_q) in itertools.product((causal, WINDOW), CACHES, ((1, 1), (16, 1), (1, 512))):
            yield "cached_featured", {"batch": batch, "seqlen_q": seqlen_q, "seqlen_kv": 4096} | shape | mask | pages
        for mask, seqlen in itertools.product((causal, WINDOW), LENGTHS):
            yield "dense_featured", {"seqlen_q": seqlen} | shape | mask
    for head_dim, seqlen in itertools.product((64, 128), LENGTHS):
        yield "dense_alibi", {"seqlen_q": seqlen, "num_heads_q": 16, "head_dim": head_dim, "dtype": "bf16", "alibi": True} | causal


def recipes():
    """Prompts in eight bits, by the recipes that GPUs have."""
    for recipe, head_dim, mask, seqlen in itertools.product(("accurate", "fast"), (64, 128), ("full", "causal"), LENGTHS):
        shape = {"seqlen_q": seqlen, "num_heads_q": 16, "head_dim": head_dim, "dtype": "bf16", "quant": recipe}
        yield f"dense_{recipe}", shape | MASKS[mask]


def gradients():
    """Training: gradients of q, k and v. Of f16, and of head dims beside 64 and 128, without a window: each is a few hundred
    kilobytes. Lengths decide nothing here."""
    dense_masks = [("bf16", mask) for mask in MASKS] + [("f16", "full"), ("f16", "causal")]
    kinds = [(*kind, head_dim) for kind, head_dim in itertools.product(dense_masks, (64, 128))]
    kinds += [("bf16", mask, head_dim) for head_dim, masks in OTHER_HEAD_DIMS.items() for mask in masks if mask != "window"]
    for dtype, mask, head_dim in kinds:
        yield f"backward_{mask}", {"seqlen_q": 2048, "num_heads_q": 32, "head_dim": head_dim, "dtype": dtype, "backward": True} | MASKS[mask]
    lengths = {"seqlen_q": [1500, 3, 700, 2000], "seqlen_kv": [1500, 3, 700, 2000]}
    for (dtype, mask), head_dim in itertools.product((("bf16", "full"), ("bf16", "causal"), ("f16", "causal")), (64, 128)):
        yield "backward_packed", lengths | {"num_heads_q": 32, "head_dim": head_dim, "dtype": dtype, "backward": True} | MASKS[mask]


def cases():
    for number, (name, fields) in enumerate(itertools.chain(dense(), packed(), cached(), prefixed(), featured(), recipes(), gradients())):
        yield {"name": f"{name}_{number}", "why": "a common call", "batch": 1} | fields


if __name__ == "__main__":
    found = [{key: value for key, value in case.items() if not (key == "batch" and isinstance(case["seqlen_q"], list))} for case in cases()]
    print(json.dumps({"cases": found}, indent=1))
