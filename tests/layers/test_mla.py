"""MLA against fp64 formulas written apart from it, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm.layers import MLA, Decoder, Embedding, RMSNorm, Rope, Sub, bind, plan
from pyllm.plan.explain import explain
from tests.layers.custom import EPS, VOCAB, D, random_state
from tests.layers.test_custom import IDS, assert_logits
from tests.layers.test_tensor_parallel import run_ranks
from tests.models.paged import Paged

HEADS, NOPE, ROT, V, RANK = 4, 16, 8, 12, 24
KINDS: dict[str, dict[str, Any]] = {
    "full-q": {},
    "low-q": dict(q_rank=40, o_bias=True),
    "halves": dict(rope=Rope(ROT)),
    "scale-window": dict(scale=0.4, window=5, q_rank=40),
    "wide-values": dict(v_dim=NOPE + ROT),
}


def model(kind: str, layers: int = 2) -> Decoder:
    fields: dict[str, Any] = dict(rope=Rope(ROT, interleaved=True), kv_rank=RANK, v_dim=V, latent_eps=EPS) | KINDS[kind]
    subs = (Sub(f"l.{i}", RMSNorm("norm", D, EPS), MLA("attn", D, HEADS, HEADS, NOPE + ROT, kv=i, **fields)) for i in range(layers))
    return Decoder(Embedding("embed", VOCAB, D), tuple(subs), None, max_positions=64)


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def rotated(x: Tensor, interleaved: bool) -> Tensor:
    angles = torch.outer(torch.arange(len(x)).double(), 1 / 1e4 ** (torch.arange(0, ROT, 2).double() / ROT))[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    a, b = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)


def formula(spec: Decoder, state: dict[str, Tensor], ids: Tensor) -> Tensor:
    st, n = {k: v.double() for k, v in state.items()}, len(ids)
    x, distance = st["embed.weight"][ids], torch.arange(n)[:, None] - torch.arange(n)[None]
    for i, (_, a) in enumerate(spec.attns()):
        assert isinstance(a, MLA) and a.rope is not None
        at, h = f"l.{i}.attn.", rms(x, st[f"l.{i}.norm.weight"])

        def linear(t: Tensor, name: str, at: str = at) -> Tensor:
            return F.linear(t, st[f"{at}{name}.weight"], st.get(f"{at}{name}.bias"))

        q = linear(rms(linear(h, "q_a_proj"), st[at + "q_a_layernorm.weight"]), "q_b_proj") if a.q_rank else linear(h, "q_proj")
        latent, shared = linear(h, "kv_a_proj_with_mqa").split([RANK, ROT], -1)
        kv = linear(rms(latent, st[at + "kv_a_layernorm.weight"]), "kv_b_proj").view(n, HEADS, NOPE + a.v_dim)
        q_nope, q_rot = q.view(n, HEADS, NOPE + ROT).split([NOPE, ROT], -1)
        q_rot, k_rot = (rotated(t, a.rope.interleaved) for t in (q_rot, shared[:, None]))
        s = torch.einsum("qhd,khd->hqk", q_nope, kv[..., :NOPE]) + torch.einsum("qhd,kd->hqk", q_rot, k_rot[:, 0])
        s = s * (a.scale or (NOPE + ROT) ** -0.5)
        s = s.masked_fill((distance < 0) | (distance >= (a.window or n)), float("-inf")).softmax(-1)
        x = x + linear(torch.einsum("hqk,khd->qhd", s, kv[..., NOPE:]).reshape(n, -1), "o_proj")
    return F.linear(x, st["embed.weight"])


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_against_formulas(kind: str, fuse: bool) -> None:
    spec = model(kind)
    state = random_state(spec)
    assert_logits(bind(spec, state, fuse=fuse)(Paged(spec, 1, len(IDS)).step([IDS])), formula(spec, state, IDS))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_single_tokens_equal_one_pass(kind: str) -> None:
    spec = model(kind)
    state = random_state(spec)
    bound, pages = bind(spec, state), Paged(spec, 1, len(IDS))
    rows = [bound(pages.step([IDS[:15]]))] + [bound(pages.step([IDS[i : i + 1]])) for i in range(15, len(IDS))]
    assert_logits(torch.cat(rows), formula(spec, state, IDS))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["full-q", "low-q"])
def test_ranks(kind: str, tp: int) -> None:
    spec = model(kind)
    state = random_state(spec)
    for got in run_ranks(spec, state, tp):
        assert_logits(got, formula(spec, state, IDS))


def test_plan_slots_and_explain() -> None:
    spec = model("low-q", 1)
    names = [s.removeprefix("l.0.attn.") for i in plan(spec) for s in i.sources if ".attn." in s]
    weights = ["q_a_proj", "kv_a_proj_with_mqa", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    assert sorted(names) == sorted(
        [*(f"{n}.weight" for n in weights), *(f"{n}.bias" for n in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))]
    )
    slot = spec.kv_slots()[0]
    assert (slot.kv_heads, slot.head_dim) == (HEADS, NOPE + ROT)
    rows = [r for r in explain(spec).rows if r.at == "l.0"]
    assert [r.what for r in rows] == ["norm", "q_a_proj+kv_a_proj_with_mqa", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj",
                                      "as heads", "rope+append", "kv[0]", "o_proj"]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [(dict(kv_rank=0), "kv_rank is 0, expected a positive integer"),
     (dict(v_dim=25), "v_dim is 25, expected at most head_dim=24"),
     (dict(q_rank=0), "q_rank is 0, expected a positive integer"),
     (dict(kv_heads=2), "kv_heads is 2, expected heads=4"),
     (dict(rope=None), "rope is None, expected one of fewer dims"),
     (dict(rope=Rope(24)), "rope is .* expected one of fewer dims than head_dim=24"),
     (dict(qkv_bias=True), "qkv_bias is True, expected False, as MLA has no other"),
     (dict(own_kv=False), "own_kv is False, expected True"),
     (dict(qk_norm=RMSNorm("{}", 24, EPS)), "qk_norm is RMSNorm.* expected None")],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], message: str) -> None:
    attn = model("full-q", 1).attns()[0][1]
    with pytest.raises(ValueError, match=f"^MLA attn: {message}"):
        replace(attn, **changes)
