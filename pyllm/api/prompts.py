"""What counts as a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor


def one_prompt(inputs: Any) -> bool:
    """Token ids, not a sequence of prompts; arrays and tensors of one dimension are token ids too."""
    if getattr(inputs, "ndim", 0):
        return inputs.ndim == 1
    if not isinstance(inputs, Sequence) or isinstance(inputs, (bytes, bytearray)):
        raise ValueError(f"LLM.generate: inputs is {inputs!r:.60}, expected a prompt (text or token ids) or a list of prompts")
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
        raise ValueError(f"LLM: a prompt is {prompt!r:.60}, expected text or token ids")
    return list(ids)
