"""docs/results.md, from the records alone: `python -m bench --results-only` writes it, a test compares it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import serving
from bench.case import ROOT
from bench.plots import ROOFLINE, SPEEDUP
from bench.records import Record, ratio_summary, ratio_verdict, verdicts
from bench.report import baseline_names, baseline_text, number, time_text

PAGE = ROOT / "docs" / "results.md"
SIGN = {"met": "met", "missed": "**missed**", "unknown": "not measured"}

HEAD = """# Results

Generated from `bench/results/*.jsonl` by `python -m bench --results-only`; do not edit.

Times are medians per call inside a CUDA graph that rotates over input sets larger than L2 three times over (cases under 1 MB: four
sets, warm in L2, marked *w*), ours and every baseline interleaved in alternating order; ± is half the range over the rounds. *Of
ceiling* compares with a copy of the same number of bytes (half read, half written, the faster of CuPy's and torch's) in the same
race, or with the measured matrix rate where it says so. *x baseline* is how many times faster pyllm is, with the baseline's time.
A goal stated as a ratio never asks for less than the floor: bytes at the measured read rate + 2 µs or, where the share is one of a matrix
rate, FLOPs at 95 % of that rate, if that is longer; a row at its floor has met such a goal even where a baseline is faster. Baselines that
could not run say why.
"""


def _unique(records: list[Record], name: str) -> str:
    return ", ".join(dict.fromkeys(str(record[name]) for record in records if record[name] is not None)) or "not logged"


def _range(values: list[float | None], unit: str, none: str = "not logged") -> str:
    """ "1,755–1,980 MHz", one number where all agree."""
    found = [f"{value:,.0f}" for value in sorted(v for v in values if v is not None)]
    return "–".join(dict.fromkeys((found[0], found[-1]))) + f" {unit}" if found else none


def _machine(records: list[Record]) -> list[str]:
    software = ", ".join(f"{name} {_unique(records, name)}" for name in ("driver", "torch", "nvcc"))
    measured = [_range([record[name] for record in records], unit) for name, unit in (("sm_mhz", "MHz"), ("watts", "W"), ("celsius", "°C"))]
    days = sorted(record["time"][:10] for record in records)
    fields = (("copy", "gbs"), ("read", "gbs"), ("write", "gbs"), ("bf16", "tflops"), ("fp8", "tflops"))
    units = {"gbs": "GB/s", "tflops": "TFLOP/s"}
    rates = [f"{name} " + _range([r["ceilings"][f"{name}_{unit}"] for r in records], units[unit], "not measured") for name, unit in fields]
    return [
        f"* GPU: {_unique(records, 'gpu')}; {software}",
        f"* while measuring: SM clock {measured[0]}, power {measured[1]}, {measured[2]}",
        f"* measured {' to '.join(dict.fromkeys((days[0], days[-1])))} at commit {_unique(records, 'commit')}",
        "* ceilings of the same runs: " + ", ".join(rates),
        *(f"* command: `{command}`" for command in dict.fromkeys(record["command"] for record in records)),
    ]


def _row(record: Record, names: list[str]) -> str:
    share = "–" if record["share"] is None else f"{record['share']:.1%}"
    if record["share_of"].endswith("matrix rate"):
        share += f" of the {record['share_of']}"
    goals = "; ".join(f"{what}: {SIGN[verdict]}" for what, verdict in verdicts(record)) or "–"
    case = f"{record['shape']}: {record['case']}" + ("" if record["cold"] else " *w*")
    rates = [number(record["gbs"], 4), number(record["tflops"])]
    baselines = [baseline_text(record, name).replace("|", "\\|") for name in names]
    return "| " + " | ".join([case, time_text(record), *rates, share, *baselines, goals]) + " |"


def _summary(rows: list[Record], names: list[str]) -> str:
    parts = []
    for name in names:
        found = ratio_summary(rows, name)
        if found is None:
            parts.append(f"{name}: not measured")
            continue
        verdict = ratio_verdict(rows, name)
        goal = "" if verdict is None else f", ratio goal {SIGN[verdict]}"
        parts.append(f"{name}: {found[0]:.2f}x (worst {found[1]:.2f}x over {found[2]} cells{goal})")
    return "Geometric mean against " + "; ".join(parts) + "." if parts else ""


def _op_section(op: str, rows: list[Record]) -> list[str]:
    names = baseline_names(rows)
    heads = ["case", "µs", "GB/s", "TFLOP/s", "of ceiling", *(f"x {name}" for name in names), "goal"]
    lines = [f"### {op}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += [_row(record, names) for record in rows]
    return [*lines, "", _summary(rows, names), ""]


def _engines(found: list[dict[str, Any]]) -> list[str]:
    """The section of whole engines, from bench/results/serving.jsonl."""
    if not found:
        return []
    about = "; ".join(
        dict.fromkeys(f"{r['gpu']}, torch {r['torch']}, commit {r['commit']}, {r['time'][:10]}, `{r['command']}`" for r in found)
    )
    text = (
        "Random weights and prompts, greedy, past end tokens, all requests at once where the row does not say otherwise; one process per "
        "engine and model, one after the other on the same GPU. The prefix row is the mean time to the first token without reuse over that "
        "with it. bf16 rows: `LLM(one_kernel=True)`, which counts where one request runs alone."
    )
    heads = ["work", "steps", "ms a step", "host's work a step, ms", "of a step without prompts"]
    where = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for r in found:
        if r.get("steps"):
            decode = f"{r['host_ms_per_decode_step']:.2f}" if r.get("decode_steps") else "not measured"
            each = f"{r['steps']:,} | {r['seconds'] * 1e3 / r['steps']:.2f} | {r['host_ms_per_step']:.2f} | {decode}"
            where.append(f"| {r['row']} | {each} |")
    return ["## Whole engines", "", f"* {about}", "", text, "", *serving.table(found), "", *where, ""]


def page(records: list[Record], engines: list[dict[str, Any]] | None = None) -> str:
    """The text of docs/results.md for these records of kernels and of whole engines."""
    lines = [HEAD]
    if not records:
        lines.append("No records yet: `make gpu-bench` on a machine with a Hopper GPU writes them.\n")
    else:
        lines += [f"![Roofline](img/{ROOFLINE})", "", f"![Speed-up](img/{SPEEDUP})", ""]
    lines += _engines(engines or [])
    for family in dict.fromkeys(record["family"] for record in records):
        rows = [record for record in records if record["family"] == family]
        lines += [f"## {family}", "", *_machine(rows), ""]
        for op in dict.fromkeys(record["op"] for record in rows):
            lines += _op_section(op, [record for record in rows if record["op"] == op])
    return "\n".join(lines).rstrip("\n") + "\n"


def write(records: list[Record], path: Path | None = None) -> Path:
    path = path or PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(records, serving.read()), encoding="utf-8")
    return path
