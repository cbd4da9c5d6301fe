"""What users write, for type checkers: mypy --strict and basedpyright read this file; nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

import fovea


def train(q: Any, k: Any, v: Any, ids: Any) -> tuple[Any, fovea.Gradients]:
    out, lse = fovea.attention(q, k, v, mask=fovea.causal() & fovea.documents(ids), return_lse=True)
    gradients = fovea.attention_backward(out, q, k, v, out, lse, captured=("bias",), bias=v)
    return gradients.captured["bias"], gradients


def programs(slopes: Any) -> fovea.Program:
    near = fovea.mask_mod("abs(q_idx - kv_idx) < reach", reach=128)
    traced = fovea.score_mod(lambda score, b, h, q_idx, kv_idx: score - slopes[h] * abs(q_idx - kv_idx))
    assert_type(~near & fovea.window(64, None), fovea.Program)
    return fovea.softcap(30.0) | traced.with_captures(slopes=slopes)


def look(shape: tuple[int, int, int, int]) -> str:
    spec = fovea.TensorSpec(shape, "bf16", device="cuda:0")
    page = fovea.explain(spec, spec, spec, causal=True)
    picture = fovea.block_map(spec, spec, causal=True, window=(64, 0))
    assert_type(page, str)
    assert_type(fovea.explain(spec, spec, spec, as_json=True), dict[str, Any])
    assert_type(picture.counts.full, int)
    assert_type(picture.png("mask.png"), bytes)
    return page


def serve(q: Any, k: Any, v: Any) -> Any:
    cache = fovea.kv_cache(q, 8, 4096, 2, 64, page_size=16)
    try:
        return fovea.decode(q, cache, append_k=k, append_v=v, rotary=fovea.Rotary(k, v), window=(1024, 0))
    except fovea.Unsupported as error:
        raise SystemExit(str(error)) from error


def served(q: Any, k: Any, v: Any, cache: fovea.KvCache) -> Any:
    append = fovea.plan_append(cache, k, v)
    append.run(cache, k, v)
    plan = fovea.plan_decode(q, cache, max_seqlen_kv=4096, window=(1024, 0))
    assert_type(plan.explain(as_json=True), dict[str, Any])
    assert_type(plan.workspace_bytes, int)
    return plan.run(q, cache)


def trained(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> fovea.Gradients:
    return fovea.plan_backward(q, k, v, causal=True).run(dout, q, k, v, out, lse)


def turned(q: Any, cos: Any, sin: Any, lengths: Any) -> Any:
    return fovea.rotary(q, cos, sin, offsets=lengths, is_interleaved=True, layout="bhsd", out=q)


def planned(q: Any, k: Any, v: Any) -> int:
    plan = fovea.plan(q, k, v, causal=True, max_seqlen_kv=8192, dropout=fovea.Dropout(0.1, seed=7))
    plan.run(q, k, v, return_lse=True)
    return plan.workspace_bytes
