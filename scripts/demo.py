#!/usr/bin/env python3
"""Attention of real layers of a real transformer: run by the `fovea` command, checked twice, timed and drawn.

usage: demo.py --fovea FOVEA [--data DIR] [--repeat N] [--png FILE]

Every captured layer (examples/data/minilm) runs in two ways: as stored, and with f32 products and f32 results. Each run is
compared with the command's own fp64 oracle (--check) and with what PyTorch computed in float64 when the layer was captured.
Then one head's attention weights are drawn: the values are replaced by the unit matrix, so the output *is* the weights.
Needs Python's standard library alone. Exit 0: everything is right; 1: something differs; 2: something is missing.
"""

import argparse
import array
import json
import math
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import zlib

DATA = pathlib.Path(__file__).resolve().parent.parent / "examples" / "data" / "minilm"
SEGMENTS = {"sentences": "sentences_segments.npy"}  # problem: the option that a file of it needs
UNIT_ROUNDING = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
MAP_FILE, MAP_HEAD, MAP_TOKENS = "moby_dick_layer0.safetensors", 5, 30
SHADES = " ·░▒▓█"


class Missing(Exception):
    """Something that the demo needs is not there: exit code 2."""


# ---- Tensors and files ----


class Tensor:
    """Row-major numbers with a shape; `raw` as stored, `values` as floats."""

    def __init__(self, dtype, shape, raw):
        self.dtype, self.shape, self.raw = dtype, shape, raw

    @property
    def values(self):
        if self.dtype == "BF16":  # the upper half of a float
            halves = array.array("H", self.raw)
            return array.array("f", b"".join(b"\0\0" + struct.pack("<H", half) for half in halves))
        if self.dtype == "F16":
            return struct.unpack(f"<{len(self.raw) // 2}e", self.raw)
        return array.array({"F32": "f", "I32": "i"}[self.dtype], self.raw)


def read_safetensors(path):
    data = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    payload = memoryview(data)[8 + header_bytes :]
    return {name: Tensor(entry["dtype"], entry["shape"], bytes(payload[slice(*entry["data_offsets"])]))
            for name, entry in header.items() if name != "__metadata__"}


def write_safetensors(path, tensors):
    header, end = {}, 0
    for name, t in tensors.items():
        begin, end = end, end + len(t.raw)
        header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.raw for t in tensors.values()))


