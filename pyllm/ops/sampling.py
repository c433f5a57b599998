"""Choosing the next token on the device, and its log-probabilities. Native code: `csrc/sampling`."""

from __future__ import annotations

import itertools
import math

import torch

from pyllm.ops.philox import uniforms
from pyllm.ops.registry import check, define

MAX_VOCAB = 2**20
MAX_TOP_N = 20
MAX_TEMPERATURE = 1e37
LOGIT_TYPES = (torch.bfloat16, torch.float16, torch.float32)
Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row: temperature, then top-k, top-p, min-p, then a draw by the inverse distribution function.

    logits       [B, V] rows, bf16, fp16 or fp32; 1 <= V <= 2^20; any row stride and alignment. Read once, never written.
    temperature  fp32 [B]; a value that is not > 0 (or no tensor at all) makes the row greedy: largest logit, lowest id among equals.
                 Above 1e37 (infinity included) it counts as 1e37.
    top_k        int32 [B]; exactly the k first tokens in (logit descending, id ascending) order are kept; <= 0 or >= V: off.
    top_p        fp32 [B]; with w_i = exp((logit_i - max) / temperature) summed over the tokens top-k kept, the shortest prefix of the same
                 order whose sum reaches top_p * total is kept, the crossing token included (so always at least one); >= 1 or NaN: off.
    min_p        fp32 [B]; tokens with w_i >= min(min_p, 1) are kept (w_max = 1); <= 0 or NaN: off. top_p's sum is taken before min_p.
    seed         int64 [B], index int32 [B] (which sample of the request), position int32 [B]: the draw is a function of these three and of
                 the row alone. All three are required with temperature.

    Returns int32 [B]: token i of the kept ones with probability w_i / sum(w). How it is drawn: in round r = 0, 1, ... the candidates' w_i
    add up in the order of ids, and the token is taken at which the sum passes u_r * total, u_r = `philox.uniforms(r)` in [0, 1). If top_p
    or min_p drops that token, the next round is among those candidates that precede it in the order. The first round's candidates are
    the tokens top-k keeps (with top_p off: and min_p), so that top_p changes a draw only where it drops the token.
    -1 for a row that holds a NaN, or no finite logit. Logits of +inf beside finite ones share all of the probability equally. A token
    never depends on B, on the other rows, or on the order of the batch, bit for bit.

    Rounding: the reference works in fp64. The kernel evaluates w_i in fp32 (relative error below 2^-18) and sums fixed point: 2^-31 per
    token where top-k is on, else 2^-40 per four tokens. So a kept set can differ from the exact one only in tokens whose cumulative share
    lies within V * 2^-32 + 2^-18 of top_p, or whose w_i is within 2^-18 (relative) of min_p, and a draw only where u_r lies as close to
    the border of two tokens; top-k is exact. -0 equals +0.
    Errors: ValueError (RuntimeError from CUDA) "sample_tokens: <argument> ..." on shape, dtype, device, or a filter without temperature.
    Source of the method: inverse transform and rejection (von Neumann 1951); nucleus sampling (Holtzman et al. 2020); min-p (Nguyen et
    al. 2024).
    """
    return torch.ops.pyllm.sample_tokens(logits, temperature, top_k, top_p, min_p, seed, index, position)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top_n: int = 0) -> Logprobs:
    """Log-probability and rank of one token per row, and the top_n most likely tokens.

    logits [B, V] rows, bf16, fp16 or fp32 (1 <= V <= 2^20); tokens int32 [B]; 0 <= top_n <= 20.
    Returns
      logprob       fp32 [B]: logit[token] - logsumexp(logits), natural log, at temperature 1;
      rank          int32 [B]: 1 + number of tokens with a larger logit, or an equal one and a lower id (1 = most likely);
      top_logprobs  fp32 [B, top_n] and top_tokens int32 [B, top_n]: in (logit descending, id ascending) order; places past V hold -inf, -1.
    A row that holds a NaN or no finite logit gives NaN, rank 0, and top entries NaN, -1. A token outside [0, V) (the -1 of such a row)
    gives NaN and rank 0. Logits of +inf beside finite ones share the probability equally; all others get -inf.
    Rounding: fp32 exponentials, sums in an order that depends on V alone; |error of logprob| <= 2^-17 + 2^-22 * |logprob|.
    Errors: ValueError (RuntimeError from CUDA) "token_logprobs: <argument> ...".
    """
    logprob, rank, top_logprobs, top_tokens = torch.ops.pyllm.token_logprobs(logits, tokens, top_n)
    return logprob, rank, top_logprobs, top_tokens


def _check_logits(logits: torch.Tensor, op: str) -> None:
    check(logits.dim() == 2, op, "logits", f"has {logits.dim()} dimensions, expected 2")
    check(logits.dtype in LOGIT_TYPES, op, "logits", f"is {_name(logits.dtype)}, expected bfloat16 or float16 or float32")
    vocab = logits.shape[1]
    check(1 <= vocab <= MAX_VOCAB, op, "logits", f"has V={vocab}, expected 1 to {MAX_VOCAB}")
    check(vocab == 1 or logits.stride(1) == 1, op, "logits", f".stride(1) is {logits.stride(1)}, expected 1")


def _check_row_argument(t: torch.Tensor, logits: torch.Tensor, op: str, name: str, dtype: torch.dtype) -> None:
    check(t.dim() == 1, op, name, f"has {t.dim()} dimensions, expected 1")
    check(t.shape[0] == logits.shape[0], op, name, f".size(0) is {t.shape[0]}, expected B={logits.shape[0]} (from logits)")
    check(t.dtype == dtype, op, name, f"is {_name(t.dtype)}, expected {_name(dtype)}")
    check(t.shape[0] <= 1 or t.stride(0) == 1, op, name, f".stride(0) is {t.stride(0)}, expected 1")
    check(t.device == logits.device, op, name, f"is on {t.device}, expected {logits.device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor | None,
    index: torch.Tensor | None,
    position: torch.Tensor | None,
) -> None:
    op = "sample_tokens"
    _check_logits(logits, op)
    arguments = (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seed", seed, torch.int64),
        ("index", index, torch.int32),
        ("position", position, torch.int32),
    )
    for name, t, dtype in arguments:
        if t is not None:
            check(temperature is not None, op, name, "is given without temperature")
            _check_row_argument(t, logits, op, name, dtype)
    if temperature is not None:
        for name, t, _ in arguments[4:]:
            check(t is not None, op, name, "is missing, expected a tensor beside temperature")


def _greedy(x: torch.Tensor) -> int:
    return int((x == x.max()).nonzero()[0])


def _weights(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """ln w_i = (x_i - max) / temperature, fp64; at most 0. The largest get exactly 0, +inf included; -inf stays -inf."""
    below = torch.where(x == x.max(), torch.zeros_like(x), x - x.max())
    return torch.where(below == float("-inf"), below, below / min(temperature, MAX_TEMPERATURE))


def kept_tokens(x: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """Ids (ascending) that one row of logits keeps: the exact definition, in fp64."""
    log_w = _weights(x.double(), temperature)
    order = torch.sort(x.double(), descending=True, stable=True).indices
    if 0 < top_k < x.numel():
        order = order[:top_k]
    if top_p < 1.0:
        w = log_w[order].exp()
        before = w.cumsum(0) - w
        keep = before < top_p * w.sum()
        keep[0] = True
        order = order[keep]
    if min_p > 0.0:
        order = order[log_w[order] >= math.log(min(min_p, 1.0))]
    return order.sort().values


def _draw(x: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, index: int, position: int) -> int:
    if bool(torch.isnan(x).any()) or not bool(torch.isfinite(x).any()):
        return -1
    if not temperature > 0.0 or top_k == 1 or top_p <= 0.0:
        return _greedy(x)
    log_w = _weights(x.double(), temperature)
    w = log_w.exp()
    order = torch.sort(x.double(), descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank[order] = torch.arange(x.numel(), device=x.device)
    keep = torch.zeros_like(x, dtype=torch.bool)
    keep[kept_tokens(x, temperature, top_k, top_p, min_p)] = True
    large = log_w >= (math.log(min(min_p, 1.0)) if min_p > 0.0 else -math.inf)
    candidates = rank < (top_k if 0 < top_k < x.numel() else x.numel())
    if not top_p < 1.0:
        candidates &= large
    for u in (uniforms(torch.tensor(round_), seed, index, position) for round_ in itertools.count()):
        mass = torch.where(candidates, w, 0.0).cumsum(0)
        token = int((mass > float(u) * mass[-1]).nonzero()[0])
        if keep[token]:
            return token
        candidates &= large & (rank < rank[token])
    raise AssertionError("the first token in the order is always kept")


def _sample_tokens_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> torch.Tensor:
    _check_sample_tokens(logits, temperature, top_k, top_p, min_p, seed, index, position)

    def column(t: torch.Tensor | None, default: float) -> list:
        return [default] * logits.shape[0] if t is None else t.tolist()

    rows = zip(
        logits.float(),
        column(temperature, 0.0),
        column(top_k, 0),
        column(top_p, 1.0),
        column(min_p, 0.0),
        column(seed, 0),
        column(index, 0),
        column(position, 0),
        strict=True,
    )
    return torch.tensor([_draw(*row) for row in rows], dtype=torch.int32, device=logits.device)


def _sample_tokens_fake(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> torch.Tensor:
    _check_sample_tokens(logits, temperature, top_k, top_p, min_p, seed, index, position)
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)


def _check_token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top_n: int) -> None:
    op = "token_logprobs"
    _check_logits(logits, op)
    _check_row_argument(tokens, logits, op, "tokens", torch.int32)
    check(0 <= top_n <= MAX_TOP_N, op, "top_n", f"is {top_n}, expected 0 to {MAX_TOP_N}")


def _token_logprobs_reference(logits: torch.Tensor, tokens: torch.Tensor, top_n: int) -> Logprobs:
    _check_token_logprobs(logits, tokens, top_n)
    logprob, rank, top_logprobs, top_tokens = _token_logprobs_fake(logits, tokens, top_n)
    vocab = logits.shape[1]
    for b, (x, token) in enumerate(zip(logits.double(), tokens.tolist(), strict=True)):
        logprob[b], rank[b], top_logprobs[b], top_tokens[b] = float("nan"), 0, float("nan"), -1
        if bool(torch.isnan(x).any()) or not bool(torch.isfinite(x).any()):
            continue
        log_w = _weights(x, 1.0)
        log_p = log_w - log_w.exp().sum().log()
        if 0 <= token < vocab:
            ids = torch.arange(vocab, device=x.device)
            logprob[b] = log_p[token]
            rank[b] = 1 + ((x > x[token]) | ((x == x[token]) & (ids < token))).sum()
        n = min(top_n, vocab)
        order = torch.sort(x, descending=True, stable=True).indices[:n]
        top_logprobs[b, :n], top_tokens[b, :n] = log_p[order].float(), order.int()
        top_logprobs[b, n:] = float("-inf")
    return logprob, rank, top_logprobs, top_tokens


def _token_logprobs_fake(logits: torch.Tensor, tokens: torch.Tensor, top_n: int) -> Logprobs:
    _check_token_logprobs(logits, tokens, top_n)
    rows = logits.shape[0]
    return (
        logits.new_empty((rows,), dtype=torch.float32),
        logits.new_empty((rows,), dtype=torch.int32),
        logits.new_empty((rows, top_n), dtype=torch.float32),
        logits.new_empty((rows, top_n), dtype=torch.int32),
    )


define(
    "sample_tokens(Tensor logits, Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
    "Tensor? seed=None, Tensor? index=None, Tensor? position=None) -> Tensor",
    stem="sampling/sample_tokens",
    public="pyllm.ops.sampling.sample_tokens",
    reference=_sample_tokens_reference,
    fake=_sample_tokens_fake,
)
define(
    "token_logprobs(Tensor logits, Tensor tokens, int top_n) -> (Tensor, Tensor, Tensor, Tensor)",
    stem="sampling/token_logprobs",
    public="pyllm.ops.sampling.token_logprobs",
    reference=_token_logprobs_reference,
    fake=_token_logprobs_fake,
)
