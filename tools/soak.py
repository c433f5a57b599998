"""A long run of mixed requests from several threads, with aborts: nothing may be lost, nothing may grow.

    make soak                     10 minutes of a 1B shape on the GPU, a line in bench/results/soak.jsonl
    python -m tools.soak --seconds 60 --model DIRECTORY --device cpu

The pool is too small for all requests, and they are admitted when their prompts fit (MAX_UTILIZATION), so some are preempted. Every round
the clients stop and all must be as it was before: no page in use, each page accounted for, and the log-probabilities of fixed prompts
within rounding. The device's and the process's memory are compared between the second round, when all is set up, and the last. It takes
about 5 GB of the device, so other work may run beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyllm import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams, SchedulerConfig
from tools.gpu_tests import output

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200, 900)
OUTPUTS = (1, 2, 16, 40, 150)
SHAPING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "n": 3},
    {"logprobs": 2, "repetition_penalty": 1.2},
    {"prompt_logprobs": 0, "min_tokens": 1},
)
GROWTH = 64 << 20  # bytes that the process may grow by after the first rounds: allocator arenas and interned objects, no leak
DEVICE_GROWTH = 1 << 20  # and the device: workspaces of kernels that a rare step is the first to use
MARGIN = 10.0  # seconds at the end for the last round's clients and checks


class Client(threading.Thread):
    """Submits request after request until it is told to stop; aborts every fifth, leaves every tenth stream early."""

    def __init__(self, llm: LLM, vocab: int, longest: int, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.counts, self.problem = {"requests": 0, "aborts": 0, "tokens": 0}, ""
        self._llm, self._vocab, self._longest, self._rng, self._stop_event = llm, vocab, longest, random.Random(seed), stop

    def run(self) -> None:
        try:
            while not self._stop_event.is_set():
                self._request()
        except Exception as error:  # told by the main thread
            self.problem = f"{type(error).__name__}: {error}"

    def _request(self) -> None:
        rng = self._rng
        shared = rng.random() < 0.5  # a prefix that others have too
        n = min(rng.choice(LENGTHS), self._longest // 2)
        prompt = [7] * n if shared else [rng.randrange(self._vocab) for _ in range(n)]
        most = min(rng.choice(OUTPUTS), self._longest - n)
        params = SamplingParams(max_tokens=max(most, 1), ignore_eos=True, **rng.choice(SHAPING))
        out = self._llm.generate_async(prompt, params, streaming=True, priority=rng.randrange(3), cache_salt=rng.choice(["", "", "other"]))
        end = rng.random()
        for looks, _ in enumerate(out):
            if end < 0.2 and looks == 1:
                out.abort()
            if end > 0.9:
                break
        self.counts["requests"] += 1
        self.counts["aborts"] += end < 0.2 or end > 0.9
        self.counts["tokens"] += sum(c.length for c in out.outputs)
        for c in out.outputs:
            if c.finish_reason == "error":
                raise RuntimeError(c.error)


def soak(
    llm: LLM, seconds: float, *, vocab: int, longest: int, clients: int = 8, round_seconds: float = 20.0, seed: int = 0
) -> dict[str, Any]:
    """Rounds of load and rest for so many seconds. RuntimeError for whatever is not as it was."""
    probes = [[3] * 40, list(range(1, 20))]
    want, totals, checks = _probe(llm, probes), {"requests": 0, "aborts": 0, "tokens": 0}, 0
    begin, memory = time.monotonic(), list[tuple[float, int, int]]()
    while time.monotonic() < begin + seconds or len(memory) < 3:
        rounds, stop = len(memory), threading.Event()
        crew = [Client(llm, vocab, longest, seed + 1000 * rounds + i, stop) for i in range(clients)]
        for c in crew:
            c.start()
        time.sleep(min(round_seconds, max(begin + seconds - time.monotonic(), 0.5)))
        stop.set()
        for c in crew:
            c.join(120)
            if c.is_alive() or c.problem:
                raise RuntimeError(f"soak: round {rounds}: {c.problem or 'a client waits for ever'}")
            totals = {k: v + c.counts[k] for k, v in totals.items()}
        _check_rest(llm, rounds)
        for got, first in zip(_probe(llm, probes), want, strict=True):
            # Other company, other rounding: bf16 logits of about 10 move by 2^-8 of that, over a few dozen layers.
            if abs(got - first) > 0.5:
                raise RuntimeError(f"soak: round {rounds}: a fixed prompt's log-probability is {got:.4f}, it was {first:.4f}")
        checks += 2 + len(probes)  # no page is held; each is accounted for; the probes
        memory.append((time.monotonic() - begin, *_memory(llm.device)))
    stats = llm.get_stats()
    counts = {k: stats[k] for k in ("preemptions", "steps", "total_pages", "cached_pages", "used_pages")}
    return {**totals, **counts, "rounds": len(memory), "checks": checks, "seconds": round(memory[-1][0], 1), **_growth(memory[1:])}


def _growth(memory: Sequence[tuple[float, int, int]]) -> dict[str, float]:
    """What grew from the first of (seconds, bytes of the device, bytes of the process) to the last; drift: the slope of all of them."""
    seconds, device, process = zip(*memory, strict=True)
    if device[-1] > device[0] + DEVICE_GROWTH or process[-1] > process[0] + GROWTH:
        raise RuntimeError(f"soak: memory grew: device {device[0]} -> {device[-1]}, process {process[0]} -> {process[-1]} bytes")
    found: dict[str, float] = {}
    for name, values in (("device", device), ("process", process)):
        drift = round(60 * np.polyfit(seconds, values, 1)[0])
        found |= {f"{name}_bytes_start": values[0], f"{name}_bytes_end": values[-1], f"{name}_drift_bytes_per_minute": drift}
    return found


def _probe(llm: LLM, prompts: Sequence[list[int]]) -> list[float]:
    outs = llm.generate(list(prompts), SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True), use_tqdm=False)
    return [o.outputs[0].logprobs[0].logprob for o in outs]


def _check_rest(llm: LLM, rounds: int) -> None:
    end = time.monotonic() + 30
    while (stats := llm.get_stats())["running"] or stats["waiting"] or stats["used_pages"]:
        if time.monotonic() > end:
            raise RuntimeError(f"soak: round {rounds}: at rest, but {stats}")
        time.sleep(0.01)
    if stats["free_pages"] + stats["cached_pages"] != stats["total_pages"]:
        raise RuntimeError(f"soak: round {rounds}: pages are lost: {stats}")


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes in use on the device, by this process, and of the process (its peak, which a leak moves too)."""
    used = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        used = torch.cuda.memory_allocated(device)
    return used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the whole, loading included; three rounds are made in any case")
    parser.add_argument("--model", default="llama-3.2-1b", help="a directory, or a shape to fill with random weights")
    parser.add_argument("--device", default=None)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--record", type=Path, help="append the result to this file")
    args = parser.parse_args(argv)
    with LLM(
        args.model, load_format="auto" if Path(args.model).exists() else "dummy", device=args.device, skip_tokenizer_init=True,
        max_batch_size=64, max_seq_len=args.max_seq_len, kv_cache_config=KvCacheConfig(max_tokens=16_000), progress=False,
        scheduler_config=SchedulerConfig(capacity_scheduler_policy="MAX_UTILIZATION"),
        cuda_graph_config=CudaGraphConfig(batch_sizes=[1, 8, 32, 64], capture_num_tokens=[64, 512]),
    ) as llm:  # fmt: skip
        left = args.seconds - MARGIN - (time.monotonic() - began)
        vocab = min(1000, llm._engine.spec.vocab_size)  # few tokens, so that prompts share some
        result = soak(llm, left, vocab=vocab, longest=args.max_seq_len, clients=args.clients)
        name = torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else "cpu"
    about = {"model": args.model, "device": name, "torch": torch.__version__, "commit": output("git", "rev-parse", "--short=12", "HEAD")}
    line = json.dumps(about | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "clients": args.clients} | result)
    print(line)
    if args.record:
        with args.record.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
