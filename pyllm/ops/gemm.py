"""Matrix products: the fixed contract of every Linear, and the product with the norm before it and the activation behind it.

On CUDA both choose: few rows go to the kernel `skinny_linear`, many to `dense_linear`, the rest to cuBLAS and the separate ops.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm.ops.dense_checks import dense_serves
from pyllm.ops.fused import ACTS, activation
from pyllm.ops.registry import check, define
from pyllm.ops.skinny import skinny_linear, skinny_serves

NORMS = {"rms": 0, "layer": 1}
"""Names of the norms and their numbers in the op schema."""
STREAM_ROWS, STREAM_COLUMNS, STREAM_X = 8, 1024, 2**16
"""`linear` and `norm_linear` give x of up to so many rows and elements to `skinny_linear`, against weights of at least so many rows: there
bf16 was measured at 1.16x to 2.0x the speed of cuBLAS inside a CUDA graph with one row, 1.05x to 2.0x with four, 1.04x to 1.8x with
eight."""
MORE_ROWS, MORE_K, MORE_COLUMNS = 16, 1024, 2**15
"""The same for up to so many rows of at least so many elements against weights of up to so many rows: 1.03x to 1.37x with 16 rows."""
CHAIN_ROWS = 0
"""Rows up to which layers take norm, gate and residual into the product. None: a step of Llama 3.2 1B takes 873 us with them and 883
without for one request, 1,008 and 990 for four; one of Llama 3.1 8B 4,289 and 4,297, 4,563 and 4,541 (1k keys; plain products
of more than 2^26 elements were cuBLAS's then)."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DENSE_ROWS, DENSE_COLUMNS = 1024, 2048
"""T and N from which `dense_linear` was measured at 0.97x to 1.11x the speed of cuBLAS, 1.02x on average."""
DENSE_DECODE_ROWS, DENSE_DECODE_WEIGHT = range(128, 257), 2**26
"""T and elements of the weight for which it is taken in decode steps too, behind a norm: 1.04x to 1.08x for 128 rows of (28672, 4096),
1.01x for 256; 0.93x for 512, and less for smaller weights."""


FEW_ROWS, FEW_COLUMNS = range(17, 65), 1024
"""T and N for which `dense_linear` has tiles of few rows: 0.98x to 1.49x the speed of cuBLAS with 64 rows of seventeen weights, 1.13x on
average, 1.00x to 1.54x with 32, 1.13x on average."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]`.

    Shapes: x `[T, K]`, weight `[N, K]`, bias `[N]` -> y `[T, N]`. Dtypes: one of bf16, fp16, fp32 for all; accumulation in fp32, one
    rounding.
    Errors: sizes or dtypes that disagree, by name. CUDA: `skinny_linear` for few rows of bf16 or fp16 where it serves the operands (sm_90,
    dense rows at multiples of 16 bytes): up to 8 rows and 2^16 elements of x, up to 16 rows with K from 1024 and N up to 2^15,
    N >= 1024 (`streams`); `dense_linear` for 17 to 64 rows, from 1024 rows and N = 2048 on and for 128 to 256 rows of
    large weights (`dense_wins`); otherwise cuBLAS through torch. weight and bias are constants: a kernel may read them before the kernels
    ahead of it in the stream have finished.
    """
    return torch.ops.pyllm.linear(x, weight, bias)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_bias: Tensor | None = None,
    act: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    kind: str = "rms",
) -> Tensor:
    """`y = act(norm(x) weight^T + bias) + residual`; gated: `act(gate) * up + residual`, the weight's first half of rows the gate.

    Args:
        x: `[T, K]` bf16, fp16 or fp32 rows, as the norm takes them (`rms_norm`, `layer_norm`); eps and norm_weight `[K]` too.
        weight: `[N, K]` of x.dtype; gated: N = 2F, a multiple of 16. bias: `[N]` of x.dtype.
        norm_bias: `[K]` of norm_weight's dtype, with kind="layer" alone.
        act: one of `ACTS`, or None.
        residual: `[T, N]` (gated `[T, F]`) rows of x.dtype; not changed.
        kind: "rms" or "layer".

    Returns:
        `[T, N]` (gated `[T, F]`) of x.dtype, contiguous.

    Rounding: the rows that are multiplied are rounded to x.dtype once, as `norm(x)`, or, where one kernel does it all (kind="rms",
    bf16, up to 8 rows as in `linear`, operands that `skinny_linear` serves), as `x * norm_weight` with
    the row's factor behind the sum. There the result is rounded once; the separate ops, which serve everything else on CUDA, round the
    product, the activation and the sum with the residual.

    Raises:
        ValueError (RuntimeError on CUDA): sizes, dtypes, strides or alignment, arguments that do not belong together.
    """
    check(act is None or act in ACTS, "norm_linear", "act", f"is {act!r}, expected None or one of {', '.join(ACTS)}")
    check(kind in NORMS, "norm_linear", "kind", f"is {kind!r}, expected one of {', '.join(NORMS)}")
    number = -1 if act is None else ACTS[act]
    return torch.ops.pyllm.norm_linear(x, norm_weight, eps, weight, bias, norm_bias, number, gated, residual, NORMS[kind])


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, op: str = "linear") -> None:
    check(x.dim() == 2, op, "x", f"has {x.dim()} dimensions, expected 2")
    check(x.dtype in FLOATS, op, "x", f"is {x.dtype}, expected bfloat16, float16 or float32")
    check(weight.dim() == 2, op, "weight", f"has {weight.dim()} dimensions, expected 2")
    check(weight.shape[1] == x.shape[1], op, "weight", f".size(1) is {weight.shape[1]}, expected K={x.shape[1]} (from x)")
    check(weight.dtype == x.dtype, op, "weight", f"is {weight.dtype}, expected {x.dtype} like x")
    if bias is not None:
        check(bias.shape == weight.shape[:1], op, "bias", f"has shape {tuple(bias.shape)}, expected N={weight.shape[0]} (from weight)")
        check(bias.dtype == x.dtype, op, "bias", f"is {bias.dtype}, expected {x.dtype} like x")


