"""The CPU side of simple_attention and variant_attention: checks of their arguments, and the reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pyllm.jit.variant import AttentionVariant, ScorePlaces, apply_reference
from pyllm.ops.attention import _dequantize, _softmax
from pyllm.ops.gemm import FLOATS
from pyllm.ops.registry import check

FP8 = torch.float8_e4m3fn
TENSORS = ("q", "k", "v", "q_starts", "kv_starts", "kv_lens", "page_table", "sinks", "mask", "mask_starts", "k_scale", "v_scale")
NUMBERS = ("scale", "causal", "window", "softcap", "max_q")


def by_name(args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that both ops have, in the schema's order: tensors, and numbers."""
    order = (*TENSORS[:7], *NUMBERS[:4], *TENSORS[7:], NUMBERS[4])
    named = dict(zip(order, args, strict=True))
    return {n: named[n] for n in TENSORS}, {n: named[n] for n in NUMBERS}


def _check_keys(op: str, q: Tensor, k: Tensor, v: Tensor, kv_starts: Tensor | None, kv_lens: Tensor | None, paged: bool) -> None:
    layout = "[pages, P, K, D]" if paged else "[S, K, D]"
    check(q.dim() == 3, op, "q", f"has {q.dim()} dimensions, expected 3 [T, H, D]")
    check(q.dtype in FLOATS, op, "q", f"is {q.dtype}, expected bfloat16, float16 or float32")
    check(
        paged == (kv_lens is not None), op, "kv_lens", f"is {'missing' if paged else 'given'}, expected it with a page_table and only then"
    )
    check(
        paged != (kv_starts is not None), op, "kv_starts", f"is {'given' if paged else 'missing'}, expected it exactly without a page_table"
    )
    for name, t in (("k", k), ("v", v)):
        check(t.dim() == 3 + paged, op, name, f"has {t.dim()} dimensions, expected {3 + paged} {layout}")
        check(t.dtype in (q.dtype, FP8), op, name, f"is {t.dtype}, expected {q.dtype} like q or float8_e4m3fn")
    check(v.dtype == k.dtype, op, "v", f"is {v.dtype}, expected {k.dtype} like k")
    check(v.shape[:-1] == k.shape[:-1], op, "v", f"has shape {tuple(v.shape)}, expected {tuple(k.shape[:-1])} and a width, like k")
    check(k.shape[-1] == q.shape[2], op, "k", f".size({k.dim() - 1}) is {k.shape[-1]}, expected D={q.shape[2]} (from q)")
    heads = k.shape[-2]
    check(heads > 0 and q.shape[1] % heads == 0, op, "q", f"has H={q.shape[1]} heads, expected a multiple of K={heads} (from k)")
    unit = 16 if k.dtype == FP8 else 8
    for name, size in (("q", q.shape[2]), ("v", v.shape[-1])):
        check(size % unit == 0 and 8 <= size <= 256, op, name, f"has head dim {size}, expected a multiple of {unit} up to 256")
    if paged:
        page = k.shape[1]
        check(page > 0 and page & (page - 1) == 0, op, "k", f".size(1) is {page}, expected a power of two")


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor | None, kv_lens: Tensor | None,
    page_table: Tensor | None, window: int, softcap: float, sinks: Tensor | None, mask: Tensor | None, mask_starts: Tensor | None,
    max_q: int, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    _check_keys(op, q, k, v, kv_starts, kv_lens, page_table is not None)
    check(q_starts.dim() == 1 and q_starts.shape[0] >= 1, op, "q_starts", f"has shape {tuple(q_starts.shape)}, expected [B + 1]")
    batch = q_starts.shape[0] - 1
    sized: dict[str, tuple[Tensor | None, tuple[int | None, ...]]] = {
        "q_starts": (q_starts, (batch + 1,)),
        "kv_starts": (kv_starts, (batch + 1,)),
        "kv_lens": (kv_lens, (batch,)),
        "page_table": (page_table, (batch, None)),
        "mask": (mask, (q.shape[0], None)),
        "mask_starts": (mask_starts, (batch,)),
    }
    for name, (t, want) in sized.items():
        if t is None:
            continue
        check(t.dtype == torch.int32, op, name, f"is {t.dtype}, expected int32")
        same = t.dim() == len(want) and all(w is None or n == w for n, w in zip(t.shape, want, strict=True))
        shape = ", ".join("_" if w is None else str(w) for w in want)
        check(same, op, name, f"has shape {tuple(t.shape)}, expected [{shape}] (B={batch} from q_starts)")
    check(mask is not None or mask_starts is None, op, "mask_starts", "is given, expected it only with a mask")
    check(window >= 0, op, "window", f"is {window}, expected >= 1 (or None)")
    check(0 <= softcap < float("inf"), op, "softcap", f"is {softcap}, expected finite and > 0 (or None)")
    check(max_q >= 0, op, "max_q", f"is {max_q}, expected >= 1 (or None)")
    for name, s in (("k_scale", k_scale), ("v_scale", v_scale)):
        if s is not None:
            check(s.dtype == torch.float32, op, name, f"is {s.dtype}, expected float32")
            heads = k.shape[-2]
            check(s.shape in ((1,), (heads,)), op, name, f"has shape {tuple(s.shape)}, expected [1] or [K={heads}]")
    if sinks is not None:
        check(sinks.dtype == torch.float32, op, "sinks", f"is {sinks.dtype}, expected float32")
        check(sinks.shape == q.shape[1:2], op, "sinks", f"has shape {tuple(sinks.shape)}, expected H={q.shape[1]} (from q)")


