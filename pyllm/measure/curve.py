"""The throughput-latency curve of a sweep over concurrencies: its table, its knee, and a picture of it for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyllm.measure.bench import knee

WIDTH, HEIGHT, ROOM = 56, 12, 12  # of the picture and of the labels at its right, in characters: 80 columns with the axis


def curve(concurrencies: Sequence[int], reports: Sequence[dict[str, Any]]) -> str:
    """A line for each concurrency, in the order of the sweep, and the picture of them all."""
    points = []
    rows = [f"{'concurrency':>11} {'tokens/s':>10} {'TTFT ms':>9} {'TPOT ms':>9}"]
    latency = "TPOT" if all(r["streaming_metrics"]["avg_tpot_ms"] for r in reports) else "TTFT"  # of one token there is no TPOT
    for c, r in zip(concurrencies, reports, strict=True):
        speed, s = r["performance"]["system_output_throughput_tok_s"], r["streaming_metrics"]
        points.append((s[f"avg_{latency.lower()}_ms"], speed))
        rows.append(f"{c:>11} {speed:>10.1f} {s['avg_ttft_ms']:>9.2f} {s['avg_tpot_ms'] or 0:>9.2f}")
    best = knee(points)
    rows[1 + best] += "  <- knee"
    return "\n".join([*rows, "", *picture(points, concurrencies, best, f"{latency} ms")])


def picture(points: Sequence[tuple[float, float]], labels: Sequence[int], marked: int, across: str) -> list[str]:
    """(latency, tokens per second) points from the origin on, as lines of text: a star each, `#` for the marked one, and beside them their
    labels where there is room."""
    most_x, most_y = (max(p[i] for p in points) for i in (0, 1))
    grid = [[" "] * (WIDTH + ROOM) for _ in range(HEIGHT)]
    places = [(HEIGHT - 1 - round(y / most_y * (HEIGHT - 1)), round(x / most_x * (WIDTH - 1))) for x, y in points]
    for n, (row, column) in enumerate(places):
        if n != marked:
            grid[row][column] = "*"
    grid[places[marked][0]][places[marked][1]] = "#"
    order = [marked, *(n for n in range(len(points)) if n != marked)]  # the knee has its label in any case
    for n in order:
        row, column = places[n]
        text = f" {labels[n]}" + (" knee" if n == marked else "")
        if n == marked or set(grid[row][column + 1 : column + 2 + len(text)]) <= {" "}:
            grid[row][column + 1 : column + 1 + len(text)] = text
    names = [f"{most_y:,.0f}", *[""] * (HEIGHT - 2), "0"]
    lines = [f"{name:>10} |{''.join(row)}".rstrip() for name, row in zip(names, grid, strict=True)]
    end = f"{most_x:.2f} {across}"
    return [f"{'tokens/s':>10}", *lines, f"{'':>10} +{'-' * WIDTH}", f"{'':>10}  0{end:>{WIDTH - 1}}"]
