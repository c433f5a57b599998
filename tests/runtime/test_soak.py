"""The soak of `make soak` in short: several threads, mixed requests, aborts, a cache too small for all; and that it sees what it is for."""

from __future__ import annotations

import pytest

from pyllm import LLM, KvCacheConfig, NGramDecodingConfig, SchedulerConfig
from tests.runtime.tiny import VOCAB, tiny_spec, tiny_weights
from tools import soak


def made(**options) -> LLM:
    cache = KvCacheConfig(max_tokens=512, tokens_per_block=16)
    return LLM(tiny_spec(), weights=tiny_weights(0), device="cpu", max_batch_size=4, kv_cache_config=cache, progress=False, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"scheduler_config": SchedulerConfig(capacity_scheduler_policy="MAX_UTILIZATION")}, {"speculative_config": NGramDecodingConfig()}],
)
def test_short_rounds_leave_nothing_behind(options) -> None:
    with made(**options) as llm:
        result = soak.soak(llm, 3.0, vocab=VOCAB, longest=150, clients=6, round_seconds=1.0)
    assert result["requests"] > 10
    assert result["tokens"] > result["requests"]
    assert result["used_pages"] == 0
    assert result["rounds"] >= 3


def test_a_lost_page_and_a_wrong_answer_are_seen(monkeypatch) -> None:
    with made() as llm:
        held = llm._engine.pool.allocate(1)
        stats = llm.get_stats
        monkeypatch.setattr(soak.time, "monotonic", iter(range(0, 10**6, 20)).__next__)
        with pytest.raises(RuntimeError, match="round 0: at rest, but .*'used_pages': 1"):
            soak._check_rest(llm, 0)
        monkeypatch.setattr(llm, "get_stats", lambda: stats() | {"used_pages": 0})
        with pytest.raises(RuntimeError, match="round 0: pages are lost"):
            soak._check_rest(llm, 0)
        llm._engine.pool.free(held)
