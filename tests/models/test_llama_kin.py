"""Arcee, ERNIE 4.5, Seed-OSS and Phi (1, 1.5, 2) against transformers, and their config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.layers import Decoder
from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

OWN_HEAD = dict(num_key_value_heads=4)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", {}),
    "arcee-tied-biases": ("Arcee", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, hidden_act="gelu")),
    "ernie": ("Ernie4_5", {}),
    "ernie-untied-biases": ("Ernie4_5", dict(tie_word_embeddings=False, use_bias=True, num_key_value_heads=4)),
    "seed-oss": ("SeedOss", {}),
    "seed-oss-other-biases": ("SeedOss", dict(attention_bias=False, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "phi": ("Phi", OWN_HEAD),
    "phi-gqa": ("Phi", OWN_HEAD | dict(num_key_value_heads=2, partial_rotary_factor=0.25, layer_norm_eps=1e-2)),
}
FILE: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, vocab_size=50)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))


@pytest.mark.parametrize("name", ["arcee-tied-biases", "ernie-untied-biases", "seed-oss", "phi"])
def test_two_ranks_and_separate_ops(name: str) -> None:
    oracle.check_two_ranks_and_separate_ops(oracle.make(name, *CASES[name]))


def spec(kind: str, **changes: Any) -> Decoder:
    return spec_from_config(FILE | {"architectures": [f"{kind}ForCausalLM"]} | changes)


@pytest.mark.filterwarnings("error")
def test_what_files_leave_out() -> None:
    seed, arcee, phi, ernie = spec("SeedOss"), spec("Arcee"), spec("Phi"), spec("Ernie4_5")
    attn = seed.attns()[0][1]
    assert (attn.kv_heads, attn.head_dim, attn.qkv_bias, attn.o_bias, seed.max_positions) == (8, 128, True, False, 524288)
    assert (arcee.subs[1].body.act, arcee.subs[1].body.gated, arcee.max_positions) == ("relu2", False, 4096)
    attn = ernie.attns()[0][1]
    assert attn.rope is not None and attn.rope.interleaved
    assert (attn.rope.theta, attn.kv_heads, attn.head_dim, attn.qkv_bias, ernie.head) == (5e5, 2, 128, False, None)
    rope = phi.attns()[0][1].rope
    assert rope is not None and (rope.dim, phi.max_positions) == (4, 2048)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [("Phi", {"tie_word_embeddings": True}, "tie_word_embeddings is True, expected False"),
     ("Phi", {"qk_layernorm": True}, "qk_layernorm is set, expected q and k without"),
     ("SeedOss", {"attention_out_bias": 1}, "attention_out_bias is 1, expected true or false")],
)  # fmt: skip
def test_bad_fields_are_named(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: {message}"):
        spec(kind, **changes)
