#!/usr/bin/env python3
"""What the cycle model is compared with: clocks of one attention call, and the clock rate and power that it runs at.

usage: measure.py --library libfovea.so --json FILE [--held-out] [--seconds 0.25] [--budget SECONDS] [--match REGEX]

Each case runs alone. Between two launches of a kernel that writes every SM's clock64 and globaltimer lie as many calls as take
--seconds: so clocks of a call are counted by the SMs themselves, and the rate is that of the calls and of nothing else. First after
a rest ("cool", a twentieth of the calls), then without one ("hot"). The power that the driver shows is sampled besides: an average over a second,
which of so short runs says little (0: no sample).
L2 is not overwritten: a call finds there what the one before left, as the next layer of a model does not; the inputs of all cases
are larger than L2. --held-out: other shapes and lengths, which nothing of the model was fitted to.
"""

import argparse
import ctypes
import json
import pathlib
import re
import statistics
import sys
import threading
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in (ROOT / "bench" / "peers", ROOT / "tests" / "python"):
    sys.path.insert(0, str(folder))
import fovea_ctypes as fovea  # noqa: E402
from gpu_peers import FoveaCall, require_close  # noqa: E402

TOTAL_TOKENS, WIDTH = 16384, 2048  # batch = TOTAL_TOKENS / seqlen, heads = WIDTH / head_dim
CASES = [((d, d), seqlen) for seqlen in (16384, 4096, 2048) for d in (128, 64, 256, 96, 192)]
HELD_OUT = [((192, 128), 16384), ((192, 128), 4096), ((128, 128), 8192), ((64, 64), 8192), ((128, 128), 32768), ((256, 256), 8192)]
REST_S = 0.4
MOST_SMS = 256

PROBE = """
.version 7.8
.target sm_80
.address_size 64
.visible .entry probe(.param .u64 out) {
  .reg .u64 %at, %clocks, %ns, %offset;
  .reg .u32 %sm;
  ld.param.u64 %at, [out];
  mov.u32 %sm, %smid;
  mul.wide.u32 %offset, %sm, 16;
  add.u64 %at, %at, %offset;
  mov.u64 %clocks, %clock64;
  mov.u64 %ns, %globaltimer;
  st.global.v2.u64 [%at], {%clocks, %ns};
  ret;
}
"""


class Probe:
    """A kernel that writes clock64 and globaltimer of each SM into a row of `times`."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream()
        torch.zeros(1, device="cuda")
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self.cuda.cuModuleLoadData(ctypes.byref(module), PROBE.encode()))
        self._check(self.cuda.cuModuleGetFunction(ctypes.byref(self.function), module, b"probe"))
        self.times = torch.zeros(2, MOST_SMS, 2, dtype=torch.int64, device="cuda")

    def _check(self, status):
        if status != 0:
            raise RuntimeError(f"the driver says {status}")

    def launch(self, row):
        address = ctypes.c_uint64(self.times[row].data_ptr())
        params = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(address), ctypes.c_void_p))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._check(self.cuda.cuLaunchKernel(self.function, 8 * sms, 1, 1, 1, 1, 1, 0, stream, params, None))

    def clocks_and_ns(self):
        """Between the two rows: medians over the SMs that both have."""
        torch.cuda.synchronize()
        before, after = self.times.cpu().tolist()
        pairs = [(c1 - c0, t1 - t0) for (c0, t0), (c1, t1) in zip(before, after) if c0 and c1]
        self.times.zero_()
        return statistics.median(c for c, _ in pairs), statistics.median(t for _, t in pairs)


class Sampler(threading.Thread):
    """Of the driver, as often as it answers: power in watts, the rate of SMs in MHz."""

    def __init__(self):
        super().__init__(daemon=True)
        self.nvml, self.device, self.samples, self.is_on = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), [], True
        self.nvml.nvmlInit_v2()
        self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device))

    def run(self):
        milliwatts, mhz = ctypes.c_uint(), ctypes.c_uint()
        while self.is_on:
            self.nvml.nvmlDeviceGetPowerUsage(self.device, ctypes.byref(milliwatts))
            self.nvml.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(mhz))
            self.samples.append((time.monotonic(), milliwatts.value / 1000, mhz.value))
            time.sleep(0.01)

    def between(self, start, end):
        inside = [(w, m) for t, w, m in self.samples if start <= t <= end] or [(0.0, 0)]
        return {"watts": statistics.median(w for w, _ in inside), "driver_mhz": statistics.median(m for _, m in inside)}


def timed(probe, sampler, call, count):
    start = time.monotonic()
    probe.launch(0)
    for _ in range(count):
        call()
    probe.launch(1)
    clocks, ns = probe.clocks_and_ns()
    end = time.monotonic()
    # The second half: of a rate that falls under load, what it falls to.
    return {"calls": count, "clocks": clocks / count, "us": ns / count / 1e3, "ghz": clocks / ns,
            **sampler.between((start + end) / 2, end)}


def inputs_of(dims, seqlen):
    batch, heads = max(1, TOTAL_TOKENS // seqlen), WIDTH // dims[0]
    torch.manual_seed(dims[0] + seqlen)
    return [torch.randn(batch, seqlen, heads, d, device="cuda").bfloat16() for d in (dims[0], *dims)]


def check(call, q, k, v, causal):
    """Of one sequence and head, against PyTorch's plain formula in float."""
    q, k, v = (t[:1, :, :1].float().transpose(1, 2) for t in (q, k, v))
    rows = slice(-256, None)
    scores = (q[:, :, rows] @ k.transpose(2, 3)) / q.shape[-1] ** 0.5
    if causal:
        at = torch.arange(k.shape[2], device="cuda")
        scores.masked_fill_(at[None, :] > at[rows, None], -torch.inf)
    return require_close(call.out[:1, rows, :1], (scores.softmax(-1) @ v).transpose(1, 2), "fovea and the formula")


