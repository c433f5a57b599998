"""Mixture of experts: routing, and the routed gated MLPs. On CUDA the latter are `fused_experts` where it serves the operands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm.ops.experts import check_extras, check_ids, check_known, fused_experts_serves, gated
from pyllm.ops.fused import ACTS
from pyllm.ops.gemm import FLOATS
from pyllm.ops.registry import check, check_flag, define

SCORING = {"softmax": 0, "topk_softmax": 1, "sigmoid": 2}
"""softmax: over all experts, then top-k; topk_softmax: top-k of the logits, softmax over those; sigmoid: per expert, then top-k."""


def route_experts(
    logits: Tensor, top_k: int, scoring: str = "softmax", *, renormalize: bool = True, bias: Tensor | None = None, scale: float = 1.0,
    groups: int = 1, top_groups: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose `top_k` experts per token (ties: lowest id) and their weights.

    `score = softmax(logits)`, `logits`, or `sigmoid(logits)` by `scoring`; the choice is the top-k of `score + bias` (bias `[E]` fp32,
    for the choice
    alone, as in DeepSeek-V3); weights = the chosen scores (`topk_softmax`: softmax over the chosen logits), divided by their sum when
    `renormalize`, times `scale`.
    groups > 1: the E experts are so many groups of consecutive ones, and only those of the best `top_groups` (ties: lowest) are chosen
    from. A group is as good as its best `score`, or, with a bias, as the sum of its two best `score + bias` (DeepSeek-V2, -V3).
    Shapes: logits `[T, E]` -> (weights fp32 `[T, top_k]`, ids int32 `[T, top_k]`). Errors: unknown scoring; top_k outside 1..E;
    groups that do not divide E, top_groups outside 1..groups, or fewer than top_k experts in them; fewer than two in one with a bias.
    CUDA: E up to 1024, top_k and groups up to 32, dense rows of logits.
    """
    check(scoring in SCORING, "route_experts", "scoring", f"is {scoring!r}, expected one of {', '.join(SCORING)}")
    check_flag("route_experts", "renormalize", renormalize)
    return torch.ops.pyllm.route_experts(logits, top_k, SCORING[scoring], renormalize, bias, scale, groups, top_groups)