def _linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_linear(x, weight, bias)
    return x.new_empty(x.shape[0], weight.shape[0])


def streams(m: int, n: int, k: int) -> bool:
    """Whether the product of `[m, k]` and `[n, k]` goes to skinny_linear, dtypes and alignment permitting."""
    few = m <= STREAM_ROWS and m * k <= STREAM_X
    more = m <= MORE_ROWS and k >= MORE_K and n <= MORE_COLUMNS
    return n >= STREAM_COLUMNS and (few or more)


def dense_wins(m: int, n: int, k: int) -> bool:
    """Whether the product of `[m, k]` and `[n, k]` goes to dense_linear, dtypes and alignment permitting."""
    few = m in FEW_ROWS and n >= FEW_COLUMNS
    return few or (m >= DENSE_ROWS and n >= DENSE_COLUMNS) or (m in DENSE_DECODE_ROWS and n * k >= DENSE_DECODE_WEIGHT)


def norm_streams(m: int, n: int, k: int, gated: bool) -> bool:
    """Whether layers leave the norm ahead of such a product (and the gate behind it) to skinny_linear; up to `CHAIN_ROWS` rows, and a gated
    product up to twice the size of others, since the gate saves two launches."""
    return m <= CHAIN_ROWS and streams(m, n, k // 2 if gated else k)


def add_streams(m: int, n: int, k: int) -> bool:
    """Whether layers leave the residual behind such a product to skinny_linear."""
    return m <= CHAIN_ROWS and streams(m, n, k)


def _streams(x: Tensor, weight: Tensor) -> bool:
    return streams(x.shape[0], *weight.shape) and skinny_serves(x, weight)


def _linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_linear(x, weight, bias)
    if _streams(x, weight):
        return skinny_linear(x, weight, None if bias is None else bias.contiguous())
    if dense_wins(x.shape[0], *weight.shape) and dense_serves(x, weight):
        return torch.ops.pyllm.dense_linear(x, weight, None if bias is None else bias.contiguous())
    return F.linear(x, weight, bias)


def _check_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    act: int,
    gated: bool,
    residual: Tensor | None,
    kind: int,
) -> int:
    """Columns of the result. The norm checks its own arguments."""
    op = "norm_linear"
    _check_linear(x, weight, bias, op)
    n = weight.shape[0]
    check(-1 <= act <= 3, op, "act", f"is {act}, expected -1 to 3 (none, silu, gelu, gelu_tanh, relu2)")
    check(kind in NORMS.values(), op, "kind", f"is {kind}, expected 0 (rms) or 1 (layer)")
    check(norm_bias is None or kind == NORMS["layer"], op, "norm_bias", "is given, expected None unless kind is 1 (layer)")
    check(norm_weight.shape == x.shape[1:], op, "norm_weight", f"has shape {tuple(norm_weight.shape)}, expected K={x.shape[1]} (from x)")
    check(not gated or n % 16 == 0, op, "weight", f".size(0) is {n}, expected a multiple of 16 with gated")
    check(not gated or act >= 0, op, "act", "is missing, expected one with gated")
    columns = n // 2 if gated else n
    if residual is not None:
        want = (x.shape[0], columns)
        check(residual.shape == want, op, "residual", f"has shape {tuple(residual.shape)}, expected {want}")
        check(residual.dtype == x.dtype, op, "residual", f"is {residual.dtype}, expected {x.dtype} like x")
    return columns


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: int) -> Tensor:
    if kind == NORMS["rms"]:
        return torch.ops.pyllm.rms_norm(x, weight, eps)[0]
    return torch.ops.pyllm.layer_norm(x, weight, bias, eps)[0]


