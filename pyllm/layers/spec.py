"""The mechanism: a frozen spec tree -> a bound `nn.Module`. No prefix, rank, dtype or layer index is threaded by hand.

A `Spec` holds global sizes and names; `Part` and `Weight` say which checkpoint tensors make one runtime tensor and how a tensor-parallel
rank cuts them. `walk`, `plan` and `rewrite` read or change a declaration without any tensor; `bind` (in bind.py) loads it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyllm.layers.typed import Typed, typed_call
from pyllm.ops.kinds import value_name

S = TypeVar("S", bound="Spec")


class Split(enum.Enum):
    """What a part does when its units do not divide by the number of ranks."""

    EVEN = "even"  # an error that names the part
    REPLICATE = "replicate"  # fewer units than ranks: several ranks hold the same unit (KV heads)
    PAD = "pad"  # the last ranks are filled up with zero rows (vocabulary)


class Transform(enum.Enum):
    """Changes made to a tensor as it is loaded; named, so that specs stay comparable and printable."""

    PLUS_ONE = "plus_one"  # Gemma stores norm weights as w - 1
    TRANSPOSE = "transpose"  # checkpoints that store [in, out]
    UNGROUP = "ungroup"  # a fused tensor stored head by head, [groups][parts][rows]: brought to [parts][groups][rows]

    def apply(self, t: Tensor, parts: tuple[Part, ...]) -> Tensor:
        if self is Transform.UNGROUP:
            n = groups(parts)
            rows = t.unflatten(0, (n, -1)).split([p.size // n for p in parts], 1)
            return torch.cat([r.flatten(0, 1) for r in rows])
        return t.float() + 1 if self is Transform.PLUS_ONE else t.T


def need_sizes(owner: str, **sizes: Any) -> None:
    """Every size is a positive integer; the error names the owner and the field."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
            raise ValueError(f"{owner}: {name} is {value_name(value)}, expected a positive integer, less than 2^31")


