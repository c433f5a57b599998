"""Widths that no op serves, and tensors that two layers read, are found by `bind`, before the first request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyllm import LLM
from pyllm.api.dummy import DummyWeights
from pyllm.layers import MLP, Attn, Decoder, Embedding, LayerNorm, Linear, MoE, Part, RMSNorm, Rope, Split, Sub, Sum, bind
from pyllm.layers.declared import check_sources
from pyllm.models import spec_from_config
from tests.models.paged import Paged

IDS = torch.tensor([3, 1, 4, 1, 5])


def decoder(d: int = 64, ff: int = 96, norm: type = RMSNorm, body: Any = None, **fields: Any) -> Decoder:
    attn = Attn("attn", d, 4, 2, 16, kv=0, rope=Rope(16, max_positions=128))
    subs = (Sub("l.0", norm("n1", d, 1e-6), attn), Sub("l.0", norm("n2", d, 1e-6), body or MLP("mlp", d, ff)))
    return Decoder(Embedding("embed", 50, d), subs, norm("norm", d, 1e-6), **({"max_positions": 128} | fields))


def run(spec: Decoder) -> torch.Tensor:
    return bind(spec, DummyWeights(spec))(Paged(spec, 1, len(IDS)).step([IDS]))


WIDTHS = {
    "d": (decoder(100), r"bind: embed: d is 100, expected a multiple of 8 \(Embedding\)"),
    "norm of a layer": (Sub("l", None, RMSNorm("n", 12, 1e-6)), r"bind: l\.n: d is 12, expected a multiple of 8 up to 32768 \(RMSNorm\)"),
    "LayerNorm": (Sub("l", None, LayerNorm("n", 12, 1e-6)), r"bind: l\.n: d is 12, expected a multiple of 8 up to 32768 \(LayerNorm\)"),
    "too wide": (RMSNorm("n", 32776, 1e-6), r"bind: n: d is 32776, expected a multiple of 8 up to 32768 \(RMSNorm\)"),
    "ff": (decoder(ff=100), r"bind: l\.0\.mlp: ff is 100, expected a multiple of 8 \(MLP\)"),
    "ff, not gated": (decoder(body=MLP("mlp", 64, 20, gated=False)), r"bind: l\.0\.mlp: ff is 20, expected a multiple of 8 \(MLP\)"),
    "experts": (decoder(body=MoE("moe", 64, 12, 4, 2)), r"bind: l\.0\.moe: ff is 12, expected a multiple of 8 \(MoE\)"),
    "shared expert": (decoder(body=MoE("moe", 64, 16, 4, 2, shared=MLP("shared", 64, 12))), r"bind: l\.0\.moe\.shared: ff is 12, expected"),
    "a branch": (decoder(body=Sum((MLP("a", 64, 16), MLP("b", 64, 12)))), r"bind: l\.0\.b: ff is 12, expected a multiple of 8"),
}


@pytest.mark.parametrize("case", WIDTHS)
def test_a_width_that_no_op_serves_is_named(case: str) -> None:
    spec, text = WIDTHS[case]
    with pytest.raises(ValueError, match=text):
        bind(spec, DummyWeights(spec))
    if isinstance(spec, Decoder):
        with pytest.raises(ValueError, match=text):
            LLM(spec, weights=DummyWeights(spec), device="cpu", progress=False)


def test_of_a_checkpoint_too() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 50, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 1}
    spec = spec_from_config(config | {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6})
    with pytest.raises(ValueError, match=r"bind: model\.layers\.0\.mlp: ff is 90, expected a multiple of 8"):
        bind(spec, DummyWeights(spec))


def test_on_each_rank() -> None:
    spec = decoder(ff=96)
    bind(spec, DummyWeights(spec), tp=2)
    with pytest.raises(ValueError, match=r"bind: l\.0\.mlp: ff is 12 on each of tp=2 ranks, expected a multiple of 8"):
        bind(decoder(ff=24), DummyWeights(decoder(ff=24)), tp=2)
    whole = RMSNorm("n", 24, 1e-6, unit=12)
    with pytest.raises(ValueError, match=r"bind: n: d is 12 on each of tp=2 ranks"):
        bind(whole, DummyWeights(whole), tp=2)


@pytest.mark.parametrize("spec", [decoder(8), decoder(ff=8), decoder(norm=LayerNorm), decoder(body=MoE("moe", 64, 8, 3, 1))], ids=str)
def test_the_smallest_that_are_served_run(spec: Decoder) -> None:
    assert torch.isfinite(run(spec)).all()


def twice(at: tuple[str, str], **fields: Any) -> Decoder:
    subs = tuple(Sub(a, RMSNorm(f"n{i}", 64, 1e-6), MLP("mlp", 64, 16)) for i, a in enumerate(at))
    return Decoder(Embedding("embed", 50, 64), subs, None, max_positions=128, **fields)


def test_two_steps_of_one_name_do_not_share_tensors_unsaid() -> None:
    text = r"bind: subs\.0\.body\.up and subs\.1\.body\.up of the declaration both read l\.mlp\.gate_proj\.weight: give them names"
    with pytest.raises(ValueError, match=text):
        bind(twice(("l", "l")), DummyWeights(twice(("l", "l"))))
    bind(twice(("l.0", "l.1")), DummyWeights(twice(("l.0", "l.1"))))
    norms = tuple(Sub("", RMSNorm("x", 64, 1e-6), MLP(f"mlp{i}", 64, 16)) for i in range(2))
    with pytest.raises(ValueError, match=r"subs\.0\.pre and subs\.1\.pre of the declaration both read x\.weight"):
        check_sources(Decoder(Embedding("embed", 50, 64), norms, None))


def test_two_steps_may_share_what_the_declaration_says() -> None:
    apart, one = twice(("l.0", "l.1")), twice(("l", "l"), shared=("l.mlp.*",))
    state = dict(DummyWeights(one))
    separate = {name: state[name.replace("l.0.", "l.").replace("l.1.", "l.")] for name in DummyWeights(apart)}
    b = Paged(one, 1, len(IDS)).step([IDS])
    assert torch.equal(bind(one, state)(b), bind(apart, separate)(b))
    with pytest.raises(ValueError, match="both read l.mlp.down_proj.weight"):
        bind(replace(one, shared=("l.mlp.gate*", "l.mlp.up*")), state)


def test_other_rows_of_one_tensor_are_nobody_elses() -> None:
    def rows(start: int, size: int) -> Linear:
        return Linear(8, (Part("w", size, split=Split.EVEN, start=start, of=16),))

    check_sources(Sum((rows(0, 8), rows(8, 8))))
    with pytest.raises(ValueError, match=r"branches\.0 and branches\.1 of the declaration both read w\.weight"):
        check_sources(Sum((rows(0, 9), rows(8, 8))))
