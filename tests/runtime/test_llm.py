"""LLM: one prompt or many, text or ids, streams, aborts, samples, stop strings; what it refuses; its signatures, frozen."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pyllm
from pyllm import LLM, CudaGraphConfig, DraftTargetDecodingConfig, KvCacheConfig, NGramDecodingConfig, SamplingParams, SchedulerConfig
from pyllm.load.tokenizer import Tokenizer
from pyllm.models import spec_from_config
from pyllm.runtime.engine import Engine
from pyllm.runtime.loop import EngineLoop
from tests.runtime.fake import FakeModel, FakeSpec
from tests.runtime.tiny import CONFIG, EOS, VOCAB, byte_tokenizer, save_tiny, tiny_spec, tiny_weights

SMALL = KvCacheConfig(max_tokens=2048, tokens_per_block=16)
GOLDEN = Path(__file__).parent / "golden" / "signatures.txt"
PUBLIC = (
    "LLM",
    "SamplingParams",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "SchedulerConfig",
    "CudaGraphConfig",
    "NGramDecodingConfig",
    "DraftTargetDecodingConfig",
    "RequestOutput",
    "CompletionOutput",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, device="cpu", max_batch_size=4, max_num_tokens=64, kv_cache_config=SMALL) as made:
        yield made


def signatures() -> str:
    lines = []
    for name in PUBLIC:
        cls = getattr(pyllm, name)
        lines.append(f"{name}{inspect.signature(cls)}")
        for member, value in sorted(vars(cls).items()):
            if isinstance(value, property):
                lines.append(f"{name}.{member}")
            elif inspect.isfunction(value) and not member.startswith("_"):
                lines.append(f"{name}.{member}{inspect.signature(value)}")
    return "\n".join(lines) + "\n"


def test_the_public_signatures_are_frozen(request) -> None:
    if request.config.getoption("update_golden"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(signatures())
    assert signatures() == GOLDEN.read_text(), "a public signature changed; if that is meant: pytest --update-golden"


def test_one_prompt_or_many_as_text_or_ids(llm) -> None:
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    one = llm.generate("hello", params)
    assert (one.prompt, one.prompt_token_ids, one.finished) == ("hello", list(b"hello"), True)
    assert (one.outputs[0].length, one.outputs[0].finish_reason) == (7, "length")
    inputs = ["hello", list(b"hello"), {"prompt": "hello"}, {"prompt_token_ids": list(b"hello")}]
    for out in llm.generate(inputs, params):
        assert out.outputs[0].token_ids == one.outputs[0].token_ids
    assert llm.generate(list(b"hello"), params).outputs[0].token_ids == one.outputs[0].token_ids
    lengths = [o.outputs[0].length for o in llm.generate(["a", "b"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3)])]
    assert lengths == [1, 3]
    assert llm.generate([]) == []
    cut = SamplingParams(max_tokens=7, ignore_eos=True, truncate_prompt_tokens=5)
    assert llm.generate("I say hello", cut).outputs[0].token_ids == one.outputs[0].token_ids


def test_twenty_prompts_are_each_what_they_are_alone(llm) -> None:
    prompts = [f"{n} green bottles"[: 1 + n % 16] * (1 + n % 3) for n in range(20)]
    params = [SamplingParams(max_tokens=3 + n % 9, temperature=1.0, top_k=20, seed=n) for n in range(20)]
    for out, prompt, p in zip(llm.generate(prompts, params), prompts, params, strict=True):
        assert llm.generate(prompt, p).outputs[0].token_ids == out.outputs[0].token_ids


def test_a_stream_is_the_result_in_pieces(llm) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1)
    want = llm.generate("abc", params).outputs[0]
    looks = [
        (out.outputs[0].token_ids_diff, out.outputs[0].text_diff, out.outputs[0].logprobs_diff)
        for out in llm.generate_async("abc", params, streaming=True)
    ]
    assert [i for ids, _, _ in looks for i in ids] == want.token_ids
    assert "".join(text for _, text, _ in looks) == want.text
    assert [p for _, _, some in looks for p in some] == want.logprobs
    assert want.cumulative_logprob == pytest.approx(sum(p.logprob for p in want.logprobs))


def test_async_streams_and_results(llm) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    want = llm.generate("abc", params).outputs[0].token_ids

    async def stream() -> list[int]:
        return [i async for out in llm.generate_async("abc", params, streaming=True) for i in out.outputs[0].token_ids_diff]

    async def both() -> tuple[list[list[int]], list[int]]:
        streams = await asyncio.gather(*(stream() for _ in range(6)))
        return streams, (await llm.generate_async("abc", params).aresult()).outputs[0].token_ids

    streams, result = asyncio.run(both())
    assert streams == [want] * 6
    assert result == want


def wait_idle(llm: LLM) -> dict[str, float]:
    for _ in range(500):
        stats = llm.get_stats()
        if not stats["running"] and not stats["waiting"]:
            return stats
        time.sleep(0.01)
    raise AssertionError(stats)


def test_abort_and_leaving_a_stream_give_everything_back(llm) -> None:
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    handle = llm.generate_async("abc", long)
    with pytest.raises(TimeoutError, match="still runs after 0.001 seconds"):
        handle.result(timeout=0.001)
    handle.abort()
    out = handle.result(timeout=60).outputs[0]
    assert (out.finish_reason, out.error) == ("abort", None)
    assert out.length < 150
    left = llm.generate_async("abc", long, streaming=True)
    for _ in itertools.islice(left, 3):
        pass
    assert left.result(60).outputs[0].finish_reason == "abort"
    stats = wait_idle(llm)
    assert stats["used_pages"] == 0
    assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]


def test_samples_of_one_prompt(llm) -> None:
    params = SamplingParams(max_tokens=6, n=4, temperature=1.0, seed=11, ignore_eos=True)
    out = llm.generate("some prompt of two pages, so that there is a full one", params)
    ids = [c.token_ids for c in out.outputs]
    assert [c.index for c in out.outputs] == [0, 1, 2, 3]
    assert len({tuple(i) for i in ids}) == 4
    assert [c.token_ids for c in llm.generate(out.prompt, params).outputs] == ids
    best = llm.generate(out.prompt, SamplingParams(max_tokens=6, n=2, best_of=4, temperature=1.0, seed=11, ignore_eos=True))
    scores = [c.cumulative_logprob for c in llm.generate(out.prompt, replace(params, logprobs=0)).outputs]
    assert sorted(c.cumulative_logprob for c in best.outputs) == pytest.approx(sorted(scores)[2:])
    assert len(best.outputs) == 2


def test_a_shared_prompt_is_computed_once(folder) -> None:
    text = "x" * 100
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=2)
    plain = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(folder, device="cpu", max_batch_size=4, kv_cache_config=SMALL) as llm:
        cold = llm.generate(text, plain)
        warm = llm.generate(text, plain)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert llm.generate(text, plain, cache_salt="other").cached_tokens == 0
        first, second = llm.generate(text, params), llm.generate(text, params)
        assert first.outputs[0].prompt_logprobs == second.outputs[0].prompt_logprobs
        assert first.outputs[0].prompt_logprobs[0] is None
        assert len(first.outputs[0].prompt_logprobs) == 100
        assert wait_idle(llm)["used_pages"] == 0
    off = KvCacheConfig(max_tokens=2048, tokens_per_block=16, enable_block_reuse=False)
    with LLM(folder, device="cpu", max_batch_size=4, kv_cache_config=off) as llm:
        assert [llm.generate(text, plain).cached_tokens for _ in range(2)] == [0, 0]
        assert llm.generate(text, plain).outputs[0].token_ids == cold.outputs[0].token_ids


def speaking(text: str | list[int], **options) -> LLM:
    """An LLM whose model says this after any prompt of 4 characters, then ends."""
    script = [*(text.encode() if isinstance(text, str) else text), EOS]
    model = FakeModel(choose=lambda history: script[min(len(history) - 4, len(script) - 1)], vocab=VOCAB, nan_token=-1)
    llm = object.__new__(LLM)
    llm.tokenizer = Tokenizer(byte_tokenizer())
    llm._engine = Engine(FakeSpec(400, VOCAB), model, page_size=16, pages=60, eos_ids=(EOS,), overlap=True)
    llm._loop = EngineLoop(llm._engine, options.pop("watchdog", 60.0))
    return llm


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        ("STOP", False, "Hello ST", "STOP"),
        ("STOP", True, "Hello STSTOP", "STOP"),
        (["é", "STOP"], False, "Hello ST", "STOP"),
        (["OP", "STOP"], False, "Hello ST", "STOP"),
        (["ST"], False, "Hello ", "ST"),
        (["nowhere"], False, "Hello STSTOP the end é!", EOS),
        (["!"], False, "Hello STSTOP the end é", "!"),
        (["é!"], True, "Hello STSTOP the end é!", "é!"),
    ],
)
def test_stop_strings_across_tokens_are_never_sent(stop, include, text, reason) -> None:
    """Each token is a byte, so each stop string crosses the borders of tokens."""
    with speaking("Hello STSTOP the end é!") as llm:
        params = SamplingParams(max_tokens=80, stop=stop, include_stop_str_in_output=include)
        out = llm.generate("1234", params).outputs[0]
        assert (out.text, out.finish_reason, out.stop_reason) == (text, "stop", reason)
        pieces = [look.outputs[0].text_diff for look in llm.generate_async("1234", params, streaming=True)]
        assert "".join(pieces) == text
        assert wait_idle(llm)["used_pages"] == 0


def test_stop_strings_wait_for_min_tokens() -> None:
    with speaking("a.b.c.") as llm:
        out = llm.generate("1234", SamplingParams(max_tokens=80, stop=".", min_tokens=3)).outputs[0]
        assert out.text == "a.b"


def test_bad_words_are_never_completed() -> None:
    with speaking("the cat and the car") as llm:
        out = llm.generate("1234", SamplingParams(max_tokens=12, bad=["cat", "!"], ignore_eos=True)).outputs[0]
        assert out.text.startswith("the ca")
        assert out.text[6] != "t"


def test_a_declaration_with_weights_is_a_model(folder, llm) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    want = llm.generate("abc", params).outputs[0]
    with LLM(tiny_spec(), weights=tiny_weights(0), tokenizer=folder, device="cpu", max_batch_size=2, kv_cache_config=SMALL) as custom:
        assert custom.generate("abc", params).outputs[0].text == want.text
    with LLM(tiny_spec(), weights=tiny_weights(0), device="cpu", max_batch_size=2, kv_cache_config=SMALL) as bare:
        out = bare.generate(list(b"abc"), params).outputs[0]
        assert (out.token_ids, out.text) == (want.token_ids, "")
        for given, bad in (("abc", SamplingParams()), ([1], SamplingParams(stop="x")), ([1], SamplingParams(bad="x"))):
            with pytest.raises(ValueError, match="needs a tokenizer, and there is none; use token ids"):
                bare.generate(given, bad)
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_batch_size=2, kv_cache_config=SMALL) as dummy:
        assert dummy.generate([1, 2], params).outputs[0].length == 5


def test_a_model_that_raises_fails_its_requests_and_others_go_on() -> None:
    with speaking("fine") as llm:
        good = llm._engine._runner._module
        llm._engine._runner._module = lambda b: 1 // 0
        out = llm.generate("1234").outputs[0]
        assert (out.finish_reason, out.error) == (
            "error",
            "a step of the engine failed: ZeroDivisionError: integer division or modulo by zero",
        )
        llm._engine._runner._module = good
        assert llm.generate("1234").outputs[0].text == "fine"
        assert wait_idle(llm)["used_pages"] == 0


def test_a_step_that_hangs_ends_in_an_error() -> None:
    llm, release = speaking("x", watchdog=0.2), threading.Event()
    llm._engine._runner._module = lambda b: release.wait()
    first, second = llm.generate_async("1234"), llm.generate_async("1234")
    for handle in (first, second):
        out = handle.result(timeout=30).outputs[0]
        assert (out.finish_reason, out.error) == ("error", "a step took longer than watchdog_timeout=0.2 seconds")
    with pytest.raises(RuntimeError, match="watchdog_timeout"):
        llm.generate("1234")
    llm.shutdown()
    release.set()


def test_shutdown_ends_what_runs() -> None:
    llm = speaking("x" * 300)
    handle = llm.generate_async("1234", SamplingParams(max_tokens=300))
    llm.shutdown()
    assert handle.result(timeout=30).outputs[0].finish_reason == "abort"
    with pytest.raises(RuntimeError, match="it was shut down"):
        llm.generate_async("1234")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda f: LLM(f, tensor_parallel_size=2), TypeError, "LLM: tensor_parallel_size is not supported: one GPU is served"),
        (lambda f: LLM(f, gpu_memory_utilization=0.9), TypeError, "free_gpu_memory_fraction"),
        (lambda f: LLM(f, max_batchsize=2), TypeError, "did you mean max_batch_size?"),
        (lambda f: LLM(f, kv_cache_config={}), ValueError, "kv_cache_config is {}, expected a KvCacheConfig"),
        (lambda f: LLM(f, cuda_graph_config=True), ValueError, "cuda_graph_config is True, expected a CudaGraphConfig"),
        (lambda f: LLM(f, load_format="hub"), ValueError, "load_format is 'hub', expected 'auto' or 'dummy'"),
        (lambda f: LLM(f, weights={}), ValueError, "weights are given beside a path"),
        (lambda f: LLM(tiny_spec()), ValueError, "needs weights"),
        (lambda f: LLM(f, watchdog_timeout=0), ValueError, "watchdog_timeout is 0"),
        (lambda f: LLM("/no/such/model"), ValueError, "no such file or directory"),
        (
            lambda f: LLM("/no/such/model", load_format="dummy"),
            ValueError,
            "expected a directory with a config.json, or one of llama-3.2-1b",
        ),
        (lambda f: LLM(f, tokenizer=3), ValueError, "tokenizer is 3"),
        (lambda f: LLM(f, max_batch_size=0), ValueError, "LLM: max_batch_size is 0, expected an integer, at least 1"),
        (lambda f: LLM(f, max_batch_size=None), ValueError, "LLM: max_batch_size is None, expected an integer"),
        (lambda f: LLM(f, max_seq_len=1.5), ValueError, "LLM: max_seq_len is 1.5, expected an integer"),
        (lambda f: LLM.generate(None, "x", lora_request=1), TypeError, "LLM.generate: lora_request is not supported: LoRA is not served"),
        (lambda f: LLM.generate(None, "x", sampling_param=1), TypeError, "no argument sampling_param; did you mean sampling_params?"),
        (lambda f: LLM.generate_async(None, "x", stream=True), TypeError, "stream is not supported: use generate_async(..., str"),
        (lambda f: KvCacheConfig(onboard_blocks=True), TypeError, "onboard_blocks is not supported"),
        (lambda f: KvCacheConfig(tokens_per_block=48), ValueError, "tokens_per_block is 48, expected one of 16, 32, 64, 128"),
        (lambda f: KvCacheConfig(free_gpu_memory_fraction=0), ValueError, "free_gpu_memory_fraction is 0"),
        (lambda f: KvCacheConfig(dtype="nvfp4"), ValueError, "dtype is 'nvfp4', expected one of auto, fp8, int8"),
        (lambda f: SchedulerConfig(capacity_scheduler_policy="STATIC_BATCH"), ValueError, "expected one of GUARANTEED_NO_EVICT"),
        (lambda f: CudaGraphConfig(batch_sizes=[0]), ValueError, "batch_sizes is [0]"),
        (lambda f: CudaGraphConfig(batch_sizes=[1], max_batch_size=2), ValueError, "expected None beside max_batch_size"),
        (lambda f: NGramDecodingConfig(max_draft_len=8), ValueError, "max_draft_len is 8, expected an integer from 1 to 7"),
        (lambda f: NGramDecodingConfig(is_keep_all=True), TypeError, "is_keep_all is not supported"),
        (lambda f: DraftTargetDecodingConfig(speculative_model=f, max_draft_len=0), ValueError, "max_draft_len is 0, expected an integer"),
        (
            lambda f: DraftTargetDecodingConfig(speculative_model_dir=f),
            TypeError,
            "speculative_model_dir is not supported: use speculative_model",
        ),
        (
            lambda f: LLM(f, speculative_config=3),
            ValueError,
            "speculative_config is 3, expected a NGramDecodingConfig or DraftTargetDecodingConfig",
        ),
        (lambda f: SamplingParams(n=2), ValueError, "greedy samples are all alike"),
        (lambda f: SamplingParams(n=3, best_of=2, temperature=1), ValueError, "best_of is 2, expected at least n=3"),
        (lambda f: SamplingParams(stop="x", detokenize=False), ValueError, "stop needs the text"),
        (lambda f: SamplingParams(min_tokens=40), ValueError, "min_tokens is 40, expected at most max_tokens=32"),
        (lambda f: SamplingParams(stop=""), ValueError, "stop holds '', expected texts that are not empty"),
        (lambda f: SamplingParams(logit_bias={-1: 2}), ValueError, "logit_bias holds (-1, 2)"),
        (lambda f: SamplingParams(logits_processor=[3]), ValueError, "logits_processor holds 3"),
        (lambda f: SamplingParams(repetition_penalty=0), ValueError, "repetition_penalty is 0"),
    ],
)
def test_refusals_say_what_to_use(folder, call, error, text) -> None:
    with pytest.raises(error) as caught:
        call(folder)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_inputs_that_are_refused(llm) -> None:
    for bad, text in (
        ("", "the prompt is empty"),
        ([], None),
        ({"prompt": "a", "prompt_token_ids": [1]}, "expected prompt or prompt_token_ids"),
        ({"text": "a"}, "expected prompt or prompt_token_ids"),
        ([VOCAB], "expected token ids from 0"),
        ("y" * 160, "expected at most 159"),
    ):
        if text is None:
            assert llm.generate(bad) == []
            continue
        with pytest.raises(ValueError, match=text):
            llm.generate(bad)
    with pytest.raises(ValueError, match="1 sampling_params for 2 inputs"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="streaming cannot know the best samples"):
        llm.generate_async("a", SamplingParams(n=1, best_of=2, temperature=1.0), streaming=True)
    assert llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True)).outputs[0].length == 2


def test_what_cannot_fit_is_said_before_anything_is_loaded(folder, monkeypatch) -> None:
    monkeypatch.setattr("pyllm.api.model.free_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"the weights take .* MiB in torch.float32, 0.0 MiB are free on cpu"):
        LLM(folder, device="cpu")


def test_guessing_says_the_same_and_counts(folder, llm) -> None:
    guessing_says_the_same(folder, llm, NGramDecodingConfig(max_draft_len=5))


def test_a_second_model_guesses(folder, llm, tmp_path) -> None:
    guessing_says_the_same(folder, llm, DraftTargetDecodingConfig(speculative_model=save_tiny(tmp_path / "other", seed=7)))
    small = spec_from_config(CONFIG | {"num_hidden_layers": 1})
    guessing_says_the_same(folder, llm, DraftTargetDecodingConfig(speculative_model=small, load_format="dummy"))


def guessing_says_the_same(folder, llm, how) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = ["again and again and again and again", "abcabcabc", "x"]
    want = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    config = {"kv_cache_config": SMALL, "speculative_config": how}
    with LLM(folder, device="cpu", max_batch_size=4, **config) as guessing:
        assert [o.outputs[0].token_ids for o in guessing.generate(prompts, params)] == want
        looks = [look.outputs[0].token_ids_diff for look in guessing.generate_async(prompts[0], params, streaming=True)]
        assert [t for some in looks for t in some] == want[0]
        stats = guessing.get_stats()
        assert 0 <= stats["accepted_tokens"] <= stats["drafted_tokens"]
        assert stats["drafted_tokens"] > 0


def test_torch_tensors_of_a_processor(llm) -> None:
    seen = []

    def only_a(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(ids))
        return torch.full_like(logits, -1e9).index_fill(0, torch.tensor([97]), 1.0)

    out = llm.generate("bc", SamplingParams(max_tokens=3, logits_processor=only_a))
    assert out.outputs[0].text == "aaa"
    assert seen == [[98, 99], [98, 99, 97], [98, 99, 97, 97]]
