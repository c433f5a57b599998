"""Which declarations have their decode steps in one kernel: by their structure, each refusal with its reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from pyllm.api.dummy import DummyWeights
from pyllm.layers import MLP, Attn, Decoder, Dense, Fp8, LayerNorm, QuantPlan, Sub, Sum, bind, rewrite
from pyllm.layers.formats import resolve
from pyllm.layers.one_kernel import OneKernel, bound_not_served, in_one_kernel
from pyllm.layers.recognise import not_served, rows_ahead
from pyllm.models import REGISTRY, spec_from_config
from pyllm.plan.explain import explain
from tests.step.cases import BF16, E4M3, MODELS, bound, declare, shape

ATTN = "model.layers.0.self_attn"
TAKEN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
REFUSED = {
    "ArceeForCausalLM": "model.layers.0.mlp: gated is False, expected True",
    "Cohere2ForCausalLM": "decoder: logit_scale is 0.0625, expected 1.0",
    "CohereForCausalLM": "decoder: logit_scale is 0.0625, expected 1.0",
    "DeepseekV3ForCausalLM": "step 0 is a MLA at model.layers.0, expected Attn and MLP in turn",
    "Ernie4_5ForCausalLM": "model.layers.0.self_attn: rope is interleaved, expected one that pairs halves",
    "Exaone4ForCausalLM": "model.layers.0: post is a RMSNorm, expected None",
    "FalconForCausalLM": "step 0 is a Sum at transformer.h.0, expected Attn and MLP in turn",
    "GPT2LMHeadModel": "decoder: positions is a Embedding, expected None",
    "GPTNeoXForCausalLM": "step 0 is a Sum at gpt_neox.layers.0, expected Attn and MLP in turn",
    "Gemma2ForCausalLM": "decoder: embed_scale is 48.0, expected 1.0",
    "Gemma3ForCausalLM": "decoder: embed_scale is 48.0, expected 1.0",
    "GemmaForCausalLM": "decoder: embed_scale is 55.42562584220407, expected 1.0",
    "Glm4ForCausalLM": "model.layers.0: post is a RMSNorm, expected None",
    "GlmForCausalLM": "model.layers.0.self_attn: rope is interleaved, expected one that pairs halves",
    "GptOssForCausalLM": "step 1 is a MoE at model.layers.0, expected Attn and MLP in turn",
    "MiniMaxM2ForCausalLM": "step 1 is a MoE at model.layers.0, expected Attn and MLP in turn",
    "Ministral3ForCausalLM": "model.layers.0.self_attn: variant is a AttentionVariant, expected None",
    "MinistralForCausalLM": "model.layers.0.self_attn: window is 4096, expected None",
    "MixtralForCausalLM": "step 1 is a MoE at model.layers.0, expected Attn and MLP in turn",
    "NemotronForCausalLM": "model.layers.0.mlp: gated is False, expected True",
    "Olmo2ForCausalLM": "model.layers.0: post is a RMSNorm, expected None",
    "Olmo3ForCausalLM": "model.layers.0: post is a RMSNorm, expected None",
    "OlmoeForCausalLM": "step 1 is a MoE at model.layers.0, expected Attn and MLP in turn",
    "Phi3ForCausalLM": "head_dim is 96, expected one of 64, 128",
    "PhiForCausalLM": "step 0 is a Sum at model.layers.0, expected Attn and MLP in turn",
    "Qwen2MoeForCausalLM": "step 1 is a MoE at model.layers.0, expected Attn and MLP in turn",
    "Qwen3MoeForCausalLM": "step 1 is a MoE at model.layers.0, expected Attn and MLP in turn",
    "SeedOssForCausalLM": "heads is 80, expected 1 to 8 for each of kv_heads=8",
    "SmolLM3ForCausalLM": "model.layers.3.self_attn: rope is None, expected one that pairs halves",
    "StableLmForCausalLM": "norm: a norm is a LayerNorm with eps=1e-05, expected an RMSNorm with eps=1e-05",
    "Starcoder2ForCausalLM": "model.layers.0.self_attn: o_bias is True, expected False",
}
INCOMPLETE: dict[str, tuple[dict[str, Any], str]] = {
    "DeepseekV2ForCausalLM": ({"num_experts_per_tok": 2}, "step 0 is a MLA at model.layers.0, expected Attn and MLP in turn"),
    "Dots1ForCausalLM": (
        {"n_routed_experts": 4, "num_experts_per_tok": 2},
        "step 1 is a MoE at model.layers.0, expected Attn and MLP in turn",
    ),
    "Glm4MoeForCausalLM": ({"head_dim": 128}, "step 3 is a MoE at model.layers.1, expected Attn and MLP in turn"),
}
"""transformers leaves out by default what a file has."""
CONDITIONAL = {"GraniteForCausalLM", "Llama4ForCausalLM"}
"""Granite without its multipliers is a Llama, and is taken as one; Llama 4 has experts and text configs of its own."""


def why(spec: Any, quant: QuantPlan = (), dtype: torch.dtype = BF16, kv_dtype: torch.dtype = BF16, tp: int = 1) -> str | None:
    return not_served(spec, lambda path, linear: resolve(linear.names(path), quant), dtype=dtype, kv_dtype=kv_dtype, tp=tp)


def default(name: str, **changes: Any) -> Decoder:
    transformers = pytest.importorskip("transformers")
    kind = name.replace("LMHeadModel", "").replace("ForCausalLM", "") + "Config"
    return spec_from_config(getattr(transformers, kind)().to_dict() | {"architectures": [name]} | changes)


def test_every_architecture_is_decided_here() -> None:
    assert set(REGISTRY) == TAKEN | set(REFUSED) | set(INCOMPLETE) | CONDITIONAL


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_taken(name: str) -> None:
    assert why(default(name, **({"sliding_window": None} if name == "MistralForCausalLM" else {}))) is None


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_with_the_reason(name: str) -> None:
    assert why(default(name)) == REFUSED[name]


@pytest.mark.parametrize("name", sorted(INCOMPLETE))
def test_refused_with_what_a_file_would_say(name: str) -> None:
    changes, reason = INCOMPLETE[name]
    assert why(default(name, **changes)) == reason


@pytest.mark.parametrize("name", MODELS)
def test_the_test_models_are_taken(name: str) -> None:
    spec = declare(name)
    assert why(spec) is None
    assert why(spec, (("*lm_head", None), ("*", Fp8())), kv_dtype=E4M3) is None


def test_granite_by_its_multipliers() -> None:
    assert why(default("GraniteForCausalLM")) is None
    assert why(default("GraniteForCausalLM", embedding_multiplier=12.0)) == "decoder: embed_scale is 12.0, expected 1.0"
    assert why(default("GraniteForCausalLM", residual_multiplier=0.2)) == "model.layers.0: scale is 0.2, expected 1.0"


def mlps(**changes: Any) -> Any:
    return lambda spec: rewrite(spec, MLP, lambda m: replace(m, **changes))


def attns(match: str = "*", **changes: Any) -> Any:
    return lambda spec: rewrite(spec, Attn, lambda a: replace(a, **changes), match)


class Another(Decoder):
    """A declaration with a forward of its own, perhaps."""


CHANGED: dict[str, tuple[Any, str]] = {
    "bias": (mlps(bias=True), "model.layers.0.mlp: bias is True, expected False"),
    "softcap": (attns(softcap=5.0), "model.layers.0.self_attn: softcap is 5.0, expected None"),
    "sinks": (attns(sinks=True), "model.layers.0.self_attn: sinks is True, expected False"),
    "scale": (attns("*.1.*", scale=0.1), "model.layers.1.self_attn: softmax_scale is 0.1, expected that of model.layers.0"),
    "one bias": (attns("*.2.*", qkv_bias=True), "model.layers.2.self_attn: qkv_bias is True, expected that of model.layers.0"),
    "softcap of logits": (lambda s: replace(s, logit_softcap=3.0), "decoder: logit_softcap is 3.0, expected None"),
    "eps": (
        lambda s: replace(s, norm=replace(s.norm, eps=1e-6)),
        "model.layers.0: a norm is a RMSNorm with eps=1e-05, expected an RMSNorm with eps=1e-06",
    ),
    "no pre": (
        lambda s: replace(s, subs=(replace(s.subs[0], pre=None), *s.subs[1:])),
        "model.layers.0: a norm is None with eps=None, expected an RMSNorm with eps=1e-05",
    ),
    "layer norm": (
        lambda s: replace(s, norm=LayerNorm("n", 128, 1e-5)),
        "norm: a norm is a LayerNorm with eps=1e-05, expected an RMSNorm with eps=1e-05",
    ),
    "parallel": (
        lambda s: replace(s, subs=(Sub("p", s.subs[0].pre, Sum((s.subs[0].body,))), *s.subs[1:])),
        "step 0 is a Sum at p, expected Attn and MLP in turn",
    ),
    "order": (
        lambda s: replace(s, subs=(s.subs[1], *s.subs[1:])),
        "step 0 is a MLP at model.layers.0, expected Attn and MLP in turn",
    ),
    "a step too many": (lambda s: replace(s, subs=s.subs[:3]), "there are 3 steps, expected an even number"),
    "no steps": (lambda s: replace(s, subs=()), "step 0 is nothing, expected Attn and MLP in turn"),
    "subclass": (
        lambda s: Another(s.embed, s.subs, s.norm, s.head, max_positions=s.max_positions),
        "the model is a Another, expected a Decoder",
    ),
    "width": (lambda s: declare("llama", hidden_size=96), "d is 96, expected a multiple of 64 up to 8192"),
    "ffn": (lambda s: declare("llama", intermediate_size=96), "F is 96, expected a multiple of 64 up to 32768"),
    "vocab": (lambda s: declare("llama", vocab_size=73), "V is 73, expected a multiple of 8"),
    "two ffs": (
        lambda s: rewrite(s, MLP, lambda m: replace(m, ff=256), "*.1.*"),
        "model.layers.1.mlp: ff is 256, expected 192",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_the_kernel_lacks_is_refused(case: str) -> None:
    change, reason = CHANGED[case]
    assert why(change(declare("llama"))) == reason


@pytest.mark.parametrize(
    ("quant", "reason"),
    [
        ((("*down_proj", Fp8()),), "model.layers.0.mlp: the weights are fp8, expected all layers in bf16, or all in fp8"),
        ((("*", Fp8()),), "the head is fp8, expected bf16 without one"),
        ((("*lm_head", Dense(torch.float32)),), "the head is fp32, expected bf16 without one"),
        (
            (("*o_proj", Dense(torch.float16)),),
            "model.layers.0.self_attn: the weights are fp16, expected all layers in bf16, or all in fp8",
        ),
        ((("*", Dense(BF16)),), None),
    ],
)
def test_formats(quant: QuantPlan, reason: str | None) -> None:
    assert why(declare("llama"), quant) == reason


def test_dtypes_and_ranks() -> None:
    spec, wanted = declare("llama"), "expected bfloat16 with bfloat16 or float8_e4m3fn"
    assert why(spec, dtype=torch.float16) == f"the model is float16 with a cache of bfloat16, {wanted}"
    assert why(spec, kv_dtype=torch.int8) == f"the model is bfloat16 with a cache of int8, {wanted}"
    assert why(spec, tp=2) == "tp is 2, expected 1"


ASKED = "one kernel only if asked"
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}


@pytest.mark.parametrize(("width", "rows"), [(64, 2), (2048, 2), (3072, 2), (3136, 1), (4096, 1), (4160, 0)])
def test_rows_taken_unasked_are_those_measured_ahead(width: int, rows: int) -> None:
    spec = declare("llama", hidden_size=width, **WIDE)
    assert rows_ahead(spec, lambda path, linear: Dense()) == rows
    assert rows_ahead(spec, lambda path, linear: Fp8()) == min(rows, 1)
    last = str(explain(spec)).splitlines()[-1]
    of = {2: "1 to 2 sequences", 1: "1 sequence"}
    assert last == (f"decode steps of {of[rows]}: one kernel, csrc/step/decode_step" if rows else f"decode steps: these ops; {ASKED}")
    assert json.loads(explain(spec).json())["one_kernel"] == {"rows": rows, "reason": None}


def test_fp8_is_taken_for_one_sequence() -> None:
    spec, quant = shape("llama-3.1-8b"), (("*lm_head", None), ("*", Fp8()))
    assert rows_ahead(spec, lambda path, linear: resolve(linear.names(path), quant)) == 1
    assert str(explain(spec, quant=quant)).splitlines()[-1] == "decode steps of 1 sequence: one kernel, csrc/step/decode_step"


def test_bound_models() -> None:
    spec = declare("qwen3")
    module = bound(spec)
    assert bound_not_served(module, BF16) is None
    assert isinstance(in_one_kernel(module, True, BF16), OneKernel)
    assert in_one_kernel(module, False, BF16) is in_one_kernel(module, None, BF16) is module  # by itself never on a CPU
    assert bound_not_served(bound(spec, fuse=False), BF16) == "the model is bound with fuse=False"
    assert bound_not_served(lambda b: b, BF16) == "the model is a function, expected a bound Decoder"
    handle = module.subs[1].register_forward_hook(lambda *a: None)
    assert bound_not_served(module, BF16) == "model.layers.0 has forward hooks, which one kernel would not call"
    with pytest.raises(ValueError, match="^one_kernel is True, but model.layers.0 has forward hooks"):
        in_one_kernel(module, True, BF16)
    assert in_one_kernel(module, None, BF16) is module
    with pytest.raises(ValueError, match="^one_kernel is 'yes', expected None, True or False"):
        in_one_kernel(module, "yes", BF16)  # type: ignore[arg-type]
    handle.remove()


def test_an_invariant_model_is_left_alone() -> None:
    spec = declare("llama")
    module = bind(spec, DummyWeights(spec, "cpu", BF16), dtype=BF16, invariant=True)
    assert bound_not_served(module, BF16) == "the model is bound with invariant=True"
