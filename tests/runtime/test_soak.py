"""The soak of `make soak` in short: several threads, mixed requests, aborts, a cache too small for all; and that it sees what it is for."""

from __future__ import annotations

import json

import pytest

from pyllm import LLM, KvCacheConfig, NGramDecodingConfig, SchedulerConfig
from tests.runtime.tiny import VOCAB, save_tiny, tiny_spec, tiny_weights
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
    assert result["checks"] == 4 * result["rounds"]
    assert result["process_bytes_end"] >= result["process_bytes_start"] > 0


def test_growth_is_the_slope_and_too_much_of_it_an_error() -> None:
    memory = [(0.0, 5, 10**9), (60.0, 5, 10**9 + 100), (120.0, 5, 10**9 + 200)]
    found = soak._growth(memory)
    assert (found["process_drift_bytes_per_minute"], found["device_drift_bytes_per_minute"]) == (100, 0)
    assert (found["process_bytes_start"], found["process_bytes_end"]) == (10**9, 10**9 + 200)
    for device, process in ((soak.DEVICE_GROWTH + 1, 0), (0, soak.GROWTH + 1)):
        with pytest.raises(RuntimeError, match="soak: memory grew"):
            soak._growth([*memory, (180.0, 5 + device, 10**9 + process)])


def test_the_command_line_makes_a_record(tmp_path, capsys) -> None:
    folder = save_tiny(tmp_path / "model")
    arguments = ["--seconds", "12", "--device", "cpu", "--clients", "2", "--max-seq-len", "150", "--model", str(folder)]
    assert soak.main([*arguments, "--record", str(tmp_path / "soak.jsonl")]) == 0
    (line,) = (tmp_path / "soak.jsonl").read_text().splitlines()
    assert line == capsys.readouterr().out.strip()
    record = json.loads(line)
    assert {"requests", "aborts", "preemptions", "checks", "commit", "time", "device_drift_bytes_per_minute"} <= set(record)


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
