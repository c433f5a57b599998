"""Llama 4 (text) against transformers, its config fields, and its attention variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyllm.jit import compile_variant, compiler, use_cache
from pyllm.layers import MoE
from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

BASE: dict[str, Any] = dict(attention_chunk_size=12, floor_scale=9, intermediate_size_mlp=80, num_local_experts=6)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("Llama4", BASE),
    "llama4-dense-between": ("Llama4", BASE | dict(interleave_moe_layer_step=2, use_qk_norm=False, attention_bias=True)),
    "llama4-moe-layers-tied": ("Llama4", BASE | dict(moe_layers=[0, 3], tie_word_embeddings=True, num_key_value_heads=4)),
    "llama4-nope-mqa": ("Llama4", BASE | dict(no_rope_layers=[0, 1, 0, 1], num_key_value_heads=1, attn_scale=0.7, head_dim=24)),
    "llama4-full": ("Llama4", BASE | dict(attention_chunk_size=None, attn_temperature_tuning=False, rms_norm_eps=1e-2)),
}
FILE: dict[str, Any] = dict(
    architectures=["Llama4ForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=8, vocab_size=50
)  # fmt: skip


def make(name: str) -> oracle.Made:
    """The text config's class is Llama4TextConfig, which `oracle.make` does not spell."""
    from transformers.models.llama4 import modeling_llama4  # isort: skip  (before the next line: it replaces the module `transformers`)
    import transformers  # isort: skip

    kind, changes = CASES[name]
    transformers.Llama4TextForCausalLM = modeling_llama4.Llama4ForCausalLM
    model, config, state = oracle.make(name, f"{kind}Text", changes)
    return model, config | {"architectures": ["Llama4ForCausalLM"]}, state


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(make(name))


@pytest.mark.parametrize("name", ["llama4", "llama4-dense-between", "llama4-full"])
def test_two_ranks_and_separate_ops(name: str) -> None:
    oracle.check_two_ranks_and_separate_ops(make(name))


def test_what_files_leave_out() -> None:
    spec = spec_from_config(FILE)
    attns = [a for _, a in spec.attns()]
    assert [a.variant and a.variant.name for a in attns] == ["chunked"] * 3 + ["tempered", "chunked"]
    assert [a.rope is not None and a.qk_norm is not None for a in attns] == [True] * 3 + [False, True]
    assert {(a.kv_heads, a.head_dim, a.qkv_bias) for a in attns} == {(8, 128, False)}
    moe = spec.subs[1].body
    assert isinstance(moe, MoE) and (moe.experts, moe.top_k, moe.shared is not None) == (16, 1, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_experts_per_tok": 2}, "MoE feed_forward: top_k is 2, expected 1 with scale_inputs"),
     ({"no_rope_layers": [1, 0]}, "config: no_rope_layers has 2 entries, expected num_hidden_layers=5 or more"),
     ({"layer_types": ["chunked_attention"] * 5, "attention_chunk_size": None}, "config: layer_types is"),
     ({"attention_chunk_size": -3}, "config: attention_chunk_size is -3, expected a positive integer"),
     ({"attention_chunk_size": 0.5}, "config: attention_chunk_size is 0.5, expected a positive integer"),
     ({"attention_chunk_size": 1 << 31}, "config: attention_chunk_size is 2147483648, expected at most 1073741824")],
)  # fmt: skip
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        spec_from_config(FILE | changes)


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_its_attention_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU runs is the reference beside the C++; the kernels are built for the head dim of the published files."""
    monkeypatch.setattr("pyllm.jit.cache._directory", [])
    use_cache(tmp_path)
    found = {a.variant for _, a in spec_from_config(FILE).attns()}
    found |= {a.variant for _, a in spec_from_config(FILE | dict(layer_types=["chunked_attention"] * 5)).attns()}
    assert len(found) == 3
    for variant in found:
        assert variant is not None and compile_variant(variant, 128)
