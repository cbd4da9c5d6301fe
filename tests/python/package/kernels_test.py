"""The wheel fovea-kernels: on a machine without a kernel compiler, common calls are planned, and their kernels come from it.

A driver that computes nothing stands in for a GPU: FOVEA_FAKE_LIBCUDA names its file.
"""

import json
import subprocess
import sys

import pytest

fovea_kernels = pytest.importorskip("fovea_kernels")

PROGRAM = """
import itertools, json, sys
import fovea

def source(dtype, head_dim, features, heads_kv=8, seqlen=2048, packed=False):
    shape = (seqlen, 32, head_dim) if packed else (1, seqlen, 32, head_dim)
    q = fovea.TensorSpec(shape, dtype, "cuda:0")
    k = fovea.TensorSpec(shape[:-2] + (heads_kv, head_dim), dtype, "cuda:0")
    if packed:
        features = {**features, "cu_seqlens": fovea.TensorSpec((5,), "i32", "cuda:0")}
    try:
        return fovea.plan(q, k, k, **features).explain(as_json=True)["kernel_source"]
    except fovea.Unsupported as error:
        return str(error)

def source_of_gradients(dtype, head_dim, features, heads_kv, seqlen, packed=False):
    shape = (seqlen, 32, head_dim) if packed else (1, seqlen, 32, head_dim)
    q, k = spec(shape, dtype), spec(shape[:-2] + (heads_kv, head_dim), dtype)
    if packed:
        features = {**features, "cu_seqlens": fovea.TensorSpec((5,), "i32", "cuda:0")}
    try:
        return fovea.plan_backward(q, k, k, **features).explain(as_json=True)["kernel_source"]
    except fovea.Unsupported as error:
        return str(error)

def spec(shape, dtype):
    return fovea.TensorSpec(shape, dtype, "cuda:0")

def source_over_cache(dtype, heads_kv, batch, page_size=None, seqlen_q=1, head_dim=128, group=None, **options):
    rows = (batch, 4096) if page_size is None else (batch * 4096 // page_size, page_size)
    heads_q = 32 if group is None else heads_kv * group
    kv, new = spec((*rows, heads_kv, head_dim), dtype), spec((batch, seqlen_q, heads_kv, head_dim), dtype)
    table = None if page_size is None else spec((batch, 4096 // page_size), "i32")
    cache = fovea.KvCache(kv, kv, spec((batch,), "i32"), table)
    try:
        plan = fovea.plan_decode(spec((batch, seqlen_q, heads_q, head_dim), dtype), cache, append_k=new, append_v=new, **options)
        return plan.explain(as_json=True)["kernel_source"]
    except fovea.Unsupported as error:
        return str(error)

masks = {"full": {}, "causal": {"causal": True}, "word": {"mask": fovea.causal()}, "window": {"causal": True, "window": (300, 0)}}
found = {}
for dtype, head_dim, (name, mask), lse in itertools.product(("bf16", "f16"), (64, 128), masks.items(), (False, True)):
    for heads_kv, seqlen in ((32, 300), (8, 2048), (8, 8192)):
        found[f"{dtype} d{head_dim} {name} lse={lse} kv={heads_kv} {seqlen}"] = source(dtype, head_dim, {**mask, "return_lse": lse}, heads_kv, seqlen)
    if name in ("full", "causal"):
        found[f"{dtype} d{head_dim} {name} packed lse={lse}"] = source(dtype, head_dim, {**mask, "return_lse": lse}, packed=True)
for dtype, heads_kv, page_size, lse in itertools.product(("bf16", "f16"), (32, 8, 4), (None, 16), (False, True)):
    for batch, prefix in itertools.product((2, 4, 16, 48, 64), (0, 500, 1024, 2050)):
        found[f"{dtype} kv={heads_kv} pages of {page_size} lse={lse} {batch} sequences, {prefix} keys shared"] = source_over_cache(
            dtype, heads_kv, batch, page_size, return_lse=lse, shared_prefix=prefix)
for dtype, head_dim, (name, mask) in itertools.product(("bf16", "f16"), (64, 128), masks.items()):
    if dtype == "f16" and name == "window":
        continue
    for heads_kv, seqlen in ((32, 300), (8, 2048), (8, 8192)):
        found[f"gradients of {dtype} d{head_dim} {name} kv={heads_kv} {seqlen}"] = source_of_gradients(dtype, head_dim, mask, heads_kv, seqlen)
    if dtype == "bf16" and name == "causal":
        found[f"gradients of {dtype} d{head_dim} {name} packed"] = source_of_gradients(dtype, head_dim, mask, 8, 2048, packed=True)
for head_dim, names in ((72, ("full",)), (80, ("full",)), (96, ("full", "causal")), (256, ("full", "causal", "window"))):
    for name, seqlen, dtype in itertools.product(names, (197, 300, 2048), ("bf16", "f16")):
        found[f"{dtype} d{head_dim} {name} {seqlen}"] = source(dtype, head_dim, masks[name], 32, seqlen)
    if head_dim != 256:
        found[f"gradients d{head_dim}"] = source_of_gradients("bf16", head_dim, masks[names[-1]], 32, 2048)
for head_dim, seqlen in itertools.product((128, 256), (300, 4000)):
    for name in ("causal", "window"):
        found[f"softcap d{head_dim} {name} {seqlen}"] = source("bf16", head_dim, {"softcap": 20.0, **masks[name]}, 16, seqlen)
for head_dim in (64, 128):
    found[f"alibi d{head_dim}"] = source("bf16", head_dim, {"causal": True, "alibi": spec((32,), "f32")}, 32, 2048)
for head_dim, group, page_size, batch in itertools.product((64, 128, 256), range(1, 9), (None, 16, 64), (2, 32)):
    found[f"step d{head_dim} group {group} pages {page_size} batch {batch}"] = source_over_cache(
        "bf16", 2, batch, page_size, head_dim=head_dim, group=group)
for (head_dim, group, options), page_size in itertools.product(
        ((64, 8, {}), (128, 4, {}), (256, 2, {"softcap": 50.0})), (None, 16)):
    found[f"step under a window d{head_dim} pages {page_size}"] = source_over_cache(
        "bf16", 8, 4, page_size, head_dim=head_dim, group=group, causal=True, window=(127, 0), **options)
found["rare"] = source("bf16", 64, {"score_mod": "score + 0.5 * tanh(score)"})
print(json.dumps(found))
"""


@pytest.fixture
def environment(fake_gpu: dict[str, str], route: str) -> dict[str, str]:
    if route == "ctypes":
        pytest.skip("once is enough")
    return {**fake_gpu, "FOVEA_NVRTC": "/nowhere"}


def test_common_calls_compile_nothing(environment: dict[str, str]) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert "no kernel compiler" in found.pop("rare")  # there is no other place that they could come from
    expected = f"kernel pack {fovea_kernels.PACK}"
    assert {call: source for call, source in found.items() if source != expected} == {}


def test_the_command_finds_it_too(environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "fovea", "explain", "--seqlen-q", "2048", "--head-dim", "128", "--dtype", "bf16", "--device", "cuda", "--causal"]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert f"from       kernel pack {fovea_kernels.PACK}" in ran.stdout
