"""Attention for a few query rows per sequence (the paged decode kernel of csrc/attention), and the merge of two partial attentions."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.attention import _attention_reference, _dequantize, _softmax
from pyllm.ops.attention_checks import as_q, check_any_cache, check_values
from pyllm.ops.registry import check, check_flag, check_positive, define

_DIMS, _DTYPES, _OP, _MERGE = (64, 96, 128, 192, 256), (torch.bfloat16, torch.float16), "decode_attention", "merge_states"


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_q: int = 1,
    mask: Tensor | None = None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` (causal) of a step in which each sequence has at most max_q query rows; formula and masks as there.

    max_q sizes the launch, 1 to 64: what the host knows of q_starts. The keys are shared out over the GPU by q_starts and kv_lens, read
    on the device, so that a captured graph stays right when they change. On CUDA a sequence with more rows is left alone, neither read nor
    written (a mixed step gives it to the prefill kernel); on a CPU it is an error.
    mask: a tree of speculative tokens. Bit i of word t: row t sees the sequence's new key i (its key L - n + i, n rows, L keys), besides
    being causal; int32 `[T]` for max_q up to 32, int64 `[T]` for 64. The keys before them are seen by all rows.
    invariant: the bits of a row do not depend on the other sequences of the step, nor on how many there are. Without it results do not
    depend on the run, but their rounding does on the lengths of the whole step, which decide where a sequence is cut.
    Shapes: q `[T, H, D]` with D 64, 96, 128, 192 or 256 (H a multiple of K), k_cache and v_cache `[pages, P, K, D]` with P a power of two
    >= 16, pages at any stride; page_table int32 `[B, W]` (entries past a sequence's last page, or below its window, are never read),
    q_starts int32 `[B + 1]`, kv_lens int32 `[B]`, sinks fp32 `[H]`, k_scale/v_scale fp32 `[1]` or `[K]`: value = stored * scale; scale,
    window, softcap as in `paged_attention`.
    Returns (o `[T, H, D]` of q's dtype, lse fp32 `[T, H]`, natural log). A row without keys gives 0 and -inf (its sink, if there are
    sinks), a row of q past q_starts[B] 0 and -inf.
    Dtypes: q bf16, fp16; caches q's dtype, float8_e4m3fn or int8; scores and weights of the last two are computed in fp16 (q clamped to
    +-65504). Rounding: fp32 inside, weights once to the cache's dtype (fp16 for one byte), o once. Errors: ValueError on CPU, RuntimeError
    on CUDA. Method: flash attention with split keys (Dao et al. 2023), shares as in Stream-K (Osama et al. 2023).
    """
    check_positive(_OP, window=window, softcap=softcap)
    check_flag(_OP, "invariant", invariant)
    return torch.ops.pyllm.decode_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        q_starts,
        kv_lens,
        scale,
        window or 0,
        softcap or 0.0,
        sinks,
        k_scale,
        v_scale,
        max_q,
        mask,
        invariant,
    )


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each, as of a shared prefix and of what follows it.

    `o = (e^lse_a o_a + e^lse_b o_b) / (e^lse_a + e^lse_b)`, `lse = log(e^lse_a + e^lse_b)`. A side whose lse is -inf (no keys) does not
    count, whatever its o holds; two such sides give 0 and -inf. With sinks, give them to one side alone.
    Shapes: o_a and o_b `[T, H, D]`, dense in D, tokens and heads at any stride; lse_a, lse_b fp32 `[T, H]`, natural log. On CUDA rows are a
    multiple of 16 bytes, up to 8 KiB.
    Returns (o `[T, H, D]` of o_a's dtype, lse fp32 `[T, H]`). Dtypes: bf16, fp16, fp32, both sides alike. Rounding: fp32 inside, o once.
    Errors: ValueError on CPU, RuntimeError on CUDA.
    """
    return torch.ops.pyllm.merge_states(o_a, lse_a, o_b, lse_b)


def _check_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, window: int, softcap: float,
    sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, max_q: int, mask: Tensor | None,
) -> None:  # fmt: skip
    check_any_cache(q, k_cache, v_cache, page_table, q_starts, kv_lens, window, sinks, k_scale, v_scale, _OP)
    check(q.dtype in _DTYPES, _OP, "q", f"is {q.dtype}, expected bfloat16 or float16")
    check(q.shape[2] in _DIMS, _OP, "q", f".size(2) is {q.shape[2]}, expected 64, 96, 128, 192 or 256")
    page = k_cache.shape[1]
    check(page >= 16 and page & (page - 1) == 0, _OP, "k_cache", f".size(1) is {page}, expected a power of two, at least 16")
    check(softcap >= 0, _OP, "softcap", f"is {softcap}, expected finite and > 0 (or None)")
    check(1 <= max_q <= 64, _OP, "max_q", f"is {max_q}, expected 1 to 64")
    check(sinks is None or sinks.dtype == torch.float32, _OP, "sinks", f"is {sinks.dtype if sinks is not None else ''}, expected float32")
    if mask is not None:
        check(mask.dtype in (torch.int32, torch.int64), _OP, "mask", f"is {mask.dtype}, expected int32 or int64")
        check(mask.shape == q.shape[:1], _OP, "mask", f"has shape {tuple(mask.shape)}, expected T={q.shape[0]} (from q)")
        bits = 64 if mask.dtype == torch.int64 else 32
        check(max_q <= bits, _OP, "mask", f"has {bits} bits a row, expected at least max_q={max_q}")


def _tree_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, window: int,
    softcap: float, sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, mask: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads, kv_heads, page = q.shape[1], k_cache.shape[2], k_cache.shape[1]
    out, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), torch.full(q.shape[:2], float("-inf"))
    starts, lens = q_starts.tolist(), kv_lens.tolist()
    check_values(q, k_cache, page_table, starts, lens)
    sink = None if sinks is None else sinks.view(kv_heads, heads // kv_heads, 1, 1)
    for b, length in enumerate(lens):
        rows, n = slice(starts[b], starts[b + 1]), starts[b + 1] - starts[b]
        if n and length == 0 and sinks is not None:
            lse[rows] = sinks
        if n == 0 or length == 0:
            continue
        pages = page_table[b, : -(-length // page)].long()
        k, v = (
            _dequantize(c[pages].flatten(0, 1)[:length], s, torch.float32).transpose(0, 1)
            for c, s in ((k_cache, k_scale), (v_cache, v_scale))
        )
        x = q[rows].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [K, G, n, D]
        at, key = torch.arange(length - n, length)[:, None], torch.arange(length)[None]
        bit = mask[rows].long()[:, None] >> (key - (length - n)).clamp_min(0) & 1
        seen = (key <= at) & ((key > at - window) if window else key >= 0) & ((key < length - n) | (bit == 1))
        p, one = _softmax(scale * (x @ k[:, None].transpose(-1, -2)), softcap, seen, sink)
        out[rows] = (p @ v[:, None]).permute(2, 0, 1, 3).reshape(n, heads, -1).to(q.dtype)
        lse[rows] = one.permute(2, 0, 1).reshape(n, heads)
    return out, lse


def _decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, max_q: int = 1,
    mask: Tensor | None = None, invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_decode(q, k_cache, v_cache, page_table, q_starts, kv_lens, window, softcap, sinks, k_scale, v_scale, max_q, mask)
    most = int(q_starts.diff().max()) if len(kv_lens) else 0
    check(most <= max_q, _OP, "max_q", f"is {max_q}, expected at least the {most} query rows of the longest sequence")
    k, v = as_q(k_cache, q), as_q(v_cache, q)
    if mask is not None:
        return _tree_reference(q, k, v, page_table, q_starts, kv_lens, scale, window, softcap, sinks, k_scale, v_scale, mask)
    return _attention_reference(q, k, v, page_table, q_starts, kv_lens, scale, True, window, softcap, sinks, k_scale, v_scale)


def _decode_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, max_q: int = 1,
    mask: Tensor | None = None, invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_decode(q, k_cache, v_cache, page_table, q_starts, kv_lens, window, softcap, sinks, k_scale, v_scale, max_q, mask)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


def _check_merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> None:
    check(o_a.dim() == 3, _MERGE, "o_a", f"has {o_a.dim()} dimensions, expected 3 [T, H, D]")
    dtypes = (*_DTYPES, torch.float32)
    check(o_a.dtype in dtypes, _MERGE, "o_a", f"is {o_a.dtype}, expected bfloat16, float16 or float32")
    check(o_b.shape == o_a.shape, _MERGE, "o_b", f"has shape {tuple(o_b.shape)}, expected {tuple(o_a.shape)} like o_a")
    check(o_b.dtype == o_a.dtype, _MERGE, "o_b", f"is {o_b.dtype}, expected {o_a.dtype} like o_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check(lse.dtype == torch.float32, _MERGE, name, f"is {lse.dtype}, expected float32")
        check(lse.shape == o_a.shape[:2], _MERGE, name, f"has shape {tuple(lse.shape)}, expected {tuple(o_a.shape[:2])} (from o_a)")


def _merge_reference(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _check_merge(o_a, lse_a, o_b, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    sides = [
        torch.where(one.isneginf()[..., None], 0.0, torch.exp(one - lse)[..., None] * o.float()) for o, one in ((o_a, lse_a), (o_b, lse_b))
    ]
    return (sides[0] + sides[1]).to(o_a.dtype), lse


def _merge_fake(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _check_merge(o_a, lse_a, o_b, lse_b)
    return torch.empty_like(o_a, memory_format=torch.contiguous_format), torch.empty_like(lse_a, memory_format=torch.contiguous_format)


define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor q_starts, Tensor kv_lens, float scale, "
    "SymInt window=0, float softcap=0.0, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, int max_q=1, Tensor? mask=None, "
    "bool invariant=False) -> (Tensor, Tensor)",
    stem="attention/decode_attention",
    public="pyllm.ops.decode.decode_attention",
    reference=_decode_reference,
    fake=_decode_fake,
)
define(
    "merge_states(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) -> (Tensor, Tensor)",
    stem="attention/merge_states",
    public="pyllm.ops.decode.merge_states",
    reference=_merge_reference,
    fake=_merge_fake,
)