def _check_values(op: str, q: Tensor, k: Tensor, starts: list[int], lens: list[int], page_table: Tensor | None, max_q: int) -> None:
    """What only the reference can see without a sync: numbers inside the index tensors."""
    rising = starts == sorted(starts) and 0 <= starts[0] and starts[-1] <= q.shape[0]
    check(rising, op, "q_starts", f"is {starts}, expected rising numbers from 0 to T={q.shape[0]}")
    for i, length in enumerate(lens):
        n = starts[i + 1] - starts[i]
        check(max_q == 0 or n <= max_q, op, "max_q", f"is {max_q}, expected at least the {n} rows of sequence {i}")
        check(length >= 0, op, "kv_lens" if page_table is not None else "kv_starts", f"gives sequence {i} {length} keys, expected >= 0")
        if n and length:
            check(n <= length, op, "q_starts", f"gives sequence {i} {n} rows, expected at most its {length} keys")
            if page_table is not None:
                most = page_table.shape[1] * k.shape[1]
                check(length <= most, op, "kv_lens", f"[{i}] is {length}, expected at most the {most} tokens of a page_table row")
                for page in page_table[i, : -(-length // k.shape[1])].tolist():
                    check(0 <= page < k.shape[0], op, "page_table", f"[{i}] holds page {page}, expected 0..{k.shape[0] - 1}")


def _seen(at: Tensor, keys: int, causal: bool, window: int, words: Tensor | None, first: int) -> Tensor:
    """[rows, keys]: which keys the rows at positions `at` see; bit i of a row's words belongs to key first + i."""
    key = torch.arange(keys)
    seen = (key[None] <= at[:, None] if causal else key[None] >= 0).expand(len(at), keys)
    if window:
        seen = seen & (key[None] > at[:, None] - window)
    if words is not None:
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten(1).bool()
        bit = key - first
        inside = (bit >= 0) & (bit < bits.shape[1])
        seen = seen & (bits[:, bit.clamp(0, max(bits.shape[1] - 1, 0))] | ~inside if bits.shape[1] else True)
    return seen


def _reference(
    op: str, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor | None, kv_lens: Tensor | None,
    page_table: Tensor | None, scale: float, causal: bool, window: int, softcap: float, sinks: Tensor | None, mask: Tensor | None,
    mask_starts: Tensor | None, max_q: int, variant: AttentionVariant, tensors: list[Tensor], first_head: int,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(op, q, k, v, q_starts, kv_starts, kv_lens, page_table, window, softcap, sinks, mask, mask_starts, max_q, k_scale, v_scale)
    heads, kv_heads = q.shape[1], k.shape[-2]
    out, lse = q.new_zeros((*q.shape[:2], v.shape[-1])), torch.full(q.shape[:2], float("-inf"))
    starts = q_starts.tolist()
    firsts = [] if kv_starts is None else kv_starts.tolist()
    lens = kv_lens.tolist() if kv_lens is not None else [b - a for a, b in pairwise(firsts)]
    _check_values(op, q, k, starts, lens, page_table, max_q)
    sink = None if sinks is None else sinks.view(heads, 1, 1)
    for b, length in enumerate(lens):
        rows = slice(starts[b], starts[b + 1])
        n = rows.stop - rows.start
        if n == 0:
            continue
        if length == 0:  # a padded sequence: its rows see no key
            lse[rows] = float("-inf") if sinks is None else sinks
            continue
        pages = None if page_table is None else page_table[b, : -(-length // k.shape[1])].long()
        keys, values = (
            _dequantize(
                t[pages].flatten(0, 1)[:length] if pages is not None else t[firsts[b] : firsts[b + 1]], one, torch.float32
            ).transpose(0, 1)
            for t, one in ((k, k_scale), (v, v_scale))
        )
        at, group = torch.arange(length - n, length), heads // kv_heads
        s = scale * (q[rows].float().transpose(0, 1).unflatten(0, (kv_heads, group)) @ keys[:, None].transpose(-1, -2)).flatten(0, 1)
        head, token = torch.arange(first_head, first_head + heads), torch.arange(rows.start, rows.stop)
        places = ScorePlaces(
            b, head.view(-1, 1, 1), at.view(1, -1, 1), torch.arange(length).view(1, 1, -1), n, length, token.view(1, -1, 1)
        )
        s = apply_reference(variant, s, places, tensors)
        first = length - n if mask_starts is None else int(mask_starts[b])
        seen = _seen(at, length, causal, window, None if mask is None else mask[rows], first) & (s > float("-inf"))
        p, one = _softmax(s, softcap, seen, sink)
        out[rows] = (p.unflatten(0, (kv_heads, group)) @ values[:, None]).flatten(0, 1).transpose(0, 1).to(q.dtype)
        lse[rows] = one.transpose(0, 1)
    return out, lse
