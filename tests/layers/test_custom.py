"""The custom decoder against plain formulas written apart from the layers; and what a declaration refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm.layers import (
    MLP,
    Attn,
    Decoder,
    LayerNorm,
    Linear,
    MoE,
    Normed,
    Part,
    RMSNorm,
    Rope,
    Spec,
    Sub,
    Sum,
    Weight,
    bind,
    plan,
    rewrite,
    walk,
)
from tests.layers.custom import DIM, EPS, FF, HEADS, KV, VOCAB, WINDOW, D, mine, random_state
from tests.models.paged import Paged

IDS = torch.randint(0, VOCAB, (19,), generator=torch.Generator().manual_seed(1))


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def rotated(x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(len(x)).double(), 1 / 1e4 ** (torch.arange(0, DIM, 2).double() / DIM))
    angles = torch.cat([angles, angles], -1)[:, None]
    return x * angles.cos() + torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1) * angles.sin()


def plain(state: dict[str, Tensor], ids: Tensor, layers: int = 8) -> Tensor:
    """fp64 formulas of `mine`, nothing shared with the layers."""
    st = {k: v.double() for k, v in state.items()}
    x, shared, n = st["model.embed_tokens.weight"][ids], None, len(ids)
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]

    def ffn(h: Tensor, at: str) -> Tensor:
        gate, up, down = (st[f"{at}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    for i in range(layers):
        at, glob = f"model.layers.{i}.", i % 4 == 3
        h = rms(x, st[at + "norm.weight"])
        q = rms(F.linear(h, st[at + "attn.q_proj.weight"]).view(n, HEADS, DIM), st[at + "attn.q_norm.weight"])
        if not glob or i == 3:
            k = rms(F.linear(h, st[at + "attn.k_proj.weight"]).view(n, KV, DIM), st[at + "attn.k_norm.weight"])
            v = F.linear(h, st[at + "attn.v_proj.weight"]).view(n, KV, DIM)
            shared = (k, v) if glob else shared
        k, v = shared if glob else (k, v)
        q, k = (q, k) if glob else (rotated(q), rotated(k))
        s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // KV, 1)) / DIM**0.5
        s = s.masked_fill((distance < 0) | (distance >= (n if glob else WINDOW)), float("-inf")).softmax(-1)
        o = torch.einsum("hqk,khd->qhd", s, v.repeat_interleave(HEADS // KV, 1)).reshape(n, -1)
        y = F.linear(o, st[at + "attn.o_proj.weight"])
        if i % 2:
            w, chosen = F.softmax(F.linear(h, st[at + "moe.gate.weight"]), -1).topk(2, -1)
            w = w / w.sum(-1, keepdim=True)
            y = y + torch.stack([sum(w[t, j] * ffn(h[t], f"{at}moe.experts.{chosen[t, j]}.") for j in range(2)) for t in range(n)])
        else:
            y = y + ffn(h, at + "mlp.")
        x = x + y
    return F.linear(rms(x, st["model.norm.weight"]), st["lm_head.weight"])


def assert_logits(got: Tensor, want: Tensor) -> None:
    # fp32 against fp64: ~100 roundings of 2^-24 in depth 8, each amplified a few times; 1e-4 of the largest logit is the models' bound too
    error, limit = (got.double() - want.double()).abs().max().item(), 1e-4 * want.abs().max().item()
    assert error <= limit, f"max |difference| {error:.2e} > {limit:.2e}"


@pytest.mark.parametrize("fuse", [True, False])
def test_custom_model_equals_plain_formulas(fuse: bool) -> None:
    spec = mine()
    state = random_state(spec)
    assert len(spec.kv_slots()) == 7
    assert_logits(bind(spec, state, fuse=fuse)(Paged(spec, 1, len(IDS)).step([IDS])), plain(state, IDS))


def test_prefill_then_decode_equals_one_pass() -> None:
    spec = mine()
    state = random_state(spec)
    bound, pages = bind(spec, state), Paged(spec, 1, len(IDS))
    rows = [bound(pages.step([IDS[:7]]))] + [bound(pages.step([IDS[i : i + 1]])) for i in range(7, len(IDS))]
    assert_logits(torch.cat(rows), plain(state, IDS))


def test_parallel_branches_with_different_norms() -> None:
    spec = mine(2)
    two = tuple(replace(s, pre=(s.pre, RMSNorm("norm2", D, EPS))) for s in spec.subs)
    other = replace(spec, subs=two)
    state = random_state(other)
    for i in range(2):
        state[f"model.layers.{i}.norm2.weight"] = state[f"model.layers.{i}.norm.weight"].clone()
    same = {k: v for k, v in state.items() if "norm2" not in k}
    got, want = (bind(s, st)(Paged(s, 1, len(IDS)).step([IDS])) for s, st in ((other, state), (spec, same)))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    state["model.layers.1.norm2.weight"] *= 2
    assert (bind(other, state)(Paged(other, 1, len(IDS)).step([IDS])) - want).abs().max() > 1e-3


@dataclass(frozen=True)
class Scale(Spec):
    """A user's own layer: one dataclass, plain torch inside."""

    at: str
    d: int

    def weights(self) -> dict[str, Weight]:
        return {"w": Weight((Part("gain", self.d),))}

    def forward(self, m: Any, x: Tensor, b: Any) -> Tensor:
        assert isinstance(x, Tensor)
        return x * torch.tanh(m.w)


