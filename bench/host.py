"""`python -m bench.host`: what a step costs the host: scheduling, pages, rows, packing, reading tokens. No model: its logits are constant.

On a GPU `launch` is the time to put the kernels of inputs and sampling on their way; on a CPU it is these kernels themselves. What is left
of a step is the executor's Python (and csrc/runtime), and the same on both.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyllm import SamplingParams
from pyllm.runtime.batch import Batch
from pyllm.runtime.engine import Engine
from pyllm.runtime.host import NATIVE

VOCAB, PROMPT, CHUNK = 256, 1024, 8192
ROWS = (1, 64, 256, 512, 1000)


class HostSpec:
    """A declaration with next to no cache, for an engine whose model does nothing."""

    vocab_size = VOCAB

    def __init__(self, max_positions: int = 4096) -> None:
        self.max_positions = max_positions

    def kv_slots(self) -> dict[int, Any]:
        return {0: SimpleNamespace(kv_heads=1, head_dim=8, window=None)}


@dataclass(frozen=True)
class Cost:
    """Milliseconds; submit: of one request; mixed, decode: of a step with prompts and of one without; launch: of a decode step."""

    rows: int
    submit: float
    mixed: float
    decode: float
    launch: float


def measure(rows: int, steps: int, device: str, prompt: int = PROMPT) -> Cost:
    """`rows` requests of `prompt` tokens: their prompts, then so many steps in which all generate."""
    logits = torch.zeros(max(rows, 64), VOCAB, device=device)

    def module(b: Batch) -> Tensor:
        return logits[: len(b.kv_lens) if b.logit_rows is None else len(b.logit_rows)]

    engine = Engine(
        HostSpec(), module, device=device, max_batch=rows, max_tokens=rows * (prompt + 64 * (2 + (steps + 200) // 64)), chunk=CHUNK,
        max_length=min(prompt + steps + 200, 4096), overlap=True, graph_sizes=[], mixed_sizes=[],
    )  # fmt: skip
    launches: list[float] = []
    launch = engine._runner.launch

    def timed(plan: Any) -> Any:
        start = time.perf_counter()
        flight = launch(plan)
        launches.append(time.perf_counter() - start)
        return flight

    engine._runner.launch = timed  # type: ignore[method-assign]
    ids = np.random.default_rng(0).integers(0, VOCAB, (rows, prompt)).tolist()
    params = SamplingParams(max_tokens=steps + 200, ignore_eos=True)
    start = time.perf_counter()
    for prompt_ids in ids:
        engine.submit(prompt_ids, params)
    submitted = time.perf_counter() - start
    while len(engine.running) < rows or not all(r.decoding for r in engine.running):
        engine.step()
    mixed, mixed_launch, count = engine.host_seconds - engine.decode_host_seconds, sum(launches), len(launches)
    engine.step()  # reads the last of those steps
    before = engine.decode_host_seconds
    launches.clear()
    for _ in range(steps):
        engine.step()
    decode, decode_launch = (engine.decode_host_seconds - before) / steps, sum(launches) / steps
    return Cost(rows, submitted / rows * 1e3, (mixed - mixed_launch) / count * 1e3, (decode - decode_launch) * 1e3, decode_launch * 1e3)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rows", nargs="*", type=int, default=list(ROWS), help="requests that run together")
    p.add_argument("--steps", type=int, default=50, help="decode steps to average over")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args(argv)
    print(f"{args.device}, host classes {'compiled' if NATIVE else 'in Python'}; ms a step, launch apart")
    print(f"{'requests':>8} {'decode':>8} {'launch':>8} {'prompts':>8} {'submit one':>11}")
    for rows in args.rows:
        c = measure(rows, args.steps, args.device)
        print(f"{c.rows:>8} {c.decode:>8.3f} {c.launch:>8.3f} {c.mixed:>8.3f} {c.submit:>11.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
