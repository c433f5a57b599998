"""`pyllm bench`: requests through `LLM`, timed, and a report with the names of trtllm-bench.

All times are those at which the host saw a token. ttft: submission to first token; tpot: mean time per further token of a request; itl:
each gap between two tokens; e2e: submission to last token. The mean output length is always in the report: without it tokens per second
mean nothing (an early end token makes requests per second look good).
"""

from __future__ import annotations

import asyncio
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pyllm
from pyllm.api.llm import LLM
from pyllm.api.outputs import RequestOutput
from pyllm.api.params import SamplingParams
from pyllm.progress import progress_bar

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Item:
    prompt: list[int] | str
    output_tokens: int


def synthetic(count: int, input_len: int, output_len: int, vocab: int, seed: int) -> list[Item]:
    ids = np.random.default_rng(seed).integers(0, vocab, (count, input_len))
    return [Item(row.tolist(), output_len) for row in ids]


def read_dataset(path: str | Path, count: int | None) -> list[Item]:
    """JSON lines {"prompt": text or "input_ids": token ids, "output_tokens": n}, as trtllm-bench reads them."""
    items: list[Item] = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):  # text in a line may hold other line separators
        if not line.strip() or (count is not None and len(items) == count):
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode())
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        prompt = row.get("input_ids", row.get("prompt")) if isinstance(row, dict) else None
        if not isinstance(prompt, (list, str)) or type(row.get("output_tokens")) is not int or not prompt or row["output_tokens"] < 1:
            raise ValueError(f"{where}: expected an object with prompt or input_ids, and output_tokens of at least 1")
        items.append(Item(prompt, row["output_tokens"]))
    if not items:
        raise ValueError(f"{path}: no requests")
    return items


def run(llm: LLM, items: Sequence[Item], concurrency: int, *, title: str, progress: bool) -> tuple[list[RequestOutput], float]:
    """All items with at most `concurrency` at a time (-1: all at once); greedy, past end tokens. The outputs, and the seconds it took."""

    async def one(item: Item, gate: asyncio.Semaphore, advance: Any) -> RequestOutput:
        params = SamplingParams(max_tokens=item.output_tokens, ignore_eos=True, detokenize=False)
        async with gate:
            out = await llm.generate_async(item.prompt, params).aresult()
        advance()
        return out

    async def everything() -> list[RequestOutput]:
        gate = asyncio.Semaphore(len(items) if concurrency < 1 else concurrency)
        with progress_bar(title, len(items), "requests", progress) as advance:
            return await asyncio.gather(*(one(item, gate, advance) for item in items))

    start = time.perf_counter()
    outputs = asyncio.run(everything())
    seconds = time.perf_counter() - start
    failed = [c.error for o in outputs for c in o.outputs if c.error]
    if failed:
        raise RuntimeError(f"bench: {len(failed)} of {len(items)} requests failed: {failed[0]}")
    return outputs, seconds


def _spread(milliseconds: Sequence[float]) -> dict[str, float]:
    if not len(milliseconds):
        return {}
    values = np.asarray(milliseconds)
    named = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"minimum": float(values.min()), "maximum": float(values.max()), "average": float(values.mean()), **named}


def measure(llm: LLM, items: Sequence[Item], concurrency: int, *, progress: bool = True) -> dict[str, Any]:
    """The groups request_info, performance and streaming_metrics of the report."""
    before = llm.get_stats()
    outputs, seconds = run(llm, items, concurrency, title="measuring", progress=progress)
    after = llm.get_stats()
    times = [o.timing for o in outputs]
    counts = [o.outputs[0].length for o in outputs]
    ttft = [(t.tokens[0] - t.submitted) * 1e3 for t in times]
    e2e = [(t.tokens[-1] - t.submitted) * 1e3 for t in times]
    tpot = [(t.tokens[-1] - t.tokens[0]) * 1e3 / (len(t.tokens) - 1) for t in times if len(t.tokens) > 1]
    itl = np.concatenate([np.diff(t.tokens) for t in times]) * 1e3
    inputs, generated = sum(len(o.prompt_token_ids) for o in outputs), sum(counts)
    steps, drafted, accepted = (after[k] - before[k] for k in ("steps", "drafted_tokens", "accepted_tokens"))
    host = after["steps"] * after["host_seconds_per_step"] - before["steps"] * before["host_seconds_per_step"]
    return {
        "request_info": {
            "num_requests": len(outputs),
            "avg_num_concurrent_requests": sum(e2e) / 1e3 / seconds,
            "avg_input_length": inputs / len(outputs),
            "avg_output_length": generated / len(outputs),
        },
        "performance": {
            "total_latency_ms": seconds * 1e3,
            "avg_request_latency_ms": float(np.mean(e2e)),
            "request_throughput_req_s": len(outputs) / seconds,
            "system_output_throughput_tok_s": generated / seconds,
            "system_total_throughput_tok_s": (inputs + generated) / seconds,
            "output_throughput_per_user_tok_s": float(np.mean([n * 1e3 / e for n, e in zip(counts, e2e, strict=True)])),
            "output_throughput_per_gpu_tok_s": generated / seconds,
            "request_latency_percentiles_ms": _spread(e2e),
            "steps": steps,
            "host_ms_per_step": host / max(steps, 1) * 1e3,
            "host_share": host / seconds,
        },
        "decoding_stats": {"drafted_tokens": drafted, "accepted_tokens": accepted, "acceptance_rate": accepted / drafted}
        if drafted
        else None,
        "streaming_metrics": {
            "avg_ttft_ms": float(np.mean(ttft)),
            "avg_tpot_ms": float(np.mean(tpot)) if tpot else None,
            "token_output_speed_tok_s": float(np.mean([1e3 / t for t in tpot])) if tpot else None,
            "ttft_percentiles": _spread(ttft),
            "tpot_percentiles": _spread(tpot),
            "itl_percentiles": _spread(itl.tolist()),
        },
    }


