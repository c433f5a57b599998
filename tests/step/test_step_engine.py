"""The executor with decode steps in one op: on a CPU the op's reference has the bits of the layers, so every token must be the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pyllm.layers.one_kernel as one
from pyllm import LLM, DraftTargetDecodingConfig, KvCacheConfig, NGramDecodingConfig, SamplingParams
from pyllm.api.dummy import DummyWeights
from pyllm.cli import app
from pyllm.layers.one_kernel import in_one_kernel
from pyllm.runtime.engine import Engine
from tests.runtime.tiny import save_tiny
from tests.step.cases import BF16, FORMATS, bound, declare

HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5, "logprobs": 1},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each `decode_step`."""
    seen: list[int] = []
    whole = one.decode_step

    def counted(model: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(ids))
        return whole(model, ids, *rest)

    monkeypatch.setattr(one, "decode_step", counted)
    return seen


def run(module: Any, spec: Any, n: int, how: dict[str, Any], **options: Any) -> list[Any]:
    engine = Engine(spec, module, dtype=BF16, max_batch=6, max_tokens=1024, page_size=16, chunk=64, **options)
    for cache in engine.kv.caches.values():  # what nobody stored must never be read
        for t in (cache.k, cache.v):
            t[1:].view(torch.uint8).fill_(0x7F if t.element_size() == 1 else 0xFF)
    g = torch.Generator().manual_seed(n)
    prompts = [torch.randint(0, spec.vocab_size, (1 + 13 * i,), generator=g).tolist() for i in range(n)]
    requests = [engine.submit(p, SamplingParams(max_tokens=5 + 3 * i, ignore_eos=True, **how)) for i, p in enumerate(prompts)]
    engine.run()
    assert [r.error for r in requests] == [None] * n
    return [(r.token_ids, r.logprobs) for r in requests]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_tokens_are_the_same(calls: list[int], n: int, how: str) -> None:
    spec = declare("llama")
    module = bound(spec)
    want = run(module, spec, n, HOW[how])
    assert not calls
    assert run(in_one_kernel(module, True, BF16), spec, n, HOW[how]) == want
    assert set(calls) == set(range(1, min(n, 4) + 1))  # requests end one after the other; five at once go layer by layer


@pytest.mark.parametrize("formats", FORMATS)
def test_tokens_are_the_same_in_every_format(calls: list[int], formats: str) -> None:
    spec, kv = declare("qwen3"), FORMATS[formats][1]
    module = bound(spec, formats)
    assert run(in_one_kernel(module, True, kv), spec, 2, {}, kv_dtype=kv) == run(module, spec, 2, {}, kv_dtype=kv)
    assert calls


def test_idle_rows_fill_a_step_up(calls: list[int]) -> None:
    """Steps of 3 requests run as 4 rows: one key on the dummy page."""
    spec = declare("llama")
    module = bound(spec)
    want = run(module, spec, 3, {}, graph_sizes=[4])
    assert run(in_one_kernel(module, True, BF16), spec, 3, {}, graph_sizes=[4]) == want
    assert set(calls) == {4}


def make(**options: Any) -> LLM:
    spec = declare("llama")
    common = dict(weights=DummyWeights(spec, "cpu", BF16), device="cpu", dtype="bf16", max_batch_size=4, progress=False)
    return LLM(spec, kv_cache_config=options.pop("kv", KvCacheConfig(max_tokens=512)), **(common | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"kv": KvCacheConfig(max_tokens=512, dtype="fp8")}, {"quant": "fp8"}, {"speculative_config": NGramDecodingConfig()}]
)
def test_the_option_of_llm(calls: list[int], options: dict[str, Any]) -> None:
    out = {}
    for asked in (None, False, True):
        calls.clear()
        with make(one_kernel=asked, **options) as llm:
            out[asked] = llm.generate([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)).outputs[0].token_ids
        assert bool(calls) == (asked is True)  # by itself never on a CPU
    assert out[None] == out[False] == out[True]


def test_a_second_model_that_guesses(calls: list[int]) -> None:
    spec = declare("llama", num_hidden_layers=1)
    draft = DraftTargetDecodingConfig(speculative_model=spec, weights=DummyWeights(spec, "cpu", BF16), max_draft_len=2)
    with make(one_kernel=True, speculative_config=draft) as llm, make(one_kernel=False) as plain:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        assert llm.generate([5, 6, 7], params).outputs[0].token_ids == plain.generate([5, 6, 7], params).outputs[0].token_ids


def test_pairs_that_do_not_go_together() -> None:
    for options, reason in (
        ({"deterministic": True}, "the model is bound with invariant=True"),
        ({"dtype": "fp32"}, "the model is float32 with a cache of float32, expected"),
        ({"kv": KvCacheConfig(max_tokens=512, dtype="int8")}, "the model is bfloat16 with a cache of int8, expected"),
        ({"quant": (("*down_proj", None), ("*lm_head", None), ("*", FORMATS["fp8"][0][1][1]))}, "the weights are model, expected all"),
    ):
        with pytest.raises(ValueError, match=rf"^one_kernel is True, but .*{reason}"):
            make(one_kernel=True, **options)
        make(one_kernel=None, **options).shutdown()


def test_the_option_of_the_bench(tmp_path: Path) -> None:
    """Asked for where it is not served: one line that says why, and no measurement."""
    args = ["bench", "latency", str(save_tiny(tmp_path)), "--num-requests", "1", "--input-len", "3", "--output-len", "2", "--device", "cpu"]
    refused = CliRunner().invoke(app, [*args, "--one-kernel"])
    assert refused.exit_code == 2
    assert "one_kernel is True, but the model is float32 with a cache of float32" in refused.stderr
    assert CliRunner().invoke(app, [*args, "--no-one-kernel"]).exit_code == 0
