"""The decode step as a chain of products: norms ahead of a product and the residual behind it inside the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyllm.layers import MLP, Attn, Decoder, Dense, Embedding, LayerNorm, Linear, Part, RMSNorm, Rope, Split, Sub, bind
from pyllm.plan.explain import explain
from tests.layers.custom import mine, random_state
from tests.models.paged import Paged

VOCAB = 512


def llama(d: int, heads: int, kv: int, ff: int, layers: int = 2, act: str = "silu") -> Decoder:
    dim = d // heads

    def layer(i: int) -> tuple[Sub, Sub]:
        at = f"model.layers.{i}"
        attn = Attn("attn", d, heads, kv, dim, kv=i, rope=Rope(dim), qkv_bias=True)
        return Sub(at, RMSNorm("norm1", d, 1e-6), attn), Sub(at, RMSNorm("norm2", d, 1e-6), MLP("mlp", d, ff, act))

    head = Linear(d, (Part("lm_head", VOCAB, split=Split.PAD),), "col")
    subs = tuple(sub for i in range(layers) for sub in layer(i))
    return Decoder(Embedding("model.embed_tokens", VOCAB, d), subs, RMSNorm("model.norm", d, 1e-6), head)


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "pyllm":
            self.seen.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def step(spec: Decoder, tokens: int, dtype: torch.dtype, device: str, fuse: bool) -> tuple[torch.Tensor, list[str]]:
    """Logits of a prompt of 20 tokens, then of a step of `tokens` sequences that each add one, and the ops of the latter."""
    bound = bind(spec, random_state(spec), dtype=dtype, device=device, fuse=fuse)
    paged, watch = Paged(spec, tokens, 24, dtype=dtype, device=device), Watch()
    ids = torch.randint(0, VOCAB, (21, tokens), generator=torch.Generator().manual_seed(1))
    bound(paged.step([ids[:20, i] for i in range(tokens)]))
    batch = replace(paged.step([ids[20:, i] for i in range(tokens)]), max_q=1)
    with watch:
        return bound(batch).double().cpu(), watch.seen


def always(monkeypatch: pytest.MonkeyPatch, most: int = 8) -> None:
    monkeypatch.setattr(Dense, "norms", lambda self, rows, *args: rows <= most)
    monkeypatch.setattr(Dense, "adds", lambda self, rows, *args: rows <= most)


def test_the_chain_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references of the fused ops in a whole model: nearer to fp32 than the separate ops, which round three times more a body."""
    always(monkeypatch)
    spec = llama(64, 4, 2, 96)
    exact = step(spec, 3, torch.float32, "cpu", False)[0]
    (fused, seen), (separate, _) = (step(spec, 3, torch.bfloat16, "cpu", fuse) for fuse in (True, False))
    moved = [((y - exact).norm() / exact.norm()).item() for y in (fused, separate)]
    assert 0 < moved[0] < 1.2 * moved[1] < 0.05 and not torch.equal(fused, separate)
    products = [op for op in seen if op in ("norm_linear", "skinny_linear")]
    assert products == ["norm_linear", "skinny_linear"] * 4 + ["norm_linear"]  # into and out of each body, and the head


def test_explain_shows_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    rows = [(r.what, r.op) for r in explain(llama(64, 4, 2, 96), context=8).rows]
    one = [
        ("norm, q_proj+k_proj+v_proj", "norm_linear"),
        ("rope+append", "qk_norm_rope_append"),
        ("o_proj+add", "skinny_linear"),
        ("norm, gate_proj+up_proj, silu * up", "norm_linear"),
        ("down_proj+add", "skinny_linear"),
    ]
    assert [r for r in rows if not r[0].startswith("kv[")][1:-1] == [*one, *one, ("norm, lm_head", "norm_linear")]
    assert not [r for r in explain(llama(64, 4, 2, 96), context=8, fuse=False).rows if r.op == "norm_linear"]


def test_where_the_chain_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LayerNorm, a norm behind a body, a scaled step and parallel branches keep their ops; the logits stay those of the model."""
    always(monkeypatch)
    plain = llama(64, 4, 2, 96)
    sub = plain.subs[1]
    others = (replace(sub, pre=LayerNorm("norm2", 64, 1e-6)), replace(sub, post=RMSNorm("post", 64, 1e-6)), replace(sub, scale=0.5))
    for spec in (*(replace(plain, subs=(plain.subs[0], other, *plain.subs[2:])) for other in others), mine()):
        if spec.vocab_size != VOCAB:
            spec = replace(spec, embed=Embedding("model.embed_tokens", VOCAB, 64), head=plain.head)
        exact = step(spec, 2, torch.float32, "cpu", False)[0]
        fused = step(spec, 2, torch.bfloat16, "cpu", True)[0]
        assert (fused - exact).norm() < 0.05 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 40])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_the_chain_on_the_gpu(tokens: int, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of Llama 3.2 1B's width: up to 8 rows the chain runs, beyond it the separate ops; both are as near to the fp32 model."""
    always(monkeypatch)
    spec = llama(2048, 32, 8, 4096, act=act)
    exact = step(spec, tokens, torch.float32, "cpu", False)[0]
    (fused, seen), (separate, apart) = (step(spec, tokens, torch.bfloat16, "cuda", fuse) for fuse in (True, False))
    moved = [((y - exact).norm() / exact.norm()).item() for y in (fused, separate)]
    assert moved[0] < 1.2 * moved[1] < 0.05
    rows = [r.op for r in explain(spec, batch=tokens, context=21).rows]
    assert [op for op in seen if op == "norm_linear"] == [op for op in rows if op == "norm_linear"]
    assert seen.count("rms_norm") == sum(op == "rms_norm" for op in rows) and "norm_linear" not in apart