def report(llm: LLM, model: str, load_format: str, quantization: str | None, measured: dict[str, Any]) -> dict[str, Any]:
    """What trtllm-bench's report JSON holds, in its groups."""
    e = llm._engine
    cuda = e.device.type == "cuda"
    name = torch.cuda.get_device_name(e.device) if cuda else platform.processor() or platform.machine()
    memory = torch.cuda.get_device_properties(e.device).total_memory / 2**30 if cuda else None
    dtype = str(e.dtype).removeprefix("torch.")
    return {
        "engine": {
            "model": model,
            "version": pyllm.__version__,
            "backend": "pyllm",
            "dtype": dtype,
            "kv_cache_dtype": str(e.kv.dtype).removeprefix("torch."),
            "quantization": quantization,
            "load_format": load_format,
        },
        "machine": {"name": name, "memory_gib": memory, "torch": torch.__version__, "cuda": torch.version.cuda},
        "world_info": {
            "tp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
            "world_size": 1,
            "max_batch_size": e.max_batch,
            "max_num_tokens": e.chunk,
            "scheduling_policy": "GUARANTEED_NO_EVICT" if e.reserve else "MAX_UTILIZATION",
            "kv_cache_tokens": e.pool.total * e.kv.page_size,
            "kv_cache_bytes": e.kv.bytes,
        },
        **measured,
    }


def summary(r: dict[str, Any]) -> str:
    """The report for people."""
    q, p, s = r["request_info"], r["performance"], r["streaming_metrics"]

    def line(name: str, spread: dict[str, float]) -> str:
        return f"{name:<22}" + "".join(f"{k} {spread[k]:<11.2f}" for k in ("average", "p50", "p90", "p99")) if spread else ""

    rows = [
        f"{'requests':<22}{q['num_requests']}, {q['avg_num_concurrent_requests']:.1f} at a time",
        f"{'mean length':<22}{q['avg_input_length']:.1f} in, {q['avg_output_length']:.1f} out",
        f"{'output':<22}{p['system_output_throughput_tok_s']:.1f} tokens/s, per request {p['output_throughput_per_user_tok_s']:.1f}",
        f"{'input and output':<22}{p['system_total_throughput_tok_s']:.1f} tokens/s, {p['request_throughput_req_s']:.2f} requests/s",
        line("TTFT ms", s["ttft_percentiles"]),
        line("TPOT ms", s["tpot_percentiles"]),
        line("ITL ms", s["itl_percentiles"]),
        line("E2E ms", p["request_latency_percentiles_ms"]),
    ]
    if r["machine"]["cuda"]:  # elsewhere the host is the device
        rows.append(f"{'host':<22}{p['host_ms_per_step']:.3f} ms of work per step ({p['steps']} steps), {p['host_share']:.1%} of the time")
    return "\n".join(row for row in rows if row)


def knee(points: Sequence[tuple[float, float]]) -> int:
    """Of (latency, throughput) points in rising order: the one farthest above the line from the first to the last."""
    xy = np.asarray(points, float)
    spread = np.ptp(xy, axis=0)
    scaled = (xy - xy[0]) / np.where(spread == 0, 1, spread)
    (dx, dy), (x, y) = scaled[-1], scaled.T
    return int(np.argmax(dx * y - dy * x))
