"""Rows of logits, sampling parameters, and what a drawn token may be, for the tests of the samplers."""

from __future__ import annotations

import math

import pytest
import torch

from pyllm.ops.philox import uniforms
from pyllm.ops.sampling import sample_tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = ("normal", "wide", "narrow", "ties", "zeros", "masked", "peaked", "outlier", "infinite")

# w_i = 2^(fp32(logit - max) * fp32(log2(e) / T)): three roundings of an exponent of at most 38 for a token that can be drawn, times ln 2,
# plus 2^-22 of the exponential: below 2^-17.5 relative; documented and tested as 2^-17 with the sums' own roundings.
WEIGHT_ERROR = 2.0**-17


def row(kind: str, V: int) -> torch.Tensor:
    """fp32 logits [V] (round them to the dtype under test)."""
    x = torch.randn(V)
    if kind == "wide":
        x = x * 6
    elif kind == "narrow":
        x = x * 1e-3 + 3
    elif kind == "ties":
        x = torch.randint(-3, 4, (V,)).float()
    elif kind == "zeros":
        x = torch.where(torch.arange(V) % 2 == 0, 0.0, -0.0)
    elif kind == "masked":
        x = torch.where(torch.rand(V) < 0.95, float("-inf"), x)
        x[V // 2] = 0.5
    elif kind == "peaked":
        x[V // 3] = 60.0
    elif kind == "outlier":
        x[-1] = 1e4
    elif kind == "infinite":
        x[V // 3] = x[V // 2] = float("inf")
        x[0] = 1.0
    return x


def settings(B: int, device: torch.device | str, *, seed: int = 1, **values: float | list) -> dict[str, torch.Tensor]:
    """Arguments of sample_tokens: temperature (default 1), top_k, top_p, min_p as given, a different seed in each row."""
    types = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    values = {"temperature": 1.0, **values}
    given = {name: torch.as_tensor(v, dtype=types[name]).expand(B).contiguous().to(device) for name, v in values.items()}
    seeds = torch.randint(-(2**63), 2**63 - 1, (B,), generator=torch.Generator().manual_seed(seed))
    given["seed"] = seeds.to(device)
    given["index"] = (torch.arange(B, dtype=torch.int32) % 3).to(device)
    given["position"] = torch.arange(B, dtype=torch.int32).to(device) * 7
    return given


def at(given: dict[str, torch.Tensor], rows: torch.Tensor | slice) -> dict[str, torch.Tensor]:
    return {name: t[rows].contiguous() for name, t in given.items()}


class Exact:
    """One row in fp64: masks [V] of the tokens that may stay given the documented rounding, and of those that must."""

    def __init__(self, x: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
        x = x.double()
        top = x.max()
        below = torch.where(x == top, torch.zeros_like(x), x - top)
        self.log_w = torch.where(below == float("-inf"), below, below / min(temperature, 1e37))
        order = torch.sort(x, descending=True, stable=True).indices
        if 0 < top_k < x.numel():
            order = order[:top_k]  # exact: no rounding is allowed here
        log_w = self.log_w[order]
        w = log_w.exp()
        before = (w.cumsum(0) - w) / w.sum()
        slack = x.numel() * 2.0**-32 + WEIGHT_ERROR
        self.slack, self.top_p = slack, top_p
        self.rank = torch.full_like(x, x.numel(), dtype=torch.int64)
        self.rank[order] = torch.arange(order.numel(), device=x.device)
        first = torch.arange(order.numel(), device=x.device) == 0
        limit = math.log(min(min_p, 1.0)) if min_p > 0 else -math.inf
        limit_slack = 0.0 if min_p >= 1 else WEIGHT_ERROR
        self.large = self.log_w >= limit
        self.may, self.must = torch.zeros_like(x, dtype=torch.bool), torch.zeros_like(x, dtype=torch.bool)
        for mask, sign in ((self.may, 1), (self.must, -1)):
            in_prefix = first | (before < top_p + sign * slack) if top_p < 1 else torch.ones_like(first)
            mask[order] = in_prefix & (log_w >= limit - sign * limit_slack)

    def check(self, tokens: torch.Tensor, given: dict[str, torch.Tensor], what: str) -> None:
        """Every token [B] may stay, and is where the random numbers lead in fp64, given the rounding."""
        tokens = tokens.long()
        assert ((tokens >= 0) & (tokens < self.may.numel())).all(), f"{what}: {tokens.tolist()}"
        outside = ~self.may[tokens]
        assert not outside.any(), f"{what}: {tokens[outside].tolist()} not in the kept set of {int(self.may.sum())}"
        rounds = torch.arange(64, device=tokens.device)
        u = uniforms(rounds, *(given[name].long()[:, None] for name in ("seed", "index", "position"))).cpu()
        first = self._masses(self._candidates())
        for b, token in enumerate(tokens.tolist()):
            assert self._leads(u[b].tolist(), token, first), f"{what}, row {b}: {token} is not where the random numbers lead"

    def _candidates(self) -> torch.Tensor:
        candidates = self.rank < self.rank.numel()
        return candidates if self.top_p < 1 else candidates & self.large

    def _masses(self, candidates: torch.Tensor) -> torch.Tensor:
        return torch.where(candidates, self.log_w.exp(), 0.0).cumsum(0).cpu()

    def _leads(self, u: list[float], token: int, mass: torch.Tensor) -> bool:
        """Whether the rounds may end at token. The sum up to a token is off by at most slack * total of the first round."""
        slack = self.slack * float(mass[-1])
        rank = int(self.rank[token])
        candidates = None
        for fraction in u:
            at = fraction * float(mass[-1])
            before = float(mass[token - 1]) if token else 0.0
            candidate = rank < self.rank.numel() if candidates is None else bool(candidates[token])
            if candidate and before - slack <= at <= float(mass[token]) + slack:
                return True
            hit = int(torch.searchsorted(mass, torch.tensor(at, dtype=torch.float64), right=True).clamp(max=mass.numel() - 1))
            below = float(mass[hit - 1]) if hit else 0.0
            if at - below <= slack or float(mass[hit]) - at <= slack:
                return True  # rounding decides which of two tokens is rejected
            if bool(self.must[hit]):
                return False
            candidates = self._candidates() if candidates is None else candidates
            candidates = candidates & self.large & (self.rank < self.rank[hit])
            mass = self._masses(candidates)
        return False


def check_draws(x: torch.Tensor, given: dict[str, torch.Tensor], what: str) -> torch.Tensor:
    """Draw, and check against fp64. Rows that are the same tensor (stride 0) must have the same filters."""
    tokens = sample_tokens(x, **given)
    names = [name for name in ("temperature", "top_k", "top_p", "min_p") if name in given]
    same = x.shape[0] > 0 and x.stride(0) == 0
    for rows in [slice(None)] if same else [slice(b, b + 1) for b in range(x.shape[0])]:
        one = at(given, rows)
        Exact(x[rows][0], **{name: one[name][0].item() for name in names}).check(tokens[rows], one, f"{what}, rows {rows}")
    return tokens


def chi_square_limit(freedom: int) -> float:
    """The value that a chi-square variable of that many degrees of freedom passes with probability 1e-6 (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3


def check_frequencies(tokens: torch.Tensor, p: torch.Tensor) -> None:
    """Pearson's test of the drawn tokens against probabilities p [V]; tokens expected fewer than 8 times are pooled."""
    counts = torch.bincount(tokens.long(), minlength=p.numel()).double()
    expected = p * tokens.numel()
    assert counts[p == 0].sum() == 0
    large = expected >= 8
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    observed, wanted = (t[wanted > 1e-9] for t in (observed, wanted))
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = observed.numel() - 1
    assert statistic <= chi_square_limit(freedom), f"chi-square {statistic:.1f} with {freedom} degrees of freedom"
