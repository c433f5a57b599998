"""What a public op says of an argument of the wrong kind. It is looked for once a call has failed: a good call pays for a `try` alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from pyllm.ops.registry import EXPLAIN, OPS, check_devices

Op = TypeVar("Op", bound=Callable[..., Any])


def checked(op: Op) -> Op:
    """`op`, whose errors are of one form: "op: argument is ..., expected ..." where an argument is of the wrong type (TypeError) or on
    another device than the first tensor (ValueError). What else is wrong is said by the op that finds it; where that is another one, which
    this one calls, its own name comes first."""

    def call(*args: Any, **given: Any) -> Any:
        try:
            return op(*args, **given)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            _explain(op, args, given, error)
            raise

    call.__code__ = call.__code__.replace(co_name=op.__name__)  # its own: torch.compile counts recompilations by code
    return wraps(op)(call)  # type: ignore[return-value]


def _explain(op: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any], error: Exception) -> None:
    """Raise what is wrong with the arguments, if something here is, and the op has not said so itself."""
    try:
        bound = inspect.signature(op).bind(*args, **given).arguments
    except TypeError:
        return  # too many or too few: Python has said which
    name, hints, inner = op.__name__, get_type_hints(op), str(error).partition(": ")[0]
    for argument, value in bound.items():
        if not _is(value, hints[argument]):
            raise TypeError(f"{name}: {argument} is {_shown(value)}, expected {_kind(hints[argument])}") from None
    if inner == name:
        return
    check_devices(name, bound.items())
    if name in EXPLAIN:
        EXPLAIN[name](**bound)
    if inner in OPS:
        raise type(error)(f"{name}: {error}") from None


def _is(value: Any, hint: Any) -> bool:
    """Whether torch takes the value for what the signature says. A number may be numpy's, or a tensor of one element."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_is(value, one) for one in inner)
    if kind is tuple:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_is, value, inner))
    if kind is Sequence:
        return isinstance(value, (list, tuple)) and all(_is(v, inner[0]) for v in value)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_is(v, inner[1]) for v in value.values())
    if kind in (int, float):
        if isinstance(value, Tensor):
            return value.numel() == 1 and not value.is_complex() and (kind is float or not value.is_floating_point())
        symbols = (torch.SymInt,) if kind is int else (torch.SymInt, torch.SymFloat)
        return isinstance(value, (Integral if kind is int else Real, *symbols))
    return isinstance(value, (int, torch.SymBool) if kind is bool else kind)


def _kind(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(_kind(one) for one in inner)
    if kind is tuple:
        return f"({', '.join(map(_kind, inner))})"
    if kind is Sequence:
        return f"a list of {inner[0].__name__}"
    if kind is Mapping:
        return f"a dict of {inner[1].__name__}"
    return "None" if kind is NoneType else str(kind.__name__)


def _shown(value: Any) -> str:
    """What came, in a few words: the type of what has many values."""
    small = value is None or isinstance(value, (bool, int, float, str))
    if small:
        return f"{value!r:.60}"
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" holding {_shown(value[0])}" if isinstance(value, (list, tuple)) and value else "")
