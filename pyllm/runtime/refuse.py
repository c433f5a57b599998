"""Arguments that are not served: an error that says what to use, never silence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar


def refuse_unknown(owner: str, given: Mapping[str, Any], known: Iterable[str], hints: Mapping[str, str]) -> None:
    """TypeError for the first argument that `owner` does not take: with its hint, or the name that it may have meant."""
    names = list(known)
    for name in given:
        if name in names:
            continue
        if name in hints:
            raise TypeError(f"{owner}: {name} is not supported: {hints[name]}")
        near = difflib.get_close_matches(name, names, 1)
        raise TypeError(
            f"{owner}: there is no argument {name}" + (f"; did you mean {near[0]}?" if near else f", expected {', '.join(names)}")
        )


class Checked:
    """Base of the dataclasses that users fill in: unknown arguments are refused with `HINTS`."""

    HINTS: ClassVar[dict[str, str]] = {}

    def __new__(cls, *args: Any, **given: Any) -> Any:
        refuse_unknown(cls.__name__, given, [f.name for f in fields(cls)], cls.HINTS)  # type: ignore[arg-type]
        return super().__new__(cls)

    def _need(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f"{type(self).__name__}: {name} is {getattr(self, name)!r}, expected {expected}")
