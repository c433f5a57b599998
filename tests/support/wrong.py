"""Things that are not what an argument asks for, and what is wrong with how one of them is refused."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from pyllm.api.refuse import shown


class Unspeakable:
    """Neither printed, compared, hashed nor true or false."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError


BIG = [1e308, 10**400, -(10**400), 10**5000]  # the last one Python does not even print
NUMBERS = [0, 1, -1, 2, 2.5, -0.0, 64.0, math.nan, math.inf, -math.inf, *BIG, 1 + 2j, np.float32(1.5), np.int64(3)]
TEXTS = ["x", "", "64", b"x", "\ud800", ["\ud800"], ["a"], ["a", 3]]
LISTS = [[], [1], [None], [[1]], (1, 2), {1}, {}, {1: 2}, {"a": 1}, range(3)]
ARRAYS = [np.array([1, 2]), np.array(3), np.array([1.5]), np.ones((2, 2)), torch.tensor([1, 2]), torch.tensor(1), torch.ones(2, 2, 2)]
OTHERS = [torch.float32, None, True, False, np.bool_(True), object(), lambda *_: None, int]


def things() -> Iterator[Any]:
    yield from (*NUMBERS, *TEXTS, *LISTS, *ARRAYS, *OTHERS)
    yield from (Unspeakable(), iter([1]), (i for i in "ab"))  # new ones each time: they can be read once


def complaint(call: Callable[[], Any], text: str) -> str | None:
    """What is wrong with how the call fails, if it does: its error must match the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
    except (TypeError, ValueError, MemoryError) as error:
        return None if re.search(text, str(error)) else f"says {type(error).__name__}: {error}"
    except BaseException as error:
        return f"raises {type(error).__name__}: {error}"
    return None


def complaints(use: Callable[[Any], Any], text: str, *more: Any) -> str:
    """Of all things, one a line; empty where each is taken, or refused in words that match the text."""
    failed = []
    for value in (*things(), *more):
        wrong = complaint(lambda v=value: use(v), text)  # type: ignore[misc]
        failed += [f"{type(value).__name__} {shown(value)}: {wrong}"] if wrong else []
    return "\n".join(failed)
