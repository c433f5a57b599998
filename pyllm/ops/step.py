"""A whole decode step of a Llama-like model as one op: embedding, all layers, final norm and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyllm.ops.attention import paged_attention
from pyllm.ops.dense import linear_fp8
from pyllm.ops.fused import ACTS, act_mul, act_mul_fp8, embed_tokens
from pyllm.ops.gemm import linear
from pyllm.ops.norm import quantize_fp8, rms_norm
from pyllm.ops.registry import check, define
from pyllm.ops.rope import qk_norm_rope_append
from pyllm.ops.step_checks import StepCall, check_call, workspace_bytes


@dataclass(frozen=True)
class StepModel:
    """The constants of `decode_step`. Lists have an entry for each of N layers, or none where that is said.

    embed, head: `[V, d]` bf16, which may be one tensor. attn_norm, mlp_norm (lists) and norm: `[d]` fp32.
    qkv: `[(H + 2K) * D, d]`, o: `[d, H * D]`, up: `[2F, d]` (gate rows, then up rows), down: `[d, F]`; all bf16, or all e4m3.
    qkv_scale, o_scale, up_scale, down_scale: fp32, one scale per output row of an e4m3 weight; none for bf16.
    qkv_bias: `[(H + 2K) * D]` bf16, or none. q_norm, k_norm: `[D]` fp32, or none of either. eps: of all norms. act: one of `ACTS`.
    """

    embed: Tensor
    attn_norm: Sequence[Tensor]
    qkv: Sequence[Tensor]
    o: Sequence[Tensor]
    mlp_norm: Sequence[Tensor]
    up: Sequence[Tensor]
    down: Sequence[Tensor]
    norm: Tensor
    head: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    act: str
    softmax_scale: float
    qkv_scale: Sequence[Tensor] = ()
    o_scale: Sequence[Tensor] = ()
    up_scale: Sequence[Tensor] = ()
    down_scale: Sequence[Tensor] = ()
    qkv_bias: Sequence[Tensor] = ()
    q_norm: Sequence[Tensor] = ()
    k_norm: Sequence[Tensor] = ()


def decode_step(
    model: StepModel,
    ids: Tensor,
    slots: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    cos_sin: Tensor,
    rope_rows: Tensor,
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    workspace: Tensor,
    k_scale: Sequence[Tensor] = (),
    v_scale: Sequence[Tensor] = (),
) -> Tensor:
    """Logits of one decode step of M = 1 to 4 sequences, one token each, through all N layers of a pre-norm decoder.

    With `h = embed[ids]`, each layer adds to h first `attention(norm(h))`, then `down(act(gate(norm(h))) * up(norm(h)))`; the result is
    `head(norm(h))`. Keys and values of the tokens are stored in the caches, **in place**, and are seen by their own queries.

    Args:
        model: weights and sizes, a `pyllm.ops.step.StepModel`, whose text has their shapes; constants: they may be read before the
            kernels ahead in the stream have finished.
        ids: int32 `[M]`. slots: int32 `[M]`, `page * P + offset` of each token, negative: stored nowhere.
        kv_lens: int32 `[M]`, keys of each sequence, this token included; 0 for a row without a sequence, whose logits mean nothing.
        page_table: int32 `[M, W]` rows, which may be strided; entries behind a sequence's last page are not read.
        cos_sin, rope_rows: fp32 `[L, R]` and int32 `[M]`, as in `qk_norm_rope_append` (its rows), halves paired.
        k_caches, v_caches: a list each of `[pages, P, K, D]` per layer, bf16 or e4m3, P a multiple of 16; pages may be strided, all
            caches alike.
        workspace: uint8 on the same device, from `pyllm.ops.step.step_workspace`: zeroed once, then kept, for one stream at a time.
        k_scale, v_scale: fp32 `[1]` or `[K]` per layer, dequantisation scales of e4m3 caches; none for bf16.

    Returns:
        `[M, V]` bf16, contiguous.

    On a CPU these are the ops `embed_tokens`, `rms_norm`, `linear` or `linear_fp8`, `qk_norm_rope_append`, `paged_attention`, `act_mul`
    one after the other. The kernel rounds where they do, but for sums in another order, and in bf16 for products with their norm as
    `norm_linear` has them, the gated activation in fp32 and the residual's sum rounded once.

    Raises:
        ValueError (RuntimeError on CUDA): sizes, dtypes or lists outside the above; D is 64 or 128, H / K at most 8, d and F multiples
        of 64, d at most 8192, F at most 32768 (4 rows: 17,856), V a multiple of 8, N at most 128, K at most 64. The values of
        index tensors are not checked on CUDA. There the matrices start at multiples of 128 bytes.
    """
    check(model.act in ACTS, "decode_step", "act", f"is {model.act!r}, expected one of {', '.join(ACTS)}")
    m = model
    return torch.ops.pyllm.decode_step(
        ids, slots, kv_lens, page_table, cos_sin, rope_rows, m.embed, m.attn_norm, m.qkv, m.o, m.mlp_norm, m.up, m.down, m.norm, m.head,
        k_caches, v_caches, workspace, m.heads, m.kv_heads, m.head_dim, m.eps, ACTS[m.act], m.softmax_scale, m.qkv_scale, m.o_scale,
        m.up_scale, m.down_scale, m.qkv_bias, m.q_norm, m.k_norm, k_scale, v_scale,
    )  # fmt: skip


def step_workspace(model: StepModel, rows: int) -> Tensor:
    """What `decode_step` of up to so many rows keeps from one call to the next, on the model's device; zeros."""
    d, ffn = model.embed.shape[1], model.up[0].shape[0] // 2
    size = workspace_bytes(rows, len(model.qkv), d, model.heads, model.kv_heads, model.head_dim, ffn)
    return torch.zeros(size, dtype=torch.uint8, device=model.embed.device)


