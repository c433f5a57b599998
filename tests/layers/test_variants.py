"""Every variant of a layer through bind and a paged batch, against fp64 formulas written apart from the layers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm.layers import (
    MLP,
    Attn,
    Decoder,
    DynamicNtk,
    Embedding,
    LayerNorm,
    LinearScaling,
    Llama3,
    LongRope,
    MoE,
    RMSNorm,
    Rope,
    Sub,
    Yarn,
    bind,
)
from tests.layers.custom import DIM, FF, HEADS, KV, VOCAB, D, random_state
from tests.models.paged import Paged

N, EPS = 45, 1e-5
IDS = torch.randint(0, VOCAB, (N,), generator=torch.Generator().manual_seed(5))
State = dict[str, Tensor]


def decoder(body: Any, pre: Any = None, **fields: Any) -> Decoder:
    return Decoder(Embedding("embed", VOCAB, D), (Sub("layer", pre, body),), None, max_positions=64, **fields)


def loud(spec: Decoder) -> State:
    """Embeddings of size 1: attention and activations leave their linear range."""
    state = random_state(spec, 7)
    return state | {"embed.weight": state["embed.weight"] * D**0.5}


def run(spec: Decoder, state: State, fuse: bool) -> Tensor:
    """In three uneven steps over pages."""
    bound, pages, cuts = bind(spec, state, fuse=fuse), Paged(spec, 1, N), (0, 15, 16, N)
    return torch.cat([bound(pages.step([IDS[a:b]], known=[N])) for a, b in itertools.pairwise(cuts)])


def check(spec: Decoder, body: Any) -> None:
    """`body(state, x)`: what the one step adds to the fp64 embedding x; the head is tied."""
    state = loud(spec)
    st = {k: v.double() for k, v in state.items()}
    x = st["embed.weight"][IDS]
    want = (x + body(st, x)) @ st["embed.weight"].T
    assert body(st, x).abs().max() > 0.05 * x.abs().max()  # else the formula would not matter
    for fuse in (True, False):
        # fp32 against fp64 in one layer: ~50 roundings of 2^-24, amplified a few times, and angles up to 45 rad good to 2^-19
        error, limit = (run(spec, state, fuse).double() - want).abs().max().item(), 3e-5 * want.abs().max().item()
        assert error <= limit, f"fuse={fuse}: max |difference| {error:.2e} > {limit:.2e}"


def rotate(x: Tensor, freqs: Tensor, factor: float, interleaved: bool) -> Tensor:
    """x [n, heads, dim] as complex numbers turned by position * freq; dims past 2 * len(freqs) stay."""
    r = 2 * len(freqs)
    turned, rest = x[..., :r], x[..., r:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(
        torch.full((len(x), 1, r // 2), factor).double(), torch.outer(torch.arange(len(x)), freqs)[:, None]
    )
    pair = (z.real, z.imag)
    return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], -1)


def attention(st: State, x: Tensor, turn: Any = lambda t: t, scale: float = DIM**-0.5, cap: float = 0.0) -> Tensor:
    def project(name: str, heads: int) -> Tensor:
        return (x @ st[f"layer.attn.{name}.weight"].T + st.get(f"layer.attn.{name}.bias", 0)).view(N, heads, DIM)

    q, k, v = turn(project("q_proj", HEADS)), turn(project("k_proj", KV)), project("v_proj", KV)
    s = scale * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // KV, 1))
    s = cap * (s / cap).tanh() if cap else s
    s = s.masked_fill(torch.ones(N, N).triu(1).bool(), float("-inf")).exp()
    total = s.sum(-1, keepdim=True) + (st["layer.attn.sinks"].exp()[:, None, None] if "layer.attn.sinks" in st else 0)
    o = torch.einsum("hqk,khd->qhd", s / total, v.repeat_interleave(HEADS // KV, 1)).reshape(N, -1)
    return o @ st["layer.attn.o_proj.weight"].T + st.get("layer.attn.o_proj.bias", 0)


def attn(**changes: Any) -> Attn:
    return replace(Attn("attn", D, HEADS, KV, DIM, kv=0), **changes)


THETA, ORIGINAL, FACTOR = 100.0, 16, 4.0
SHORT, LONG = (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 3.0, 4.0)
SCALINGS: dict[str, Any] = {
    "default": None,
    "linear": LinearScaling(FACTOR),
    "dynamic": DynamicNtk(FACTOR, ORIGINAL),
    "llama3": Llama3(FACTOR, 1.0, 4.0, ORIGINAL),
    "yarn": Yarn(FACTOR, ORIGINAL, 4.0, 1.0),
    "longrope": LongRope(SHORT, LONG, ORIGINAL, FACTOR),
    "longrope, short": LongRope(SHORT, LONG, N, FACTOR),
}


def frequencies(kind: str, dim: int) -> tuple[Tensor, float]:
    """Each rule from its paper or from the model that brought it, one frequency after the other."""
    plain = [THETA ** (-2 * i / dim) for i in range(dim // 2)]
    factor = 1.0
    if kind == "linear":
        plain = [f / FACTOR for f in plain]
    elif kind == "dynamic":
        theta = THETA * (FACTOR * N / ORIGINAL - (FACTOR - 1)) ** (dim / (dim - 2))
        plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    elif kind == "llama3":  # turns in ORIGINAL positions: fewer than 1 scaled, more than 4 kept, a line between
        keep = [min(max((ORIGINAL * f / (2 * math.pi) - 1.0) / 3.0, 0.0), 1.0) for f in plain]
        plain = [f * (k + (1 - k) / FACTOR) for f, k in zip(plain, keep, strict=True)]
    elif kind == "yarn":
        edge = [dim * math.log(ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (4.0, 1.0)]
        low, high = max(math.floor(edge[0]), 0), min(math.ceil(edge[1]), dim - 1)
        ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
        plain, factor = [f / FACTOR * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)], 0.1 * math.log(FACTOR) + 1
    elif kind.startswith("longrope"):
        short = "short" in kind
        plain = [f / d for f, d in zip(plain, (SHORT if short else LONG) * (dim // 8), strict=True)]
        factor = math.sqrt(1 + math.log(FACTOR) / math.log(N if short else ORIGINAL))
    return torch.tensor(plain, dtype=torch.float64), factor


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [DIM, DIM // 2])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rope(kind: str, dim: int, interleaved: bool) -> None:
    scaling = SCALINGS[kind]
    if isinstance(scaling, LongRope):
        scaling = replace(scaling, short=SHORT * (dim // 8), long=LONG * (dim // 8))
    freqs, factor = frequencies(kind, dim)
    rope = Rope(dim, THETA, 64, scaling, interleaved)
    check(decoder(attn(rope=rope)), lambda st, x: attention(st, x, lambda t: rotate(t, freqs, factor, interleaved)))


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"sinks": True}, {}),
        ({"qkv_bias": True, "o_bias": True}, {}),
        ({"scale": 0.7}, {"scale": 0.7}),
        ({"softcap": 0.5}, {"cap": 0.5}),
    ],
)
def test_attention_without_positions(changes: dict[str, Any], options: dict[str, float]) -> None:
    check(decoder(attn(**changes)), lambda st, x: attention(st, x, **options))


ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"), "relu2": lambda t: F.relu(t) ** 2}


def ffn(st: State, x: Tensor, at: str, act: str, gated: bool = True) -> Tensor:
    def product(name: str, t: Tensor) -> Tensor:
        return t @ st[f"{at}.{name}_proj.weight"].T + st.get(f"{at}.{name}_proj.bias", 0)

    up = product("up", x)
    return product("down", ACTS[act](product("gate", x)) * up if gated else ACTS[act](up))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_mlp(act: str, gated: bool, bias: bool) -> None:
    check(decoder(MLP("mlp", D, FF, act, gated, bias)), lambda st, x: ffn(st, x, "layer.mlp", act, gated))


@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "topk_softmax", "sigmoid"])
def test_moe(scoring: str, renormalize: bool, correction: bool, shared: str) -> None:
    moe = MoE("moe", D, FF, 6, 2, "gelu", scoring, renormalize, 2.5, "bias" if correction else None,
              None if shared == "none" else MLP("shared", D, FF), "shared_gate" if shared == "gated" else None)  # fmt: skip

    def formula(st: State, x: Tensor) -> Tensor:
        logits, rows = x @ st["layer.moe.gate.weight"].T, []
        for h, row in zip(x, logits, strict=True):
            score = {"softmax": row.softmax(-1), "topk_softmax": row, "sigmoid": row.sigmoid()}[scoring]
            ids = (score + st.get("layer.moe.bias", 0)).topk(2).indices
            w = score[ids].softmax(-1) if scoring == "topk_softmax" else score[ids] / (score[ids].sum() if renormalize else 1)
            rows.append(2.5 * sum(p * ffn(st, h, f"layer.moe.experts.{e}", "gelu") for p, e in zip(w, ids.tolist(), strict=True)))
        y = torch.stack(rows)
        if shared != "none":
            gate = (x @ st["layer.moe.shared_gate.weight"].T).sigmoid() if shared == "gated" else 1
            y = y + gate * ffn(st, x, "layer.moe.shared", "silu")
        return y

    check(decoder(moe), formula)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(bias: bool) -> None:
    def formula(st: State, x: Tensor) -> Tensor:
        h = F.layer_norm(x, (D,), st["layer.ln.weight"], st["layer.ln.bias"] if bias else None, EPS)
        return ffn(st, h, "layer.mlp", "silu")

    check(decoder(MLP("mlp", D, FF), LayerNorm("ln", D, EPS, bias)), formula)


def test_rms_norm_stored_minus_one() -> None:
    def formula(st: State, x: Tensor) -> Tensor:
        h = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (st["layer.ln.weight"] + 1)
        return ffn(st, h, "layer.mlp", "silu")

    check(decoder(MLP("mlp", D, FF), RMSNorm("ln", D, EPS, plus_one=True)), formula)


def test_learned_positions_scale_and_cap() -> None:
    spec = decoder(MLP("mlp", D, FF), positions=Embedding("wpe", 64, D), embed_scale=3.0, logit_softcap=30.0)
    state = loud(spec)
    st = {k: v.double() for k, v in state.items()}
    x = 3 * st["embed.weight"][IDS] + st["wpe.weight"][:N]
    raw = (x + ffn(st, x, "layer.mlp", "silu")) @ st["embed.weight"].T
    for fuse in (True, False):  # the cap has a slope of at most 1: the bound of the raw logits, as in `check`
        got, limit = run(spec, state, fuse).double(), 3e-5 * raw.abs().max().item()
        torch.testing.assert_close(got, 30 * torch.tanh(raw / 30), rtol=0, atol=limit)
