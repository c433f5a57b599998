"""Each model function against transformers on tiny random configs: fp32, max |difference| <= 1e-4 * max |logit|, prefill and decode
through pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyllm.api.params import SamplingParams
from pyllm.layers import bind
from pyllm.models import spec_from_config
from pyllm.runtime.engine import Engine
from tests.models import oracle
from tests.models.oracle import SIZES, assert_logits, expected
from tests.models.paged import Paged

pytest.importorskip("transformers")

LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
LONG = dict(rope_type="longrope", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, short_factor=[1.0 + i / 9 for i in
range(8)],
            long_factor=[2.0 + i for i in range(8)])  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-mha": ("Llama", dict(num_key_value_heads=4)),
    "llama-mqa-head-dim": ("Llama", dict(num_key_value_heads=1, head_dim=24)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-gelu": ("Llama", dict(hidden_act="gelu")),
    "llama-linear-rope": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
    "llama-3.1-rope": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-3-rope-step": ("Llama", dict(rope_parameters=LLAMA3 | dict(low_freq_factor=1.0, high_freq_factor=1.0))),
    "llama-yarn-rope": ("Llama", dict(rope_parameters=YARN)),
    "llama-yarn-factor": ("Llama", dict(rope_parameters=YARN | dict(attention_factor=1.3, beta_fast=16.0, beta_slow=2.0))),
    "llama-yarn-mscale": ("Llama", dict(rope_parameters=YARN | dict(mscale=0.8, mscale_all_dim=0.5, truncate=False))),
    "llama-longrope": ("Llama", dict(rope_parameters=LONG)),
    "llama-dynamic-rope": (
        "Llama",
        dict(max_position_embeddings=32, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)),
    ),
    "mistral-window": ("Mistral", dict(sliding_window=12)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "gemma2": ("Gemma2", dict(sliding_window=12, query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "gemma2-untied": ("Gemma2", dict(sliding_window=12, tie_word_embeddings=False, query_pre_attn_scalar=24)),
}


def make(name: str) -> oracle.Made:
    return oracle.make(name, *CASES[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", [n for n in CASES if "longrope" not in n and "dynamic" not in n])
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    """Length-dependent ropes are left out: transformers too gives other logits when keys were rotated at a shorter length."""
    oracle.check_ragged_chunks_and_decode(make(name))


@pytest.mark.parametrize("name", ["llama-longrope", "llama-dynamic-rope"])
def test_length_dependent_rope_depends_on_its_own_sequence_alone(name: str) -> None:
    _, config, state = make(name)
    spec = spec_from_config(config)
    texts = [torch.arange(n) % SIZES["vocab_size"] for n in (70, 9)]
    got = bind(spec, state)(Paged(spec, 2, 70).step(texts)).split([70, 9])
    for g, t in zip(got, texts, strict=True):
        assert_logits(g, expected(make(name)[0], t))  # a fresh model: transformers keeps the frequencies of the longest text it has seen


@pytest.mark.parametrize("name", ["llama-longrope", "llama-dynamic-rope"])
def test_length_dependent_rope_does_not_depend_on_the_chunks(name: str) -> None:
    model, config, state = make(name)
    spec = spec_from_config(config)
    bound, ids, pages = bind(spec, state), torch.arange(70) % SIZES["vocab_size"], Paged(spec, 1, 70)
    rows = [bound(pages.step([ids[a:b]], known=[70])) for a, b in ((0, 20), (20, 21), (21, 70))]
    assert_logits(torch.cat(rows), expected(model, ids))
    engines = [Engine(spec, bound, chunk=chunk, page_size=16, max_tokens=128) for chunk in (7, 128)]
    requests = [e.submit(ids.tolist(), SamplingParams(max_tokens=4)) for e in engines]
    for e in engines:
        e.run()
    assert list(requests[0].token_ids) == list(requests[1].token_ids)


def test_last_rows_only() -> None:
    _, config, state = make("llama")
    spec = spec_from_config(config)
    bound, texts = bind(spec, state), [torch.arange(5), torch.arange(3)]
    full = bound(Paged(spec, 2, 8).step(texts))
    last = bound(Paged(spec, 2, 8).step(texts, last=True))
    torch.testing.assert_close(last, full[[4, 7]], rtol=0, atol=1e-5)
