"""Per-head norm of Q and K, rotary embedding and the append to the paged KV cache, in one pass over the QKV projection."""

from __future__ import annotations

import torch

from pyllm.ops.fused import check_dtype, check_rows
from pyllm.ops.registry import check, check_flag, define

_OP = "qk_norm_rope_append"
_FP8_MAX, _INT8_MAX = 448.0, 127.0
_BYTES = (torch.float8_e4m3fn, torch.int8)


def qk_norm_rope_append(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    cos_sin: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate Q and K of each token, store K and V in the cache (in place), return Q.

    For each token t and head h, with x the D values of the head:
        norm     y = x * rsqrt(mean(x^2) + eps) * weight               (Q with q_weight, K with k_weight; skipped where the weight is None)
        rotation with c = cos_sin[rows[t], i], s = cos_sin[rows[t], R / 2 + i], i < R / 2, and (a, b) the pair i of y:
                 a' = a * c - b * s,  b' = b * c + a * s               (dimensions from R on pass through; skipped where cos_sin is None)
        append   k_cache[slot / P, slot % P, h] = K, v_cache[...] = V  with slot = slots[t]; nothing is stored where slot < 0

    Args:
        qkv: `[T, (H + 2K) * D]` bf16, fp16 or fp32 rows: the Q heads, the K heads, the V heads. D is a multiple of 8, at most 256.
            Rows may be strided by a multiple of 16 bytes.
        heads, kv_heads: H and K. K = 0: the rows hold Q alone, and the caches must be None.
        cos_sin: fp32 `[L, R]`, contiguous, at a multiple of 16 bytes, R <= D and even; cosines, then sines. An attention factor (YaRN,
            LongRoPE) is folded in.
        rows: int32 `[T]`, the line of cos_sin for each token, in `[0, L)`. Given exactly when cos_sin is.
        interleaved: False pairs dimension i with i + R / 2, True pairs 2i with 2i + 1.
        q_weight, k_weight: `[D]`, fp32 or qkv.dtype. Constants: read before the kernels ahead in the stream have finished.
        k_cache, v_cache: `[pages, P, K, D]`, changed in place; qkv.dtype, float8_e4m3fn or int8, both alike. The pages may be strided by a
            multiple of 16 bytes, a page is dense.
        slots: int32 `[T]` below pages * P, each non-negative slot at most once.
        k_scale, v_scale: fp32 `[1]` or `[K]`, dequantisation scales of a one-byte cache: stored = e4m3(x * (1 / scale)), saturating
            at +-448, NaN stays NaN; of int8 the nearest integer (ties to even), saturating at +-127, NaN becomes 0. None is 1. Not
            allowed with a cache of qkv.dtype.

    Returns:
        Q as `[T, H, D]` of qkv.dtype, contiguous. Everything is fp32 inside and rounded once, at the end.

    Raises:
        ValueError (RuntimeError on CUDA): a shape, dtype, stride or combination outside the above. The values of rows and slots are
        not checked on CUDA.

    Source: Su et al. 2021 (RoFormer); Dehghani et al. 2023 (norm of Q and K); Kwon et al. 2023 (paged KV cache).
    """
    check_flag(_OP, "interleaved", interleaved)
    return torch.ops.pyllm.qk_norm_rope_append(
        qkv, heads, kv_heads, cos_sin, rows, interleaved, q_weight, k_weight, eps, k_cache, v_cache, slots, k_scale, v_scale
    )


def rotate(y: torch.Tensor, cos_sin: torch.Tensor, rows: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The rotation of `[T, heads, D]` in the dtype of `y` (fp32 in the reference, fp64 in tests)."""
    half = cos_sin.shape[1] // 2
    table = cos_sin[rows.long()].to(y.dtype)[:, None]
    cos, sin = table[..., :half], table[..., half:]
    turned, rest = y[..., : 2 * half], y[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _check_vector(name: str, x: torch.Tensor, size: int, dtypes: tuple[torch.dtype, ...], letter: str) -> None:
    check(x.dim() == 1, _OP, name, f"has {x.dim()} dimensions, expected 1")
    check(x.shape[0] == size, _OP, name, f".size(0) is {x.shape[0]}, expected {letter}={size}")
    check_dtype(_OP, name, x, dtypes)
    check(x.is_contiguous(), _OP, name, "is not contiguous")


def _check_heads(qkv: torch.Tensor, heads: int, kv_heads: int) -> int:
    check_rows(_OP, "qkv", qkv)
    check(heads >= 1, _OP, "heads", f"is {heads}, expected >= 1")
    check(kv_heads >= 0, _OP, "kv_heads", f"is {kv_heads}, expected >= 0")
    width, total = qkv.shape[1], heads + 2 * kv_heads
    check(width % total == 0, _OP, "qkv", f".size(1) is {width}, expected a multiple of heads + 2 * kv_heads = {total}")
    dim = width // total
    check(dim % 8 == 0 and dim <= 256, _OP, "qkv", f"has head dimension {dim}, expected a multiple of 8, at most 256")
    return dim


def _check_rope(qkv: torch.Tensor, dim: int, cos_sin: torch.Tensor | None, rows: torch.Tensor | None) -> None:
    if cos_sin is None:
        check(rows is None, _OP, "rows", "is given, expected None because cos_sin is None")
        return
    check(cos_sin.dim() == 2, _OP, "cos_sin", f"has {cos_sin.dim()} dimensions, expected 2")
    check_dtype(_OP, "cos_sin", cos_sin, (torch.float32,))
    check(cos_sin.is_contiguous(), _OP, "cos_sin", "is not contiguous")
    r = cos_sin.shape[1]
    check(r % 2 == 0 and 2 <= r <= dim, _OP, "cos_sin", f".size(1) is {r}, expected an even number from 2 to the head dimension {dim}")
    check(rows is not None, _OP, "rows", "is None, expected a tensor because cos_sin is given")
    assert rows is not None
    _check_vector("rows", rows, qkv.shape[0], (torch.int32,), "T")


def _check_cache(
    name: str, cache: torch.Tensor, qkv: torch.Tensor, kv_heads: int, dim: int, scale_name: str, scale: torch.Tensor | None
) -> None:
    check(cache.dim() == 4, _OP, name, f"has {cache.dim()} dimensions, expected 4")
    check_dtype(_OP, name, cache, (qkv.dtype, *_BYTES))
    for i, (letter, want) in enumerate((("K", kv_heads), ("D", dim)), start=2):
        check(cache.shape[i] == want, _OP, name, f".size({i}) is {cache.shape[i]}, expected {letter}={want}")
    page = cache.shape[1]
    check(page >= 1, _OP, name, f".size(1) is {page}, expected >= 1")
    for i, want in ((1, kv_heads * dim), (2, dim), (3, 1)):
        dense = cache.shape[i] <= 1 or cache.stride(i) == want
        check(dense, _OP, name, f".stride({i}) is {cache.stride(i)}, expected {want} (a page is dense)")
    item = cache.element_size()
    aligned = cache.shape[0] <= 1 or cache.stride(0) * item % 16 == 0
    check(aligned, _OP, name, f".stride(0) is {cache.stride(0)} elements, expected a multiple of {16 // item}")
    if scale is None:
        return
    check(cache.dtype in _BYTES, _OP, scale_name, "is given, expected None because the cache is neither float8_e4m3fn nor int8")
    _check_vector(scale_name, scale, scale.shape[0] if scale.dim() == 1 and scale.shape[0] == 1 else kv_heads, (torch.float32,), "K")


def _check_all(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    cos_sin: torch.Tensor | None,
    rows: torch.Tensor | None,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    caches: tuple[torch.Tensor | None, torch.Tensor | None],
    slots: torch.Tensor | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> int:
    dim = _check_heads(qkv, heads, kv_heads)
    _check_rope(qkv, dim, cos_sin, rows)
    for name, weight in zip(("q_weight", "k_weight"), weights, strict=True):
        if weight is not None:
            _check_vector(name, weight, dim, (torch.float32,) if qkv.dtype == torch.float32 else (torch.float32, qkv.dtype), "D")
    check(eps >= 0.0, _OP, "eps", f"is {eps:g}, expected >= 0")
    given = (*caches, slots)
    for name, x in zip(("k_cache", "v_cache", "slots"), given, strict=True):
        if kv_heads == 0:
            check(x is None, _OP, name, "is given, expected None because kv_heads is 0")
        else:
            check(x is not None, _OP, name, f"is None, expected a tensor because kv_heads is {kv_heads}")
    if kv_heads == 0:
        for name, x in zip(("k_weight", "k_scale", "v_scale"), (weights[1], *scales), strict=True):
            check(x is None, _OP, name, "is given, expected None because kv_heads is 0")
        return dim
    k_cache, v_cache = caches
    assert k_cache is not None
    assert v_cache is not None
    assert slots is not None
    _check_cache("k_cache", k_cache, qkv, kv_heads, dim, "k_scale", scales[0])
    _check_cache("v_cache", v_cache, qkv, kv_heads, dim, "v_scale", scales[1])
    for i in (0, 1):
        got, want = v_cache.shape[i], k_cache.shape[i]
        check(got == want, _OP, "v_cache", f".size({i}) is {got}, expected {want} like k_cache")
    check_dtype(_OP, "v_cache", v_cache, (k_cache.dtype,))
    _check_vector("slots", slots, qkv.shape[0], (torch.int32,), "T")
    return dim


def _append(cache: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> None:
    keep = slots >= 0
    slot, values = slots[keep].long(), values[keep]
    if cache.dtype in _BYTES and scale is not None:
        values = values * (1.0 / scale)[:, None]
    if cache.dtype == torch.int8:
        stored = values.nan_to_num(0.0).round().clamp(-_INT8_MAX, _INT8_MAX).to(cache.dtype)
    elif cache.dtype == torch.float8_e4m3fn:
        stored = values.clamp(-_FP8_MAX, _FP8_MAX).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    else:
        stored = values.to(cache.dtype)
    cache[slot // cache.shape[1], slot % cache.shape[1]] = stored


def _qk_norm_rope_append_reference(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    cos_sin: torch.Tensor | None,
    rows: torch.Tensor | None,
    interleaved: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    dim = _check_all(qkv, heads, kv_heads, cos_sin, rows, (q_weight, k_weight), eps, (k_cache, v_cache), slots, (k_scale, v_scale))

    def turn(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
        return x if cos_sin is None or rows is None else rotate(x, cos_sin, rows, interleaved)

    x = qkv.float().reshape(qkv.shape[0], heads + 2 * kv_heads, dim)
    q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
    if k_cache is not None and v_cache is not None and slots is not None:
        _append(k_cache, turn(k, k_weight), slots, k_scale)
        _append(v_cache, v, slots, v_scale)
    return turn(q, q_weight).to(qkv.dtype).clone(memory_format=torch.contiguous_format)


def _qk_norm_rope_append_fake(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    cos_sin: torch.Tensor | None,
    rows: torch.Tensor | None,
    interleaved: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    dim = _check_all(qkv, heads, kv_heads, cos_sin, rows, (q_weight, k_weight), eps, (k_cache, v_cache), slots, (k_scale, v_scale))
    return qkv.new_empty((qkv.shape[0], heads, dim))


define(
    "qk_norm_rope_append(Tensor qkv, int heads, int kv_heads, Tensor? cos_sin, Tensor? rows, bool interleaved, Tensor? q_weight, "
    "Tensor? k_weight, float eps, Tensor(a!)? k_cache, Tensor(b!)? v_cache, Tensor? slots, Tensor? k_scale, Tensor? v_scale) -> Tensor",
    stem="fused/qk_norm_rope_append",
    public="pyllm.ops.rope.qk_norm_rope_append",
    reference=_qk_norm_rope_append_reference,
    fake=_qk_norm_rope_append_fake,
)
