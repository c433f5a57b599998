"""token_logprobs against torch: reads the row of logits once, so bytes = B * V * size; the floor adds about 2 us of launch."""

from __future__ import annotations

import torch

from bench import Case, Goal, compiled
from bench.shapes import Shapes
from pyllm.ops.sampling import token_logprobs

Set = tuple[torch.Tensor, torch.Tensor]
READ_RATE = 4.6e6  # bytes per us: the measured read-only stream of an H200


def sets(n: int, B: int, V: int, dtype: torch.dtype) -> list[Set]:
    return [
        ((torch.randn(B, V, device="cuda") * 2).to(dtype), torch.randint(0, V, (B,), dtype=torch.int32, device="cuda")) for _ in range(n)
    ]


def plain(s: Set, top_n: int) -> tuple[torch.Tensor, ...]:
    logits, tokens = s
    log_p = logits.float().log_softmax(-1)
    logprob = log_p.gather(1, tokens.long()[:, None])
    rank = (log_p >= logprob).sum(1)
    return (logprob, rank, *log_p.topk(top_n)) if top_n else (logprob, rank)


def case(B: int, V: int, dtype: torch.dtype, top_n: int) -> Case:
    label = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    floor = B * V * dtype.itemsize / READ_RATE + 2
    return Case(
        name=f"B={B} V={V} top_n={top_n} {label}",
        dtype=label,
        bytes=B * V * dtype.itemsize,
        make=lambda n: sets(n, B, V, dtype),
        ours=lambda s: token_logprobs(s[0], s[1], top_n),
        baselines={"torch": lambda s: plain(s, top_n), "torch.compile": compiled(lambda s: plain(s, top_n))},
        goal=Goal(us=10.0) if B == 1 else Goal(us=1.6 * floor),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(B, shapes.V, dtype, top_n) for B in shapes.batches for dtype in (torch.bfloat16, torch.float32) for top_n in (0, 20)]
