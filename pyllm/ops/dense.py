"""The GEMMs of prefill: many rows on the tensor cores, in bf16 and fp16, e4m3 and int8, with what follows in the epilogue."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.dense_checks import HALVES, check_bias, check_blocks, check_operands, check_rows, check_scale, name_of
from pyllm.ops.fused import ACTS, activation
from pyllm.ops.registry import check, check_flag, define

E4M3 = torch.float8_e4m3fn
BLOCK = 128
"""Columns of K (of x) and rows and columns (of the weight) that share a scale of `linear_fp8`."""
MAX_K_INT8 = 1 << 17


def dense_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
    gated: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """`y[m, n] = round(f(sum_k x[m, k] * weight[n, k] + bias[n]) + residual[m, n])`, any M.

    f is act, then the soft limit `softcap * tanh(v / softcap)`. Gated: the weight's first half of rows is the gate, its second half the
    up projection, and f is `act(gate) * up`.

    Args:
        x: `[M, K]` rows, bf16 or fp16, K a multiple of 8 from 16 on. The base and the row stride are multiples of 16 bytes.
        weight: `[N, K]` rows of x.dtype, aligned like x, N a multiple of 8 from 16 on; gated: N = 2F, a multiple of 16. A constant: the
            kernel may read it before the kernels ahead of it in the stream have finished; this holds for all three products here.
        bias: `[N]` of x.dtype, contiguous.
        residual: `[M, N]` (gated `[M, F]`) rows of x.dtype, aligned like x; not changed.
        act: one of `ACTS`, or None.
        softcap: 0 for none.

    Returns:
        `[M, N]` (gated `[M, F]`) of x.dtype, contiguous.

    Accumulation in fp32, one rounding at the end. The order of a sum may depend on M (small M cuts K over several SMs), but not from run
    to run.

    Raises:
        ValueError (RuntimeError on CUDA): sizes, dtypes, strides or alignment that disagree with the above.
    """
    check(act is None or act in ACTS, "dense_linear", "act", f"is {act!r}, expected None or one of {', '.join(ACTS)}")
    return torch.ops.pyllm.dense_linear(x, weight, bias, residual, -1 if act is None else ACTS[act], gated, softcap)


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    act: str | None = None,
    gated: bool = False,
) -> Tensor:
    """`y[m, n] = sum_k x[m, k] * x_scale * weight[n, k] * weight_scale + bias[n]` of e4m3 values; gated: `act(gate) * up` of that.

    Args:
        x: e4m3 `[M, K]` rows, K a multiple of 16 from 16 on. The base and the row stride are multiples of 16 bytes.
        weight: e4m3 `[N, K]` rows, aligned like x, N a multiple of 16 from 16 on; a constant, as in `dense_linear`.
        x_scale: fp32 dequantisation scales: `[1]` for all of x, `[M]` one per row (`quantize_fp8` mode token), or `[M, ceil(K / 128)]`
            one per 128 columns of a row (mode group).
        weight_scale: fp32: `[1]` or `[N]`; with scales of x by 128 columns `[ceil(N / 128), ceil(K / 128)]`, one per 128 x 128 block.
        bias: `[N]` of out_dtype, contiguous.
        out_dtype: bf16 or fp16.
        act: one of `ACTS` with gated, where the weight's first half of rows is the gate, its second half the up projection; else None.
            gated takes no scales by blocks.

    Returns:
        `[M, N]` (gated `[M, N / 2]`) of out_dtype, contiguous.

    Scales per tensor, row or column multiply the finished sum. The tensor cores of sm_90 keep about 14 bits of each product below the
    largest in a sum of e4m3 products, so the error of a sum is about 2^-13 of its largest partial sum; scales by blocks also bound that,
    since each 128 columns are added in fp32. One rounding at the end. The order of a sum may depend on M, but not from run to run.

    Raises:
        ValueError (RuntimeError on CUDA): sizes, dtypes, strides or alignment that disagree with the above.
    """
    check(out_dtype in HALVES, "linear_fp8", "out_dtype", f"is {out_dtype}, expected torch.bfloat16 or torch.float16")
    check_flag("linear_fp8", "gated", gated)
    check(act is None or act in ACTS, "linear_fp8", "act", f"is {act!r}, expected None or one of {', '.join(ACTS)}")
    check(
        (act is None) != gated,
        "linear_fp8",
        "act",
        f"is {act!r}, expected {'one of ' + ', '.join(ACTS) + ' with gated' if gated else None}",
    )
    fp16 = out_dtype == torch.float16
    if act is None:
        return torch.ops.pyllm.linear_fp8(x, weight, x_scale, weight_scale, bias, fp16)
    return torch.ops.pyllm.linear_fp8_gated(x, weight, x_scale, weight_scale, bias, fp16, ACTS[act])


def linear_int8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`y[m, n] = (sum_k x[m, k] * weight[n, k]) * x_scale[m] * weight_scale[n] + bias[n]` of int8 values; the sum is exact in int32.

    Args:
        x: int8 `[M, K]` rows, K a multiple of 16 from 16 to 2^17 - 16. The base and the row stride are multiples of 16 bytes.
        weight: int8 `[N, K]` rows, aligned like x, N a multiple of 16 from 16 on; a constant, as in `dense_linear`.
        x_scale: fp32 dequantisation scales, `[1]` for all of x or `[M]` one per row.
        weight_scale: fp32, `[1]` or `[N]`.
        bias: `[N]` of out_dtype, contiguous.
        out_dtype: bf16 or fp16.

    Returns:
        `[M, N]` of out_dtype, contiguous: the product of sum and scales in fp32, rounded once.
    Errors: as `linear_fp8`.
    """
    check(out_dtype in HALVES, "linear_int8", "out_dtype", f"is {out_dtype}, expected torch.bfloat16 or torch.float16")
    return torch.ops.pyllm.linear_int8(x, weight, x_scale, weight_scale, bias, out_dtype == torch.float16)


