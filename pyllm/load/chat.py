"""Chat messages to a prompt, by the model's own Jinja template, which is a stranger's program: see sandbox.py for what it may do."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from .budget import MAX_VALUE, Budget, budget
from .errors import CheckpointError
from .sandbox import BoundedEnvironment

MAX_TEMPLATE = 256 << 10
MAX_OUTPUT = MAX_VALUE


class ChatTemplateError(CheckpointError):
    """The template is not valid, does something it may not, or refuses these messages (its own `raise_exception`)."""


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    return BoundedEnvironment().from_string(template)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """The prompt for `messages` ([{"role": ..., "content": ...}, ...]); `variables` (tools, ...) are passed on to the template."""
    if len(template) > MAX_TEMPLATE:
        raise ChatTemplateError(f"chat template: {len(template)} characters, more than {MAX_TEMPLATE}")
    given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, "bos_token": bos_token, "eos_token": eos_token}
    token = budget.set(Budget())
    parts: list[str] = []
    size = 0
    try:
        for part in _compile(template).generate(**variables, **given):
            size += len(part)
            if size > MAX_OUTPUT:
                raise ChatTemplateError(f"chat template: makes more than {MAX_OUTPUT} characters")
            parts.append(part)
    except ChatTemplateError:
        raise
    except TemplateError as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        raise ChatTemplateError(f"chat template: {line}{error.message}") from None
    except (RecursionError, MemoryError) as error:
        raise ChatTemplateError(f"chat template: {type(error).__name__}: nested too deep or too large") from None
    except Exception as error:  # a template is a program: whatever it trips over (a missing key, a wrong type) is its error
        raise ChatTemplateError(f"chat template: {type(error).__name__}: {error}") from None
    finally:
        budget.reset(token)
    return "".join(parts)
