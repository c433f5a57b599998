"""The table that a run prints: ours, rates, share of the ceiling, and each baseline's time and ratio; an absent peer keeps its column."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.ceilings import Ceilings
from bench.records import Record, ratio, verdicts

SIGN = {"met": "✓", "missed": "✗", "unknown": "?"}
COLOUR = {"met": "green", "missed": "red", "unknown": "yellow"}


def baseline_names(records: Iterable[Record]) -> list[str]:
    """All baselines, in the order in which the cases list them."""
    return list(dict.fromkeys(name for record in records for name in record["baselines"]))


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits without an exponent; "–" for none."""
    if value is None:
        return "–"
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, digits - whole)}f}"


def time_text(record: Record) -> str:
    spread = (record["us_max"] - record["us_min"]) / 2 / record["us"]
    return f"{number(record['us'])} ±{spread:.1%}" + (" (events)" if record["timer"] == "events" else "")


def baseline_text(record: Record, name: str) -> str:
    """ "1.23x (45.6 µs)", or why there is no number; "" where the case has no such baseline."""
    if name not in record["baselines"]:
        return ""
    found = record["baselines"][name]
    times = ratio(record, name)
    if times is None:
        return found["reason"]
    return f"{times:.2f}x ({number(found['us'])} µs" + (", events)" if found["timer"] == "events" else ")")


def short(reason: str, width: int = 28) -> str:
    return reason if len(reason) <= width else reason[: width - 1] + "…"


def _goal_text(record: Record) -> Text:
    text = Text()
    for what, verdict in verdicts(record):
        text.append(("" if not text else "  ") + f"{SIGN[verdict]} {what}", style=COLOUR[verdict])
    return text


def table(records: list[Record]) -> RenderableType:
    """One table per op, notes under it for baselines whose reason did not fit."""
    parts: list[RenderableType] = []
    for op in dict.fromkeys(record["op"] for record in records):
        rows = [record for record in records if record["op"] == op]
        names = baseline_names(rows)
        grid = Table(title=op, title_justify="left", title_style="bold")
        for heading in ("case", "µs", "GB/s", "TFLOP/s", "of ceiling"):
            grid.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
        for name in names:
            grid.add_column(f"x {name}", justify="right")
        grid.add_column("goal")
        notes = []
        for record in rows:
            cells = [baseline_text(record, name) for name in names]
            notes += [f"{record['case']}, {name}: {cell}" for name, cell in zip(names, cells, strict=True) if len(cell) > 28]
            share = "–" if record["share"] is None else f"{record['share']:.1%}"
            rates = [number(record["gbs"], 4), number(record["tflops"])]
            grid.add_row(f"{record['shape']}: {record['case']}", time_text(record), *rates, share, *map(short, cells), _goal_text(record))
        parts.append(grid)
        parts += [Text(note, style="dim") for note in dict.fromkeys(notes)]
    return Group(*parts)


def ceilings_line(found: Ceilings) -> str:
    """One line for the head of a run."""
    parts = [f"copy {found.copy_gbs:,.0f} GB/s", f"read {found.read_gbs:,.0f}"]
    parts.append("write –" if found.write_gbs is None else f"write {found.write_gbs:,.0f}")
    parts.append(f"bf16 {found.bf16_tflops:,.0f} TFLOP/s")
    parts.append("fp8 –" if found.fp8_tflops is None else f"fp8 {found.fp8_tflops:,.0f} TFLOP/s")
    return "ceilings: " + ", ".join(parts) + (f" ({found.notes})" if found.notes else "")
