"""config.json as files have it: old and new rope fields, absent and null fields, and what is refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from pyllm.layers import Attn, Decoder
from pyllm.models import spec_from_config

BASE: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
)  # fmt: skip
GEMMA = BASE | {"architectures": ["Gemma2ForCausalLM"]}
LONG = [1.0] * 8


def spec(**changes: Any) -> Decoder:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return spec_from_config(BASE | changes)


def attn(decoder: Decoder) -> Attn:
    return decoder.attns()[0][1]


def test_absent_and_null_fields_are_the_same() -> None:
    names = ("head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling")
    assert spec() == spec(**dict.fromkeys((*names, "rope_parameters", "partial_rotary_factor", "hidden_act", "attention_bias")))
    assert (attn(spec()).kv_heads, attn(spec()).head_dim) == (4, 16)


def test_rope_in_the_old_and_in_the_new_place() -> None:
    old = spec(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}, partial_rotary_factor=0.5)
    new = spec(rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5})
    assert old == new
    assert (attn(old).rope.dim, old.max_positions) == (8, 4 * 2048)


def test_gemma2_files_leave_out_what_its_config_class_says() -> None:
    """Published ones do not say that the head is tied."""
    short, long = (spec_from_config(GEMMA | extra) for extra in ({}, {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}))
    assert short == long
    assert (short.head, short.logit_softcap, attn(short).softcap, attn(short).window, attn(short).scale) == (None, 30, 50, 4096, 1 / 16)
    assert short.subs[1].body.act == "gelu_tanh"
    assert spec_from_config(GEMMA | {"tie_word_embeddings": False}).head is not None


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"sliding_window": 4}, "sliding_window"), ({"attn_logit_softcapping": 3.0}, "attn_logit_softcapping"), ({"foo": 1}, "foo"),
     ({"rope_scaling": {"type": "linear", "factor": 2.0, "bar": 1}}, "bar")],
)  # fmt: skip
def test_a_field_that_is_not_read_is_said(changes: dict[str, Any], name: str) -> None:
    with pytest.warns(UserWarning, match=f"fields that are not read: {name}$"):
        assert attn(spec_from_config(BASE | changes)).window is None


@pytest.mark.parametrize(("name", "off", "on"), [("full_attn_mod", 1, 2), ("lm_head_bias", False, True)])
def test_a_field_at_its_default_is_not_said(name: str, off: Any, on: Any) -> None:
    assert spec(**{name: off}) == spec()
    with pytest.warns(UserWarning, match=f"fields that are not read: {name}$"):
        spec_from_config(BASE | {name: on})


def test_a_warning_does_not_grow_with_the_file() -> None:
    with pytest.warns(UserWarning, match=r"not read: zz0*, zz1, zz10, .*zz26 \(and 79 more\)$") as caught:
        spec_from_config(BASE | {f"zz{i}": i for i in range(1, 99)} | {"zz" + "0" * 100000: 1})
    assert len(str(caught[0].message)) < 400


def test_llama_has_no_window_and_mistral_has_one() -> None:
    mistral = BASE | {"architectures": ["MistralForCausalLM"]}
    windows = [attn(spec_from_config(mistral | c)).window for c in ({}, {"sliding_window": None}, {"sliding_window": 7})]
    assert windows == [4096, None, 7]


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', expected a list with one of"),
    ({"architectures": [["x"]]}, "architectures is"),
    ({"vocab_size": "50"}, "vocab_size is '50', expected a positive integer"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most 4096"),
    ({"hidden_size": 10**300}, "hidden_size is 1000.*0, expected at most 1048576"),
    ({"num_attention_heads": 1 << 21}, "num_attention_heads is 2097152, expected at most 1048576"),
    ({"num_key_value_heads": 10**300}, "num_key_value_heads is 10.*, expected at most 1048576"),
    ({"head_dim": 10**300}, "head_dim is 10.*, expected at most 1048576"),
    ({"vocab_size": 10**9}, "vocab_size is 1000000000, expected at most 4194304"),
    ({"intermediate_size": 1 << 31}, "intermediate_size is 2147483648, expected at most 1073741824"),
    (GEMMA | {"sliding_window": 1 << 62}, "sliding_window is 4611686018427387904, expected at most 1073741824"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, expected at most"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', expected a positive number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\], expected one of silu"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or false"),
    ({"rope_theta": "abc"}, "rope_theta is 'abc', expected a positive number"),
    ({"rope_theta": 0}, "rope_theta is 0, expected a positive number"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
    ({"rope_scaling": {"type": "linear"}}, "'linear' have no 'factor'"),
    ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor is -2, expected a positive number"),
    ({"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": LONG}}, "short_factor is 1.0, expected a list"),
    ({"rope_scaling": {"type": "longrope", "short_factor": LONG}}, "long_factor is None, expected a list"),
    ({"rope_scaling": {"type": "longrope", "short_factor": LONG, "long_factor": [10**400, *LONG[1:]]}}, "long_factor is .*expected"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1e999, *LONG[1:]], "long_factor": LONG}}, "short_factor is .inf, .*expected"),
    ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type is 'mrope'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"per layer type \(full_attention\)"),
    ({"rope_interleaved": True}, "rope_interleaved is set"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder is set, expected a causal decoder"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is set .quant_method None.; stored quantized only mxfp4, and fp8 with"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "quantization_config is set .quant_method 'fp8'."),
    ({"quantization_config": "mxfp4"}, "quantization_config is set .quant_method None."),
    (GEMMA | {"sliding_window": "x"}, "sliding_window is 'x', expected a positive integer"),
    (GEMMA | {"layer_types": [{}, {}]}, "layer_types is"),
    (GEMMA | {"layer_types": 3}, "layer_types is 3, expected 2 of full_attention"),
    (GEMMA | {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "layer_types has sliding_attention, but"),
    (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, expected a positive number"),
    (GEMMA | {"final_logit_softcapping": "x"}, "final_logit_softcapping is 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config.*{message}"):
        spec_from_config(BASE | changes)


def test_a_config_that_is_no_object() -> None:
    with pytest.raises(ValueError, match="config is list, expected an object"):
        spec_from_config([])  # type: ignore[arg-type]
