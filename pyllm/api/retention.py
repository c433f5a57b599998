"""How long the cached pages of a request are worth keeping: `KvCacheRetentionConfig`, named as in TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pyllm.api.refuse import Checked, listed
from pyllm.twins.pool import PRIORITY, TOP_PRIORITY

_FOREVER = "None: a page keeps its priority until it is given away"


class _Priorities(Checked):
    def _need_priority(self, name: str) -> None:
        value = getattr(self, name)
        self._need(name, type(value) is int and 0 <= value <= TOP_PRIORITY, f"an integer from 0 to {TOP_PRIORITY}")


@dataclass(frozen=True)
class TokenRange(_Priorities):
    """Tokens token_start up to token_end of the prompt, None: to its end. duration_ms: None, which is for ever."""

    token_start: int
    token_end: int | None = None
    priority: int = PRIORITY
    duration_ms: None = None

    def __post_init__(self) -> None:
        self._need_count("token_start", 0)
        self._need_count("token_end", self.token_start + 1, none=True)
        self._need_priority("priority")
        self._need("duration_ms", self.duration_ms is None, _FOREVER)


@dataclass(frozen=True)
class KvCacheRetentionConfig(_Priorities):
    """Priorities, 0 to 100, of the pages that a request leaves in the cache; 35 where none is given. The lowest goes first when a page is
    wanted, the least recently used first among equals.

    token_range_retention_configs: of parts of the prompt (`KvCacheRetentionConfig.TokenRangeRetentionConfig`), which do not overlap.
    decode_retention_priority: of what is generated; decode_duration_ms: None, which is for ever. A page has the highest priority of its
    tokens, of what is cached behind it in its prompt, and of all such configs of requests that have used it.
    """

    token_range_retention_configs: Sequence[TokenRange] = ()
    decode_retention_priority: int = PRIORITY
    decode_duration_ms: None = None

    TokenRangeRetentionConfig: ClassVar[type[TokenRange]] = TokenRange
    HINTS: ClassVar[dict[str, str]] = {
        "transfer_mode": "pages that are given away go to the host's memory: KvCacheConfig(host_cache_size=...)",
        "directory": "pages that are given away go to the host's memory: KvCacheConfig(host_cache_size=...)",
    }

    def __post_init__(self) -> None:
        ranges = listed(self.token_range_retention_configs)
        good = ranges is not None and all(isinstance(r, TokenRange) for r in ranges)
        self._need("token_range_retention_configs", good, "a list of KvCacheRetentionConfig.TokenRangeRetentionConfig")
        object.__setattr__(self, "token_range_retention_configs", ranges)  # the engine reads it later, in another thread
        assert ranges is not None
        ordered = sorted(ranges, key=lambda r: r.token_start)
        apart = all(a.token_end is not None and a.token_end <= b.token_start for a, b in pairwise(ordered))
        self._need("token_range_retention_configs", apart, "ranges that do not overlap")
        self._need_priority("decode_retention_priority")
        self._need("decode_duration_ms", self.decode_duration_ms is None, _FOREVER)

    def priorities(self, first: int, end: int, page_size: int, prompt: int) -> NDArray[np.int32]:
        """Of the pages `first` up to `end` of a sequence whose first `prompt` tokens are the prompt."""
        start = first * page_size
        tokens = np.full((end - first) * page_size, PRIORITY, np.int32)
        tokens[max(prompt - start, 0) :] = self.decode_retention_priority
        for r in self.token_range_retention_configs:
            last = prompt if r.token_end is None else min(r.token_end, prompt)
            tokens[max(r.token_start - start, 0) : max(last - start, 0)] = r.priority
        return tokens.reshape(-1, page_size).max(1)
