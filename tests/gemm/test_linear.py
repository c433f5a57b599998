"""linear: the contract that every later GEMM kernel keeps."""

from __future__ import annotations

import pytest
import torch

from pyllm import ops
from tests.support.compare import EPS, assert_close
from tests.support.generate import normal


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "n", "k"), [(0, 8, 16), (1, 1, 1), (5, 33, 64), (3, 128, 1024), (3, 2048, 264)])
@pytest.mark.parametrize("bias", [False, True])
def test_against_fp64(t: int, n: int, k: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    x, w = normal(t, k, dtype=dtype), normal(n, k, dtype=dtype)
    b = normal(n, dtype=dtype) if bias else None
    want = x.double() @ w.double().T + (0 if b is None else b.double())
    got = ops.linear(x.to(device), w.to(device), None if b is None else b.to(device))
    # fp32 accumulation of k products errs by at most k 2^-24 sum |x w|; the bias may be added after a rounding to dtype: two roundings
    # of the result
    magnitude = x.double().abs() @ w.double().abs().T
    assert_close(
        got, want, rtol=2 * EPS[dtype], atol=k * EPS[torch.float32] * magnitude + 2 * EPS[dtype] * (0 if b is None else b.double().abs())
    )


def test_opcheck_and_compile() -> None:
    x, w, b = normal(3, 16), normal(8, 16), normal(8)
    torch.library.opcheck(torch.ops.pyllm.linear.default, (x, w, b))
    assert_close(torch.compile(ops.linear, fullgraph=True, backend="aot_eager")(x, w, b), ops.linear(x, w, b))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    x, w, b = (
        normal(3, 64, dtype=torch.bfloat16).cuda(),
        normal(32, 64, dtype=torch.bfloat16).cuda(),
        normal(32, dtype=torch.bfloat16).cuda(),
    )
    ops.linear(x, w, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, w, b)
    x.copy_(normal(3, 64, dtype=torch.bfloat16))
    graph.replay()
    assert_close(y, ops.linear(x, w, b), what="replay")


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device: str) -> None:
    x, w = torch.zeros(3, 16, device=device), torch.zeros(8, 16, device=device)
    for args, message in (
        ((x[0], w), "x has 1 dimensions, expected 2"),
        ((x.int(), w.int()), r"x is torch\.int32, expected bfloat16, float16 or float32"),
        ((x, w[0]), "weight has 1 dimensions, expected 2"),
        ((x, w[:, :8]), r"weight \.size\(1\) is 8, expected K=16 \(from x\)"),
        ((x, w.bfloat16()), r"weight is torch\.bfloat16, expected torch\.float32 like x"),
        ((x, w, w[0]), r"bias has shape \(16,\), expected N=8"),
        ((x, w, w[:, 0].bfloat16()), r"bias is torch\.bfloat16, expected torch\.float32 like x"),
    ):
        with pytest.raises(ValueError, match=f"linear: {message}"):
            ops.linear(*args)
