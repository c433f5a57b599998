"""`python -m bench.serving`: whole engines, tokens per second and time to the first token, pyllm beside vLLM on the same GPU.

Random weights and prompts, greedy, past end tokens. One process per model and engine runs all rows of that model; engines follow each
other, so both see the same machine in the same minutes. Records: bench/results/serving.jsonl, one line per row, newest run wins.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.case import ROOT

RESULTS = ROOT / "bench" / "results" / "serving.jsonl"
MODELS = {
    "8b-bf16": ("llama-3.1-8b", None, "auto"),
    "8b-fp8": ("llama-3.1-8b", "fp8", "fp8"),
    "1b-bf16": ("llama-3.2-1b", None, "auto"),
}
"""Name -> shape, quantization, dtype of the KV cache. The head stays in bf16."""
BATCH, CHUNK, LENGTH = 1024, 8192, 2112


@dataclass(frozen=True)
class Row:
    """One line of the table. kind: throughput (all requests at once; tok/s), ttft (one prompt after the other; ms), load (Poisson arrivals
    at half of the requests per second of the row `of`; median TTFT in ms), prefix (a shared prefix; TTFT without reuse over with it)."""

    name: str
    model: str
    kind: str
    count: int
    input_len: int
    output_len: int
    goal: float
    ratio: float | None = None
    of: str = ""

    @property
    def unit(self) -> str:
        return {"throughput": "tok/s", "ttft": "ms", "load": "ms", "prefix": "x"}[self.kind]


ROWS = (
    Row("8B bf16, batch 1, 128 / 512", "8b-bf16", "throughput", 1, 128, 512, 235),
    Row("8B bf16, 256 x (1024 / 768)", "8b-bf16", "throughput", 256, 1024, 768, 0, 1.05),
    Row("8B FP8, batch 1, 128 / 512", "8b-fp8", "throughput", 1, 128, 512, 390),
    Row("8B FP8, first token of 1024", "8b-fp8", "ttft", 8, 1024, 1, 16),
    Row("8B FP8, 256 x (1024 / 1024)", "8b-fp8", "throughput", 256, 1024, 1024, 0, 1.3),
    Row("8B FP8, 512 x (1024 / 1024)", "8b-fp8", "throughput", 512, 1024, 1024, 19000, 1.34),
    Row("8B FP8, 2000 x (128 / 128)", "8b-fp8", "throughput", 2000, 128, 128, 29000, 1.34),
    Row("8B FP8, 1024 / 1024 at half load", "8b-fp8", "load", 64, 1024, 1024, 100, of="8B FP8, 256 x (1024 / 1024)"),
    Row("8B FP8, 256 x 2048 shared + 64", "8b-fp8", "prefix", 256, 2112, 1, 5),
    Row("1B bf16, batch 1, 128 / 512", "1b-bf16", "throughput", 1, 128, 512, 1300),
    Row("1B bf16, 256 x (1024 / 512)", "1b-bf16", "throughput", 256, 1024, 512, 0, 1.1),
)


def prompts(row: Row, vocab: int) -> list[list[int]]:
    """Random token ids, others for each row; kind prefix: all begin with the same 2048."""
    draw = np.random.default_rng(ROWS.index(row))
    ids = draw.integers(0, vocab, (row.count, row.input_len))
    if row.kind == "prefix":
        ids[:, :2048] = ids[0, :2048]
    return ids.tolist()


class Ours:
    """pyllm.LLM. Pages are reused, which random prompts never do; a request with a salt of its own shares nothing."""

    def __init__(self, model: str, folder: Path) -> None:
        from pyllm import LLM, KvCacheConfig

        _, quant, kv = MODELS[model]
        self.llm = LLM(
            str(folder),
            load_format="dummy",
            dtype="bf16",
            quant=quant or (),
            skip_tokenizer_init=True,
            max_batch_size=BATCH,
            max_num_tokens=CHUNK,
            max_seq_len=LENGTH + 1,
            kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.9, dtype=kv),
        )

    def run(self, ids: Sequence[list[int]], output_len: int, gaps: Sequence[float] | None = None, salted: bool = False) -> dict[str, Any]:
        from pyllm import SamplingParams

        params = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=False)

        async def one(i: int, at: float) -> Any:
            await asyncio.sleep(at)
            return await self.llm.generate_async(ids[i], params, **({"cache_salt": str(time.time_ns())} if salted else {})).aresult()

        async def everything() -> list[Any]:
            starts = np.cumsum(gaps) if gaps is not None else np.zeros(len(ids))
            return await asyncio.gather(*(one(i, float(at)) for i, at in enumerate(starts)))

        before, start = self.llm.get_stats(), time.perf_counter()
        outputs = asyncio.run(everything())
        seconds, after = time.perf_counter() - start, self.llm.get_stats()
        failed = [c.error for o in outputs for c in o.outputs if c.error]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(ids)} requests failed: {failed[0]}")
        steps = after["steps"] - before["steps"]
        host = after["steps"] * after["host_seconds_per_step"] - before["steps"] * before["host_seconds_per_step"]
        return {
            "tokens": sum(o.outputs[0].length for o in outputs),
            "seconds": seconds,
            "ttft_ms": [(o.timing.tokens[0] - o.timing.submitted) * 1e3 for o in outputs],
            "steps": steps,
            "host_ms_per_step": host / max(steps, 1) * 1e3,
        }


class Vllm:
    """vLLM's offline engine, in this process."""

    def __init__(self, model: str, folder: Path) -> None:
        import vllm

        _, quant, kv = MODELS[model]
        self.llm = vllm.LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            quantization=quant,
            kv_cache_dtype=kv,
            max_model_len=LENGTH + 1,
            max_num_seqs=BATCH,
            enable_prefix_caching=False,
        )

    def run(self, ids: Sequence[list[int]], output_len: int) -> dict[str, Any]:
        import vllm

        params = vllm.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"tokens": sum(len(o.outputs[0].token_ids) for o in outputs), "seconds": seconds, "ttft_ms": [seconds * 1e3]}


