"""A decoder no library has a class for, and random checkpoints for any declaration."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.layers import MLP, Attn, Decoder, Embedding, Linear, MoE, Part, RMSNorm, Rope, Spec, Split, Sub, Sum, plan, walk

D, HEADS, KV, DIM, FF, VOCAB, WINDOW, EPS = 64, 4, 2, 16, 96, 50, 4, 1e-6


def mine(layers: int = 8) -> Decoder:
    """Attention and FFN in parallel under one norm, QK-norm, 3 windowed layers to 1 global NoPE layer, MoE every second layer, and each
    global
    layer after the first reads the first global layer's KV cache."""

    def layer(i: int) -> Sub:
        glob = i % 4 == 3
        attn = Attn("attn", D, HEADS, KV, DIM, kv=3 if glob else i, own_kv=not glob or i == 3, qk_norm=RMSNorm("{}_norm", DIM, EPS),
                    rope=None if glob else Rope(DIM), window=None if glob else WINDOW)  # fmt: skip
        ffn = MoE("moe", D, FF, 4, 2) if i % 2 else MLP("mlp", D, FF)
        return Sub(f"model.layers.{i}", RMSNorm("norm", D, EPS), Sum((attn, ffn)))

    head = Linear(D, (Part("lm_head", VOCAB, split=Split.PAD),), "col")
    return Decoder(Embedding("model.embed_tokens", VOCAB, D), tuple(map(layer, range(layers))), RMSNorm("model.norm", D, EPS), head)


def random_state(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint with every tensor that the declaration reads: matrices scaled by 1/sqrt(inputs), norm weights around 1."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for path, node in walk(spec):
        for w in node.weights().values():
            for i, name in enumerate(w.sources(path)):
                shape = w.shape(w.parts[i % len(w.parts)])
                t = torch.randn(shape, generator=generator)
                norm = type(node).__name__ in ("RMSNorm", "LayerNorm") and w.suffix == "weight"
                state.setdefault(name, t * 0.1 + 1 if norm else t / shape[-1] ** 0.5 if len(shape) > 1 else t * 0.1)
    assert sorted(state) == sorted({s for item in plan(spec) for s in item.sources})
    return state
