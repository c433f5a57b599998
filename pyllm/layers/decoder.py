"""Decoder: a flat list of residual steps. The edge between two steps is the one place that joins layers, so the one place that
communicates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyllm import ops
from pyllm.layers.attention import Attn, KvSlot
from pyllm.layers.inputs import Summed
from pyllm.layers.linear import Embedding, Linear
from pyllm.layers.mlp import MLP
from pyllm.layers.moe import MoE
from pyllm.layers.norm import LayerNorm, Norm, Normed, RMSNorm
from pyllm.layers.rope import DynamicNtk
from pyllm.layers.spec import Spec, need_sizes, walk
from pyllm.ops import invariant
from pyllm.runtime.batch import Batch


@dataclass(frozen=True)
class Sum(Spec):
    """Parallel branches (GPT-J, Falcon, Cohere: one norm; GPT-NeoX: one norm each, given as a tuple in `Sub.pre`). One reduction for
    all."""

    branches: tuple[Spec, ...]

    reads_normed = True

    def __post_init__(self) -> None:
        if not self.branches:
            raise ValueError("Sum: branches is (), expected a tuple of layers, at least one")

    @property
    def partial(self) -> bool:  # type: ignore[override]
        return any(b.partial for b in self.branches)

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        return {"branches": self.branches}

    def forward(self, m: Any, x: Normed | tuple[Normed, ...], b: Batch) -> Tensor:
        inputs = x if isinstance(x, tuple) else (x,) * len(self.branches)
        for n in inputs:
            n.tensor()  # branches may want it in different forms: all start from this one
        total: Tensor | None = None
        for spec, branch, h in zip(self.branches, m.branches, inputs, strict=True):
            if self.partial and not spec.partial and m.rank:
                continue  # a full result enters the sum over ranks once
            y = call_body(branch, h, b)
            total = y if total is None else total + y
        assert total is not None
        return total


@dataclass(frozen=True)
class Sub(Spec):
    """One step of the residual stream: `res += scale * post(body(pre(res)))`. pre=None: the body reads the residual itself."""

    at: str
    pre: Norm | tuple[Norm, ...] | None
    body: Spec
    post: Norm | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        need_factor(f"Sub {self.at}", "scale", self.scale)
        if isinstance(self.pre, tuple) and not (isinstance(self.body, Sum) and len(self.body.branches) == len(self.pre)):
            raise ValueError(f"Sub {self.at}: pre has {len(self.pre)} norms; expected one for each branch of a Sum")

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        named = {"pre": self.pre, "body": self.body, "post": self.post}
        return {k: v for k, v in named.items() if v is not None}


def need_factor(owner: str, name: str, value: Any) -> None:
    """A factor of values is a positive finite number: zero would drop them, and none is served with a negative one."""
    if not 0 < value < math.inf:
        raise ValueError(f"{owner}: {name} is {value!r}, expected a positive number")


def call_body(m: Any, x: Normed | tuple[Normed, ...], b: Batch) -> Tensor:
    """A body that does not ask for the Normed gets the normed tensor."""
    return m(x if m.spec.reads_normed or isinstance(x, tuple) else x.tensor(), b)


@dataclass(frozen=True)
class Decoder(Spec):
    """Embedding, residual steps, final norm, head. `forward(batch)` gives logits `[R, vocab]` for the rows the batch asks for.

    head=None: tied to the embedding. positions: learned position embeddings added to the tokens'.
    embed_scale, rounded to the model's dtype, multiplies the tokens' embedding; logit_scale the logits, before logit_softcap.
    max_positions: longest sequence the declaration is right for. ignore: globs over checkpoint names that may be left unread.
    prefix: first segment of the names, which checkpoints of the bare model (without its head) leave out.
    at: segment before all names, of a checkpoint in which the decoder is a part.
    shared: globs over checkpoint names that several layers may read; each has a copy. Of any other tensor that is an error of `bind`.
    """

    embed: Embedding
    subs: tuple[Sub, ...]
    norm: RMSNorm | LayerNorm | None
    head: Linear | None = None
    positions: Embedding | None = None
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    max_positions: int = 8192
    ignore: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    prefix: str = ""
    at: str = ""
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need_sizes("Decoder", max_positions=self.max_positions)
        need_factor("Decoder", "embed_scale", self.embed_scale)
        need_factor("Decoder", "logit_scale", self.logit_scale)
        if self.logit_softcap is not None and not 0 < self.logit_softcap < math.inf:
            raise ValueError(f"Decoder: logit_softcap is {self.logit_softcap}, expected None or more than 0, and finite")
        self._check_widths()
        self._check_slots()
        self._check_positions()

    def _check_widths(self) -> None:
        """What reads or writes the residual stream has the embedding's width."""
        d = self.embed.d
        parts: list[tuple[str, Spec | None]] = [("norm", self.norm), ("head", self.head), ("positions", self.positions)]
        for sub in self.subs:
            parts += [(sub.at, n) for n in (*(sub.pre if isinstance(sub.pre, tuple) else (sub.pre,)), sub.post)]
            parts += [(sub.at, s) for s in (sub.body.branches if isinstance(sub.body, Sum) else (sub.body,))]
        for at, spec in parts:
            if isinstance(spec, (RMSNorm, LayerNorm, Linear, Embedding, Attn, MLP, MoE)) and spec.d != d:
                raise ValueError(f"Decoder: {type(spec).__name__} of {at} has d={spec.d}, expected {d} (from embed)")
        if self.head:
            rows = sum(p.size for p in self.head.parts)
            if rows != self.vocab_size or self.head.tp == "row":
                raise ValueError(
                    f"Decoder: head has {rows} rows and tp={self.head.tp!r}, expected {self.vocab_size} (from embed) and 'col'"
                )

    def _check_positions(self) -> None:
        """Past a rope's table a kernel would read what is behind it, past a table of learned positions it would add nothing."""
        for path, a in self.attns():
            if a.rope and not isinstance(a.rope.scaling, DynamicNtk) and a.rope.max_positions < self.max_positions:
                raise ValueError(
                    f"{path}: rope.max_positions is {a.rope.max_positions}, expected max_positions={self.max_positions} or more"
                )
        if self.positions and self.positions.vocab < self.max_positions:
            raise ValueError(f"Decoder: positions has {self.positions.vocab} rows, expected max_positions={self.max_positions} or more")

    def _check_slots(self) -> None:
        owner: dict[int, tuple[str, Attn]] = {}
        for path, a in self.attns():
            if a.own_kv and a.kv in owner:
                raise ValueError(f"KV slot {a.kv} has two owners: {owner[a.kv][0]} and {path}")
            if not a.own_kv and a.kv not in owner:
                raise ValueError(f"KV slot {a.kv} is read by {path} before any layer owns it")
            other, o = owner.setdefault(a.kv, (path, a))
            if o.slot != a.slot:
                raise ValueError(f"KV slot {a.kv}: {other} stores {o.slot}, {path} reads {a.slot}")

    def attns(self) -> list[tuple[str, Attn]]:
        return [(p, s) for p, s in walk(self) if isinstance(s, Attn)]

    def kv_slots(self) -> dict[int, KvSlot]:
        """KV slot number -> what it holds; the executor sizes its pool from this."""
        return {a.kv: a.slot for _, a in self.attns() if a.own_kv}

    @property
    def vocab_size(self) -> int:
        return self.embed.vocab

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        named = {"embed": self.embed, "positions": self.positions, "subs": self.subs, "norm": self.norm, "head": self.head}
        return {k: v for k, v in named.items() if v is not None}

    def forward(self, m: Any, b: Batch) -> Tensor:
        # transformers rounds the factor to the model's dtype; in bf16 sqrt(3584) is 59.75, not 59.87
        scale = 1.0 if self.embed_scale == 1.0 else torch.tensor(self.embed_scale, dtype=m.embed.weight.dtype).item()
        res = b.reduce(m.embed(b.ids, scale)) if m.tp > 1 else m.embed(b.ids, scale)
        if self.positions:
            extra = m.positions(b.positions)
            res = res + (b.reduce(extra) if m.tp > 1 else extra)
        delta: Tensor | None = None
        rows = b.logit_rows  # the final norm and the head see only the rows whose logits are wanted, and so does an MLP before them
        for i, sub in enumerate(m.subs, 1):
            if i == len(m.subs) and rows is not None and 0 < len(rows) < len(res) and isinstance(sub.spec.body, (MLP, MoE)):
                res, delta, rows = res[rows], None if delta is None else delta[rows], None
            x = edge(res, delta, getattr(sub, "pre", None), m.fuse)
            if isinstance(x, Normed):
                x.open = m.tp == 1 and not sub.spec.post and sub.spec.scale == 1.0 and not isinstance(sub.spec.body, Sum)
            result = call_body(sub.body, x, b)
            for n in x if isinstance(x, tuple) else (x,):
                n.settle()
            if isinstance(result, Summed):
                res, delta = result.stream, None
                continue
            delta = result
            if m.tp > 1 and sub.spec.body.partial:
                delta = b.reduce(delta)
            if sub.spec.post:
                delta = sub.post(delta)
            if sub.spec.scale != 1.0:
                delta = delta * sub.spec.scale  # not in place: a body may have given the residual itself
        if rows is not None:
            res, delta = res[rows], None if delta is None else delta[rows]
        h = edge(res, delta, m.norm if self.norm else None, m.fuse)
        assert isinstance(h, Normed)
        return self.logits(m, h, b)

    def logits(self, m: Any, h: Normed, b: Batch) -> Tensor:
        tied = invariant.invariant_linear if m.invariant else ops.linear
        y = m.head(h) if self.head else tied(h.tensor(), m.embed.weight)
        if m.tp > 1:
            y = b.gather(y)[:, : self.vocab_size].contiguous()
        y = y if self.logit_scale == 1.0 else y * self.logit_scale
        return ops.softcap(y, self.logit_softcap) if self.logit_softcap else y


def edge(res: Tensor, delta: Tensor | None, norms: Any, fuse: bool = True) -> Normed | tuple[Normed, ...]:
    """[residual add] + [next pre-norm] as one op (the all-reduce and the post-norm of the last step come before, in `Decoder.forward`)."""
    if delta is not None and not fuse:
        res.add_(delta)
        delta = None
    if norms is None or not hasattr(norms, "__len__"):
        return Normed(res, norms, delta)
    first = Normed(res, norms[0], delta)
    first.tensor()  # adds delta once, so that the other norms see the sum
    return (first, *(Normed(res, n) for n in norms[1:]))