def write_png(path, rows):
    """Rows of grey values 0..255, one byte per pixel."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    shape = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", shape) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


# ---- Running the command ----


def attend(fovea, layer, out, *options):
    """Runs `fovea attend`; its JSON. A check that fails (exit 1) still reports."""
    command = [fovea, "attend", "--input", layer, "--out", out, "--json", *options]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise Missing(f"{' '.join(str(word) for word in command)}: exit {done.returncode}\n{done.stderr.strip()}")
    return json.loads(done.stdout)


def problem_options(path):
    segments = SEGMENTS.get(path.stem.split("_layer")[0])
    return ["--segments-q", path.parent / segments] if segments else []


# ---- The independent comparison ----


def largest_difference(got, want):
    """Infinite where one is infinite or NaN and the other is not."""
    return max((0.0 if g == w else abs(g - w) if math.isfinite(g) and math.isfinite(w) else math.inf
                for g, w in zip(got, want, strict=True)), default=0.0)


def expected_differences(layer, out, lse):
    """Largest differences of (kept output rows, sum over all rows, lse) from what PyTorch computed in float64."""
    batch, seqlen, heads, dim = out.shape
    values, width = out.values, heads * dim
    kept, sums = [], []
    for b in range(batch):
        begin = b * seqlen * width
        for row in layer["expected_rows"].values:
            kept += values[begin + row * width : begin + (row + 1) * width]
        sums += [math.fsum(values[begin + c : begin + seqlen * width : width]) for c in range(width)]
    return (largest_difference(kept, layer["expected_out_rows"].values),
            largest_difference(sums, layer["expected_out_sum"].values),
            largest_difference(lse.values, layer["expected_lse"].values))


def largest_finite(tensor):
    return max((abs(x) for x in tensor.values if math.isfinite(x)), default=0.0)


def allowed_differences(layer, products, out):
    """(of an output, of the sum over rows, of lse): roundings that the formula cannot avoid, counted.

    A score is a sum of head_dim products of magnitude up to about |lse|: sixteen f32 roundings of it. Scores move outputs
    in proportion to |v|; 16-bit products round each weight once, a 16-bit output rounds once more.
    """
    largest_v, largest_out = largest_finite(layer["v"]), largest_finite(layer["expected_out_rows"])
    of_lse = 16 * UNIT_ROUNDING["F32"] * max(1.0, largest_finite(layer["expected_lse"]))
    of_weights = 2 * of_lse + (UNIT_ROUNDING["BF16"] if products == "bf16" else 0)
    of_sum = (of_weights + UNIT_ROUNDING[out.dtype]) * largest_v * out.shape[1]
    return of_weights * largest_v + UNIT_ROUNDING[out.dtype] * largest_out, of_sum, of_lse


def run_layer(fovea, path, scratch, repeat, *options):
    """One row of the table, as a dict."""
    layer, out_path = read_safetensors(path), scratch / "out.safetensors"
    reports = [attend(fovea, path, out_path, *problem_options(path), *options, *(["--check"] if i == 0 else []))
               for i in range(repeat)]
    first, result = reports[0], read_safetensors(out_path)
    out, lse = result["out"], result["lse"]
    products = first["explanation"]["compute_dtype"]
    differences = expected_differences(layer, out, lse)
    allowed = allowed_differences(layer, products, out)
    is_right = first["check"]["passes"] and all(d <= a for d, a in zip(differences, allowed))
    return {"name": path.stem, "stored": layer["q"].dtype.lower(), "products": products, "out": out.dtype.lower(),
            "shape": "x".join(map(str, layer["q"].shape)), "oracle": first["check"]["out"]["max_error"],
            "torch": differences[0], "allowed": allowed[0], "lse": differences[2],
            "ms": statistics.median(r["time_ms"] for r in reports),
            "gflops": statistics.median(r["gflops_per_second"] for r in reports), "is_right": is_right}


TABLE = (("layer", "name", "{:18}"), ("q, k, v", "shape", "{:12}"), ("stored", "stored", "{:6}"),
         ("products", "products", "{:8}"), ("out", "out", "{:4}"), ("err: oracle", "oracle", "{:11.1e}"),
         ("PyTorch", "torch", "{:9.1e}"), ("allowed", "allowed", "{:9.1e}"), ("lse err", "lse", "{:9.1e}"),
         ("ms", "ms", "{:7.2f}"), ("GFLOP/s", "gflops", "{:8.1f}"))


def print_head():
    widths = [len(shown.format(0 if shown[-2] in "ef" else "")) for _, _, shown in TABLE]
    print("  ".join(head.rjust(width) if shown[-2] in "ef" else head.ljust(width)
                    for (head, _, shown), width in zip(TABLE, widths)))


def print_row(row):
    cells = "  ".join(shown.format(row[key]) for _, key, shown in TABLE)
    print(f"{cells}  {'right' if row['is_right'] else 'WRONG'}", flush=True)


# ---- The attention map ----


def one_head(t, head):
    """[1, seqlen, heads, dim] to the bytes of [1, seqlen, 1, dim]."""
    _, seqlen, heads, dim = t.shape
    step = len(t.raw) // (seqlen * heads)
    rows = (t.raw[(i * heads + head) * step : (i * heads + head + 1) * step] for i in range(seqlen))
    return Tensor(t.dtype, [1, seqlen, 1, dim], b"".join(rows))


def attention_weights(fovea, path, head, scratch):
    """weights[query][key] of one head: attention whose values are the unit matrix."""
    layer = read_safetensors(path)
    q, k = one_head(layer["q"], head), one_head(layer["k"], head)
    seqlen = q.shape[1]
    one = {"BF16": 0x3F80, "F16": 0x3C00}[q.dtype]
    unit = array.array("H", bytes(2 * seqlen * seqlen))
    for i in range(seqlen):
        unit[i * seqlen + i] = one
    values = Tensor(q.dtype, [1, seqlen, 1, seqlen], unit.tobytes())
    problem, out = scratch / "map.safetensors", scratch / "weights.safetensors"
    write_safetensors(problem, {"q": q, "k": k, "v": values})
    attend(fovea, problem, out, "--compute-dtype", "f32", "--out-dtype", "f32")
    flat = read_safetensors(out)["out"].values
    return [flat[i * seqlen : (i + 1) * seqlen] for i in range(seqlen)]


def draw_map(weights, tokens, count):
    """The first tokens' map in blocks: a row is what one token looks at, darker is more."""
    largest = max(max(row[:count]) for row in weights[:count])
    for token, row in zip(tokens[:count], weights[:count]):
        shades = (SHADES[min(len(SHADES) - 1, int(len(SHADES) * math.sqrt(x / largest)))] for x in row[:count])
        print(f"{token:>12} |{''.join(2 * shade for shade in shades)}|")


