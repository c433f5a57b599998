"""The arguments of `decode_step`, and what they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyllm.ops.fused import ACTS, check_dtype
from pyllm.ops.registry import check

ROWS = 4
"""M at most: the sequences of a step, one token each."""
HEAD_DIMS, MAX_GROUP, MAX_WIDTH, UNIT = (64, 128), 8, 8192, 64
MAX_LAYERS, MAX_FFN = 128, 32768
_OP, _BF16, _E4M3, _I32, _F32 = "decode_step", torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.float32
_HEADER, _TASKS = 1024, 256  # bytes of counters; pieces of attention of a step
_RINGS, _SHARED = 84752, 232448  # bytes of shared memory: counters, 128 layers' pointers, four stages of weights; all that a CTA can have


def _up(x: int, to: int = 256) -> int:
    return -(-x // to) * to


def workspace_bytes(rows: int, layers: int, d: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> int:
    """Barriers, the partial results of attention, and two sets of the rows that the phases of each layer exchange."""
    exchanged = _up(2 * ((2 * heads + 2 * kv_heads) * head_dim + 2 * d + ffn), 16)
    partials = _TASKS * (heads // kv_heads) * (head_dim + 2) * 8
    return _up(_up(_HEADER + 2 * d) + partials) + 2 * _up(rows * layers * exchanged)


def most_rows(d: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Sequences of a step whose x leaves room for the rings of weights in shared memory, at most `ROWS`."""
    x = max(_up(2 * k, 128) + 64 for k in (d, heads * head_dim, ffn))  # of one row: the rows then start in other banks
    attend = 8 * (2 * head_dim + 16) + 4 * head_dim + max(32 * (heads // kv_heads) * (head_dim + 2), 40 * head_dim)
    return max(m for m in range(1, ROWS + 1) if max(m * x, attend) + 1024 * m + _RINGS <= _SHARED)


def size_problem(d: int, ffn: int, vocab: int, heads: int, kv_heads: int, head_dim: int, layers: int) -> tuple[str, str] | None:
    """The first size that the kernel does not serve: its name, and what came and was expected."""
    group = heads // kv_heads if kv_heads >= 1 and heads % kv_heads == 0 else 0
    rules = (
        (head_dim in HEAD_DIMS, "head_dim", f"is {head_dim}, expected one of {', '.join(map(str, HEAD_DIMS))}"),
        (1 <= kv_heads <= _TASKS // ROWS, "kv_heads", f"is {kv_heads}, expected 1 to {_TASKS // ROWS}"),
        (1 <= group <= MAX_GROUP, "heads", f"is {heads}, expected 1 to {MAX_GROUP} for each of kv_heads={kv_heads}"),
        (d % UNIT == 0 and UNIT <= d <= MAX_WIDTH, "d", f"is {d}, expected a multiple of {UNIT} up to {MAX_WIDTH}"),
        (ffn % UNIT == 0 and UNIT <= ffn <= MAX_FFN, "F", f"is {ffn}, expected a multiple of {UNIT} up to {MAX_FFN}"),
        (vocab % 8 == 0, "V", f"is {vocab}, expected a multiple of 8"),
        (1 <= layers <= MAX_LAYERS, "N", f"is {layers}, expected 1 to {MAX_LAYERS} layers"),
    )
    return next(((name, text) for ok, name, text in rules if not ok), None)


@dataclass(frozen=True)
class StepCall:
    """The op's arguments, in the order of its schema."""

    ids: Tensor
    slots: Tensor
    kv_lens: Tensor
    page_table: Tensor
    cos_sin: Tensor
    rope_rows: Tensor
    embed: Tensor
    attn_norm: Sequence[Tensor]
    qkv: Sequence[Tensor]
    o: Sequence[Tensor]
    mlp_norm: Sequence[Tensor]
    up: Sequence[Tensor]
    down: Sequence[Tensor]
    norm: Tensor
    head: Tensor
    k_caches: Sequence[Tensor]
    v_caches: Sequence[Tensor]
    workspace: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    act: int
    softmax_scale: float
    qkv_scale: Sequence[Tensor]
    o_scale: Sequence[Tensor]
    up_scale: Sequence[Tensor]
    down_scale: Sequence[Tensor]
    qkv_bias: Sequence[Tensor]
    q_norm: Sequence[Tensor]
    k_norm: Sequence[Tensor]
    k_scale: Sequence[Tensor]
    v_scale: Sequence[Tensor]


def _shaped(name: str, t: Tensor, dtypes: tuple[torch.dtype, ...], **sizes: int | None) -> None:
    """t is dense, with these sizes by letter; None: any."""
    check(t.dim() == len(sizes), _OP, name, f"has {t.dim()} dimensions, expected {len(sizes)}")
    for i, (letter, want) in enumerate(sizes.items()):
        check(want is None or t.shape[i] == want, _OP, name, f".size({i}) is {t.shape[i]}, expected {letter}={want}")
    check_dtype(_OP, name, t, dtypes)
    check(t.is_contiguous(), _OP, name, "is not contiguous")


def _check_cache(name: str, t: Tensor, c: StepCall, dtype: torch.dtype) -> None:
    check(t.dim() == 4, _OP, name, f"has {t.dim()} dimensions, expected 4")
    check_dtype(_OP, name, t, (dtype,))
    p = t.shape[1]
    check(p >= 16 and p % 16 == 0, _OP, name, f".size(1) is {p}, expected a multiple of 16")
    for i, (letter, want) in enumerate((("K", c.kv_heads), ("D", c.head_dim)), start=2):
        check(t.shape[i] == want, _OP, name, f".size({i}) is {t.shape[i]}, expected {letter}={want}")
    check(t.shape[0] == 0 or t[0].is_contiguous(), _OP, name, "has pages that are not dense")


def _check_layers(c: StepCall) -> None:
    """Every list has an entry per layer, and each entry its shape."""
    (v, d), n, dim, fp8 = c.embed.shape, len(c.qkv), c.head_dim, len(c.qkv_scale) > 0
    inner, wide, ffn = c.heads * dim, (c.heads + 2 * c.kv_heads) * dim, c.up[0].shape[0] // 2 if c.up and c.up[0].dim() else 0
    problem = size_problem(d, ffn, v, c.heads, c.kv_heads, dim, n)
    check(problem is None, _OP, *(problem or ("", "")))
    weight = (_E4M3,) if fp8 else (_BF16,)
    scaled = len(c.k_scale) > 0
    rules: tuple[tuple[str, bool, tuple[torch.dtype, ...], dict[str, int]], ...] = (
        ("attn_norm", True, (_F32,), {"d": d}),
        ("qkv", True, weight, {"(H+2K)*D": wide, "d": d}),
        ("o", True, weight, {"d": d, "H*D": inner}),
        ("mlp_norm", True, (_F32,), {"d": d}),
        ("up", True, weight, {"2F": 2 * ffn, "d": d}),
        ("down", True, weight, {"d": d, "F": ffn}),
        ("qkv_scale", fp8, (_F32,), {"(H+2K)*D": wide}),
        ("o_scale", fp8, (_F32,), {"d": d}),
        ("up_scale", fp8, (_F32,), {"2F": 2 * ffn}),
        ("down_scale", fp8, (_F32,), {"d": d}),
        ("qkv_bias", len(c.qkv_bias) > 0, (_BF16,), {"(H+2K)*D": wide}),
        ("q_norm", len(c.q_norm) > 0, (_F32,), {"D": dim}),
        ("k_norm", len(c.k_norm) > 0, (_F32,), {"D": dim}),
    )
    for name, given, dtypes, sizes in rules:
        each = getattr(c, name)
        check(len(each) == (n if given else 0), _OP, name, f"has {len(each)} tensors, expected {n if given else 0}")
        for i, t in enumerate(each):
            _shaped(f"{name}[{i}]", t, dtypes, **sizes)
    for name, given in (("k_caches", True), ("v_caches", True), ("k_scale", scaled), ("v_scale", scaled)):
        each = getattr(c, name)
        check(len(each) == (n if given else 0), _OP, name, f"has {len(each)} tensors, expected {n if given else 0}")
    for i in range(n):
        for name, t in (("k_caches", c.k_caches[i]), ("v_caches", c.v_caches[i])):
            _check_cache(f"{name}[{i}]", t, c, _E4M3 if scaled else _BF16)
            like = c.k_caches[0]
            pages, same = (*t.shape[:2], t.stride(0)), (*like.shape[:2], like.stride(0))
            check(pages == same, _OP, f"{name}[{i}]", f"has pages, P and stride {pages}, expected {same} like k_caches[0]")
        for name, each in (("k_scale", c.k_scale), ("v_scale", c.v_scale)) if scaled else ():
            _shaped(f"{name}[{i}]", each[i], (_F32,), K=1 if each[0].shape == (1,) else c.kv_heads)


def check_call(c: StepCall) -> None:
    _shaped("ids", c.ids, (_I32,), M=None)
    m = c.ids.shape[0]
    check(1 <= m <= ROWS, _OP, "ids", f".size(0) is {m}, expected 1 to {ROWS}")
    for name in ("slots", "kv_lens", "rope_rows"):
        _shaped(name, getattr(c, name), (_I32,), M=m)
    table = c.page_table
    _shaped("page_table", table[:, :1].contiguous() if table.dim() == 2 else table, (_I32,), M=m, W=None)
    check(table.stride(1) == 1 or table.shape[1] == 1, _OP, "page_table", f".stride(1) is {table.stride(1)}, expected 1")
    _shaped("embed", c.embed, (_BF16,), V=None, d=None)
    v, d = c.embed.shape
    _shaped("head", c.head, (_BF16,), V=v, d=d)
    _shaped("norm", c.norm, (_F32,), d=d)
    check(0 <= c.act < len(ACTS), _OP, "act", f"is {c.act}, expected 0 to {len(ACTS) - 1} ({', '.join(ACTS)})")
    check(c.eps >= 0.0, _OP, "eps", f"is {c.eps:g}, expected >= 0")
    _check_layers(c)
    ffn = c.up[0].shape[0] // 2
    most = most_rows(d, ffn, c.heads, c.kv_heads, c.head_dim)
    check(m <= most, _OP, "ids", f".size(0) is {m}, expected at most {most}: more rows of d={d} and F={ffn} leave no room for weights")
    _shaped("cos_sin", c.cos_sin, (_F32,), L=None, R=None)
    r = c.cos_sin.shape[1]
    check(r % 2 == 0 and 2 <= r <= c.head_dim, _OP, "cos_sin", f".size(1) is {r}, expected an even number from 2 to D={c.head_dim}")
    _shaped("workspace", c.workspace, (torch.uint8,), bytes=None)
    need = workspace_bytes(m, len(c.qkv), d, c.heads, c.kv_heads, c.head_dim, ffn)
    check(c.workspace.shape[0] >= need, _OP, "workspace", f"has {c.workspace.shape[0]} bytes, expected at least {need}")
