"""composed_attention: what it computes is tested with paged_attention's reference; here, that the op is reached and agrees."""

from __future__ import annotations

import pytest
import torch

from pyllm import ops
from pyllm.ops.attention import attention_kernel
from tests.support.compare import assert_close
from tests.support.generate import filled_pools, normal, ragged_batch


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_paged_attention(device: str) -> None:
    batch = ragged_batch([3, 17, 0, 1], [20, 17, 4, 33], page_size=12)
    k, v = filled_pools(batch, 2, 24, torch.float32)
    q = normal(21, 4, 24)
    at = (batch.page_table, batch.q_starts, batch.kv_lens)
    want, want_lse = ops.paged_attention(q, k, v, *at, scale=0.2, window=9, softcap=3.0)
    moved = [t.to(device) for t in (q, k, v, *at)]
    got, lse = ops.composed_attention(*moved, scale=0.2, window=9, softcap=3.0)
    # fp32 on both sides, sums of at most 33 keys and 24 dims of values below 5
    assert_close(got, want, atol=1e-4, what="out")
    assert_close(lse, want_lse, atol=1e-4, what="lse")


BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("q", "cache", "dim", "page", "rows", "hopper", "kernel"),
    [
        (BF16, BF16, 128, 64, 8, True, "decode_attention"),
        (BF16, FP8, 96, 16, 1, True, "decode_attention"),
        (BF16, BF16, 128, 64, 9, True, "paged_attention"),
        (FP16, FP16, 192, 16, 100, True, "paged_attention"),
        (BF16, FP8, 256, 128, 100, True, "paged_attention"),
        (BF16, FP8, 96, 128, 100, True, "simple_attention"),
        (FP16, FP8, 128, 128, 100, True, "simple_attention"),
        (BF16, FP8, 72, 128, 100, True, "composed_attention"),
        (FP32, FP8, 64, 128, 100, True, "composed_attention"),
        (BF16, BF16, 80, 64, 100, True, "simple_attention"),
        (BF16, BF16, 128, 8, 100, True, "simple_attention"),
        (BF16, BF16, 128, 64, 100, False, "simple_attention"),
        (BF16, BF16, 128, 64, 1, False, "simple_attention"),
        (BF16, BF16, 128, 24, 100, True, "composed_attention"),
        (BF16, BF16, 100, 64, 100, True, "composed_attention"),
        (FP32, FP32, 128, 64, 100, True, "composed_attention"),
    ],
)
def test_which_kernel(q: torch.dtype, cache: torch.dtype, dim: int, page: int, rows: int, hopper: bool, kernel: str) -> None:
    assert attention_kernel(q, cache, dim, page, rows, hopper) == kernel
