"""What counts as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pyllm.api.refuse import shown


def one_prompt(inputs: Any) -> bool:
    """Token ids, not a sequence of prompts; arrays and tensors of one dimension are token ids too."""
    if getattr(inputs, "ndim", 0):
        return inputs.ndim == 1
    if not isinstance(inputs, Sequence) or isinstance(inputs, (bytes, bytearray)):
        raise ValueError(f"LLM.generate: inputs is {shown(inputs)}, expected a prompt (text or token ids) or a list of prompts")
    return len(inputs) > 0 and all(isinstance(i, (int, np.integer)) for i in inputs)


def for_each(name: str, given: Any, prompts: int) -> list[Any]:
    """One of an argument for each prompt."""
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * prompts
    if len(each) != prompts:
        raise ValueError(f"LLM.generate: {len(each)} {name} for {prompts} inputs")
    return each


def prompt_ids(prompt: Any) -> list[int]:
    ids = prompt.tolist() if isinstance(prompt, (Tensor, np.ndarray)) else prompt
    if not isinstance(ids, Sequence) or isinstance(ids, (bytes, bytearray)):
        raise ValueError(f"LLM: a prompt is {shown(prompt)}, expected text or token ids")
    return list(ids)


def check_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """A conversation: templates write whatever they are given, a missing role as nothing."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes, bytearray)):
        raise ValueError(f"LLM.encode_chat: messages is {shown(messages)}, expected a list of objects with role and content")
    for i, message in enumerate(messages):
        where = f"LLM.encode_chat: messages[{i}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is {shown(message)}, expected an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"{where} has the role {shown(role)}, expected a text, as user or assistant")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"{where} has the content {shown(content)}, expected a text or a list of parts (none beside tool_calls)")
    return messages
