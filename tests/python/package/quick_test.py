"""Which calls the extension makes alone, that they say what Python's say, and that neither leaves a reference behind."""

import gc
import re
import sys

import numpy as np
import pytest

import conftest
import fovea
from attention_test import PLAIN_TARGET, SLOPES, draw, qkv
from fovea import _attention, _forward, _quick

PROGRAM = fovea.score_mod("score * gain + slopes[q_head]", slopes=SLOPES, gain=0.5)
USUAL = {
    "plain": {},
    "words": {"causal": True, "align": "top_left", "window": (9, None), "scale": 0.3, "softcap": 5, "compute_dtype": "f32"},
    "lse": {"return_lse": True},
    "arrays": {"bias": draw((33, 70)), "alibi": SLOPES, "mask": draw((33, 70), 1) > 0, "sinks": draw((4,), 2)},
    "programs": {"score_mod": PROGRAM, "mask_mod": fovea.causal() | fovea.mask_mod("kv_idx < reach", reach=3)},
    "a mask that is a program": {"mask": fovea.causal()},
    "segments": {"segment_ids": (np.zeros((2, 33), np.int32), np.zeros((2, 70), np.int64))},
    "dropout": {"dropout": fovea.Dropout(0.3, 5, 2)},
    "dropout of two": {"dropout": (0.3, 2**64 - 5)},
    "dropout from memory": {"dropout": fovea.Dropout(0.3, np.array([5]), np.array([2]))},
    "bits": {"deterministic": False, "cpu_target": PLAIN_TARGET},
}
UNUSUAL = {
    "text": {"score_mod": "score * 0.5"},
    "callable": {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx},
    "two masks": {"mask": fovea.causal(), "mask_mod": fovea.window(9, 0)},
    "row_max": {"row_max": np.empty((2, 4, 33), np.float32)},
    "numbers of NumPy": {"scale": np.float32(0.3), "window": (np.int64(9), 0)},
}


def test_both_sides_have_the_same_lists() -> None:
    header = (conftest.PACKAGE_SOURCES.parent / "extension" / "forward_call.h").read_text()

    def enumerators(kind: str, prefix: str) -> list[str]:
        (body,) = re.findall(rf"typedef enum \{{([^}}]*)\}} {kind};", header)
        words = [word for word in re.findall(rf"\bk{prefix}(\w+),", body) if not word.startswith("Num")]
        return [re.sub(r"(?<!^)(?=[A-Z])", "_", word).lower() for word in words]

    own = ["plan", "workspace", "workspace_bytes", "return_lse", "out", "lse", "row_max", "q", "k", "v"]
    assert enumerators("Argument", "") == [*own, *_quick.FEATURES, "causal"]  # the first feature, once more
    scales = {"q_scale", "k_scale", "v_scale"}
    by_python = {"quant", "accuracy", *scales}  # a call with them never comes to the extension
    assert {*_quick.FEATURES, *by_python, "return_lse", "out", "lse", "row_max"} == set(fovea.attention.__kwdefaults__)
    inputs = [name for name in _forward.FIELDS if name not in ("out", "lse", "row_max", *scales)]
    assert enumerators("Input", "Input") == inputs


def answers(features: dict) -> list:
    made = fovea.attention(*qkv(), **features)
    return list(made) if isinstance(made, tuple) else [made]


@pytest.mark.parametrize("name", [*USUAL, *UNUSUAL])
def test_the_extension_says_what_python_says(name, route, monkeypatch) -> None:
    if route != "extension":
        pytest.skip("compares the two")
    features = {**USUAL, **UNUSUAL}[name]
    gathered, gather = [], _attention.gather
    monkeypatch.setattr(_attention, "gather", lambda *args, **kwargs: gathered.append(args[0]) or gather(*args, **kwargs))
    got = answers(features)
    assert bool(gathered) == (name in UNUSUAL)
    monkeypatch.setattr(_quick, "attend", None)
    for mine, theirs in zip(got, answers(features), strict=True):
        assert type(mine) is type(theirs) and mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_outputs_of_every_layout(layout) -> None:
    q, k, v = (np.ascontiguousarray(x[..., :24]) for x in qkv())
    expected, expected_lse = fovea.attention(q, k, v, return_lse=True)
    if layout == "bhsd":
        q, k, v, expected = (x.swapaxes(1, 2) for x in (q, k, v, expected))
    for given in ((q, k, v), [np.ascontiguousarray(x) for x in (q, k, v)]):
        out, lse = fovea.attention(*given, return_lse=True, layout=layout)
        assert out.flags.c_contiguous and lse.flags.c_contiguous
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)
        into = np.empty_like(out)
        assert fovea.attention(*given, out=into, layout=layout) is into
        np.testing.assert_array_equal(into, expected)


