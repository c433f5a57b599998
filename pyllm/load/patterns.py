"""Regular expressions of a stranger's tokenizer.json, refused where a text could make them run for ever.

The engine behind `tokenizers` backtracks and has no clock. What takes exponential time is a repetition inside a repeated group, or a
choice inside one; both are refused, which no published tokenizer needs. What is left takes polynomial time, with an exponent that the
number of open repetitions in a row bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from .errors import CheckpointError, show

MAX_PATTERN = 4096
MAX_OPEN = 4  # repetitions without an end in one alternative; those of GPT-2, Llama 3, Qwen, GPT-4o and DeepSeek have at most two
BOUNDED = 64  # a repetition of more than this counts as one without an end
_REPEAT = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_GROUP_HEAD = re.compile(r"\((?:\?(?:<[A-Za-z_]\w*>|<?[=!]|[>:]|[imsx-]*:))?")


@dataclass
class _Group:
    repeats: bool = False  # holds a repetition of a changing count
    choice: bool = False
    open: int = 0  # repetitions without an end in the alternative being read
    most: int = 0


def _class_end(pattern: str, at: int) -> int:
    """Behind the `]` that ends the class starting at `at`; classes nest in this engine."""
    depth, at = 0, at
    while at < len(pattern):
        c = pattern[at]
        if c == "\\":
            at += 1
        elif c == "[":
            depth += 1
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"  # a first ] is a member
        elif c == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at


def _repeat(pattern: str, at: int) -> tuple[int, int, int]:
    """The repetition at `at` as (least, most, where it ends); (1, 1, at) where there is none."""
    found = _REPEAT.match(pattern, at)
    if found is None or found[0] in ("{}", "{,}"):
        return 1, 1, at
    sign = found[0]
    if sign[0] == "{":
        least = int(found[1] or 0)
        most = least if not found[2] else int(found[3]) if found[3] else 1 << 30
    else:
        least, most = (0, 1) if sign == "?" else (int(sign == "+"), 1 << 30)
    end = found.end()
    return least, most, end + (pattern[end : end + 1] in ("?", "+"))  # lazy, possessive


def pattern_danger(pattern: str) -> str | None:
    """Why a pattern may take for ever, or None."""
    if len(pattern) > MAX_PATTERN:
        return f"has {len(pattern)} characters, more than {MAX_PATTERN}"
    if re.search(r"\\[1-9gk]|\(\?[R&0-9~(|]|\(\?P|\(\?@", pattern):
        return "refers back to a group or calls one"
    stack, at = [_Group()], 0
    while at < len(pattern):
        c, inner = pattern[at], None
        if c == "(":
            head = _GROUP_HEAD.match(pattern, at)
            at = head.end() if head else at + 1
            stack.append(_Group())
            continue
        if c == "|":
            stack[-1].choice, stack[-1].most, stack[-1].open = True, max(stack[-1].most, stack[-1].open), 0
            at += 1
            continue
        if c == ")" and len(stack) > 1:
            inner = stack.pop()
            inner.most = max(inner.most, inner.open)
        at = _class_end(pattern, at) if c == "[" else _escape_end(pattern, at) if c == "\\" else at + 1
        least, most, at = _repeat(pattern, at)
        if _REPEAT.match(pattern, at) and pattern[at] != "{":
            return "repeats a repetition"
        outer = stack[-1]
        if inner is not None and most > 1 and (inner.repeats or (inner.choice and most > BOUNDED)):
            return "repeats a group that holds a repetition or a choice"
        outer.repeats |= least != most or (inner is not None and inner.repeats)
        outer.open += (most > BOUNDED) + (inner.most if inner is not None else 0)
        if outer.open > MAX_OPEN:
            return f"has more than {MAX_OPEN} repetitions without an end in a row"
    return None


def _escape_end(pattern: str, at: int) -> int:
    found = re.match(r"\\[pPxu]\{[^}]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.", pattern[at : at + 64], re.DOTALL)
    return at + (found.end() if found else 1)


def _patterns(spec: Any) -> Iterator[str]:
    stack = [spec]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if isinstance(item.get("Regex"), str):
                yield item["Regex"]
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def check_patterns(backend: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer whose splits or replacements may take for ever."""
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        component = getattr(backend, part)
        for pattern in _patterns(json.loads(component.__getstate__())) if component is not None else ():
            danger = pattern_danger(pattern)
            if danger is not None:
                raise CheckpointError(f"{part}: pattern {show(pattern)} {danger}")
