"""embed_tokens: rows of the table, scaled; zeros for ids that this shard of the table does not hold."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops.fused import embed_tokens
from tests.fused.formulas import DTYPES, check_graph, far_rows, half_step
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows, poison_allocator

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def ids_of(T: int, low: int, high: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(low, high, (T,), dtype=torch.int32).to(device)


def assert_embed(got: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, scale: float, first: int) -> None:
    """The scale is rounded to fp32 and the product once to fp32 (2^-24 each), then once to the output; a scale of 1 is exact."""
    row = ids.long().cpu() - first
    held = (row >= 0) & (row < weight.shape[0])
    table = torch.cat((weight.double().cpu(), torch.zeros(1, weight.shape[1], dtype=torch.float64)))
    want = table[torch.where(held, row, torch.full_like(row, -1))] * scale
    assert got.dtype == weight.dtype and got.is_contiguous()
    if scale == 1.0:
        assert_same(got.cpu(), want.to(weight.dtype), "embed_tokens")
    else:
        assert_close(got, want, rtol=EPS[weight.dtype] + 2.01 * EPS[torch.float32], atol=half_step(weight.dtype), what="embed_tokens")


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 45.25, 0.1])
def test_reference(dtype: torch.dtype, scale: float) -> None:
    weight = normal(50, 72, dtype=dtype)
    ids = ids_of(33, 0, 100)
    for first in (0, 30, 99):
        assert_embed(embed_tokens(ids, weight, scale, first), ids, weight, scale, first)


def test_shards_add_up() -> None:
    weight, ids = normal(40, 16), ids_of(64, 0, 40)
    parts = [embed_tokens(ids, weight[a : a + 10].contiguous(), 2.0, a) for a in range(0, 40, 10)]
    assert_same(sum(parts[1:], parts[0]), embed_tokens(ids, weight, 2.0))


def test_outside_the_table() -> None:
    weight = torch.full((4, 8), float("nan"))
    ids = torch.tensor([-1, 4, 2**31 - 1, -(2**31)], dtype=torch.int32)
    assert_same(embed_tokens(ids, weight, 3.0), torch.zeros(4, 8))
    assert_same(embed_tokens(ids, weight[:0], 3.0), torch.zeros(4, 8))


ERRORS = [
    (
        lambda d: (torch.zeros(2, 2, dtype=torch.int32, device=d), torch.zeros(4, 8, device=d)),
        "embed_tokens: ids has 2 dimensions, expected 1",
    ),
    (lambda d: (torch.zeros(2, dtype=torch.int64, device=d), torch.zeros(4, 8, device=d)), "embed_tokens: ids is int64, expected int32"),
    (lambda d: (torch.zeros(4, dtype=torch.int32, device=d)[::2], torch.zeros(4, 8, device=d)), "embed_tokens: ids is not contiguous"),
    (lambda d: (torch.zeros(2, dtype=torch.int32, device=d), torch.zeros(4, 9, device=d)), r"embed_tokens: weight .size\(1\) is 9"),
    (lambda d: (torch.zeros(2, dtype=torch.int32, device=d), torch.zeros(8, device=d)), "embed_tokens: weight has 1 dimensions"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS, ids=range(len(ERRORS)))
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device: str, make, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.pyllm.embed_tokens(*make(device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_and_compile(device: str) -> None:
    ids, weight = ids_of(5, 0, 9, device), normal(9, 16, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.pyllm.embed_tokens.default, (ids, weight, 2.0, 1))
    compiled = torch.compile(lambda i, w: embed_tokens(i, w, 2.0, 1), fullgraph=True, backend="aot_eager")
    assert_same(compiled(ids, weight), embed_tokens(ids, weight, 2.0, 1))


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("scale", [1.0, 45.25])
def test_kernel(dtype: torch.dtype, scale: float) -> None:
    for T, N in ((0, 8), (1, 8), (1, 4096), (65, 72), (700, 4096), (6000, 1000)):
        weight = normal(300, N, dtype=dtype, device="cuda")
        ids = ids_of(T, -2, 400, "cuda")
        poison_allocator((T, N), dtype, "cuda")
        out = embed_tokens(ids, weight, scale, 20)
        assert_embed(out, ids, weight, scale, 20)
        assert_same(embed_tokens(ids, weight, scale, 20), out, "second run")
    weight, intact = padded_rows(normal(300, 64, dtype=dtype, device="cuda"))
    ids = ids_of(100, 0, 300, "cuda")
    assert_embed(embed_tokens(ids, weight, scale), ids, weight, scale, 0)
    intact()


@pytest.mark.gpu
def test_kernel_outside_the_table() -> None:
    weight = torch.full((4, 8), float("nan"), device="cuda")
    ids = torch.tensor([-1, 4, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    assert_same(embed_tokens(ids, weight, 3.0), torch.zeros(4, 8))
    assert_same(embed_tokens(ids, weight[:0], 3.0), torch.zeros(4, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2000])
def test_graph(T: int) -> None:
    weight = normal(300, 4096, dtype=torch.bfloat16, device="cuda")
    check_graph(lambda ids: embed_tokens(ids, weight, 2.0), ids_of(T, 0, 300, "cuda"), ids_of(T, 0, 300, "cuda"))


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_31_bits() -> None:
    weight = far_rows(4096, torch.bfloat16)
    ids = torch.tensor([1, 0, 1], dtype=torch.int32, device="cuda")
    assert_embed(embed_tokens(ids, weight), ids, weight, 1.0, 0)
