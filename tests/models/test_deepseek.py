"""DeepSeek V2 and V3 against transformers, and their config fields."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from pyllm.layers import MLA, MLP, Decoder, MoE, bind
from pyllm.layers.stored import expand_fp8
from pyllm.models import spec_from_config
from tests.models import oracle
from tests.models.published import split_experts

pytest.importorskip("transformers")

MLA_SIZES = dict(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, kv_lora_rank=24, q_lora_rank=40, num_key_value_heads=4, head_dim=8)
V2 = MLA_SIZES | dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2, first_k_dense_replace=1)
V3 = V2 | dict(n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=1.7)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", V2),
    "v2-lite-yarn": ("DeepseekV2", V2 | dict(q_lora_rank=None, rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707))),
    "v2-groups-tied": ("DeepseekV2", V2 | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, tie_word_embeddings=True)),
    "v2-biases": ("DeepseekV2", V2 | dict(attention_bias=True, mlp_bias=True, routed_scaling_factor=0.6, first_k_dense_replace=0)),
    "v3": ("DeepseekV3", V3),
    "v3-yarn": ("DeepseekV3", V3 | dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0), v_head_dim=24)),
    "v3-halves-tied": ("DeepseekV3", V3 | dict(rope_interleave=False, q_lora_rank=None, tie_word_embeddings=True, attention_bias=True)),
    "v3-one-group": ("DeepseekV3", V3 | dict(n_group=1, topk_group=1, norm_topk_prob=False, first_k_dense_replace=2)),
}
FILE: dict[str, Any] = dict(hidden_size=256, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4, vocab_size=50)


def make(name: str) -> oracle.Made:
    """The published names; the bias of the choice, which transformers starts as zeros, is random too."""
    model, config, state = oracle.make(name, *CASES[name])
    generator = torch.Generator().manual_seed(11)
    for t in (t for key, t in state.items() if key.endswith("e_score_correction_bias")):
        t.copy_(0.3 * torch.randn(t.shape, generator=generator))
    return model, config, split_experts(state)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(make(name))


@pytest.mark.parametrize("name", ["v2", "v2-biases", "v3"])
def test_two_ranks_and_separate_ops(name: str) -> None:
    oracle.check_two_ranks_and_separate_ops(make(name))


def test_e4m3_blocks() -> None:
    """The published form of V3: products in e4m3 beside the scales of their blocks; embedding, head, router and norms plain."""
    model, config, state = make("v3")
    config |= {
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    }
    for key in [k for k in state if "_proj" in k]:
        scale = torch.full((1, 1), state[key].abs().max().item() / 448)
        stored = (state[key] / scale).to(torch.float8_e4m3fn)
        state[key].copy_(expand_fp8("w", "s", stored, scale))  # views of the oracle's own parameters
        state |= {key: stored, f"{key}_scale_inv": scale}
    oracle.check_ragged_chunks_and_decode((model, config, state))


def spec(kind: str, **changes: Any) -> Decoder:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return spec_from_config(FILE | {"architectures": [f"{kind}ForCausalLM"]} | changes)


def test_what_files_leave_out() -> None:
    two, three = spec("DeepseekV2", num_experts_per_tok=6), spec("DeepseekV3")
    for decoder in (two, three):
        attn = decoder.attns()[0][1]
        assert isinstance(attn, MLA) and attn.rope is not None
        assert (attn.head_dim, attn.rope.dim, attn.v_dim, attn.kv_rank, attn.q_rank) == (192, 64, 128, 512, 1536)
        assert attn.scale == 192**-0.5 and attn.rope.interleaved
    first, last = two.subs[1].body, three.subs[-1].body
    assert isinstance(first, MoE) and isinstance(last, MoE) and first.shared and last.shared
    assert [isinstance(s.body, MLP) for s in three.subs[1::2]] == [True, True, True, False, False]
    assert (first.experts, first.top_k, first.scale, first.groups, first.scoring, first.renormalize) == (64, 6, 1.0, None, "softmax", False)
    assert (first.shared.ff, last.shared.ff) == (2 * 1407, 2048)
    assert (last.experts, last.top_k, last.scale, last.groups, last.scoring, last.renormalize) == (256, 8, 2.5, (8, 4), "sigmoid", True)
    assert last.correction == "gate.e_score_correction_bias"


def test_published_fields() -> None:
    """The fields of the published V3 and V2-Lite files, none of which is unknown."""
    old = dict(ep_size=1, aux_loss_alpha=0.001, seq_aux=True, num_nextn_predict_layers=1, scoring_func="sigmoid", topk_method="noaux_tc",
               moe_layer_freq=1, rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1,
                                                   mscale=1.0, mscale_all_dim=1.0), max_position_embeddings=163840)  # fmt: skip
    attn = spec("DeepseekV3", **old).attns()[0][1]
    assert attn.scale == pytest.approx(192**-0.5 * 1.36889**2, rel=1e-5)  # 0.1 ln 40 + 1
    lite = dict(q_lora_rank=None, num_experts_per_tok=6, n_group=1, topk_group=1, topk_method="greedy", scoring_func="softmax")
    assert spec("DeepseekV2", **lite).attns()[0][1].q_rank is None
    assert spec("DeepseekV2", **lite, n_shared_experts=None).subs[1].body.shared is None
    assert [isinstance(s.body, MoE) for s in spec("DeepseekV2", **lite, moe_layer_freq=2).subs[1::2]] == [True, False, True, False, True]


def test_the_layers_that_predict_further_tokens_are_left_alone() -> None:
    _, config, state = make("v3")
    bind(spec_from_config(config), state | {"model.layers.4.eh_proj.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"no layer asked for: model\.layers\.5\.x"):
        bind(spec_from_config(config), state | {"model.layers.5.x": torch.zeros(1)})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [("DeepseekV2", {}, "num_experts_per_tok is None, expected a positive integer"),
     ("DeepseekV2", {"num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob is True, expected False"),
     ("DeepseekV2", {"num_experts_per_tok": 6, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', expected 'greedy' or"),
     ("DeepseekV2", {"num_experts_per_tok": 6, "scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', expected 'softmax'"),
     ("DeepseekV3", {"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
     ("DeepseekV3", {"topk_method": 3}, "topk_method is 3, expected one of greedy"),
     ("DeepseekV3", {"num_key_value_heads": 2}, "MLA self_attn: kv_heads is 2, expected heads=4"),
     ("DeepseekV3", {"kv_lora_rank": 0}, "kv_lora_rank is 0, expected a positive integer"),
     ("DeepseekV3", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a positive number")],
)  # fmt: skip
def test_bad_fields_are_named(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^(config: )?{message}"):
        spec_from_config(FILE | {"architectures": [f"{kind}ForCausalLM"]} | changes)
