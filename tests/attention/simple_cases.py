"""Inputs of the tests of simple_attention and variant_attention, and the bound of their results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyllm import ops
from pyllm.jit.variant import PLAIN, AttentionVariant
from tests.support.compare import EPS, assert_close
from tests.support.generate import filled_pools, gather, normal, ragged_batch


@dataclass(frozen=True)
class Step:
    """One ragged step on a CPU: what simple_attention takes, paged or contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_starts: Tensor
    where: dict[str, Tensor]

    @property
    def q_lens(self) -> list[int]:
        return self.q_starts.diff().tolist()

    @property
    def keys(self) -> int:
        lens = self.where["kv_lens"] if "kv_lens" in self.where else self.where["kv_starts"].diff()
        return int(lens.max()) if len(lens) else 0

    def wide(self, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> Step:
        """The stored values in fp32, keys and values times their scales."""
        k, v = (t.float() * (1.0 if s is None else s[:, None]) for t, s in ((self.k, k_scale), (self.v, v_scale)))
        return replace(self, q=self.q.float(), k=k, v=v)

    def call(self, device: str = "cpu", variant: AttentionVariant | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        options = {"scale": self.q.shape[2] ** -0.5} | self.where | options
        moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
        tensors = [t.to(device) for t in (self.q, self.k, self.v, self.q_starts)]
        if variant is None:
            return ops.simple_attention(*tensors, **moved)
        if "tensors" in moved:
            moved["tensors"] = {n: t.to(device) for n, t in moved["tensors"].items()}
        return ops.variant_attention(*tensors, variant, **moved)


def make(
    q_lens: list[int], kv_lens: list[int], H: int, K: int, D: int, *, P: int = 0, Dv: int | None = None, spare: int = 0,
    dtype: torch.dtype = torch.bfloat16, cache: torch.dtype | None = None,
) -> Step:  # fmt: skip
    """P = 0: contiguous keys. spare: rows of q past the last sequence. cache: dtype of the keys. What is unused is NaN, table
    tails are huge."""
    batch = ragged_batch([min(n, L) for n, L in zip(q_lens, kv_lens, strict=True)], kv_lens, page_size=P or 16)
    Dv = Dv or D
    k, v = (filled_pools(batch, K, size, cache or dtype)[i] for i, size in ((0, D), (1, Dv)))
    q = normal(batch.T + spare, H, D, dtype=dtype)
    if P:
        return Step(q, k, v, batch.q_starts, {"page_table": batch.page_table, "kv_lens": batch.kv_lens})
    rows = [torch.cat([gather(t, batch, b) for b in range(batch.B)] or [t.view(-1, K, t.shape[3])[:0]]) for t in (k, v)]
    starts = torch.tensor([0, *kv_lens]).cumsum(0).int()
    return Step(q, *rows, batch.q_starts, {"kv_starts": starts})


def random_mask(step: Step, words: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (step.q.shape[0], words), dtype=torch.int64).to(torch.int32)


def compare(got: tuple[Tensor, Tensor], step: Step, variant: AttentionVariant = PLAIN, steep: float = 1.0, **options: Any) -> None:
    """Against the reference in fp32 on the same stored values. Rounding the weights (u of q's dtype; in fp16 a weight below 2^-14 errs by
    up to 2^-25 instead) errs by at most u sum p |v| (2^-25 sum |v|, over the largest weight, which is 1), the result by u |o|; fp32 scores
    err by about (D + keys) 2^-24 times |s| <= 16 in the exponent, that is in p relatively. steep: how much a variant widens the scores."""
    wide = step.wide(options.pop("k_scale", None), options.pop("v_scale", None))
    want, lse = wide.call(variant=variant, **options)
    size, _ = replace(wide, v=wide.v.abs()).call(variant=variant, **options)
    inside = 16 * steep * (step.q.shape[2] + step.keys) * EPS[torch.float32]
    tiny = step.keys * 2.0**-25 * 6 if step.q.dtype == torch.float16 else 0.0
    bound = size.double() * (EPS[step.q.dtype] + inside) + want.double().abs() * EPS[step.q.dtype] + 1e-6 + tiny
    assert_close(got[0], want, atol=bound, what="out")
    assert_close(got[1], lse, atol=inside, what="lse")
