"""A router in fp32: a choice that bf16 logits cannot tell, in every dtype and under every quant plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyllm.layers import Fp8, MoE, bind, plan
from pyllm.plan.explain import explain
from tests.layers.custom import mine, random_state

MOE = MoE("moe", 16, 16, 16, 1, fp32_router=True)


def state() -> dict[str, torch.Tensor]:
    """The logit of expert 5 is 16 + 2^-7, that of expert 2 is 16, where bf16 has steps of 2^-3: rounded they are equal, and 2 is chosen."""
    out = random_state(replace(MOE, fp32_router=False))
    router = torch.zeros(16, 16)
    router[2], router[5] = 1.0, 1.0
    router[5, 0] = 1.0 + 2.0**-7  # both are bf16 values
    return out | {"moe.gate.weight": router}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_better_expert_is_chosen(dtype: torch.dtype) -> None:
    weights, x = state(), torch.ones(3, 16, dtype=dtype)
    exact = bind(MOE, weights, dtype=dtype)
    assert exact.router.dtype == torch.float32
    only_five = {k: v if "experts" not in k or "experts.5." in k else torch.zeros_like(v) for k, v in weights.items()}
    assert bind(MOE, only_five, dtype=dtype)(x, None).abs().sum() > 0
    rounded = bind(replace(MOE, fp32_router=False), only_five, dtype=torch.bfloat16)
    assert rounded(torch.ones(3, 16, dtype=torch.bfloat16), None).abs().sum() == 0  # the case is one that bf16 cannot tell


def test_plan_quant_and_explain() -> None:
    assert [s for i in plan(MOE) for s in i.sources if "gate.weight" in s] == ["moe.gate.weight"]
    bound = bind(MOE, state(), quant=(("*gate", None), ("*", Fp8())))
    assert bound.router.dtype == torch.float32 and "gate" not in dict(bound.named_children())
    spec = mine(2)
    sparse = replace(spec, subs=(replace(spec.subs[0], body=replace(MOE, d=64, top_k=2)),))
    rows = {r.what: r for r in explain(sparse).rows}
    assert (rows["gate"].op, rows["gate"].format) == ("F.linear", "fp32")


def test_no_bias_with_it() -> None:
    with pytest.raises(ValueError, match="MoE moe: fp32_router is set, expected no bias with it"):
        replace(MOE, bias=True)