def _norm_linear_reference(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_bias: Tensor | None = None,
    act: int = -1,
    gated: bool = False,
    residual: Tensor | None = None,
    kind: int = 0,
) -> Tensor:
    _check_norm_linear(x, weight, bias, norm_weight, norm_bias, act, gated, residual, kind)
    h = _norm(x, norm_weight, norm_bias, eps, kind)
    y = h.float() @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = activation(gate, act) * up
    elif act >= 0:
        y = activation(y, act)
    return (y if residual is None else y + residual.float()).to(x.dtype)


def _norm_linear_fake(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_bias: Tensor | None = None,
    act: int = -1,
    gated: bool = False,
    residual: Tensor | None = None,
    kind: int = 0,
) -> Tensor:
    columns = _check_norm_linear(x, weight, bias, norm_weight, norm_bias, act, gated, residual, kind)
    return x.new_empty(x.shape[0], columns)


def _norm_linear_cuda(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_bias: Tensor | None = None,
    act: int = -1,
    gated: bool = False,
    residual: Tensor | None = None,
    kind: int = 0,
) -> Tensor:
    _check_norm_linear(x, weight, bias, norm_weight, norm_bias, act, gated, residual, kind)
    fits = kind == NORMS["rms"] and x.dtype == torch.bfloat16 and norm_weight.data_ptr() % 16 == 0 and x.shape[0] <= STREAM_ROWS
    if fits and _streams(x, weight):
        return torch.ops.pyllm.skinny_linear(x, weight, bias, residual, None, None, act, gated, 0.0, norm_weight, eps)
    h = _norm(x, norm_weight, norm_bias, eps, kind)
    y = torch.ops.pyllm.linear(h, weight, bias)
    if gated:
        y = torch.ops.pyllm.act_mul(y, act)
    elif act >= 0:
        y = torch.ops.pyllm.act(y, act)
    return y if residual is None else y + residual


define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    stem="gemm/linear",
    public="pyllm.ops.gemm.linear",
    reference=_linear_reference,
    fake=_linear_fake,
    composition=_linear_cuda,
)
define(
    "norm_linear(Tensor x, Tensor norm_weight, float eps, Tensor weight, Tensor? bias=None, Tensor? norm_bias=None, int act=-1,"
    " bool gated=False, Tensor? residual=None, int kind=0) -> Tensor",
    stem="gemm/norm_linear",
    public="pyllm.ops.gemm.norm_linear",
    reference=_norm_linear_reference,
    fake=_norm_linear_fake,
    composition=_norm_linear_cuda,
)