def _chain(*arguments: object) -> Tensor:
    """The ops that the kernel replaces, one after the other."""
    c = StepCall(*arguments)  # type: ignore[arg-type]
    check_call(c)
    stream, delta, fp8 = embed_tokens(c.ids, c.embed), None, len(c.qkv_scale) > 0
    starts = torch.arange(len(c.ids) + 1, dtype=torch.int32, device=c.ids.device)

    def normed(weight: Tensor, quant: str | None) -> Any:
        return rms_norm(stream, weight, c.eps, None, quant) if delta is None else rms_norm(delta, weight, c.eps, stream, quant)

    def product(name: str, i: int, x: Any, bias: Tensor | None = None) -> Tensor:
        weight = getattr(c, name)[i]
        if not fp8:
            return linear(x, weight, bias)
        q, scale = x
        return linear_fp8(q, weight, scale, getattr(c, f"{name}_scale")[i], bias)

    def entry(each: Sequence[Tensor], i: int) -> Tensor | None:
        return each[i] if each else None

    quant = "token" if fp8 else None
    for i in range(len(c.qkv)):
        qkv = product("qkv", i, normed(c.attn_norm[i], quant), entry(c.qkv_bias, i))
        k, v, k_scale, v_scale = c.k_caches[i], c.v_caches[i], entry(c.k_scale, i), entry(c.v_scale, i)
        q = qk_norm_rope_append(
            qkv, c.heads, c.kv_heads, c.cos_sin, c.rope_rows, q_weight=entry(c.q_norm, i), k_weight=entry(c.k_norm, i), eps=c.eps,
            k_cache=k, v_cache=v, slots=c.slots, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        keys, scale = (k, v, c.page_table, starts, c.kv_lens), c.softmax_scale
        rows, _ = paged_attention(q, *keys, scale=scale, k_scale=k_scale, v_scale=v_scale, max_q=1)
        delta = product("o", i, quantize_fp8(rows.flatten(1), "token") if fp8 else rows.flatten(1))
        both = product("up", i, normed(c.mlp_norm[i], quant))
        act = list(ACTS)[c.act]
        delta = product("down", i, act_mul_fp8(both, act) if fp8 else act_mul(both, act))
    return linear(normed(c.norm, None), c.head)


def _fake(*arguments: object) -> Tensor:
    c = StepCall(*arguments)  # type: ignore[arg-type]
    check_call(c)
    return c.embed.new_empty(c.ids.shape[0], c.embed.shape[0])


define(
    "decode_step(Tensor ids, Tensor slots, Tensor kv_lens, Tensor page_table, Tensor cos_sin, Tensor rope_rows, Tensor embed,"
    " Tensor[] attn_norm, Tensor[] qkv, Tensor[] o, Tensor[] mlp_norm, Tensor[] up, Tensor[] down, Tensor norm, Tensor head,"
    " Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor(c!) workspace, int heads, int kv_heads, int head_dim, float eps, int act,"
    " float softmax_scale, Tensor[] qkv_scale, Tensor[] o_scale, Tensor[] up_scale, Tensor[] down_scale, Tensor[] qkv_bias,"
    " Tensor[] q_norm, Tensor[] k_norm, Tensor[] k_scale, Tensor[] v_scale) -> Tensor",
    stem="step/decode_step",
    public="pyllm.ops.step.decode_step",
    reference=_chain,
    fake=_fake,
)
