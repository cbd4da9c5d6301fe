#!/usr/bin/env python3
"""Throughput over sequence length, Fovea beside its peers, as one SVG: a panel for each head_dim, full and causal.

usage: gpu_picture.py RESULT.json PICTURE.svg        of what gpu_peers.py --json kept; it also writes one itself with --picture
"""

import html
import json
import os
import pathlib
import re
import sys

LABEL = re.compile(r"^bf16 \d+x(?P<seqlen>\d+)x\d+x(?P<head_dim>\d+)(?P<causal> causal)?$")
COLORS = {"fovea": "#d1495b", "fa3": "#30638e", "cudnn": "#6a994e", "flash": "#8d99ae"}
NAMES = {"fovea": "Fovea", "fa3": "FlashAttention-3", "cudnn": "cuDNN", "flash": "FlashAttention-2"}

PANEL_WIDTH, PANEL_HEIGHT, MARGIN_X, MARGIN_Y = 300, 190, 62, 58
STEP = 200  # TFLOP/s between two lines of the grid


def panels_of(result):
    """{(head_dim, is_causal): {peer: [(seqlen, TFLOP/s)]}} of the forward table."""
    panels = {}
    for row in result.get("forward", []):
        found = LABEL.match(row["case"])
        if not found:
            continue
        panel = panels.setdefault((int(found["head_dim"]), bool(found["causal"])), {})
        for peer, rate in row["tflops"].items():
            if peer in COLORS:
                panel.setdefault(peer, []).append((int(found["seqlen"]), rate))
    return {key: {peer: sorted(points) for peer, points in panel.items()} for key, panel in sorted(panels.items())}


def text(x, y, words, anchor="middle", size=11, color="#333", weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}" '
            f'font-weight="{weight}">{html.escape(words)}</text>')


def line(x1, y1, x2, y2, color, dash=""):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-dasharray="{dash}"/>'


def draw_panel(title, lines, seqlens, top, product):
    """One panel, its upper left corner at 0, 0."""
    def at(seqlen, rate):
        return seqlens.index(seqlen) / max(1, len(seqlens) - 1) * PANEL_WIDTH, PANEL_HEIGHT * (1 - rate / top)

    parts = [text(PANEL_WIDTH / 2, -10, title, size=13, weight="bold")]
    for rate in range(0, int(top) + 1, STEP):
        y = at(seqlens[0], rate)[1]
        parts += [line(0, y, PANEL_WIDTH, y, "#e5e5e5"), text(-6, y + 4, str(rate), "end")]
    bound = at(seqlens[0], product)[1]
    parts += [line(0, bound, PANEL_WIDTH, bound, "#999", "5 4"), text(4, bound - 4, "bf16 product", "start", 10, "#777")]
    for seqlen in seqlens:
        parts.append(text(at(seqlen, 0)[0], PANEL_HEIGHT + 16, f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen)))
    for peer in (p for p in reversed(COLORS) if p in lines):
        points = [at(*point) for point in lines[peer]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        width = 2.6 if peer == "fovea" else 1.6
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[peer]}" stroke-width="{width}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{COLORS[peer]}"/>' for x, y in points]
    return parts


def legend(peers, x, y):
    parts = []
    for peer in peers:
        parts += [f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{COLORS[peer]}"/>', text(x + 24, y - 2, NAMES[peer], "start", 12)]
        x += 150
    return parts


def picture(result):
    """The SVG's text; empty where the run measured no forward case."""
    panels = panels_of(result)
    if not panels:
        return ""
    product = result["bounds"]["product_tflops"]
    seqlens = sorted({seqlen for panel in panels.values() for points in panel.values() for seqlen, _ in points})
    fastest = max(rate for panel in panels.values() for points in panel.values() for _, rate in points)
    top = (int(max(fastest, product)) // STEP + 1) * STEP
    head_dims = sorted({head_dim for head_dim, _ in panels})
    width = MARGIN_X + len(head_dims) * (PANEL_WIDTH + MARGIN_X)
    height = 100 + 2 * (PANEL_HEIGHT + MARGIN_Y)
    machine = result["machine"]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
             'font-family="Helvetica, Arial, sans-serif">', f'<rect width="{width}" height="{height}" fill="white"/>',
             text(MARGIN_X, 26, "Attention forward, bf16, 16,384 tokens, heads x head_dim = 2048: TFLOP/s over sequence length", "start", 15, "#111", "bold"),
             text(MARGIN_X, 44, f"{machine['gpu']}, commit {machine['commit']}, medians of {result['rounds']}", "start", 11, "#666")]
    peers = [peer for peer in COLORS if any(peer in panel for panel in panels.values())]
    parts += legend(peers, MARGIN_X, 68)
    for (head_dim, is_causal), lines in panels.items():
        x = MARGIN_X + head_dims.index(head_dim) * (PANEL_WIDTH + MARGIN_X)
        y = 104 + is_causal * (PANEL_HEIGHT + MARGIN_Y)
        drawn = draw_panel(f"head_dim {head_dim}{', causal' if is_causal else ''}", lines, seqlens, top, product)
        parts += [f'<g transform="translate({x} {y})">', *drawn, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_picture(result, path):
    """Written aside, then renamed."""
    drawn = picture(result)
    if not drawn:
        return False
    aside = path.with_suffix(".part")
    aside.write_text(drawn)
    os.replace(aside, path)
    return True


def main():
    if len(sys.argv) != 3:
        print(__doc__.strip().splitlines()[2], file=sys.stderr)
        return 2
    if not write_picture(json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2])):
        print("gpu_picture: the result holds no forward case", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
