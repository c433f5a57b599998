"""moe_experts: the reference and the CUDA composition against per-token fp64 formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm import ops
from pyllm.ops import moe
from tests.support.compare import EPS, assert_close
from tests.support.generate import normal

E, N, FF, TOP = 5, 16, 24, 2


def make(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Expert 3 is never chosen."""
    ids = torch.stack([torch.randperm(E - 1)[:TOP] for _ in range(tokens)]) if tokens else torch.zeros(0, TOP)
    ids = torch.where(ids >= 3, ids + 1, ids).int()
    return normal(tokens, N, dtype=dtype), normal(E, 2 * FF, N, dtype=dtype), normal(E, N, FF, dtype=dtype), ids, torch.rand(tokens, TOP)


def formula(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for e, w in zip(ids[t].tolist(), weights[t].double(), strict=True):
            gate, up = (w13[e].double() @ x[t].double()).chunk(2)
            out[t] += w * (w2[e].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("implementation", ["reference", "composition"])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_against_fp64(tokens: int, implementation: str) -> None:
    args = make(tokens)
    got = getattr(moe, f"_experts_{implementation}")(*args, 0)
    want = formula(*args)
    # two fp32 products of length N and FF, values up to ~100: (N + FF + 8) roundings of the largest intermediate
    assert_close(got, want, atol=(N + FF + 8) * EPS[torch.float32] * 200)


def test_an_expert_that_overflows_does_not_reach_tokens_that_did_not_choose_it() -> None:
    x, w13, w2, ids, weights = make(9)
    w13[3] = float("nan")
    for implementation in ("reference", "composition"):
        assert torch.isfinite(getattr(moe, f"_experts_{implementation}")(x, w13, w2, ids, weights, 0)).all()


@pytest.mark.gpu
def test_cuda() -> None:
    args = make(9, torch.bfloat16)
    got = ops.moe_experts(*(t.cuda() for t in args))
    # gate, up, their product and the expert's output are rounded to bf16 on the way: four roundings, amplified by sums of N and FF
    # terms of size ~4
    assert_close(got, formula(*args), atol=4 * EPS[torch.bfloat16] * 100)


@pytest.mark.parametrize("bad", [-1, E])
def test_an_expert_that_is_not_there(bad: int) -> None:
    x, w13, w2, ids, weights = make(3)
    with pytest.raises(ValueError, match=f"moe_experts: ids holds {bad}, expected 0..E-1=4"):
        ops.moe_experts(x, w13, w2, torch.where(ids == ids[0, 0], bad, ids), weights)


@pytest.mark.gpu
def test_cuda_graph_replay_with_other_experts() -> None:
    static = [t.cuda() for t in make(9, torch.bfloat16)]
    ops.moe_experts(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.moe_experts(*static)
    for s, t in zip(static, make(9, torch.bfloat16), strict=True):
        s.copy_(t)
    graph.replay()
    assert_close(y, ops.moe_experts(*static), what="replay")


def test_compile() -> None:
    args = make(5)
    assert_close(torch.compile(ops.moe_experts, fullgraph=True, backend="aot_eager")(*args), ops.moe_experts(*args))


def test_opcheck_and_errors() -> None:
    x, w13, w2, ids, weights = make(3)
    torch.library.opcheck(torch.ops.pyllm.moe_experts.default, (x, w13, w2, ids, weights, 0))
    with pytest.raises(ValueError, match="act is 'tanh', expected one of silu"):
        ops.moe_experts(x, w13, w2, ids, weights, "tanh")
    for device in ("cpu", "meta"):
        x, w13, w2, ids, weights = (t.to(device) for t in (x, w13, w2, ids, weights))
        for args, message in (
            ((x[0], w13, w2, ids, weights), "x has 1 dimensions, expected 2"),
            ((x, w13[..., :8], w2, ids, weights), r"w13 has shape \(5, 48, 8\), expected \[E, 2F, N=16\]"),
            ((x, w13, w2[..., :8], ids, weights), r"w2 has shape \(5, 16, 8\), expected \(5, 16, 24\)"),
            ((x, w13[:, :40], w2, ids, weights), r"w13 \.size\(1\) is 40, expected 2F, a multiple of 16"),
            ((x, w13.half(), w2, ids, weights), r"w13 is torch\.float16, expected torch\.float32 like x"),
            ((x, w13, w2, ids.long(), weights), r"ids is torch\.int64, expected int32"),
            ((x, w13, w2, ids, weights.half()), r"weights is torch\.float16, expected float32"),
            ((x, w13, w2, ids[:2], weights), r"ids has shape \(2, 2\), expected \[T=3, top_k\]"),
            ((x, w13, w2, ids, weights[:, :1]), r"weights has shape \(3, 1\), expected \(3, 2\) \(from ids\)"),
        ):
            with pytest.raises(ValueError, match=f"moe_experts: {message}"):
                ops.moe_experts(*args)
