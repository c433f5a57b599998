"""Attn: fused q/k/v projection, per-head norm, rotation, paged cache, attention, output projection."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyllm.jit.variant import AttentionVariant
from pyllm.layers.inputs import Summed
from pyllm.layers.linear import Linear
from pyllm.layers.norm import LayerNorm, Normed, RMSNorm
from pyllm.layers.rope import Rope
from pyllm.layers.spec import Part, Spec, Split, Transform, Weight, consecutive, need_sizes
from pyllm.ops import invariant
from pyllm.ops.attention import paged_attention  # these three not from `pyllm.ops`: to hand on a dozen keywords takes half a microsecond
from pyllm.ops.rope import qk_norm_rope_append
from pyllm.ops.simple import variant_attention
from pyllm.runtime.batch import Batch, KvCache


@dataclass(frozen=True)
class KvSlot:
    """What one KV slot of the cache holds, in global sizes."""

    kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True)
class Attn(Spec):
    """Attention of `heads` query heads over `kv_heads` (MHA: equal, GQA, MQA: 1) of `head_dim`, causal.

    kv: KV slot; two layers with one number share one cache, and own_kv=False projects q alone and reads the slot that another layer filled.
    rope=None: no position (NoPE). qk_norm: an RMSNorm for q and k, with `{}` in its name; over head_dim, or with
    whole_norm over all heads of q (of k) at once: its d is then heads * head_dim. A LayerNorm there is over head_dim, without bias, and its
    weight is each head's own, `[heads, head_dim]`. window: a token sees that many keys, itself included.
    scale: of q k^T; None: head_dim ** -0.5. sinks: one learned logit per head in the softmax's denominator.
    names: q, k, v, o; one name for q, k and v is one fused tensor. qkv_transform, o_transform: how the checkpoint stores them (`Linear`).
    variant: a score modification or mask of your own (`pyllm.jit`); tensors that it asks for are `Batch.tensors`.
    """

    at: str
    d: int
    heads: int
    kv_heads: int
    head_dim: int
    kv: int
    own_kv: bool = True
    rope: Rope | None = None
    qk_norm: RMSNorm | LayerNorm | None = None
    whole_norm: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    qkv_transform: Transform | None = None
    o_transform: Transform | None = None
    variant: AttentionVariant | None = None

    partial = True
    reads_normed = True

    def __post_init__(self) -> None:
        need_sizes(f"Attn {self.at}", d=self.d, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.head_dim % 8 or self.head_dim > 256:
            raise ValueError(f"Attn {self.at}: head_dim is {self.head_dim}, expected a multiple of 8, at most 256")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"Attn {self.at}: softcap is {self.softcap}, expected None or more than 0, and finite")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError(f"Attn {self.at}: scale is {self.scale!r}, expected a positive number, or None for head_dim ** -0.5")
        if isinstance(self.qk_norm, LayerNorm) and (self.qk_norm.bias or self.whole_norm):
            raise ValueError(f"Attn {self.at}: qk_norm is a LayerNorm, expected bias=False and no whole_norm with it")
        if self.heads % self.kv_heads:
            raise ValueError(f"Attn {self.at}: heads is {self.heads}, expected a multiple of kv_heads={self.kv_heads}")
        if self.rope and self.rope.dim > self.head_dim:
            raise ValueError(f"Attn {self.at}: rope.dim is {self.rope.dim}, expected at most head_dim={self.head_dim}")
        if self.whole_norm and not self.qk_norm:
            raise ValueError(f"Attn {self.at}: whole_norm is set, expected a qk_norm with it")
        want = self.head_dim * (self.heads if self.whole_norm else 1)
        if self.qk_norm and self.qk_norm.d != want:
            expected = f"heads * head_dim={want}" if self.whole_norm else f"head_dim={want}"
            raise ValueError(f"Attn {self.at}: qk_norm.d is {self.qk_norm.d}, expected {expected}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"Attn {self.at}: window is {self.window!r}, expected None or a positive integer")

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        dim, (q, k, v, o) = self.head_dim, self.names
        parts = consecutive(Part(q, self.heads * dim, dim), *(Part(n, self.kv_heads * dim, dim, Split.REPLICATE) for n in (k, v)))
        out: dict[str, Spec | tuple[Spec, ...]] = {
            "qkv": Linear(self.d, parts if self.own_kv else parts[:1], "col", self.qkv_bias, transform=self.qkv_transform),
            "o": Linear(self.heads * dim, (Part(o, self.d),), "row", self.o_bias, transform=self.o_transform),
        }
        for one, heads in (("q", self.heads), ("k", self.kv_heads)) if self.own_kv else (("q", self.heads),):
            if self.qk_norm:
                size: dict[str, Any] = {"d": heads * dim, "unit": dim} if self.whole_norm else {}
                size |= {"heads": heads} if isinstance(self.qk_norm, LayerNorm) else {}
                out[f"{one}_norm"] = replace(self.qk_norm, name=self.qk_norm.name.format(one), **size)
        return out

    def weights(self) -> dict[str, Weight]:
        return {"sinks": Weight((Part("sinks", self.heads),), None, "col", suffix="", fp32=True)} if self.sinks else {}

    @property
    def slot(self) -> KvSlot:
        return KvSlot(self.kv_heads, self.head_dim, self.window)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def forward(self, m: Any, x: Tensor | Normed, b: Batch) -> Tensor | Summed:
        cache = b.caches[self.kv]
        qkv, sizes = self.read_qkv(m, x)
        if self.qk_norm and not self.head_norm:
            self.norm_rows(m, qkv, b)
        q = (self.project if m.fuse else self.project_unfused)(m, qkv, sizes, cache, b)
        if self.variant:
            return m.o(self.values(self.attend_variant(self.variant, m, q, cache, b)))
        o, _ = (invariant.invariant_attention if m.invariant and q.is_cuda else paged_attention)(
            q,
            cache.k,
            cache.v,
            b.paged(cache)[0],
            b.q_starts,
            b.kv_lens,
            scale=self.softmax_scale,
            window=self.window,
            softcap=self.softcap,
            sinks=m.sinks if self.sinks else None,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            max_q=b.max_q,
        )
        return m.o.spec.into(m.o, self.values(o), x)

    def read_qkv(self, m: Any, x: Tensor | Normed) -> tuple[Tensor, list[int]]:
        """Queries, keys and values `[T, sum of sizes]` of this rank before norm and rotation, and how many columns each has."""
        return m.qkv(x), m.qkv.sizes

    def values(self, o: Tensor) -> Tensor:
        """What the output projection reads of the attention's result `[T, H, D]`."""
        return o.flatten(1)

    def attend_variant(self, variant: AttentionVariant, m: Any, q: Tensor, cache: KvCache, b: Batch) -> Tensor:
        o, _ = variant_attention(
            q,
            cache.k,
            cache.v,
            b.q_starts,
            variant,
            page_table=b.paged(cache)[0],
            kv_lens=b.kv_lens,
            scale=self.softmax_scale,
            window=self.window,
            softcap=self.softcap,
            sinks=m.sinks if self.sinks else None,
            max_q=b.max_q,
            tensors={name: t for name, t in b.tensors.items() if name in variant.asked},
            first_head=m.rank * q.shape[1],
        )
        return o

    @property
    def head_norm(self) -> bool:
        """The norm of each head, which `qk_norm_rope_append` applies."""
        return isinstance(self.qk_norm, RMSNorm) and not self.whole_norm

    def norm_rows(self, m: Any, qkv: Tensor, b: Batch) -> None:
        """Norm of q and of k that no other op applies, in place."""
        parts = list(zip(qkv.split(m.qkv.sizes, -1), (m.q_norm, m.k_norm) if self.own_kv else (m.q_norm,), strict=False))
        if m.tp == 1 or not self.whole_norm:
            for t, norm in parts:
                t.copy_(norm(t))
            return
        # every rank adds its share of the mean; KV heads that several ranks hold count once
        means = b.reduce(torch.stack([t.float().square().mean(-1) / m.tp for t, _ in parts], -1))
        for (t, norm), mean in zip(parts, means.unbind(-1), strict=True):
            t.copy_(t.float() * torch.rsqrt(mean[:, None] + norm.spec.eps) * norm.weight)

    def project(self, m: Any, qkv: Tensor, sizes: list[int], cache: KvCache, b: Batch) -> Tensor:
        """Per-head norm, rotation and append in one op; returns q `[T, H, D]` of this rank."""
        cos_sin, rows = b.rope(self.rope) if self.rope else (None, None)
        heads, *kv = (size // self.head_dim for size in sizes)
        return qk_norm_rope_append(
            qkv,
            heads,
            kv[0] if kv else 0,
            cos_sin,
            rows,
            interleaved=self.rope.interleaved if self.rope else False,
            q_weight=m.q_norm.weight if self.head_norm else None,
            k_weight=m.k_norm.weight if self.head_norm and kv else None,
            eps=self.qk_norm.eps if self.qk_norm and self.head_norm else 0.0,
            k_cache=cache.k if kv else None,
            v_cache=cache.v if kv else None,
            slots=b.paged(cache)[1] if kv else None,
            k_scale=cache.k_scale if kv else None,
            v_scale=cache.v_scale if kv else None,
        )

    def project_unfused(self, m: Any, qkv: Tensor, sizes: list[int], cache: KvCache, b: Batch) -> Tensor:
        """The same as separate ops: norm of q, norm of k, rotation of q, of k, append."""
        q, *kv = qkv.split(sizes, -1)
        cos_sin, rows = b.rope(self.rope) if self.rope else (None, None)

        def one(t: Tensor, norm: Any) -> Tensor:
            t, heads = t.contiguous(), t.shape[-1] // self.head_dim
            if norm is not None:
                t = norm(t.view(-1, self.head_dim)).view(t.shape)
            return qk_norm_rope_append(t, heads, 0, cos_sin, rows, interleaved=self.rope.interleaved if self.rope else False)

        q = one(q, m.q_norm if self.head_norm else None)
        if kv:
            k = one(kv[0], m.k_norm if self.head_norm else None)
            heads = k.shape[1]
            rest = torch.cat([k.flatten(1), k.flatten(1), kv[1]], -1)  # the append op wants q heads too; theirs are ignored
            where = dict(k_cache=cache.k, v_cache=cache.v, slots=b.paged(cache)[1], k_scale=cache.k_scale, v_scale=cache.v_scale)
            qk_norm_rope_append(rest, heads, heads, None, None, **where)  # type: ignore[arg-type]
        return q
