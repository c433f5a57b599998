"""route_experts against per-token fp64 formulas."""

from __future__ import annotations

import pytest
import torch

from pyllm import ops
from tests.support.compare import assert_close
from tests.support.generate import normal


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scoring", ["softmax", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_against_formula(scoring: str, renormalize: bool, bias: bool, device: str) -> None:
    logits, k = normal(7, 12), 3
    b = normal(12) if bias else None
    weights, ids = ops.route_experts(
        logits.to(device), k, scoring, renormalize=renormalize, bias=None if b is None else b.to(device), scale=2.5
    )
    for t in range(7):
        x = logits[t].double()
        score = {"softmax": x.softmax(-1), "topk_softmax": x, "sigmoid": x.sigmoid()}[scoring]
        chosen = sorted(range(12), key=lambda e: (-(score[e] + (0 if b is None else b[e].double())), e))[:k]
        w = score[chosen].softmax(-1) if scoring == "topk_softmax" else score[chosen] / (score[chosen].sum() if renormalize else 1)
        assert ids[t].tolist() == chosen
        assert_close(
            weights[t], 2.5 * w, rtol=32 * 2.0**-24, what="weights"
        )  # a softmax over 12 and a division: some tens of fp32 roundings


def test_ties_take_the_lowest_ids() -> None:
    assert ops.route_experts(torch.zeros(1, 8), 3)[1].tolist() == [[0, 1, 2]]


def test_compile() -> None:
    compiled = torch.compile(lambda x: ops.route_experts(x, 3, "sigmoid"), fullgraph=True, backend="aot_eager")
    x = normal(5, 8)
    for got, want in zip(compiled(x), ops.route_experts(x, 3, "sigmoid"), strict=True):
        assert_close(got, want)


@pytest.mark.gpu
def test_cuda_graph_replay_with_other_logits() -> None:
    x = normal(5, 8).cuda()
    ops.route_experts(x, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = ops.route_experts(x, 3)
    x.copy_(normal(5, 8))
    graph.replay()
    want = ops.route_experts(x, 3)
    assert_close(weights, want[0], what="weights")
    assert_close(ids, want[1], what="ids")


def test_opcheck_empty_and_errors() -> None:
    torch.library.opcheck(torch.ops.pyllm.route_experts.default, (normal(3, 8), 2, 0, True, None, 1.0))
    assert ops.route_experts(normal(0, 8), 2)[0].shape == (0, 2)
    with pytest.raises(ValueError, match=r"scoring is 'max', expected one of softmax"):
        ops.route_experts(normal(3, 8), 2, "max")
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=r"top_k is 9, expected 1\.\.E=8"):
            ops.route_experts(normal(3, 8).to(device), 9)
        with pytest.raises(ValueError, match=r"bias has shape \(3,\), expected E=8"):
            ops.route_experts(normal(3, 8).to(device), 2, bias=torch.zeros(3, device=device))
