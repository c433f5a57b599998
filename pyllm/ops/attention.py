"""Attention over the paged KV cache: one op for any step, and which kernel of csrc/attention runs it on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.attention_checks import check_any_cache, check_attention, check_values, explain, wide_sinks
from pyllm.ops.registry import EXPLAIN, check, check_flag, check_positive, define

DECODE_ROWS, INT8_ROWS = 8, 64  # query rows per sequence of a decode (speculative steps included), of a step over an int8 cache
DECODE_DIMS = (64, 96, 128, 192, 256)  # head dims of the decode kernel
PREFILL_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))  # (D, Dv) of the prefill kernel for bf16 and fp16
PREFILL_FP8_DIMS = (64, 128, 256)
_HALF, _FP8 = (torch.bfloat16, torch.float16), torch.float8_e4m3fn
_SCORE_BYTES = 256 << 20  # the composition keeps its fp32 scores under this by cutting T into chunks


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One ragged step of attention: prefill chunks and decodes together, keys and values read from pages.

    `s = scale * q k^T`; `s = softcap * tanh(s / softcap)`; mask; `o = softmax(s) v`, all fp32 inside, o rounded once.
    Query row j of a sequence with n rows and L keys stands at position `p = L - n + j`; it sees keys `<= p` when causal, and keys
    `> p - window`. sinks: one logit per head that joins the softmax's denominator and has no value (gpt-oss).
    Shapes: q `[T, H, D]`, k_cache and v_cache `[pages, P, K, D]` (H a multiple of K), page_table int32 `[B, W]` (entries past a
    sequence's last page are never read), q_starts int32 `[B + 1]`, kv_lens int32 `[B]`, sinks `[H]`, k_scale and v_scale fp32 `[1]` or
    `[K]`: value = stored * scale.
    Returns (o `[T, H, D]` of q's dtype, lse fp32 `[T, H]`, natural log; a row that sees no key gives 0 and -inf).
    Dtypes: q bf16, fp16, fp32; caches q's dtype or float8_e4m3fn. Rows of q past q_starts[B] belong to no sequence and give 0.
    max_q: the most query rows of any sequence, if the host knows it: a causal step of at most 8 rows is `decode_attention`, where that
    serves the shapes (D 64, 96, 128, 192 or 256, pages of a power of two from 16 tokens, 16-bit q).
    On CUDA, `attention_kernel` says what runs: on Hopper the decode kernel for sequences of at most 8 rows and the prefill kernel for all
    others, in one launch each, without the host knowing which are which (D 64, 96, 128, 192, 256; with an fp8 cache 64, 128, 256 and bf16
    q, which the prefill kernel quantizes by (token, head) row); `simple_attention` for other head dims and GPUs; `composed_attention` for
    the rest: fp32, pages that are not a power of two, head dims that are no multiple of 8 (16 with an fp8 cache).
    An int8 cache is read by `decode_attention` alone: causal, max_q given and at most 64.
    """
    check_positive("paged_attention", window=window, softcap=softcap, scale=scale)
    check_flag("paged_attention", "causal", causal)
    if k_cache.dtype == torch.int8:
        args = (scale, causal, window or 0, softcap or 0.0, sinks, k_scale, v_scale)
        return _int8_attention(q, k_cache, v_cache, page_table, q_starts, kv_lens, *args, max_q)
    rows = max_q if max_q is not None and max_q >= 1 and causal else DECODE_ROWS + 1
    kernel = attention_kernel(q.dtype, k_cache.dtype, q.shape[-1], k_cache.shape[1], rows, not q.is_cuda or _hopper(q.device))
    sink = sinks if sinks is None or kernel == "composed_attention" else wide_sinks("paged_attention", sinks)
    paged = (q, k_cache, v_cache, page_table, q_starts, kv_lens)
    if kernel == "decode_attention":
        return torch.ops.pyllm.decode_attention(*paged, scale, window or 0, softcap or 0.0, sink, k_scale, v_scale, max_q)
    if kernel == "simple_attention":
        from pyllm.ops.simple import simple_attention

        return simple_attention(
            q, k_cache, v_cache, q_starts, scale=scale, kv_lens=kv_lens, page_table=page_table, causal=causal, window=window,
            softcap=softcap, sinks=sink, k_scale=k_scale, v_scale=v_scale, max_q=max_q,
        )  # fmt: skip
    op = torch.ops.pyllm.composed_attention if kernel == "composed_attention" else torch.ops.pyllm.paged_attention
    return op(*paged, scale, causal, window or 0, softcap or 0.0, sink, k_scale, v_scale)


