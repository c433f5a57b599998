"""Models whose experts are chosen by sigmoid and a bias (GLM-4.5, dots.llm1, MiniMax M2), and OLMoE, against transformers, and their
config fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyllm.layers import Decoder, MoE
from pyllm.models import spec_from_config
from tests.models import oracle
from tests.models.published import split_experts

pytest.importorskip("transformers")

GLM = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2, routed_scaling_factor=1.7)
OLMOE = dict(num_experts=6, num_experts_per_tok=2)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4-moe": ("Glm4Moe", GLM),
    "glm4-moe-norms": ("Glm4Moe", GLM | dict(use_qk_norm=True, attention_bias=True, tie_word_embeddings=True, first_k_dense_replace=0)),
    "glm4-moe-groups": ("Glm4Moe", GLM | dict(n_group=4, topk_group=2, norm_topk_prob=False, head_dim=24)),
    "dots1": ("Dots1", GLM | dict(first_k_dense_replace=1, sliding_window=None)),
    "dots1-window": ("Dots1", GLM | dict(first_k_dense_replace=1, sliding_window=12, max_window_layers=2, attention_bias=True)),
    "dots1-groups-tied": (
        "Dots1",
        GLM
        | dict(
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            layer_types=["full_attention", "sliding_attention"] * 2,
            sliding_window=5,
        ),
    ),
    "minimax-m2": ("MiniMaxM2", dict(num_local_experts=6, num_experts_per_tok=2, rotary_dim=8)),
    "minimax-m2-tied": ("MiniMaxM2", dict(num_local_experts=6, num_experts_per_tok=3, tie_word_embeddings=True, head_dim=24)),
    "olmoe": ("Olmoe", OLMOE),
    "olmoe-tied-mha": ("Olmoe", OLMOE | dict(num_key_value_heads=4, tie_word_embeddings=True, norm_topk_prob=True, attention_bias=True)),
}
FILE: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8, vocab_size=50)


def make(name: str) -> oracle.Made:
    """The published names; the bias of the choice, which transformers starts as zeros, is random too."""
    model, config, state = oracle.make(name, *CASES[name])
    generator = torch.Generator().manual_seed(11)
    for t in (t for key, t in state.items() if key.endswith("e_score_correction_bias")):
        t.copy_(0.3 * torch.randn(t.shape, generator=generator))
    if CASES[name][0] != "MiniMaxM2":
        return model, config, split_experts(state)
    state = split_experts(state, "block_sparse_moe", ("w1", "w3", "w2"))
    return model, config, {k.replace("mlp.e_score", "block_sparse_moe.e_score"): t for k, t in state.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(make(name))


@pytest.mark.parametrize("name", ["glm4-moe-norms", "dots1-groups-tied", "minimax-m2", "olmoe"])
def test_two_ranks_and_separate_ops(name: str) -> None:
    oracle.check_two_ranks_and_separate_ops(make(name))


def spec(kind: str, **changes: Any) -> Decoder:
    return spec_from_config(FILE | {"architectures": [f"{kind}ForCausalLM"]} | changes)


@pytest.mark.filterwarnings("error")
def test_what_files_leave_out() -> None:
    glm = spec("Glm4Moe", num_nextn_predict_layers=1)
    attn, moe = glm.attns()[0][1], glm.subs[3].body
    assert attn.rope is not None and isinstance(moe, MoE) and moe.shared
    assert (attn.kv_heads, attn.rope.dim, attn.qk_norm, attn.qkv_bias, attn.o_bias) == (8, 4, None, False, False)
    assert (moe.experts, moe.top_k, moe.scoring, moe.groups, moe.shared.ff, moe.renormalize) == (128, 8, "sigmoid", (1, 1), 1408, True)
    assert "model.layers.3.*" in glm.ignore and not isinstance(glm.subs[1].body, MoE)
    olmoe = spec("Olmoe").subs[1].body
    assert isinstance(olmoe, MoE) and (olmoe.experts, olmoe.top_k, olmoe.ff, olmoe.renormalize) == (64, 8, 96, False)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [("Olmoe", {"clip_qkv": 8.0}, "config: clip_qkv is 8.0, expected None"),
     ("Olmoe", {"num_experts_per_tok": 65}, r"MoE mlp: top_k is 65, expected 1\.\.experts=64"),
     ("Dots1", {"num_experts_per_tok": 2}, "config: num_experts is None, expected a positive integer"),
     ("MiniMaxM2", {"attn_type_list": [1, 0, 1]}, r"config: attn_type_list is \(1, 0, 1\), expected None or \(1, 1, 1\)"),
     ("MiniMaxM2", {"scoring_func": "softmax"}, "config: scoring_func is 'softmax', expected 'sigmoid'"),
     ("MiniMaxM2", {"rotary_dim": 7}, "config: head_dim is 128, of which 7 are rotated"),
     ("Glm4Moe", {"n_group": 3}, r"MoE mlp: groups is \(3, 1\), expected")],
)  # fmt: skip
def test_bad_fields_are_named(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        spec(kind, **changes)
