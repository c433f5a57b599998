"""What config.json files of the Hub do that a reader may miss: fields in two places, absent, null, odd, off, or beside a file that
says otherwise."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pyllm.api.model import load_parts
from pyllm.layers import Decoder, MoE, plan
from pyllm.models import spec_from_config
from tests.layers.custom import random_state

BASE: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=50)


def spec(kind: str = "Llama", **changes: Any) -> Decoder:
    """No field may be unknown."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return spec_from_config(BASE | {"architectures": [f"{kind}ForCausalLM"]} | changes)


PLACES: list[tuple[dict[str, Any], str]] = [
    (dict(rope_theta=1e4, rope_parameters=dict(rope_theta=5e5)), "rope_parameters: rope_theta is 500000.0, but rope_theta is 10000.0"),
    (dict(rope_scaling=dict(type="linear", factor=2.0), rope_parameters=dict(rope_type="default", rope_theta=1e4)),
     "rope_scaling: type is 'linear', but rope_parameters: rope_type is 'default'"),
    (dict(rope_scaling=dict(type="linear", factor=2.0), rope_parameters=dict(rope_type="linear", factor=4.0)),
     "rope_scaling: factor is 2.0, but rope_parameters: factor is 4.0"),
    (dict(rope_scaling=dict(type="yarn", rope_type="linear", factor=2.0)), "rope_scaling: type is 'yarn', but rope_scaling: rope_type"),
    (dict(partial_rotary_factor=0.5, rope_parameters=dict(partial_rotary_factor=1.0)), "but partial_rotary_factor is 0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), PLACES)
def test_two_places_that_disagree_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: .*{message}"):
        spec(**changes)


def test_two_places_that_agree_are_one() -> None:
    """Files have `type` and `rope_type` side by side, and the same theta outside and inside."""
    rope = dict(rope_theta=5e5, rope_type="linear", type="linear", factor=2.0)
    assert spec(rope_theta=5e5, rope_scaling=rope, rope_parameters=rope) == spec(rope_parameters=rope)
    long = dict(factor=4.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=64)
    assert spec(rope_scaling=long | dict(type="su", rope_type="longrope")) == spec(rope_scaling=long | dict(type="su"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [(dict(head_dim=15), "head_dim is 15, of which 15 are rotated, expected an even number"),
     (dict(head_dim=20, partial_rotary_factor=0.25), "head_dim is 20, of which 5 are rotated, expected an even number"),
     (dict(partial_rotary_factor=2.0), "head_dim is 16, of which 32 are rotated, expected an even number from 2 to head_dim"),
     (dict(partial_rotary_factor=0.01), "head_dim is 16, of which 0 are rotated"),
     (dict(hidden_size=66), "head_dim is absent and hidden_size=66 is not a multiple of num_attention_heads=4"),
     (dict(num_key_value_heads=0), "num_key_value_heads is 0, expected a positive integer"),
     (dict(rope_scaling=dict(type="linear", factor=1e20)), "rope_parameters make .* positions, expected 1 to 16777216"),
     (dict(rope_scaling=dict(type="yarn", factor=2.0, original_max_position_embeddings=0.5)), "rope_parameters make 0.5 positions"),
     (dict(rope_scaling=dict(type="yarn", factor=2.0, truncate="no")), "truncate is 'no', expected true or false")],
)  # fmt: skip
def test_sizes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: {message}"):
        spec(**changes)


def test_head_sizes_that_are_unusual() -> None:
    """head_dim need not be hidden_size / heads, nor divide it; the rotated part is rounded down, as transformers does."""
    for changes, want in [
        (dict(head_dim=80), (80, 80)),
        (dict(hidden_size=72, num_attention_heads=2, head_dim=16), (16, 16)),
        (dict(partial_rotary_factor=0.3), (16, 4)),
        (dict(head_dim=None, num_key_value_heads=None), (16, 16)),
    ]:
        attn = spec(**changes).attns()[0][1]
        assert attn.rope is not None and (attn.head_dim, attn.rope.dim) == want and attn.kv_heads == attn.heads


def test_flags_that_are_off() -> None:
    """A window that a flag turns off is none, and `max_window_layers` beside it means nothing."""
    for kind in ("Qwen2", "Qwen3"):
        for off in (dict(use_sliding_window=False), {}):
            model = spec(kind, head_dim=16, sliding_window=8, max_window_layers=2, **off)
            assert [a.window for _, a in model.attns()] == [None] * 4
        on = spec(kind, head_dim=16, sliding_window=8, max_window_layers=2, use_sliding_window=True)
        assert [a.window for _, a in on.attns()] == [None, None, 8, 8]
    assert [a.window for _, a in spec("Mistral", sliding_window=None).attns()] == [None] * 4


def test_biases() -> None:
    """attention_bias of a Llama is on all four projections, Qwen 2 has the first three without saying so."""
    for changes, want in [({}, set()), (dict(attention_bias=False), set()), (dict(attention_bias=True), {"q", "k", "v", "o"})]:
        names = {s.split(".")[-2][0] for i in plan(spec(**changes)) for s in i.sources if s.endswith("_proj.bias")}
        assert names == want
    assert {s.split(".")[-2][0] for i in plan(spec("Qwen2")) for s in i.sources if s.endswith("_proj.bias")} == {"q", "k", "v"}


def test_lists_of_layers_with_experts() -> None:
    def sparse(kind: str, **changes: Any) -> list[int]:
        model = spec(kind, **(dict(num_key_value_heads=2, head_dim=16, num_experts_per_tok=1) | changes))
        return [i for i, s in enumerate(model.subs[1::2]) if isinstance(s.body, MoE)]

    for kind in ("Qwen2Moe", "Qwen3Moe"):
        assert sparse(kind) == sparse(kind, mlp_only_layers=[]) == [0, 1, 2, 3]
        assert sparse(kind, decoder_sparse_step=2) == [1, 3]
        assert sparse(kind, decoder_sparse_step=2, mlp_only_layers=[3]) == [1]
    assert sparse("Llama4", interleave_moe_layer_step=2) == [1, 3]
    assert sparse("Llama4", moe_layers=[0, 2], interleave_moe_layer_step=2) == [0, 2]
    assert sparse("DeepseekV2", first_k_dense_replace=1, num_key_value_heads=4) == [1, 2, 3]


def save(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor], **files: Any) -> Path:
    save_file(state, folder / "model.safetensors")
    for name, content in ({"config": config} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


TIED = BASE | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}


def test_a_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    """Twice the same tensor is fine, another one must not be dropped."""
    state = random_state(spec_from_config(TIED))
    embed = state["model.embed_tokens.weight"]
    parts = load_parts(save(tmp_path, TIED, state | {"lm_head.weight": embed.clone()}), device="cpu", progress=False)
    assert parts.spec.head is None
    for other in (embed + 1e-3, embed[:-1].clone()):
        save(tmp_path, TIED, state | {"lm_head.weight": other})
        with pytest.raises(ValueError, match=r"tie_word_embeddings is set, but lm_head\.weight differs from model\.embed_tokens\.weight"):
            load_parts(tmp_path, device="cpu", progress=False)


def test_a_head_that_is_not_tied_and_not_stored(tmp_path: Path) -> None:
    state = random_state(spec_from_config(TIED))
    with pytest.raises(ValueError, match="checkpoint has no tensor 'lm_head.weight', which the declaration needs"):
        load_parts(save(tmp_path, TIED | {"tie_word_embeddings": False}, state), device="cpu", progress=False)


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [({"eos_token_id": 7}, None, (7,)), ({"eos_token_id": [7, 9, 7]}, None, (7, 9)), ({"eos_token_id": None}, None, ()),
     ({"eos_token_id": 7}, {"eos_token_id": [9, 3]}, (9, 3)), ({"eos_token_id": [7, 9]}, {"eos_token_id": None}, (7, 9)),
     ({}, {"eos_token_id": 0}, (0,))],
)  # fmt: skip
def test_end_tokens(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, want: tuple[int, ...]) -> None:
    """One, several or none; generation_config.json rules where it says something."""
    files = {} if generation is None else {"generation_config": generation}
    save(tmp_path, TIED | config, random_state(spec_from_config(TIED)), **files)
    assert load_parts(tmp_path, device="cpu", progress=False).eos_ids == want
