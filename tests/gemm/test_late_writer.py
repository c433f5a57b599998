"""Products right behind a kernel that lets them start at once and writes what they read 0.15 ms later: none of it is read early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyllm.ops import dense_linear, linear_fp8, linear_int8
from tests.support.generate import normal
from tests.support.late import check_waits

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

pytestmark = pytest.mark.gpu

SHAPES = [(20, 1024, 2048), (64, 4096, 512), (128, 28672, 256), (256, 1280, 8192), (512, 4096, 1024), (2048, 2048, 512)]
"""(M, N, K): tiles of few rows, with and without K cut over SMs; tiles of 64 and 128 rows, with K cut, one wave and several."""


def positive(*shape: int) -> Tensor:
    return normal(*shape, device="cuda").abs() + 0.5


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_dense_linear(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w = normal(m, k, dtype=dtype, device="cuda"), normal(n, k, dtype=dtype, device="cuda", scale=k**-0.5)
    residual, half = normal(m, n, dtype=dtype, device="cuda"), normal(m, n // 2, dtype=dtype, device="cuda")
    check_waits(lambda t: dense_linear(t, w), x, "x")
    check_waits(lambda t: dense_linear(t, w, act="silu", gated=True), x, "x, gated")
    check_waits(lambda t: dense_linear(x, w, residual=t), residual, "residual")
    check_waits(lambda t: dense_linear(x, w, act="gelu", gated=True, residual=t), half, "residual, gated")


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_fp8(m: int, n: int, k: int) -> None:
    x, w = normal(m, k, dtype=FP8, device="cuda"), normal(n, k, dtype=FP8, device="cuda")
    rows, columns = positive(m), positive(n)
    check_waits(lambda t: linear_fp8(t, w, rows, columns), x, "x")
    check_waits(lambda t: linear_fp8(x, w, t, columns), rows, "scales of rows")
    check_waits(lambda t: linear_fp8(t, w, rows, columns, act="silu", gated=True), x, "x, gated")
    check_waits(lambda t: linear_fp8(x, w, t, columns, act="silu", gated=True), rows, "scales of rows, gated")
    blocks = positive((n + 127) // 128, (k + 127) // 128)
    by_blocks = positive(m, (k + 127) // 128)
    check_waits(lambda t: linear_fp8(t, w, by_blocks, blocks), x, "x, by blocks")
    check_waits(lambda t: linear_fp8(x, w, t, blocks), by_blocks, "scales by blocks")


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_int8(m: int, n: int, k: int) -> None:
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
    w = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    rows, columns = positive(m), positive(n)
    check_waits(lambda t: linear_int8(t, w, rows, columns), x, "x")
    check_waits(lambda t: linear_int8(x, w, t, columns), rows, "scales of rows")