def _check_route(logits: Tensor, top_k: int, scoring: int, bias: Tensor | None, groups: int, top_groups: int) -> None:
    op = "route_experts"
    check(logits.dim() == 2, op, "logits", f"has {logits.dim()} dimensions, expected 2")
    check(logits.dtype in FLOATS, op, "logits", f"is {logits.dtype}, expected bfloat16, float16 or float32")
    check(0 <= scoring < len(SCORING), op, "scoring", f"is {scoring}, expected 0..{len(SCORING) - 1}")
    check(1 <= top_k <= logits.shape[1], op, "top_k", f"is {top_k}, expected 1..E={logits.shape[1]}")
    if bias is not None:
        check(bias.shape == logits.shape[1:], op, "bias", f"has shape {tuple(bias.shape)}, expected E={logits.shape[1]} (from logits)")
        check(bias.dtype == torch.float32, op, "bias", f"is {bias.dtype}, expected float32")
    experts, least = logits.shape[1], 1 if bias is None or groups == 1 else 2
    check(groups >= 1 and experts % groups == 0, op, "groups", f"is {groups}, expected a divisor of E={experts}")
    check(experts // groups >= least, op, "groups", f"is {groups}, expected {least} of the E={experts} experts or more in each with a bias")
    check(1 <= top_groups <= groups, op, "top_groups", f"is {top_groups}, expected 1..groups={groups}")
    most = experts // groups * top_groups
    check(top_k <= most, op, "top_groups", f"is {top_groups}, expected at least top_k={top_k} experts in the chosen groups, not {most}")


def _route_reference(
    logits: Tensor, top_k: int, scoring: int, renormalize: bool, bias: Tensor | None, scale: float, groups: int = 1, top_groups: int = 1
) -> tuple[Tensor, Tensor]:
    _check_route(logits, top_k, scoring, bias, groups, top_groups)
    x = logits.float()
    score = (x.softmax(-1), x, x.sigmoid())[scoring]
    choice = score if bias is None else score + bias
    if groups > 1:
        choice = _of_best_groups(choice, groups, top_groups, 1 if bias is None else 2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = score.gather(1, ids)
    if scoring == SCORING["topk_softmax"]:
        weights = weights.softmax(-1)
    elif renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return weights * scale, ids.int()


def _of_best_groups(choice: Tensor, groups: int, top_groups: int, best: int) -> Tensor:
    """`choice` `[T, E]` with -inf outside the groups whose `best` largest values have the largest sums."""
    by_group = choice.unflatten(-1, (groups, -1))
    value = by_group.topk(best, -1).values.sum(-1)
    chosen = value.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
    keep = torch.zeros_like(value, dtype=torch.bool).scatter_(1, chosen, True)
    return by_group.masked_fill(~keep[..., None], float("-inf")).flatten(-2)


def _route_fake(
    logits: Tensor, top_k: int, scoring: int, renormalize: bool, bias: Tensor | None, scale: float, groups: int = 1, top_groups: int = 1
) -> tuple[Tensor, Tensor]:
    _check_route(logits, top_k, scoring, bias, groups, top_groups)
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def moe_experts(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, act: str = "silu", *, w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None, clamp: tuple[float, float] | None = None,
) -> Tensor:  # fmt: skip
    """`y[t] = sum_j weights[t, j] * (w2[e] (act(gate) * up) + w2_bias[e])` with `e = ids[t, j]`, `[gate; up] = w13[e] x[t] + w13_bias[e]`.

    clamp = (alpha, limit): `g sigmoid(alpha g) (u + 1)`, g = gate at most limit and u = up within -limit .. limit, in place of act.
    Shapes: x `[T, N]`, w13 `[E, 2F, N]` (gate rows, then up rows), w2 `[E, N, F]`, ids int32 `[T, top_k]`, weights fp32 `[T, top_k]` ->
    `[T, N]`; w13_bias `[E, 2F]`, w2_bias `[E, N]`. One of bf16, fp16, fp32 for all others.
    Each expert's output is weighted in fp32 and summed in fp32, rounded once. Errors: sizes that disagree, unknown act.
    CUDA: `fused_experts` where it serves the operands (sm_90, bf16 and fp16, N and F multiples of 8); otherwise a torch composition in
    which every expert sees every token.
    """
    check(act in ACTS, "moe_experts", "act", f"is {act!r}, expected one of {', '.join(ACTS)}")
    check(clamp is None or (len(clamp) == 2 and clamp[1] > 0), "moe_experts", "clamp", f"is {clamp!r}, expected None or (alpha, limit > 0)")
    alpha, limit = clamp or (0.0, 0.0)
    return torch.ops.pyllm.moe_experts(x, w13, w2, ids, weights, ACTS[act], w13_bias, w2_bias, alpha, limit)


def _check_experts(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, act: int, w13_bias: Tensor | None, w2_bias: Tensor | None
) -> None:
    op = "moe_experts"
    check(x.dim() == 2, op, "x", f"has {x.dim()} dimensions, expected 2")
    check(w13.dim() == 3 and w13.shape[2] == x.shape[1], op, "w13", f"has shape {tuple(w13.shape)}, expected [E, 2F, N={x.shape[1]}]")
    check(w13.shape[1] % 16 == 0, op, "w13", f".size(1) is {w13.shape[1]}, expected 2F, a multiple of 16")
    want = (w13.shape[0], x.shape[1], w13.shape[1] // 2)
    check(tuple(w2.shape) == want, op, "w2", f"has shape {tuple(w2.shape)}, expected {want} (from x, w13)")
    check(x.dtype in FLOATS, op, "x", f"is {x.dtype}, expected bfloat16, float16 or float32")
    for name, w in (("w13", w13), ("w2", w2)):
        check(w.dtype == x.dtype, op, name, f"is {w.dtype}, expected {x.dtype} like x")
    check(0 <= act < len(ACTS), op, "act", f"is {act}, expected 0..{len(ACTS) - 1}")
    check_ids(op, x, ids, weights)
    check_extras(op, {"w13_bias": w13_bias, "w2_bias": w2_bias}, tuple(w13.shape[:2]), tuple(w2.shape[:2]), x.dtype)


def _expert(
    x: Tensor, w13: Tensor, w2: Tensor, act: int, w13_bias: Tensor | None, w2_bias: Tensor | None, alpha: float, limit: float
) -> Tensor:
    gate_up = F.linear(x, w13, w13_bias)
    inner = gated(gate_up, act, alpha, limit).to(x.dtype) if limit > 0 else torch.ops.pyllm.act_mul(gate_up, act)
    return F.linear(inner, w2, w2_bias)


def _of(biases: tuple[Tensor | None, Tensor | None], e: int) -> tuple[Tensor | None, Tensor | None]:
    first, second = (None if b is None else b[e] for b in biases)
    return first, second


def _experts_reference(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, act: int, w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    _check_experts(x, w13, w2, ids, weights, act, w13_bias, w2_bias)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in check_known("moe_experts", ids, w13.shape[0]):
        token, choice = (ids == e).nonzero(as_tuple=True)
        out = _expert(x[token], w13[e], w2[e], act, *_of((w13_bias, w2_bias), e), alpha, limit)
        y.index_add_(0, token, weights[token, choice, None].float() * out.float())
    return y.to(x.dtype)


def _experts_composition(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, act: int, w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """No host sync, so every expert sees every token with weight 0 where it was not chosen: right under graphs, E / top_k times the
    work."""
    _check_experts(x, w13, w2, ids, weights, act, w13_bias, w2_bias)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(w13.shape[0]):
        gate = torch.where(ids == e, weights.float(), 0.0).sum(-1, keepdim=True)
        out = _expert(x, w13[e], w2[e], act, *_of((w13_bias, w2_bias), e), alpha, limit)
        y += torch.where(gate != 0, gate * out.float(), 0.0)
    return y.to(x.dtype)


def _experts_cuda(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, act: int, w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    if not fused_experts_serves(x, w13, w2, ids, weights):
        return _experts_composition(x, w13, w2, ids, weights, act, w13_bias, w2_bias, alpha, limit)
    return torch.ops.pyllm.fused_experts(x, w13, w2, ids, weights, act, None, None, w13_bias, w2_bias, alpha, limit)


def _experts_fake(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, act: int, w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    _check_experts(x, w13, w2, ids, weights, act, w13_bias, w2_bias)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define(
    "route_experts(Tensor logits, int top_k, int scoring, bool renormalize, Tensor? bias, float scale, int groups=1, int top_groups=1)"
    " -> (Tensor, Tensor)",
    stem="moe/route_experts",
    public="pyllm.ops.moe.route_experts",
    reference=_route_reference,
    fake=_route_fake,
)
define(
    "moe_experts(Tensor x, Tensor w13, Tensor w2, Tensor ids, Tensor weights, int act, Tensor? w13_bias=None, Tensor? w2_bias=None,"
    " float alpha=0.0, float limit=0.0) -> Tensor",
    stem="moe/moe_experts",
    public="pyllm.ops.moe.moe_experts",
    reference=_experts_reference,
    fake=_experts_fake,
    composition=_experts_cuda,
    kernel="csrc/moe/fused_experts",
)
