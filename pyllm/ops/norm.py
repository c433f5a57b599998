"""Row-wise normalisation with optional residual add and FP8 output, and quantization to FP8.

Scales are dequantisation scales: `x ~= q * scale`, with `scale = max(absmax / 448, 1e-10)` and `q = e4m3(y * (1 / scale))`, rounded to
nearest even and saturated at +-448; both divisions are IEEE fp32. NaN does not count in absmax and becomes NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.registry import check, define

QUANT = {"none": 0, "token": 1, "static": 2, "tensor": 3, "group": 4}
"""Where a scale comes from: none (no FP8), token (each row), static (given), tensor (all of x), group (each 1x128 of a row)."""
GROUP = 128
MAX_N = 32768
E4M3_MAX = 448.0
MIN_SCALE = 1e-10
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

Pair = tuple[Tensor, Tensor]
Maybe = Tensor | None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    quant: str | None = None,
    scale: Tensor | None = None,
) -> Tensor | Pair:
    """Root-mean-square norm of each row: `y = h * rsqrt(mean(h^2) + eps) * weight`, `h = x`, or `h = round(x + residual)` if given.

    Args:
        x: `[T, N]` bf16, fp16 or fp32 rows; N a multiple of 8 up to 32768; the base and the row stride multiples of 16 bytes.
        weight: `[N]` of x.dtype or fp32, contiguous, 16-byte aligned. A constant: the kernel may read it before the kernels ahead of
            it in the stream have finished.
        eps: added to the mean of squares.
        residual: `[T, N]` rows of x.dtype, **updated in place** to `h`; its rows must not overlap.
        quant: None: the result has x.dtype. "token": e4m3 with a scale per row. "static": e4m3 with the given scale.
        scale: fp32 `[1]` on the device, with quant="static" alone.

    Returns:
        `[T, N]` of x.dtype, or e4m3, contiguous; with quant="token" the pair of it and the scales, fp32 `[T]`.

    All in fp32, rounded once. The order of the sum depends on N alone: a row has the same bits alone and in any batch.

    Raises:
        ValueError (RuntimeError on CUDA): shape, dtype, width, stride or alignment; a scale without "static" or none with it.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    out, scales = torch.ops.pyllm.rms_norm(x, weight, eps, residual, _norm_quant("rms_norm", eps, quant), scale)
    return (out, scales) if quant == "token" else out


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    quant: str | None = None,
    scale: Tensor | None = None,
) -> Tensor | Pair:
    """Layer norm of each row: `y = (h - mean(h)) * rsqrt(var(h) + eps) * weight + bias`, `h = x`, or `round(x + residual)` if given.

    var is the mean of the squared centred values, taken in a second pass: safe where |mean| is far above the spread.

    Args:
        x, eps, residual, quant, scale: as in `rms_norm`; residual is **updated in place** to `h`.
        weight: `[N]` of x.dtype or fp32, contiguous, 16-byte aligned; a constant, as in `rms_norm`.
        bias: like weight, of the same dtype; None is 0.

    Returns:
        As `rms_norm`. All in fp32, rounded once; the order of the sums depends on N alone.

    Raises:
        ValueError (RuntimeError on CUDA): as `rms_norm`; bias of another dtype than weight.

    Source: Ba, Kiros and Hinton 2016, "Layer Normalization".
    """
    out, scales = torch.ops.pyllm.layer_norm(x, weight, bias, eps, residual, _norm_quant("layer_norm", eps, quant), scale)
    return (out, scales) if quant == "token" else out


def quantize_fp8(x: Tensor, mode: str, scale: Tensor | None = None) -> Pair:
    """FP8 (e4m3) values of x with their scales: `scale = max(absmax / 448, 1e-10)`, `q = e4m3(x * (1 / scale))`.

    Args:
        x: `[T, N]` bf16, fp16 or fp32 rows; N a multiple of 8 up to 32768; the base and the row stride multiples of 16 bytes.
        mode: "token": absmax of each row. "group": of each 1x128 of a row, the last one possibly shorter. "tensor": of all of x, with
            no host synchronisation. "static": the given scale.
        scale: fp32 `[1]` on the device, with mode "static" alone.

    Returns:
        q `[T, N]` e4m3, contiguous; scale fp32: `[T]` token, `[T, ceil(N/128)]` group, `[1]` tensor and static (a copy).

    Bits are the same on the CPU and on CUDA: a maximum has no order, and each step is rounded as IEEE says. An infinite element makes
    its scale infinite: then finite elements become 0 and infinite ones NaN.

    Raises:
        ValueError (RuntimeError on CUDA): shape, dtype, width, stride or alignment; a scale without "static" or none with it.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
    """
    known = {name: number for name, number in QUANT.items() if number != 0}
    check(mode in known, "quantize_fp8", "mode", f"is {mode!r}, expected one of {', '.join(known)}")
    return torch.ops.pyllm.quantize_fp8(x, known[mode], scale)


