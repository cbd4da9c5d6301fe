#!/usr/bin/env python3
"""How long a kernel takes, by its own machine code and a table of the machine's rates. scripts/dev model runs it.

usage: model.py --kernels FOLDER --report pack.json [--measured h200.json] [--seqlens 2048,4096,16384] [--picture FILE.svg]

FOLDER and pack.json are what `fovea pack --cubins FOLDER --json` leaves. Of each kernel:

  step      the usual way round the inner loop of the warps that do softmax: one kv tile of all row groups of a CTA. Its instructions,
            times the clocks that each keeps its unit busy (machine.py), are what units are busy for; products and what they read of
            shared memory follow from their shapes.
  overlap   a step takes the fourth root of the sum of fourth powers of products and of softmax, the busiest unit of a scheduler: nearly
            the longer, a fifth more where they are equal. Products take as long as their operands, where those take longer. At least a
            group's products and its softmax behind each other, and the handover between; of a group alone their sum.
  row tile  its steps, plus what a boundary costs (first products, the first, careful step, output; more where one buffer of Q keeps
            row tiles from overlapping), plus what masked tiles cost.
  launch    row tiles go to SMs as the kernel hands them out; the last one decides. Plus a launch.
  clock     what the machine's table says for the share of its time that products are under way.
"""

import argparse
import heapq
import json
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass

import picture
import sass
from machine import MACHINES

# Clocks, least squares of h200.json (--fit).
COSTS = {
    "boundary": 2677,  # of a row tile that overlaps with the next
    "drained": 6604,  # of one that does not
    "masked": 533,  # of a kv tile that a mask cuts, more than a full one
    "launch": 1596,
}
SHARPNESS = 4.0
# A row's maximum before its first exponential: 64 FMNMX3 at half rate, and the statistics' way.
MAXIMUM_FIRST = 150

HERE = pathlib.Path(__file__).resolve().parent
TOTAL_TOKENS, WIDTH = 16384, 2048  # batch = TOTAL_TOKENS / seqlen, heads = WIDTH / head_dim


@dataclass
class Kernel:
    name: str
    architecture: str
    spec: dict
    is_causal: bool
    seqlens: set  # of the cases that it was compiled for
    path: list  # a step's instructions, of a warp that does softmax
    others: list  # of warps that do more of it beside (backward: those that add dq)

    @property
    def is_backward(self):
        return "backward" in self.name

    @property
    def machine(self):
        return MACHINES[self.architecture]

    @property
    def groups(self):
        """Of rows, whose softmax a warp of each scheduler does."""
        if self.is_backward:
            return 2  # computing warps of a scheduler
        return self.spec["num_warps"] // 4 - 1

    @property
    def flops_of_step(self):
        products = (3, 2) if self.is_backward else (1, 1)
        dims = products[0] * self.spec["head_dim_qk"] + products[1] * self.spec["head_dim_v"]
        return 2 * self.spec["tile_q"] * self.spec["tile_kv"] * dims


# ---- What a step asks of each unit ----


def busy(kernel):
    """Clocks of an SM by unit, of a step: all groups of a CTA."""
    machine = kernel.machine
    counts, found = sass.counts(kernel.path), {}
    for extra in kernel.others:
        for unit, count in sass.counts(extra).items():
            counts[unit] += count / kernel.groups
    for unit, clocks in machine.clocks.items():
        found[unit] = kernel.groups * counts[unit] * clocks
    if "fma2" in found:  # the same lanes
        found["fma"] += found.pop("fma2")
    found["products"] = kernel.flops_of_step / machine.product_flops
    found["shared"] = shared_bytes(kernel) / machine.shared_bytes
    return found


def shared_bytes(kernel):
    """That products read, and backward of 128 keys by 128 queries what it writes and adds besides (docs/kernels has the sum)."""
    if kernel.architecture == "sm_90a":
        return kernel.groups * sum(_wgmma_bytes(x) for x in kernel.path if x.name == "HGMMA")
    d, dv, rows, keys = (kernel.spec[name] for name in ("head_dim_qk", "head_dim_v", "tile_q", "tile_kv"))
    if not kernel.is_backward:
        groups = rows // 128
        return groups * 2 * (128 * d + keys * d + keys * dv)
    operands = 2 * (keys * d + rows * d + keys * dv + rows * dv + rows * dv + rows * d + keys * d + keys * rows)
    written = 2 * keys * rows
    statistics = sum(x.name == "LDS" for x in kernel.path) * kernel.groups * 4 * 128
    added = 4 * rows * d
    return operands + written + statistics + added


