"""The configuration objects of `LLM`, named as in TensorRT-LLM. What is not served is refused with the way to go instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from pyllm.api.refuse import MAX_COUNT, Checked, listed
from pyllm.plan.pages import PAGE_SIZES
from pyllm.runtime.graph import graph_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from pyllm.layers import Decoder
    from pyllm.layers.formats import QuantPlan

POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION")


CACHE_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig(Checked):
    """enable_block_reuse: keep the pages of known prefixes for later requests. enable_partial_reuse: where a prompt parts from them inside
    a page, read the page's beginning too. host_cache_size: bytes of pinned host memory for pages that others get.
    event_buffer_max_size: keep the latest so many events for `LLM.get_kv_cache_events`.
    free_gpu_memory_fraction: share of the memory that is free once weights and activations have theirs. max_tokens: at most so many.
    tokens_per_block: 16, 32, 64 or 128. dtype: "auto" (the model's), "fp8" or "int8".
    """

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    host_cache_size: int = 0
    event_buffer_max_size: int = 0
    free_gpu_memory_fraction: float = 0.9
    max_tokens: int | None = None
    tokens_per_block: int = 64
    dtype: str = "auto"

    HINTS: ClassVar[dict[str, str]] = {
        "onboard_blocks": "blocks in the host's memory are always brought back when they are asked for",
        "secondary_offload_min_priority": "blocks of all priorities are kept in the host's memory, if host_cache_size is given",
        "max_attention_window": "sliding windows are a property of the model's declaration (Attn.window)",
        "sink_token_length": "attention sinks are a property of the model's declaration (Attn.sinks)",
        "copy_on_partial_reuse": "a part of a block is always reused by a copy; enable_partial_reuse=False turns it off",
        "max_gpu_total_bytes": "use max_tokens or free_gpu_memory_fraction",
        "gpu_memory_utilization": "use free_gpu_memory_fraction, a share of the memory that is free after loading",
        "block_size": "use tokens_per_block",
    }

    def __post_init__(self) -> None:
        for name in ("enable_block_reuse", "enable_partial_reuse"):
            self._need(name, isinstance(getattr(self, name), bool), "True or False")
        share = self.free_gpu_memory_fraction
        self._need(
            "free_gpu_memory_fraction",
            not isinstance(share, bool) and isinstance(share, (int, float)) and 0 < share <= 1,
            "more than 0, at most 1",
        )
        self._need_count("max_tokens", 1, none=True)
        for name in ("host_cache_size", "event_buffer_max_size"):
            self._need_count(name, 0)
            alone = "0 with enable_block_reuse=False, which keeps no pages"
            self._need(name, self.enable_block_reuse or not getattr(self, name), alone)
        self._need_one_of("tokens_per_block", PAGE_SIZES)
        self._need_one_of("dtype", CACHE_DTYPES)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None: the model's."""
        return CACHE_DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Checked):
    """capacity_scheduler_policy: "GUARANTEED_NO_EVICT" admits a request when the cache can hold all it may need; "MAX_UTILIZATION" when its
    known tokens fit, and computes some requests anew when the cache is full."""

    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"

    HINTS: ClassVar[dict[str, str]] = {
        "context_chunking_policy": "chunks go first come, first served",
        "dynamic_batch_config": "the batch changes with every step; its bounds are max_batch_size and max_num_tokens of LLM",
    }

    def __post_init__(self) -> None:
        self._need_one_of("capacity_scheduler_policy", POLICIES)


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig(Checked):
    """batch_sizes: of the decode steps that are captured, or max_batch_size: the largest, with the usual ones below it.
    capture_num_tokens: sizes, in tokens, of the steps with prompts that are captured; None: up to 1024, and max_num_tokens."""

    batch_sizes: Sequence[int] | None = None
    max_batch_size: int | None = None
    capture_num_tokens: Sequence[int] | None = None

    HINTS: ClassVar[dict[str, str]] = {
        "enable_padding": "steps are always padded to the next captured batch size; list each size in batch_sizes to avoid it"
    }

    def __post_init__(self) -> None:
        self._need_count("max_batch_size", 1, none=True)
        for name in ("batch_sizes", "capture_num_tokens"):
            sizes = getattr(self, name)
            given = None if sizes is None else listed(sizes)
            good = sizes is None or (given is not None and all(type(n) is int and 1 <= n <= MAX_COUNT for n in given))
            self._need(name, good, "None or integers, at least 1")
            object.__setattr__(self, name, given)
        self._need("batch_sizes", self.batch_sizes is None or self.max_batch_size is None, "None beside max_batch_size")

    def sizes(self, max_batch: int) -> list[int]:
        if self.batch_sizes is not None:
            return sorted({min(n, max_batch) for n in self.batch_sizes})
        return graph_sizes(min(max_batch, self.max_batch_size or max_batch))

    def token_sizes(self, most: int) -> list[int] | None:
        return None if self.capture_num_tokens is None else sorted({min(n, most) for n in self.capture_num_tokens})


@dataclass(frozen=True, kw_only=True)
class NGramDecodingConfig(Checked):
    """Guess up to max_draft_len tokens from what followed the last max_matching_ngram_size tokens before, and verify them in one step.

    For text that repeats its prompt. Steps in which all requests are greedy guess; the host then waits for each step.
    """

    max_draft_len: int = 7
    max_matching_ngram_size: int = 3

    HINTS: ClassVar[dict[str, str]] = {
        "is_keep_all": "guesses come from the request's own tokens, the latest match first",
        "is_use_oldest": "guesses come from the request's own tokens, the latest match first",
        "is_public_pool": "guesses come from the request's own tokens, the latest match first",
    }

    def __post_init__(self) -> None:
        self._need("max_draft_len", type(self.max_draft_len) is int and 1 <= self.max_draft_len <= 7, "an integer from 1 to 7")
        self._need_count("max_matching_ngram_size", 1)


@dataclass(frozen=True, kw_only=True)
class DraftTargetDecodingConfig(Checked):
    """Guess up to max_draft_len tokens as speculative_model, a smaller model of the same vocabulary, goes on; verify them in one step.

    speculative_model, weights, load_format, quant: as model, weights, load_format and quant of `LLM`. Steps in which all requests are
    greedy guess; the host then waits for each step. Its cache, of the model's dtype, takes its share of the pool.
    """

    speculative_model: str | Path | Decoder
    max_draft_len: int = 4
    weights: Mapping[str, Tensor] | None = None
    load_format: str = "auto"
    quant: str | QuantPlan = ()

    HINTS: ClassVar[dict[str, str]] = {
        "speculative_model_dir": "use speculative_model",
        "max_total_draft_tokens": "guesses are one chain of max_draft_len tokens",
        "draft_len_schedule": "max_draft_len is constant",
        "max_concurrency": "steps guess whenever all their requests are greedy",
    }

    def __post_init__(self) -> None:
        self._need("max_draft_len", type(self.max_draft_len) is int and 1 <= self.max_draft_len <= 7, "an integer from 1 to 7")
