"""Whether a value is of the kind that an annotation says, and both of them in words: what errors about arguments and fields are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

MOST = 2**63 - 1  # of an int in arrays and arguments


def fits(value: Any, hint: Any, exact: bool = False) -> bool:
    """exact=False: what torch takes for it: numbers may be numpy's, or a tensor of one element, and integers are flags. exact: no look into
    lists and dicts: a checkpoint's tensors are read when they are asked for, not before."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(fits(value, one, exact) for one in inner)
    if kind is tuple:
        return isinstance(value, tuple) and _all_fit(value, inner, exact)
    if kind is Sequence:
        return isinstance(value, (list, tuple)) and (exact or all(fits(v, inner[0]) for v in value))
    if kind is Mapping:
        return isinstance(value, Mapping) and (exact or all(fits(v, inner[1]) for v in value.values()))
    if kind in (int, float, bool):
        return _is_number(value, kind, exact)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)  # what only a type checker understands is taken


def _all_fit(values: tuple[Any, ...], hints: tuple[Any, ...], exact: bool) -> bool:
    hints = hints[:1] * len(values) if hints[1:] == (...,) else hints
    return len(values) == len(hints) and all(fits(v, h, exact) for v, h in zip(values, hints, strict=True))


def _is_number(value: Any, kind: type, exact: bool) -> bool:
    if exact:
        like = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        return like and (isinstance(value, float) or -MOST <= value <= MOST)
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and (kind is float or not value.is_floating_point())
    more = {int: (Integral, torch.SymInt), float: (Real, torch.SymInt, torch.SymFloat), bool: (int, torch.SymBool)}
    return isinstance(value, more[kind])


def kind_name(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(kind_name, inner)))
    if kind is tuple:
        return f"a tuple of {kind_name(inner[0])}" if inner[1:] == (...,) else f"({', '.join(map(kind_name, inner))})"
    if kind is Sequence:
        return f"a list of {kind_name(inner[0])}"
    if kind is Mapping:
        return f"a dict of {kind_name(inner[1])}"
    if isinstance(kind, TypeVar):
        return str(kind)
    return "None" if kind is NoneType else str(getattr(kind, "__name__", kind))


def value_name(value: Any) -> str:
    """What came, in a few words: the type of what has many values."""
    if isinstance(value, int) and not -MOST <= value <= MOST:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{value!r:.60}"
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" holding {value_name(value[0])}" if isinstance(value, (list, tuple)) and value else "")