def _wgmma_bytes(instruction):
    """Of 64 rows by N columns, 16 deep: B, and A where it is not in registers."""
    columns = int(re.search(r"64x(\d+)x16", instruction.op)[1])
    is_a_in_shared = re.match(r"R\d+, gdesc", instruction.operands) is not None
    return 32 * columns + (2048 if is_a_in_shared else 0)


SCHEDULER_UNITS = ("mufu", "fma", "alu", "issue")


# What a kernel would ask for if it were written another way: questions of design, answered by the same sums.
#   correction warps  a maximum first (64 FMNMX3 of three inputs a warp's step), statistics for warps that scale, a barrier
#   pairs of CTAs     each has half of B's rows: keys of scores, values of sums; of backward docs/kernels has the sum
#   two groups        where one group has the tensor core to itself now: whether they have room is another question
CHANGES = ("correction warps", "pairs of CTAs", "two groups")
OF_CORRECTION = {"alu": 64, "issue": 64 + 40}


def changed(kernel, found, change):
    """Of the budget of a step, after a change; None where it has nothing to say about this kernel."""
    found = dict(found)
    if change == "pairs of CTAs":
        d, dv, rows, keys = (kernel.spec[name] for name in ("head_dim_qk", "head_dim_v", "tile_q", "tile_kv"))
        if kernel.architecture == "sm_90a":
            return None
        if kernel.is_backward:  # half of B but of dq's product; of dS each gives half to the other; half of what is added
            saved = 2 * (rows * d + rows * dv) + 4 * rows * d // 2
            found["shared"] -= (saved - 3 * keys * rows) / kernel.machine.shared_bytes
        else:
            found["shared"] -= rows // 128 * keys * (d + dv) / kernel.machine.shared_bytes
    elif change == "two groups":
        if kernel.groups != 1:
            return None
        found = {unit: 2 * clocks for unit, clocks in found.items()}
    elif change == "correction warps":
        if kernel.is_backward or kernel.architecture == "sm_90a":
            return None
        for unit, count in OF_CORRECTION.items():
            found[unit] += kernel.groups * count * kernel.machine.clocks[unit]
    return found


def softmax_clocks(found):
    return max(found[unit] for unit in SCHEDULER_UNITS)


def step_clocks(kernel, change=""):
    """Clocks of a step, and what limits it; None where the change says nothing about the kernel."""
    found, groups = busy(kernel), kernel.groups
    if change:
        found = changed(kernel, found, change)
        if found is None:
            return None
        if change == "two groups":
            groups = 2
    softmax = softmax_clocks(found)
    limit = max(SCHEDULER_UNITS, key=found.get)
    units = {"products": found["products"], "shared": found["shared"], limit: softmax}
    tensor_core = max(found["products"], found["shared"])
    if groups == 1:
        return tensor_core + softmax + kernel.machine.handover, "products and softmax in turns"
    clocks = (tensor_core**SHARPNESS + softmax**SHARPNESS) ** (1 / SHARPNESS)
    if not kernel.is_backward:
        serial = MAXIMUM_FIRST if change == "correction warps" else 0
        chain = (tensor_core + softmax) / groups + kernel.machine.handover + serial
        if chain > clocks:
            return chain, "a group's chain"
    if change == "two groups":
        clocks /= 2
    return clocks, max(units, key=units.get)


# ---- From steps to a call ----


