"""Models in bf16, on the CPU through the references and on CUDA through the kernels, against themselves in fp32; and MXFP4 on the device.

Head dims are those of published models, so that their kernels run. All experts are chosen: a rounding that changes a choice is no error."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from pyllm.jit import compiler
from pyllm.layers import Decoder, bind
from pyllm.layers.stored import expand_fp8, expand_mxfp4
from pyllm.models import spec_from_config
from tests.layers.custom import random_state
from tests.models.paged import Paged

BASE: dict[str, Any] = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=104,
                            max_position_embeddings=512)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": dict(num_key_value_heads=2, head_dim=128),
    "DeepseekV2": dict(num_experts_per_tok=4, n_routed_experts=4, moe_intermediate_size=128, first_k_dense_replace=1, kv_lora_rank=64,
                       q_lora_rank=96),
    "DeepseekV3": dict(num_experts_per_tok=4, n_routed_experts=4, moe_intermediate_size=128, n_group=1, topk_group=1, kv_lora_rank=64,
                       q_lora_rank=96),
    "GptOss": dict(num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=2, sliding_window=24),
    "Gemma3": dict(num_key_value_heads=2, sliding_window=24, num_attention_heads=2, hidden_activation="gelu_pytorch_tanh"),
    "Cohere2": dict(num_key_value_heads=2, sliding_window=24, head_dim=64),
    "Llama4": dict(num_key_value_heads=2, num_local_experts=1, attention_chunk_size=24, floor_scale=16, intermediate_size_mlp=256),
    "Ministral3": dict(num_key_value_heads=2),
    "Falcon": dict(alibi=True, multi_query=False, parallel_attn=False),
}  # fmt: skip
VARIANTS = {"Falcon", "Llama4", "Ministral3"}  # their attention is compiled at run time
LENGTH, CUTS = 90, (0, 40, 41, 42, 89, 90)


def made(kind: str) -> tuple[Decoder, dict[str, torch.Tensor]]:
    spec = spec_from_config(BASE | KINDS[kind] | {"architectures": [f"{kind}ForCausalLM"]})
    state = random_state(spec)
    if kind == "Gemma3":  # stores w - 1; with w near 2 for q and k its scores would be four times as large, and so their errors
        state = {k: t - 1 if "norm" in k else t for k, t in state.items()}
    return spec, {k: t.bfloat16().float() for k, t in state.items()}


def logits(spec: Decoder, state: dict[str, torch.Tensor], device: str, dtype: torch.dtype) -> torch.Tensor:
    """Prefill, three decodes, a chunk and a decode more."""
    ids = torch.randint(0, spec.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(4))
    bound, pages = bind(spec, state, device=device, dtype=dtype), Paged(spec, 1, LENGTH, page=16, dtype=dtype, device=device)
    with torch.inference_mode():
        return torch.cat([bound(pages.step([ids[a:b]])).float().cpu() for a, b in pairwise(CUTS)])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind: str, device: str) -> None:
    """A step of the residual rounds about six values in a row to bf16 (norm, product, rotation, attention, activation, sum), 2^-9 of their
    size each; 8 steps and the head make 50 roundings, which add as their root with random signs: 50^0.5 2^-9 = 1.4 % of a logit of
    average size, and the largest of 104 in a row deviate three times as much from it: 5 % of the largest logit."""
    if device == "cuda" and kind in VARIANTS and compiler.unavailable() is not None:
        pytest.skip(str(compiler.unavailable()))
    spec, state = made(kind)
    want, got = logits(spec, state, "cpu", torch.float32), logits(spec, state, device, torch.bfloat16)
    error = (got - want).abs().amax(-1) / want.abs().amax(-1)
    print(f"{kind} on {device}: largest error of a row {error.max():.4f} of its largest logit, mean {error.mean():.4f}")
    assert error.max() < 0.05


@pytest.mark.gpu
def test_expanding_on_the_device_gives_the_same_bits() -> None:
    blocks, scales = (torch.randint(0, 256, s, dtype=torch.uint8) for s in ((2, 48, 3, 16), (2, 48, 3)))
    scales = scales.clamp(max=254)
    assert torch.equal(expand_mxfp4("b", "s", blocks.cuda(), scales.cuda()).cpu(), expand_mxfp4("b", "s", blocks, scales))
    weight, factors = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.5
    assert torch.equal(expand_fp8("w", "s", weight.cuda(), factors.cuda()).cpu(), expand_fp8("w", "s", weight, factors))