def test_own_layer_in_a_step_and_in_a_sum() -> None:
    spec = mine(2)
    subs = (*spec.subs, Sub("model.extra", LayerNorm("ln", D, 1e-5), Scale("mine", D)))
    spec = replace(spec, subs=subs)
    state = random_state(spec)
    assert "model.extra.mine.gain.weight" in state
    got = bind(spec, state)(Paged(spec, 1, len(IDS)).step([IDS]))
    off = state | {"model.extra.mine.gain.weight": torch.zeros(D)}
    assert_logits(bind(spec, off)(Paged(spec, 1, len(IDS)).step([IDS])), plain({k: v for k, v in off.items() if "extra" not in k}, IDS, 2))
    assert (got - bind(spec, off)(Paged(spec, 1, len(IDS)).step([IDS]))).abs().max() > 1e-3


def test_rewrite_changes_what_matches_and_nothing_else() -> None:
    spec = mine()
    out = rewrite(spec, MLP, lambda m: replace(m, act="gelu_tanh"), match="model.layers.[02].mlp")
    acts = [s.act for _, s in walk(out) if isinstance(s, MLP)]
    assert acts == ["gelu_tanh", "gelu_tanh", "silu", "silu"]
    assert [s for _, s in walk(spec) if isinstance(s, MoE)] == [s for _, s in walk(out) if isinstance(s, MoE)]
    assert rewrite(spec, Attn, lambda a: a) == spec
    with pytest.raises(ValueError, match=r"rewrite: no MLP has a path that matches 'model\.layers\.99\.\*'"):
        rewrite(spec, MLP, lambda m: m, match="model.layers.99.*")


def test_specs_are_values() -> None:
    assert mine() == mine()
    assert hash(mine()) == hash(mine())
    assert "window=4" in repr(mine().subs[0])


def test_plan_shapes_are_the_bound_shapes() -> None:
    spec = mine()
    bound = bind(spec, random_state(spec))
    want = {i.tensor: i.shape for i in plan(spec)}
    assert {k: tuple(p.shape) for k, p in bound.named_parameters()} == want


def refuse(message: str, make: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_declarations_that_are_refused() -> None:
    spec, attn = mine(), mine().subs[0].body.branches[0]
    refuse(r"KV slot 3 is read by model\.layers\.7\.attn before any layer owns it", lambda: replace(spec, subs=spec.subs[4:]))
    refuse(r"KV slot 0 has two owners: model\.layers\.0\.attn and model\.layers\.0\.attn", lambda: replace(spec, subs=spec.subs[:1] * 2))
    other = replace(spec.subs[7].body.branches[0], window=3)
    refuse(r"KV slot 3: model\.layers\.3\.attn stores", lambda: replace(spec, subs=(*spec.subs[:4], Sub("model.layers.7", None, other))))
    refuse("heads is 4, expected a multiple of kv_heads=3", lambda: replace(attn, kv_heads=3))
    refuse("window is 0", lambda: replace(attn, window=0))
    refuse(r"rope\.dim is 32, expected at most head_dim=16", lambda: replace(attn, rope=Rope(32)))
    refuse(r"qk_norm\.d is 8, expected head_dim=16", lambda: replace(attn, qk_norm=RMSNorm("{}_norm", 8, EPS)))
    refuse("act is 'tanh', expected one of silu", lambda: MLP("mlp", D, FF, act="tanh"))
    refuse(r"top_k is 5, expected 1\.\.experts=4", lambda: MoE("moe", D, FF, 4, 5))
    refuse("scoring is 'max'", lambda: MoE("moe", D, FF, 4, 2, scoring="max"))
    refuse("tp is 'both'", lambda: Linear(D, (Part("x", 8),), "both"))
    refuse("pre has 2 norms; expected one for each branch", lambda: Sub("x", (RMSNorm("a", D, EPS),) * 2, Sum((attn,))))
    refuse("Rope: dim is 7", lambda: Rope(7))


def test_checkpoints_that_are_refused() -> None:
    spec = mine(2)
    state = random_state(spec)
    name = "model.layers.0.attn.k_proj.weight"
    without = {k: v for k, v in state.items() if k != name}
    refuse(f"no tensor '{name}', which the declaration needs with shape", lambda: bind(spec, without))
    refuse(
        "1 tensors that no layer asked for: model.layers.0.attn.q_bias",
        lambda: bind(spec, state | {"model.layers.0.attn.q_bias": torch.zeros(1)}),
    )
    refuse(rf"'{name}' has shape \(31, 64\), the declaration expects \(32, 64\)", lambda: bind(spec, state | {name: torch.zeros(31, 64)}))
    refuse("rank is 2, expected 0 <= rank < tp=2", lambda: bind(spec, state, rank=2, tp=2))
    bind(spec, state | {"model.layers.0.rotary_emb.inv_freq": torch.zeros(1)})  # on the ignore list
    bind(spec, state | {"extra": torch.zeros(1)}, strict=False)


def test_normed_is_computed_once_and_settles_what_nobody_read() -> None:
    res, delta = torch.ones(2, D), torch.full((2, D), 2.0)
    Normed(res, None, delta).settle()
    assert torch.equal(res, torch.full((2, D), 3.0))
    x = Normed(res, None, delta)
    assert x.tensor() is x.tensor()
    assert torch.equal(res, torch.full((2, D), 5.0))


def test_decoder_without_steps_is_embedding_and_head() -> None:
    spec = replace(mine(), subs=(), norm=None)
    assert isinstance(spec, Decoder)
    state = random_state(spec)
    got = bind(spec, state)(Paged(mine(1), 1, len(IDS)).step([IDS]))
    assert_logits(got, F.linear(state["model.embed_tokens.weight"][IDS], state["lm_head.weight"]))