def row_tiles(kernel, seqlen, heads):
    """Of one head: (kv tiles, of them masked) of each row tile, and how many such heads. Backward walks along queries."""
    rows, keys = kernel.spec["tile_q"], kernel.spec["tile_kv"]
    if kernel.is_backward:
        rows, keys = keys, rows
    tiles = []
    for first in range(0, seqlen, rows):
        if not kernel.is_causal:
            tiles.append((-(-seqlen // keys), 0))
            continue
        end = seqlen - first if kernel.is_backward else min(first + rows, seqlen)
        tiles.append((-(-end // keys), max(1, rows // keys)))
    return tiles * heads


def call_clocks(kernel, seqlen, batch, heads, step=None, costs=None):
    step, costs = step or step_clocks(kernel)[0], costs or COSTS
    overlaps = kernel.architecture != "sm_90a" or kernel.spec.get("q_stages", 1) > 1
    boundary = costs["boundary"] if overlaps else costs["drained"]
    lengths = [n * step + boundary + masked * costs["masked"] for n, masked in row_tiles(kernel, seqlen, batch * heads)]
    if kernel.is_causal:
        lengths.sort(reverse=True)
    ends = [0.0] * kernel.machine.sms
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends) + costs["launch"]


def flops(kernel, seqlen, batch, heads):
    pairs = batch * heads * seqlen * (seqlen + 1 if kernel.is_causal else 2 * seqlen) / 2
    products = 5 if kernel.is_backward else 2
    assert not kernel.is_backward or kernel.spec["head_dim_qk"] == kernel.spec["head_dim_v"]
    return products * pairs * (kernel.spec["head_dim_qk"] + kernel.spec["head_dim_v"])


def predict(kernel, seqlen, batch=None, heads=None):
    d = kernel.spec["head_dim_qk"]
    batch, heads = batch or TOTAL_TOKENS // seqlen, heads or WIDTH // d
    clocks = call_clocks(kernel, seqlen, batch, heads)
    work = flops(kernel, seqlen, batch, heads)
    machine = kernel.machine
    share = work / (clocks * machine.sms * machine.product_flops)
    found = busy(kernel)
    exp2_clocks = kernel.groups * sass.counts(kernel.path)["mufu"] * 8  # by itself
    step = step_clocks(kernel)[0]
    ghz = machine.clock_of(found["products"] / step, exp2_clocks / step, kernel.is_causal)
    us = clocks / ghz / 1e3
    return {"clocks": clocks, "share": share, "ghz": ghz, "us": us, "tflops": work / us / 1e6}


# ---- Reading what fovea pack leaves ----


def find_nvdisasm():
    cache = pathlib.Path.home() / ".cache"
    return next(iter(sorted(cache.glob("fovea/toolchain/lib/python*/site-packages/nvidia/cu*/bin/nvdisasm"))), "nvdisasm")


def spec_of(unit):
    """Numbers that the unit sets, by name. Blackwell's backward owns 128 keys, whatever its spec."""
    return {"tile_kv": 128, **{name: int(value) for name, value in re.findall(r"\bs\.(\w+) = (-?\d+);", unit)}}


def needs_of(row, spec):
    """What the usual way round the inner loop does, at least."""
    if "backward" in row["kernel"]:
        return {"MUFU.EX2": spec["tile_kv"] * spec["tile_q"] // 256 * 7 // 8, "STTM": 4, "LDTM": 4}
    if row["architecture"] == "sm_90a":
        return {"MUFU.EX2": spec["tile_kv"] // 2, "HGMMA": spec["head_dim_qk"] // 16 + spec["tile_kv"] // 16}
    return {"MUFU.EX2": spec["tile_kv"] // 2, "STTM": 4, "LDTM": 4}


def read_kernels(folder, report, cases, pattern):
    nvdisasm = find_nvdisasm()
    lengths = {case["name"]: case["seqlen_q"] for case in json.loads(cases.read_text())["cases"]}
    for row in json.loads(pathlib.Path(report).read_text())["kernels"]:
        if not re.search(pattern, f"{row['architecture']} {row['kernel']}"):
            continue
        unit = (folder / f"{row['stem']}.cu").read_text()
        code = subprocess.run([nvdisasm, "-c", folder / f"{row['stem']}.cubin"], capture_output=True, text=True, check=True).stdout
        found = sass.blocks(max(sass.functions(code).values(), key=len))
        spec = spec_of(unit)
        path = sass.usual_path(found, needs_of(row, spec))
        if not path:
            sys.exit(f"{row['kernel']}: no loop does what a step has to")
        others = [sass.usual_path(found, {"REDG": 4, "LDTM": 2})] if "backward" in row["kernel"] else []
        yield Kernel(row["kernel"], row["architecture"], spec, "has_mask = true" in unit, {lengths[name] for name in row["cases"]}, path,
                     others)


# ---- Tables ----


def dims(kernel):
    d, dv = kernel.spec["head_dim_qk"], kernel.spec["head_dim_v"]
    return str(d) if d == dv else f"{d}/{dv}"


def label_of(kernel):
    kind = ("backward" if kernel.is_backward else "forward") + (", causal" if kernel.is_causal else "")
    return f"{kernel.machine.name} d{dims(kernel)} {kind}"


def print_steps(kernels):
    print("\n| kernel | step | products | shared | mufu | fma | alu | issue | instructions | limit |\n|---|---|---|---|---|---|---|---|---|---|")
    for kernel in kernels:
        found, (clocks, limit) = busy(kernel), step_clocks(kernel)
        cells = [round(found[unit]) for unit in ("products", "shared", "mufu", "fma", "alu", "issue")]
        print(f"| {label_of(kernel)} | **{clocks:.0f}** | " + " | ".join(f"{c:,}" for c in cells) +
              f" | {sass.counts(kernel.path)['issue']} | {limit} |")


def print_changes(kernels):
    print("\n| kernel | step | " + " | ".join(CHANGES) + " |\n|---|---|" + "---|" * len(CHANGES))
    for kernel in kernels:
        if kernel.architecture == "sm_90a" or kernel.is_causal:
            continue
        clocks, cells = step_clocks(kernel)[0], []
        for change in CHANGES:
            made = step_clocks(kernel, change)
            cells.append("" if made is None else f"{made[0]:.0f} ({made[0] / clocks - 1:+.0%})")
        print(f"| {label_of(kernel)} | {clocks:.0f} | " + " | ".join(cells) + " |")


def print_predictions(kernels, seqlens):
    print("\n| kernel | " + " | ".join(str(n) for n in seqlens) + " | of products | limit |\n|---|" + "---|" * (len(seqlens) + 2))
    for kernel in kernels:
        made = [predict(kernel, n) for n in seqlens]
        print(f"| {label_of(kernel)} | " + " | ".join(f"{m['tflops']:.0f}" for m in made) +
              f" | {made[-1]['share']:.2f} | {step_clocks(kernel)[1]} |")


def pairs_of(kernels, measured):
    """Of several forms, the one that was compiled for the nearest length: short and long calls may have other tiles."""
    for case in measured["cases"]:
        dims = case["head_dim"], case.get("head_dim_v", case["head_dim"])
        forms = [k for k in kernels if k.architecture == "sm_90a" and not k.is_backward and k.is_causal == case["causal"] and
                 (k.spec["head_dim_qk"], k.spec["head_dim_v"]) == dims]
        yield min(forms, key=lambda k: min(abs(n - case["seqlen"]) for n in k.seqlens)), case


def compare(kernels, measured):
    """Predicted and measured, clocks and TFLOP/s of calls without rest; the largest difference of the latter."""
    print("\n| case | clocks, model | measured | | TFLOP/s, model | measured | |\n|---|---|---|---|---|---|---|")
    worst = 0.0
    for kernel, case in pairs_of(kernels, measured):
        made = predict(kernel, case["seqlen"], case["batch"], case["heads"])
        clocks, tflops = made["clocks"] / case["hot"]["clocks"], made["tflops"] / case["hot"]["tflops"]
        worst = max(worst, abs(tflops - 1))
        label = f"d{case['head_dim']} {case['seqlen']}{' causal' if case['causal'] else ''}"
        print(f"| {label} | {made['clocks']:,.0f} | {case['hot']['clocks']:,.0f} | {clocks:.3f} | {made['tflops']:.0f} | "
              f"{case['hot']['tflops']:.0f} | {tflops:.3f} |")
    print(f"\nlargest difference {100 * worst:.1f} %")
    return worst


def fit(kernels, measured):
    """Costs by coordinate descent on the squares of relative errors of clocks."""
    cases = [(kernel, step_clocks(kernel)[0], case) for kernel, case in pairs_of(kernels, measured)]

    def loss(costs):
        made = (call_clocks(k, c["seqlen"], c["batch"], c["heads"], step, costs) / c["hot"]["clocks"] - 1 for k, step, c in cases)
        return sum(x * x for x in made)

    costs, size = dict(COSTS), 0.3
    while size > 0.02:
        tried = [{**costs, name: value * factor} for name, value in costs.items() for factor in (1 - size, 1 + size)]
        best = min(tried, key=loss)
        if loss(best) < loss(costs):
            costs = best
        else:
            size /= 2
    print("\nfitted:", {name: round(value) for name, value in costs.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", required=True, type=pathlib.Path)
    parser.add_argument("--report", required=True, type=pathlib.Path)
    parser.add_argument("--measured", type=pathlib.Path)
    parser.add_argument("--seqlens", default="2048,4096,16384")
    parser.add_argument("--match", default=r"sm90/attention_forward|sm100/attention")
    parser.add_argument("--fit", action="store_true", help="costs of boundaries anew, from --measured")
    parser.add_argument("--picture", type=pathlib.Path, help="an SVG of full attention, a row each kernel")
    setup = parser.parse_args()
    kernels = list(read_kernels(setup.kernels, setup.report, HERE / "cases.json", setup.match))
    print_steps(kernels)
    print_changes(kernels)
    if setup.picture:
        shown = [kernel for kernel in kernels if not kernel.is_causal]
        setup.picture.write_text(picture.svg([(label_of(kernel), *step_clocks(kernel), busy(kernel)) for kernel in shown]))
    print_predictions(kernels, [int(n) for n in setup.seqlens.split(",")])
    if setup.fit:
        fit(kernels, json.loads(setup.measured.read_text()))
    if setup.measured:
        worst = compare(kernels, json.loads(setup.measured.read_text()))
        sys.exit(0 if worst <= 0.10 else 1)


if __name__ == "__main__":
    main()
