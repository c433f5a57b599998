"""Arguments that are not served: an error that says what to use, never silence."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar

MAX_SECONDS = 1e9
MAX_COUNT = 2**48 - 1  # bytes, tokens: no machine has more, and they fit all arithmetic
SIZES = {"max_batch_size": (1, 2**16), "max_num_tokens": (1, 2**20), "max_seq_len": (2, 2**31 - 1)}
"""Of `LLM`: the least, with which something can run, and the most that arrays are made for."""
_ONE_GPU = "one GPU is served"
LLM_HINTS = dict.fromkeys(
    ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "moe_expert_parallel_size"), _ONE_GPU
) | {
    "trust_remote_code": "no code from model files is ever run; declare the model with pyllm.layers and pass it as model",
    "revision": "models are read from a directory or a file; fetch the revision first",
    "tokenizer_mode": "there is one tokenizer, of the tokenizers library",
    "max_model_len": "use max_seq_len",
    "max_num_seqs": "use max_batch_size",
    "max_num_batched_tokens": "use max_num_tokens",
    "gpu_memory_utilization": "use kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=...)",
    "enforce_eager": "use cuda_graph_config=None",
    "enable_prefix_caching": "use kv_cache_config=KvCacheConfig(enable_block_reuse=...)",
    "kv_cache_dtype": "use kv_cache_config=KvCacheConfig(dtype=...)",
    "enable_chunked_prefill": "prompts are always cut into chunks of max_num_tokens",
    "max_input_len": "use max_seq_len, which counts prompt and output",
    "max_beam_width": "use SamplingParams(use_beam_search=True, best_of=...)",
    "guided_decoding_backend": "constrained decoding is not served; a logits_processor can restrict tokens",
    "enable_lora": "LoRA is not served",
    "lora_config": "LoRA is not served",
    "quantization": "use quant",
    "quant_config": "use quant",
    "seed": "use SamplingParams(seed=...)",
    "batched_logits_processor": "use SamplingParams(logits_processor=...)",
}

GENERATE_HINTS = {
    "stream": "use generate_async(..., streaming=True)",
    "lora_request": "LoRA is not served",
    "prompt_adapter_request": "prompt adapters are not served",
    "disaggregated_params": "one engine runs prompts and what follows them",
    "postproc_params": "the output holds text and token ids; use SamplingParams(detokenize=False) to leave the text out",
    "scheduling_params": "use priority",
    "trace_headers": "times are always there: RequestOutput.timing",
}


def shown(value: Any) -> str:
    """What came, in few words and on one line: it may be long, and may not even be printable."""
    try:
        text = repr(value)
        text = " ".join(text.split()) if "\n" in text else text
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(value: Any) -> tuple[Any, ...] | None:
    """What a list, or anything like one, holds; None for what is none: a text is not its letters, a dict not its keys."""
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        return None
    try:
        return tuple(value)
    except TypeError:  # an array of no dimensions
        return None


def is_text(value: Any) -> bool:
    """Text that can be written down: half of a surrogate pair cannot."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


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
            raise ValueError(f"{type(self).__name__}: {name} is {shown(getattr(self, name))}, expected {expected}")

    def _need_one_of(self, name: str, options: Iterable[int | str]) -> None:
        """By type too: 64.0 equals 64, an array equals it in part."""
        value = getattr(self, name)
        known = any(type(value) is type(option) and value == option for option in options)
        self._need(name, known, f"one of {', '.join(map(str, options))}")

    def _need_count(self, name: str, low: int, none: bool = False) -> None:
        value = getattr(self, name)
        good = (none and value is None) or (type(value) is int and value >= low)
        self._need(name, good, f"{'None or ' * none}an integer, at least {low}")
        self._need(name, value is None or value <= MAX_COUNT, f"at most {MAX_COUNT}")


def check_llm(watchdog_timeout: Any, sizes: Mapping[str, Any], unused_tokenizer: Any) -> None:
    """Before anything is loaded. sizes: by the names that `LLM` gives them; None is good but for max_batch_size."""
    if unused_tokenizer is not None:
        raise ValueError("LLM: a tokenizer is given beside skip_tokenizer_init=True; leave one of them out")
    number = isinstance(watchdog_timeout, (int, float)) and not isinstance(watchdog_timeout, bool)
    if not number or not (0 < watchdog_timeout <= MAX_SECONDS or watchdog_timeout == math.inf):
        wanted = f"seconds, more than 0, at most {MAX_SECONDS:g}, or inf"
        raise ValueError(f"LLM: watchdog_timeout is {shown(watchdog_timeout)}, expected {wanted}")
    for name, value in sizes.items():
        least, most = SIZES[name]
        if (value is not None or name == "max_batch_size") and (type(value) is not int or value < least):
            raise ValueError(f"LLM: {name} is {shown(value)}, expected an integer, at least {least}")
        if value is not None and value > most:
            raise ValueError(f"LLM: {name} is {shown(value)}, expected at most {most}")


def of_type(name: str, value: Any, *kinds: type) -> Any:
    if value is not None and not isinstance(value, kinds):
        raise ValueError(f"LLM: {name} is {shown(value)}, expected a {' or '.join(k.__name__ for k in kinds)}")
    return value


def need_flags(owner: str, **flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{owner}: {name} is {shown(value)}, expected a bool")