def _check_dense(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: int, gated: bool, softcap: float
) -> tuple[int, int]:
    """Shape of the result."""
    op = "dense_linear"
    check_operands(op, x, weight, HALVES, 8)
    m, n = x.shape[0], weight.shape[0]
    check(not gated or n % 16 == 0, op, "weight", f".size(0) is {n}, expected a multiple of 16 with gated")
    check(-1 <= act <= 3, op, "act", f"is {act}, expected -1 to 3 (none, silu, gelu, gelu_tanh, relu2)")
    check(0.0 <= softcap < float("inf"), op, "softcap", f"is {softcap}, expected finite and >= 0")
    check_bias(op, bias, n, x.dtype)
    columns = n // 2 if gated else n
    if residual is not None:
        check(residual.dim() == 2, op, "residual", f"has {residual.dim()} dimensions, expected 2")
        check(residual.shape[0] == m, op, "residual", f".size(0) is {residual.shape[0]}, expected M={m} (from x)")
        check(residual.shape[1] == columns, op, "residual", f".size(1) is {residual.shape[1]}, expected {columns}")
        check(residual.dtype == x.dtype, op, "residual", f"is {name_of(residual.dtype)}, expected {name_of(x.dtype)} like x")
        check_rows(op, "residual", residual)
    return m, columns


def _dense_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: int = -1,
    gated: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    _check_dense(x, weight, bias, residual, act, gated, softcap)
    y = x.float() @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if gated:
        y, up = y.chunk(2, dim=1)
        y = (y if act < 0 else activation(y, act)) * up
    elif act >= 0:
        y = activation(y, act)
    if softcap != 0.0:
        y = softcap * torch.tanh(y / softcap)
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)


def _dense_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: int = -1,
    gated: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    return x.new_empty(_check_dense(x, weight, bias, residual, act, gated, softcap))


