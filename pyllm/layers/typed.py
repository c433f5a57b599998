"""Declarations look at the types of their fields, by their own annotations: in one place, for layers of a caller's own too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache, wraps
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pyllm.ops.kinds import MOST, fits, kind_name, value_name

F = TypeVar("F", bound=Callable[..., Any])


def typed_call(function: F) -> F:
    """`function`, for which an argument of another type than it says is a ValueError that names it."""

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        hints = get_type_hints(function)
        for name, value in (*zip(hints, args, strict=False), *given.items()):
            if name in hints and not fits(value, hints[name], exact=True):
                raise ValueError(f"{function.__name__}: {name} is {value_name(value)}, expected {kind_name(hints[name])}")
        return function(*args, **given)

    return call  # type: ignore[return-value]


class _Kind(NamedTuple):
    hint: Any
    quick: frozenset[type]  # that need no second look: a model of 80 layers has tens of thousands of fields


class Typed:
    """Base of dataclasses: a field that is given something of another type is a ValueError that names it, before `__post_init__`."""

    def __new__(cls, *args: Any, **given: Any) -> Any:
        kinds = _kinds(cls)  # type: ignore[arg-type]
        for name, value in (*zip(kinds, args, strict=False), *given.items()):
            kind = kinds.get(name)
            if kind is None or (type(value) in kind.quick and (type(value) is not int or -MOST <= value <= MOST)):
                continue
            if not fits(value, kind.hint, exact=True):
                known = dict(zip(kinds, args, strict=False)) | given
                own = next((known[n] for n in ("at", "name") if isinstance(known.get(n), str)), "")
                raise ValueError(f"{cls.__name__} {own}".rstrip() + f": {name} is {value_name(value)}, expected {kind_name(kind.hint)}")
        return super().__new__(cls)


@cache
def _kinds(cls: type) -> dict[str, _Kind]:
    """Of the fields, in the order of `__init__`; none of a class with an `__init__` of its own, or annotations that mean nothing here."""
    made = cls.__dict__.get("__dataclass_params__")
    if made is None or not made.init:
        return {}
    try:
        hints = get_type_hints(cls)
    except (NameError, TypeError):
        return {}
    return {f.name: _Kind(hints[f.name], _quick(hints[f.name])) for f in fields(cls) if f.init}


def _quick(hint: Any) -> frozenset[type]:
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*map(_quick, get_args(hint)))
    return frozenset((hint,)) if isinstance(hint, type) and not get_args(hint) else frozenset()
