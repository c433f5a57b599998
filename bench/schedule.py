"""`python -m bench.schedule`: the steps that the scheduler makes of a row of bench.serving, and what they take by a model of their cost.

No GPU: the engine runs with a step that does nothing, so hundreds of steps take seconds, and sizes can be tried: `--batch`, `--chunk`.
The cost is that of the 8B shape with FP8 weights and cache on one H200, from the kernels' times in docs/executor.md ("What many requests
wait for"): products and the head by their rows, attention by the keys it reads, all else by the tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.host import HostSpec
from pyllm import SamplingParams
from pyllm.runtime.engine import Engine
from pyllm.runtime.request import Plan
from pyllm.runtime.runner import Flight

# Microseconds of a step's products for so many rows, between them in proportion; from 8192 on the board's power sets the clock.
PRODUCTS = ((1, 2070), (256, 3120), (512, 5070), (1024, 10570), (8192, 93390))
HEAD = ((1, 247), (256, 359), (512, 717), (1024, 1590))
PER_KEY, PER_SEQUENCE = 0.0142, 4.3  # decode attention: a key is 64 KiB at 4.6 TB/s; what a sequence costs beside its keys
PER_PAIR = 7250 / (8 * 1024 * 1024 / 2)  # attention of prompts, for a token and a key that it sees
PER_TOKEN, STEP = 1.4, 100.0  # norms, activations, rope, quantization; what a step takes at least for them


@dataclass(frozen=True)
class Step:
    """decodes: requests that generate; keys: that they read; prompts: tokens of chunks; ends: chunks that end one; pairs: of attention."""

    decodes: int
    keys: int
    prompts: int = 0
    ends: int = 0
    pairs: float = 0.0

    @property
    def microseconds(self) -> float:
        rows, wanted = self.decodes + self.prompts, self.decodes + self.ends
        attention = PER_KEY * self.keys + PER_SEQUENCE * self.decodes + PER_PAIR * self.pairs
        return _between(PRODUCTS, rows) + _between(HEAD, wanted) + attention + PER_TOKEN * rows + STEP


def _between(points: Sequence[tuple[int, float]], at: int) -> float:
    if at > points[-1][0]:
        return points[-1][1] * at / points[-1][0]
    rows, times = zip(*points, strict=True)
    return float(np.interp(at, rows, times))


def steps_of(count: int, input_len: int, output_len: int, batch: int, chunk: int) -> list[Step]:
    """What the engine runs for `count` requests that come at once."""
    spec = HostSpec(max(input_len + output_len, 2))
    engine = Engine(
        spec, lambda b: torch.zeros(len(b.ids), spec.vocab_size), max_batch=batch, chunk=chunk, overlap=True,
        max_tokens=batch * (-(-(input_len + output_len) // 64) * 64), graph_sizes=[], mixed_sizes=[],
    )  # fmt: skip
    engine._tape.ROWS = sys.maxsize  # lengths are read below after each step
    found: list[Step] = []

    def launch(plan: Plan) -> Flight:
        engine._runner.rows.flush()
        ends, seen = [c.request for c in plan.chunks if c.last], [r.next_position + 1 for r in plan.decodes]
        pairs = sum(c.count * (c.start + c.count / 2) for c in plan.chunks)
        found.append(Step(len(seen), sum(seen), sum(c.count for c in plan.chunks), len(ends), pairs))
        return Flight([*plan.decodes, *ends], torch.zeros(len(seen) + len(ends), dtype=torch.int32))

    engine._runner.launch = launch  # type: ignore[method-assign]
    draw = np.random.default_rng(0)
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    for ids in draw.integers(0, spec.vocab_size, (count, input_len)).tolist():
        engine.submit(ids, params)
    engine.run()
    return found


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.schedule", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", default="2000x128/128,512x1024/1024", metavar="COUNTxIN/OUT[,...]")
    p.add_argument("--batch", default="1024", metavar="N[,N]", help="requests in a step (max_batch_size)")
    p.add_argument("--chunk", default="8192", metavar="N[,N]", help="tokens in a step with prompts (max_num_tokens)")
    args = p.parse_args(argv)
    print(f"{'work':>16} {'batch':>6} {'chunk':>6} {'steps':>6} {'with prompts':>13} {'rows':>7} {'seconds':>8} {'tok/s':>8}")
    for work in args.work.split(","):
        count, lengths = work.split("x")
        sizes = [int(n) for n in (count, *lengths.split("/"))]
        for batch in map(int, args.batch.split(",")):
            for chunk in map(int, args.chunk.split(",")):
                print(_line(work, sizes, batch, chunk), flush=True)
    return 0


def _line(work: str, sizes: list[int], batch: int, chunk: int) -> str:
    count, input_len, output_len = sizes
    found = steps_of(count, input_len, output_len, batch, chunk)
    seconds = sum(s.microseconds for s in found) / 1e6
    rows: Any = np.mean([s.decodes for s in found])
    mixed = sum(s.prompts > 0 for s in found)
    return f"{work:>16} {batch:>6} {chunk:>6} {len(found):>6} {mixed:>13} {rows:>7.0f} {seconds:>8.2f} {count * output_len / seconds:>8.0f}"


if __name__ == "__main__":
    sys.exit(main())
