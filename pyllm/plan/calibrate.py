"""Scales of an int8 cache, from what a model itself makes of some tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyllm.api.checks import DecoderSpec, check_int8
from pyllm.runtime.batch import Batch
from pyllm.runtime.kv import KvPool

TOKENS = 512
MARGIN = 1.25  # other tokens reach further; what is beyond is cut off at +-127. A quarter costs a third of a bit


def find_scales(
    module: Callable[[Batch], Tensor], spec: DecoderSpec, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, device: torch.device
) -> dict[int, tuple[Tensor, Tensor]] | None:
    """slot -> (k_scale, v_scale), fp32 `[K]`: what is largest in each head over random tokens (a fixed seed), and a margin, becomes 127.
    None for a cache of another dtype, which needs no scales."""
    if kv_dtype != torch.int8:
        return None
    check_int8(spec, dtype, device.type == "cuda")
    count = min(TOKENS, spec.max_positions)
    pages = -(-count // page_size)
    kv = KvPool(spec.kv_slots(), pages + 1, page_size, dtype, device)
    at = torch.arange(count, dtype=torch.int32, device=device)
    ids = torch.randint(spec.vocab_size, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    batch = Batch(
        ids=ids.to(device),
        positions=at,
        slots=at + page_size,
        q_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        kv_lens=torch.tensor([count], dtype=torch.int32, device=device),
        page_table=torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None],
        caches=kv.caches,
        logit_rows=at[-1:],
        max_q=count,
    )
    with torch.inference_mode():
        module(batch)

    def scale(cache: Tensor) -> Tensor:
        used = cache[1:].flatten(0, 1)[:count].float()
        return used.abs().amax((0, 2)).clamp_min(1e-6) * (MARGIN / 127)

    return {number: (scale(c.k), scale(c.v)) for number, c in kv.caches.items()}