def _norm_quant(op: str, eps: float, quant: str | None) -> int:
    check(0 <= eps < float("inf"), op, "eps", f"is {eps}, expected finite and at least 0")
    check(quant in (None, "token", "static"), op, "quant", f"is {quant!r}, expected None, 'token' or 'static'")
    return QUANT[quant or "none"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_rows(op: str, name: str, x: Tensor) -> None:
    check(x.dim() == 2, op, name, f"has {x.dim()} dimensions, expected 2")
    check(x.dtype in FLOATS, op, name, f"is {_name(x.dtype)}, expected bfloat16 or float16 or float32")
    n = x.shape[1]
    check(n % 8 == 0 and 8 <= n <= MAX_N, op, name, f".size(1) is {n}, expected a multiple of 8 from 8 to {MAX_N}")
    check(x.stride(1) == 1, op, name, f".stride(1) is {x.stride(1)}, expected 1")
    item = x.element_size()
    aligned = x.shape[0] <= 1 or x.stride(0) * item % 16 == 0
    check(aligned, op, name, f".stride(0) is {x.stride(0)} elements, expected a multiple of {16 // item}")


def _check_columns(op: str, name: str, w: Tensor, x: Tensor) -> None:
    check(w.dim() == 1, op, name, f"has {w.dim()} dimensions, expected 1")
    check(w.shape[0] == x.shape[1], op, name, f".size(0) is {w.shape[0]}, expected N={x.shape[1]} (from x)")
    check(w.is_contiguous(), op, name, "is not contiguous")
    check(w.dtype in (x.dtype, torch.float32), op, name, f"is {_name(w.dtype)}, expected {_name(x.dtype)} like x or float32")


def _check_scale(op: str, scale: Maybe, expected: bool) -> None:
    state = "is missing, expected a float32 tensor [1] with quant static" if expected else "is given, expected none unless quant is static"
    check((scale is not None) == expected, op, "scale", state)
    if scale is not None:
        check(scale.dim() == 1, op, "scale", f"has {scale.dim()} dimensions, expected 1")
        check(scale.shape[0] == 1, op, "scale", f".size(0) is {scale.shape[0]}, expected 1")
        check(scale.dtype == torch.float32, op, "scale", f"is {_name(scale.dtype)}, expected float32")


def _check_norm(op: str, x: Tensor, weight: Tensor, bias: Maybe, residual: Maybe, quant: int, scale: Maybe) -> None:
    _check_rows(op, "x", x)
    _check_columns(op, "weight", weight, x)
    if bias is not None:
        _check_columns(op, "bias", bias, x)
        check(bias.dtype == weight.dtype, op, "bias", f"is {_name(bias.dtype)}, expected {_name(weight.dtype)} like weight")
    if residual is not None:
        _check_rows(op, "residual", residual)
        for i, letter in enumerate("TN"):
            same = residual.shape[i] == x.shape[i]
            check(same, op, "residual", f".size({i}) is {residual.shape[i]}, expected {letter}={x.shape[i]} (from x)")
        check(residual.dtype == x.dtype, op, "residual", f"is {_name(residual.dtype)}, expected {_name(x.dtype)} like x")
        apart = x.shape[0] <= 1 or residual.stride(0) >= x.shape[1]
        check(apart, op, "residual", f".stride(0) is {residual.stride(0)}, expected at least N={x.shape[1]}: its rows are written")
    check(0 <= quant <= 2, op, "quant", f"is {quant}, expected 0 (none), 1 (token) or 2 (static)")
    _check_scale(op, scale, quant == QUANT["static"])


def _check_quantize(x: Tensor, mode: int, scale: Maybe) -> None:
    _check_rows("quantize_fp8", "x", x)
    check(1 <= mode <= 4, "quantize_fp8", "mode", f"is {mode}, expected 1 (token), 2 (static), 3 (tensor) or 4 (group)")
    _check_scale("quantize_fp8", scale, mode == QUANT["static"])


def _scale_of(y: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    absmax = torch.where(torch.isnan(y), 0.0, y.abs()).amax(dim, keepdim=True)
    return (absmax / E4M3_MAX).clamp(min=MIN_SCALE)


def _to_e4m3(y: Tensor, scale: Tensor) -> Tensor:
    return (y * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _add_residual(x: Tensor, residual: Maybe) -> Tensor:
    if residual is None:
        return x.float()
    residual.copy_((x.float() + residual.float()).to(x.dtype))
    return residual.float()


def _finish(y: Tensor, x: Tensor, quant: int, scale: Maybe) -> Pair:
    if scale is not None:
        return _to_e4m3(y, scale), y.new_empty(0)
    if quant == QUANT["token"]:
        scales = _scale_of(y, 1)
        return _to_e4m3(y, scales), scales.squeeze(1)
    return y.to(x.dtype, copy=True), y.new_empty(0)


def _rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Maybe = None, quant: int = 0, scale: Maybe = None) -> Pair:
    _check_norm("rms_norm", x, weight, None, residual, quant, scale)
    h = _add_residual(x, residual)
    y = h * torch.rsqrt(h.square().mean(1, keepdim=True) + eps) * weight.float()
    return _finish(y, x, quant, scale)


def _layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Maybe, eps: float, residual: Maybe = None, quant: int = 0, scale: Maybe = None
) -> Pair:
    _check_norm("layer_norm", x, weight, bias, residual, quant, scale)
    h = _add_residual(x, residual)
    h = h - h.mean(1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(1, keepdim=True) + eps) * weight.float()
    return _finish(y if bias is None else y + bias.float(), x, quant, scale)


def _quantize_fp8_reference(x: Tensor, mode: int, scale: Maybe = None) -> Pair:
    _check_quantize(x, mode, scale)
    y, (rows, n) = x.float(), x.shape
    if scale is not None:
        return _to_e4m3(y, scale), scale.clone()
    if mode == QUANT["token"]:
        scales = _scale_of(y, 1)
        return _to_e4m3(y, scales), scales.squeeze(1)
    if mode == QUANT["tensor"]:
        scales = _scale_of(y, (0, 1)) if rows else y.new_full((1, 1), MIN_SCALE)
        return _to_e4m3(y, scales), scales.reshape(1)
    groups = -(-n // GROUP)
    padded = torch.nn.functional.pad(y, (0, groups * GROUP - n)).view(rows, groups, GROUP)
    scales = _scale_of(padded, 2)
    return _to_e4m3(padded, scales).view(rows, groups * GROUP)[:, :n].contiguous(), scales.squeeze(2)


def _norm_result(x: Tensor, quant: int) -> Pair:
    out = x.new_empty(x.shape, dtype=torch.float8_e4m3fn if quant else x.dtype)
    return out, x.new_empty(x.shape[0] if quant == QUANT["token"] else 0, dtype=torch.float32)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, residual: Maybe = None, quant: int = 0, scale: Maybe = None) -> Pair:
    _check_norm("rms_norm", x, weight, None, residual, quant, scale)
    return _norm_result(x, quant)


def _layer_norm_fake(
    x: Tensor, weight: Tensor, bias: Maybe, eps: float, residual: Maybe = None, quant: int = 0, scale: Maybe = None
) -> Pair:
    _check_norm("layer_norm", x, weight, bias, residual, quant, scale)
    return _norm_result(x, quant)


def _quantize_fp8_fake(x: Tensor, mode: int, scale: Maybe = None) -> Pair:
    _check_quantize(x, mode, scale)
    rows, n = x.shape
    shape = {QUANT["token"]: (rows,), QUANT["group"]: (rows, -(-n // GROUP))}.get(mode, (1,))
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(shape, dtype=torch.float32)


define(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual=None, int quant=0, Tensor? scale=None) -> (Tensor, Tensor)",
    stem="norm/rms_norm",
    public="pyllm.ops.norm.rms_norm",
    reference=_rms_norm_reference,
    fake=_rms_norm_fake,
)
define(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps, Tensor(a!)? residual=None, int quant=0, Tensor? scale=None)"
    " -> (Tensor, Tensor)",
    stem="norm/layer_norm",
    public="pyllm.ops.norm.layer_norm",
    reference=_layer_norm_reference,
    fake=_layer_norm_fake,
)
define(
    "quantize_fp8(Tensor x, int mode, Tensor? scale=None) -> (Tensor, Tensor)",
    stem="norm/quantize_fp8",
    public="pyllm.ops.norm.quantize_fp8",
    reference=_quantize_fp8_reference,
    fake=_quantize_fp8_fake,
)
