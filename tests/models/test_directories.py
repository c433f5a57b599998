"""From a directory to tokens: `LLM` on files that transformers saved, in a batch with chunked prompts, against its own greedy choice."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pyllm import LLM, SamplingParams
from pyllm.api.model import quant_plan
from pyllm.layers import bind
from pyllm.models import spec_from_config
from tests.layers.custom import random_state
from tests.models import oracle, test_deepseek, test_gpt_oss, test_text_part

pytest.importorskip("transformers")

PROMPTS = [[5, 9, 3], list(range(1, 41)), [7] * 17]


def deepseek(folder: Path) -> Any:
    model = test_deepseek.make("v3-yarn")[0]
    model.save_pretrained(folder)
    return model


def mxfp4(folder: Path) -> Any:
    model, config, state = test_gpt_oss.packed("gpt-oss")
    save_file({k: t.contiguous() for k, t in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return model


def text_part(folder: Path) -> Any:
    return test_text_part.make("gemma3", folder)


@pytest.mark.parametrize("make", [deepseek, mxfp4, text_part], ids=lambda f: f.__name__)
def test_greedy_tokens(make: Callable[[Path], Any], tmp_path: Path) -> None:
    model = make(tmp_path)
    with LLM(tmp_path, device="cpu", max_num_tokens=16, skip_tokenizer_init=True, progress=False) as llm:
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=10, ignore_eos=True), use_tqdm=False)
    for prompt, out in zip(PROMPTS, done, strict=True):
        ids = list(prompt)
        for token in out.outputs[0].token_ids:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            best = logits.max()
            assert logits[token] >= best - 2e-4 * logits.abs().max()  # the choice up to the error that the models are checked to, twice
            ids.append(token)
        assert len(ids) == len(prompt) + 10


@pytest.mark.parametrize("kind", ["Qwen2Moe", "Qwen3Moe", "Mixtral", "DeepseekV3"])
def test_fp8_leaves_routers_alone(kind: str) -> None:
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1, first_k_dense_replace=0)
    moe: dict[str, Any] = dict(sizes, shared_expert_intermediate_size=32, kv_lora_rank=32, q_lora_rank=None, num_key_value_heads=4)
    config = oracle.SIZES | moe | {"architectures": [f"{kind}ForCausalLM"], "hidden_size": 64, "vocab_size": 64}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each reads some of the sizes
        spec = spec_from_config(config)
    bound = bind(spec, random_state(spec), quant=quant_plan("fp8"))
    body = bound.subs[1].body
    assert body.w13.format.name == body.w2.format.name == bound.subs[0].body.o.format.name == "fp8"
    routers = [getattr(body, n) for n in ("gate", "shared_gate_proj") if hasattr(body, n)]
    assert all(r.format.name == "model" for r in routers) and (routers or body.router.dtype == torch.float32)