@dataclass(frozen=True)
class Part(Typed):
    """`size` output rows that come from one checkpoint tensor, named relative to the owner's path.

    unit: rows that stay together on a rank (head_dim). start, of: the part is rows start .. start+size of a checkpoint tensor of `of` rows.
    """

    name: str
    size: int
    unit: int = 1
    split: Split = Split.EVEN
    start: int = 0
    of: int | None = None

    def __post_init__(self) -> None:
        need_sizes(f"Part {self.name}", size=self.size, unit=self.unit)
        end = self.size if self.of is None else self.of
        if self.start < 0 or self.start + self.size > end:
            raise ValueError(f"Part {self.name}: rows {self.start}..{self.start + self.size} are outside the {end} of the tensor (of=)")

    def rows(self, tp: int, where: str = "") -> int:
        """Rows a rank holds; raises where `tp` does not fit the part."""
        units = self.size // self.unit
        if units * self.unit != self.size:
            raise ValueError(f"{where}{self.name}: size {self.size} is not a multiple of its unit {self.unit}")
        if units % tp == 0:
            return units // tp * self.unit
        if self.split is Split.PAD:
            return -(-units // tp) * self.unit
        if self.split is Split.REPLICATE and tp % units == 0:
            return self.unit
        rule = "a multiple or a divisor of" if self.split is Split.REPLICATE else "a multiple of"
        raise ValueError(
            f"{where}{self.name}: {units} units of {self.unit} rows cannot be cut for tp={tp}; the number of units must be {rule} tp"
        )

    def cut(self, t: Tensor, dim: int, rank: int, tp: int, pack: int = 1) -> Tensor:
        """This rank's rows of the part; `pack` rows share one stored row."""
        n, size = self.rows(tp) // pack, self.size // pack
        units = self.size // self.unit
        first = rank * units // tp * self.unit // pack if units < tp and self.split is Split.REPLICATE else rank * n
        have = max(min(size - first, n), 0)
        out = t.narrow(dim, min(first, size), have)
        if have < n:
            pad = list(t.shape)
            pad[dim] = n - have
            out = torch.cat([out, t.new_zeros(pad)], dim)
        return out


def groups(parts: tuple[Part, ...]) -> int:
    """Groups of a tensor stored head by head: as many as the part with the fewest units (the KV heads) has."""
    return min(p.size // p.unit for p in parts)


def consecutive(*parts: Part) -> tuple[Part, ...]:
    """Parts that share a name become consecutive rows of that one checkpoint tensor (a fused qkv_proj)."""
    out = []
    for i, p in enumerate(parts):
        start, rest = (sum(o.size for o in some if o.name == p.name) for some in (parts[:i], parts[i:]))
        out.append(replace(p, start=start, of=start + rest if start + rest > p.size else None))
    return tuple(out)


@dataclass(frozen=True)
class Weight(Typed):
    """One runtime tensor: checkpoint tensors `path.part.suffix` stacked along their output rows.

    cols: input size (None: a vector). shard: None | "col" (output rows) | "row" (input). experts > 0: part names hold one `{}`, stacked
    on a new dim 0.
    row_dim, row_pack, col_pack: where the output rows are in a stored (packed) tensor, and how many rows / columns share one stored
    element.
    fp32: kept in fp32 whatever the model's dtype. keep: stored dtype is kept (packed integers, FP8, scales).
    """

    parts: tuple[Part, ...]
    cols: int | None = None
    shard: str | None = None
    suffix: str = "weight"
    experts: int = 0
    transform: Transform | None = None
    fp32: bool = False
    keep: bool = False
    row_dim: int = 0
    row_pack: int = 1
    col_pack: int = 1

    def sizes(self, tp: int, path: str = "") -> list[int]:
        """Output rows of each part on one rank."""
        return [p.rows(tp, f"{path}.".lstrip(".")) if self.shard == "col" else p.size for p in self.parts]

    def local_cols(self, tp: int, path: str = "") -> int | None:
        if self.cols is None or self.shard != "row":
            return self.cols
        if self.cols % tp:
            raise ValueError(f"{path}.{self.parts[0].name}: input size {self.cols} is not a multiple of tp={tp}".lstrip("."))
        return self.cols // tp

    def sources(self, path: str) -> list[str]:
        """Checkpoint names in the order they are stacked (expert by expert)."""
        names = [p.name.format(e) if self.experts else p.name for e in range(self.experts or 1) for p in self.parts]
        return [join(path, n, self.suffix) for n in names]

    def shape(self, part: Part) -> tuple[int, ...]:
        """Expected shape of a part's checkpoint tensor."""
        rows = (part.of or part.size) // self.row_pack
        if self.cols is None:
            return (rows,)
        cols = -(-self.cols // self.col_pack)
        return (rows, cols) if (self.row_dim == 0) != (self.transform is Transform.TRANSPOSE) else (cols, rows)

    def local_shape(self, tp: int, path: str = "") -> tuple[int, ...]:
        rows, cols = sum(self.sizes(tp, path)) // self.row_pack, self.local_cols(tp, path)
        lead = (self.experts,) if self.experts else ()
        if cols is None:
            return (*lead, rows)
        cols = -(-cols // self.col_pack)
        return (*lead, rows, cols) if self.row_dim == 0 else (*lead, cols, rows)

    def load(self, get: Callable[[str, tuple[int, ...]], Tensor], path: str, rank: int, tp: int) -> Tensor:
        """Read, cut for this rank, stack. `get(name, shape)` returns a checkpoint tensor of that shape or raises."""
        self.sizes(tp, path), self.local_cols(tp, path)

        def cut(t: Tensor, p: Part) -> Tensor:
            t = self.transform.apply(t, self.parts) if self.transform else t
            if p.of is not None:
                t = t.narrow(self.row_dim, p.start // self.row_pack, p.size // self.row_pack)
            if self.shard == "row" and self.cols is not None:
                t = t.chunk(tp, 1 - self.row_dim)[rank]
            return p.cut(t, self.row_dim, rank, tp, self.row_pack) if self.shard == "col" else t

        names, n = self.sources(path), len(self.parts)
        rows = []
        for i in range(0, len(names), n):
            cuts = [cut(get(s, self.shape(p)), p) for s, p in zip(names[i : i + n], self.parts, strict=True)]
            rows.append(cuts[0] if n == 1 else torch.cat(cuts, self.row_dim))
        return torch.stack(rows) if self.experts else rows[0]


class Spec(Typed):
    """Frozen description of a layer with global sizes; holds no tensor, rank, device or dtype. Subclasses are frozen dataclasses.

    An optional field `at: str` is the segment this layer adds to the checkpoint path. `partial`: with tp > 1 the output is this rank's
    share of a sum (a row-parallel Linear is last), which the edge between two steps reduces; a plain user layer computes the same full
    result on each rank.
    """

    partial: bool = False
    reads_normed: bool = False  # True: forward gets the Normed (and may fuse the norm); False: the normed tensor

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        return {}

    def weights(self) -> dict[str, Weight]:
        return {}

    def load(self, m: Any, env: Any) -> None:
        """Put this spec's tensors into the bound module m; `env.read(weight, path)` loads, cuts and moves one (see bind.py)."""
        for name, w in self.weights().items():
            m.put(name, env.read(w, m.path))

    def forward(self, m: Any, *args: Any) -> Any:
        raise TypeError(f"{type(self).__name__} has no forward()")


def join(*segments: str) -> str:
    return ".".join(s for s in segments if s)


def path_of(spec: Spec, path: str) -> str:
    return join(path, getattr(spec, "at", ""))


def nodes(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """(attribute, child) pairs; a tuple of children gives "attribute.0", "attribute.1", ..."""
    for name, child in spec.children().items():
        if isinstance(child, tuple):
            yield from ((f"{name}.{i}", c) for i, c in enumerate(child))
        else:
            yield name, child


def walk(spec: Spec, path: str = "") -> Iterator[tuple[str, Spec]]:
    """Every (checkpoint path, spec) of the tree, parents first."""
    path = path_of(spec, path)
    yield path, spec
    for _, child in nodes(spec):
        yield from walk(child, path)


@dataclass(frozen=True)
class PlanItem:
    """One runtime tensor and what it is made from."""

    tensor: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]


@typed_call
def plan(spec: Spec, *, tp: int = 1) -> list[PlanItem]:
    """What will be read from the checkpoint, before any tensor exists. Shapes are those of one rank, in the checkpoint's own format."""
    need_sizes("plan", tp=tp)

    def items(s: Spec, path: str, attr: str) -> Iterator[PlanItem]:
        path = path_of(s, path)
        for name, w in s.weights().items():
            yield PlanItem(attr + name, tuple(dict.fromkeys(w.sources(path))), w.local_shape(tp, path))
        for name, child in nodes(s):
            yield from items(child, path, f"{attr}{name}.")

    return list(items(spec, "", ""))


@typed_call
def rewrite(spec: S, cls: type[Spec], fn: Callable[[Any], Spec], match: str = "*") -> S:
    """A new tree in which every `cls` node whose checkpoint path matches the glob `match` is replaced by `fn(node)`.

    Only specs held in fields are nodes (a body, a norm, a branch); an Attn's own Linears follow from its fields. Errors: nothing matched.
    """
    hits = 0

    def visit(node: Any, path: str) -> Any:
        nonlocal hits
        if isinstance(node, tuple):
            return tuple(visit(x, path) for x in node)
        if not isinstance(node, Spec) or not is_dataclass(node):
            return node
        path = path_of(node, path)
        changed = {f.name: visit(getattr(node, f.name), path) for f in fields(node)}
        changed = {k: v for k, v in changed.items() if v is not getattr(node, k) and v != getattr(node, k)}
        node = replace(node, **changed) if changed else node
        if isinstance(node, cls) and fnmatchcase(path, match):
            hits += 1
            new = fn(node)
            if not isinstance(new, Spec):
                raise ValueError(f"rewrite: fn gave {new!r} for {path or cls.__name__}, expected a declaration")
            return new
        return node

    if not isinstance(spec, Spec):
        raise ValueError(f"rewrite: spec is {value_name(spec)}, expected Spec")
    out = visit(spec, "")
    if hits == 0:
        raise ValueError(f"rewrite: no {cls.__name__} has a path that matches {match!r}")
    return out