def measure(setup, probe, sampler, library, dims, causal, seqlen):
    q, k, v = inputs_of(dims, seqlen)
    call = FoveaCall(library, q, k, v, causal=int(causal))
    call()
    torch.cuda.synchronize()
    row = {"head_dim": dims[0], "head_dim_v": dims[1], "seqlen": seqlen, "batch": q.shape[0], "heads": q.shape[2], "causal": causal,
           "difference": check(call, q, k, v, causal)}
    once = timed(probe, sampler, call, 3)
    count = max(8, round(setup.seconds * 1e6 / once["us"]))
    time.sleep(REST_S)
    row["cool"] = timed(probe, sampler, call, max(3, count // 20))
    timed(probe, sampler, call, count)  # heats
    row["hot"] = timed(probe, sampler, call, count)
    flops = 2 * q.shape[0] * q.shape[2] * seqlen * seqlen * sum(dims) * (0.5 if causal else 1)
    for state in ("cool", "hot"):
        row[state] = {name: round(x, 4) for name, x in row[state].items()}
        row[state]["tflops"] = round(flops / row[state]["us"] / 1e6, 2)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--json", required=True)
    parser.add_argument("--seconds", type=float, default=0.25)
    parser.add_argument("--budget", type=float, default=600.0)
    parser.add_argument("--match", default=".")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--commit", default="")
    setup = parser.parse_args()
    library = fovea.Library(setup.library)
    probe, sampler = Probe(), Sampler()
    sampler.start()
    properties = torch.cuda.get_device_properties(0)
    report = {"machine": {"gpu": properties.name, "sms": properties.multi_processor_count, "commit": setup.commit}, "cases": []}
    start = time.monotonic()
    for dims, seqlen in HELD_OUT if setup.held_out else CASES:
        for causal in (False, True):
            label = f"d{dims[0]} {seqlen}{' causal' if causal else ''}"
            if not re.search(setup.match, label) or time.monotonic() - start > setup.budget:
                continue
            row = measure(setup, probe, sampler, library, dims, causal, seqlen)
            report["cases"].append(row)
            pathlib.Path(setup.json).write_text(json.dumps(report, indent=1) + "\n")
            print(label, {s: (row[s]["tflops"], row[s]["ghz"], round(row[s]["clocks"]), row[s]["watts"]) for s in ("cool", "hot")},
                  f"difference {row['difference']:.1e}", flush=True)
    sampler.is_on = False


if __name__ == "__main__":
    main()
