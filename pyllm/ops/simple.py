"""Plain attention for every GPU from sm_80 on, and attention variants: one kernel template, ahead of time and compiled at run time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pyllm.jit.variant import PLAIN, AttentionVariant, ScorePlaces, apply_reference, numbered
from pyllm.ops.attention import _softmax
from pyllm.ops.gemm import FLOATS
from pyllm.ops.registry import check, define

SIMPLE_DIMS = (64, 96, 128, 256)  # D = Dv of the ahead-of-time build


def simple_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    *,
    scale: float,
    kv_starts: Tensor | None = None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_starts: Tensor | None = None,
    max_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One ragged step of attention by the plain kernel, which runs on sm_80 and later: what `paged_attention` is on GPUs before sm_90.

    `s = scale * q k^T`; `s = softcap * tanh(s / softcap)`; mask; `o = softmax(s) v`, fp32 inside, weights and o rounded once each to q's
    dtype.
    Query row j of a sequence with n rows and L keys stands at position `p = L - n + j`; it sees keys `<= p` when causal, and keys
    `> p - window`. sinks: fp32 `[H]`, one logit per head that joins the denominator. mask: int32 `[T, words]`: bit i % 32 of word i / 32 of
    a row allows key `mask_starts[b] + i` (mask_starts int32 `[B]`; None: the bits begin at the sequence's key L - n, a tree over the step's
    own tokens); keys outside the bits are not touched by it. It combines with causal and window.
    Shapes: q `[T, H, D]`; keys either contiguous, k `[S, K, D]`, v `[S, K, Dv]` with kv_starts int32 `[B + 1]`, or paged,
    `[pages, P, K, D]` (P a power of two), with page_table int32 `[B, W]` (entries past a sequence's last page are never read) and kv_lens
    int32 `[B]`. H is a multiple of K; D and Dv are multiples of 8 up to 256: 64, 96, 128, 256 (D = Dv) ahead of time, others are compiled
    by the first call (`variant_attention`). q_starts int32 `[B + 1]`. Rows at multiples of 16 bytes.
    max_q: the most rows of a sequence where the host knows it; picks the form for few rows. Results do not depend on the run.
    Returns (o `[T, H, Dv]`, lse fp32 `[T, H]`, natural log). A row without keys gives 0 and -inf (its sink, if there are sinks), a row of q
    past q_starts[B] 0 and -inf.
    Dtypes: q, k, v bf16 or fp16 alike (fp32 on a CPU). Errors: ValueError on CPU, RuntimeError on CUDA.
    Method: flash attention (Dao et al. 2022).
    """
    for name, value in (("window", window), ("softcap", softcap), ("max_q", max_q)):
        check(value is None or value > 0, "simple_attention", name, f"is {value}, expected more than 0 (or None)")
    tail = (q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal, window or 0, softcap or 0.0, sinks, mask, mask_starts)
    if q.is_cuda and q.dim() == 3 and not (q.shape[2] == v.shape[-1] and q.shape[2] in SIMPLE_DIMS):
        return torch.ops.pyllm.variant_attention(*tail, max_q or 0, PLAIN.number, [], 0)
    return torch.ops.pyllm.simple_attention(*tail, max_q or 0)


