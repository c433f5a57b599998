"""Qwen 2, 3 and their mixtures of experts against transformers, and their config fields."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from pyllm.layers import MLP, Decoder, MoE, bind
from pyllm.models import spec_from_config
from tests.layers.test_custom import IDS
from tests.layers.test_tensor_parallel import run_ranks
from tests.models import oracle
from tests.models.paged import Paged
from tests.models.published import split_experts

pytest.importorskip("transformers")

LATE = dict(use_sliding_window=True, sliding_window=12, max_window_layers=2)
MIXED = dict(use_sliding_window=True, sliding_window=12, layer_types=["full_attention", "sliding_attention"] * 2)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
SHARED = EXPERTS | dict(shared_expert_intermediate_size=48)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-head-dim": ("Qwen2", dict(tie_word_embeddings=True, num_key_value_heads=1, head_dim=24)),
    "qwen2-window": ("Qwen2", LATE),
    "qwen2-window-everywhere": ("Qwen2", LATE | dict(max_window_layers=0)),
    "qwen2-layer-types": ("Qwen2", MIXED),
    "qwen2-yarn": ("Qwen2", dict(rope_parameters=YARN)),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied-head-dim": ("Qwen3", dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=24)),
    "qwen3-biases-window": ("Qwen3", LATE | dict(attention_bias=True)),
    "qwen3-layer-types": ("Qwen3", MIXED),
    "qwen2-moe": ("Qwen2Moe", SHARED),
    "qwen2-moe-normalized-no-bias": ("Qwen2Moe", SHARED | dict(norm_topk_prob=True, qkv_bias=False, tie_word_embeddings=True)),
    "qwen2-moe-window": ("Qwen2Moe", SHARED | dict(use_sliding_window=True, sliding_window=12, max_window_layers=3)),
    "qwen2-moe-layer-types": ("Qwen2Moe", SHARED | MIXED | dict(decoder_sparse_step=2)),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | dict(norm_topk_prob=True)),
    "qwen3-moe-not-normalized": ("Qwen3Moe", EXPERTS | dict(num_experts_per_tok=3, tie_word_embeddings=True, head_dim=24)),
    "qwen3-moe-sparse-step": ("Qwen3Moe", EXPERTS | dict(decoder_sparse_step=2, attention_bias=True)),
    "qwen3-moe-dense-layers": ("Qwen3Moe", EXPERTS | dict(mlp_only_layers=[0, 2], use_sliding_window=True, sliding_window=12)),
}
FILE: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=50)


def make(name: str) -> oracle.Made:
    model, config, state = oracle.make(name, *CASES[name])
    return model, config, split_experts(state)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(make(name))


@pytest.mark.parametrize("name", ["qwen2-window", "qwen3", "qwen2-moe", "qwen3-moe"])
def test_two_ranks_and_separate_ops(name: str) -> None:
    _, config, state = make(name)
    decoder = spec_from_config(config)
    want, separate = (bind(decoder, state, fuse=fuse)(Paged(decoder, 1, len(IDS)).step([IDS])) for fuse in (True, False))
    for got in (separate, *run_ranks(decoder, state, 2)):
        oracle.assert_logits(got, want)


def spec(kind: str, **changes: Any) -> Decoder:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return spec_from_config(FILE | {"architectures": [f"{kind}ForCausalLM"]} | changes)


def windows(decoder: Decoder) -> list[int | None]:
    return [a.window for _, a in decoder.attns()]


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe"])
def test_published_files_have_a_window_that_is_off(kind: str) -> None:
    off = spec(kind, use_sliding_window=False, sliding_window=131072, max_window_layers=2)
    assert off == spec(kind, sliding_window=9) == spec(kind)
    assert windows(off) == [None] * 4


def test_which_layers_have_the_window() -> None:
    on: dict[str, Any] = dict(use_sliding_window=True, sliding_window=9)
    for kind in ("Qwen2", "Qwen3"):
        assert windows(spec(kind, **on, max_window_layers=3)) == [None, None, None, 9]
        assert windows(spec(kind, **on)) == [None] * 4  # 28 layers without, says the config class
        assert windows(spec(kind, **on, layer_types=["sliding_attention"] + ["full_attention"] * 3)) == [9, None, None, None]
    assert windows(spec("Qwen2Moe", **on, max_window_layers=3)) == [9, None, 9, None]
    assert windows(spec("Qwen3Moe", **on)) == [9] * 4
    with pytest.warns(UserWarning, match="fields that are not read: max_window_layers$"):
        spec_from_config(FILE | {"architectures": ["Qwen3MoeForCausalLM"], "max_window_layers": 2} | on)


def test_what_files_leave_out() -> None:
    assert spec("Qwen3").attns()[0][1].head_dim == 128
    moe = spec("Qwen2Moe").subs[1].body
    assert isinstance(moe, MoE) and moe.shared
    assert (moe.experts, moe.top_k, moe.ff, moe.shared.ff, moe.renormalize) == (60, 4, 1408, 5632, False)
    moe = spec("Qwen3Moe").subs[1].body
    assert isinstance(moe, MoE)
    assert (moe.experts, moe.top_k, moe.ff, moe.shared, moe.renormalize) == (128, 8, 768, None, False)


def test_which_layers_are_dense() -> None:
    mixed = spec("Qwen3Moe", decoder_sparse_step=2, mlp_only_layers=[3], output_router_logits=False, router_aux_loss_coef=0.001)
    assert [type(s.body) for s in mixed.subs[1::2]] == [MLP, MoE, MLP, MLP]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [("Qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1, expected true or false"),
     ("Qwen2", {"max_window_layers": -1}, "max_window_layers is -1, expected a count"),
     ("Qwen2", {"max_window_layers": None, "use_sliding_window": True}, "max_window_layers is None, expected a count"),
     ("Qwen2", {"layer_types": ["sliding_attention"] * 4}, "layer_types has sliding_attention, but sliding_window is absent or"),
     ("Qwen3Moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list of integers"),
     ("Qwen3Moe", {"mlp_only_layers": [-1]}, "mlp_only_layers is"),
     ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected a positive integer"),
     ("Qwen3Moe", {"moe_intermediate_size": None}, "moe_intermediate_size is None, expected a positive integer"),
     ("Qwen2Moe", {"norm_topk_prob": "no"}, "norm_topk_prob is 'no', expected true or false"),
     ("Qwen2Moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, expected a positive integer")],
)  # fmt: skip
def test_bad_fields_are_named(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: {message}"):
        spec(kind, **changes)