def test_packed_sequences() -> None:
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in qkv())
    offsets = np.array([0, 33, 66], np.int32), np.array([0, 70, 140], np.int64)
    out, lse = fovea.attention(q, k, v, cu_seqlens=offsets, return_lse=True)
    expected, expected_lse = fovea.attention(*qkv(), return_lse=True)
    np.testing.assert_array_equal(out.reshape(expected.shape), expected)
    np.testing.assert_array_equal(lse.reshape(4, 2, 33).swapaxes(0, 1), expected_lse)


def test_plans_run_with_what_they_were_made_with() -> None:
    given = qkv()
    for features in USUAL.values():
        plan = fovea.plan(*given, **features)
        made = plan.run(*given)
        for got, expected in zip(made if isinstance(made, tuple) else [made], answers(features), strict=True):
            np.testing.assert_array_equal(got, expected)


REFUSED = {
    "rank": {"q": np.zeros((3,), np.float32)},
    "head_dim": {"k": np.zeros((2, 70, 2, 8), np.float32)},
    "no array": {"v": [1.0]},
    "a list among arrays": {"bias": [[1.0]]},
    "window": {"window": (-1, 0)},
    "softcap": {"softcap": -1.0},
    "scale": {"scale": float("inf")},
    "layout": {"layout": "sbhd"},
    "align": {"align": "middle"},
    "margin": {"sm_margin": -1},
    "dropout": {"dropout": (1.5, 3)},
    "a seed of 65 bits": {"dropout": (0.5, 2**64)},
    "an offset of 65 bits": {"dropout": (0.5, 3, -(2**63) - 1)},
    "a seed and an array": {"dropout": (0.5, 3, np.array([1]))},
    "pair": {"segment_ids": (np.zeros((2, 33), np.int32),) * 3},
    "bias": {"bias": np.zeros((70,), np.float32)},
    "out": {"out": np.zeros((2, 33, 4, 25), np.float32)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse_in_the_same_words(name, route, monkeypatch) -> None:
    if route != "extension":
        pytest.skip("compares the two")
    arguments = {**dict(zip("qkv", qkv())), **REFUSED[name]}
    with pytest.raises(fovea.InvalidArgument) as by_extension:
        fovea.attention(**arguments)
    monkeypatch.setattr(_quick, "attend", None)
    with pytest.raises(fovea.InvalidArgument) as by_python:
        fovea.attention(**arguments)
    assert str(by_extension.value) == str(by_python.value)


def objects_of(features: dict) -> list:
    found = [*features.values(), *(part for value in features.values() if isinstance(value, tuple) for part in value)]
    programs = [value for value in features.values() if isinstance(value, fovea.Program)]
    found += [part for program in programs for part in (program.tensors, program.scalars, *program.tensors, program._handle)]
    # The empty tuple is everybody's. Python 3.12 and newer never free it and do not keep its count either.
    return [thing for thing in found if not (isinstance(thing, tuple) and len(thing) == 0)]


def test_calls_leave_no_references() -> None:
    arrays = qkv()
    cases = [*USUAL.values(), *({key: value for key, value in case.items() if key not in "qkv"} for case in REFUSED.values())]
    watched = [*arrays, *(thing for features in cases for thing in objects_of(features))]

    def run() -> None:
        for features in cases:
            try:
                fovea.attention(*arrays, **features)
                fovea.plan(*arrays, **features).run(*arrays)
            except fovea.InvalidArgument:
                pass

    run()  # what is kept of the first calls
    gc.collect()
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(20):
        run()
    gc.collect()
    after = [sys.getrefcount(thing) for thing in watched]
    # Small numbers and words are everybody's; a reference left at each call would be 20.
    assert max(now - then for now, then in zip(after, before)) < 20
