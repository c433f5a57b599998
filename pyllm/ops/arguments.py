"""What a public op says of an argument of the wrong kind. It is looked for once a call has failed: a good call pays for a `try` alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from pyllm.ops.kinds import fits, kind_name, value_name
from pyllm.ops.registry import EXPLAIN, OPS, check_devices

Op = TypeVar("Op", bound=Callable[..., Any])


def checked(op: Op) -> Op:
    """`op`, whose errors are of one form: "op: argument is ..., expected ..." where an argument is of the wrong type (TypeError) or on
    another device than the first tensor (ValueError, RuntimeError on CUDA). What else is wrong is said by the op that finds it; where that
    is another one, which this one calls, its own name comes first."""

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
        if not fits(value, hints[argument]):
            raise TypeError(f"{name}: {argument} is {value_name(value)}, expected {kind_name(hints[argument])}") from None
    if inner == name:
        return
    try:
        check_devices(name, bound.items())
        if name in EXPLAIN:
            EXPLAIN[name](**bound)
    except ValueError as problem:  # of the type that such errors have there
        on_cuda = any(isinstance(value, Tensor) and value.is_cuda for value in bound.values())
        raise (RuntimeError if on_cuda else ValueError)(str(problem)) from None
    if inner in OPS:
        raise type(error)(f"{name}: {error}") from None
