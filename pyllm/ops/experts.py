"""The routed gated MLPs of a mixture of experts as grouped GEMMs: only what was chosen is multiplied, and only those experts are read."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.dense_checks import name_of
from pyllm.ops.fused import ACTS, activation
from pyllm.ops.norm import quantize_fp8
from pyllm.ops.registry import check, define

E4M3 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)
MAX_EXPERTS, MAX_PAIRS, MAX_COLUMNS = 1024, 2**27, 32768
"""E, T * top_k and each of N and F at most (T * top_k: below it)."""


def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    act: str = "silu",
    *,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """`y[t] = sum_j weights[t, j] * round(w2[e] round(f(gate, up)) + w2_bias[e])`, where e is `ids[t, j]`.

    `[gate; up] = w13[e] x[t] + w13_bias[e]`, and f is `act(gate) * up` or, with clamp = (alpha, limit), `g sigmoid(alpha g) (u + 1)` with
    g = gate at most limit and u = up within -limit .. limit; act has no effect then.

    Args:
        x: `[T, N]` rows, bf16 or fp16; on CUDA the base and the row stride are multiples of 16 bytes.
        w13: `[E, 2F, N]`, contiguous, gate rows first, of x.dtype or e4m3. E up to 1024; N and F multiples of 8 (e4m3: 16) up to 32768.
        w2: `[E, N, F]`, contiguous, of w13.dtype. Weights are constants: the kernels read them before the kernels ahead of them have
            finished.
        ids: int32 `[T, top_k]`, contiguous. On CUDA an id outside 0..E-1 makes its token NaN, on a CPU it is an error.
        weights: fp32 `[T, top_k]`, contiguous.
        act: one of `ACTS`.
        w13_scale: fp32 `[E, 2F]`, w2_scale: fp32 `[E, N]`, dequantisation scales of the weights' rows; with e4m3, and needed there. The
            rows of x, and of f's results rounded to x.dtype, are then quantized as by `quantize_fp8`, mode "token".
        w13_bias: `[E, 2F]`, w2_bias: `[E, N]`, of x.dtype, contiguous.
        clamp: None or (alpha, limit), limit > 0.

    Returns:
        `[T, N]` of x.dtype, contiguous. Sums in fp32 (of e4m3 products the tensor core keeps about 14 bits); the sum over j in the order
        of j. A token's result does not depend on the other tokens.

    Raises:
        ValueError (RuntimeError on CUDA): sizes, dtypes, strides or alignment, arguments that do not belong together.
    """
    op = "fused_experts"
    check(act in ACTS, op, "act", f"is {act!r}, expected one of {', '.join(ACTS)}")
    check(clamp is None or (len(clamp) == 2 and clamp[1] > 0), op, "clamp", f"is {clamp!r}, expected None or (alpha, limit > 0)")
    alpha, limit = clamp or (0.0, 0.0)
    return torch.ops.pyllm.fused_experts(x, w13, w2, ids, weights, ACTS[act], w13_scale, w2_scale, w13_bias, w2_bias, alpha, limit)


def fused_experts_serves(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> bool:
    """Whether the kernels take these: sm_90, bf16 or fp16, sizes and layouts as `fused_experts` says."""
    if not x.is_cuda or x.dtype not in HALVES or torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    sizes = all(8 <= n <= MAX_COLUMNS and n % 8 == 0 for n in (x.shape[1], w2.shape[2]))
    dense = all(t.is_contiguous() for t in (w13, w2, ids, weights)) and x.stride(1) == 1 and (x.shape[0] <= 1 or x.stride(0) % 8 == 0)
    aligned = all(t.data_ptr() % 16 == 0 for t in (x, w13, w2))
    return sizes and dense and aligned and w13.shape[0] <= MAX_EXPERTS and ids.numel() < MAX_PAIRS and ids.shape[1] >= 1


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """`g sigmoid(alpha g) (u + 1)`, g at most limit and u within -limit .. limit."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def gated(gate_up: Tensor, act: int, alpha: float, limit: float) -> Tensor:
    """`[T, 2F]` (gate, then up) -> `[T, F]` in fp32: act(gate) * up, or the clamped one where limit > 0."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return clamped_swiglu(gate, up, alpha, limit) if limit > 0 else activation(gate, act) * up


def check_ids(op: str, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    check(ids.dtype == torch.int32, op, "ids", f"is {ids.dtype}, expected int32")
    check(weights.dtype == torch.float32, op, "weights", f"is {weights.dtype}, expected float32")
    check(ids.dim() == 2 and ids.shape[0] == x.shape[0], op, "ids", f"has shape {tuple(ids.shape)}, expected [T={x.shape[0]}, top_k]")
    check(ids.shape == weights.shape, op, "weights", f"has shape {tuple(weights.shape)}, expected {tuple(ids.shape)} (from ids)")


def check_known(op: str, ids: Tensor, experts: int) -> list[int]:
    """The experts that were chosen."""
    chosen = [int(e) for e in ids.unique().tolist()]
    for e in chosen:
        check(0 <= e < experts, op, "ids", f"holds {e}, expected 0..E-1={experts - 1}")
    return chosen


def _check_fused(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, act: int, rows: dict[str, Tensor | None], limit: float
) -> None:
    op = "fused_experts"
    check(x.dim() == 2, op, "x", f"has {x.dim()} dimensions, expected 2")
    check(x.dtype in HALVES, op, "x", f"is {name_of(x.dtype)}, expected bfloat16 or float16")
    check(w13.dim() == 3 and w13.shape[2] == x.shape[1], op, "w13", f"has shape {tuple(w13.shape)}, expected [E, 2F, N={x.shape[1]}]")
    check(w13.dtype in (x.dtype, E4M3), op, "w13", f"is {name_of(w13.dtype)}, expected {name_of(x.dtype)} or float8_e4m3fn")
    check(w2.dtype == w13.dtype, op, "w2", f"is {name_of(w2.dtype)}, expected {name_of(w13.dtype)} like w13")
    e4m3 = w13.dtype == E4M3
    (experts, n), f, granule = (w13.shape[0], x.shape[1]), w13.shape[1] // 2, 16 if e4m3 else 8
    check(w13.shape[1] % (2 * granule) == 0, op, "w13", f".size(1) is {w13.shape[1]}, expected 2F, a multiple of {2 * granule}")
    check(tuple(w2.shape) == (experts, n, f), op, "w2", f"has shape {tuple(w2.shape)}, expected {(experts, n, f)} (from x, w13)")
    for name, argument, size in (("x", ".size(1)", n), ("w2", ".size(2)", f)):
        good = granule <= size <= MAX_COLUMNS and size % granule == 0
        check(good, op, name, f"{argument} is {size}, expected a multiple of {granule} up to {MAX_COLUMNS}")
    check(1 <= experts <= MAX_EXPERTS, op, "w13", f".size(0) is {experts}, expected 1 to {MAX_EXPERTS}")
    check_ids(op, x, ids, weights)
    check(ids.shape[1] >= 1, op, "ids", f"has shape {tuple(ids.shape)}, expected at least one choice a token")
    check(0 <= act < len(ACTS), op, "act", f"is {act}, expected 0..{len(ACTS) - 1}")
    check(0.0 <= limit < float("inf"), op, "limit", f"is {limit}, expected finite and >= 0")
    check_extras(op, rows, (experts, 2 * f), (experts, n), x.dtype)
    given = [name for name in ("w13_scale", "w2_scale") if rows[name] is not None]
    check(len(given) == (2 if e4m3 else 0), op, "w13_scale", "and w2_scale belong to float8_e4m3fn weights, both of them")


def check_extras(op: str, rows: dict[str, Tensor | None], first: tuple[int, ...], second: tuple[int, ...], dtype: torch.dtype) -> None:
    """Scales and biases of the weights' rows, by name."""
    for name, t in rows.items():
        if t is None:
            continue
        shape, kind = first if name.startswith("w13") else second, torch.float32 if name.endswith("scale") else dtype
        check(tuple(t.shape) == shape, op, name, f"has shape {tuple(t.shape)}, expected {shape}")
        check(t.dtype == kind, op, name, f"is {name_of(t.dtype)}, expected {name_of(kind)}")


