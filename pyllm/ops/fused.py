"""Element-wise ops around the GEMMs: activations, gated activations, the logit soft cap and the token embedding.

All of them compute in fp32 and round once to the output dtype. Rows may be strided. But for softcap, whose vocabularies are odd, a
row starts at a multiple of 16 bytes and its length is a multiple of 8 elements: the kernels move 16 bytes per access.
"""

from __future__ import annotations

import math

import torch

from pyllm.ops.norm import MAX_N, QUANT
from pyllm.ops.registry import check, define

ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}  # names and their numbers in the op schemas
MAX_VOCAB = 2**27  # columns of softcap at most

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """`bfloat16 or float16`, as the native checks print it."""
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_dtype(op: str, name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """`x` has one of `dtypes`."""
    check(x.dtype in dtypes, op, name, f"is {dtype_names((x.dtype,))}, expected {dtype_names(dtypes)}")


def check_rows(op: str, name: str, x: torch.Tensor, multiple: int = 8) -> None:
    """`x` is a matrix of dense rows that start at multiples of 16 bytes and are a multiple of `multiple` elements long."""
    check(x.dim() == 2, op, name, f"has {x.dim()} dimensions, expected 2")
    check_dtype(op, name, x, FLOATS)
    check(
        x.shape[1] > 0 and x.shape[1] % multiple == 0,
        op,
        name,
        f".size(1) is {x.shape[1]}, expected a multiple of {multiple}, at least {multiple}",
    )
    check(x.stride(1) == 1, op, name, f".stride(1) is {x.stride(1)}, expected 1")
    item = x.element_size()
    aligned = x.shape[0] <= 1 or x.stride(0) * item % 16 == 0
    check(aligned, op, name, f".stride(0) is {x.stride(0)} elements, expected a multiple of {16 // item}")


def act(x: torch.Tensor, act: str = "silu") -> torch.Tensor:
    """Activation of each element: `out = round(f(x))`.

    silu: x / (1 + exp(-x)); gelu: x * Phi(x), Phi the normal distribution function (the erf form);
    gelu_tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))); relu2: max(x, 0)^2.

    Args:
        x: `[T, F]` bf16, fp16 or fp32 rows; F a multiple of 8; rows may be strided by a multiple of 16 bytes.
        act: one of `ACTS`.

    Returns:
        `[T, F]` of x.dtype, contiguous.

    Limits at infinity are the mathematical ones: silu, gelu and gelu_tanh of -inf are 0, of +inf are +inf; NaN stays NaN.
    fp32 inside, rounded once; the kernel's own error is below 2^-14 of the result for bf16 and fp16 (hardware exp2 and reciprocal)
    and a few fp32 roundings for fp32. Results below 2^-119 in magnitude may come out as zero.

    Raises:
        ValueError (RuntimeError on CUDA): wrong number of dimensions, dtype, width, alignment or activation.

    Source: Hendrycks and Gimpel 2016 (GELU), Elfwing et al. 2017 (SiLU), So et al. 2021 (squared ReLU).
    """
    return torch.ops.pyllm.act(x, _act_number("act", act))


def act_mul(x: torch.Tensor, act: str = "silu") -> torch.Tensor:
    """Gated activation: `out = round(f(gate) * up)` with `gate = x[:, :F]` and `up = x[:, F:]`.

    Args:
        x: `[T, 2F]` bf16, fp16 or fp32 rows; F a multiple of 8; rows may be strided by a multiple of 16 bytes.
        act: one of `ACTS`; formulas, limits and accuracy as in `act`.

    Returns:
        `[T, F]` of x.dtype, contiguous. fp32 inside and one rounding at the end: the activation is not rounded before the product.
        A zero of f (say at gate = -inf) times an infinite `up` is NaN.

    Raises:
        ValueError (RuntimeError on CUDA): wrong number of dimensions, dtype, width, alignment or activation.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    return torch.ops.pyllm.act_mul(x, _act_number("act_mul", act))


def act_mul_fp8(x: torch.Tensor, act: str = "silu", scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 rows of a gated activation: `quantize_fp8(act_mul(x, act), "token")` in one op, with the same bits; or with a given scale.

    Args:
        x: `[T, 2F]` rows as in `act_mul`; F up to 32768.
        act: one of `ACTS`.
        scale: fp32 `[1]` on the device: of all rows, as in `quantize_fp8` mode static.

    Returns:
        q `[T, F]` e4m3, contiguous, and the dequantisation scale of each row, fp32 `[T]`, or the given one. The activation is rounded to
        x.dtype first, as `act_mul` does; scale and rounding are those of `quantize_fp8`.

    Raises:
        ValueError (RuntimeError on CUDA): wrong number of dimensions, dtype, width, alignment or activation.
    """
    number = _act_number("act_mul_fp8", act)
    return torch.ops.pyllm.act_mul_fp8(x, number) if scale is None else (torch.ops.pyllm.act_mul_fp8_static(x, number, scale), scale)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Soft limit of logits: `out = round(cap * tanh(x / cap))`.

    Args:
        x: `[T, V]` bf16, fp16 or fp32 rows; any V from 1 to 2^27; rows may start at any element and have any stride.
        cap: finite and positive.

    Returns:
        `[T, V]` of x.dtype, contiguous; +-inf give +-cap, NaN stays NaN. fp32 inside, rounded once; the kernel's own error is
        below 2^-10.9 of the result for bf16 (hardware tanh) and a dozen fp32 roundings for fp16 and fp32. Fastest where the rows lie
        end to end, or start and end at multiples of 16 bytes.

    Raises:
        ValueError (RuntimeError on CUDA): wrong number of dimensions, dtype, width, stride of a row's elements or cap.

    Source: Gemma Team 2024, "Gemma 2", section 2.
    """
    return torch.ops.pyllm.softcap(x, cap)


def embed_tokens(ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, first: int = 0) -> torch.Tensor:
    """Rows of the embedding table: `out[t] = round(weight[ids[t] - first] * scale)`, zeros where `ids[t] - first` is outside `[0, V)`.

    The zeros are what a vocabulary-parallel shard needs: rank r holds rows `first .. first + V - 1` of the table, and the sum over
    the ranks is the embedding. An id that no shard holds (a padding id of -1, say) gives zeros as well.

    Args:
        ids: int32 `[T]`, contiguous.
        weight: `[V, N]` bf16, fp16 or fp32 rows; N a multiple of 8; rows may be strided by a multiple of 16 bytes. A constant: the
            kernel may read it before the kernels ahead of it in the stream have finished.
        scale: multiplies in fp32 before the one rounding (Gemma: sqrt(N) as rounded to the model's dtype).
        first: id of the first row of `weight`.

    Returns:
        `[T, N]` of weight.dtype, contiguous.

    Raises:
        ValueError (RuntimeError on CUDA): wrong number of dimensions, dtype, width or alignment.
    """
    return torch.ops.pyllm.embed_tokens(ids, weight, scale, first)


def activation(x: torch.Tensor, act: int) -> torch.Tensor:
    """The formulas of `act` in the dtype of `x` (fp32 in the references, fp64 in tests)."""
    # The finite lower limit of the factor makes f(-inf) = -max * 0 = -0 where -inf * 0 would be NaN; NaN passes through clamp.
    factor = x.clamp(min=torch.finfo(x.dtype).min)
    if act == ACTS["silu"]:
        return factor * torch.sigmoid(x)
    if act == ACTS["gelu"]:  # erfc keeps the relative accuracy of the negative tail, which 1 + erf cancels away
        return factor * (0.5 * torch.special.erfc(x * -math.sqrt(0.5)))
    if act == ACTS["gelu_tanh"]:  # (1 + tanh(y)) / 2 = sigmoid(2y), again without the cancellation
        return factor * torch.sigmoid(x * (1.0 + 0.044715 * x * x) * (2.0 * math.sqrt(2.0 / math.pi)))
    return torch.relu(x).square()


def _act_number(op: str, name: str) -> int:
    check(name in ACTS, op, "act", f"is {name!r}, expected one of {', '.join(ACTS)}")
    return ACTS[name]


def _check_act(op: str, x: torch.Tensor, act: int, multiple: int) -> None:
    check_rows(op, "x", x, multiple)
    check(0 <= act < len(ACTS), op, "act", f"is {act}, expected 0 to {len(ACTS) - 1} ({', '.join(ACTS)})")


def _act_reference(x: torch.Tensor, act: int) -> torch.Tensor:
    _check_act("act", x, act, 8)
    return activation(x.float(), act).to(x.dtype).contiguous()


def _act_fake(x: torch.Tensor, act: int) -> torch.Tensor:
    _check_act("act", x, act, 8)
    return x.new_empty(x.shape)


def _act_mul_reference(x: torch.Tensor, act: int) -> torch.Tensor:
    _check_act("act_mul", x, act, 16)
    gate, up = x.float().chunk(2, dim=1)
    return (activation(gate, act) * up).to(x.dtype)


def _act_mul_fake(x: torch.Tensor, act: int) -> torch.Tensor:
    _check_act("act_mul", x, act, 16)
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _check_act_mul_fp8(x: torch.Tensor, act: int, scale: torch.Tensor | None = None) -> None:
    op = "act_mul_fp8" if scale is None else "act_mul_fp8_static"
    _check_act(op, x, act, 16)
    check(x.shape[1] <= 2 * MAX_N, op, "x", f".size(1) is {x.shape[1]}, expected at most {2 * MAX_N}")
    if scale is not None:
        came = f"is {dtype_names((scale.dtype,))} {list(scale.shape)}, expected float32 [1]"
        check(scale.dtype == torch.float32 and scale.shape == (1,), op, "scale", came)


def _act_mul_fp8_reference(x: torch.Tensor, act: int) -> tuple[torch.Tensor, torch.Tensor]:
    _check_act_mul_fp8(x, act)
    return torch.ops.pyllm.quantize_fp8(_act_mul_reference(x, act), QUANT["token"])


def _act_mul_fp8_fake(x: torch.Tensor, act: int, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    _check_act_mul_fp8(x, act, scale)
    rows = x.shape[0]
    return x.new_empty((rows, x.shape[1] // 2), dtype=torch.float8_e4m3fn), x.new_empty(rows, dtype=torch.float32)


def _act_mul_fp8_static_reference(x: torch.Tensor, act: int, scale: torch.Tensor) -> torch.Tensor:
    _check_act_mul_fp8(x, act, scale)
    return torch.ops.pyllm.quantize_fp8(_act_mul_reference(x, act), QUANT["static"], scale)[0]


def _check_softcap(x: torch.Tensor, cap: float) -> None:
    op, name = "softcap", "x"
    check(x.dim() == 2, op, name, f"has {x.dim()} dimensions, expected 2")
    check_dtype(op, name, x, FLOATS)
    check(x.shape[1] <= 1 or x.stride(1) == 1, op, name, f".stride(1) is {x.stride(1)}, expected 1")
    check(1 <= x.shape[1] <= MAX_VOCAB, op, name, f".size(1) is {x.shape[1]}, expected 1 to {MAX_VOCAB}")
    check(0.0 < cap < math.inf, "softcap", "cap", f"is {cap:g}, expected finite and > 0")


def _softcap_reference(x: torch.Tensor, cap: float) -> torch.Tensor:
    _check_softcap(x, cap)
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype).contiguous()


def _softcap_fake(x: torch.Tensor, cap: float) -> torch.Tensor:
    _check_softcap(x, cap)
    return x.new_empty(x.shape)


def _check_embed_tokens(ids: torch.Tensor, weight: torch.Tensor) -> None:
    op = "embed_tokens"
    check(ids.dim() == 1, op, "ids", f"has {ids.dim()} dimensions, expected 1")
    check_dtype(op, "ids", ids, (torch.int32,))
    check(ids.is_contiguous(), op, "ids", "is not contiguous")
    check_rows(op, "weight", weight)


def _embed_tokens_reference(ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, first: int = 0) -> torch.Tensor:
    _check_embed_tokens(ids, weight)
    if weight.shape[0] == 0:
        return weight.new_zeros((ids.shape[0], weight.shape[1]))
    row = ids.long() - first
    held = (row >= 0) & (row < weight.shape[0])
    out = (weight[row * held].float() * scale).to(weight.dtype)
    return torch.where(held[:, None], out, torch.zeros_like(out))


def _embed_tokens_fake(ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, first: int = 0) -> torch.Tensor:
    _check_embed_tokens(ids, weight)
    return weight.new_empty((ids.shape[0], weight.shape[1]))


define("act(Tensor x, int act) -> Tensor", stem="fused/act", public="pyllm.ops.fused.act", reference=_act_reference, fake=_act_fake)
define(
    "act_mul(Tensor x, int act) -> Tensor",
    stem="fused/act_mul",
    public="pyllm.ops.fused.act_mul",
    reference=_act_mul_reference,
    fake=_act_mul_fake,
)
define(
    "act_mul_fp8(Tensor x, int act) -> (Tensor, Tensor)",
    stem="fused/act_mul_fp8",
    public="pyllm.ops.fused.act_mul_fp8",
    reference=_act_mul_fp8_reference,
    fake=_act_mul_fp8_fake,
)
define(
    "act_mul_fp8_static(Tensor x, int act, Tensor scale) -> Tensor",
    stem="fused/act_mul_fp8",
    public="pyllm.ops.fused.act_mul_fp8",
    reference=_act_mul_fp8_static_reference,
    fake=lambda x, act, scale: _act_mul_fp8_fake(x, act, scale)[0],
)
define(
    "softcap(Tensor x, float cap) -> Tensor",
    stem="fused/softcap",
    public="pyllm.ops.fused.softcap",
    reference=_softcap_reference,
    fake=_softcap_fake,
)
define(
    "embed_tokens(Tensor ids, Tensor weight, float scale=1.0, int first=0) -> Tensor",
    stem="fused/embed_tokens",
    public="pyllm.ops.fused.embed_tokens",
    reference=_embed_tokens_reference,
    fake=_embed_tokens_fake,
)