def variant_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    variant: AttentionVariant,
    *,
    scale: float,
    kv_starts: Tensor | None = None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_starts: Tensor | None = None,
    max_q: int | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    first_head: int = 0,
) -> tuple[Tensor, Tensor]:
    """`simple_attention` with the scores and the mask of a variant; q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal,
    window, softcap, sinks, mask, mask_starts, max_q, results and dtypes as there.

    variant: a `pyllm.jit.AttentionVariant`: `s = variant.score(scale * q k^T)`, then softcap, then all masks together. On a GPU it is
    compiled by its first call for a pair (D, Dv) and a dtype, in about two seconds, and kept on disk; on a CPU its `reference` runs.
    tensors: by name, those that its params ask each call for. first_head: the number of q's first head among the heads of all ranks.
    Errors: ValueError (a variant that does not compile included) or, for what only the GPU asks for, RuntimeError.
    """
    for name, value in (("window", window), ("softcap", softcap), ("max_q", max_q)):
        check(value is None or value > 0, "variant_attention", name, f"is {value}, expected more than 0 (or None)")
    return torch.ops.pyllm.variant_attention(
        q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal, window or 0, softcap or 0.0, sinks, mask, mask_starts, max_q or 0,
        variant.number, variant.tensors(tensors), first_head,
    )  # fmt: skip


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
        check(t.dtype == q.dtype, op, name, f"is {t.dtype}, expected {q.dtype} like q")
    check(v.shape[:-1] == k.shape[:-1], op, "v", f"has shape {tuple(v.shape)}, expected {tuple(k.shape[:-1])} and a width, like k")
    check(k.shape[-1] == q.shape[2], op, "k", f".size({k.dim() - 1}) is {k.shape[-1]}, expected D={q.shape[2]} (from q)")
    heads = k.shape[-2]
    check(heads > 0 and q.shape[1] % heads == 0, op, "q", f"has H={q.shape[1]} heads, expected a multiple of K={heads} (from k)")
    for name, size in (("q", q.shape[2]), ("v", v.shape[-1])):
        check(size % 8 == 0 and 8 <= size <= 256, op, name, f"has head dim {size}, expected a multiple of 8 up to 256")
    if paged:
        page = k.shape[1]
        check(page > 0 and page & (page - 1) == 0, op, "k", f".size(1) is {page}, expected a power of two")


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor | None, kv_lens: Tensor | None,
    page_table: Tensor | None, window: int, softcap: float, sinks: Tensor | None, mask: Tensor | None, mask_starts: Tensor | None,
    max_q: int,
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
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(op, q, k, v, q_starts, kv_starts, kv_lens, page_table, window, softcap, sinks, mask, mask_starts, max_q)
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
            (t[pages].flatten(0, 1)[:length] if pages is not None else t[firsts[b] : firsts[b + 1]]).float().transpose(0, 1) for t in (k, v)
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


def _fake(op: str, *args: Any) -> tuple[Tensor, Tensor]:
    """args: those of the schema that both ops have."""
    q, k, v, q_starts, kv_starts, kv_lens, page_table, _, _, window, softcap, sinks, mask, mask_starts, max_q = args
    _check(op, q, k, v, q_starts, kv_starts, kv_lens, page_table, window, softcap, sinks, mask, mask_starts, max_q)
    return q.new_empty((*q.shape[:2], v.shape[-1])), q.new_empty(q.shape[:2], dtype=torch.float32)


def _simple_reference(*args: Any) -> tuple[Tensor, Tensor]:
    return _reference("simple_attention", *args, PLAIN, [], 0)


def _simple_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _fake("simple_attention", *args)


def _variant_reference(*args: Any) -> tuple[Tensor, Tensor]:
    *common, number, tensors, first_head = args
    return _reference("variant_attention", *common, numbered(number), tensors, first_head)


def _variant_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _fake("variant_attention", *args[:-3])


def _variant_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    from pyllm.jit.launch import variant_attention_cuda

    q, k, v, q_starts, kv_starts, kv_lens, page_table, _, _, window, softcap, sinks, mask, mask_starts, max_q = args[:-3]
    _check("variant_attention", q, k, v, q_starts, kv_starts, kv_lens, page_table, window, softcap, sinks, mask, mask_starts, max_q)
    return variant_attention_cuda(*args)


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor q_starts, Tensor? kv_starts, Tensor? kv_lens, Tensor? page_table, float scale, bool causal, "
    "SymInt window, float softcap, Tensor? sinks, Tensor? mask, Tensor? mask_starts, int max_q"
)
define(
    f"simple_attention{_SCHEMA}) -> (Tensor, Tensor)",
    stem="attention/simple_attention",
    public="pyllm.ops.simple.simple_attention",
    reference=_simple_reference,
    fake=_simple_fake,
)
define(
    f"variant_attention{_SCHEMA}, int variant, Tensor[] tensors, SymInt first_head) -> (Tensor, Tensor)",
    stem="attention/variant_attention",
    public="pyllm.ops.simple.variant_attention",
    reference=_variant_reference,
    fake=_variant_fake,
    composition=_variant_cuda,
    kernel="NVRTC variant_attention",
)
