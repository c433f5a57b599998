"""What `bind` refuses of a declaration before it reads a tensor: widths that no op serves, and layers that read each other's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from pyllm.layers.linear import Embedding
from pyllm.layers.mlp import MLP
from pyllm.layers.moe import MoE
from pyllm.layers.norm import LayerNorm, RMSNorm
from pyllm.layers.spec import Spec, nodes, path_of, walk
from pyllm.ops.norm import MAX_N

UNIT = 8  # elements: the row-wise kernels move 16 bytes of bf16 at a time


def check_declared(spec: Spec, tp: int) -> None:
    check_widths(spec, tp)
    check_sources(spec)


def check_widths(spec: Spec, tp: int) -> None:
    """ValueError for the first layer whose rows, on one of `tp` ranks, are no multiple of `UNIT` or longer than an op takes. Without it the
    first request would fail."""
    for path, node in walk(spec):
        for field, size, most in _widths(node, tp, path):
            if size % UNIT or size > most:
                longest = "" if most >= 1 << 31 else f" up to {most}"
                on = f" on each of tp={tp} ranks" if tp > 1 else ""
                name = ".".join(part for part in (path, getattr(node, "name", "")) if part) or type(node).__name__
                raise ValueError(f"bind: {name}: {field} is {size}{on}, expected a multiple of {UNIT}{longest} ({type(node).__name__})")


def _widths(node: Spec, tp: int, path: str) -> Iterator[tuple[str, int, int]]:
    """Field, its size on one rank, and the most that is served."""
    endless = 1 << 31
    if isinstance(node, RMSNorm):
        yield "d", sum(w.sizes(tp, path)[0] for w in node.weights().values()) or node.d, MAX_N
    if isinstance(node, LayerNorm) and not node.heads:
        yield "d", node.d, MAX_N
    if isinstance(node, Embedding):
        yield "d", node.d, endless
    if isinstance(node, (MLP, MoE)):
        yield "d", node.d, endless
        if node.ff % tp == 0:  # else the part that cannot be cut says so
            yield "ff", node.ff // tp, endless


def check_sources(spec: Spec) -> None:
    """ValueError where two layers read the same rows of one checkpoint tensor, as two steps of one name do, and `Decoder.shared` does not
    say so: each would have a copy of what is the other's."""
    allowed = getattr(spec, "shared", ())
    readers: dict[str, list[tuple[int, int, str]]] = {}
    for who, node, path in _named(spec, "", ""):
        mine: dict[str, list[tuple[int, int, str]]] = {}
        for weight in node.weights().values():
            for i, source in enumerate(weight.sources(path)):
                part = weight.parts[i % len(weight.parts)]
                mine.setdefault(source, []).append((part.start, part.start + part.size, who))
        for source, rows in mine.items():
            others = readers.setdefault(source, [])
            both = next((other for first, end, other in others for f, e, _ in rows if first < e and f < end), None)
            if both is not None and not any(fnmatchcase(source, glob) for glob in allowed):
                raise ValueError(
                    f"bind: {both} and {who} of the declaration both read {source}: give them names of their own (Sub.at), "
                    "or list it in Decoder.shared"
                )
            others += rows


def _named(spec: Spec, who: str, path: str) -> Iterator[tuple[str, Spec, str]]:
    """Every node with where it is in the declaration (subs.3.body.up), and its checkpoint path."""
    path = path_of(spec, path)
    yield who or type(spec).__name__, spec, path
    for attribute, child in nodes(spec):
        yield from _named(child, f"{who}.{attribute}".lstrip("."), path)
