"""The products of prefill whose result is e4m3 with a given scale: what the next product of a model with static scales multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.dense_checks import check_bias, check_operands, check_scale, name_of
from pyllm.ops.fused import ACTS, activation
from pyllm.ops.norm import E4M3_MAX
from pyllm.ops.registry import check, check_flag, define

E4M3 = torch.float8_e4m3fn
OP = "linear_e4m3"


def linear_e4m3(
    x: Tensor,
    weight: Tensor,
    out_scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    act: str | None = None,
    gated: bool = False,
) -> Tensor:
    """`q[m, n] = e4m3(f(sum_k x[m, k] * weight[n, k] * x_scale * weight_scale + bias[n]) * (1 / out_scale))`, any M.

    f is act; gated: the weight's first half of rows is the gate, its second half the up projection, and f is `act(gate) * up`. The same as
    `quantize_fp8(y, "static", out_scale)` behind the product, but for y, which is not rounded to a dtype of 16 bits and not stored.

    Args:
        x: `[M, K]` rows, bf16 or e4m3, K a multiple of 8 (e4m3: of 16) from 16 on. The base and the row stride are multiples of 16 bytes.
        weight: `[N, K]` rows of x.dtype, aligned like x, N a multiple of 16 (gated: of 32); a constant, as in `dense_linear`.
        out_scale: fp32 `[1]`, the dequantisation scale of the result.
        bias: `[N]` bf16 or fp16, contiguous.
        x_scale: fp32 `[1]` or `[M]`, weight_scale: fp32 `[1]` or `[N]`, dequantisation scales; with e4m3, and there alone.
        act: one of `ACTS`, or None; needed with gated.

    Returns:
        `[M, N]` (gated `[M, N / 2]`) e4m3, contiguous; values past 448 out_scale are 448, NaN stays NaN.

    Its tiles are for many rows: of few, the product and a quantizing op take less time (docs/gemm.md).

    Raises:
        ValueError (RuntimeError on CUDA): sizes, dtypes, strides or alignment that disagree with the above.
    """
    check(act is None or act in ACTS, OP, "act", f"is {act!r}, expected None or one of {', '.join(ACTS)}")
    check_flag(OP, "gated", gated)
    number = -1 if act is None else ACTS[act]
    return torch.ops.pyllm.linear_e4m3(x, weight, out_scale, bias, x_scale, weight_scale, number, gated)


def _check(
    x: Tensor,
    weight: Tensor,
    out_scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    act: int,
    gated: bool,
) -> tuple[int, int]:
    """Shape of the result."""
    fp8 = x.dtype == E4M3
    check_operands(OP, x, weight, (torch.bfloat16, E4M3), 16 if fp8 else 8)
    m, n, unit = x.shape[0], weight.shape[0], 32 if gated else 16
    check(n % unit == 0, OP, "weight", f".size(0) is {n}, expected a multiple of {unit}{' with gated' if gated else ''}")
    check(-1 <= act <= 3, OP, "act", f"is {act}, expected -1 to 3 (none, silu, gelu, gelu_tanh, relu2)")
    check(act >= 0 or not gated, OP, "act", "is -1, expected 0 to 3 with gated")
    check(out_scale.dim() == 1, OP, "out_scale", f"has {out_scale.dim()} dimensions, expected 1")
    check(out_scale.dtype == torch.float32, OP, "out_scale", f"is {name_of(out_scale.dtype)}, expected float32")
    check(out_scale.shape[0] == 1, OP, "out_scale", f".size(0) is {out_scale.shape[0]}, expected 1")
    if bias is not None and bias.dtype != torch.float16:
        check_bias(OP, bias, n, torch.bfloat16)
    elif bias is not None:
        check_bias(OP, bias, n, torch.float16)
    for name, scale, letter, size in (("x_scale", x_scale, "M", m), ("weight_scale", weight_scale, "N", n)):
        state = "is missing, expected one with float8_e4m3fn" if fp8 else "is given, expected none with bfloat16"
        check((scale is not None) == fp8, OP, name, state)
        if scale is not None:
            check_scale(OP, name, scale, letter, size)
    return m, n // 2 if gated else n


def _reference(
    x: Tensor,
    weight: Tensor,
    out_scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    act: int,
    gated: bool,
) -> Tensor:
    _check(x, weight, out_scale, bias, x_scale, weight_scale, act, gated)
    y = x.float() @ weight.float().T
    if x_scale is not None and weight_scale is not None:
        y = y * x_scale[:, None] * weight_scale
    y = y if bias is None else y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = activation(gate, act) * up
    elif act >= 0:
        y = activation(y, act)
    return (y * (1.0 / out_scale)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _fake(
    x: Tensor,
    weight: Tensor,
    out_scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    act: int,
    gated: bool,
) -> Tensor:
    return x.new_empty(_check(x, weight, out_scale, bias, x_scale, weight_scale, act, gated), dtype=E4M3)


define(
    "linear_e4m3(Tensor x, Tensor weight, Tensor out_scale, Tensor? bias, Tensor? x_scale, Tensor? weight_scale, int act, bool gated)"
    " -> Tensor",
    stem="gemm/dense_e4m3",
    public="pyllm.ops.dense_e4m3.linear_e4m3",
    reference=_reference,
    fake=_fake,
)
