"""What one rendering of a stranger's template may spend: steps, seconds, and the size of each value and of all text it prints."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_VALUE = 8 << 20  # characters: two million tokens of prompt
MAX_PRINTED = 4 * MAX_VALUE  # over a whole rendering: text that passes through nested macros is printed more than once
ITEM = 64  # what a number, or an entry of a list, counts for in characters


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.steps = 0
        self.printed = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def charge(self, steps: int = 1) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise SecurityError(f"takes more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"takes more than {MAX_SECONDS:g} seconds")

    def print(self, size: int) -> None:
        self.charge()
        self.printed += size
        if self.printed > MAX_PRINTED:
            raise SecurityError(f"prints more than {MAX_PRINTED} characters")


budget: ContextVar[Budget] = ContextVar("budget")


def check_size(size: int) -> None:
    if size > MAX_VALUE:
        raise SecurityError(f"makes a value of more than {MAX_VALUE} characters")
    budget.get().charge(1 + size // 1024)


def weigh(value: Any) -> int:
    """Size of a value as if it were printed: a list that holds one list a thousand times counts it a thousand times."""
    if isinstance(value, str):
        check_size(len(value))
        return len(value)
    total, stack = 0, [value]
    while stack and total + ITEM * len(stack) <= MAX_VALUE:
        item = stack.pop()
        total += ITEM + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    check_size(total + ITEM * len(stack))
    return total


def as_text(value: Any) -> Any:
    """What may be joined: text, numbers and plain containers. The repr of anything else is nobody's business."""
    if not isinstance(value, (str, int, float, list, tuple, dict, type(None), Undefined)):
        raise SecurityError(f"prints a value of type {type(value).__name__}")
    weigh(value)
    return value
