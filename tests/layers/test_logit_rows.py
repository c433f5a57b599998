"""Rows whose logits are not wanted: the last MLP, the final norm and the head do not see them, and the wanted logits stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyllm.api.dummy import DummyWeights
from pyllm.layers import bind
from pyllm.layers.norm import Normed
from pyllm.models import spec_from_config
from pyllm.runtime.batch import Batch, KvCache

T, PAGE = 13, 16
BASE: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "llama": ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, True),
    "a norm behind each body": (
        {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8,
         "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        True,
    ),
    "experts": (
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
         "tie_word_embeddings": False},
        True,
    ),
    "scaled steps": (
        {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "embedding_multiplier": 2.0, "attention_multiplier": 0.25,
         "residual_multiplier": 0.5, "logits_scaling": 2.0},
        True,
    ),
    "attention beside the MLP": (
        {"architectures": ["CohereForCausalLM"], "model_type": "cohere", "layer_norm_eps": 1e-5, "logit_scale": 0.25, "use_qk_norm": False},
        False,
    ),
}  # fmt: skip
"""Fields of config.json; whether the last step is an MLP by itself."""


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("rows", [[], [12], [0, 5], list(range(T))], ids=len)
@pytest.mark.parametrize("name", MODELS)
def test_only_the_wanted_rows_go_through_the_last_mlp(name: str, rows: list[int], fuse: bool) -> None:
    fields, alone = MODELS[name]
    spec = spec_from_config(BASE | fields)
    module = bind(spec, DummyWeights(spec), fuse=fuse)
    seen: list[int] = []
    module.subs[-1].body.register_forward_pre_hook(lambda _, args: seen.append(_rows(args[0])))
    at = torch.arange(T, dtype=torch.int32)
    ids = torch.randint(0, BASE["vocab_size"], (T,), generator=torch.Generator().manual_seed(1)).int()
    got = []
    for wanted in (None, torch.tensor(rows, dtype=torch.int32)):
        caches = {
            n: KvCache(*(torch.full((2, PAGE, s.kv_heads, s.head_dim), float("nan")) for _ in range(2))) for n, s in spec.kv_slots().items()
        }
        with torch.inference_mode():
            got.append(
                module(Batch(ids, at, at + PAGE, at[[0, 0]] + torch.tensor([0, T]).int(), at[:1] + T, at[:1, None] + 1, caches, wanted))
            )
    assert seen == [T, len(rows) if alone and rows else T]
    # The same fp32 products with another number of rows: sums of up to 96 terms of size 1, in any order.
    torch.testing.assert_close(got[1], got[0][rows], rtol=96 * 2**-24 * 4, atol=96 * 2**-24 * 4)


def _rows(x: Any) -> int:
    return len(x.residual if isinstance(x, Normed) else x)
