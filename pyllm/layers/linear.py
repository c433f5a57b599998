"""Linear: one GEMM that lists its checkpoint parts. That list drives loading, stacking, sharding, quantization and the printout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from pyllm import ops
from pyllm.layers.formats import Format, QuantPlan, resolve
from pyllm.layers.inputs import Gated, Pending, Rounded, Summed
from pyllm.layers.norm import Normed
from pyllm.layers.spec import Part, Spec, Split, Transform, Weight, groups, join, need_sizes, walk


@dataclass(frozen=True)
class StackedWeight(Weight):
    """The experts of a MoE layer as one checkpoint tensor `[experts, cols, rows]` (a vector: `[experts, rows]`), read transposed."""

    def sources(self, path: str) -> list[str]:
        return [join(path, p.name, self.suffix) for p in self.parts]

    def shape(self, part: Part) -> tuple[int, ...]:
        rows = part.of or part.size
        return (self.experts, rows) if self.cols is None else (self.experts, self.cols, rows)

    def load(self, get: Callable[[str, tuple[int, ...]], Tensor], path: str, rank: int, tp: int) -> Tensor:
        parts = dict(zip(self.sources(path), self.parts, strict=True))
        read = {name: get(name, self.shape(part)) for name, part in parts.items()}  # gate and up may be one tensor: read once
        one = Weight(self.parts, self.cols, self.shard, self.suffix, transform=self.transform)

        def expert(e: int) -> Tensor:
            return one.load(lambda name, _: read[name][e] if self.cols is None else read[name][e].T, path, rank, tp)

        return torch.stack([expert(e) for e in range(self.experts)])


@dataclass(frozen=True)
class Linear(Spec):
    """`y = x W^T + b`, W `[sum of parts, d]`.

    tp: None (whole on each rank) | "col" (output rows are cut; y is this rank's rows) | "row" (inputs are cut; y is a partial sum).
    A row-parallel bias is added by rank 0 alone, so that the reduction adds it once. experts > 0: a stack of such GEMMs (MoE).
    transform: TRANSPOSE (the checkpoint stores W^T) or UNGROUP (the parts are one tensor, stored head by head).
    stacked: the checkpoint has the experts as one tensor `name` `[experts, d, rows]`, their biases as `name_bias` `[experts, rows]`.
    """

    d: int
    parts: tuple[Part, ...]
    tp: str | None = None
    bias: bool = False
    experts: int = 0
    transform: Transform | None = None
    stacked: bool = False

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("Linear: parts is empty, expected at least one Part")
        need_sizes(f"Linear {self.parts[0].name}", d=self.d)
        if self.stacked and (self.experts < 1 or any("{}" in p.name for p in self.parts) or self.transform is Transform.TRANSPOSE):
            raise ValueError(f"Linear {self.parts[0].name}: stacked is set, expected experts, names without {{}} and no TRANSPOSE")
        if self.experts and not self.stacked and not all("{}" in p.name for p in self.parts):
            raise ValueError(f"Linear {self.parts[0].name}: experts is {self.experts}, expected {{}} in the name of each part")
        if self.tp not in (None, "col", "row"):
            raise ValueError(f"Linear {self.parts[0].name}: tp is {self.tp!r}, expected None, 'col' or 'row'")
        if self.transform is Transform.PLUS_ONE:
            raise ValueError(f"Linear {self.parts[0].name}: transform is PLUS_ONE, expected None, TRANSPOSE or UNGROUP")
        if self.transform is Transform.UNGROUP:
            rows, n = sum(p.size for p in self.parts), groups(self.parts)
            if any(p.name != self.parts[0].name or (p.of or p.size) != rows or p.size % n for p in self.parts):
                raise ValueError(f"Linear {self.parts[0].name}: transform is UNGROUP, expected parts that are all of one tensor's rows")

    def weights(self) -> dict[str, Weight]:
        if self.stacked:
            return self._stacked()
        out = {"weight": Weight(self.parts, self.d, self.tp, experts=self.experts, transform=self.transform)}
        if self.bias:
            order = None if self.transform is Transform.TRANSPOSE else self.transform
            shard = "col" if self.tp == "col" else None
            out["bias"] = Weight(self.parts, None, shard, suffix="bias", experts=self.experts, transform=order)
        return out

    def _stacked(self) -> dict[str, Weight]:
        of = dict(suffix="", experts=self.experts, transform=self.transform)
        out: dict[str, Weight] = {"weight": StackedWeight(self.parts, self.d, self.tp, **of)}  # type: ignore[arg-type]
        if self.bias:
            parts, shard = tuple(replace(p, name=f"{p.name}_bias") for p in self.parts), "col" if self.tp == "col" else None
            out["bias"] = StackedWeight(parts, None, shard, **of)  # type: ignore[arg-type]
        return out

    def names(self, path: str) -> list[str]:
        """The checkpoint names a quant plan is matched against: no suffix."""
        return [n.removesuffix(".weight") for n in self.weights()["weight"].sources(path)]

    def load(self, m: Any, env: Any) -> None:
        weights = self.weights()
        m.format = resolve(self.names(m.path), env.quant)
        m.sizes = weights["weight"].sizes(env.tp, m.path)
        if self.experts and m.format.no_experts:
            raise ValueError(f"quant plan: {self.names(m.path)[0]}: {m.format.no_experts}")
        wanted = m.format.reads(weights["weight"], lambda w: env.held(w, m.path))
        if not m.format.static:
            env.pass_over(replace(weights["weight"], suffix="input_scale"), m.path)
        if (self.transform or self.stacked) and any(w.row_pack * w.col_pack > 1 for w in wanted.values()):
            needs = self.transform.name if self.transform else "stacked"
            raise ValueError(f"quant plan: {self.names(m.path)[0]} needs {needs}, which the packed format {m.format.name} lacks")
        n, k, unit = sum(m.sizes), weights["weight"].local_cols(env.tp, m.path), m.format.multiple
        if n % unit or (k or 0) % unit:
            name = self.names(m.path)[0]
            raise ValueError(f"quant plan: {name} is [{n}, {k}], which {m.format.name} does not multiply; expected multiples of {unit}")
        stored = {name: env.read(w, m.path) for name, w in wanted.items()}
        for name, t in m.format.finish(stored).items():
            m.put(name, t)
        if self.bias:
            m.put("bias", env.read(weights["bias"], m.path))

    def forward(self, m: Any, x: Tensor | Pending) -> Tensor:
        bias = m.bias if self.bias and (self.tp != "row" or m.rank == 0) else None
        if isinstance(x, Pending):
            if m.fuse and m.format.takes_e4m3:
                return m.format.matmul_e4m3(m, *x.e4m3(m.format.given(m)), bias, x.dtype)
            if self._norms(m, x):
                return m.format.matmul_normed(m, x, bias)
            x = x.tensor()
        return m.format.matmul(m, x, bias)

    def _norms(self, m: Any, x: Any, gated: bool = False) -> bool:
        """The product applies the norm of its input itself."""
        if not (m.fuse and isinstance(x, Normed) and x.unread):
            return False
        return m.format.norms(len(x.residual), sum(m.sizes), x.residual.shape[1], x.dtype, x.residual.device.type, gated)

    def into(self, m: Any, x: Tensor | Pending, stream: Any) -> Tensor | Summed:
        """The product, or its sum with the residual of a body's input where that is open and the format's kernel adds it."""
        if m.fuse and isinstance(stream, Normed) and stream.open and not m.format.takes_e4m3:
            rows = x.tensor() if isinstance(x, Pending) else x
            if m.format.adds(len(rows), sum(m.sizes), rows.shape[1], rows.dtype, rows.device.type):
                stream.settle()
                return Summed(m.format.matmul(m, rows, m.bias if self.bias else None, residual=stream.residual))
            x = rows
        return m(x)

    def activated(self, m: Any, x: Tensor | Pending, act: str, then: Any) -> Tensor | Pending:
        """`act` of the product, for the product `then` alone: e4m3 with the scale that it asks for where the format's kernel gives that."""
        written = self._written(m, x, act, then, False)
        return ops.act(self.forward(m, x), act) if written is None else written

    def _written(self, m: Any, x: Tensor | Pending, act: str, then: Any, gated: bool) -> Rounded | None:
        scale = then.format.given(then) if m.fuse and then is not None else None
        if scale is None:
            return None
        if not m.format.writes(x.shape[0], sum(m.sizes), x.shape[1], x.dtype, x.device.type, gated):
            return None
        given: Any = x.tensor() if isinstance(x, Pending) and not m.format.takes_e4m3 else x
        if isinstance(given, Pending):
            given = given.e4m3(m.format.given(m))
        return Rounded(m.format.matmul_to_e4m3(m, given, m.bias if self.bias else None, scale, act, gated), scale, x.dtype)

    def gated(self, m: Any, x: Tensor | Pending, act: str, then: Any = None) -> Pending:
        """The product's rows `[gate | up]`, or their `act(gate) * up` where the format's kernel does that for so many rows; then: the only
        product that reads it."""
        if not m.fuse:
            return Gated(self.forward(m, x), act)
        written = self._written(m, x, act, then, True)
        if written is not None:
            return written
        if self._norms(m, x, gated=True):
            return Gated(m.format.matmul_normed(m, x, m.bias if self.bias else None, act), act, True)
        e4m3 = isinstance(x, Pending) and m.format.takes_e4m3
        given = m.format.given(m) if e4m3 else None
        rows = x.e4m3(given) if e4m3 else (x.tensor() if isinstance(x, Pending) else x,)  # type: ignore[union-attr]
        done = m.format.gates(len(rows[0]), sum(m.sizes), rows[0].shape[1], x.dtype, rows[0].device.type)
        product, rest = (m.format.matmul_e4m3, (x.dtype,)) if e4m3 else (m.format.matmul, ())
        y = product(m, *rows, m.bias if self.bias else None, *rest, **({"gate": act} if done else {}))
        return Gated(y, act, done)


@dataclass(frozen=True)
class Embedding(Spec):
    """A lookup table `[vocab, d]`, vocab-parallel: each rank holds a block of rows and gives zeros for the others' tokens."""

    name: str
    vocab: int
    d: int

    def __post_init__(self) -> None:
        need_sizes(f"Embedding {self.name}", vocab=self.vocab, d=self.d)

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((Part(self.name, self.vocab, split=Split.PAD),), self.d, "col")}

    def forward(self, m: Any, ids: Tensor, scale: float = 1.0) -> Tensor:
        return ops.embed_tokens(ids, m.weight, scale, m.rank * m.weight.shape[0])


def check_plan(owner: str, spec: Spec, quant: QuantPlan) -> None:
    """Each entry is a pair (glob, Format or None), and each glob that gives a format matches a product of the declaration."""
    if not isinstance(quant, Iterable):
        raise ValueError(f"{owner}: quant is {quant!r}, expected pairs (glob, Format)")
    for entry in quant:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(f"{owner}: quant holds {entry!r}, expected pairs (glob, Format)")
        if entry[1] is not None and not isinstance(entry[1], Format):
            raise ValueError(f"{owner}: quant gives {entry[0]!r} the format {entry[1]!r}, expected a Format or None")
    names = [n for path, s in walk(spec) if isinstance(s, Linear) for n in s.names(path)]
    for glob, fmt in quant:
        if fmt is not None and not any(fnmatchcase(n, glob) for n in names):
            raise ValueError(f"{owner}: quant has {glob!r}, which matches no product of the declaration (names have no .weight)")
