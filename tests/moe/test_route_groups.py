"""route_experts with groups of experts against plain loops over tokens and groups (DeepSeek-V2: best score, -V3: two best with bias)."""

from __future__ import annotations

import pytest
import torch

from pyllm import ops
from pyllm.layers import MoE
from tests.support.compare import assert_close
from tests.support.generate import normal

E, GROUPS, CHOSEN, K = 12, 4, 2, 5  # groups of 3; five of the six experts that are left


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_against_loops(scoring: str, bias: bool, device: str) -> None:
    logits, b = normal(9, E), normal(E) if bias else torch.zeros(E)
    given = b.to(device) if bias else None
    weights, ids = ops.route_experts(
        logits.to(device), K, scoring, renormalize=False, bias=given, scale=2.5, groups=GROUPS, top_groups=CHOSEN
    )
    for t in range(9):
        x = logits[t].double()
        score = x.softmax(-1) if scoring == "softmax" else x.sigmoid()
        choice = [(score[e] + b[e].double()).item() for e in range(E)]
        rows = [sorted(choice[g * 3 : g * 3 + 3], reverse=True) for g in range(GROUPS)]
        value = [sum(r[:2]) if bias else r[0] for r in rows]
        best = sorted(range(GROUPS), key=lambda g: (-value[g], g))[:CHOSEN]
        want = sorted((e for e in range(E) if e // 3 in best), key=lambda e: (-choice[e], e))[:K]
        assert ids[t].tolist() == want
        assert_close(weights[t], 2.5 * score[want], rtol=32 * 2.0**-24, what="weights")  # a softmax over 12: some tens of fp32 roundings


def test_ties_take_the_lowest_groups() -> None:
    assert ops.route_experts(torch.zeros(1, 8), 3, groups=4, top_groups=2)[1].tolist() == [[0, 1, 2]]


def test_groups_that_are_all_chosen_change_nothing() -> None:
    x, b = normal(6, 8), normal(8)
    for got, want in zip(
        ops.route_experts(x, 3, "sigmoid", bias=b, groups=4, top_groups=4), ops.route_experts(x, 3, "sigmoid", bias=b), strict=True
    ):
        assert torch.equal(got, want)


def test_opcheck_and_errors() -> None:
    torch.library.opcheck(torch.ops.pyllm.route_experts.default, (normal(3, 8), 2, 1, True, None, 1.0, 4, 2))
    for device in ("cpu", "meta"):
        x = normal(3, 8).to(device)
        with pytest.raises(ValueError, match="groups is 3, expected a divisor of E=8"):
            ops.route_experts(x, 2, groups=3)
        with pytest.raises(ValueError, match=r"top_groups is 5, expected 1\.\.groups=4"):
            ops.route_experts(x, 2, groups=4, top_groups=5)
        with pytest.raises(ValueError, match="top_groups is 1, expected at least top_k=3 experts in the chosen groups, not 2"):
            ops.route_experts(x, 3, groups=4)
        with pytest.raises(ValueError, match="groups is 8, expected 2 of the E=8 experts or more in each with a bias"):
            ops.route_experts(x, 1, groups=8, bias=torch.zeros(8, device=device))


@pytest.mark.parametrize(
    ("groups", "message"),
    [((3, 1), r"groups is \(3, 1\), expected \(a divisor of experts=8"), ((2, 3), r"groups is \(2, 3\), expected"),
     ((4, 1), r"groups is \(4, 1\) of 2 experts, expected top_k=3 in those chosen"), ((8, 4), r"groups is \(8, 4\) of 1 experts")],
)  # fmt: skip
def test_a_layer_refuses_groups_that_do_not_fit(groups: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^MoE moe: {message}"):
        MoE("moe", 16, 16, 8, 3, groups=groups, correction="b")
