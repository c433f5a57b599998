"""Two pictures from the records, as SVG in docs/img: the roofline with each case on it, and the speed-up over each baseline per op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.case import ROOT
from bench.records import Record, ratio, ratio_summary
from bench.report import baseline_names

IMAGES = ROOT / "docs" / "img"
TICKS = (0.1, 0.2, 0.5, 0.8, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
ROOFLINE, SPEEDUP = "roofline.svg", "speedup.svg"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    # A fixed salt and no date: the same records draw the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "pyllm", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return path


def roofline(records: list[Record], folder: Path) -> Path:
    """Left: rate over FLOPs per byte under the measured ceilings. Right: share of the ceiling over bytes, cold cases."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    found = records[-1]["ceilings"]
    computing = [r for r in records if r["tflops"]]
    intensities = [r["flops"] / r["bytes"] for r in computing] or [1.0]
    peak = max(v for v in (found["bf16_tflops"], found["fp8_tflops"]) if v)
    ends = (min(intensities) / 4, max(max(intensities) * 4, 4 * peak * 1e3 / found["read_gbs"]))
    for name in ("bf16", "fp8"):
        rate = found[f"{name}_tflops"]
        if rate:
            knee = rate * 1e3 / found["read_gbs"]
            left.plot([ends[0], knee, ends[1]], [ends[0] * found["read_gbs"] / 1e3, rate, rate], lw=1, color="grey")
            left.annotate(f"{name} {rate:,.0f} TFLOP/s", (ends[1], rate), fontsize=7, ha="right", va="bottom")
    colours = plt.get_cmap("tab20").colors  # one colour per op, the same in both panels
    for index, op in enumerate(dict.fromkeys(r["op"] for r in records)):
        here, look = [r for r in computing if r["op"] == op], {"s": 14, "color": colours[index % len(colours)]}
        left.scatter([r["flops"] / r["bytes"] for r in here], [r["tflops"] for r in here], zorder=3, **look)
        shares = [r for r in records if r["op"] == op and r["share"] is not None and r["cold"]]
        right.scatter([r["bytes"] for r in shares], [100 * r["share"] for r in shares], label=op, **look)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte",
        ylabel="TFLOP/s",
        title=f"{records[-1]['gpu']}: read {found['read_gbs']:,.0f} GB/s",
    )
    right.set(
        xscale="log",
        xlabel="bytes moved",
        ylabel="% of a copy of the same bytes (of the matrix rate)",
        title="share of the ceiling, cold L2",
    )
    right.set_ylim(bottom=0)
    right.axhline(100, color="grey", lw=0.8)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    right.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(plt, figure, folder / ROOFLINE)


def speedup(records: list[Record], folder: Path) -> Path:
    """Per op and baseline: the geometric mean of the ratios as a bar from 1, the range over the cases as a line."""
    plt = _pyplot()
    names = [n for n in baseline_names(records) if any(ratio(r, n) is not None for r in records if n in r["baselines"])]
    ops = list(dict.fromkeys(r["op"] for r in records))
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.2 * len(ops) * (len(names) + 1)))
    extremes = [0.8, 1.25]
    for place, name in enumerate(names):
        colour = f"C{place}"
        axes.barh([0], [0], color=colour, label=f"over {name}")
        for index, op in enumerate(ops):
            here = [r for r in records if r["op"] == op and name in r["baselines"]]
            at = index + 0.8 * (place + 0.5) / len(names) - 0.4
            ratios = [value for value in (ratio(r, name) for r in here) if value is not None]
            if ratios:
                mean = ratio_summary(here, name)[0]
                axes.barh([at], [mean - 1], left=1, height=0.7 / len(names), color=colour)
                axes.plot([min(ratios), max(ratios)], [at, at], color="dimgrey", lw=0.8)
                extremes += [min(ratios), max(ratios)]
            elif here:
                axes.text(1.02, at, f"{name}: {here[0]['baselines'][name]['reason'].split(':')[0]}", va="center", fontsize=6, color="grey")
    axes.axvline(1, color="black", lw=0.8)
    axes.set(yticks=range(len(ops)), yticklabels=ops, xscale="log", xlabel="times faster than the baseline (geometric mean, range)")
    axes.set_xlim(min(extremes) / 1.1, max(extremes) * 1.1)
    ticks = [t for t in TICKS if min(extremes) / 1.1 <= t <= max(extremes) * 1.1]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.legend(fontsize=7, frameon=False, ncols=max(1, len(names)), loc="lower left", bbox_to_anchor=(0, 1))
    axes.set_title(f"{records[-1]['gpu']}: speed-up", fontsize=9, loc="right")
    return _save(plt, figure, folder / SPEEDUP)


def draw(records: list[Record], folder: Path | None = None) -> list[Path]:
    """Both pictures; nothing without records."""
    folder = folder or IMAGES
    return [roofline(records, folder), speedup(records, folder)] if records else []