def composed_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` from torch operations alone: what CUDA runs for shapes and dtypes without a kernel (fp32, odd pages and head dims).

    q, k_cache, v_cache, page_table, q_starts, kv_lens, scale, causal, window, softcap, sinks, k_scale, v_scale and results as there. Static
    shapes and no host sync; it meets every token with all W P keys of a page_table row, so it is slow. Errors: ValueError.
    """
    check_positive("composed_attention", window=window, softcap=softcap)
    check_flag("composed_attention", "causal", causal)
    return torch.ops.pyllm.composed_attention(
        q, k_cache, v_cache, page_table, q_starts, kv_lens, scale, causal, window or 0, softcap or 0.0, sinks, k_scale, v_scale
    )


def _int8_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, causal: bool,
    window: int, softcap: float, sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, max_q: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    op, paged = "paged_attention", (page_table, q_starts, kv_lens)
    check(causal, op, "causal", "is False, expected True with an int8 cache")
    check(isinstance(max_q, int) and max_q <= INT8_ROWS, op, "max_q", f"is {max_q}, expected at most {INT8_ROWS} with an int8 cache")
    if q.is_cuda:
        sink = None if sinks is None else wide_sinks(op, sinks)
        return torch.ops.pyllm.decode_attention(q, k_cache, v_cache, *paged, scale, window, softcap, sink, k_scale, v_scale, max_q)
    check_any_cache(q, k_cache, v_cache, *paged, window, sinks, k_scale, v_scale, op)
    used, table = page_table.clamp(0, k_cache.shape[0] - 1).unique(return_inverse=True)
    wide = (c[used.long()].to(q.dtype) for c in (k_cache, v_cache))  # int8 values are exact in 16 bits
    paged = (table.to(torch.int32), q_starts, kv_lens)
    return torch.ops.pyllm.composed_attention(q, *wide, *paged, scale, causal, window, softcap, sinks, k_scale, v_scale)


def attention_kernel(q: torch.dtype, cache: torch.dtype, dim: int, page: int, rows: int, hopper: bool) -> str:
    """The op that `paged_attention` is (on a CPU, the one of Hopper). rows: the most of a sequence of a causal step, if the host knows."""
    power = page > 0 and page & (page - 1) == 0
    if hopper and q in _HALF and power and page >= 16:
        if rows <= DECODE_ROWS and dim in DECODE_DIMS:
            return "decode_attention"
        if (cache == q and (dim, dim) in PREFILL_DIMS) or (cache == _FP8 and q == torch.bfloat16 and dim in PREFILL_FP8_DIMS):
            return "paged_attention"
    if q in _HALF and cache in (q, _FP8) and power and dim % (8 if cache == q else 16) == 0 and dim <= 256:
        return "simple_attention"
    return "composed_attention"


def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _softmax(s: Tensor, softcap: float, seen: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """s `[..., S]` fp32; seen and sinks broadcast to it. Returns (probabilities, natural-log LSE); a row without keys gives 0 and -inf."""
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.float().expand(*s.shape[:-1], 1)], -1)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return (p[..., :-1] if sinks is not None else p), lse


def _dequantize(t: Tensor, scale: Tensor | None, like: torch.dtype) -> Tensor:
    t = t.to(like)
    return t if scale is None else t * scale.to(like)[:, None]


def _attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, causal: bool = True,
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_attention(q, k_cache, v_cache, page_table, q_starts, kv_lens, window, sinks, k_scale, v_scale)
    heads, kv_heads, page, dim = q.shape[1], k_cache.shape[2], k_cache.shape[1], q.shape[2]
    out, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), torch.full(q.shape[:2], float("-inf"))
    starts, lens = q_starts.tolist(), kv_lens.tolist()
    check_values(q, k_cache, page_table, starts, lens)
    sink = None if sinks is None else sinks.view(kv_heads, heads // kv_heads, 1, 1)
    for i, length in enumerate(lens):
        rows = slice(starts[i], starts[i + 1])
        n = rows.stop - rows.start
        if n == 0:
            continue
        if length == 0:  # a padded sequence: its rows see no key
            lse[rows] = float("-inf") if sinks is None else sinks.float()
            continue
        pages = page_table[i, : -(-length // page)].long()
        k, v = (
            _dequantize(c[pages].flatten(0, 1)[:length], s, torch.float32).transpose(0, 1)
            for c, s in ((k_cache, k_scale), (v_cache, v_scale))
        )
        x = q[rows].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [K, G, n, D]
        at, key = torch.arange(length - n, length)[:, None], torch.arange(length)[None]
        seen = (key <= at if causal else key >= 0) & (key > at - window if window else key >= 0)
        p, one = _softmax(scale * (x @ k[:, None].transpose(-1, -2)), softcap, seen, sink)
        out[rows] = (p @ v[:, None]).permute(2, 0, 1, 3).reshape(n, heads, dim).to(q.dtype)
        lse[rows] = one.permute(2, 0, 1).reshape(n, heads)
    return out, lse


def _attention_composition(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, causal: bool = True,
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Static shapes and no host sync (graph-safe). Each token meets the keys of its own sequence, gathered per chunk of tokens."""
    check_attention(q, k_cache, v_cache, page_table, q_starts, kv_lens, window, sinks, k_scale, v_scale)
    tokens, heads, dim = q.shape
    (batch, width), (pages, page, kv_heads, _) = page_table.shape, k_cache.shape
    keys, device = width * page, q.device
    out, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), torch.full(q.shape[:2], float("-inf"), device=device)
    if tokens == 0 or batch == 0 or keys == 0:
        return out, lse
    token = torch.arange(tokens, device=device, dtype=torch.int32)
    owner = torch.searchsorted(q_starts[1:].contiguous(), token, right=True)
    real, owner = owner < batch, owner.clamp_max(batch - 1)
    at = kv_lens[owner] - q_starts[owner + 1] + token  # position of each token in its sequence
    key = torch.arange(keys, device=device, dtype=torch.int32)
    sink = None if sinks is None else sinks.view(kv_heads, heads // kv_heads, 1)
    chunk = max(1, _SCORE_BYTES // (4 * keys * max(heads, 2 * kv_heads * dim)))
    for first in range(0, tokens, chunk):
        rows = slice(first, min(first + chunk, tokens))
        mine = owner[rows]
        seen = (key[None] < kv_lens[mine][:, None]) & real[rows][:, None]
        if causal:
            seen = seen & (key[None] <= at[rows][:, None])
        if window:
            seen = seen & (key[None] > at[rows][:, None] - window)
        table = page_table[mine].long().clamp(0, pages - 1)  # table tails may hold anything; masked below
        k, v = (
            torch.where(seen[:, :, None, None], _dequantize(c[table].flatten(1, 2), s, torch.float32), 0.0).transpose(1, 2)
            for c, s in ((k_cache, k_scale), (v_cache, v_scale))
        )  # [t, K, S, D]; unseen rows are zeroed since 0 * NaN of an unused page is NaN
        x = q[rows].float().unflatten(1, (kv_heads, -1))
        p, one = _softmax(scale * (x @ k.transpose(-1, -2)), softcap, seen[:, None, None, :], sink)
        out[rows] = (p @ v).flatten(1, 2).to(q.dtype)
        lse[rows] = one.flatten(1, 2)
    return out, lse


def _attention_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, causal: bool = True,
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_attention(q, k_cache, v_cache, page_table, q_starts, kv_lens, window, sinks, k_scale, v_scale)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor q_starts, Tensor kv_lens, float scale, bool causal=True, "
    "SymInt window=0, float softcap=0.0, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor, Tensor)"
)
define(
    f"paged_attention{_SCHEMA}",
    stem="attention/paged_attention",
    public="pyllm.ops.attention.paged_attention",
    reference=_attention_reference,
    fake=_attention_fake,
)
define(
    f"composed_attention{_SCHEMA}",
    stem="attention/composed_attention",
    public="pyllm.ops.attention.composed_attention",
    reference=_attention_reference,
    fake=_attention_fake,
    composition=_attention_composition,
)
EXPLAIN["paged_attention"] = explain
