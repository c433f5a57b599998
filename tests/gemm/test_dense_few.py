"""dense_linear of up to 64 rows: tiles of their own, K cut over clusters of two and four, and what they share with nobody."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops import dense_linear, linear
from pyllm.ops.gemm import dense_wins
from tests.gemm.dense_cases import BF16, FP16, check_graph
from tests.gemm.test_dense_linear import check
from tests.support.compare import assert_same
from tests.support.generate import normal, padded_rows

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
SHAPES = [
    *((17, 2048, 2048), (32, 528, 2064), (33, 2048, 8192), (64, 1040, 4096), (63, 4096, 4096), (64, 6144, 4096), (20, 7168, 1024)),
    *((1, 64, 64), (7, 72, 16), (8, 1280, 8192), (9, 24, 2056), (24, 3080, 520), (64, 16392, 2048), (40, 28680, 136), (20, 4096, 1024)),
    *((16, 4096, 14336), (64, 7168, 8192), (19, 7160, 8200), (44, 6664, 8192)),
]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows(shape, dtype):
    """Rows by eight and between, columns that end inside a tile, more tiles than SMs, K that ends inside a stage and a box."""
    check(shape, dtype, "cuda", bias=True, seed=shape[0])


def test_nan_and_inf_stay_in_their_rows():
    x, w = normal(50, 2048, dtype=BF16).cuda(), normal(1024, 2048, dtype=BF16).cuda()
    want = dense_linear(x, w)
    x[13, 5], x[49, 0] = float("nan"), float("inf")
    got = dense_linear(x, w)
    assert got[13].isnan().all() and not got[49].isfinite().any()
    keep = [i for i in range(50) if i not in (13, 49)]
    assert_same(got[keep], want[keep])


def test_rows_do_not_depend_on_what_shared_memory_held():
    """Stages of rows that x does not have keep what the kernel before left there: NaN here."""
    x, w = normal(11, 4096, dtype=BF16).cuda(), normal(4096, 4096, dtype=BF16).cuda()
    want = dense_linear(x, w)
    dense_linear(torch.full((64, 4096), float("nan"), dtype=BF16, device="cuda"), w)
    assert_same(dense_linear(x, w), want)


def test_strided_rows():
    x, intact_x = padded_rows(normal(30, 1024, dtype=BF16).cuda(), gap=16, offset=8)
    w, intact_w = padded_rows(normal(1040, 1024, dtype=BF16).cuda(), gap=8)
    assert_same(dense_linear(x, w), dense_linear(x.contiguous(), w.contiguous()))
    intact_x()
    intact_w()


def test_graph():
    x, w = normal(48, 4096, dtype=BF16).cuda(), normal(4096, 4096, dtype=BF16).cuda()
    check_graph(lambda: dense_linear(x, w), lambda: x.copy_(normal(48, 4096, dtype=BF16, seed=5)))


def test_linear_takes_it():
    x, w = normal(40, 4096, dtype=BF16).cuda(), normal(4096, 4096, dtype=BF16).cuda()
    assert dense_wins(40, 4096, 4096)
    b = normal(2 * 4096, dtype=BF16).cuda()[::2]
    assert_same(linear(x, w, b), dense_linear(x, w, b.contiguous()))
