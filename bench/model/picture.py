"""Bars of what a step asks of each unit, kernel by kernel, in shares of the clocks that the step takes: an SVG without anything else."""

COLOURS = {"products": "#3b6fb6", "shared": "#8a6bb1", "mufu": "#d9822b", "fma": "#c2b280", "alu": "#7fa37a", "issue": "#9aa3ab"}
ROW, BAR, LEFT, WIDTH = 58, 7, 190, 520


def svg(rows):
    """rows: (label, clocks of a step, what limits it, {unit: busy clocks})."""
    height = ROW * len(rows) + 50
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 150}" height="{height}" font-family="sans-serif" font-size="12">',
             f'<rect width="100%" height="{height}" fill="white"/>']
    for i, (unit, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 85 * i}" y="12" width="10" height="10" fill="{colour}"/><text x="{LEFT + 14 + 85 * i}" y="21">{unit}</text>')
    parts.append(f'<line x1="{LEFT + WIDTH}" y1="34" x2="{LEFT + WIDTH}" y2="{height - 8}" stroke="#444" stroke-dasharray="3 3"/>')
    for i, (label, clocks, limit, busy) in enumerate(rows):
        top = 40 + ROW * i
        parts.append(f'<text x="{LEFT - 8}" y="{top + 20}" text-anchor="end">{label}</text>'
                     f'<text x="{LEFT - 8}" y="{top + 35}" text-anchor="end" fill="#666">{clocks:,.0f} clocks</text>'
                     f'<text x="{LEFT + WIDTH + 8}" y="{top + 27}" fill="#666">{limit}</text>')
        for j, (unit, colour) in enumerate(COLOURS.items()):
            length = WIDTH * busy[unit] / clocks
            parts.append(f'<rect x="{LEFT}" y="{top + (BAR + 1) * j}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>", ""])
