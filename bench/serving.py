"""`python -m bench.serving`: whole engines, tokens per second and time to the first token, pyllm beside vLLM on the same GPU.

Random weights and prompts, greedy, past end tokens. One process per model and engine runs all rows of that model; engines follow each
other, so both see the same machine in the same minutes. `--against hf` runs the rows that are compared with transformers' `generate`.
Records: bench/results/serving.jsonl, one line per row with all that was measured, newest run wins; two runs at a time keep each other's.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.case import ROOT
from bench.engines import ENGINES, MODELS, edited_text, lookup_speed

RESULTS = ROOT / "bench" / "results" / "serving.jsonl"
START = {"pyllm": 15.0, "vllm": 55.0, "hf": 10.0}  # seconds until an engine is ready, at least nearly
PEERS = {"vllm": ("vllm", "vLLM"), "hf": ("transformers", "transformers")}  # name -> module, title


@dataclass(frozen=True)
class Row:
    """One line of the table. seconds: how long it takes once the engine is ready, about. kind:

    throughput: all requests at once; tok/s. ttft: one prompt after the other; ms. load: Poisson arrivals at half of the requests per second
    of the row `of`; median TTFT in ms. prefix: a shared prefix; TTFT without reuse over with it. lookup: one request whose prompt repeats;
    tok/s with guesses over without.
    """

    name: str
    model: str
    kind: str
    count: int
    input_len: int
    output_len: int
    goal: float
    ratio: float | None = None
    of: str = ""
    seconds: float = 5.0
    peer: str = "vllm"  # what the ratio is to

    @property
    def unit(self) -> str:
        return {"throughput": "tok/s", "ttft": "ms", "load": "ms", "prefix": "x", "lookup": "x"}[self.kind]


ROWS = (
    Row("8B bf16, batch 1, 128 / 512", "8b-bf16", "throughput", 1, 128, 512, 235),
    Row("8B bf16, 256 x (1024 / 768)", "8b-bf16", "throughput", 256, 1024, 768, 0, 1.05, seconds=22),
    Row("8B bf16, batch 1, 128 / 64", "8b-bf16", "throughput", 1, 128, 64, 0, 15, peer="hf"),  # 64: at 13 tokens a second they take long
    Row("8B FP8, batch 1, 128 / 512", "8b-fp8", "throughput", 1, 128, 512, 390),
    Row("8B FP8, first token of 1024", "8b-fp8", "ttft", 8, 1024, 1, 16),
    Row("8B FP8, 256 x (1024 / 1024)", "8b-fp8", "throughput", 256, 1024, 1024, 0, 1.3, seconds=20),
    Row("8B FP8, 512 x (1024 / 1024)", "8b-fp8", "throughput", 512, 1024, 1024, 19000, 1.34, seconds=37),
    Row("8B FP8, 2000 x (128 / 128)", "8b-fp8", "throughput", 2000, 128, 128, 29000, 1.34, seconds=12),
    Row("8B FP8, 1024 / 1024 at half load", "8b-fp8", "load", 64, 1024, 1024, 100, of="8B FP8, 256 x (1024 / 1024)", seconds=16),
    Row("8B FP8, 256 x 2048 shared + 64", "8b-fp8", "prefix", 256, 2112, 1, 5, seconds=12),
    Row("8B FP8, lookup in an edited text", "8b-fp8", "lookup", 1, 1024, 512, 2, seconds=25),
    Row("1B bf16, batch 1, 128 / 512", "1b-bf16", "throughput", 1, 128, 512, 1300),
    Row("1B bf16, 256 x (1024 / 512)", "1b-bf16", "throughput", 256, 1024, 512, 0, 1.1),
)
EDITS = 1 / 16  # of the tokens of the lookup row's prompt


def prompts(row: Row, vocab: int) -> list[list[int]]:
    """Random token ids, others for each row; kind prefix: all begin with the same 2048."""
    draw = np.random.default_rng(ROWS.index(row))
    ids = draw.integers(0, vocab, (row.count, row.input_len))
    if row.kind == "prefix":
        ids[:, :2048] = ids[0, :2048]
    return ids.tolist()


def measure(engine: Any, row: Row, vocab: int, rates: dict[str, float]) -> dict[str, Any]:
    """The value of a row, and what it came from. rates: requests per second of the rows before."""
    ids = prompts(row, vocab)
    if row.kind == "throughput":
        got = engine.run(ids, row.output_len)
        rates[row.name] = row.count / got["seconds"]
        value, first = got["tokens"] / got["seconds"], statistics.median(got["ttft_ms"])
        return {"value": value, **{k: v for k, v in got.items() if k not in ("ttft_ms", "ids")}, "ttft_ms_median": first}
    if row.kind == "ttft":
        times = [engine.run([prompt], row.output_len)["ttft_ms"][0] for prompt in ids]
        return {"value": statistics.median(times), "least": min(times), "most": max(times)}
    if row.kind == "load":
        rate = rates[row.of] / 2
        gaps = np.random.default_rng(1).exponential(1 / rate, row.count)
        times = engine.run(ids, row.output_len, gaps=gaps)["ttft_ms"]
        return {"value": statistics.median(times), "p99": float(np.percentile(times, 99)), "requests_per_second": rate}
    alone = statistics.mean(engine.run(ids, row.output_len, salted=True)["ttft_ms"])
    shared = statistics.mean(engine.run(ids, row.output_len)["ttft_ms"])
    return {"value": alone / shared, "ttft_ms_without": alone, "ttft_ms_with": shared}


def work(name: str, model: str, rows: Sequence[Row], end: float) -> None:
    """The worker: one model, one engine (two in turn for rows of lookup). A JSON line for each row that can be done by `end`, which is on
    the clock of time.time."""
    from pyllm.api.dummy import SHAPES

    config = SHAPES[MODELS[model][0]]

    def show(row: Row, found: dict[str, Any]) -> None:
        print("ROW " + json.dumps({"row": row.name, **found}), flush=True)

    for row in (row for row in rows if row.kind == "lookup" and time.time() + row.seconds < end):
        show(row, lookup_speed(model, edited_text(row.input_len, config["vocab_size"], EDITS), row.output_len))
    rows = [row for row in rows if row.kind in ("throughput", "ttft") or (name == "pyllm" and row.kind != "lookup")]
    if not rows:
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = ENGINES[name](model, Path(folder))
        engine.run(np.random.default_rng(10**6).integers(0, config["vocab_size"], (8, 1024)).tolist(), 16)
        rates: dict[str, float] = {}
        for row in rows:
            if time.time() + row.seconds < end and (row.of or row.name) in {row.name, *rates}:
                show(row, measure(engine, row, config["vocab_size"], rates))


def _command(name: str, model: str, rows: Sequence[Row], end: float) -> list[str]:
    return [sys.executable, "-m", "bench.serving", "--worker", name, "--models", model, "--end", str(end), *(row.name for row in rows)]


def _collect(name: str, model: str, rows: Sequence[Row], log: Path, end: float) -> dict[str, dict[str, Any]]:
    if time.time() + START[name] > end:
        print(f"{name} {model}: left out, the time is up", flush=True)
        return {}
    command = _command(name, model, rows, end)
    found: dict[str, dict[str, Any]] = {}
    with log.open("w") as sink, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True) as process:
        assert process.stdout is not None
        timer = threading.Timer(min(max(end - time.time(), 0), threading.TIMEOUT_MAX), process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("ROW "):
                    got = json.loads(line[4:])
                    found[got.pop("row")] = got
                    print(f"{name:<6} {list(found)[-1]:<34} {got['value']:>10.1f}", flush=True)
                else:
                    sink.write(line)
        except KeyboardInterrupt:
            process.kill()
            print(f"{name} {model}: interrupted; what was measured is kept", flush=True)
            return found
        finally:
            timer.cancel()
    if process.returncode:
        print(f"{name} {model}: exit status {process.returncode}; the end of {log}:\n{log.read_text()[-2000:]}", flush=True)
    return found


def verdict(record: dict[str, Any]) -> str:
    """Met, missed or unknown: the absolute goal and the ratio to the peer, whichever the row states; one that is missed decides."""
    value, peer, goal = record["value"], _peer(record), record["goal"]
    found = []
    if goal:
        found.append(value <= goal if record["unit"] == "ms" else value >= goal)
    if record["goal_ratio"]:
        found.append(None if peer is None else value >= record["goal_ratio"] * peer)
    return "missed" if False in found else "unknown" if None in found else "met"


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def _keep(found: Sequence[dict[str, Any]]) -> None:
    """Put these records in the place of older ones of their rows; another process may do the same."""
    with (ROOT / "build" / "serving.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = {r["row"]: r for r in (*read(), *found)}
        RESULTS.write_text("".join(json.dumps(records[r.name]) + "\n" for r in ROWS if r.name in records))


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    lines = ["| work | pyllm | vLLM | ratio | goal | |", "|---|---|---|---|---|---|"]
    for r in found:
        goals = ([f"{r['goal']:,g} {r['unit']}"] if r["goal"] else []) + ([f"{r['goal_ratio']:g}x"] if r["goal_ratio"] else [])
        peer, ratio = ("–", "–") if _peer(r) is None else (f"{_peer(r):,.4g}", f"{_ratio(r):.2f}")
        peer += "" if _name(r) == "vllm" else f" ({PEERS[_name(r)][1]})"
        sign = {"met": "met", "missed": "**missed**", "unknown": "not measured"}[verdict(r)]
        lines.append(f"| {r['row']} | {r['value']:,.5g} {r['unit']} | {peer} | {ratio} | {', '.join(goals)} | {sign} |")
    return lines


def _name(record: dict[str, Any]) -> str:
    return record.get("peer", "vllm")


def _peer(record: dict[str, Any]) -> float | None:
    return record[_name(record)]


def _ratio(record: dict[str, Any]) -> float:
    ours, peer = record["value"], record[_name(record)]
    return peer / ours if record["unit"] == "ms" else ours / peer


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rows", nargs="*", metavar="ROW", help="names of rows (see --list); none: all")
    p.add_argument("--models", default=",".join(MODELS), metavar="NAME[,NAME]", help=f"only rows of these: {', '.join(MODELS)}")
    p.add_argument("--against", choices=list(PEERS), help="run the peer too, on the rows compared with it; it must be installed")
    p.add_argument("--list", action="store_true", help="list the rows, and stop")
    p.add_argument("--seconds", type=float, default=1e6, help="leave out what cannot be done in so many seconds in all")
    p.add_argument("--worker", choices=list(ENGINES), help=argparse.SUPPRESS)
    p.add_argument("--end", type=float, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    models = args.models.split(",")
    wrong = [n for n in args.rows if n not in {r.name for r in ROWS}] + [m for m in models if m not in MODELS]
    if wrong:
        p.error(f"no row or model is named {wrong[0]!r}; rows: {'; '.join(r.name for r in ROWS)}; models: {', '.join(MODELS)}")
    if args.against and importlib.util.find_spec(PEERS[args.against][0]) is None:
        p.error(f"--against {args.against}: {PEERS[args.against][1]} is not installed")
    rows = [r for r in ROWS if r.model in models and (not args.rows or r.name in args.rows) and args.against in (None, r.peer)]
    if args.list:
        print("\n".join(f"{r.name}  ({r.model}, {r.kind})" for r in rows))
        return 0
    if args.worker:
        work(args.worker, models[0], rows, args.end)
        return 0
    return _measure_all(models, rows, args.against, time.time() + args.seconds)


def _measure_all(models: Sequence[str], rows: Sequence[Row], against: str | None, end: float) -> int:
    from bench import machine

    logs = ROOT / "build"
    logs.mkdir(exist_ok=True)
    about = machine.describe(machine.Monitor(), "python -m bench.serving" + (f" --against {against}" if against else ""))
    failed = 0
    for model in models:
        if not (mine := [r for r in rows if r.model == model]):
            continue
        lookups = [r for r in mine if r.kind == "lookup"]  # two engines of their own, in a process of their own
        ours: dict[str, dict[str, Any]] = {}
        peers: dict[str, dict[str, Any]] = {}
        for name, some in (("pyllm", [r for r in mine if r not in lookups]), ("pyllm", lookups), (against, mine)):
            if not some or not name:
                continue
            log = logs / f"serving_{name}_{'lookup_' * (some is lookups)}{model}.log"
            (ours if name == "pyllm" else peers).update(_collect(name, model, some, log, end))
            found = []
            for row in (row for row in mine if row.name in ours):
                stated = {"row": row.name, "unit": row.unit, "goal": row.goal, "goal_ratio": row.ratio, "peer": row.peer}
                theirs = peers.get(row.name, {})
                peer = {row.peer: theirs.get("value")} | {f"{row.peer}_{k}": v for k, v in theirs.items() if k != "value"}
                found.append(stated | ours[row.name] | peer | {k: about[k] for k in ("gpu", "torch", "commit", "time", "command")})
            _keep(found)  # each time: what comes later may be ended from outside
        failed += len(mine) - len(ours)
    print("\n".join(table(read())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
