"""What the tests of the row-wise norms share: fp64 formulas, error bounds, and the GPU checks that do not depend on the formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import FP8, normal, padded_rows, poison_allocator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CUDA = torch.device("cuda")
# One warp per row at 2 and at 4 vectors, one CTA, ragged last vectors, 4 vectors per thread, a cluster of two, and the limits.
WIDTHS = (8, 264, 576, 1024, 1032, 2048, 4096, 5128, 8192, 14336, 16392, 32768)
EPSILON = 1e-5

# fp32 error of a row statistic relative to its exact value. A thread adds at most 32 terms (two chains of 16), a warp 5 levels, the CTA
# or cluster 5: fewer than 48 roundings of a sum of squares, halved by the square root, then rsqrt (2 ulp) and at most 4 operations each.
STATISTIC = 64 * 2.0**-24

Norm = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def rms64(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact result and the absolute error per element that fp32 arithmetic may add."""
    h, w = h.double(), weight.double()
    y = h * torch.rsqrt(h.square().mean(1, keepdim=True) + EPSILON) * w
    return y, STATISTIC * y.abs()


def layer64(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As rms64. The fp32 mean is off by up to STATISTIC * max|h|, which the subtraction passes on, scaled by rstd and weight."""
    h, w = h.double(), weight.double()
    b = torch.zeros_like(w) if bias is None else bias.double()
    centred = h - h.mean(1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(1, keepdim=True) + EPSILON)
    return centred * rstd * w + b, STATISTIC * (2 * h.abs().amax(1, keepdim=True) * rstd * w.abs() + b.abs())


def check_result(got: torch.Tensor, want: torch.Tensor, slack: torch.Tensor, what: str) -> None:
    """One rounding to got.dtype (fp16: also the spacing 2^-24 of its subnormals) of a value within `slack` of `want`."""
    u = EPS[got.dtype]
    assert_close(got, want, rtol=u, atol=slack * (1 + u) + 2.0**-25, what=what)


def check_fp8(q: torch.Tensor, scale: torch.Tensor, want: torch.Tensor, slack: torch.Tensor, what: str) -> None:
    """q = e4m3(y * (1 / scale)): two fp32 roundings, then u of e4m3 or half its smallest step 2^-9, and saturation at 448."""
    u = EPS[FP8]
    units = want / scale.double()
    ideal = units.clamp(-448, 448)
    assert_close(q.float(), ideal, rtol=u, atol=(slack / scale.double() + 2 * 2.0**-24 * units.abs()) * (1 + u) + 2.0**-10, what=what)


def inputs(T: int, N: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """x, weight, bias, residual; rows of very different size and an offset, so that a row mixed up with another one shows."""
    size = torch.logspace(-2, 2, max(T, 1))[:T, None]
    x = (torch.randn(T, N) * size + size).to(dtype).to(device)
    residual = (torch.randn(T, N) * size).to(dtype).to(device)
    weight = (1 + normal(N, scale=0.5)).to(weight_dtype).to(device)
    return x, weight, normal(N, dtype=weight_dtype, device=device), residual


def check_norm(norm: Norm, exact: Norm, T: int, N: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device | str) -> None:
    """Every combination of residual and quant against fp64, from strided rows, into poisoned memory."""
    x, weight, bias, residual = inputs(T, N, dtype, weight_dtype, device)
    for with_residual in (False, True):
        h = (x.float() + residual.float()).to(dtype) if with_residual else x
        want, slack = exact(h.cpu(), weight.cpu(), bias.cpu())
        static = torch.tensor([0.01], device=device)
        for quant in (None, "token", "static"):
            what = f"{T}x{N} {dtype} residual={with_residual} quant={quant}"
            rows, intact = padded_rows(x)
            res, res_intact = padded_rows(residual, gap=16)
            poison_allocator((T, N), FP8 if quant else dtype, device)
            got = norm(rows, weight, bias, res if with_residual else None, quant, static if quant == "static" else None)
            if quant is None:
                assert got.dtype == dtype and got.is_contiguous()
                check_result(got, want, slack, what)
            elif quant == "static":
                check_fp8(got, static.cpu(), want, slack, what)
            else:
                q, scale = got
                exact_scale = (want.abs().amax(1) / 448).clamp(min=1e-10)
                assert_close(scale, exact_scale, rtol=2 * 2.0**-24, atol=slack.amax(1) / 448, what=what + " scale")
                check_fp8(q, scale.cpu()[:, None], want, slack, what)
            intact()
            res_intact()
            assert_same(res, h if with_residual else residual, what + " residual")


def check_invariance(norm: Norm, N: int, dtype: torch.dtype) -> None:
    """A row has the same bits alone (where long rows take a cluster), in a small batch, in one with the layout for many rows, again."""
    T = 3000
    x, weight, bias, residual = inputs(T, N, dtype, dtype, CUDA)
    for quant in (None, "token"):

        def run(x: torch.Tensor, residual: torch.Tensor, quant: str | None = quant) -> list[torch.Tensor]:
            r = residual.clone()
            out = norm(x, weight, bias, r, quant, None)
            return [r, *(out if isinstance(out, tuple) else (out,))]

        everything = run(x, residual)
        for got, want in zip(run(x, residual), everything, strict=True):
            assert_same(got, want, f"second run, N={N} quant={quant}")
        for rows in (slice(0, 1), slice(17, 18), slice(T - 1, T), slice(5, 9), slice(100, 700)):
            for got, want in zip(run(x[rows], residual[rows]), everything, strict=True):
                assert_same(got, want[rows], f"rows {rows} of N={N} quant={quant}")


def check_graph_and_chain(norm: Norm, N: int) -> None:
    """Two norms back to back (the second may start before the first ends) in a graph, replayed with other inputs."""
    for T in (1, 7, 2000):
        x, weight, bias, residual = inputs(T, N, torch.bfloat16, torch.bfloat16, CUDA)
        kept = residual.clone()

        def chain(wait: bool, weight: torch.Tensor = weight, bias: torch.Tensor = bias, x: torch.Tensor = x, r: torch.Tensor = residual):
            first = norm(x, weight, bias, r, None, None)
            if wait:
                torch.cuda.synchronize()
            return norm(first, weight, bias, r, "token", None)

        chain(wait=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q, scale = chain(wait=False)
        for scaling in (1.0, -3.0):
            x.copy_(x * scaling)
            residual.copy_(kept)
            graph.replay()
            got = [q.clone(), scale.clone(), residual.clone()]
            residual.copy_(kept)
            want = [*chain(wait=True), residual]
            for g, w in zip(got, want, strict=True):
                assert_same(g, w, f"T={T} N={N} inputs x {scaling}")


def check_far_rows(norm: Norm) -> None:
    """Offsets beyond 2^31 elements in x, residual and out: the last rows equal the same rows alone."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs a GPU with 20 GiB free")
    N, T = 32768, 2**16 + 3
    x = torch.empty(T, N, dtype=torch.bfloat16, device=CUDA).normal_()
    residual = torch.zeros_like(x)
    weight = torch.ones(N, dtype=torch.bfloat16, device=CUDA)
    alone = norm(x[-2:].clone(), weight, None, residual[-2:].clone(), None, None)
    assert_same(norm(x, weight, None, residual, None, None)[-2:], alone, "last rows")
    assert_same(residual[-2:], x[-2:], "residual")
