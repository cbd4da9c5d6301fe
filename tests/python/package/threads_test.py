"""Calls from many threads, with the interpreter's lock released; and what calls leave behind."""

import concurrent.futures
import gc
import pathlib
import threading
import time
from typing import Iterable

import numpy as np
import pytest

import fovea
from attention_test import CASES, PLAIN_TARGET, SLOPES, draw, qkv
from fovea import _calls


def test_sixteen_threads_of_different_calls() -> None:
    arrays = qkv()
    names = sorted(CASES)
    expected = {name: fovea.attention(*arrays, **CASES[name][0]) for name in names}

    def work(number: int) -> bool:
        name = names[number % len(names)]
        if number % 5 == 4:  # programs are made, refused and dropped beside the calls
            with pytest.raises(fovea.ProgramError):
                fovea.mask_mod(f"q_idx >= unknown_{number}")
            program = fovea.score_mod(f"score + {number}.0 - slopes[q_head]", slopes=SLOPES)
            fovea.attention(*arrays, score_mod=program)
        if number % 7 == 6:
            assert "kernel" in fovea.explain(*arrays, causal=True)
            assert fovea.plan(*arrays, **CASES[name][0]).run(*arrays).shape == expected[name].shape
        return np.array_equal(fovea.attention(*arrays, **CASES[name][0]), expected[name])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(320)))


def test_the_lock_is_released_while_a_call_runs() -> None:
    q = draw((1, 2048, 4, 128))
    spent: list[float] = []

    def call() -> None:
        begin = time.perf_counter()
        fovea.attention(q, q, q, cpu_target=PLAIN_TARGET)
        spent.append(time.perf_counter() - begin)

    worker = threading.Thread(target=call)
    worker.start()
    longest, last = 0.0, time.perf_counter()
    while worker.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        time.sleep(0)
    worker.join()
    # Held, it would stop this loop for as long as the call.
    assert longest < 0.7 * spent[0]


def resident_kib() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_ten_thousand_calls_leave_no_memory(route: str) -> None:
    q = draw((1, 3, 2, 8))
    square = fovea.TensorSpec((1, 64, 1, 8))
    cache = fovea.kv_cache(q, 1, 16, 2, 8)
    cache.seqlens[:] = 4
    cache.k[:], cache.v[:] = 0, 0

    def call(number: int) -> None:
        kind = number % 10
        if kind == 0:
            fovea.attention(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: q_idx + number >= kv_idx)  # a text of its own
        elif kind == 1:
            fovea.plan(q, q, q, causal=True).run(q, q, q)
        elif kind == 2:
            fovea.block_map(square, square, causal=True)
        elif kind == 3:
            with pytest.raises(fovea.InvalidArgument):
                fovea.attention(q, q[..., :4], q)
        elif kind == 4:
            out, lse = fovea.attention(q, q, q, return_lse=True)
            fovea.attention_backward(out, q, q, q, out, lse)
        elif kind == 5:
            fovea.decode(q, cache, append_k=q, append_v=q)
        else:
            fovea.attention(q, q, q, score_mod=fovea.score_mod(f"score + {number}", ), return_lse=True)

    def run(calls: Iterable[int]) -> None:
        for number in calls:
            call(number)
        gc.collect()

    most_plans = fovea.describe()["limits"]["max_plans"]
    with_texts = [number for number in range(2 * most_plans + 400) if number % 10 in (0, 6, 7, 8, 9)]
    run(with_texts)  # plans are kept until there are so many: from here on what is kept grows no more
    calls = 10_000 if route == _calls.ROUTE else 2_000  # the stand-in, several times slower, in full where it is all there is
    run(range(20_000, 22_000))
    before = resident_kib()
    run(range(22_000, 22_000 + calls))
    assert resident_kib() - before < 4_096
