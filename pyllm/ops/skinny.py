"""The GEMM of decode: few rows of x against a weight that is streamed once, the norm before it and all that follows in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.fused import ACTS, activation
from pyllm.ops.registry import check, define

MAX_ROWS = 64
"""M at most."""
E4M3 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    act: str | None = None,
    gated: bool = False,
    softcap: float = 0.0,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`y[m, n] = round(f(sum_k x[m, k] * weight[n, k] * x_scale[m] * weight_scale[n] + bias[n]) + residual[m, n])`, M up to 64.

    f is act, then the soft limit `softcap * tanh(v / softcap)`. With norm_weight the product is
    `rsqrt(mean(x[m]^2) + eps) * sum_k round(x[m, k] * norm_weight[k]) * weight[n, k]`: RMSNorm, its row's factor behind the sum.
    Gated: the weight's first half of rows is the gate, its second half the up projection, and f is `act(gate) * up`.

    Args:
        x: `[M, K]` rows, bf16, fp16 or e4m3, M from 0 to 64. The base and the row stride are multiples of 16 bytes, K times the size of
            an element too.
        weight: `[N, K]` rows of x.dtype, aligned like x; gated: N = 2F, a multiple of 16. A constant: the kernel reads it before the
            kernels ahead of it in the stream have finished.
        bias: `[N]` of the result's dtype, contiguous.
        residual: `[M, N]` (gated `[M, F]`) rows of the result's dtype; not changed.
        x_scale: fp32 `[M]`, weight_scale: fp32 `[N]`, dequantisation scales; with e4m3 alone.
        act: one of `ACTS`, or None.
        softcap: 0 for none.
        norm_weight: `[K]` bf16 or fp32, contiguous, 16-byte aligned, a constant as weight is; with bf16 alone (`round(x * norm_weight)`
            would leave the range of fp16). eps belongs to it.
        dtype: of the result, with e4m3 alone: bf16 (the default) or fp16. Otherwise x.dtype.

    Returns:
        `[M, N]` (gated `[M, F]`), contiguous.

    Accumulation in fp32, one rounding at the end (bf16, fp16). There are three kernels. Up to 8 rows whose x fits the shared memory of an
    SM go to the stream (8 rows of up to 8192 elements of bf16 or fp16, fewer of longer ones; twice as many elements of e4m3). 9 to 16 rows
    without norm and gate against up to 256 rows of the weight for each SM go to the wide stream, and so do 3 to 8 rows of e4m3 against
    weights of 2^24 to 34 million elements, of K >= 12288 or, N >= 6336, K <= 2048. Everything else goes to the ring. In the last two the
    tensor core keeps about 14 bits of a sum of e4m3 products within 256 elements of K; those partial sums are added in fp32. The order of a
    sum depends on N, K, the GPU and the kernel alone: a row has the same bits alone and in any batch that the same kernel takes.

    Raises:
        ValueError (RuntimeError on CUDA): sizes, dtypes, strides or alignment, arguments that do not belong together.
    """
    check(act is None or act in ACTS, "skinny_linear", "act", f"is {act!r}, expected None or one of {', '.join(ACTS)}")
    _check_kind(x)
    result = dtype if dtype is not None else torch.bfloat16 if x.dtype == E4M3 else x.dtype
    check(result in HALVES, "skinny_linear", "dtype", f"is {result}, expected torch.bfloat16 or torch.float16")
    check(x.dtype in (E4M3, result), "skinny_linear", "dtype", f"is {result}, expected {x.dtype} like x")
    number, fp16 = -1 if act is None else ACTS[act], result == torch.float16
    scales = (x_scale, weight_scale)
    return torch.ops.pyllm.skinny_linear(x, weight, bias, residual, *scales, number, gated, softcap, norm_weight, eps, fp16)