ENGINES: dict[str, Callable[[str, Path], Any]] = {"pyllm": Ours, "vllm": Vllm}


def measure(engine: Any, row: Row, vocab: int, rates: dict[str, float]) -> dict[str, Any]:
    """The value of a row, and what it came from. rates: requests per second of the rows before."""
    ids = prompts(row, vocab)
    if row.kind == "throughput":
        got = engine.run(ids, row.output_len)
        rates[row.name] = row.count / got["seconds"]
        value = got["tokens"] / got["seconds"]
        return {"value": value, **{k: v for k, v in got.items() if k != "ttft_ms"}, "ttft_ms_median": statistics.median(got["ttft_ms"])}
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


def work(name: str, model: str, rows: Sequence[Row]) -> None:
    """The worker: one engine, one model; prints a JSON line for each row."""
    from pyllm.api.dummy import SHAPES

    config = SHAPES[MODELS[model][0]]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = ENGINES[name](model, Path(folder))
        engine.run(np.random.default_rng(10**6).integers(0, config["vocab_size"], (8, 1024)).tolist(), 16)
        rates: dict[str, float] = {}
        for row in rows:
            if name == "pyllm" or row.kind in ("throughput", "ttft"):
                print("ROW " + json.dumps({"row": row.name, **measure(engine, row, config["vocab_size"], rates)}), flush=True)


def _collect(name: str, model: str, rows: Sequence[Row], log: Path) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "bench.serving", "--worker", name, "--models", model, *(row.name for row in rows)]
    found: dict[str, dict[str, Any]] = {}
    with log.open("w") as sink, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True) as process:
        assert process.stdout is not None
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
    if process.returncode:
        print(f"{name} {model}: exit status {process.returncode}; the end of {log}:\n{log.read_text()[-2000:]}", flush=True)
    return found