def save_map(path, weights, zoom=3):
    largest = max(map(max, weights))
    rows = []
    for row in weights:
        pixels = [255 - int(255 * math.sqrt(x / largest)) for x in row for _ in range(zoom)]
        rows += [pixels] * zoom
    write_png(path, rows)


# ---- The demo ----


def show_map(fovea, data, scratch, png):
    path = data / MAP_FILE
    weights = attention_weights(fovea, path, MAP_HEAD, scratch)
    tokens = json.loads((data / "tokens.json").read_text())["moby_dick"][0]
    off = max(abs(sum(row) - 1) for row in weights)
    print(f"\nWhat each token of {path.stem}, head {MAP_HEAD}, looks at (first {MAP_TOKENS} of {len(tokens)} tokens; "
          f"rows sum to 1 within {off:.0e}):")
    draw_map(weights, tokens, MAP_TOKENS)
    if png:
        save_map(png, weights)
        print(f"the whole map is in {png}")
    return off <= 2.0**-24 * len(tokens)


def demo(args):
    files = sorted(args.data.glob("*.safetensors"))
    if not files:
        raise Missing(f"no .safetensors in {args.data}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="fovea-demo-") as folder:
        scratch = pathlib.Path(folder)
        print_head()
        for path in files:
            for options in ((), ("--compute-dtype", "f32", "--out-dtype", "f32")):
                rows.append(run_layer(args.fovea, path, scratch, args.repeat, *options))
                print_row(rows[-1])
        is_map_right = show_map(args.fovea, args.data, scratch, args.png)
    num_wrong = sum(not row["is_right"] for row in rows) + (not is_map_right)
    if num_wrong:
        print(f"\ndemo: {num_wrong} of {len(rows) + 1} results are WRONG")
        return 1
    exact = max(row["torch"] for row in rows if row["out"] == "f32")
    print(f"\ndemo: {len(files)} real attention layers, {len(rows)} runs, all equal to the fp64 oracle and to PyTorch in "
          f"float64 (f32 results within {exact:.1e})")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fovea", required=True, type=pathlib.Path, help="the fovea command")
    parser.add_argument("--data", default=DATA, type=pathlib.Path)
    parser.add_argument("--repeat", default=5, type=int, help="runs per row; the time is their median")
    parser.add_argument("--png", type=pathlib.Path, help="also draw the whole attention map into this file")
    args = parser.parse_args()
    try:
        return demo(args)
    except (Missing, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