def skinny_serves(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these two: sm_90, up to `MAX_ROWS` rows, bf16, fp16 or e4m3, dense rows at multiples of 16 bytes."""
    if x.dtype not in (*HALVES, E4M3) or x.shape[0] > MAX_ROWS or not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    return all(_misaligned(t) is None and t.data_ptr() % 16 == 0 for t in (x, weight))


def _misaligned(t: Tensor) -> str | None:
    """What keeps TMA from reading these rows."""
    item = t.element_size()
    if t.shape[1] == 0 or t.shape[1] * item % 16 != 0:
        return f".size(1) is {t.shape[1]}, expected a multiple of {16 // item}, at least {16 // item}"
    if t.stride(1) != 1:
        return f".stride(1) is {t.stride(1)}, expected 1"
    if t.shape[0] > 1 and t.stride(0) * item % 16 != 0:
        return f".stride(0) is {t.stride(0)} elements, expected a multiple of {16 // item}"
    return None


def _check_vector(name: str, t: Tensor | None, letter: str, size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if t is None:
        return
    op, names = "skinny_linear", " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    check(t.dim() == 1, op, name, f"has {t.dim()} dimensions, expected 1")
    check(t.shape[0] == size, op, name, f".size(0) is {t.shape[0]}, expected {letter}={size}")
    check(t.dtype in dtypes, op, name, f"is {str(t.dtype).removeprefix('torch.')}, expected {names}")
    check(t.is_contiguous(), op, name, "is not contiguous")


def _check_kind(x: Tensor) -> None:
    kind = str(x.dtype).removeprefix("torch.")
    check(x.dtype in (*HALVES, E4M3), "skinny_linear", "x", f"is {kind}, expected bfloat16 or float16 or float8_e4m3fn")


def _check_operands(x: Tensor, weight: Tensor, gated: bool) -> None:
    op = "skinny_linear"
    for name, t in (("x", x), ("weight", weight)):
        check(t.dim() == 2, op, name, f"has {t.dim()} dimensions, expected 2")
    _check_kind(x)
    check(weight.dtype == x.dtype, op, "weight", f"is {weight.dtype}, expected {x.dtype} like x".replace("torch.", ""))
    check(x.shape[0] <= MAX_ROWS, op, "x", f".size(0) is {x.shape[0]}, expected at most {MAX_ROWS}")
    check(weight.shape[1] == x.shape[1], op, "weight", f".size(1) is {weight.shape[1]}, expected K={x.shape[1]} (from x)")
    check(weight.shape[0] >= 1, op, "weight", ".size(0) is 0, expected >= 1")
    check(not gated or weight.shape[0] % 16 == 0, op, "weight", f".size(0) is {weight.shape[0]}, expected a multiple of 16 with gated")
    for name, t in (("x", x), ("weight", weight)):
        problem = _misaligned(t)
        check(problem is None, op, name, problem or "")


def _check_skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    act: int,
    gated: bool,
    softcap: float,
    norm_weight: Tensor | None,
    fp16: bool,
) -> tuple[int, torch.dtype]:
    """Columns and dtype of the result."""
    op = "skinny_linear"
    _check_operands(x, weight, gated)
    (m, k), n = x.shape, weight.shape[0]
    columns, dtype = n // 2 if gated else n, torch.float16 if fp16 else torch.bfloat16
    check(x.dtype in (E4M3, dtype), op, "fp16", f"is {fp16}, expected {not fp16} because x is {x.dtype}".replace("torch.", ""))
    check(-1 <= act <= 3, op, "act", f"is {act}, expected -1 to 3 (none, silu, gelu, gelu_tanh, relu2)")
    check(0.0 <= softcap < float("inf"), op, "softcap", f"is {softcap}, expected finite and >= 0")
    for name, scale, size, letter in (("x_scale", x_scale, m, "M"), ("weight_scale", weight_scale, n, "N")):
        check(scale is None or x.dtype == E4M3, op, name, "is given, expected None unless x is float8_e4m3fn")
        _check_vector(name, scale, letter, size, (torch.float32,))
    _check_vector("bias", bias, "N", n, (dtype,))
    if residual is not None:
        check(residual.shape == (m, columns), op, "residual", f"has shape {tuple(residual.shape)}, expected {(m, columns)}")
        check(residual.dtype == dtype, op, "residual", f"is {residual.dtype}, expected {dtype}".replace("torch.", ""))
        check(residual.stride(1) == 1, op, "residual", f".stride(1) is {residual.stride(1)}, expected 1")
    check(norm_weight is None or x.dtype == torch.bfloat16, op, "norm_weight", "is given, expected None unless x is bfloat16")
    _check_vector("norm_weight", norm_weight, "K", k, (torch.bfloat16, torch.float32))
    return columns, dtype


def _skinny_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    act: int = -1,
    gated: bool = False,
    softcap: float = 0.0,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    fp16: bool = False,
) -> Tensor:
    _, dtype = _check_skinny(x, weight, bias, residual, x_scale, weight_scale, act, gated, softcap, norm_weight, fp16)
    h = x.float()
    if norm_weight is None:
        y = h @ weight.float().T
    else:
        y = (h * norm_weight.float()).to(x.dtype).float() @ weight.float().T
        y = y * torch.rsqrt(h.square().mean(1, keepdim=True) + eps)
    if x_scale is not None:
        y = y * x_scale[:, None]
    if weight_scale is not None:
        y = y * weight_scale
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
    return y.to(dtype)


def _skinny_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    act: int = -1,
    gated: bool = False,
    softcap: float = 0.0,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    fp16: bool = False,
) -> Tensor:
    columns, dtype = _check_skinny(x, weight, bias, residual, x_scale, weight_scale, act, gated, softcap, norm_weight, fp16)
    return x.new_empty((x.shape[0], columns), dtype=dtype)


define(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, Tensor? x_scale=None, Tensor? weight_scale=None,"
    " int act=-1, bool gated=False, float softcap=0.0, Tensor? norm_weight=None, float eps=0.0, bool fp16=False) -> Tensor",
    stem="gemm/skinny_linear",
    public="pyllm.ops.skinny.skinny_linear",
    reference=_skinny_reference,
    fake=_skinny_fake,
)