def _product(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """fp32; x is quantized where w is."""
    if scale is None:
        y = x.float() @ w.float().T
    else:
        q, x_scale = quantize_fp8(x, "token")
        y = (q.float() @ w.float().T) * x_scale[:, None] * scale
    return y if bias is None else y + bias.float()


def _fused_reference(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, act: int, w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None, w13_bias: Tensor | None = None, w2_bias: Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    rows = {"w13_scale": w13_scale, "w2_scale": w2_scale, "w13_bias": w13_bias, "w2_bias": w2_bias}
    _check_fused(x, w13, w2, ids, weights, act, rows, limit)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in check_known("fused_experts", ids, w13.shape[0]):
        one = {name: None if t is None else t[e] for name, t in rows.items()}
        token, choice = (ids == e).nonzero(as_tuple=True)
        inner = gated(_product(x[token], w13[e], one["w13_scale"], one["w13_bias"]), act, alpha, limit).to(x.dtype)
        out = _product(inner, w2[e], one["w2_scale"], one["w2_bias"]).to(x.dtype)
        y.index_add_(0, token, weights[token, choice, None] * out.float())
    return y.to(x.dtype)


def _fused_fake(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, act: int, w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None, w13_bias: Tensor | None = None, w2_bias: Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    rows = {"w13_scale": w13_scale, "w2_scale": w2_scale, "w13_bias": w13_bias, "w2_bias": w2_bias}
    _check_fused(x, w13, w2, ids, weights, act, rows, limit)
    return x.new_empty(x.shape)


define(
    "fused_experts(Tensor x, Tensor w13, Tensor w2, Tensor ids, Tensor weights, int act, Tensor? w13_scale=None, Tensor? w2_scale=None,"
    " Tensor? w13_bias=None, Tensor? w2_bias=None, float alpha=0.0, float limit=0.0) -> Tensor",
    stem="moe/fused_experts",
    public="pyllm.ops.experts.fused_experts",
    reference=_fused_reference,
    fake=_fused_fake,
)
