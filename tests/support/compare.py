"""The one comparator of all tests: NaN and inf positions must agree, then |got - want| <= atol + rtol * |want| per element."""

from __future__ import annotations

import torch

EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
EPS[torch.float8_e4m3fn] = 2.0**-4
"""Unit roundoff u: one round-to-nearest changes x by at most u * |x| (normal range)."""


def assert_close(
    got: torch.Tensor, want: torch.Tensor, *, rtol: float = 0.0, atol: float | torch.Tensor = 0.0, what: str = "result"
) -> None:
    """Compare against a reference of higher precision; `atol` may be a tensor that broadcasts (a bound per row)."""
    if got.shape != want.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    g, w = got.detach().cpu().double(), want.detach().cpu().double()
    limit = torch.as_tensor(atol, dtype=torch.float64).cpu() + rtol * w.abs()
    special = ~torch.isfinite(w)
    same = (g == w) | (torch.isnan(g) & torch.isnan(w))
    bad = torch.where(special | ~torch.isfinite(g), ~same, (g - w).abs() > limit)
    if not bad.any():
        return
    excess = torch.where(bad, torch.nan_to_num((g - w).abs() - limit, nan=float("inf"), posinf=float("inf")), torch.zeros_like(w))
    at = torch.unravel_index(excess.argmax(), g.shape) if g.dim() else ()
    index = tuple(int(i) for i in at)
    bound = limit.expand_as(w)[index].item() if g.dim() else float(limit)
    raise AssertionError(
        f"{what}: {int(bad.sum())} of {g.numel()} elements differ; worst at {index}: got {g[index].item():.9g}, "
        f"expected {w[index].item():.9g}, |difference| {(g[index] - w[index]).abs().item():.3g} > {bound:.3g}"
    )


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str = "result") -> None:
    """Bitwise equality (NaN payloads included)."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{what}: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}")
    as_bytes = [t.detach().cpu().contiguous().view(torch.uint8) for t in (got, want)]
    if not torch.equal(*as_bytes):
        n = int((as_bytes[0] != as_bytes[1]).sum())
        raise AssertionError(f"{what}: {n} of {as_bytes[0].numel()} bytes differ")
