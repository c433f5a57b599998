"""Prompt lookup: guess that what followed the last tokens before follows them again. Costs no model; pays where text repeats its prompt.

A step then runs the last token and the guesses in one go, and keeps those guesses that are what the model itself chooses: greedy output is
what it is without guessing, up to the rounding of a step of more rows. Source: Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def prompt_lookup(tokens: NDArray[np.int32], most: int, longest: int) -> NDArray[np.int32]:
    """At most `most` tokens that followed the latest earlier place where the last n tokens stand, for the largest n <= `longest`."""
    length = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) if most > 0 else np.empty(0, np.int64)  # where a place may end
    best = ends
    for back in range(1, min(longest, length - 1)):
        ends = ends[ends >= back]
        ends = ends[tokens[ends - back] == tokens[length - 1 - back]]
        if not len(ends):
            break
        best = ends
    if not len(best):
        return tokens[:0]
    return tokens[best[-1] + 1 : best[-1] + 1 + most]


def accepted(drafted: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The tokens a step gives: chosen[i] follows drafted[:i], so it counts for as long as all guesses before it were right."""
    n = 0
    while n < len(drafted) and drafted[n] == chosen[n]:
        n += 1
    return list(chosen[: n + 1])
