"""gpt-oss against transformers, and its config fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyllm.layers import MoE, Yarn, bind
from pyllm.layers.stored import expand_mxfp4
from pyllm.models import spec_from_config
from tests.models import oracle
from tests.models.paged import Paged

pytest.importorskip("transformers")

MOE = dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=12)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, truncate=False)
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("GptOss", MOE),
    "gpt-oss-tight-clamp": ("GptOss", MOE | dict(swiglu_limit=0.4, swiglu_alpha=1.1, rope_parameters=YARN)),
    "gpt-oss-types-tied": ("GptOss", MOE | dict(layer_types=TYPES, tie_word_embeddings=True, num_experts_per_tok=1, sliding_window=5)),
    "gpt-oss-mqa-no-bias": ("GptOss", MOE | dict(num_key_value_heads=1, head_dim=24, attention_bias=False, num_experts_per_tok=6)),
}
FILE: dict[str, Any] = dict(
    architectures=["GptOssForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=16, vocab_size=50
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))


@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss-tight-clamp", "gpt-oss-types-tied"])
def test_two_ranks_and_separate_ops(name: str) -> None:
    oracle.check_two_ranks_and_separate_ops(oracle.make(name, *CASES[name]))


def packed(name: str) -> oracle.Made:
    """The published form: experts as MXFP4, whose values the oracle has plain, as transformers expands them."""
    model, config, state = oracle.make(name, *CASES[name])
    for key in [k for k in state if k.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, rows = state[key].shape
        blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], dtype=torch.uint8)
        state[key].copy_(expand_mxfp4("b", "s", blocks, scales))
        del state[key]
        state |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    return model, config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}, state


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1, 17, 33])
def test_mxfp4_prefill(name: str, length: int) -> None:
    model, config, state = packed(name)
    spec = spec_from_config(config)
    ids = torch.arange(length) % config["vocab_size"]
    oracle.assert_logits(bind(spec, state)(Paged(spec, 1, length).step([ids])), oracle.expected(model, ids))


@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss-tight-clamp"])
def test_mxfp4_chunks_and_two_ranks(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(packed(name))
    oracle.check_two_ranks_and_separate_ops(packed(name))


def test_what_files_leave_out() -> None:
    spec = spec_from_config(FILE)
    moe, (_, first), (_, second) = spec.subs[1].body, *spec.attns()[:2]
    assert isinstance(moe, MoE) and first.rope is not None
    assert (moe.experts, moe.top_k, moe.clamp) == (128, 4, (1.702, 7.0))
    assert (first.kv_heads, first.head_dim, first.window, second.window, first.qkv_bias, first.o_bias) == (8, 64, 128, None, True, True)
    assert (first.rope.theta, first.rope.scaling) == (1.5e5, Yarn(32.0, 4096, truncate=False))


def test_published_fields() -> None:
    """A file in the old form: rope_scaling, two names for one number, the length before the scaling at the top."""
    scaling = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096, truncate=False)
    old = dict(num_local_experts=128, num_experts_per_tok=4, experts_per_token=4, initial_context_length=4096, rope_theta=150000,
               rope_scaling=scaling, swiglu_limit=7.0, attention_bias=True)  # fmt: skip
    assert spec_from_config(FILE | old) == spec_from_config(FILE)
    new = spec_from_config(FILE | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}})
    rope = new.attns()[0][1].rope
    assert rope is not None and rope.scaling == Yarn(2.0, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is set .quant_method 'gptq'.; stored quantized only mxfp4"),
     ({"experts_per_token": 4, "num_experts_per_tok": 2}, "experts_per_token is 4, but num_experts_per_tok is 2"),
     ({"swiglu_limit": None}, "swiglu_limit is None, expected a positive number"),
     ({"swiglu_limit": -1}, "swiglu_limit is -1, expected a positive number")],
)  # fmt: skip
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: {message}"):
        spec_from_config(FILE | changes)
