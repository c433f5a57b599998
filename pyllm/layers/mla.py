"""MLA: attention whose queries, keys and values come from low-rank latents (DeepSeek-V2), stored as expanded keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyllm.layers.attention import Attn
from pyllm.layers.linear import Linear
from pyllm.layers.norm import Normed, RMSNorm
from pyllm.layers.spec import Part, Spec, need_sizes


@dataclass(frozen=True)
class MLA(Attn):
    """`Attn` with `heads` keys and values that are made from one latent of `kv_rank` values and one rotated part that all heads share.

    head_dim: of queries and keys, the first `head_dim - rope.dim` values as projected, the last `rope.dim` rotated; v_dim: of values.
    q_rank: queries come from a latent of their own, None: from the input. kv_heads is heads. latent_eps: of the norms of the latents.
    o_bias: of the projections to the latents and of o; the others have none.
    The cache holds expanded keys and values, `[heads, head_dim]` each, values filled up with zeros: at head_dim 192 and v_dim 128 that is
    1.2 times what they hold, and with DeepSeek-V2's kv_rank 512 and 128 heads 85 times the latent and its rotated part.
    Names: q_proj, or q_a_proj, q_a_layernorm, q_b_proj; kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj; o_proj.
    """

    kv_rank: int = 0
    v_dim: int = 0
    q_rank: int | None = None
    latent_eps: float = 1e-6

    def __post_init__(self) -> None:
        owner = f"MLA {self.at}"
        need_sizes(owner, kv_rank=self.kv_rank, v_dim=self.v_dim, **({} if self.q_rank is None else {"q_rank": self.q_rank}))
        super().__post_init__()
        if self.rope is None or self.rope.dim >= self.head_dim:
            raise ValueError(f"{owner}: rope is {self.rope}, expected one of fewer dims than head_dim={self.head_dim}")
        if self.kv_heads != self.heads:
            raise ValueError(f"{owner}: kv_heads is {self.kv_heads}, expected heads={self.heads}")
        if self.v_dim > self.head_dim:
            raise ValueError(f"{owner}: v_dim is {self.v_dim}, expected at most head_dim={self.head_dim}")
        plain = Attn(self.at, self.d, self.heads, self.kv_heads, self.head_dim, self.kv)
        for name in ("own_kv", "qk_norm", "whole_norm", "qkv_bias", "names", "qkv_transform", "o_transform"):
            if getattr(self, name) != getattr(plain, name):
                raise ValueError(f"{owner}: {name} is {getattr(self, name)!r}, expected {getattr(plain, name)!r}, as MLA has no other")

    @property
    def nope_dim(self) -> int:
        """Dims of a query or key without a rotation."""
        assert self.rope is not None
        return self.head_dim - self.rope.dim

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        latent = Part("kv_a_proj_with_mqa", self.kv_rank + self.head_dim - self.nope_dim)
        out: dict[str, Spec | tuple[Spec, ...]]
        if self.q_rank is None:
            out = {
                "q": Linear(self.d, (Part("q_proj", self.heads * self.head_dim, self.head_dim),), "col"),
                "low": Linear(self.d, (latent,), bias=self.o_bias),
            }
        else:
            out = {
                "low": Linear(self.d, (Part("q_a_proj", self.q_rank), latent), bias=self.o_bias),
                "q_low_norm": RMSNorm("q_a_layernorm", self.q_rank, self.latent_eps),
                "q": Linear(self.q_rank, (Part("q_b_proj", self.heads * self.head_dim, self.head_dim),), "col"),
            }
        each = self.nope_dim + self.v_dim
        return out | {
            "kv_low_norm": RMSNorm("kv_a_layernorm", self.kv_rank, self.latent_eps),
            "expand": Linear(self.kv_rank, (Part("kv_b_proj", self.heads * each, each),), "col"),
            "o": Linear(self.heads * self.v_dim, (Part("o_proj", self.d),), "row", self.o_bias),
        }

    def read_qkv(self, m: Any, x: Tensor | Normed) -> tuple[Tensor, list[int]]:
        """As MHA, the rotated dims of a head first: a score does not depend on the order of dims, and the rotation's op turns the first."""
        h, nope, dim = x.tensor() if isinstance(x, Normed) else x, self.nope_dim, self.head_dim
        *q_low, latent = m.low(h).split(m.low.sizes, -1)
        q = m.q(m.q_low_norm(q_low[0].contiguous()) if q_low else h).unflatten(-1, (-1, dim))
        keys_values = m.expand(m.kv_low_norm(latent[:, : self.kv_rank].contiguous())).unflatten(-1, (-1, nope + self.v_dim))
        out = q.new_zeros(len(q), 3, q.shape[1], dim)
        rotated, plain, rest = out[..., : dim - nope], out[..., dim - nope :], q.shape[1] * dim
        rotated[:, 0], plain[:, 0] = q[..., nope:], q[..., :nope]
        rotated[:, 1], plain[:, 1] = latent[:, None, self.kv_rank :], keys_values[..., :nope]
        out[:, 2, :, : self.v_dim] = keys_values[..., nope:]
        return out.flatten(1), [rest] * 3

    def values(self, o: Tensor) -> Tensor:
        return o[..., : self.v_dim].flatten(1)
