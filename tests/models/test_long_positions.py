"""Positions past 8,192 against transformers, with each rope scaling, each order of rotary pairs, windows and chunks.

One layer of one head: the keys of 8,300 tokens are enough work. The last rows are compared, the bound is that of the other tests."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from pyllm.layers import bind
from pyllm.models import spec_from_config
from tests.models import oracle, test_falcon, test_gemma3, test_gpt_neox, test_llama4
from tests.models.paged import Paged

pytest.importorskip("transformers")

LENGTH, ROWS, CHUNK = 8300, 60, 2075
ONE = oracle.SIZES | dict(num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1, hidden_size=16, intermediate_size=32)
ORIGINAL = dict(rope_theta=1e4, factor=4.0, original_max_position_embeddings=4096)
ROPES: dict[str, dict[str, Any]] = {
    "default": dict(rope_type="default", rope_theta=1e4),
    "theta-5e5": dict(rope_type="default", rope_theta=5e5),
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    "dynamic": dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
    "llama3": ORIGINAL | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": ORIGINAL | dict(rope_type="yarn"),
    "yarn-mscale": ORIGINAL | dict(rope_type="yarn", mscale=1.0, mscale_all_dim=0.7, truncate=False),
    "longrope": ORIGINAL | dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[1.0 + i for i in range(8)]),
}
SHORT = {"linear": 4096, "dynamic": 4096}  # what the factor makes longer; the others say the whole length
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama-{n}": ("Llama", dict(max_position_embeddings=SHORT.get(n, 16384), rope_parameters=r)) for n, r in ROPES.items()},
    "glm4-interleaved": ("Glm4", dict(max_position_embeddings=16384)),
    "neox-partial": ("GPTNeoX", dict(max_position_embeddings=16384)),
    "falcon-alibi": ("Falcon", dict(alibi=True, hidden_size=32, num_attention_heads=2)),
    "mistral-window": ("Mistral", dict(max_position_embeddings=16384, sliding_window=4100)),
    "gemma3-local": ("Gemma3", dict(max_position_embeddings=16384, sliding_window=4100, layer_types=["sliding_attention"],
                                    query_pre_attn_scalar=16)),
    "gpt-oss-window": ("GptOss", dict(max_position_embeddings=16384, sliding_window=4100, layer_types=["sliding_attention"],
                                      num_local_experts=2, num_experts_per_tok=1)),
    "ministral3": ("Ministral3", dict(max_position_embeddings=16384, rope_parameters=ORIGINAL | dict(rope_type="yarn",
                                                                                                      llama_4_scaling_beta=0.1))),
    "deepseek-v3-yarn": ("DeepseekV3", dict(max_position_embeddings=16384, head_dim=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
                                            v_head_dim=8, kv_lora_rank=16, q_lora_rank=None, num_key_value_heads=1,
                                            first_k_dense_replace=1, rope_parameters=ORIGINAL | dict(rope_type="yarn", mscale=1.0,
                                                                                                     mscale_all_dim=1.0))),
    "llama4-chunk": ("Llama4", dict(max_position_embeddings=16384, attention_chunk_size=3000, num_local_experts=2,
                                    intermediate_size_mlp=32, moe_layers=[])),
    "llama4-tempered": ("Llama4", dict(max_position_embeddings=16384, no_rope_layers=[0], floor_scale=4000, num_local_experts=2,
                                       intermediate_size_mlp=32, moe_layers=[])),
}  # fmt: skip


def make(name: str) -> oracle.Made:
    kind = CASES[name][0]
    module = {"Falcon": test_falcon, "GPTNeoX": test_gpt_neox, "Gemma3": test_gemma3, "Llama4": test_llama4}.get(kind)
    with mock.patch.object(oracle, "SIZES", ONE):
        if module is None:
            return oracle.make(name, *CASES[name])
        with mock.patch.dict(module.CASES, {name: CASES[name]}):
            return module.make(name)


@pytest.mark.parametrize("name", CASES)
def test_last_rows_of_a_long_text(name: str) -> None:
    model, config, state = make(name)
    if name != "falcon-alibi":
        model.set_attn_implementation("eager" if name == "gpt-oss-window" else "sdpa")  # sinks have no other
    spec = spec_from_config(config)
    bound, pages = bind(spec, state), Paged(spec, 1, LENGTH, page=64)
    ids = torch.randint(0, config["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        for start in range(0, LENGTH, CHUNK):
            got = bound(pages.step([ids[start : start + CHUNK]], known=[LENGTH]))
        want = model(ids[None], use_cache=False, logits_to_keep=ROWS).logits[0]
    oracle.assert_logits(got[-ROWS:], want)