def verdict(record: dict[str, Any]) -> str:
    """Met, missed or unknown: the absolute goal and the ratio to vLLM, whichever the row states; one that is missed decides."""
    value, peer, goal = record["value"], record["vllm"], record["goal"]
    found = []
    if goal:
        found.append(value <= goal if record["unit"] == "ms" else value >= goal)
    if record["goal_ratio"]:
        found.append(None if peer is None else value >= record["goal_ratio"] * peer)
    return "missed" if False in found else "unknown" if None in found else "met"


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    lines = ["| work | pyllm | vLLM | ratio | goal | |", "|---|---|---|---|---|---|"]
    for r in found:
        goals = ([f"{r['goal']:,g} {r['unit']}"] if r["goal"] else []) + ([f"{r['goal_ratio']:g}x"] if r["goal_ratio"] else [])
        peer, ratio = ("–", "–") if r["vllm"] is None else (f"{r['vllm']:,.4g}", f"{_ratio(r):.2f}")
        sign = {"met": "met", "missed": "**missed**", "unknown": "not measured"}[verdict(r)]
        lines.append(f"| {r['row']} | {r['value']:,.5g} {r['unit']} | {peer} | {ratio} | {', '.join(goals)} | {sign} |")
    return lines


def _ratio(record: dict[str, Any]) -> float:
    return record["vllm"] / record["value"] if record["unit"] == "ms" else record["value"] / record["vllm"]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rows", nargs="*", metavar="ROW", help="names of rows (see --list); none: all")
    p.add_argument("--models", default=",".join(MODELS), metavar="NAME[,NAME]", help=f"only rows of these: {', '.join(MODELS)}")
    p.add_argument("--against", choices=["vllm"], help="run the peer too; it must be installed")
    p.add_argument("--list", action="store_true", help="list the rows, and stop")
    p.add_argument("--worker", choices=list(ENGINES), help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    models = args.models.split(",")
    wrong = [n for n in args.rows if n not in {r.name for r in ROWS}] + [m for m in models if m not in MODELS]
    if wrong:
        p.error(f"no row or model is named {wrong[0]!r}; rows: {'; '.join(r.name for r in ROWS)}; models: {', '.join(MODELS)}")
    if args.against and importlib.util.find_spec("vllm") is None:
        p.error("--against vllm: vLLM is not installed")
    rows = [r for r in ROWS if r.model in models and (not args.rows or r.name in args.rows)]
    if args.list:
        print("\n".join(f"{r.name}  ({r.model}, {r.kind})" for r in rows))
        return 0
    if args.worker:
        work(args.worker, models[0], rows)
        return 0
    return _measure_all(models, rows, args.against)


def _measure_all(models: Sequence[str], rows: Sequence[Row], against: str | None) -> int:
    from bench import machine

    logs, records = ROOT / "build", {r["row"]: r for r in read()}
    logs.mkdir(exist_ok=True)
    about = machine.describe(machine.Monitor(), "python -m bench.serving" + (f" --against {against}" if against else ""))
    failed = 0
    for model in models:
        if not (mine := [r for r in rows if r.model == model]):
            continue
        ours = _collect("pyllm", model, mine, logs / f"serving_pyllm_{model}.log")
        peers = _collect(against, model, mine, logs / f"serving_{against}_{model}.log") if against else {}
        failed += len(mine) - len(ours)
        for row in (row for row in mine if row.name in ours):
            stated = {"row": row.name, "unit": row.unit, "goal": row.goal, "goal_ratio": row.ratio}
            peer = {"vllm": peers.get(row.name, {}).get("value")}
            records[row.name] = stated | ours[row.name] | peer | {k: about[k] for k in ("gpu", "torch", "commit", "time", "command")}
    ordered = [records[r.name] for r in ROWS if r.name in records]
    RESULTS.write_text("".join(json.dumps(r) + "\n" for r in ordered))
    print("\n".join(table(ordered)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