def _check_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, fp16: bool, op: str = "linear_fp8"
) -> None:
    check_operands(op, x, weight, (E4M3,), 16)
    (m, k), n = x.shape, weight.shape[0]
    if x_scale.dim() == 2 and op == "linear_fp8":
        check_blocks(op, "x_scale", x_scale, m, -(-k // BLOCK))
        check_blocks(op, "weight_scale", weight_scale, -(-n // BLOCK), -(-k // BLOCK))
    else:
        check_scale(op, "x_scale", x_scale, "M", m)
        check_scale(op, "weight_scale", weight_scale, "N", n)
    check_bias(op, bias, n, HALVES[fp16])


def _fp8_product(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    if x_scale.dim() == 2:
        n, k = weight.shape
        wide = weight_scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        y = (x.float() * x_scale.repeat_interleave(BLOCK, 1)[:, :k]) @ (weight.float() * wide).T
    else:
        y = (x.float() @ weight.float().T) * x_scale[:, None] * weight_scale
    return y if bias is None else y + bias.float()


def _fp8_reference(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None, fp16: bool = False
) -> Tensor:
    _check_fp8(x, weight, x_scale, weight_scale, bias, fp16)
    return _fp8_product(x, weight, x_scale, weight_scale, bias).to(HALVES[fp16])


def _fp8_fake(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None, fp16: bool = False) -> Tensor:
    _check_fp8(x, weight, x_scale, weight_scale, bias, fp16)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=HALVES[fp16])


def _check_fp8_gated(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, fp16: bool, act: int) -> None:
    op = "linear_fp8_gated"
    _check_fp8(x, weight, x_scale, weight_scale, bias, fp16, op)
    check(0 <= act < len(ACTS), op, "act", f"is {act}, expected 0 to 3 (silu, gelu, gelu_tanh, relu2)")


def _fp8_gated_reference(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, fp16: bool, act: int
) -> Tensor:
    _check_fp8_gated(x, weight, x_scale, weight_scale, bias, fp16, act)
    gate, up = _fp8_product(x, weight, x_scale, weight_scale, bias).chunk(2, dim=1)
    return (activation(gate, act) * up).to(HALVES[fp16])


def _fp8_gated_fake(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, fp16: bool, act: int) -> Tensor:
    _check_fp8_gated(x, weight, x_scale, weight_scale, bias, fp16, act)
    return x.new_empty((x.shape[0], weight.shape[0] // 2), dtype=HALVES[fp16])


def _check_int8(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, fp16: bool) -> None:
    op = "linear_int8"
    check_operands(op, x, weight, (torch.int8,), 16)
    check(x.shape[1] < MAX_K_INT8, op, "x", f".size(1) is {x.shape[1]}, expected less than 2^17: sums are int32")
    check_scale(op, "x_scale", x_scale, "M", x.shape[0])
    check_scale(op, "weight_scale", weight_scale, "N", weight.shape[0])
    check_bias(op, bias, weight.shape[0], HALVES[fp16])


def _int8_reference(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None, fp16: bool = False
) -> Tensor:
    _check_int8(x, weight, x_scale, weight_scale, bias, fp16)
    # fp64 holds every sum exactly.
    y = (x.double() @ weight.double().T).float() * x_scale[:, None] * weight_scale
    return (y if bias is None else y + bias.float()).to(HALVES[fp16])


def _int8_fake(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None, fp16: bool = False) -> Tensor:
    _check_int8(x, weight, x_scale, weight_scale, bias, fp16)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=HALVES[fp16])


define(
    "dense_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, int act=-1, bool gated=False, float softcap=0.0)"
    " -> Tensor",
    stem="gemm/dense_linear",
    public="pyllm.ops.dense.dense_linear",
    reference=_dense_reference,
    fake=_dense_fake,
)
define(
    "linear_fp8(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias=None, bool fp16=False) -> Tensor",
    stem="gemm/dense_fp8",
    public="pyllm.ops.dense.linear_fp8",
    reference=_fp8_reference,
    fake=_fp8_fake,
)
define(
    "linear_fp8_gated(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias, bool fp16, int act) -> Tensor",
    stem="gemm/dense_fp8",
    public="pyllm.ops.dense.linear_fp8",
    reference=_fp8_gated_reference,
    fake=_fp8_gated_fake,
)
define(
    "linear_int8(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias=None, bool fp16=False) -> Tensor",
    stem="gemm/dense_int8",
    public="pyllm.ops.dense.linear_int8",
    reference=_int8_reference,
    fake=_int8_fake,
)
