"""Whether the tensors of a checkpoint are those that its declaration reads, by their names and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .errors import show
from .tensors import TensorMap

if TYPE_CHECKING:
    from pyllm.layers import Decoder


def _wanted(spec: Decoder) -> dict[str, tuple[int, ...]]:
    from pyllm.layers.spec import walk

    weights = ((path, weight) for path, node in walk(spec) for weight in node.weights().values())
    return {n: w.shape(w.parts[i % len(w.parts)]) for path, w in weights for i, n in enumerate(w.sources(path))}


def _shape(tensors: TensorMap, stored: tuple[str, ...]) -> tuple[int, ...]:
    """Of what `pyllm.layers.stored` makes of them; that of the stored tensor itself where it could make nothing."""
    shape = tensors.shape(stored[0])
    if stored[0].endswith("_blocks") and len(stored) == 2 and len(shape) == 4:
        return shape[0], shape[2] * 2 * shape[3], shape[1]
    return shape


def misfit(spec: Decoder, tensors: TensorMap) -> str | None:
    """What keeps `bind` from reading them, or None: a tensor that is missing, has another shape, or is one too many."""
    from pyllm.layers.stored import stored_as

    names: Mapping[str, Any] = tensors.names()
    missing: list[str] = []
    wrong: list[str] = []
    used: set[str] = set()
    for name, want in _wanted(spec).items():
        stored = stored_as(names, name)
        if stored[0] not in names:  # a checkpoint of the bare model has the names without their first segment
            stored = stored_as(names, name.removeprefix(f"{spec.prefix}."))
        lacking = [n for n in stored if n not in names]
        missing += [name] if stored[0] in lacking else lacking
        used.update(stored)
        if not lacking and _shape(tensors, stored) != want:
            wrong.append(f"tensor {show(stored[0])} has shape {show(_shape(tensors, stored))}, where the declaration expects {want}")
    extra = sorted(n for n in names if n not in used and not any(fnmatchcase(n, glob) for glob in spec.ignore))
    for what, found in (("is missing", sorted(missing)), ("has no place in the model", extra)):
        if found:
            return f"tensor {show(found[0])}{_more(found)} {what}"
    return wrong[0] + _more(wrong) if wrong else None


def _more(found: list[str]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""
