"""Attn: fused q/k/v projection, per-head norm, rotation, paged cache, attention, output projection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyllm import ops
from pyllm.layers.linear import Linear
from pyllm.layers.norm import Normed, RMSNorm
from pyllm.layers.rope import Rope
from pyllm.layers.spec import Part, Spec, Split, Weight, need_sizes
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
    rope=None: no position (NoPE). qk_norm: an RMSNorm over head_dim for q and k, with `{}` in its name. window: a token sees that many
    keys, itself included.
    scale: of q k^T; None: head_dim ** -0.5. sinks: one learned logit per head in the softmax's denominator.
    """

    at: str
    d: int
    heads: int
    kv_heads: int
    head_dim: int
    kv: int
    own_kv: bool = True
    rope: Rope | None = None
    qk_norm: RMSNorm | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")

    partial = True
    reads_normed = True

    def __post_init__(self) -> None:
        need_sizes(f"Attn {self.at}", d=self.d, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if len(self.names) != 4:
            raise ValueError(f"Attn {self.at}: names is {self.names!r}, expected four (q, k, v, o)")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"Attn {self.at}: softcap is {self.softcap}, expected None or more than 0")
        if self.qk_norm is not None and not isinstance(self.qk_norm, RMSNorm):
            raise ValueError(f"Attn {self.at}: qk_norm is a {type(self.qk_norm).__name__}, expected an RMSNorm")
        if self.heads % self.kv_heads:
            raise ValueError(f"Attn {self.at}: heads is {self.heads}, expected a multiple of kv_heads={self.kv_heads}")
        if self.rope and self.rope.dim > self.head_dim:
            raise ValueError(f"Attn {self.at}: rope.dim is {self.rope.dim}, expected at most head_dim={self.head_dim}")
        if self.qk_norm and self.qk_norm.d != self.head_dim:
            raise ValueError(f"Attn {self.at}: qk_norm.d is {self.qk_norm.d}, expected head_dim={self.head_dim}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"Attn {self.at}: window is {self.window}, expected None or at least 1")

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        dim, (q, k, v, o) = self.head_dim, self.names
        parts = [Part(q, self.heads * dim, dim)]
        if self.own_kv:
            parts += [Part(n, self.kv_heads * dim, dim, Split.REPLICATE) for n in (k, v)]
        out: dict[str, Spec | tuple[Spec, ...]] = {
            "qkv": Linear(self.d, tuple(parts), "col", self.qkv_bias),
            "o": Linear(self.heads * dim, (Part(o, self.d),), "row", self.o_bias),
        }
        if self.qk_norm:
            out["q_norm"] = replace(self.qk_norm, name=self.qk_norm.name.format("q"))
            if self.own_kv:
                out["k_norm"] = replace(self.qk_norm, name=self.qk_norm.name.format("k"))
        return out

    def weights(self) -> dict[str, Weight]:
        return {"sinks": Weight((Part("sinks", self.heads),), None, "col", suffix="", fp32=True)} if self.sinks else {}

    @property
    def slot(self) -> KvSlot:
        return KvSlot(self.kv_heads, self.head_dim, self.window)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def forward(self, m: Any, x: Tensor | Normed, b: Batch) -> Tensor:
        cache = b.caches[self.kv]
        q = (self.project if m.fuse else self.project_unfused)(m, m.qkv(x), cache, b)
        o, _ = ops.paged_attention(
            q,
            cache.k,
            cache.v,
            b.page_table,
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
        return m.o(o.flatten(1))

    def project(self, m: Any, qkv: Tensor, cache: KvCache, b: Batch) -> Tensor:
        """Per-head norm, rotation and append in one op; returns q `[T, H, D]` of this rank."""
        cos_sin, rows = b.rope(self.rope) if self.rope else (None, None)
        heads, *kv = (size // self.head_dim for size in m.qkv.sizes)
        return ops.qk_norm_rope_append(
            qkv,
            heads,
            kv[0] if kv else 0,
            cos_sin,
            rows,
            interleaved=self.rope.interleaved if self.rope else False,
            q_weight=m.q_norm.weight if self.qk_norm else None,
            k_weight=m.k_norm.weight if self.qk_norm and kv else None,
            eps=self.qk_norm.eps if self.qk_norm else 0.0,
            k_cache=cache.k if kv else None,
            v_cache=cache.v if kv else None,
            slots=b.slots if kv else None,
            k_scale=cache.k_scale if kv else None,
            v_scale=cache.v_scale if kv else None,
        )

    def project_unfused(self, m: Any, qkv: Tensor, cache: KvCache, b: Batch) -> Tensor:
        """The same as separate ops: norm of q, norm of k, rotation of q, of k, append."""
        q, *kv = qkv.split(m.qkv.sizes, -1)
        cos_sin, rows = b.rope(self.rope) if self.rope else (None, None)

        def one(t: Tensor, norm: Any) -> Tensor:
            t, heads = t.contiguous(), t.shape[-1] // self.head_dim
            if norm is not None:
                t = norm(t.view(-1, self.head_dim)).view(t.shape)
            return ops.qk_norm_rope_append(t, heads, 0, cos_sin, rows, interleaved=self.rope.interleaved if self.rope else False)

        q = one(q, m.q_norm if self.qk_norm else None)
        if kv:
            k = one(kv[0], m.k_norm if self.qk_norm else None)
            heads = k.shape[1]
            rest = torch.cat([k.flatten(1), k.flatten(1), kv[1]], -1)  # the append op wants q heads too; theirs are ignored
            where = dict(k_cache=cache.k, v_cache=cache.v, slots=b.slots, k_scale=cache.k_scale, v_scale=cache.v_scale)
            ops.qk_norm_rope_append(rest, heads, heads, None, None, **where)  # type: ignore[arg-type]
        return q
