"""Falcon against transformers, and its config fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pyllm.jit import compile_variant, compiler, use_cache
from pyllm.layers import bind
from pyllm.models import spec_from_config
from tests.layers.test_custom import IDS
from tests.layers.test_tensor_parallel import run_ranks
from tests.models import oracle
from tests.models.paged import Paged

pytest.importorskip("transformers")

NEW = dict(new_decoder_architecture=True, num_kv_heads=2)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("Falcon", {}),
    "falcon-bias": ("Falcon", dict(bias=True, tie_word_embeddings=False, layer_norm_epsilon=1e-2, ffn_hidden_size=96)),
    "falcon-mha": ("Falcon", dict(multi_query=False, activation="gelu_new")),
    "falcon-in-turn": ("Falcon", dict(parallel_attn=False, hidden_size=96)),
    "falcon-alibi": ("Falcon", dict(alibi=True, parallel_attn=False, multi_query=False, bias=True)),
    "falcon-alibi-six-heads": ("Falcon", dict(alibi=True, hidden_size=96, num_attention_heads=6)),
    "falcon-new": ("Falcon", NEW | dict(bias=True)),
    "falcon-new-one-norm": ("Falcon", NEW | dict(num_ln_in_parallel_attn=1, num_kv_heads=1)),
    "falcon-new-mha": ("Falcon", NEW | dict(num_kv_heads=4)),
}


def make(name: str) -> oracle.Made:
    """Falcon's config class computes the head dim and has names of its own for the other sizes.

    With ALiBi the eager code of transformers 5.24 adds the slopes twice (in the mask and to the scores); its default, sdpa, adds them once.
    """
    own = {k: v for k, v in oracle.SIZES.items() if k not in ("head_dim", "intermediate_size", "num_key_value_heads")}
    with mock.patch.object(oracle, "SIZES", own):
        made = oracle.make(name, *CASES[name])
    if CASES[name][1].get("alibi"):
        made[0].config._attn_implementation = "sdpa"  # it follows no other way of setting it
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(make(name))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_and_separate_ops(name: str) -> None:
    _, config, state = make(name)
    spec = spec_from_config(config)
    want, separate = (bind(spec, state, fuse=fuse)(Paged(spec, 1, len(IDS)).step([IDS])) for fuse in (True, False))
    for got in (separate, *run_ranks(spec, state, 2)):
        oracle.assert_logits(got, want)


CONFIG: dict[str, Any] = dict(architectures=["FalconForCausalLM"], hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
                              vocab_size=50)  # fmt: skip


def test_what_a_file_leaves_out() -> None:
    spec = spec_from_config(CONFIG | {"num_kv_heads": 4})  # published 7B files say so beside multi_query
    attn, mlp = spec.subs[0].body.branches
    assert (attn.kv_heads, mlp.ff, mlp.act, mlp.bias, spec.head, spec.max_positions) == (1, 256, "gelu", False, None, 2048)


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_alibi_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllm.jit.cache._directory", [])
    use_cache(tmp_path)
    attn = spec_from_config(CONFIG | {"alibi": True}).attns()[0][1]
    assert attn.rope is None and attn.variant is not None and compile_variant(attn.variant, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"alibi": 1}, "alibi is 1, expected true or false"),
     ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is set, expected a residual"),
     ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2, expected 1$"),
     ({"num_ln_in_parallel_attn": 3, "new_decoder_architecture": True}, "num_ln_in_parallel_attn is 3, expected 1 or 2")],
)  # fmt: skip
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"config: {message}"):
        spec_from_config(CONFIG | changes)
